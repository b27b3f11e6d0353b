"""Launches: what can be asked of ranks. Knows neither limits nor baselines."""

import json
import os
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    nullcontext,
)
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pytest_ddpperf import text
from pytest_ddpperf.launch.collect import collect
from pytest_ddpperf.launch.output import Observer
from pytest_ddpperf.launch.paused_launch import PausedLaunch, dropping
from pytest_ddpperf.launch.placement import hold, interconnect, place, resources
from pytest_ddpperf.launch.remote_ranks import Nodes, Part, RemoteRanks
from pytest_ddpperf.launch.request import rank_request, read_by, recorded
from pytest_ddpperf.launch.run import (
    Delivery,
    Launch,
    LaunchFiles,
    Leader,
    LocalShareLaunch,
    launch_files,
)
from pytest_ddpperf.launch.server_client import RankServer
from pytest_ddpperf.launch.template import Templates, with_hash_seed
from pytest_ddpperf.records import codec
from pytest_ddpperf.records.errors import DdpPerfError, NodesError
from pytest_ddpperf.records.plan import Function, Plan, Setup, Variables
from pytest_ddpperf.records.samples import (
    Digests,
    Facts,
    FoundFacts,
    Imported,
    LaunchSamples,
    Window,
    Windows,
)
from pytest_ddpperf.wire import payload
from pytest_ddpperf.wire.boot import listen
from pytest_ddpperf.wire.opened import Opened
from pytest_ddpperf.wire.source_trees import Trees, is_code

# Imported for RPC launches only: it takes half a second.
_RPC_PRELOAD = ("pytest_ddpperf.rank.rpc",)


# What is known of a command's machine from a probe, which is over when the command runs: nothing
# that changes by the minute.
_OF_MACHINE = """
    python torch cuda hip nccl cpu_model host kernel driver
    device_model device_memory_gib mig_profile power_limit_watts
""".split()


_L = TypeVar("_L", bound=Launch)


def _facts(windows: Windows) -> FoundFacts:
    """Return the facts of the ranks; where devices or nodes differ, those of all: "NVIDIA A100 +
    NVIDIA H100"."""
    found = dict(windows[0].facts)
    for name in found:
        values = {
            window.facts[name] for window in windows if name in window.facts
        }
        if len(values) > 1:
            found[name] = " + ".join(
                sorted(str(value) for value in values if value is not None)
            )
    return found


