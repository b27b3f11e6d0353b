"""Where tests run: the asked backend, device and nodes against what the machine has. Knows no
pytest."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from pytest_ddpperf import text
from pytest_ddpperf.launch.placement import place as cores_of
from pytest_ddpperf.launch.request import visible_devices
from pytest_ddpperf.options.definitions import MARKER
from pytest_ddpperf.options.parse import near
from pytest_ddpperf.options.settings import Settings, where
from pytest_ddpperf.plugin.role import PytestRole
from pytest_ddpperf.records.errors import MarkerError, OptionError, Unavailable
from pytest_ddpperf.records.plan import (
    KNOWN_BACKENDS,
    NCCL,
    Variables,
    backends_by_device,
)
from pytest_ddpperf.records.samples import Facts

# As --ddp-device: each rank sees its own CUDA device alone.
_ONE_DEVICE = "cuda:0"


class Place(NamedTuple):
    """What "auto" came to."""

    backend: str
    device: str
    why: str  # of the backend: "asked", "auto: no CUDA device", ...
    nodes: int = 1
    sees_one_device: bool = False  # as `Plan` has it


@dataclass
class Places:
    """The places that the tests of a run were given so far."""

    _of_run: Settings
    _role: PytestRole
    _facts: Callable[[], Facts]  # of the machine, from a probe rank
    # in the order of their first test
    _lines: dict[str, None] = field(default_factory=dict)

    def find(
        self,
        settings: Settings,
        ranks: int,
        parameter_servers: int | None = None,
        *,
        certain: bool = True,
    ) -> Place:
        """Return backend, device and nodes of a test; raises OptionError or Unavailable, and the
        errors of a launch.

        With `parameter_servers` it is an RPC launch, and `ranks` are trainers. Unless their number
        is `certain`, as no call of the test may change it, one trainer is placed."""
        field, who = "world_sizes", text.several(ranks, "rank")
        if parameter_servers is not None:
            field, who = "trainers", text.several(ranks, "trainer")
            who += f" and {text.several(parameter_servers, 'parameter server')}"
        nodes = 1
        ranks_of_node = 1
        if certain:
            nodes = nodes_for(
                settings, self._of_run, ranks, self._role.nodes, field
            )
            ranks_of_node = ranks // nodes
        else:
            who += " (unless a call asks for others)"
        place = resolve(settings, ranks_of_node, self._facts(), nodes, field)
        self._note(place, who, ranks // nodes + (parameter_servers or 0))
        return place

    def find_for_command(self, settings: Settings) -> Place:
        """Return the device of a command, which chooses backend and ranks itself; raises as
        `find`."""
        facts = self._facts()
        device = settings.device
        if device == "auto":
            device = str(facts["device_type"])
        asked = replace(settings, backend="auto", device=device, limits=())
        return resolve(asked, 1, facts)._replace(backend="")

    def _note(self, place: Place, who: str, processes: int) -> None:
        here = described(place, who, processes, os.environ)
        self._lines[here] = None
        for version, environ in self._role.environments().items():
            there = described(place, who, processes, environ)
            if there != here:
                self._lines[f"{version}: {there}"] = None

    def __str__(self) -> str:
        """Return the places in words, a line each."""
        return "\n".join(self._lines)


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
    if wanted is None:
        wanted = nodes
        ranks = (
            max(of_run.world_sizes)
            if field == "world_sizes"
            else of_run.trainers
        )
        few = max(ranks // nodes, nodes - 1)
        if world_size <= few and _is_marked(settings, field):
            wanted = 1
    elif wanted > nodes:
        there = (
            f"{nodes} there" if nodes > 1 else "torchrun started no other node"
        )
        raise Unavailable(f"{where(settings, 'nodes')}: {wanted}: {there}")
    if world_size % wanted:
        raise _wrong(
            settings,
            field,
            world_size,
            f"must divide evenly over the {wanted} nodes",
            "nodes",
        )
    return wanted


class _Machine:
    """The facts of `rank.environment.probe` that decide a place."""

    def __init__(self, facts: Facts) -> None:
        self.torch = facts["torch"]
        self.backends = str(facts["backends"]).split(",")
        self.device = str(facts["device_type"])
        self.count = int(facts["device_count"] or 0)
        # torch's own choice, by device type
        self.default_backends = backends_by_device(
            str(facts["default_backends"])
        )

    def devices(self, kind: str) -> str:
        """Return the number of devices in words."""
        return text.several(self.count, f"{kind} device")


def resolve(
    settings: Settings,
    world_size: int,
    facts: Facts,
    nodes: int = 1,
    field: str = "world_sizes",
) -> Place:
    """Return the place for a test of so many ranks on each of the `nodes`; `facts` are
    `rank.environment.probe`'s, `field` is the setting that gave `world_size`.

    Raises Unavailable where a marker asked for what is missing here, OptionError where the command
    line or the ini file did, and its kind MarkerError for what would be wrong on any machine where
    a marker has a part in it.
    """
    machine = _Machine(facts)
    sees_one = settings.device == _ONE_DEVICE
    if sees_one:
        if field == "trainers":
            raise _wrong(settings, "device", _ONE_DEVICE, "not for RPC")
        settings = replace(settings, device="cuda")
        # of those that are listed, a process sees the first alone
        mig_devices = [
            name
            for name in visible_devices(os.environ)
            if name.startswith("MIG-")
        ]
        machine.count = max(machine.count, len(mig_devices))
    _check_backend(settings, machine)
    place = _choose(settings, world_size, machine)._replace(
        nodes=nodes, sees_one_device=sees_one
    )
    composite = backends_by_device(place.backend)
    if composite and place.device not in composite:
        raise _wrong(
            settings,
            "backend",
            place.backend,
            f"has no backend for {place.device}",
            "device",
        )
    if place.device != "cpu":
        _check_devices(settings, place, world_size, machine, field)
    return place


def _check_backend(settings: Settings, machine: _Machine) -> None:
    """Raise as `resolve` if this torch lacks a backend."""
    if settings.backend == "auto":
        return
    composite = backends_by_device(settings.backend)
    for name in composite.values() or (settings.backend,):
        if name in machine.backends:
            continue
        there = (
            f"this torch ({machine.torch}) has {near(name, machine.backends)}"
        )
        # known to torch, so missing here is not a typo
        refused = _missing if name in KNOWN_BACKENDS else _wrong
        raise refused(settings, "backend", settings.backend, there)


def _check_devices(
    settings: Settings,
    place: Place,
    world_size: int,
    machine: _Machine,
    field: str,
) -> None:
    """Raise as `resolve` if there are too few devices, or if limits do not apply to them."""
    devices = "no accelerator here"
    if machine.count:
        devices = f"{machine.devices(machine.device)} here"
    if place.device not in (machine.device, *machine.default_backends):
        devices += (
            f"; torch knows {near(place.device, machine.default_backends)}"
        )
    if place.device != machine.device or not machine.count:
        name = "device" if settings.device != "auto" else "backend"
        raise _missing(settings, name, getattr(settings, name), devices)
    if world_size > machine.count:
        each = "a rank needs a device of its own"
        if place.nodes > 1:
            each += f", {world_size} a node"
        raise _missing(
            settings,
            field,
            world_size * place.nodes,
            f"{each}; {devices}",
            "backend",
            "device",
        )
    for limit in settings.limits:
        if limit.kind.on_cpu_only:
            raise _wrong(
                settings,
                "limits",
                str(limit),
                f"{limit.kind.on_cpu_only} measured on CPU only, not on {place.device}",
                "backend",
                "device",
                field,
            )


def described(
    place: Place, who: str, processes: int, environ: Variables
) -> str:
    """Say where ranks run: "2 ranks over gloo (auto: no CUDA device), each pinned to 1 core of 2".
    `who` are all, `processes` those of this node."""
    if place.nodes > 1:
        who += f" on {place.nodes} nodes"
    ranks = f"{who} over {place.backend} ({place.why})"
    if place.sees_one_device:
        return f"{ranks}, each sees one device, {_ONE_DEVICE}"
    if place.device != "cpu":
        return f"{ranks}, a {place.device} device each"
    cores = cores_of(processes, environ)
    all_cores = text.several(cores.cores, "core")
    if cores.threads:
        threads = f"{processes} x {text.several(cores.threads, 'thread')}"
        return f"{ranks}: {threads} (OMP_NUM_THREADS) share {all_cores}, expect noise"
    if not cores.cores_per_rank:
        return f"{ranks} share {all_cores}: expect noise"
    has = "pinned to" if cores.pinned else "with"
    each = (
        f"{has} {text.several(cores.cores_per_rank, 'core')} of {cores.cores}"
    )
    quota = " by the cgroup's quota, expect noise" if cores.quota else ""
    return f"{ranks}, each {each}{quota}"


def _choose(settings: Settings, world_size: int, machine: _Machine) -> Place:
    backend, device = settings.backend, settings.device
    if device != "auto":
        if backend == "auto":
            backend = machine.default_backends.get(device, "gloo")
        return Place(backend, device, f"for {device}")
    if backend != "auto":
        device = _device_for(backend, machine)
        return Place(backend, device, "asked")
    have = "no CUDA device"
    if machine.device == "cuda":
        have = machine.devices("CUDA")
        if "nccl" not in machine.backends:
            have += ", but this torch has no nccl"
        elif machine.count >= world_size:
            return Place("nccl", "cuda", f"auto: {have}")
        else:
            have += f" for {world_size} ranks"
    return Place("gloo", "cpu", f"auto: {have}")


def _device_for(backend: str, machine: _Machine) -> str:
    """Return the device type that a backend is asked for: an accelerator rather than the CPU."""
    composite = backends_by_device(backend)
    if composite:
        return next((kind for kind in composite if kind != "cpu"), "cpu")
    if backend in NCCL:
        return "cuda"
    defaults = machine.default_backends.items()
    named = (kind for kind, default in defaults if default == backend)
    return next((kind for kind in named if kind != "mps"), "cpu")


def check_limits(settings: Settings) -> None:
    """Refuse the user's limits that the asked steps and launches of a test cannot support: raises
    MarkerError if a marker is part of that, else OptionError."""
    for limit in settings.limits:
        if limit.default or limit.kind.is_exact or settings.disable:
            continue
        # rarely needed, and every run would pay for it
        from pytest_ddpperf.verdict.times import unsupported

        problem = unsupported(
            limit, steps=settings.steps, launches=settings.launches
        )
        if problem:
            raise _wrong(
                settings, "limits", str(limit), problem, "steps", "launches"
            )


def _wrong(
    settings: Settings, name: str, value: object, problem: str, *others: str
) -> OptionError:
    """Return the error of a setting that does not go together with the `others`."""
    kind = MarkerError if _is_marked(settings, name, *others) else OptionError
    return kind(where(settings, name), value, problem)


def _missing(
    settings: Settings, name: str, value: object, problem: str, *others: str
) -> OptionError | Unavailable:
    """Return the error of a setting that asks, with the `others`, for what is not on this
    machine."""
    if _is_marked(settings, name, *others):
        return Unavailable(f"{where(settings, name)}: {value}: {problem}")
    return OptionError(where(settings, name), value, problem)


def _is_marked(settings: Settings, *names: str) -> bool:
    return any(settings.sources.get(name) == MARKER for name in names)
