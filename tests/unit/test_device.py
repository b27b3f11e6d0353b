"""What waits for a device, on a simulated one: a queue with a clock of its own."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch

from pytest_ddpperf.rank import (
    clock,
    counters,
    environment,
    fork_server,
    group,
    loop_states,
    process,
    sampling,
    sent,
    stamps,
    warm_up,
    window,
)
from pytest_ddpperf.rank.pieces import rank_phases
from pytest_ddpperf.rank.timed_rank import TimedRank
from pytest_ddpperf.records.plan import Plan
from pytest_ddpperf.records.samples import Window
from pytest_ddpperf.records.step_phases import (
    BACKWARD,
    DATA,
    FORWARD,
    OPTIMIZER,
    OTHER,
    PHASES,
)
from pytest_ddpperf.wire.channels import Board, Kind, Phase, take_frames
from tests.torch_version import RECORDS_BY_DEFAULT

MS = 1_000_000


class Device:
    """A device that works through its queue. The host's clock stands still unless a test moves it
    or the host waits. The device's clock is 0.5 % fast."""

    def __init__(self) -> None:
        self.now = 5 * MS  # of the host
        self.free_at = 0  # when all queued work is done
        self.is_capturing = False
        self.allocations = 0
        # what was allocated before a window and is free in it
        self.room: list[tuple[int, ...]] = []

    def work(self, nanoseconds: int) -> None:
        self.free_at = max(self.free_at, self.now) + nanoseconds

    def synchronize(self) -> None:
        self.now = max(self.now, self.free_at)

    def event(self, *of_device: torch.device, enable_timing: bool) -> Any:
        event = SimpleNamespace()
        event.record = lambda: vars(event).update(
            at=max(self.free_at, self.now)
        )
        event.synchronize = lambda: setattr(
            self, "now", max(self.now, event.at)
        )
        event.elapsed_time = lambda other: (other.at - event.at) * 1.005 / MS
        return event


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """The simulated device, as torch's accelerator, and the host's clock."""
    simulated = Device()
    monkeypatch.setattr(time, "monotonic_ns", lambda: simulated.now)
    monkeypatch.setattr(torch, "Event", simulated.event)
    monkeypatch.setattr(
        torch.cuda,
        "is_current_stream_capturing",
        lambda: simulated.is_capturing,
    )
    memory = {
        "synchronize": simulated.synchronize,
        "memory_stats": lambda _: {"num_device_alloc": simulated.allocations},
        "reset_peak_memory_stats": lambda _: None,
        "max_memory_allocated": lambda _: 0,
    }
    for name, function in memory.items():
        monkeypatch.setattr(torch.accelerator, name, function, raising=False)
    return simulated


def step_times(
    device: Device, steps: list[tuple[int, int]], timing: Any = "free"
) -> tuple[list[int], int]:
    """Return how many milliseconds each step took by the clock, and how much work was still queued
    after the last one. A step keeps the host busy for so many milliseconds, and then gives the
    device work for so many."""
    marks = memoryview(bytearray(8 * (len(steps) + 1))).cast("q")
    timer = clock.StepClock(timing, torch.device("cuda"), marks)
    timer.start()
    for index, (host, queued) in enumerate(steps):
        device.now += host * MS
        device.work(queued * MS)
        timer.mark(index)
    queued_work = device.free_at - device.now
    timer.finish(len(steps))
    return [
        round((after - before) / MS) for before, after in pairwise(marks)
    ], queued_work // MS


def test_steps_of_a_device_that_the_host_runs_ahead_of(device: Device) -> None:
    assert step_times(device, [(0, 4), (0, 8), (0, 4)]) == ([4, 8, 4], 16)


def test_steps_of_a_device_that_waits_for_the_host(device: Device) -> None:
    assert step_times(device, [(3, 1), (3, 1), (3, 1), (3, 1)]) == (
        [4, 3, 3, 3],
        1,
    )


def test_a_synchronised_step_has_its_own_time(device: Device) -> None:
    assert step_times(device, [(1, 4), (1, 8)], "step") == ([5, 9], 0)


