"""The role of a pytest process in its run: it works alone, leads another version of the code, leads
other nodes, or works for a leader. A role knows how calls and measurements are carried out.

Every pytest run imports this: what measures is imported when a test does.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from pytest_ddpperf.plugin.items import (
    leaves_tests_out,
    measures,
    nodeid_of,
    selects_tests,
)
from pytest_ddpperf.plugin.snapshot import why_not_compared

if TYPE_CHECKING:
    from pytest_ddpperf.compare.confirm import SideOf
    from pytest_ddpperf.compare.job import Job
    from pytest_ddpperf.compare.result import Measured
    from pytest_ddpperf.launch import Launcher, Observer
    from pytest_ddpperf.launch.template import Templates
    from pytest_ddpperf.plugin.process import PytestProcess
    from pytest_ddpperf.plugin.session import Session
    from pytest_ddpperf.records.guard import Judged, Loosened
    from pytest_ddpperf.records.messages import ReadyToCall
    from pytest_ddpperf.records.outcome import Outcomes
    from pytest_ddpperf.records.plan import Function, Plan, Variables
    from pytest_ddpperf.records.samples import Facts
    from pytest_ddpperf.remote.nodes import ConnectedNodes
    from pytest_ddpperf.remote.version import BaseSide
    from pytest_ddpperf.wire.source_trees import Trees

    # what is weaker than before, and why that fails the run
    Weaker = tuple[tuple[Loosened, ...], str]


class Call(NamedTuple):
    """What `ddp_run` asks for: `function(ctx, *args)` on every rank of a fresh group."""

    nodeid: str  # of the test
    plan: Plan
    function: Function
    args: Sequence[Any]

    @property
    def ready(self) -> ReadyToCall:
        """The event that a test asks for this call."""
        from pytest_ddpperf.records.messages import ReadyToCall
        from pytest_ddpperf.wire import payload

        return ReadyToCall(payload.name_of(self.function), self.plan)


class PytestRole:
    """The base of all roles: a pytest that measures by itself. On the first of several nodes its
    tests may have ranks on all of them."""

    works_for_leader = False
    nodes = 1  # that a test may have ranks on
    # whether there will be RPC launches, if a leader says so
    rpc: bool | None = None
    folder = ""  # as `Launcher` has it
    other_nodes: ConnectedNodes | None = None  # which this one leads
    relay: Observer | None = None  # what lets a leader watch launches
    # that ranks import from, if there is another version
    trees: Trees | None = None
    templates: Templates | None = None  # of rank servers, if a leader gave some

    def prepare(self, run: PytestProcess) -> None:
        """Called once, before all else; raises pytest.UsageError."""

    def lead(self, other_nodes: ConnectedNodes | None) -> None:
        """Lead other nodes, if there are any."""
        if other_nodes is not None:
            self.other_nodes = other_nodes
            self.nodes = other_nodes.count

    # --- collection

    def start(self, run: PytestProcess) -> None:
        """Let the others collect at the same time as this pytest; raises DdpPerfError."""
        if self.other_nodes is not None:
            from pytest_ddpperf.plugin import remote

            self.other_nodes.start(remote.for_nodes(run.config))

    def await_others(self, run: PytestProcess) -> None:
        """Wait until the others have collected. Raises AgainstError if nothing differs from the
        other version, and NodesError if another node has other code or another kind of machine."""
        if self.other_nodes is None:
            return
        from pytest_ddpperf.remote.worktree import one_tree, sources_here

        # of the current code with its tests: the other version has copies
        trees = one_tree(run.config.rootpath)
        if self.works_for_leader and self.trees is not None:
            trees = self.trees
        self.other_nodes.collected(sources_here(trees), run.session.facts())

    def confirms(self, run: PytestProcess) -> SideOf | str:
        """Return what starts the code of a baseline, to confirm suspicions, or why nothing can;
        "" if nothing is confirmed in this role."""
        return ""

    def facts(self) -> Facts:
        """Return what the machine line says of the others."""
        if self.other_nodes is None:
            return {}
        return {"machines": str(self.other_nodes)}

    def environments(self) -> Mapping[str, Variables]:
        """Return the variables of ranks of other versions, by version."""
        return {}

    # --- a test

    def call(
        self, call: Call, launcher: Launcher, observer: Observer
    ) -> list[Any]:
        """Carry out a call, and return the results by rank; raises the errors of a launch."""
        plan = call.plan
        observer = self.relay or observer
        if self.other_nodes is None or plan.nodes == 1:
            return self._call(call, launcher, observer)
        from pytest_ddpperf.launch.launcher import unpickle
        from pytest_ddpperf.records.messages import EndCall
        from pytest_ddpperf.wire import payload

        with self.other_nodes.together(
            call.nodeid, call.ready, plan.nodes
        ) as end:
            task = payload.dumps("call", call.function, call.args)
            results = launcher.call_for_bytes(plan, task, observer)
            end(EndCall(results))
        return unpickle(results)

    def _call(
        self, call: Call, launcher: Launcher, observer: Observer
    ) -> list[Any]:
        """Carry out a call on this node."""
        return launcher.call(call.plan, call.function, call.args, observer)

    def carry_out(
        self, job: Job, session: Session, observer: Observer
    ) -> Measured:
        """Measure and judge; raises the errors of a launch, and BaselineError."""
        nodes = job.plan.nodes
        observer = self.relay or observer
        if self.other_nodes is None or nodes == 1:
            return self._carry_out(job, session, observer)
        from pytest_ddpperf.records.messages import EndMeasurement

        with self.other_nodes.together(job.nodeid, job.ready, nodes) as end:
            measured = self._carry_out(job, session, observer)
            samples = tuple(
                replace(launch, output=()) for launch in measured.launches
            )
            end(EndMeasurement(samples, measured.verdict, measured.fails))
        return measured

    def _carry_out(
        self, job: Job, session: Session, observer: Observer
    ) -> Measured:
        """Carry out this node's part of a measurement, and judge it."""
        compare = session.comparison(job, observer)
        measured = compare()
        session.refuse_worse(measured)
        return session.confirmation.confirm(measured, compare)

    def end_test(self) -> list[str]:
        """End a test everywhere; return what failed elsewhere in its setup or teardown."""
        if self.other_nodes is None:
            return []
        self.other_nodes.leave()
        return self.other_nodes.failed()

    # --- the end

    def changed(self) -> Sequence[str]:
        """Return the files that differ from the other version's, tests and documentation left
        out."""
        return ()

    def messages(self) -> list[str]:
        """Return what the end of the run says of the others."""
        if self.other_nodes is not None:
            return self.other_nodes.reported
        count = os.environ.get("LOCAL_WORLD_SIZE", "1")
        if count != "1" and "TORCHELASTIC_RUN_ID" in os.environ:
            return [
                f"each of {count} pytests here runs all tests: start pytest without torchrun"
            ]
        return []

    def guard(self, run: PytestProcess, outcomes: Outcomes) -> Weaker:
        """Return what is weaker than before, and why that makes the run red; "" if it does not."""
        return (), ""

    def close(self, status: int) -> None:
        """End the others, with the exit status of this pytest."""
        if self.other_nodes is not None:
            self.other_nodes.close(status)


