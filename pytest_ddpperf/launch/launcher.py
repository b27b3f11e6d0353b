"""Launches: what can be asked of ranks, and what a launch brought back. Knows neither limits nor
baselines."""

from __future__ import annotations

import json
import os
import pickle
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, mode
from typing import Any, TypeVar

from pytest_ddpperf.launch.output import Observer
from pytest_ddpperf.launch.paused_launch import PausedLaunch, dropping
from pytest_ddpperf.launch.phases import step_phases
from pytest_ddpperf.launch.placement import hold, interconnect, place, resources
from pytest_ddpperf.launch.remote_ranks import Nodes, Part
from pytest_ddpperf.launch.run import Delivery, Launch, Leader, LocalShareLaunch
from pytest_ddpperf.launch.server_client import (
    LaunchRequest,
    RankServer,
    read_by,
    recorded,
)
from pytest_ddpperf.launch.template import Templates, with_hash_seed
from pytest_ddpperf.records import codec
from pytest_ddpperf.records.errors import DdpPerfError
from pytest_ddpperf.records.metric import COUNTERS, POINT_TO_POINT
from pytest_ddpperf.records.plan import Plan, Setup
from pytest_ddpperf.records.samples import (
    GOES_ON,
    Imported,
    LaunchSamples,
    RankFigures,
    Scalar,
    Window,
)
from pytest_ddpperf.wire import payload
from pytest_ddpperf.wire.boot import listen
from pytest_ddpperf.wire.source_trees import Trees


def collected(
    plan: Plan,
    windows: Sequence[Window],
    delivery: Delivery,
    *,
    facts: Mapping[str, Scalar],
) -> LaunchSamples:
    """`windows` by rank; `facts` as LaunchSamples has them."""
    cpu = [window.cpu_ns for window in windows if window.cpu_ns is not None]
    examples = [window.examples for window in windows if window.examples is not None]
    # stretch x rank x mark
    stretches = list(zip(*(window.marks_ns for window in windows), strict=True))
    clocks = delivery.clocks
    if len({tuple(map(len, window.marks_ns)) for window in windows}) > 1:
        raise DdpPerfError("ranks differ in the steps that they took")

    def here(rank: int, ns: float) -> float:
        return clocks[rank].here(ns) if rank in clocks else ns

    on_one = [
        [[here(rank, mark) for mark in own] for rank, own in enumerate(marks)]
        for marks in stretches
    ]
    first = [rank for rank in plan.part(0) if rank < plan.world_size]
    return LaunchSamples(
        step_seconds=_step_seconds(on_one),
        node_seconds=(
            _step_seconds([[marks[rank] for rank in first] for marks in stretches])
            if clocks
            else None
        ),
        clock_seconds=(
            max(clock.half_width_ns for clock in clocks.values()) / 1e9
            if clocks
            else None
        ),
        rank_seconds=tuple(
            _seconds([ns for marks in own for ns in _differences(marks)])
            for own in zip(*stretches, strict=True)
        ),
        stretches=windows[0].stretches,
        cpu_seconds=tuple(map(_seconds, cpu)) if len(cpu) == len(windows) else None,
        examples=tuple(examples) if len(examples) == len(windows) else None,
        blocked_seconds=(
            tuple(_seconds(window.blocked_ns) for window in windows)
            if plan.rpc
            else None
        ),
        counters=_counters(windows),
        recorded=_recorded(windows),
        losses=_losses(windows),
        page_faults=tuple(window.page_faults for window in windows),
        cost=delivery.cost,
        facts=facts,
        output=delivery.output,
        notes=(
            *delivery.notes,
            *dict.fromkeys(note for window in windows for note in window.notes),
        ),
        unfit=next((window.unfit for window in windows if window.unfit), ""),
        unsettled=windows[0].unsettled,
        warmup=windows[0].warmup,
        phases=step_phases(windows, here),
        is_silent=_is_silent(plan, windows),
        stacks=tuple(window.stacks for window in windows if window.stacks is not None),
        doubts=_doubts(windows)
        | (_of_program(windows, _step_seconds(on_one)) if plan.boundary else {}),
    )


def _step_seconds(stretches: Sequence[Sequence[Sequence[float]]]) -> tuple[float, ...]:
    """`stretches` is stretch x rank x mark."""
    return tuple(
        seconds for marks in stretches for seconds in _seconds(completions(marks))
    )