def test_work_queued_before_the_window_is_not_in_it(device: Device) -> None:
    device.work(50 * MS)
    assert step_times(device, [(0, 4), (0, 4)])[0] == [4, 4]


def test_work_that_no_step_waits_for_is_in_the_window(device: Device) -> None:
    """Like that of a side stream that is never joined. The clock spreads it over all steps."""
    marks = memoryview(bytearray(24)).cast("q")
    timer = clock.StepClock("free", torch.device("cuda"), marks)
    timer.start()
    for index in range(2):
        device.work(4 * MS)
        timer.mark(index)
    device.work(6 * MS)
    timer.finish(2)
    assert (marks[2] - marks[0]) // MS == 14


def phases_of(
    device: Device, timer: clock.StepClock, marks: Any, loading: int
) -> list[dict[str, int]]:
    """Return how many milliseconds the phases of three steps take, each of which keeps the host
    busy with loading."""
    taken = stamps.Stamps(torch.device("cuda"))
    begin_forward, end_forward = taken._hook(1), taken._hook(-1)
    backward = taken._around(2)(lambda: device.work(8 * MS))
    optimizer = taken._around(3)(lambda: device.work(2 * MS))
    timer.start()
    for index in range(3):
        device.now += loading * MS
        begin_forward()
        device.work(4 * MS)
        end_forward()
        backward()
        optimizer()
        device.work(1 * MS)
        timer.mark(index)
    timer.finish(3)
    taken.place(timer)
    found = rank_phases([*pairwise(marks)], taken.taken, None, has_ddp=True)
    assert found is not None
    steps = []
    for begin, pieces in zip(marks, found.steps, strict=False):
        bounds = [begin, *(end for _, end in pieces)]
        times = [
            round((after - before) / MS) for before, after in pairwise(bounds)
        ]
        steps.append(
            {
                PHASES[phase]: each
                for (phase, _), each in zip(pieces, times, strict=True)
                if each
            }
        )
    return steps


def test_phases_last_until_the_device_has_done_their_work(
    device: Device,
) -> None:
    """The host only queues it. Where a loader makes the device wait, that is time of the data."""
    marks = memoryview(bytearray(32)).cast("q")
    timer = clock.StepClock("free", torch.device("cuda"), marks)
    work = {FORWARD: 4, BACKWARD: 8, OPTIMIZER: 2, OTHER: 1}
    # the host runs ahead
    assert phases_of(device, timer, marks, loading=0) == [work] * 3
    assert phases_of(device, timer, marks, loading=20) == [
        {DATA: 20, **work},
        *[{DATA: 5, **work}] * 2,
    ]


def test_what_a_cuda_graph_captures_is_not_stamped(device: Device) -> None:
    device.is_capturing = True
    marks = memoryview(bytearray(32)).cast("q")
    timer = clock.StepClock("free", torch.device("cuda"), marks)
    assert phases_of(device, timer, marks, loading=0) == [{OTHER: 15}] * 3


def test_events_of_another_device_make_phases_unknown(device: Device) -> None:
    def refuse(event: object) -> int:
        raise RuntimeError("events of different devices")

    ctx: Any = SimpleNamespace(device=torch.device("cuda"))
    watch = stamps.PhaseWatch(
        Plan(world_size=1, backend="nccl", device="cuda", timing="step"), ctx
    )
    # each step waits for the device, which has no phases
    refusing: Any = SimpleNamespace(place=refuse)
    watch.end(refusing)
    assert watch.notes == ()
    watch._is_on = True
    watch._stamps.taken.append((torch.Event(enable_timing=True), 1))
    watch.end(refusing)
    assert watch.notes == (
        "phases of the step are unknown: RuntimeError: events of different devices",
    )
    assert watch.phases([(0, 1)], None) is None


