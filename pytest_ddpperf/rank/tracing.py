"""A trace of some steps of one rank, in Chrome's format: where the time of a step goes, operation by operation.

The traces of the ranks of a host share a clock and its origin, so they can be laid over each other.
"""

from __future__ import annotations

import os

import torch
from torch.profiler import ProfilerActivity, profile, record_function, supported_activities

from pytest_ddpperf.rank.context import Context
from pytest_ddpperf.rank.group import OwnGroup
from pytest_ddpperf.rank.sampling import Step
from pytest_ddpperf.records.plan import Plan

_STEPS = 3
# Compressed. Viewers take ten times as much in JSON, and become slow from there on.
_MOST_BYTES = 20_000_000


def trace(step: Step, plan: Plan, ctx: Context, own: OwnGroup) -> str:
    """Take some more steps and write their trace to `<plan.trace>-rank0.json.gz`; all ranks call it together.

    Return a note on why there is no trace, else ""."""
    who, on_cpu = plan.name(ctx.rank), ctx.device.type == "cpu"
    path = f"{plan.trace}-{who.replace(' ', '')}.json.gz"
    # Without shapes and stacks, which would make it large.
    with profile(activities=[ProfilerActivity.CPU] if on_cpu else supported_activities()) as profiler:  # type: ignore[no-untyped-call]
        own.barrier()  # or the first step would wait for profilers that start later
        for number in range(1, _STEPS + 1):
            with record_function(f"step {number}"):
                step()
        if not on_cpu:
            torch.accelerator.synchronize()
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        profiler.export_chrome_trace(unfinished := f"{path}.unfinished.gz")
        size = os.path.getsize(unfinished)
        if size > _MOST_BYTES:
            os.remove(unfinished)
            return f"the trace of {who} was removed: {size / 1e6:.0f} MB of at most {_MOST_BYTES / 1e6:.0f} MB"
        os.replace(unfinished, path)
    except OSError as error:
        return f"the trace of {who} could not be written: {error.strerror}: {error.filename}"
    return ""
