"""Collectives alone: all of them over sizes, in the terms of nccl-tests, and the all-reduce by
backend of CS336."""

import pytest

from pytest_ddpperf import CollectiveBenchmark
from pytest_ddpperf.suite.tables import Tables
from pytest_ddpperf.suite.workloads import Need, Size, free_memory

OPS = """
    all_reduce all_gather reduce_scatter broadcast reduce all_to_all send_recv
""".split()
MEGABYTES = (1, 10, 100, 1000)
RANKS = (2, 4, 6)
# By their names in rows; NCCL is compared with Gloo on CUDA devices.
BACKENDS = {
    "gloo": ("gloo", "cpu"),
    "gloo-cuda": ("gloo", "cuda"),
    "nccl": ("nccl", "cuda"),
}
# Copies of a buffer in a rank and its backend: itself, the one that is checked, the one that is
# sent.
BUFFERS = 3


@pytest.mark.parametrize("op", OPS)
def test_collective(
    collective_benchmark: CollectiveBenchmark,
    ddp_world_size: int,
    op: str,
    size: Size,
) -> None:
    """A collective over sizes: time, algbw and busbw, its result checked (nccl-tests)."""
    sizes = [
        1 << power
        for power in (10, 15, 20, 25)
        if 1 << power <= size.most_bytes
    ]
    if op == "send_recv" and ddp_world_size == 1:
        pytest.skip("needs at least two ranks")
    results = collective_benchmark(op, sizes, dtype="float32")
    # a size may not divide into blocks
    for asked, result in zip(sizes, results, strict=True):
        assert 0 <= asked - result.size < 4 * result.world_size


@pytest.mark.ddp(world_size=1)  # each parameter has its own
@pytest.mark.parametrize(
    "megabytes", MEGABYTES, ids=lambda megabytes: f"{megabytes}mb"
)
@pytest.mark.parametrize(
    "backend",
    [
        pytest.param(
            name,
            id=f"{name}-{ranks}",
            # On one machine, as in the notebook: not all of them divide over several.
            marks=pytest.mark.ddp(
                backend=backend, device=device, world_size=ranks, nodes=1
            ),
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
    ddp_world_size: int,
) -> None:
    """An all-reduce of 1 MB to 1 GB over 2, 4 and 6 ranks, by backend (CS336)."""
    asked = megabytes * 1_000_000
    if asked > size.most_bytes:
        pytest.skip(
            f"{megabytes} MB is too large for --ddp-suite-size {size.name}"
        )
    if BACKENDS[backend][1] == "cpu":  # a device holds a few gigabytes
        Need(asked * BUFFERS, ddp_world_size, free_memory()).require()
    (result,) = collective_benchmark("all_reduce", [asked], dtype="float32")
    tables.add(
        "All-reduce by backend, p50",
        {
            "Backend": backend,
            "Workers": result.world_size,
            "Data Size": f"{megabytes}MB",
            "Time (s)": f"{result.p50:.6f}",
        },
    )
