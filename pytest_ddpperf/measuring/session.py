"""One run: its ranks, its baselines, and the other versions and nodes. Knows no pytest."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from pytest_ddpperf.baseline import Store
from pytest_ddpperf.git import checked_out, tree_of
from pytest_ddpperf.launch import Launcher, Observer
from pytest_ddpperf.launch.launcher import unpickle
from pytest_ddpperf.measuring import measurement
from pytest_ddpperf.measuring.confirm import Confirmation, SideOf, find_inputs, select_code
from pytest_ddpperf.measuring.launches import Job
from pytest_ddpperf.measuring.leader_connection import LeaderConnection, NodeLeaderConnection, ready_call, ready_job
from pytest_ddpperf.measuring.machine import Place, described, nodes_for, resolve
from pytest_ddpperf.measuring.measurement import Measured
from pytest_ddpperf.options.settings import Settings
from pytest_ddpperf.records.errors import GitError
from pytest_ddpperf.records.messages import Order, OrderKind
from pytest_ddpperf.records.plan import Plan
from pytest_ddpperf.records.samples import LaunchSamples, Scalar
from pytest_ddpperf.remote.nodes import OtherNodes
from pytest_ddpperf.remote.version import BaseSide
from pytest_ddpperf.remote.worktree import one_tree
from pytest_ddpperf.report import text
from pytest_ddpperf.wire import payload


class Session:
    """The part of a run that touches ranks and baselines; made when the first distributed test needs it."""

    def __init__(
        self,
        settings: Settings,
        rootdir: Path,
        modules: Callable[[], Mapping[str, str]],
        *,
        rpc: bool = False,
        base: BaseSide | None = None,
        leader: LeaderConnection | None = None,
        side_of: SideOf | str = "",
        other_nodes: OtherNodes | None = None,
        nodes: int = 1,
    ) -> None:
        """`base` is compared with instead of baselines. `leader` is the pytest that this one works for. `side_of` is as
        in `Confirmation`. `other_nodes` are those that this pytest leads, of `nodes` in all."""
        self.settings = settings
        self._rootdir = rootdir
        self._base, self._leader, self._other_nodes = base, leader, other_nodes
        self._nodes = nodes
        side = base or leader
        own = settings.records or callable(side_of)
        self._trees = side.trees if side is not None else one_tree(rootdir) if own else None
        self._confirmation = Confirmation(settings.confirm_seconds, rootdir, settings.baseline_dir, side_of)
        self.launcher = Launcher(
            modules,
            rpc=rpc,
            trees=self._trees,
            folder=leader.folder if leader is not None else "",
            nodes=other_nodes,
            takes_locks=not settings.disable,  # else nothing is measured
        )
        self._unidentified: dict[str, None] = {}  # why saved baselines do not say which code they are of
        self._places: dict[str, None] = {}  # in words, in the order of their first test
        self._store = Store(settings.baseline_dir)
        # Once: the first baseline that is refreshed makes the working tree dirty for the second.
        self._commit = checked_out(rootdir)[0] if settings.records else ""

    @cached_property
    def _top(self) -> Path:
        return Path(one_tree(self._rootdir).current)

    def shown(self, file: Path) -> str:
        """Return a file's path from the top of the working tree, as reviewers see it; outside of it the whole path."""
        real = Path(os.path.realpath(file))
        return real.relative_to(self._top).as_posix() if real.is_relative_to(self._top) else str(file)

    def facts(self) -> Mapping[str, Scalar]:
        """Return what the machine offers, from a probe rank; raises the errors of a launch."""
        return self.launcher.probe(self.settings.preload, self.settings.timeout_seconds)

    def place(
        self, settings: Settings, ranks: int, parameter_servers: int | None = None, *, certain: bool = True
    ) -> Place:
        """Return backend, device and nodes of a test; raises OptionError or Unavailable.

        With `parameter_servers` it is an RPC launch, and `ranks` are trainers. Unless their number is `certain`, as
        no call of the test may change it, one trainer is placed."""
        field, kind = ("world_sizes", "rank") if parameter_servers is None else ("trainers", "trainer")
        nodes = nodes_for(settings, self.settings, ranks, self._nodes, field) if certain else 1
        place = resolve(settings, ranks // nodes if certain else 1, self.facts(), nodes, field)
        who = text.several(ranks, kind)
        if parameter_servers is not None:
            who += f" and {text.several(parameter_servers, 'parameter server')}"
        who += "" if certain else " (unless a call asks for others)"
        self._describe(place, who, ranks // nodes + (parameter_servers or 0))
        return place

    def _describe(self, place: Place, who: str, processes: int) -> None:
        current = described(place, who, processes, os.environ)
        self._places[current] = None
        if self._base is not None:
            baseline = described(place, who, processes, self._base.environ)
            if baseline != current:
                self._places[f"{self._base.version}: {baseline}"] = None

    def machine(self) -> dict[str, Scalar]:
        """Return the facts, with the places that tests were given so far, in words."""
        against = {"against": str(self._base.version)} if self._base is not None else {}
        machines = {"machines": str(self._other_nodes)} if self._other_nodes is not None else {}
        return {**self.facts(), "places": "\n".join(self._places), **machines, **against}

    def call(
        self, nodeid: str, plan: Plan, function: Callable[..., Any], args: Sequence[Any], observer: Observer
    ) -> list[Any]:
        """Call `function(ctx, *args)` on every rank of a fresh group, for a test; return the results by rank."""
        if self._leader is not None:
            if isinstance(self._leader, NodeLeaderConnection) and plan.nodes > 1:
                return self._leader.call(plan, function, args, self.launcher)
            return self.launcher.call(plan, function, args, self._leader.relay)
        if self._other_nodes is None or plan.nodes == 1:
            return self.launcher.call(plan, function, args, observer)
        with self._other_nodes.together(nodeid, ready_call(plan, function), plan.nodes) as end:
            results = self.launcher.call_for_bytes(plan, payload.dumps("call", function, args), observer)
            end(Order(OrderKind.END_MEASUREMENT, results=results))
        return unpickle(results)

    def carry_out(self, job: Job, observer: Observer) -> Measured:
        """Measure and judge, on all nodes of the job's plan; raises the errors of a launch, and BaselineError."""
        if self._leader is not None:
            return self._leader.carry_out(job, self.launcher, self._store)
        if self._other_nodes is None or job.plan.nodes == 1:
            return self._measured(job, observer)
        with self._other_nodes.together(job.nodeid, ready_job(job), job.plan.nodes) as end:
            measured = self._measured(job, observer)
            samples = tuple(replace(launch, output=()) for launch in measured.current.taken)
            kind = OrderKind.END_MEASUREMENT
            end(Order(kind, samples=samples, verdict=measured.verdict, fails=measured.fails))
        return measured

    def _measured(self, job: Job, observer: Observer) -> Measured:
        compare = partial(measurement.carry_out, job, self.launcher, self._store, observer)
        measured = compare(self._base)
        return measured if self._base is not None else self._confirmation.confirm(measured, compare)

    def save(self, measured: Measured) -> int:
        """Write a baseline, in place of the one before or in addition to it, and return how many sessions it now has.
        Raises BaselineError."""
        created = datetime.now(timezone.utc).isoformat(timespec="seconds")
        candidate = measured.candidate
        tree, inputs = self._code_and_inputs(measured.current.taken)
        sessions = tuple(
            replace(session, created=created, commit=self._commit, tree=tree, inputs=inputs)
            for session in candidate.sessions
        )
        path = self._store.write(replace(candidate, sessions=sessions), extend=self.settings.extend_baseline)
        return len(self._store.read_file(path).sessions)

    def _code_and_inputs(self, launches: Sequence[LaunchSamples]) -> tuple[str, dict[str, str]]:
        """Return git's tree of the code that was measured, "" if there is none that identifies it, and its inputs."""
        assert self._trees is not None, "this run writes no baselines"
        top = Path(self._trees.current)
        found: dict[str, str] = {}
        try:
            found = find_inputs(top, launches)
            code = select_code(found)
            if not code or self.settings.against_setup:  # which builds it
                return tree_of(top, self.settings.baseline_dir), found
            ignored = f"git ignores files that ranks imported: {text.some(code)}"
            self._unidentified.setdefault(f"{ignored}: ddp_against_setup can build them")
        except GitError as error:
            self._unidentified.setdefault(str(error).partition("\n")[0].removeprefix("fatal: "))
        return "", found

    def messages(self) -> Iterator[str]:
        """Yield what is said once about all baselines."""
        yield from self._confirmation.messages()
        for why in self._unidentified:
            yield f"a later run cannot measure the code of these baselines again, to confirm a regression: {why}"

    def end_test(self) -> None:
        """End a test on the baseline side and on other nodes."""
        if self._base is not None:
            self._base.leave()
        if self._other_nodes is not None:
            self._other_nodes.leave()

    def close(self) -> None:
        try:
            self._confirmation.close()
        finally:
            self.launcher.close()