def completions(marks: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Return the group's step times: between completions of the whole group, the first from the
    common start.

    `marks` is rank x mark: a rank's start, then the end of each of its steps, all on one clock and
    in one unit, which is the result's. They add up to the wall time of the window.
    """
    return _differences([max(each) for each in zip(*marks, strict=True)])


def _is_silent(plan: Plan, windows: Sequence[Window]) -> bool:
    """Return whether several ranks are known to send nothing to each other; of those over RPC it is
    not asked."""
    if plan.world_size == 1 or plan.rpc:
        return False
    counters = _counters(windows)
    arrivals = [
        window.phases.arrivals if window.phases is not None else None
        for window in windows
    ]
    # Gradients may be synchronised in other steps than the one that was counted.
    may_accumulate = None in arrivals and counters["gradient_bytes"] is not None
    sent = {counters[f"{kind}.count"] for kind in ("collectives", *POINT_TO_POINT)}
    return sent == {0} and not any(arrivals) and not may_accumulate


# More than cold caches and a late rank add to the first step.
_FIRST_RATIO = 10


def _doubts(windows: Sequence[Window]) -> dict[str, str]:
    """Return, by kind, what suggests that steps differ in their work, which all ranks must show, or
    that a rank leaves some of it behind."""
    found: dict[str, str] = {}
    if all(any(window.sent) and window.sent[1:] == (0,) for window in windows):
        most = max(window.sent[0] for window in windows)
        sent = f"{most} collective{'s' if most > 1 else ''}"
        found["sent"] = (
            f"the first warm-up step sent {sent}, a later one none: does the step still train?"
        )
    if (ratio := min(window.first_ratio for window in windows)) > _FIRST_RATIO:
        took = f"{ratio:.0f}x the median of the others"
        found["first step"] = (
            f"the first timed step took {took}: does the step do the same work each time?"
        )
    if any(window.goes_on for window in windows):
        found[GOES_ON] = (
            "threads or children of a rank still work after the steps: does the step wait for all"
            " that it starts?"
        )
    return found


# Steps that take so many times the median are said, and a share of steps that differ in their
# collectives.
_LONG, _DIFFERING = 3, 0.1


def _of_program(
    windows: Sequence[Window], step_seconds: Sequence[float]
) -> dict[str, str]:
    """Return, by kind, what is to be known of the steps of a program that owns its loop."""
    found: dict[str, str] = {}
    steps, usual = len(step_seconds), median(step_seconds)
    if left_out := windows[0].left_out:
        found["left out"] = (
            f"{left_out} of {steps + left_out} steps with fewer backward passes are left out"
        )
    if long := sum(each > _LONG * usual for each in step_seconds):
        took = f"took more than {_LONG}x the median (evaluation, checkpoints, logging?)"
        found["long"] = f"{long} of {steps} steps {took}"
    phases = windows[0].phases
    if phases is not None and phases.arrivals and phases.steps:
        steps_ns = [pair for marks in windows[0].marks_ns for pair in pairwise(marks)][
            -len(phases.steps) :
        ]
        starts = [when for when, _ in phases.arrivals]
        sent = [
            bisect_right(starts, end) - bisect_right(starts, begin)
            for begin, end in steps_ns
        ]
        if sum(each != mode(sent) for each in sent) > _DIFFERING * len(sent):
            found["collectives"] = (
                f"steps differ in their collectives: {min(sent)} to {max(sent)} (logging, another"
                " optimizer?)"
            )
    return found


def _facts(windows: Sequence[Window]) -> dict[str, Scalar]:
    """Return the first rank's facts; where the devices of ranks differ, those of all: "NVIDIA A100
    + NVIDIA H100"."""
    found = dict(windows[0].facts)
    for name in windows[-1].facts:
        values = {window.facts.get(name) for window in windows}
        if len(values) > 1:
            found[name] = " + ".join(
                sorted(str(value) for value in values if value is not None)
            )
    return found


def _counters(windows: Sequence[Window]) -> dict[str, int | None]:
    """Return the largest counts over ranks; unknown if one rank does not know."""
    found: dict[str, int | None] = {}
    for name in {**dict.fromkeys(COUNTERS), **windows[0].counters}:
        known = [
            count
            for window in windows
            if (count := window.counters.get(name)) is not None
        ]
        found[name] = max(known) if len(known) == len(windows) else None
    return found


def _recorded(windows: Sequence[Window]) -> dict[str, RankFigures]:
    """Return the figures that any rank recorded, of all ranks."""
    names = dict.fromkeys(name for window in windows for name in window.recorded)
    nothing = (None,) * len(windows[0].blocked_ns)
    return {
        name: tuple(window.recorded.get(name, nothing) for window in windows)
        for name in names
    }


def _losses(windows: Sequence[Window]) -> tuple[float | None, ...] | None:
    """Return the mean over ranks of the first losses, None where one is not finite; None if no rank
    recorded them."""
    ranks = [window.losses for window in windows if window.losses]
    return (
        tuple(
            None if None in step else fmean(step) for step in zip(*ranks, strict=False)
        )
        or None
    )


def _differences(marks: Sequence[float]) -> tuple[float, ...]:
    return tuple(after - before for before, after in pairwise(marks))


def _seconds(nanoseconds: Sequence[float]) -> tuple[float, ...]:
    return tuple(ns / 1e9 for ns in nanoseconds)


# Imported for RPC launches only: it takes half a second.
_RPC_PRELOAD = ("pytest_ddpperf.rank.rpc",)


_L = TypeVar("_L", bound=Launch)


class Launcher:
    """Launches of one pytest session, one after the other, over one rank server.

    `modules` yields the test modules and conftests as name -> file. `rpc`: there will be RPC
    launches, so their imports are preloaded. `trees`: where the ranks import the user's code from;
    samples then list what they imported. `folder` is removed if this process is killed. `nodes`:
    the other nodes, for plans that have several. `takes_locks`: whether measurements hold the locks
    of their cores or devices. `templates`: of its rank server; they are closed with it.
    """

    def __init__(
        self,
        modules: Callable[[], Mapping[str, str]],
        *,
        rpc: bool = False,
        trees: Trees | None = None,
        folder: str = "",
        nodes: Nodes | None = None,
        takes_locks: bool = True,
        templates: Templates | None = None,
    ) -> None:
        self._modules = modules
        self._takes_locks = takes_locks
        self._nodes = nodes
        self._rpc = rpc
        self._trees = trees
        self._templates = templates or Templates()
        two = trees if trees is not None and trees.base != trees.current else None
        self._server = RankServer(self._templates, two, folder)
        self._began = time.time()
        self._facts: dict[str, Scalar] | None = None
        # of accelerators, by CUDA, when facts were asked for
        self._visible: str | None = None

    def probe(self, preload: Sequence[str], timeout: float) -> Mapping[str, Scalar]:
        """Return what the machine and its torch offer (see `rank.environment.probe`), from one
        launch."""
        if self._facts is None:
            plan = Plan(
                world_size=1,
                backend="",
                device="cpu",
                preload=tuple(preload),
                timeout_seconds=timeout,
            )
            self._visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            delivery = self._launch(plan, payload.dumps("probe", None, ()), Observer())
            self._facts = json.loads(delivery.results[0])
        return self._facts

    def measure(
        self, plan: Plan, setup: Setup, observer: Observer, others: Sequence[Setup] = ()
    ) -> LaunchSamples:
        """Run one launch of `plan` on fresh ranks; raises DdpPerfError.

        `setup` is None where the plan has a collective. In an RPC launch it is the trainers', and
        `others` those of the master and of the parameter servers.
        """
        task = payload.dumps("measure", setup, others)
        with self.alone(plan, observer):
            return self._samples(plan, self._launch(plan, task, observer))

    def take_part(self, plan: Plan, part: Part, task: bytes, leader: Leader) -> None:
        """Start this node's part of a launch of `plan` that another leads; raises DdpPerfError."""
        self.ready_for(plan)
        with LocalShareLaunch(
            self._server, self._request(plan, part, task), Observer()
        ) as launch:
            launch.serve(leader)

    @contextmanager
    def pause(
        self, plan: Plan, setup: Setup, observer: Observer
    ) -> Iterator[PausedLaunch]:
        """Yield a launch of `plan` that has warmed up and is paused; it is over, clean-up included,
        on exit.

        One at a time, while the caller holds the cores (see `alone`); raises as `measure`."""
        with self._opened(
            PausedLaunch, plan, payload.dumps("measure", setup, ()), observer
        ) as launch:
            launch.samples = partial(self._samples, plan)
            launch.begin()
            with dropping(launch):
                yield launch

    def _samples(self, plan: Plan, delivery: Delivery) -> LaunchSamples:
        timed = delivery.results[: plan.world_size]
        windows = [codec.decode(Window, json.loads(result)) for result in timed]
        placement = place(len(plan.part(0)), os.environ)
        facts: dict[str, Scalar] = {
            **_facts(windows),
            "interconnect": self._interconnect(plan),
            **recorded(with_hash_seed(os.environ)),
            "cores": placement.cores,
            "cores_per_rank": placement.cores_per_rank,
            "pinned": placement.pinned,
        }
        if plan.nodes > 1:
            facts |= {
                **self._other_nodes.facts,
                "nodes": plan.nodes,
                "devices_per_node": plan.world_size // plan.nodes,
            }
        # Empty if the process was killed while serving, because a trainer's clean-up did not end.
        served = filter(None, delivery.results[plan.world_size :])
        every = [window.imported for window in windows]
        every += [codec.decode(Imported, json.loads(result)) for result in served]
        facts |= read_by(imported.variables for imported in every)
        files: dict[str, str] = {}
        if self._trees is not None:
            delivery.opened.refuse_strays(self._trees)
            imported = self._trees.digests(
                {file for imported in every for file in imported.files}
            )
            files = dict(
                sorted(
                    (
                        delivery.opened.digests(self._trees, self._began) | imported
                    ).items()
                )
            )
        return replace(
            collected(plan, windows, delivery, facts=facts),
            files=files,
            libraries=delivery.opened.libraries,
            others=tuple(
                sorted({module for imported in every for module in imported.others})
            ),
        )

    def call(
        self,
        plan: Plan,
        function: Callable[..., Any],
        args: Sequence[Any],
        observer: Observer,
    ) -> list[Any]:
        """`function(ctx, *args)` on every rank of a fresh group: the results by rank."""
        return unpickle(
            self.call_for_bytes(plan, payload.dumps("call", function, args), observer)
        )

    def call_for_bytes(
        self, plan: Plan, task: bytes, observer: Observer
    ) -> tuple[bytes, ...]:
        """Run a `call` and return the pickled results."""
        return self._launch(replace(plan, warmup=0, steps=0), task, observer).results

    def _interconnect(self, plan: Plan) -> str | None:
        facts, here = self._facts or {}, plan.world_size // plan.nodes
        numbers = str(facts.get("device_numbers") or "")
        if plan.device != "cuda" or not numbers or self._are_others_visible():
            return None
        return interconnect(
            str(facts.get("topology") or ""),
            [int(each) for each in numbers.split(",")[:here]],
        )

    def _are_others_visible(self) -> bool:
        """Whether a test has chosen devices since the probe: which they are is not known."""
        return os.environ.get("CUDA_VISIBLE_DEVICES") != self._visible

    def close(self) -> None:
        self._server.stop()
        self._templates.close()

    @contextmanager
    def alone(self, plan: Plan, observer: Observer) -> Iterator[None]:
        """Hold the locks of the cores or devices, on all nodes: nothing else is timed there
        meanwhile."""
        self.ready_for(plan)  # first, for it may take seconds
        here = self.alone_here(plan, len(plan.part(0)), observer)
        with here if plan.nodes == 1 else self._other_nodes.alone(plan, here, observer):
            yield

    def alone_here(
        self, plan: Plan, processes: int, observer: Observer
    ) -> AbstractContextManager[Sequence[Path]]:
        """Hold the locks of this node, which starts so many of the processes; yields their
        paths."""
        if not self._takes_locks:
            return nullcontext(())
        addresses = str((self._facts or {}).get("device_addresses") or "").split(",")
        if not self._are_others_visible():  # else all are locked
            addresses = addresses[:processes]
        cores = place(processes, os.environ).used
        return hold(
            resources(cores, addresses if plan.device == "cuda" else ()),
            observer.waiting,
        )

    def ready_for(self, plan: Plan) -> None:
        """Start a rank server for these launches, unless there is one; raises DdpPerfError."""
        self._rpc = self._rpc or plan.rpc
        self._server.ensure(
            os.environ, (*plan.preload, *(_RPC_PRELOAD if self._rpc else ()))
        )

    def _launch(self, plan: Plan, task: bytes, observer: Observer) -> Delivery:
        with self._opened(Launch, plan, task, observer) as launch:
            return launch.run()

    @contextmanager
    def _opened(
        self, kind: type[_L], plan: Plan, task: bytes, observer: Observer
    ) -> Iterator[_L]:
        self.ready_for(plan)
        part = Part(processes=plan.part(0))
        with ExitStack() as opened:
            remote, bound, master = None, None, None
            if plan.boundary:
                bound = opened.enter_context(listen("127.0.0.1"))
                master = bound.getsockname()
            if plan.nodes > 1:
                nodes = self._other_nodes
                bound = opened.enter_context(listen(nodes.address))
                host, port = bound.getsockname()[:2]
                part = replace(part, store=(host, port), interface=nodes.interface)
                remote = nodes.parts(plan, (host, port))
            request = replace(self._request(plan, part, task), master=master)
            launch = kind(self._server, request, observer, remote, bound)
            opened.enter_context(launch)
            yield launch

    def _request(self, plan: Plan, part: Part, task: bytes) -> LaunchRequest:
        return LaunchRequest(
            plan=plan,
            payload=task,
            modules=self._modules(),
            placement=place(len(part.processes), os.environ),
            part=part,
            trees=self._trees,
        )

    @property
    def _other_nodes(self) -> Nodes:
        assert self._nodes is not None, "a plan for several nodes in a run on one"
        return self._nodes


def unpickle(results: Sequence[bytes]) -> list[Any]:
    """Unpickle the results of ranks, by rank; raises DdpPerfError."""
    values = []
    for rank, result in enumerate(results):
        try:
            values.append(pickle.loads(result))
        except Exception as error:
            problem = f"cannot be loaded in pytest: {type(error).__name__}: {error}"
            raise DdpPerfError(f"the result of rank {rank} {problem}") from None
    return values
