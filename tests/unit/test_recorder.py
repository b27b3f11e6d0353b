"""torch's flight recorders, by what each version of torch has."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from pytest_ddpperf.rank import recorder, torch_names
from pytest_ddpperf.rank.group import NoGroup


@pytest.mark.parametrize(
    ("dump", "variable"),
    [
        (print, "TORCH_FR_BUFFER_SIZE"),
        (None, "TORCH_NCCL_TRACE_BUFFER_SIZE"),  # before torch 2.8
    ],
)
def test_the_size_has_the_name_that_torch_reads(
    dump: object, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        torch_names,
        "find",
        {"torch._C._distributed_c10d:_dump_fr_trace": dump}.get,
    )
    assert [*recorder.size()] == [variable]


def test_each_backend_may_have_a_recorder_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Since torch 2.15 Gloo's is the first, and of the others none is in it."""

    def entry(name: str) -> dict[str, Any]:
        known = dict.fromkeys(recorder._FIELDS, 0)
        return {**known, "process_group": ("0", ""), "profiling_name": name}

    def by_backend(*_: object, backend: str = "gloo") -> bytes:
        return pickle.dumps({"entries": [entry(f"{backend}:all_reduce")]})

    def newer(_: bool, __: bool, ___: bool, backend: str = "gloo") -> bytes:
        return by_backend(backend=backend)

    def older(_: bool, __: bool, ___: bool) -> bytes:
        return by_backend()

    names = (
        "torch._C._distributed_c10d:_dump_fr_trace",
        "torch._C._distributed_c10d:_dump_nccl_trace",
    )
    for function, found in (
        (newer, ["gloo", "nccl2", "nccl-lazy"]),
        (older, ["gloo"]),
    ):
        monkeypatch.setattr(
            torch_names,
            "find",
            dict(zip(names, (function, None), strict=True)).get,
        )
        known = recorder.entries(NoGroup())
        assert known is not None
        assert [
            each["profiling_name"].partition(":")[0] for each in known[0]
        ] == found
