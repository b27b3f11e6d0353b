"""Whole runs on a pretended GPU: what is measured, judged and reported there, without CUDA.
The device is that of `pretended`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.integration.conftest import Run, last_line
from tests.integration.pretended import PRETENDED

# A training step whose host only queues work: LASTS milliseconds, a tenth of which is the forward
# pass.
TRAINS = """
import os, sys
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

def training(ctx):
    from pretended import device
    assert (ctx.device, ctx.backend) == (torch.device("cuda", ctx.rank), "nccl")
    lasts = float(os.environ.get("LASTS", "5"))
    more = float(os.environ.get("MORE", "0"))
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)
        def forward(self, x):
            device.work(lasts / 10)
            return self.inner(x)
    net, x = DDP(Net()), torch.ones(2, 4)
    def step():
        loss = net(x).sum()
        device.work(lasts - lasts / 10)
        if more and ctx.rank == 1:
            device.work(more, "void extra<float>(float*)")
        loss.backward()
        return {"loss": loss}
    return step

def test_step(ddp_benchmark):
    ddp_benchmark(training)
"""
# The same in a program that owns its loop, on either way of taking turns.
LOOPS = """
import pytest

def program(ctx):
    import torch.distributed as dist
    from pretended import device
    dist.init_process_group("nccl")
    step, model = training(ctx), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(10**9):
        step()
        optimizer.step()
        device.allocations += number == 3  # in the warm-up

def test_program(ddp_benchmark):
    ddp_benchmark.loop(program)

@pytest.mark.ddp(turns="launches")
def test_program_in_whole_launches(ddp_benchmark):
    ddp_benchmark.loop(program)
"""
ON_DEVICES = (
    "--ddp-world-size=2",
    "--ddp-backend=nccl",
    "--ddp-preload=pretended",
    "--ddp-warmup=5",
)


@pytest.fixture(autouse=True)
def project(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(pretended=PRETENDED, test_device=TRAINS)
    pytester.makeini("[pytest]\npythonpath = .\n")


def measured(pytester: pytest.Pytester) -> Any:
    (found,) = json.loads((pytester.path / "run.json").read_text())[
        "measurements"
    ]
    return found


def test_a_step_on_devices_is_measured_saved_and_compared(
    pytester: pytest.Pytester, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run(*ON_DEVICES, "--ddp-save-baseline", "--ddp-json=run.json")
    result.assert_outcomes(passed=1)
    found = measured(pytester)
    steps = [
        seconds
        for launch in found["measurement"]["samples"]["step_seconds"]
        for seconds in launch
    ]
    assert steps == pytest.approx([0.005] * 30)
    counters = found["measurement"]["counters"]
    assert (
        counters["all_reduce.bytes"],
        counters["host_syncs"],
        counters["peak_memory.bytes"],
    ) == (80, 0, 1 << 20)
    assert found["measurement"]["phases"][0]["own"]["forward"] == pytest.approx(
        [0.0005, 0.0005]
    )
    assert (
        found["measurement"]["environment"]["key"]["device_model"]
        == "Pretended"
    )
    assert found["notes"] == []
    samples = found["measurement"]["samples"]
    for launch in samples["device_seconds"]:
        assert launch == pytest.approx([0.005, 0.005])
    assert counters["kernels.count"] == 2
    assert found["busy_share"] == pytest.approx(1)
    (kernel,) = found["measurement"]["kernels"]
    assert (kernel["name"], kernel["calls"]) == ("gemm", 2)
    (name,) = (
        folder.name
        for folder in (pytester.path / "baselines").iterdir()
        if folder.is_dir()
    )
    assert name == "cuda-pretended-80gib-nccl-ws2-1x2"

    assert (
        last_line(run(*ON_DEVICES))
        == "compared with baselines: 1 passed (1 of 1 compared)"
    )
    monkeypatch.setenv("LASTS", "25")
    result = run(*ON_DEVICES)
    assert (
        last_line(result)
        == "compared with baselines: 1 regressed (1 of 1 compared)"
    )
    result.stdout.fnmatch_lines(
        ["REGRESSED: step time p50 5.00 -> 25.0 ms, 5.00x *"]
    )


def test_launches_on_devices_keep_as_many_steps_as_each_other(
    pytester: pytest.Pytester, run: Run
) -> None:
    """Of steps and of a program in stretches, and of a program in whole launches. By the host's time
    a step is short: thousands of them fill the window."""
    pytester.makepyfile(test_device=TRAINS + LOOPS)
    long = ("--ddp-min-time=0.1", "--ddp-max-launches=40", "--ddp-steps=10")
    result = run(
        *ON_DEVICES,
        *long,
        "--ddp-against-env=LASTS=5",
        "--ddp-turns=stretches",
        "--ddp-json=run.json",
        own=True,
    )
    result.assert_outcomes(passed=3)
    report = json.loads((pytester.path / "run.json").read_text())
    assert len(report["measurements"]) == 3
    for found in report["measurements"]:
        kept = {
            len(launch)
            for launch in found["measurement"]["samples"]["step_seconds"]
        }
        assert len(kept) == 1, "launches that are compared keep as many steps"
        assert max(kept) <= 75, "of 40 launches of two ranks, 6,000 figures"
        assert found["verdict"]["status"] == "PASS"


def test_a_rank_with_another_kernel_is_red_and_both_are_named(
    pytester: pytest.Pytester, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 % more work of one device, which a limit of 10 % on the step lets pass."""
    monkeypatch.setenv("MORE", "0.2")
    result = run(
        *ON_DEVICES,
        "--ddp-against-env=MORE=0",
        "--ddp-threshold=p50:10%,device:3%",
        "--ddp-turns=launches",
        "--ddp-max-launches=40",
        own=True,
    )
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        [
            "REGRESSED: kernels' time on the device 5.00 -> 5.20 ms, +4.0 % * (limit 3 %)",
            "why: rank 1: device +200 us: extra<float> +200 us (0 -> 1 calls)*",
        ]
    )