def test_the_step_that_a_device_is_at_is_told_while_the_host_waits(
    device: Device,
) -> None:
    """The host has taken all of them long before."""
    marks = memoryview(bytearray(32)).cast("q")
    timer = clock.StepClock("free", torch.device("cuda"), marks)
    timer.start()
    for index in range(3):
        device.work(4 * MS)
        timer.mark(index)
    seen: list[tuple[int, int]] = []
    begin = device.now
    timer.finish(
        3, lambda step: seen.append((step, (device.now - begin) // MS))
    )
    assert seen == [(0, 0), (1, 4), (2, 8)]


@pytest.fixture
def accelerator(device: Device, monkeypatch: pytest.MonkeyPatch) -> Device:
    """The simulated device of a rank whose steps are timed."""
    monkeypatch.setattr(
        torch, "empty", lambda *shape, **_: device.room.append(shape)
    )
    monkeypatch.setattr(
        environment, "device", lambda place: {"device_model": "simulated"}
    )
    # it lasts as long as the process
    monkeypatch.setattr(stamps.Stamps, "install", lambda self: None)
    return device


def measured(step: Any, **window: Any) -> Window:
    """Return the window of one rank on the simulated device, of four steps by default."""
    asked = {"warmup": 5, "steps": 4, "timing": "free", **window}
    plan = Plan(world_size=1, backend="nccl", device="cuda", **asked)
    ctx: Any = SimpleNamespace(
        device=torch.device("cuda"),
        rank=0,
        local_rank=0,
        figures={},
        judged={},
        keep=lambda *figures: None,
    )
    board: Any = SimpleNamespace(
        row=lambda rank: [0] * 10,
        enter=lambda *place: None,
        phase=lambda rank: Phase.STEPS,
        set_steps=lambda rank, number: None,
    )
    return sampling.measure(step, timed_rank(plan, ctx, board))


class CountsNothing(counters.Meter):
    """To count a step takes long in a process of many tests."""

    @contextmanager
    def counting(
        self, own: object, device: object
    ) -> Iterator[counters.Figures]:
        yield {}


def timed_rank(plan: Plan, ctx: Any, board: Any) -> TimedRank:
    return TimedRank(
        plan=plan,
        ctx=ctx,
        board=board,
        meter=CountsNothing(),
        own=group.NoGroup(),
        pinned_to=group.cores(),
        stretches=None,
    )


def test_a_device_warms_up_for_a_second_as_steps_are_timed(
    accelerator: Device,
) -> None:
    queued = []

    def step() -> None:
        queued.append(accelerator.free_at > accelerator.now)
        accelerator.now += MS  # of the host
        accelerator.work(4 * MS)

    window = measured(step)
    assert [
        round((after - before) / MS)
        for before, after in pairwise(window.marks_ns[0])
    ] == [5, 4, 4, 4]
    assert (window.unfit, window.warmup) == ("", 5)
    asked, freely = queued[:5], queued[5:-4]
    assert not any(asked)
    # a second of steps of 5 ms, the host's time included
    assert (len(freely), all(freely[1:])) == (200, True)


def test_short_steps_are_timed_for_as_long_as_asked_and_those_that_are_kept_are_spread(
    accelerator: Device,
) -> None:
    """A baseline keeps a few of them."""
    taken = 0

    def step() -> int:
        nonlocal taken
        taken += 1
        # slower from the 401st of the window on
        accelerator.work(1 * MS if taken <= 1005 + 400 else 3 * MS)
        return 8

    window = measured(step, min_seconds=0.5, most_steps=10)
    assert taken == 5 + 1000 + 500
    times = [round((end - begin) / MS) for begin, end in window.marks_ns]
    assert times == [1] * 8 + [3] * 2
    assert (window.stretches, window.examples) == ((10,), (8,) * 10)
    assert window.phases is not None
    assert len(window.phases.steps) == 10


def test_launches_that_are_compared_keep_as_many_steps() -> None:
    plan = Plan(
        world_size=1,
        backend="nccl",
        device="cuda",
        steps=4,
        min_seconds=0.5,
        most_steps=10,
        timing="free",
    )
    assert plan.exactly(7).steps_for(0.001) == 500
    assert plan.exactly(7).room == 7
    assert replace(plan, device="cpu").exactly(7).steps_for(0.001) == 7


def test_a_launch_on_a_device_that_is_too_hot_is_told(
    accelerator: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    slowed = {"slowdown": "heat or power"}
    for before, after in ((slowed, {}), ({}, slowed)):
        seen = iter([before, after])
        monkeypatch.setattr(
            environment, "device", lambda place, seen=seen: next(seen)
        )
        window = measured(lambda: accelerator.work(1 * MS))
        assert (
            window.unfit
            == "rank 0 was slowed down by heat or power: see ddpperf doctor"
        )


def test_a_launch_that_allocates_device_memory_in_its_window_is_told(
    accelerator: Device,
) -> None:
    taken = 0

    def step() -> None:
        nonlocal taken
        taken += 1
        # the last one is in the window
        accelerator.allocations += taken in (1, 60, 1006)
        accelerator.work(1 * MS)

    assert (
        measured(step).unfit
        == "rank 0 allocated device memory (an evaluation?): raise --ddp-warmup"
    )
    assert taken == 5 + 1000 + 4
    assert measured(step).unfit == ""


def test_the_allocator_has_room_for_the_figures_of_a_window(
    accelerator: Device,
) -> None:
    """A loss is copied on the device in each step. For these copies alone it would be asked for
    memory now and then."""
    measured(lambda: accelerator.work(1 * MS), min_seconds=0.5)
    # 500 x 8 copies of 512 bytes are 1.95 MiB
    assert accelerator.room == [(window._BLOCK,)] * 2


def test_steps_that_are_kept_are_spread_over_each_stretch() -> None:
    assert window._spread([40, 20, 1], most=6) == (
        [0, 13, 26, 40, 50, 60],
        [3, 2, 1],
    )
    kept, shares = window._spread([3] * 40, most=30)
    assert (len(kept), shares) == (30, [1] * 30), (
        "of some stretches none is kept"
    )


class Loops:
    """A program on the simulated device, of one rank, each of whose steps is one backward pass."""

    def __init__(self, **window: Any) -> None:
        self.begin = self.steps = 0
        self.others = {"steps": 0, "updates": 0}  # of rank 1
        row = [0] * 10
        board: Any = SimpleNamespace(
            row=lambda rank: row,
            enter=lambda *place: None,
            updates=lambda: [
                row[Board.UPDATES_CELL],
                self.others["updates"],
            ],
            begin=lambda: self.begin,
            set_begin=lambda number: setattr(self, "begin", number),
            steps=lambda rank: self.others["steps"] if rank else self.steps,
            set_steps=lambda rank, number: setattr(self, "steps", number),
        )
        asked = {
            "warmup": 5,
            "steps": 4,
            "timing": "free",
            "boundary": "mark",
            **window,
        }
        plan = Plan(world_size=1, backend="nccl", device="cuda", **asked)
        ctx: Any = SimpleNamespace(
            device=torch.device("cuda"),
            rank=0,
            local_rank=0,
            world_size=1,
            local_world_size=1,
            figures={},
            judged={},
        )

        self.ctx, self.board = ctx, board
        self.state: Any = loop_states.Learning(timed_rank(plan, ctx, board))

    def run(self, step: Callable[[], None]) -> Window:
        while not isinstance(self.state, Window):
            step()
            self.state = self.state.step_ended(1)
        return self.state


def test_a_program_on_a_device_warms_up_and_is_timed_as_a_step_is(
    accelerator: Device,
) -> None:
    queued = []

    def step() -> None:
        queued.append(accelerator.free_at > accelerator.now)
        accelerator.work(4 * MS)

    loops = Loops(min_seconds=0.5, most_steps=10)
    window = loops.run(step)
    taken = len(queued)
    assert (window.unfit, window.stretches) == ("", (10,))
    assert loops.steps == 125  # of half a second, of which 10 are kept
    assert taken == window.warmup + 125
    asked = queued.index(True)
    # a second of steps, after none of which the host waits
    assert window.warmup - asked >= 250
    assert all(queued[asked : window.warmup])


def test_a_rank_that_is_behind_when_the_window_is_decided_still_knows_how_long_a_step_takes(
    accelerator: Device,
) -> None:
    loops = Loops(warmup=1)
    # by rank 0, before this one has taken a step
    loops.begin, loops.steps = 5, 4
    assert loops.run(lambda: accelerator.work(4 * MS)).warmup == 6


def test_the_window_begins_after_the_updates_that_ranks_of_other_nodes_have_taken(
    accelerator: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 waits for them; the others wait for where the window begins."""
    first = Loops(timing="step")
    first.ctx.world_size = 2
    other = Loops(timing="step")
    other.ctx.rank = 1
    waits: list[str] = []

    def step() -> None:
        accelerator.work(4 * MS)

    def rank_0_waits(seconds: float) -> None:
        waits.append(f"{first.steps} steps, begin {first.begin}")
        if len(waits) == 2:
            first.others.update(steps=first.steps, updates=20)

    monkeypatch.setattr(time, "sleep", rank_0_waits)
    while not first.begin:
        step()
        first.state = first.state.step_ended(1)
    assert (first.begin, waits) == (21, ["4 steps, begin 0"] * 2)
    assert first.run(step).warmup == 22
    # which was at its 20th update when it learned that there will be a window
    for _ in range(19):
        step()
        other.state = other.state.step_ended(1)
    other.steps = 4

    def rank_1_waits(seconds: float) -> None:
        other.begin = first.begin

    monkeypatch.setattr(time, "sleep", rank_1_waits)
    assert other.run(step).warmup == 22


def test_a_window_that_becomes_known_while_a_step_ends_begins_after_a_later_step(
    accelerator: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    loops = Loops(timing="step")
    loops.ctx.rank = 1

    def becomes_known(rank: int) -> int:
        before = loops.steps
        if loops.board.updates()[0] == 9:
            loops.steps = 4
        return before

    def waits(seconds: float) -> None:
        loops.begin = 11

    loops.board.steps = becomes_known
    monkeypatch.setattr(time, "sleep", waits)
    assert loops.run(lambda: accelerator.work(4 * MS)).warmup == 12


def test_a_program_that_allocates_device_memory_in_its_window_is_told(
    accelerator: Device,
) -> None:
    for when, unfit in (
        ("warm-up", ""),
        (
            "window",
            "rank 0 allocated device memory (an evaluation?): raise --ddp-warmup",
        ),
    ):
        loops = Loops()

        def step(
            loops: Loops = loops, in_window: bool = when == "window"
        ) -> None:
            if in_window:
                is_timed = isinstance(loops.state, loop_states.Timing)
                accelerator.allocations += (
                    is_timed and loops.state._part.steps == 2
                )
            else:
                accelerator.allocations += loops.begin == 0
            accelerator.work(4 * MS)

        assert loops.run(step).unfit == unfit


def rank_on(device: str, channel: Any, entered: list[Phase]) -> process.Rank:
    board: Any = SimpleNamespace(
        enter=lambda rank, phase: entered.append(phase)
    )
    plan = Plan(world_size=1, backend="nccl", device=device)
    return process.Rank(0, plan, board, channel, None, in_stretches=False)


def test_nothing_is_sent_if_the_device_reports_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CUDA reports a failed assertion of a kernel only at a later call: without one the user's test
    would pass."""

    def fail() -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch.accelerator, "synchronize", fail)
    ours, theirs = socket.socketpair()
    entered: list[Phase] = []
    with ours, theirs:
        on_device, on_cpu = (
            rank_on(device, ours, entered) for device in ("cuda", "cpu")
        )
        with pytest.raises(RuntimeError, match="device-side assert"):
            on_device.deliver(b"result")
        with pytest.raises(RuntimeError, match="device-side assert"):
            on_device.end()
        # the error belongs to the steps, or to the clean-up
        assert entered == []
        on_cpu.deliver(b"other")
        on_cpu.end()
        assert [*take_frames(bytearray(theirs.recv(100)))] == [
            (Kind.RESULT, b"other"),
            (Kind.DONE, b""),
        ]


def test_ranks_on_devices_share_the_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.setattr(torch.accelerator, "set_device_index", asked.append)
    monkeypatch.setattr(group, "_pin_near", lambda device: None)
    monkeypatch.setattr(group, "_seed", lambda seed: None)
    plan = Plan(world_size=8, backend="nccl", device="cuda")
    assert group.prepare(plan, 3, threads=12) == torch.device("cuda", 3)
    assert asked == [12, 3]
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    group.prepare(plan, 3, threads=12)
    assert asked == [12, 3, 3]


def test_a_rank_that_sees_one_device_has_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", asked.append)
    monkeypatch.setattr(group, "_pin_near", lambda device: None)
    monkeypatch.setattr(group, "_seed", lambda seed: None)
    plan = Plan(
        world_size=8, backend="nccl", device="cuda", sees_one_device=True
    )
    assert group.prepare(plan, 3, threads=0) == torch.device("cuda", 0)
    assert asked == [0]


@RECORDS_BY_DEFAULT
@pytest.mark.parametrize("replays", [False, True])
def test_what_a_replayed_graph_sends_is_unknown(
    monkeypatch: pytest.MonkeyPatch, replays: bool
) -> None:
    """Neither the dispatcher nor a recorder sees it: both would say nothing."""
    replayed: list[object] = []
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", replayed.append)
    sent.watch_graphs()
    graph: Any = SimpleNamespace()
    # as a set-up keeps it, and returns it as its step
    replay = MethodType(torch.cuda.CUDAGraph.replay, graph)
    with counters.Meter().counting(
        group.NoGroup(), torch.device("cpu")
    ) as figures:
        if replays:
            replay()
    assert replayed == [graph] * replays
    assert figures["collectives.count"] == (None if replays else 0)
    assert figures["all_reduce.bytes"] == (None if replays else 0)


@pytest.mark.parametrize("spoils", [False, True])
def test_a_preloaded_module_that_initialises_cuda_is_named(
    monkeypatch: pytest.MonkeyPatch, spoils: bool
) -> None:
    """As CuPy and numba may: torch does not know."""
    not_initialised = iter([3, 0 if spoils else 3])
    driver = SimpleNamespace(
        cuDeviceGetCount=lambda count: next(not_initialised)
    )
    monkeypatch.setattr(fork_server.ctypes, "CDLL", lambda name: driver)
    said = "--ddp-preload: importing wave initialised CUDA, which does not survive a fork"
    assert fork_server.import_modules(
        ["json", "wave"], asked_by="--ddp-preload: "
    ) == (said if spoils else None)
    assert not [*not_initialised]


def test_an_expandable_segment_that_grows_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stats = {"segment.all.allocated": 1, "num_device_alloc": 3}
    monkeypatch.setattr(
        torch.accelerator, "memory_stats", lambda _: stats, raising=False
    )
    before = warm_up.allocator_growth(torch.device("cuda"))
    stats["num_device_alloc"] += 1
    assert warm_up.allocator_growth(torch.device("cuda")) == before + 1


@RECORDS_BY_DEFAULT
def test_an_allocator_without_figures_is_not_watched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError(
            "CUDAPluggableAllocator does not yet support getDeviceStats"
        )

    for name in (
        "memory_stats",
        "reset_peak_memory_stats",
        "max_memory_allocated",
    ):
        monkeypatch.setattr(torch.accelerator, name, refuse, raising=False)
    assert warm_up.allocator_growth(torch.device("cuda")) == 0
    meter = counters.Meter()
    with meter.counting(group.NoGroup(), torch.device("cuda")) as figures:
        pass
    assert "peak_memory.bytes" not in figures
    assert figures["host_syncs"] == 0
    why = "RuntimeError: CUDAPluggableAllocator does not yet support getDeviceStats"
    assert [*dict.fromkeys(meter.notes)] == [
        f"peak_memory.bytes is unknown: {why}"
    ]