@dataclass
class Launcher:
    """Launches of one pytest session, one after the other, over one rank server; those of
    references over another one, since they are alive at the same time."""

    # yields the test modules and conftests as name -> file
    modules: Callable[[], Mapping[str, str]]
    # there will be RPC launches, so their imports are preloaded
    rpc: bool = False
    # where the ranks import the user's code from; samples then list what they imported
    trees: Trees | None = None
    folder: str = ""  # removed if this process is killed
    nodes: Nodes | None = None  # the other nodes, for plans that have several
    # whether measurements hold the locks of their cores or devices
    takes_locks: bool = True
    # of its rank server; they are closed with it
    templates: Templates = field(default_factory=Templates)
    _facts: FoundFacts | None = None
    # of accelerators, by CUDA, when facts were asked for
    _visible: str | None = None

    def __post_init__(self) -> None:
        made_with = self.templates, self.trees, self.folder
        self._server = RankServer(*made_with)
        self._reference_server = RankServer(*made_with)
        self._began = time.time()

    def probe(self, preload: Sequence[str], timeout: float) -> Facts:
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
            delivery = self._launch(
                plan, payload.dumps("probe", None, ()), Observer()
            )
            self._facts = json.loads(delivery.results[0])
        return self._facts

    def measure(
        self,
        plan: Plan,
        setup: Setup,
        observer: Observer,
        others: Sequence[Setup] = (),
    ) -> LaunchSamples:
        """Run one launch of `plan` on fresh ranks; raises DdpPerfError.

        `setup` is None where the plan has a collective. In an RPC launch it is the trainers', and
        `others` those of the master and of the parameter servers.
        """
        task = payload.dumps("measure", setup, others)
        with self.alone(plan, observer):
            return self._samples(plan, self._launch(plan, task, observer))

    def take_part(
        self, plan: Plan, part: Part, task: bytes, leader: Leader
    ) -> None:
        """Start this node's part of a launch of `plan` that another leads; raises DdpPerfError."""
        self.ready_for(plan)
        # It looks up when the leader says something.
        remote = RemoteRanks(leader.socket)
        with (
            self._files(plan, part, task, master=part.store) as files,
            LocalShareLaunch(self._server, files, Observer(), remote) as launch,
        ):
            launch.serve(leader, self._digests)

    @contextmanager
    def pause(
        self, plan: Plan, setup: Setup, observer: Observer
    ) -> Iterator[PausedLaunch]:
        """Yield a launch of `plan` that has warmed up and is paused; it is over, clean-up included,
        on exit.

        One at a time, and one of a reference, while the caller holds the cores (see `alone`);
        raises as `measure`."""
        make = partial(PausedLaunch, partial(self._samples, plan))
        task = payload.dumps("measure", setup, ())
        with self._opened(
            make, plan, task, observer, in_stretches=True
        ) as launch:
            launch.begin()
            with dropping(launch):
                yield launch

    def _samples(self, plan: Plan, delivery: Delivery) -> LaunchSamples:
        timed = delivery.results[: plan.world_size]
        windows = [codec.from_json(Window, result) for result in timed]
        placement = place(len(plan.part(0)), os.environ)
        facts: FoundFacts = {
            **_facts(windows),
            "interconnect": self._interconnect(plan),
            **recorded(self._variables()),
            "cores": placement.cores,
        }
        if plan.command:
            found = self._facts or {}
            facts |= {name: found.get(name) for name in _OF_MACHINE}
        else:
            facts["cores_per_rank"] = placement.cores_per_rank
            facts["pinned"] = placement.pinned
        if plan.nodes > 1:
            facts |= {
                **self._other_nodes.facts(plan.nodes),
                "nodes": plan.nodes,
                "devices_per_node": plan.world_size // plan.nodes,
            }
        # Empty if the process was killed while serving, because a trainer's clean-up did not end.
        served = filter(None, delivery.results[plan.world_size :])
        every = [window.imported for window in windows]
        every += [codec.from_json(Imported, result) for result in served]
        facts |= read_by(imported.variables for imported in every)
        files = self._digests(delivery.opened)
        if self.trees is not None:
            # another node does not know what both versions have
            own = {
                file
                for imported in every
                for file in imported.files
                if not self.trees.keeps(file)
            }
            files |= self.trees.digests(own)
        notes = (*delivery.notes, *self._compare_nodes(delivery.files))
        return collect(
            plan,
            windows,
            replace(delivery, notes=notes),
            facts=facts,
            files=dict(sorted(files.items())),
            others=tuple(
                sorted({name for each in every for name in each.others})
            ),
        )

    def _digests(self, opened: Opened) -> dict[str, str]:
        """Return the digests of the files that processes of this node opened; raises BaseSideError
        if one is of the other tree."""
        if self.trees is None:
            return {}
        opened.refuse_strays(self.trees)
        return opened.digests(self.trees, self._began)

    def _compare_nodes(self, files: Mapping[str, Digests]) -> Iterator[str]:
        """Yield, in words, which nodes read other data than this one has, by the digests of what
        their ranks opened; raises NodesError for code."""
        for node, there in files.items():
            here = self.trees.digests(there) if self.trees else {}
            differing = [
                file
                for file, digest in here.items()
                if digest and there[file] and digest != there[file]
            ]
            code = list(filter(is_code, differing))
            if code:
                raise NodesError(
                    f"{node} has other files than the first node: {text.some(code)}"
                )
            if differing:
                yield f"{node} reads other data than the first node: {text.some(differing)}"

    def _variables(self) -> Variables:
        """Return this process's variables. A path in either tree is the same fact on both sides."""
        environ = with_hash_seed(os.environ)
        if self.trees is None:
            return environ
        return {
            name: self.trees.as_current(value)
            for name, value in environ.items()
        }

    def call(
        self,
        plan: Plan,
        function: Function,
        args: Sequence[Any],
        observer: Observer,
    ) -> list[Any]:
        """`function(ctx, *args)` on every rank of a fresh group: the results by rank."""
        return unpickle(
            self.call_for_bytes(
                plan, payload.dumps("call", function, args), observer
            )
        )

    def call_for_bytes(
        self, plan: Plan, task: bytes, observer: Observer
    ) -> tuple[bytes, ...]:
        """Run a `call` and return the pickled results."""
        delivery = self._launch(
            replace(plan, warmup=0, steps=0), task, observer
        )
        observer.wrote(delivery.output)
        return delivery.results

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
        self._reference_server.stop()
        self.templates.close()

    @contextmanager
    def alone(self, plan: Plan, observer: Observer) -> Iterator[None]:
        """Hold the locks of the cores or devices, on all nodes: nothing else is timed there
        meanwhile."""
        self.ready_for(plan)  # first, for it may take seconds
        here = self.alone_here(plan, len(plan.part(0)), observer)
        with (
            here
            if plan.nodes == 1
            else self._other_nodes.alone(plan, here, observer)
        ):
            yield

    def alone_here(
        self, plan: Plan, processes: int, observer: Observer
    ) -> AbstractContextManager[Sequence[Path]]:
        """Hold the locks of this node, which starts so many of the processes; yields their
        paths."""
        if not self.takes_locks:
            return nullcontext(())
        addresses = str(
            (self._facts or {}).get("device_addresses") or ""
        ).split(",")
        # else all are locked
        if not (self._are_others_visible() or plan.command):
            addresses = addresses[:processes]
        cores = place(processes, os.environ).used
        return hold(
            resources(cores, addresses if plan.device == "cuda" else ()),
            observer.waiting,
        )

    def ready_for(self, plan: Plan) -> None:
        """Start a rank server for these launches, unless there is one; raises DdpPerfError."""
        self.rpc = self.rpc or plan.rpc
        preload = plan.preload
        if self.rpc:
            preload += _RPC_PRELOAD
        self._server_for(plan).ensure(os.environ, preload)

    def _server_for(self, plan: Plan) -> RankServer:
        return self._reference_server if plan.is_reference else self._server

    def _launch(self, plan: Plan, task: bytes, observer: Observer) -> Delivery:
        with self._opened(Launch, plan, task, observer) as launch:
            launch.begin()
            return launch.finish()

    @contextmanager
    def _opened(
        self,
        make: Callable[..., _L],
        plan: Plan,
        task: bytes,
        observer: Observer,
        *,
        in_stretches: bool = False,
    ) -> Iterator[_L]:
        """Yield what `make` returns; its arguments are those of Launch."""
        self.ready_for(plan)
        part, remote = Part(processes=plan.part(0)), RemoteRanks()
        bound, master = None, None
        with ExitStack() as opened:
            if plan.nodes > 1:
                nodes = self._other_nodes
                bound = opened.enter_context(listen(nodes.address))
                master = bound.getsockname()[:2]
                part = replace(part, store=master, interface=nodes.interface)
                remote = nodes.parts(plan, master)
            elif plan.boundary:
                bound = opened.enter_context(listen("127.0.0.1"))
                master = bound.getsockname()
            files = opened.enter_context(
                self._files(
                    plan, part, task, master=master, in_stretches=in_stretches
                )
            )
            server = self._server_for(plan)
            launch = make(server, files, observer, remote, bound)
            opened.enter_context(launch)
            yield launch

    def _files(
        self, plan: Plan, part: Part, task: bytes, **further: Any
    ) -> AbstractContextManager[LaunchFiles]:
        """Make the files of a launch; what is `further` asked of ranks is as in `rank_request`."""
        request = partial(
            rank_request,
            plan=plan,
            part=part,
            modules=self.modules(),
            trees=self.trees,
            **further,
        )
        return launch_files(self._server_for(plan), request, task)

    @property
    def _other_nodes(self) -> Nodes:
        assert self.nodes is not None, (
            "a plan for several nodes in a run on one"
        )
        return self.nodes


def unpickle(results: Sequence[bytes]) -> list[Any]:
    """Unpickle the results of ranks, by rank; raises DdpPerfError."""
    values = []
    for rank, result in enumerate(results):
        try:
            values.append(pickle.loads(result))
        except Exception as error:
            problem = (
                f"cannot be loaded in pytest: {type(error).__name__}: {error}"
            )
            raise DdpPerfError(f"the result of rank {rank} {problem}") from None
    return values
