"""The private names of torch: that the installed one has each, and what comes of one that it
lacks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from pytest_ddpperf.rank import torch_names
from pytest_ddpperf.rank.rpc_meter import RpcMeter
from pytest_ddpperf.rank.torch_names import (
    NAMES,
    TorchName,
    find,
    need,
    replace,
)

ABSENT = TorchName(
    "torch.autograd:absent.name", "test", "nothing", "2.11", False
)


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_this_torch_has_each_name(name: TorchName) -> None:
    if name.needs_nccl and not dist.is_nccl_available():
        pytest.skip("this torch was built without NCCL")
    if torch.torch_version.TorchVersion(torch.__version__) < name.since:
        pytest.skip(f"since torch {name.since}")
    assert find(name.path) is not None, (
        f"used to {name.used_for}: {name.unknown}"
    )


# the last words of names that are read as attributes, or whose path is put together
OTHERWISE = {
    "send",
    "recv",
    "recv_anysource",
    "update",
    "serialize",
    "deserialize",
    "fp32_precision",
    "ProcessGroupGloo",
    "TorchDispatchMode",
}


def is_used(path: str, text: str) -> bool:
    attributes = path.partition(":")[2]
    last = attributes.rpartition(".")[2]
    if f":{attributes}" in text:
        return True
    is_private = last.startswith("_") and not last.startswith("__")
    return (is_private or last in OTHERWISE) and last in text


def test_each_name_is_used() -> None:
    folder = Path(torch_names.__file__).parent
    texts = [
        path.read_text()
        for path in folder.glob("*.py")
        if path.stem != "torch_names"
    ]
    unused = {
        path for path in NAMES if not any(is_used(path, text) for text in texts)
    }
    assert not unused


def test_a_name_that_torch_lacks_is_none_or_an_error_that_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(NAMES, ABSENT.path, ABSENT)
    assert find(ABSENT.path) is None
    for ask in (need, lambda path: replace(path, lambda original: original)):
        with pytest.raises(
            AttributeError, match=r"has no torch\.autograd:absent\.name"
        ):
            ask(ABSENT.path)


def test_a_module_that_torch_lacks_has_no_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    absent = ABSENT._replace(path="torch.absent:name")
    monkeypatch.setitem(NAMES, absent.path, absent)
    assert find(absent.path) is None


def test_a_function_is_replaced_where_torch_looks_it_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        torch.autograd, "grad", SimpleNamespace(is_original=True)
    )
    replace("torch.autograd:grad", lambda original: (original, "wrapped"))
    assert torch.autograd.grad == (SimpleNamespace(is_original=True), "wrapped")


def test_what_rpc_sends_is_unknown_if_torch_lacks_a_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "torch.distributed.autograd:_retrieve_context"
    monkeypatch.setitem(NAMES, name, NAMES[name]._replace(path="torch:absent"))
    meter = RpcMeter()
    meter.install()
    assert meter.close() == {}
    (note,) = meter.notes
    assert note.startswith(
        "what a step sends by RPC is unknown: AttributeError: torch "
    )
    assert note.endswith(f"has no {name}")
