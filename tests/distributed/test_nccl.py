"""NCCL and the accelerator's clock, where there is a CUDA device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pytest_ddpperf import Context, DdpBenchmark, DdpRun

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.ddp(world_size=1, backend="nccl", device="cuda"),
]


def test_nccl_reduces_and_tensors_arrive_on_the_cpu(ddp_run: DdpRun) -> None:
    def in_rank(ctx: Context) -> torch.Tensor:
        value = torch.full((2,), 3.0, device=ctx.device)
        dist.all_reduce(value)
        return value

    (found,) = ddp_run(in_rank)
    assert found.device.type == "cpu"
    assert found.tolist() == [3.0, 3.0]


@pytest.mark.parametrize(
    "timing",
    [
        pytest.param(timing, marks=pytest.mark.ddp(timing=timing))
        for timing in ("free", "step")
    ],
)
def test_a_training_step_is_timed_in_both_modes(
    ddp_benchmark: DdpBenchmark, timing: str
) -> None:
    def setup(ctx: Context) -> Any:
        model = DistributedDataParallel(nn.Linear(2048, 2048).to(ctx.device))
        x = torch.randn(512, 2048, device=ctx.device)

        def step() -> None:
            model(x).sum().backward()

        return step

    result = ddp_benchmark(setup, batch_size=512, gate=False)
    assert all(
        seconds > 0 for launch in result.step_seconds for seconds in launch
    )
    assert result.environment.must_match["timing"] == timing
    assert result.environment.key["device_type"] == "cuda"
    assert result.environment.key["device_model"]


def test_free_is_the_default_on_a_device(ddp_benchmark: DdpBenchmark) -> None:
    def setup(ctx: Context) -> Any:
        x = torch.ones(8, device=ctx.device)
        return lambda: dist.all_reduce(x)

    result = ddp_benchmark(setup, gate=False)
    assert result.environment.must_match["timing"] == "free"
    assert result.verdict == "NOT GATED"
