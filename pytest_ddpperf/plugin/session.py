"""One run: its ranks, its baselines, the other versions and nodes, and where its tests run: the
asked backend and device against what the machine has. Knows no pytest."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from pytest_ddpperf import text
from pytest_ddpperf.baseline import Store
from pytest_ddpperf.compare import measurement
from pytest_ddpperf.compare.confirm import (
    Confirmation,
    SideOf,
    find_inputs,
    select_code,
)
from pytest_ddpperf.compare.launches import Job
from pytest_ddpperf.compare.measurement import Measured
from pytest_ddpperf.git import checked_out, tree_of
from pytest_ddpperf.launch import Launcher, Observer
from pytest_ddpperf.launch.launcher import unpickle
from pytest_ddpperf.launch.placement import place as cores_of
from pytest_ddpperf.launch.template import Templates
from pytest_ddpperf.options.definitions import MARKER
from pytest_ddpperf.options.parse import near
from pytest_ddpperf.options.settings import Settings, where
from pytest_ddpperf.plugin.leader_connection import (
    LeaderConnection,
    NodeLeaderConnection,
    ready_call,
    ready_job,
)
from pytest_ddpperf.records.errors import (
    BaselineError,
    GitError,
    MarkerError,
    OptionError,
    Unavailable,
)
from pytest_ddpperf.records.messages import Order, OrderKind
from pytest_ddpperf.records.plan import Plan
from pytest_ddpperf.records.samples import LaunchSamples, Reason, Scalar, Status
from pytest_ddpperf.remote.nodes import OtherNodes
from pytest_ddpperf.remote.version import BaseSide
from pytest_ddpperf.remote.worktree import one_tree
from pytest_ddpperf.report import sentences
from pytest_ddpperf.verdict import decision
from pytest_ddpperf.wire import payload


class Session:
    """The part of a run that touches ranks and baselines; made when the first distributed test
    needs it."""

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
        templates: Templates | None = None,
    ) -> None:
        """`base` is compared with instead of baselines. `leader` is the pytest that this one works
        for. `side_of` is as in `Confirmation`. `other_nodes` are those that this pytest leads, of
        `nodes` in all. `templates` are as in `Launcher`."""
        self.settings = settings
        self._rootdir = rootdir
        self._base, self._leader, self._other_nodes = base, leader, other_nodes
        self._nodes = nodes
        side = base or leader
        own = settings.records or callable(side_of)
        self._trees = (
            side.trees if side is not None else one_tree(rootdir) if own else None
        )
        self._confirmation = Confirmation(
            settings.confirm_seconds, rootdir, settings.baseline_dir, side_of
        )
        self.launcher = Launcher(
            modules,
            rpc=rpc,
            trees=self._trees,
            folder=leader.folder if leader is not None else "",
            nodes=other_nodes,
            takes_locks=not settings.disable,  # else nothing is measured
            templates=templates,
        )
        # why saved baselines do not say which code they are of
        self._unidentified: dict[str, None] = {}
        self._places: dict[str, None] = {}  # in words, in the order of their first test
        self._store = Store(settings.baseline_dir, rootdir)
        # Once: the first baseline that is refreshed makes the working tree dirty for the second.
        self._commit = checked_out(rootdir)[0] if settings.records else ""

    @cached_property
    def _top(self) -> Path:
        return Path(one_tree(self._rootdir).current)

    def shown(self, file: Path) -> str:
        """Return a file's path from the top of the working tree, as reviewers see it; outside of it
        the whole path."""
        real = Path(os.path.realpath(file))
        return (
            real.relative_to(self._top).as_posix()
            if real.is_relative_to(self._top)
            else str(file)
        )

    def facts(self) -> Mapping[str, Scalar]:
        """Return what the machine offers, from a probe rank; raises the errors of a launch."""
        return self.launcher.probe(self.settings.preload, self.settings.timeout_seconds)

    def place(
        self,
        settings: Settings,
        ranks: int,
        parameter_servers: int | None = None,
        *,
        certain: bool = True,
    ) -> Place:
        """Return backend, device and nodes of a test; raises OptionError or Unavailable.

        With `parameter_servers` it is an RPC launch, and `ranks` are trainers. Unless their number
        is `certain`, as no call of the test may change it, one trainer is placed."""
        field, kind = (
            ("world_sizes", "rank")
            if parameter_servers is None
            else ("trainers", "trainer")
        )
        nodes = (
            nodes_for(settings, self.settings, ranks, self._nodes, field)
            if certain
            else 1
        )
        place = resolve(
            settings, ranks // nodes if certain else 1, self.facts(), nodes, field
        )
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
        machines = (
            {"machines": str(self._other_nodes)}
            if self._other_nodes is not None
            else {}
        )
        return {
            **self.facts(),
            "places": "\n".join(self._places),
            **machines,
            **against,
        }

    def call(
        self,
        nodeid: str,
        plan: Plan,
        function: Callable[..., Any],
        args: Sequence[Any],
        observer: Observer,
    ) -> list[Any]:
        """Call `function(ctx, *args)` on every rank of a fresh group, for a test; return the
        results by rank."""
        if self._leader is not None:
            if isinstance(self._leader, NodeLeaderConnection) and plan.nodes > 1:
                return self._leader.call(plan, function, args, self.launcher)
            return self.launcher.call(plan, function, args, self._leader.relay)
        if self._other_nodes is None or plan.nodes == 1:
            return self.launcher.call(plan, function, args, observer)
        with self._other_nodes.together(
            nodeid, ready_call(plan, function), plan.nodes
        ) as end:
            results = self.launcher.call_for_bytes(
                plan, payload.dumps("call", function, args), observer
            )
            end(Order(OrderKind.END_MEASUREMENT, results=results))
        return unpickle(results)

    def carry_out(self, job: Job, observer: Observer) -> Measured:
        """Measure and judge, on all nodes of the job's plan; raises the errors of a launch, and
        BaselineError."""
        if self._leader is not None:
            return self._leader.carry_out(job, self.launcher, self._store)
        if self._other_nodes is None or job.plan.nodes == 1:
            return self._measured(job, observer)
        with self._other_nodes.together(
            job.nodeid, ready_job(job), job.plan.nodes
        ) as end:
            measured = self._measured(job, observer)
            samples = tuple(
                replace(launch, output=()) for launch in measured.current.taken
            )
            kind = OrderKind.END_MEASUREMENT
            end(
                Order(
                    kind,
                    samples=samples,
                    verdict=measured.verdict,
                    fails=measured.fails,
                )
            )
        return measured

    def _measured(self, job: Job, observer: Observer) -> Measured:
        compare = partial(
            measurement.carry_out, job, self.launcher, self._store, observer
        )
        measured = compare(self._base)
        if measured.verdict.reason == Reason.SAVING and self.settings.extend_baseline:
            self._refuse_worse(measured)
        return (
            measured
            if self._base is not None
            else self._confirmation.confirm(measured, compare)
        )

    def save(self, measured: Measured) -> int:
        """Write a baseline, in place of the one before or in addition to it, and return how many
        sessions it now has. Raises BaselineError."""
        created = datetime.now(timezone.utc).isoformat(timespec="seconds")
        candidate = measured.candidate
        tree, inputs = self._code_and_inputs(measured.current.taken)
        sessions = tuple(
            replace(
                session, created=created, commit=self._commit, tree=tree, inputs=inputs
            )
            for session in candidate.sessions
        )
        path = self._store.write(
            replace(candidate, sessions=sessions), extend=self.settings.extend_baseline
        )
        return len(self._store.read_file(path).sessions)

    def _refuse_worse(self, measured: Measured) -> None:
        """Raise BaselineError if `measured` is worse than the stored sessions. The same code may
        be: that is drift."""
        environment, job = measured.environment, measured.job
        tree, _ = self._code_and_inputs(measured.current.taken)
        if (
            stored := self._store.read(environment, job.test)
        ) is None or tree == stored.sessions[-1].tree != "":
            return
        verdict = decision.judge(
            measured.measurement, stored.measurements, job.limits, level=job.level
        )
        if verdict.status is Status.REGRESSED and (worst := verdict.shown) is not None:
            problem = (
                f"the session was not added, because it is worse: {worst.limit.metric}"
                f" {sentences.change(worst)}"
            )
            remedy = "measure again, or accept it with --ddp-save-baseline"
            raise BaselineError(
                self._store.path(environment, job.test), problem, remedy
            )

    def _code_and_inputs(
        self, launches: Sequence[LaunchSamples]
    ) -> tuple[str, dict[str, str]]:
        """Return git's tree of the code that was measured, "" if there is none that identifies it,
        and its inputs."""
        assert self._trees is not None, "this run writes no baselines"
        top = Path(self._trees.current)
        found: dict[str, str] = {}
        try:
            found = find_inputs(top, launches)
            code = select_code(found)
            if not code or self.settings.against_setup:  # which builds it
                return tree_of(top, self.settings.baseline_dir), found
            ignored = f"git ignores files that ranks imported: {text.some(code)}"
            self._unidentified.setdefault(
                f"{ignored}: ddp_against_setup can build them"
            )
        except GitError as error:
            self._unidentified.setdefault(
                str(error).partition("\n")[0].removeprefix("fatal: ")
            )
        return "", found

    def messages(self) -> Iterator[str]:
        """Yield what is said once about all baselines."""
        yield from self._confirmation.messages()
        for why in self._unidentified:
            yield (
                "a later run cannot measure the code of these baselines again, to confirm a"
                f" regression: {why}"
            )

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


# Backends that torch knows by name, whether or not this build has them: missing here is not a typo.
_KNOWN = ("gloo", "nccl", "xccl", "ucc", "mpi")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What "auto" came to."""

    backend: str
    device: str
    why: str  # of the backend: "asked", "auto: no CUDA device", ...
    nodes: int = 1


