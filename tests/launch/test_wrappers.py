"""Data parallelism written out averages gradients as torch's own does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pytest_ddpperf.suite.wrappers import Blocking, Bucketed, Wrapper, buckets
from tests.launch.conftest import Bench

WRAPPERS: dict[str, Callable[[nn.Module], Wrapper]] = {
    "naive": partial(Blocking, flat=False),
    "flat": partial(Blocking, flat=True),
    "overlapped": partial(Bucketed, bucket_mb=0),
    "a bucket a gradient": lambda module: Bucketed(module, 1e-6),
    "buckets": lambda module: Bucketed(module, 0.0005),
    "one bucket": lambda module: Bucketed(module, 1000),
}


def trained(
    ctx: Any, wrap: Callable[[nn.Module], nn.Module]
) -> tuple[list[torch.Tensor], float]:
    """The parameters after three steps on data of the rank's own, begun from what rank 0 has; and
    the time waited."""
    torch.manual_seed(ctx.rank)  # another net on each rank, until it is wrapped
    net = wrap(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    source = torch.Generator().manual_seed(100 + ctx.rank)
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.randn(5, 8, generator=source)).square().sum().backward()
        if isinstance(net, Wrapper):
            net.finish()
        optimizer.step()
    return [parameter.detach() for parameter in net.parameters()], getattr(
        net, "seconds_waited", 0.0
    )


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapper_trains_as_torchs_does(bench: Bench, name: str) -> None:
    for (own, waited), (expected, _) in zip(
        bench.call(trained, WRAPPERS[name]),
        bench.call(trained, DistributedDataParallel),
        strict=True,
    ):
        assert waited > 0
        for parameter, other in zip(own, expected, strict=True):
            torch.testing.assert_close(parameter, other)


def test_buckets_hold_the_last_parameters_first_and_no_more_than_they_may() -> (
    None
):
    parameters = [torch.zeros(size) for size in (100, 10, 20, 30, 5)]
    filled = buckets(parameters, 4 * 50)
    assert [[len(parameter) for parameter in bucket] for bucket in filled] == [
        [5, 30],
        [20, 10],
        [100],
    ]
