"""torch's flight recorders, by what each version of torch has."""

from __future__ import annotations

import pytest

from pytest_ddpperf.rank import recorder, torch_names


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