def nodes_for(
    settings: Settings,
    of_run: Settings,
    world_size: int,
    nodes: int,
    field: str = "world_sizes",
) -> int:
    """Return over how many of the `nodes` the ranks of a test are dealt; raises as `resolve`.

    These are all nodes, unless the test's settings say otherwise. A test whose marker asks for no
    more than one node's share of the run, or for fewer ranks than there are nodes, stays on the
    first."""
    wanted = settings.nodes
    if wanted is not None and wanted > nodes:
        there = f"{nodes} there" if nodes > 1 else "torchrun started no other node"
        raise Unavailable(f"{where(settings, 'nodes')}: {wanted}: {there}")
    if wanted is None:
        share = (
            max(getattr(of_run, field), default=1)
            if field == "world_sizes"
            else of_run.trainers
        )
        few = max(share // nodes, nodes - 1)
        wanted = 1 if _marked(settings, field) and world_size <= few else nodes
    if world_size % wanted:
        problem = f"divides evenly over the {wanted} nodes"
        raise _wrong(settings, field, world_size, problem, "nodes")
    return wanted


def resolve(
    settings: Settings,
    world_size: int,
    facts: Mapping[str, Scalar],
    nodes: int = 1,
    field: str = "world_sizes",
) -> Place:
    """Return the place for a test of so many ranks on each of the `nodes`; `facts` are
    `rank.environment.probe`'s, `field` is the setting that gave `world_size`.

    Raises Unavailable where a marker asked for what is missing here, OptionError where the command
    line or the ini file did, and its kind MarkerError for what would be wrong on any machine where
    a marker has a part in it.
    """
    kind, count = str(facts["device_type"]), int(facts["device_count"] or 0)
    backends = str(facts["backends"]).split(",")
    if settings.backend != "auto" and settings.backend not in backends:
        there = f"this torch ({facts['torch']}) has {near(settings.backend, backends)}"
        if settings.backend in _KNOWN:
            _missing(settings, "backend", settings.backend, there, field)
        raise _wrong(settings, "backend", settings.backend, there)
    place = replace(
        _choose(settings, world_size, kind, count, backends, facts), nodes=nodes
    )
    if place.device != "cpu":
        devices = (
            f"{count} {kind} device{'s' * (count != 1)} here"
            if count
            else "no accelerator here"
        )
        if place.device not in (kind, *(types := _default_backends(facts))):
            devices += f"; torch knows {near(place.device, types)}"
        if place.device != kind or not count:
            name = "device" if settings.device != "auto" else "backend"
            _missing(settings, name, getattr(settings, name), devices, field)
        if world_size > count:
            each = "a rank needs a device of its own" + f", {world_size} a node" * (
                nodes > 1
            )
            _missing(settings, field, world_size * nodes, f"{each}; {devices}", field)
        for limit in settings.limits:
            if limit.kind.on_cpu_only:
                problem = f"{limit.kind.on_cpu_only} measured on CPU only, not on {place.device}"
                raise _wrong(
                    settings, "limits", str(limit), problem, "backend", "device", field
                )
    return place


def described(
    place: Place, who: str, processes: int, environ: Mapping[str, str]
) -> str:
    """Say where ranks run: "2 ranks over gloo (auto: no CUDA device), each pinned to 1 core of 2".
    `who` are all, `processes` those of this node."""
    ranks = (
        f"{who}{f' on {place.nodes} nodes' * (place.nodes > 1)} over {place.backend} "
        f"({place.why})"
    )
    if place.device != "cpu":
        return f"{ranks}, a {place.device} device each"
    cores = cores_of(processes, environ)
    if cores.threads:
        threads = (
            f"{processes} x {text.several(cores.threads, 'thread')} (OMP_NUM_THREADS)"
        )
        return f"{ranks}: {threads} share {text.several(cores.cores, 'core')}, expect noise"
    if not cores.cores_per_rank:
        return f"{ranks} share {text.several(cores.cores, 'core')}: expect noise"
    each = text.several(cores.cores_per_rank, "core")
    quota = " by the cgroup's quota, expect noise" * cores.quota
    return f"{ranks}, each {'pinned to' if cores.pinned else 'with'} {each} of {cores.cores}{quota}"


def _choose(
    settings: Settings,
    world_size: int,
    kind: str,
    count: int,
    backends: list[str],
    facts: Mapping[str, Scalar],
) -> Place:
    default = _default_backends(facts)
    if settings.device != "auto":
        backend = (
            default.get(settings.device, "gloo")
            if settings.backend == "auto"
            else settings.backend
        )
        return Place(
            backend=backend, device=settings.device, why=f"for {settings.device}"
        )
    if settings.backend != "auto":
        wanted = next(
            (d for d, b in default.items() if b == settings.backend and d != "mps"),
            "cpu",
        )
        return Place(backend=settings.backend, device=wanted, why="asked")
    if kind == "cuda" and "nccl" in backends and count >= world_size:
        return Place(
            backend="nccl",
            device="cuda",
            why=f"auto: {count} CUDA device{'s' * (count != 1)}",
        )
    have = (
        f"{count} CUDA device{'s' * (count != 1)} for {world_size} ranks"
        if kind == "cuda"
        else "no CUDA device"
    )
    return Place(backend="gloo", device="cpu", why=f"auto: {have}")


def _default_backends(facts: Mapping[str, Scalar]) -> dict[str, str]:
    """Return torch's own choice, by device type."""
    return dict(
        pair.split(":", 1) for pair in str(facts["default_backends"]).split(",")
    )


def _wrong(
    settings: Settings, name: str, value: object, problem: str, *others: str
) -> OptionError:
    """Return the error of a setting that does not go together with the `others`."""
    kind = MarkerError if _marked(settings, name, *others) else OptionError
    return kind(where(settings, name), value, problem)


def _marked(settings: Settings, *names: str) -> bool:
    return any(settings.sources.get(name) == MARKER for name in names)


def _missing(
    settings: Settings, name: str, value: object, problem: str, field: str
) -> None:
    if _marked(settings, "backend", "device", field):
        raise Unavailable(f"{where(settings, name)}: {value}: {problem}")
    raise OptionError(where(settings, name), value, problem)
