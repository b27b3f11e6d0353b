"""The private names of torch: that the installed one has each, and what comes of one that it
lacks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from packaging.requirements import Requirement

from pytest_ddpperf.rank import torch_names
from pytest_ddpperf.rank.rpc_meter import RpcMeter
from pytest_ddpperf.rank.torch_names import (
    ENGINE,
    NAMES,
    OF_NCCL,
    SINCE,
    find,
    need,
    replace,
)
from tests.torch_version import TORCH, release_of

ABSENT = "torch.autograd:absent.name"


@pytest.mark.parametrize("name", NAMES)
def test_this_torch_has_each_name(name: str) -> None:
    if name in OF_NCCL and not dist.is_nccl_available():
        pytest.skip("this torch was built without NCCL")
    since = SINCE.get(name, "2.6")
    if release_of(since) > TORCH:
        pytest.skip(f"since torch {since}")
    assert find(name) is not None, "the table says what needs it"


@pytest.mark.parametrize(
    ("version", "is_enough"),
    [
        ("2.5.1", False),
        ("2.6.0+cpu", True),
        # of NVIDIA's images, which pip would replace
        ("2.11.0a0+a6c236b9fd.nv26.01", True),
        ("2.15.0.dev20261101+cu130", True),
    ],
)
def test_pip_leaves_an_installed_torch_alone_from_the_lowest_of_the_table_on(
    version: str, is_enough: bool
) -> None:
    folder = Path(torch_names.__file__).parents[2]
    (line,) = (
        each.strip()
        for each in (folder / "pyproject.toml").read_text().splitlines()
        if each.strip().startswith('"torch>=')
    )
    asked = Requirement(line.strip('",'))
    assert asked.specifier.contains("2.6")
    assert min(map(release_of, SINCE.values())) > (2, 6)
    # as pip asks of what is installed
    found = asked.specifier.contains(version, prereleases=True)
    assert found == is_enough


def test_a_development_build_counts_as_its_release() -> None:
    assert release_of("2.14.0a0+a6c236b9fd.nv26.01") == (2, 14)
    assert release_of("2.9") == release_of("2.9.1+cpu")


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
    "ignore_compile_internals",
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
    texts = []
    for path in folder.glob("*.py"):
        text = path.read_text()
        if path.stem == "torch_names":
            _, _, text = text.partition("def _place")  # below the table
        texts.append(text)
    unused = {
        path for path in NAMES if not any(is_used(path, text) for text in texts)
    }
    assert unused == {*ENGINE}
    assert any("in torch_names.ENGINE:" in text for text in texts)


def test_a_name_that_torch_lacks_is_none_or_an_error_that_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(NAMES, ABSENT, ABSENT)
    assert find(ABSENT) is None
    for ask in (need, lambda path: replace(path, lambda original: original)):
        with pytest.raises(
            AttributeError, match=r"has no torch\.autograd:absent\.name"
        ):
            ask(ABSENT)


def test_a_module_that_torch_lacks_has_no_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    absent = "torch.absent:name"
    monkeypatch.setitem(NAMES, absent, absent)
    assert find(absent) is None


def test_a_function_is_replaced_where_torch_looks_it_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def original() -> str:
        return "original"

    engine, _ = ENGINE
    monkeypatch.setattr(torch.autograd, "_engine_run_backward", original)
    replace(engine, lambda function: lambda: [function()])
    assert find(engine)() == ["original"]


def test_what_rpc_sends_is_unknown_if_torch_lacks_a_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "torch.distributed.autograd:_retrieve_context"
    monkeypatch.setitem(NAMES, name, "torch:absent")
    meter = RpcMeter()
    meter.install()
    assert meter.close() == {}
    (note,) = meter.notes
    assert note.startswith(
        "what a step sends by RPC is unknown: AttributeError: torch "
    )
    assert note.endswith(f"has no {name}")
