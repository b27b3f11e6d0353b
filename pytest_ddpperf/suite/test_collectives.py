"""Collectives by themselves: all of them over sizes, in nccl-tests' terms, and CS336's all-reduce by backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from pytest_ddpperf import CollectiveBenchmark, CollectiveResult, DdpRun
from pytest_ddpperf.suite.sizes import Size
from pytest_ddpperf.suite.tables import Table, Tables, markdown
from pytest_ddpperf.suite.workloads import rank

OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all", "send_recv")
MEGABYTES = (1, 10, 100, 1000)
RANKS = (2, 4, 6)
# As rows name them; Gloo on CUDA devices is what NCCL is held beside.
BACKENDS = {"gloo": ("gloo", "cpu"), "gloo-cuda": ("gloo", "cuda"), "nccl": ("nccl", "cuda")}
# What a rank and its backend hold of a buffer: itself, what is checked, what is under way.
BUFFERS = 3


class ByBackend(Table):
    """The notebook's table."""

    def __init__(self) -> None:
        self._rows: list[tuple[str, str, str, str]] = []

    def add(self, backend: str, result: CollectiveResult) -> None:
        row = backend, str(result.world_size), f"{result.size // 1_000_000}MB", f"{result.p50:.6f}"
        self._rows.append(row)

    def lines(self) -> Iterator[str]:
        yield "All-reduce by backend, p50"
        titles = "Backend", "Workers", "Data Size", "Time (s)"
        yield from markdown([titles, *sorted(self._rows, key=lambda row: (row[0], int(row[1])))])


@pytest.mark.parametrize("op", OPS)
def test_collective(collective_benchmark: CollectiveBenchmark, ddp_run: DdpRun, op: str, size: Size) -> None:
    """A collective over sizes: time, algbw and busbw, its result checked (nccl-tests)."""
    sizes = [1 << power for power in (10, 15, 20, 25) if 1 << power <= size.most_bytes]
    if op == "send_recv" and len(ddp_run(rank)) == 1:
        pytest.skip("from one rank to another, and there is one")
    results = collective_benchmark(op, sizes, dtype="float32")
    for asked, result in zip(sizes, results, strict=True):  # which may not divide into a block a rank
        assert 0 <= asked - result.size < 4 * result.world_size


@pytest.mark.parametrize("megabytes", MEGABYTES, ids=lambda megabytes: f"{megabytes}mb")
@pytest.mark.parametrize(
    "backend",
    [
        pytest.param(
            name,
            id=f"{name}-{ranks}",
            # On one machine, as the notebook's: not all of them divide over several.
            marks=pytest.mark.ddp(backend=backend, device=device, world_size=ranks, nodes=1),
        )
        for name, (backend, device) in BACKENDS.items()
        for ranks in RANKS
    ],
)
def test_all_reduce_by_backend(
    collective_benchmark: CollectiveBenchmark,
    backend: str,
    megabytes: int,
    size: Size,
    tables: Tables,
    roomy: Callable[..., None],
) -> None:
    """An all-reduce of 1 MB to 1 GB over 2, 4 and 6 ranks, by backend (CS336)."""
    asked = megabytes * 1_000_000
    if asked > size.most_bytes:
        pytest.skip(f"{megabytes} MB are not in --ddp-suite-size {size.name}")
    roomy(asked * BUFFERS, cuda=BACKENDS[backend][1] == "cuda")
    (result,) = collective_benchmark("all_reduce", [asked], dtype="float32")
    tables.of(ByBackend).add(backend, result)
