"""Traces of steps: what a file holds, and the notes on files that are not kept."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pytest_ddpperf.rank import tracing
from pytest_ddpperf.rank.group import NoGroup
from pytest_ddpperf.records.plan import Plan
from pytest_ddpperf.wire.source_trees import Trees


def traced(prefix: Path) -> str:
    """As rank 1, alone."""
    plan = Plan(world_size=2, backend="gloo", device="cpu", trace=str(prefix))
    rank: Any = SimpleNamespace(
        plan=plan, ctx=SimpleNamespace(rank=1), own=NoGroup(), on_cpu=True
    )
    return tracing.trace(lambda: torch.ones(1) + 1, rank)


def test_a_trace_names_its_steps_and_the_origin_of_its_clock(
    tmp_path: Path,
) -> None:
    assert traced(tmp_path / "new" / "now") == ""
    found = json.loads(
        gzip.decompress((tmp_path / "new" / "now-rank1.json.gz").read_bytes())
    )
    names = [
        event["name"]
        for event in found["traceEvents"]
        if event.get("cat") == "user_annotation"
    ]
    assert [name for name in names if name.startswith("step")] == [
        "step 1",
        "step 2",
        "step 3",
    ]
    assert found["baseTimeNanoseconds"]


def test_a_trace_that_is_large_or_cannot_be_written_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.touch()
    assert (
        traced(file / "now")
        == f"the trace of rank 1 could not be written: File exists: {file}"
    )
    monkeypatch.setattr(tracing, "_MOST_BYTES", 1)
    assert (
        traced(tmp_path / "now")
        == "the trace of rank 1 was removed: 0 MB of at most 0 MB"
    )
    assert list(tmp_path.iterdir()) == [file]


def test_sampled_code_may_print_tensors() -> None:
    """Printing iterates over tensors, which raises while something else keeps that frame."""
    trees = Trees(current="/nowhere", base="/nowhere", kept=())
    weights = torch.ones(64, 64, requires_grad=True)
    until = time.monotonic() + 0.3
    with tracing.StackSampler(trees, lambda: True) as sampler:
        while time.monotonic() < until:
            assert str(weights)
    assert sampler.samples.taken > 0
