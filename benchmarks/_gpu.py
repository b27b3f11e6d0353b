"""Checks that only a GPU can answer: tests of the project that gpu.py makes. Each notes what it
saw, right or wrong."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

Note = Callable[[str, bool, str], None]
MS = 1e-3
SEVERAL = int(os.environ.get("GPU_RANKS", "1")) > 1
alone = pytest.mark.skipif(SEVERAL, reason="times are those of one rank")
together = pytest.mark.skipif(not SEVERAL, reason="needs a second rank")


@pytest.fixture
def note(request: pytest.FixtureRequest) -> Note:
    """Call it with a check, whether it holds, and a figure."""

    def add(check: str, holds: bool, figure: str) -> None:
        with Path(os.environ["GPU_ROWS"]).open("a") as rows:
            rows.write(
                json.dumps({"check": check, "holds": holds, "figure": figure})
                + "\n"
            )

    return add


def cycles_of_a_millisecond() -> int:
    """Return how long `torch.cuda._sleep` has to be for a millisecond, once clocks are up."""
    begin, end = (
        torch.cuda.Event(enable_timing=True),
        torch.cuda.Event(enable_timing=True),
    )
    for _ in range(20):
        begin.record()
        torch.cuda._sleep(20_000_000)
        end.record()
        torch.cuda.synchronize()
    return int(20_000_000 / begin.elapsed_time(end))


def model(ctx: Any) -> tuple[Any, torch.Tensor]:
    net = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8))).to(
        ctx.device
    )
    return DistributedDataParallel(net), torch.randn(
        256, 1024, device=ctx.device
    )


def training(ctx: Any) -> Callable[[], None]:
    net, x = model(ctx)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        net(x).sum().backward()
        optimizer.step()

    return step


def times_of(result: Any) -> list[float]:
    return [seconds for launch in result.step_seconds for seconds in launch]


# --- clocks


@alone
@pytest.mark.parametrize(
    "timing",
    [
        pytest.param(each, marks=pytest.mark.ddp(timing=each))
        for each in ("free", "step")
    ],
)
def test_kernels_of_known_length(
    ddp_benchmark: Any, note: Note, timing: str
) -> None:
    def setup(ctx: Any) -> Any:
        millisecond, number = cycles_of_a_millisecond(), iter(range(1_000_000))
        return lambda: torch.cuda._sleep(
            millisecond * (1 + 2 * (next(number) % 2))
        )

    times = sorted(times_of(ddp_benchmark(setup, gate=False)))
    short, long = (
        median(times[: len(times) // 2]) / MS,
        median(times[len(times) // 2 :]) / MS,
    )
    holds = abs(short - 1) < 0.1 and abs(long - 3) < 0.1
    note(
        f"kernels of 1 and 3 ms, timing {timing}",
        holds,
        f"{short:.3f} and {long:.3f} ms",
    )


@alone
def test_a_step_that_keeps_the_host_busy(
    ddp_benchmark: Any, note: Note
) -> None:
    def setup(ctx: Any) -> Any:
        millisecond = cycles_of_a_millisecond()

        def step() -> None:
            until = time.perf_counter() + 2 * MS
            while time.perf_counter() < until:
                pass
            torch.cuda._sleep(millisecond // 10)

        return step

    p50 = ddp_benchmark(setup, gate=False).p50 / MS
    note(
        "2 ms of the host with a kernel of 0.1 ms",
        1.95 < p50 < 2.3,
        f"{p50:.3f} ms",
    )


@alone
def test_a_side_stream_that_nothing_waits_for(
    ddp_benchmark: Any, note: Note
) -> None:
    def setup(ctx: Any) -> Any:
        millisecond, side = cycles_of_a_millisecond(), torch.cuda.Stream()

        def step() -> None:
            with torch.cuda.stream(side):
                torch.cuda._sleep(2 * millisecond)
            torch.cuda._sleep(millisecond // 5)

        return step

    result = ddp_benchmark(setup, gate=False)
    mean = sum(times_of(result)) / len(times_of(result)) / MS
    note(
        "2 ms on a side stream, which the window's end waits for",
        1.9 < mean < 2.2,
        f"{mean:.3f} ms",
    )


@alone
def test_phases(ddp_benchmark: Any, note: Note) -> None:
    class Sleeping(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, cycles: int) -> torch.Tensor:
            ctx.cycles = cycles
            torch.cuda._sleep(4 * cycles)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            torch.cuda._sleep(8 * ctx.cycles)
            return gradients[0], None

    def setup(ctx: Any) -> Any:
        millisecond = cycles_of_a_millisecond()

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.ones(8))

            def forward(self) -> Any:
                return Sleeping.apply(self.weight, millisecond)  # type: ignore[no-untyped-call]

        net = DistributedDataParallel(Net().to(ctx.device))
        return lambda: net().sum().backward()

    phases = ddp_benchmark(setup, gate=False).phases
    forward, backward = (
        phases.get(name) or 0.0 for name in ("forward", "backward")
    )
    holds = abs(forward / MS - 4) < 0.4 and abs(backward / MS - 8) < 0.8
    note(
        "phases of 4 and 8 ms",
        holds,
        f"forward {forward / MS:.2f} ms, backward {backward / MS:.2f} ms",
    )


@alone
def test_the_clock_is_up_when_the_window_begins(
    ddp_benchmark: Any, note: Note
) -> None:
    def setup(ctx: Any) -> Any:
        x = torch.randn(2048, 2048, device=ctx.device, dtype=torch.bfloat16)
        time.sleep(5)  # idle, so that clocks fall
        return lambda: [x @ x for _ in range(4)]

    result = ddp_benchmark(setup, gate=False)
    ratios = [
        median(launch[: len(launch) // 4])
        / median(launch[-(len(launch) // 4) :])
        for launch in result.step_seconds
    ]
    note(
        "first quarter of a window to its last, after 5 s idle",
        max(ratios) < 1.03,
        f"{max(ratios):.3f} at most",
    )


@alone
def test_p50_is_that_of_a_bare_loop(
    ddp_benchmark: Any, ddp_run: Any, note: Note
) -> None:
    def bare(ctx: Any) -> float:
        step = training(ctx)
        for _ in range(300):
            step()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(301)]
        for event in events:
            event.record()
            step()
        torch.cuda.synchronize()
        times = (
            first.elapsed_time(second) for first, second in pairwise(events)
        )
        return float(median(times) * MS)

    measured, loops = [], []
    for number in range(5):  # in turn
        measured.append(
            ddp_benchmark(training, gate=False, name=str(number)).p50
        )
        loops.append(ddp_run(bare)[0])
    ratio = median(measured) / median(loops)
    figure = f"{median(measured) / MS:.4f} ms, bare {median(loops) / MS:.4f} ms: {ratio:.3f}"
    note("p50 of a DDP step against a bare loop", 0.97 < ratio < 1.03, figure)


# --- counters


@alone
def test_counters(ddp_benchmark: Any, note: Note) -> None:
    counters = ddp_benchmark(training, gate=False).counters
    gradients = 4 * 8 * (1024 * 1024 + 1024)
    seen = {
        name: counters[name]
        for name in (
            "all_reduce.bytes",
            "host_syncs",
            "h2d.bytes",
            "peak_memory.bytes",
        )
    }
    holds = (
        seen["all_reduce.bytes"] == gradients
        and seen["host_syncs"] == seen["h2d.bytes"] == 0
    )
    note(
        f"all_reduce.bytes are {gradients}",
        holds and (seen["peak_memory.bytes"] or 0) > gradients,
        str(seen),
    )


@alone
def test_an_item_is_a_host_synchronisation(
    ddp_benchmark: Any, note: Note
) -> None:
    def setup(ctx: Any) -> Any:
        net, x = model(ctx)

        def step() -> None:
            loss = net(x).sum()
            loss.backward()
            loss.item()

        return step

    counted = ddp_benchmark(setup, gate=False).counters["host_syncs"]
    note("an .item() a step is one host_syncs", counted == 1, str(counted))


@alone
def test_a_replayed_graph_has_no_counts(ddp_benchmark: Any, note: Note) -> None:
    def setup(ctx: Any) -> Any:
        x, graph = torch.ones(1000, device=ctx.device), torch.cuda.CUDAGraph()
        dist.all_reduce(x)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            dist.all_reduce(x)
        return graph.replay

    counted = ddp_benchmark(setup, gate=False).counters["all_reduce.count"]
    note(
        "all-reduces of a replayed graph are unknown",
        counted is None,
        str(counted),
    )


# --- facts


def test_facts(ddp_benchmark: Any, note: Note) -> None:
    environment = ddp_benchmark(training, gate=False).environment
    facts = {
        **environment.key,
        **environment.must_match,
        **environment.recorded,
    }
    wanted = (
        "device_model",
        "driver",
        "power_limit_watts",
        "clock_mhz",
        "temperature_c",
    )
    figure = ", ".join(f"{name} {facts.get(name)}" for name in wanted)
    note(
        "what nvidia-smi tells", all(facts.get(name) for name in wanted), figure
    )


# --- failures


@pytest.fixture
def failing(ddp_run: Any) -> Iterator[Callable[[Callable[[Any], Any]], str]]:
    def run(function: Callable[[Any], Any]) -> str:
        with pytest.raises(pytest.fail.Exception) as caught:
            ddp_run(function)
        return str(caught.value)

    yield run
    (free, total), *_ = ddp_run(lambda ctx: torch.cuda.mem_get_info())
    assert free > 0.9 * total, "memory is given back"


@pytest.mark.ddp(timeout=40)
def test_out_of_memory(failing: Any, note: Note, ddp_world_size: int) -> None:
    def allocate(ctx: Any) -> None:
        if ctx.rank == ctx.world_size - 1:
            torch.empty(1 << 42, dtype=torch.uint8, device=ctx.device)
        dist.all_reduce(torch.ones(8, device=ctx.device))
        torch.cuda.synchronize()

    text = failing(allocate)
    holds = (
        text.startswith(f"rank {ddp_world_size - 1} failed")
        and "out of memory" in text
    )
    note("out of memory names its rank", holds, text.splitlines()[0])


@pytest.mark.ddp(timeout=40)
def test_a_kernel_that_asserts(failing: Any, note: Note) -> None:
    def index(ctx: Any) -> None:
        # nothing is returned, or waited for
        torch.ones(8, device=ctx.device)[torch.tensor([99], device=ctx.device)]

    text = failing(index)
    note(
        "a kernel that asserts is red",
        "device-side assert" in text,
        text.splitlines()[0],
    )


@pytest.mark.ddp(timeout=20)
def test_an_endless_kernel(failing: Any, note: Note) -> None:
    began = time.monotonic()
    # minutes, should nothing end it
    text = failing(lambda ctx: torch.cuda._sleep(1 << 40))
    seconds = time.monotonic() - began
    holds = "did not end within 20 s" in text and seconds < 60
    note(
        "an endless kernel ends with its deadline",
        holds,
        f"after {seconds:.0f} s: {text.splitlines()[0]}",
    )


@together
@pytest.mark.ddp(timeout=20)
def test_a_rank_that_never_enters_a_collective(
    failing: Any, note: Note
) -> None:
    def hang(ctx: Any) -> None:
        x = torch.ones(1000, device=ctx.device)
        dist.all_reduce(x)
        if ctx.rank == 0:
            time.sleep(3600)
        dist.all_reduce(x)

    text = failing(hang)
    note(
        "a hang names the rank and the collective",
        "rank 0 never entered" in text,
        text.splitlines()[0],
    )


@together
def test_several_ranks(ddp_benchmark: Any, note: Note) -> None:
    counted = ddp_benchmark(training, gate=False).counters["all_reduce.bytes"]
    note(
        "DDP over NCCL",
        counted == 4 * 8 * (1024 * 1024 + 1024),
        f"all_reduce.bytes {counted}",
    )
