"""What goes over the network beside the payload, by algorithm: the other half of "how much traffic is there?"."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import pytest
import torch
import torch.distributed as dist

from pytest_ddpperf import CollectiveBenchmark, CollectiveResult, Context, DdpRun, node_count
from pytest_ddpperf.suite.sizes import Size
from pytest_ddpperf.suite.tables import Table, Tables


class Wire(Table):
    """Payload beside what goes over the network."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, int], tuple[int, float, float]] = {}  # by collective and ranks

    def add(self, op: str, ranks: int, payload: int, least: float, counted: float) -> None:
        self._rows[op, ranks] = payload, least, counted

    def lines(self) -> Iterator[str]:
        yield "Bytes on the wire, of all ranks: what rings send at least, and what the loopback interface counted"
        for (op, ranks), (payload, least, sent) in self._rows.items():
            yield (
                f"  {op:<16} {ranks:>3} ranks  payload {payload:>12,}  ring {least:>12,.0f}  counted {sent:>12,.0f}"
                f"  {sent / payload:.2f} x payload"
            )


# What all ranks together send of a buffer at least, as multiples of it.
RINGS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda ranks: 2.0 * (ranks - 1),
    "all_gather": lambda ranks: ranks - 1.0,
    "reduce_scatter": lambda ranks: ranks - 1.0,
    "broadcast": lambda ranks: ranks - 1.0,
}


def bytes_sent() -> int | None:
    """Over the loopback interface so far, by all processes of this network namespace; None where it is not told."""
    try:
        lines = Path("/proc/net/dev").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.partition(":")[2].split()[8]) for line in lines if line.strip().startswith("lo:")), None)


def on_the_wire(ctx: Context, op: str) -> tuple[int, float] | str:
    """Bytes of a buffer, and those that all ranks together send for the collective, the median of some; or why they are
    not known."""
    if ctx.device.type != "cpu":
        return "devices of one machine exchange by their links or by shared memory, where nobody counts"
    payload = ctx.world_size * 1_000_000
    whole = torch.zeros(payload // 4)
    parts = list(whole.chunk(ctx.world_size))
    call: Callable[[], object] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather(parts, parts[ctx.rank].clone()),
        "reduce_scatter": lambda: dist.reduce_scatter(parts[ctx.rank].clone(), parts),
        "broadcast": lambda: dist.broadcast(whole, 0),
    }[op]
    taken = []
    for _ in range(5):
        dist.barrier()
        before = bytes_sent()
        dist.barrier()
        call()
        dist.barrier()
        after = bytes_sent()
        if before is None or after is None:
            return "there is no /proc/net/dev that tells of the loopback interface"
        taken.append(after - before)
    return payload, median(taken)


@pytest.mark.parametrize("op", RINGS)
def test_wire(ddp_run: DdpRun, op: str, tables: Tables, pytestconfig: pytest.Config) -> None:
    """What a collective sends over the network beside its payload, by algorithm and as the system counts it."""
    if node_count(pytestconfig) > 1:
        pytest.skip("what ranks of other nodes send is counted there")
    told = ddp_run(on_the_wire, op)
    if isinstance(told[0], str):
        pytest.skip(told[0])
    ranks, (payload, sent) = len(told), told[0]
    least = RINGS[op](ranks) * payload
    tables.of(Wire).add(op, ranks, payload, least, sent)
    assert sent >= least


class Algorithms(Table):
    """NCCL's, by size."""

    def __init__(self) -> None:
        self._rows: list[tuple[str, CollectiveResult]] = []

    def add(self, algorithm: str, result: CollectiveResult) -> None:
        self._rows.append((algorithm, result))

    def lines(self) -> Iterator[str]:
        yield "All-reduce by NCCL's algorithm (p50; on the wire: of all ranks, by arithmetic, alike for both)"
        for algorithm, result in sorted(self._rows, key=lambda row: (row[1].size, row[0])):
            wire = RINGS["all_reduce"](result.world_size) * result.size
            yield (
                f"  {algorithm:<6} {result.size:>14,} bytes  on the wire {wire:>14,.0f}  {result.p50:.6f}s"
                f"  busbw {result.busbw:8.2f} GB/s"
            )


@pytest.mark.ddp(backend="nccl")
@pytest.mark.parametrize("algorithm", ["Ring", "Tree"])
def test_nccl_algorithm(
    collective_benchmark: CollectiveBenchmark,
    algorithm: str,
    size: Size,
    tables: Tables,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An all-reduce by NCCL's rings and by its trees: as many bytes, in more steps or fewer."""
    monkeypatch.setenv("NCCL_ALGO", algorithm)
    sizes = [1 << power for power in (10, 20, 25) if 1 << power <= size.most_bytes]
    for result in collective_benchmark("all_reduce", sizes, dtype="float32"):
        tables.of(Algorithms).add(algorithm, result)
