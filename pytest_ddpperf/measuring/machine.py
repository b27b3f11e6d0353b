"""Where a test runs: the asked backend and device against what the machine has. Knows facts, not torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pytest_ddpperf.launch.placement import place as cores_of
from pytest_ddpperf.options.definitions import MARKER
from pytest_ddpperf.options.parse import near
from pytest_ddpperf.options.settings import Settings, where
from pytest_ddpperf.records.errors import MarkerError, OptionError
from pytest_ddpperf.records.samples import Scalar
from pytest_ddpperf.report import text

# Backends that torch knows by name, whether or not this build has them: missing here is not a typo.
_KNOWN = ("gloo", "nccl", "xccl", "ucc", "mpi")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What "auto" came to."""

    backend: str
    device: str
    why: str  # of the backend: "asked", "auto: no CUDA device", ...
    nodes: int = 1


class Unavailable(Exception):
    """A marker asks for something that this machine lacks: the test is skipped."""


def nodes_for(settings: Settings, of_run: Settings, world_size: int, nodes: int, field: str = "world_sizes") -> int:
    """Return over how many of the `nodes` the ranks of a test are dealt; raises as `resolve`.

    These are all nodes, unless the test's settings say otherwise. A test whose marker asks for no more than one node's
    share of the run, or for fewer ranks than there are nodes, stays on the first."""
    wanted = settings.nodes
    if wanted is not None and wanted > nodes:
        there = f"{nodes} there" if nodes > 1 else "torchrun started no other node"
        raise Unavailable(f"{where(settings, 'nodes')}: {wanted}: {there}")
    if wanted is None:
        share = max(getattr(of_run, field), default=1) if field == "world_sizes" else of_run.trainers
        few = max(share // nodes, nodes - 1)
        wanted = 1 if _marked(settings, field) and world_size <= few else nodes
    if world_size % wanted:
        problem = f"divides evenly over the {wanted} nodes"
        raise _wrong(settings, field, world_size, problem, "nodes")
    return wanted


def resolve(
    settings: Settings, world_size: int, facts: Mapping[str, Scalar], nodes: int = 1, field: str = "world_sizes"
) -> Place:
    """Return the place for a test of so many ranks on each of the `nodes`; `facts` are `rank.environment.probe`'s,
    `field` is the setting that gave `world_size`.

    Raises Unavailable where a marker asked for what is missing here, OptionError where the command line or the
    ini file did, and its kind MarkerError for what would be wrong on any machine where a marker has a part in it.
    """
    kind, count = str(facts["device_type"]), int(facts["device_count"] or 0)
    backends = str(facts["backends"]).split(",")
    if settings.backend != "auto" and settings.backend not in backends:
        there = f"this torch ({facts['torch']}) has {near(settings.backend, backends)}"
        if settings.backend in _KNOWN:
            _missing(settings, "backend", settings.backend, there, field)
        raise _wrong(settings, "backend", settings.backend, there)
    place = replace(_choose(settings, world_size, kind, count, backends, facts), nodes=nodes)
    if place.device != "cpu":
        devices = f"{count} {kind} device{'s' * (count != 1)} here" if count else "no accelerator here"
        if place.device not in (kind, *(types := _default_backends(facts))):
            devices += f"; torch knows {near(place.device, types)}"
        if place.device != kind or not count:
            name = "device" if settings.device != "auto" else "backend"
            _missing(settings, name, getattr(settings, name), devices, field)
        if world_size > count:
            each = "a rank needs a device of its own" + f", {world_size} a node" * (nodes > 1)
            _missing(settings, field, world_size * nodes, f"{each}; {devices}", field)
        for limit in settings.limits:
            if limit.on_cpu_only:
                problem = f"{limit.on_cpu_only} measured on CPU only, not on {place.device}"
                raise _wrong(settings, "limits", str(limit), problem, "backend", "device", field)
    return place


def described(place: Place, who: str, processes: int, environ: Mapping[str, str]) -> str:
    """Say where ranks run: "2 ranks over gloo (auto: no CUDA device), each pinned to 1 core of 2". `who` are all,
    `processes` those of this node."""
    ranks = f"{who}{f' on {place.nodes} nodes' * (place.nodes > 1)} over {place.backend} ({place.why})"
    if place.device != "cpu":
        return f"{ranks}, a {place.device} device each"
    cores = cores_of(processes, environ)
    if cores.threads:
        threads = f"{processes} x {text.several(cores.threads, 'thread')} (OMP_NUM_THREADS)"
        return f"{ranks}: {threads} share {text.several(cores.cores, 'core')}, expect noise"
    if not cores.cores_per_rank:
        return f"{ranks} share {text.several(cores.cores, 'core')}: expect noise"
    each = text.several(cores.cores_per_rank, "core")
    quota = " by the cgroup's quota, expect noise" * cores.quota
    return f"{ranks}, each {'pinned to' if cores.pinned else 'with'} {each} of {cores.cores}{quota}"


def _choose(
    settings: Settings, world_size: int, kind: str, count: int, backends: list[str], facts: Mapping[str, Scalar]
) -> Place:
    default = _default_backends(facts)
    if settings.device != "auto":
        backend = default.get(settings.device, "gloo") if settings.backend == "auto" else settings.backend
        return Place(backend=backend, device=settings.device, why=f"for {settings.device}")
    if settings.backend != "auto":
        wanted = next((d for d, b in default.items() if b == settings.backend and d != "mps"), "cpu")
        return Place(backend=settings.backend, device=wanted, why="asked")
    if kind == "cuda" and "nccl" in backends and count >= world_size:
        return Place(backend="nccl", device="cuda", why=f"auto: {count} CUDA device{'s' * (count != 1)}")
    have = f"{count} CUDA device{'s' * (count != 1)} for {world_size} ranks" if kind == "cuda" else "no CUDA device"
    return Place(backend="gloo", device="cpu", why=f"auto: {have}")


def _default_backends(facts: Mapping[str, Scalar]) -> dict[str, str]:
    """Return torch's own choice, by device type."""
    return dict(pair.split(":", 1) for pair in str(facts["default_backends"]).split(","))


def _wrong(settings: Settings, name: str, value: object, problem: str, *others: str) -> OptionError:
    """Return the error of a setting that does not go together with the `others`."""
    kind = MarkerError if _marked(settings, name, *others) else OptionError
    return kind(where(settings, name), value, problem)


def _marked(settings: Settings, *names: str) -> bool:
    return any(settings.sources.get(name) == MARKER for name in names)


def _missing(settings: Settings, name: str, value: object, problem: str, field: str) -> None:
    if _marked(settings, "backend", "device", field):
        raise Unavailable(f"{where(settings, name)}: {value}: {problem}")
    raise OptionError(where(settings, name), value, problem)
