"""The fixtures as users have them, on real Gloo ranks of this very run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pytest_ddpperf import Context, DdpBenchmark, DdpRun

pytestmark = pytest.mark.ddp(world_size=2, backend="gloo", device="cpu")


def inputs(rank: int) -> torch.Tensor:
    return torch.arange(8.0).reshape(2, 4) + rank


def gradient(model: nn.Module, rank: int) -> torch.Tensor:
    model(inputs(rank)).square().sum().backward()
    parameter = next(model.parameters()).grad
    assert parameter is not None
    return parameter


def test_ddp_averages_gradients(ddp_run: DdpRun) -> None:
    def in_rank(ctx: Context) -> torch.Tensor:
        torch.manual_seed(3)
        return gradient(DistributedDataParallel(nn.Linear(4, 3)), ctx.rank)

    alone = []
    for rank in range(2):
        torch.manual_seed(3)
        alone.append(gradient(nn.Linear(4, 3), rank))
    for found in ddp_run(in_rank):
        torch.testing.assert_close(found, (alone[0] + alone[1]) / 2)


def test_replicas_begin_equal_and_stay_equal(ddp_run: DdpRun) -> None:
    """Each rank makes another net and has other data; rank 0's parameters are sent to all."""

    def in_rank(ctx: Context) -> list[list[float]]:
        torch.manual_seed(ctx.rank)
        model = DistributedDataParallel(
            nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        states = []
        for _ in range(6):
            states.append(
                nn.utils.parameters_to_vector(model.parameters()).tolist()
            )
            optimizer.zero_grad()
            gradient(model, ctx.rank)
            optimizer.step()
        return states

    first, second = ddp_run(in_rank)
    assert first == second  # bit by bit
    assert first[0] != first[-1]
    torch.manual_seed(1)
    own = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    assert second[0] != nn.utils.parameters_to_vector(own.parameters()).tolist()


@pytest.mark.ddp(steps=4, min_time=0, launches=2, warmup=2)
def test_a_training_step_is_timed(ddp_benchmark: DdpBenchmark) -> None:
    def setup(ctx: Context) -> Any:
        model = DistributedDataParallel(nn.Linear(4, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step() -> None:
            optimizer.zero_grad()
            gradient(model, ctx.rank)
            optimizer.step()

        return step

    result = ddp_benchmark(setup, batch_size=2, gate=False)
    assert [[len(rank) for rank in launch] for launch in result.samples] == [
        [4, 4],
        [4, 4],
    ]
    assert 0 < result.p10 <= result.p95
    assert result.environment.must_match["timing"] == "step"
    assert result.verdict == "NOT GATED"
