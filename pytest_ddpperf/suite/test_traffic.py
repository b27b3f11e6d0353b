"""The forum thread "Node-to-node communication traffic in Distributed Data Parallel & RPC Model Parallel": which bytes
depend on the batch size, as equalities."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pytest_ddpperf import Context, DdpBenchmark, Result, RpcBenchmark, RpcContext
from pytest_ddpperf.suite.tables import Table, Tables

BATCHES = (1, 4, 16)
CHANNELS, PIXELS = 8, 12  # of what goes over the boundary
FLOAT = 4  # bytes
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda net: torch.optim.SGD(net.parameters(), lr=0.1),
    "Adam": lambda net: torch.optim.Adam(net.parameters()),
}

second_part: list[nn.Module] = []  # on a parameter server


class Traffic(Table):
    """Bytes of a step by what is trained and batch size."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, int, str], int] = {}  # by what, batch size and way

    def add(self, what: str, batch: int, way: str, count: int) -> None:
        self._rows[what, batch, way] = count

    def lines(self) -> Iterator[str]:
        yield "Bytes of tensors that a step sends, by batch size"
        for (what, batch, way), sent in sorted(self._rows.items()):
            yield f"  {what:<24} batch {batch:>4}  {way:<10} {sent:>12,}"


def counted(result: Result, counter: str) -> int:
    """A counter; skips the test where it is unknown, as without warm-up."""
    count = result.counters.get(counter)
    if count is None:
        pytest.skip(f"{counter} could not be counted")
    return count


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("batch", BATCHES)
def test_ddp_traffic(ddp_benchmark: DdpBenchmark, batch: int, optimizer: str, tables: Tables) -> None:
    """DDP reduces as many bytes as there are gradients, whatever the batch size and the optimizer."""

    def setup(ctx: Context) -> Callable[[], None]:
        net = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).to(ctx.device))
        chosen = OPTIMIZERS[optimizer](net)
        inputs = torch.randn(batch, 64, device=ctx.device)

        def step() -> None:
            chosen.zero_grad()
            net(inputs).sum().backward()
            chosen.step()

        return step

    result = ddp_benchmark(setup)
    gradients = (64 * 64 + 64 + 64 * 8 + 8) * FLOAT
    sent = counted(result, "all_reduce.bytes")
    assert sent == result.counters["gradient_bytes"] == gradients
    tables.of(Traffic).add(f"DDP, {optimizer}", batch, "all-reduce", sent)


def run_second_part(values: Tensor, uses: int) -> Tensor:
    """Called by a trainer: what it sent is used so often."""
    outputs = [torch.as_tensor(second_part[0](values)) for _ in range(uses)]
    return torch.stack(outputs).sum(0)


@pytest.mark.ddp(trainers=1, parameter_servers=1, nodes=1)
@pytest.mark.parametrize("uses", [1, 3])
@pytest.mark.parametrize("batch", BATCHES)
def test_rpc_traffic(rpc_benchmark: RpcBenchmark, batch: int, uses: int, tables: Tables) -> None:
    """B x C x W x H go over an RPC boundary each way; a tensor that is used three times sends one gradient."""

    def parameter_server(ctx: RpcContext) -> None:
        second_part.append(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1))

    def trainer(ctx: RpcContext) -> Callable[[], None]:
        import torch.distributed.autograd as dist_autograd
        from torch.distributed import rpc

        first_part = nn.Conv2d(3, CHANNELS, 3, padding=1)
        images = torch.randn(batch, 3, PIXELS, PIXELS)
        (server,) = ctx.workers["parameter_server"]

        def step() -> None:
            with dist_autograd.context() as context:
                values = rpc.rpc_sync(server, run_second_part, (first_part(images), uses))
                dist_autograd.backward(context, [values.sum()])  # type: ignore[attr-defined]

        return step

    result = rpc_benchmark(trainer, parameter_server=parameter_server)
    boundary = batch * CHANNELS * PIXELS * PIXELS * FLOAT
    for way in ("forward", "backward"):  # there and back each, however often it is used there
        sent = counted(result, f"rpc.bytes.{way}")
        assert sent == 2 * boundary
        tables.of(Traffic).add("RPC" if uses == 1 else f"RPC, used {uses} times", batch, way, sent)
