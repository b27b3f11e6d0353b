"""Whole pytest runs, in processes of their own, on real Gloo ranks. Torch is imported once a run, for three seconds: so
runs are few and a run has many tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

# A step that sleeps for as long as SLEEP says, in milliseconds. Tests plant twelve times as much and allow four: even
# on cores that others use as well, noise decides nothing.
STEP = """
import os, time, pytest, torch
import torch.distributed as dist

def all_reduce():
    dist.all_reduce(torch.ones(1))

def sleeping(ctx):
    seconds = float(os.environ.get("SLEEP", "5")) / 1000
    def step():
        time.sleep(seconds)
        all_reduce()
    return step
"""

# A suspicion is confirmed by as many launches as raised it.
SMALL = ["--ddp-steps=10", "--ddp-launches=3", "--ddp-max-launches=6", "--ddp-warmup=2", "--ddp-threshold=p50:300%"]

Run = Callable[..., pytest.RunResult]


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run pytest on the files of `pytester`: small measurements, no CI, no other plugin that reorders or measures."""
    monkeypatch.delenv("CI", raising=False)
    for name in ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_XDIST_TESTRUNUID"):
        monkeypatch.delenv(name, raising=False)

    def run(*args: str, small: bool = True, benchmark: bool = False) -> pytest.RunResult:
        fixed = ["-p", "no:randomly", "-p", "no:cacheprovider"]
        fixed += [] if benchmark else ["-p", "no:benchmark"]
        fixed += SMALL if small else []
        return pytester.runpytest_subprocess(*fixed, *args, timeout=180)

    return run


def line(result: pytest.RunResult, start: str) -> str:
    """The last line of the output that starts so."""
    return next(line for line in reversed(result.outlines) if line.startswith(start))