class ComparesStored(PytestRole):
    """A pytest that compares with stored baselines, and may start the code of one, on all nodes, to
    confirm a suspicion."""

    def guard(self, run: PytestProcess, outcomes: Outcomes) -> Weaker:
        settings = run.settings
        # whoever saves accepts
        if not outcomes or settings.records or settings.disable:
            return (), ""
        from pytest_ddpperf.verdict.guard import since_baseline, why_loosened

        found = tuple(since_baseline(outcomes))
        # Of xdist's workers it is not known what they left out; over nodes, tests of one node have
        # baselines next to those of runs without the others.
        # Tests that Ctrl-C or --session-timeout left are not lost: pytest ends with another status.
        is_green = run.exit_status == pytest.ExitCode.OK
        if run.items and self.other_nodes is None and is_green:
            from pytest_ddpperf.plugin.judged import why_not_judged

            # tests that are left out say nothing, those that ran do
            missing = "" if leaves_tests_out(run) else "not measured"
            marked = dict(why_not_judged(run))
            found += tuple(run.session.find_lost(outcomes, marked, missing))
        return found, why_loosened(found, settings.fail_on or ())

    def confirms(self, run: PytestProcess) -> SideOf | str:
        if problem := why_not_compared():
            return problem
        if run.worker:
            return "not supported under xdist: add -n 0"
        from pytest_ddpperf.plugin import remote

        return partial(remote.start_commit, run, self.other_nodes)


