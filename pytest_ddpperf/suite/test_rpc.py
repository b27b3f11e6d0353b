"""PyTorch's "DDP and RPC" benchmark (torch/distributed/benchmarks/benchmark_ddp_rpc.py): sparse embeddings on parameter
servers, dense layers under DDP, a master that hands out the tables."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F

from pytest_ddpperf import Result, RpcBenchmark, RpcContext
from pytest_ddpperf.suite.hybrid import EMBEDDINGS, HybridModel, columns_on, epoch_of_batches
from pytest_ddpperf.suite.sizes import asked, cores
from pytest_ddpperf.suite.tables import Table, Tables, about

PERCENTILES = (50, 75, 90, 95)
ORIGINALS = 8  # trainers, and parameter servers


class Hybrid(Table):
    """The original's table: a row a trainer, and one for all; its "epoch/sec" are examples a second."""

    def __init__(self) -> None:
        self._result: Result | None = None

    def add(self, result: Result) -> None:
        self._result = result

    def lines(self) -> Iterator[str]:
        assert self._result is not None
        yield "---------- Info ---------"
        yield ""
        yield from about(self._result)
        yield ""
        yield "------------------  PyTorch Distributed Benchmark (DDP and RPC) ---------------------"
        yield ""
        yield (" " * 18 + "  sec/epoch  epoch/sec  " * len(PERCENTILES)).rstrip()
        trainers = range(len(self._result.samples[0]))
        examples = [
            fmean(told or 0.0 for launch in self._result.recorded["examples"] for told in launch[trainer])
            for trainer in trainers
        ]
        durations = [[step for launch in self._result.samples for step in launch[trainer]] for trainer in trainers]
        for trainer in trainers:
            yield _row(f"Trainer{trainer}", durations[trainer], examples[trainer])
        yield _row("All", [step for own in durations for step in own], sum(examples))


def _row(who: str, durations: Sequence[float], examples: float) -> str:
    taken = torch.tensor(durations, dtype=torch.float64)
    text = f"{who:>12}:"
    for q in PERCENTILES:
        seconds = float(taken.quantile(q / 100))  # interpolated linearly, as the original's
        text += f"  p{q:02d}:  {seconds:1.3f}s  {examples / seconds:6.0f}/s"
    return text


def master(ctx: RpcContext) -> list[Any]:
    """A table on each parameter server, as many columns of the embeddings as it has a share of."""
    from torch.distributed import rpc

    servers = ctx.workers["parameter_server"]
    return [
        rpc.remote(server, torch.nn.EmbeddingBag, (EMBEDDINGS, columns_on(number, len(servers))), {"mode": "sum"})
        for number, server in enumerate(servers)
    ]


def trainer(ctx: RpcContext, tables: Sequence[Any]) -> Callable[[], int]:
    """An epoch of ten batches of its own."""
    import torch.distributed.autograd as dist_autograd
    from torch.distributed.optim import DistributedOptimizer

    torch.manual_seed(ctx.seed)
    model = HybridModel(tables, ctx.device)
    optimizer: Any = DistributedOptimizer(  # type: ignore[no-untyped-call]
        torch.optim.SGD, model.parameter_references(), lr=0.05
    )
    batches = epoch_of_batches(random.Random(ctx.rank))

    def epoch() -> int:
        examples = 0
        for indices, offsets, targets in batches:
            with dist_autograd.context() as context:
                loss = F.cross_entropy(model(indices, offsets), targets.to(ctx.device))
                dist_autograd.backward(context, [loss])  # type: ignore[attr-defined]
                optimizer.step(context)
            examples += len(targets)
        ctx.record("examples", examples)
        return examples

    return epoch


def test_hybrid(rpc_benchmark: RpcBenchmark, pytestconfig: Any, tables: Tables) -> None:
    """Embeddings on parameter servers by RPC, dense layers under DDP: an epoch's time (PyTorch's DDP+RPC benchmark)."""
    # As many as the original has where the machine carries them, a core each.
    carried = ORIGINALS if cores() > 2 * ORIGINALS else 2
    trainers, servers = (
        None if asked(pytestconfig, option, None) else carried for option in ("ddp_trainers", "ddp_parameter_servers")
    )
    result = rpc_benchmark(trainer, master=master, trainers=trainers, parameter_servers=servers)
    tables.of(Hybrid).add(result)