class LooksAtVersion(PytestRole):
    """A pytest that measures nothing, and knows what another version's tests would be judged by."""

    def __init__(self, side: BaseSide) -> None:
        self._side = side
        self._judged: Judged | None = None  # the current tests

    def start(self, run: PytestProcess) -> None:
        super().start(run)
        self._start_side(run)

    def _start_side(self, run: PytestProcess) -> None:
        # Code that is not there any more may be why there is no test.
        self._side.look(always=not any(map(measures, run.items)))
        self._read_judged(run)

    def _read_judged(self, run: PytestProcess) -> None:
        if self._side.own_tests is not None:
            from pytest_ddpperf.plugin.judged import read_judged

            self._judged = read_judged(run, self._side.trees)

    def guard(self, run: PytestProcess, outcomes: Outcomes) -> Weaker:
        before, now = self._side.own_tests, self._judged
        if before is None or now is None:
            return (), ""
        from pytest_ddpperf.plugin.judged import differing_files
        from pytest_ddpperf.records.reason import Reason
        from pytest_ddpperf.verdict.guard import Guard

        compared = 0
        references: set[tuple[str, str]] = set()
        measured: dict[str, dict[str, bool]]
        # without those that are skipped because nothing differs
        nodeids = {nodeid_of(item) for item in run.items}
        measured = {nodeid: {} for nodeid in (nodeids & run.begun) - run.failed}
        for outcome in outcomes:
            verdict = outcome.verdict
            if verdict is not None and outcome.nodeid in measured:
                has_gate = verdict.reason is not Reason.GATE_OFF
                measured[outcome.nodeid][outcome.test.label] = has_gate
                if outcome.has_reference:
                    references.add((outcome.nodeid, outcome.test.label))
                else:
                    compared += verdict.status.compared
        guard = Guard(
            before=before,
            now=now,
            since=self._side.version.ref,
            files=differing_files(run, self._side.changed_tests, before, now),
            measured=measured,
            references=references,
            lacking=run.lacking,
            failed=run.failed,
            selects=selects_tests(run.config),
            has_device=any(each.plan.device != "cpu" for each in outcomes),
        )
        found = tuple(guard.find())
        return found, guard.why_red(found, compared=compared)


class LeadsVersion(LooksAtVersion):
    """A pytest whose measurements are interleaved with those of another version's pytest."""

    def __init__(self, side: BaseSide) -> None:
        super().__init__(side)
        self.trees = side.trees
        self._items: Mapping[str, pytest.Item] = {}  # by node id

    def _start_side(self, run: PytestProcess) -> None:
        self._side.start()

    def changed(self) -> Sequence[str]:
        return self._side.checkout.changed

    def await_others(self, run: PytestProcess) -> None:
        from pytest_ddpperf.remote.worktree import sources_here

        super().await_others(run)
        self._items = {nodeid_of(item): item for item in run.items}
        self._side.collect(sources_here(self._side.trees))
        self._read_judged(run)

    def facts(self) -> Facts:
        return {**super().facts(), "against": str(self._side.version)}

    def environments(self) -> Mapping[str, Variables]:
        return {str(self._side.version): self._side.environ}

    def _carry_out(
        self, job: Job, session: Session, observer: Observer
    ) -> Measured:
        from pytest_ddpperf.compare.unreached import take_unreached
        from pytest_ddpperf.plugin.imports import imported_files

        side = self._side
        if job.reference is not None:
            side.pass_over(job.test.label)
            return session.comparison(job, observer)()
        item = self._items.get(job.nodeid)
        imports = partial(imported_files, item, side.trees)
        unreached = take_unreached(
            job, session.launcher, side, imports, observer
        )
        return unreached or session.comparison(job, observer)(side)

    def end_test(self) -> list[str]:
        failed = super().end_test()
        self._side.leave()
        return failed

    def close(self, status: int) -> None:
        try:
            self._side.close()
        finally:
            super().close(status)


# The role of a pytest that another one started.
LEADER = pytest.StashKey[PytestRole]()


def choose_role(run: PytestProcess) -> PytestRole:
    """Return the role of this process; raises pytest.UsageError. One that works alone leads another
    version as soon as the tests that measure are known: see `Run.start_others`."""
    leader = run.config.stash.get(LEADER, None)
    if leader is not None:
        leader.prepare(run)
        return leader
    own = ComparesStored()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from pytest_ddpperf.plugin import remote

        own.lead(remote.meet_nodes(run))
    return own
