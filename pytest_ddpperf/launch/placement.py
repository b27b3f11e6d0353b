"""The place of ranks on the machine: the cores that CPU ranks are pinned to, the links between
GPUs, and host-wide locks, so that no two pytest processes, of any user, time steps on the same core
or device at once."""

import fcntl
import os
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path, PurePosixPath

from pytest_ddpperf.records.plan import Variables
from pytest_ddpperf.records.record import record
from pytest_ddpperf.wire.boot import contents

_CPUS = Path("/sys/devices/system/cpu")
_PCI = Path("/sys/bus/pci/devices")


@record
class Placement:
    """The cores of every rank; empty tuples where the platform cannot pin (macOS)."""

    cpus: tuple[tuple[int, ...], ...]  # rank x core
    cores: int  # usable by this process, or as many as a quota has the time of
    cores_per_rank: int  # 0: ranks share cores
    pinned: bool  # not where all share all
    # of a rank whose environment asks for none; 0: torch's choice
    own_threads: int
    quota: bool  # less time than that of the usable cores
    # that the environment asks for in each rank, where its share has not so many cores;
    # else 0
    threads: int

    @property
    def used(self) -> tuple[int, ...]:
        """All cores that some rank runs on, in order."""
        return tuple(sorted({cpu for cpus in self.cpus for cpu in cpus}))


@cache
def usable_cores() -> tuple[int, ...]:
    """Return the cores that this process may run on; () where the system does not say (macOS).

    The first call decides, after conftests and before any test: one that binds pytest to fewer
    cores must not change the ranks of this side only."""
    return (
        tuple(sorted(os.sched_getaffinity(0)))
        if hasattr(os, "sched_getaffinity")
        else ()
    )


def place(
    world_size: int,
    environ: Variables,
    usable: tuple[int, ...] | None = None,
    quota: float | None = None,
) -> Placement:
    """Disjoint, equal shares of the usable cores; with more ranks than cores, rank r gets core r
    mod n.

    Where the ranks' `environ` asks for more threads a rank than a share has cores, all ranks share
    all cores: threads that spin for each other at every operation stand still when one core has to
    do for several. So they do under a quota of CPU time, with threads for their share of it: others
    of the host may be on any of the cores.
    """
    if usable is None:
        usable = usable_cores()
        quota = quota_cores(Path("/"))
    ordered = sorted(usable, key=_physical)
    there = len(ordered) or os.cpu_count() or 1
    cores = min(there, max(int(quota), 1)) if quota is not None else there
    share, threads = cores // world_size, _threads(environ)
    crowded, limited = threads > max(share, 1), cores < there
    shared = crowded and world_size > 1
    cpus: tuple[tuple[int, ...], ...] = ((),) * world_size
    if shared or limited:
        cpus = (tuple(sorted(ordered)),) * world_size
    elif share == 0 and ordered:
        cpus = tuple((ordered[rank % cores],) for rank in range(world_size))
    elif ordered:
        cpus = tuple(
            tuple(sorted(ordered[rank * share : (rank + 1) * share]))
            for rank in range(world_size)
        )
    return Placement(
        cpus=cpus,
        cores=cores,
        cores_per_rank=0 if shared else share,
        pinned=bool(ordered) and not (shared or limited),
        own_threads=max(share, 1) if limited else len(cpus[0]),
        quota=limited,
        threads=threads if crowded else 0,
    )


def _threads(environ: Variables) -> int:
    """Return the first number of OMP_NUM_THREADS, which may be a list by depth; 0 if there is
    none."""
    match = re.match(r"\s*\d+", environ.get("OMP_NUM_THREADS", ""))
    return int(match[0]) if match else 0


def _physical(cpu: int) -> tuple[int, int, int]:
    """Sorts hardware threads of one core next to each other, and cores of one package."""
    folder = _CPUS / f"cpu{cpu}" / "topology"
    package, core = (
        contents(folder / "physical_package_id"),
        contents(folder / "core_id"),
    )
    return (int(package), int(core), cpu) if package and core else (0, cpu, cpu)


def quota_cores(root: Path) -> float | None:
    """Return the cores whose time the cgroups of this process allow (version 2); None if there is
    no limit."""
    quotas = []
    for folder in _cgroups(root):
        # microseconds in each period; "max" without a limit
        limit = re.fullmatch(r"(\d+) ([1-9]\d*)", contents(folder / "cpu.max"))
        if limit:
            quotas.append(int(limit[1]) / int(limit[2]))
    return min(quotas, default=None)


def _cgroups(root: Path) -> Iterator[Path]:
    """Yield the folders of this process's cgroup and of those above it. A container often sees the
    uppermost alone."""
    listed = contents(root / "proc/self/cgroup")
    inside = re.search("^0::(.*)", listed, re.MULTILINE)
    own = PurePosixPath(inside[1] if inside else "/")
    mounts = contents(root / "proc/self/mounts")
    for mount in re.findall(r"^\S+ (\S+) cgroup2 ", mounts, re.MULTILINE):
        for each in (own, *own.parents):
            folder = root / mount.lstrip("/") / str(each).lstrip("/")
            if folder.is_dir():
                yield folder


def kernel_list(numbers: Sequence[int]) -> str:
    """Write numbers as the kernel and taskset do: "0-3,8"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(
        f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs
    )


def interconnect(topology: str, gpus: list[int]) -> str | None:
    """Return the kinds of links between any two of `gpus`, nvidia-smi's numbers, as "NV18" or
    "NV2+SYS".

    None where there is no pair, or where the matrix does not show them.
    """
    links: set[str] = set()
    numbers = {f"GPU{gpu}": gpu for gpu in gpus}
    for line in topology.splitlines():
        name, *cells = line.split() or [""]
        if name in numbers and "X" in cells:
            links |= {
                cells[other]
                for other in gpus
                if other != numbers[name] and other < len(cells)
            }
    return "+".join(sorted(links)) or None


# Runs that wait retry at random intervals (seconds), so that each has a fair chance when a lock
# becomes free.
_RETRY_SECONDS = (0.005, 0.05)
# For tests of this project that need ranks but measure nothing: "off" takes no locks.
SWITCH = "DDPPERF_LOCKS"


def resources(
    cpus: Sequence[int], addresses: Sequence[str] = ()
) -> tuple[Path, ...]:
    """Return the paths that a launch locks, sorted: its devices (PCI addresses) or, if it has none,
    its cores.

    Each is a folder of sysfs, which every user may open. A lock on such a descriptor works across
    users and leaves nothing behind; lock files in a shared folder would need the right mode from
    the first user. Where sysfs does not show them (macOS, some sandboxes) one lock serves for the
    whole host.
    """
    wanted = [_PCI / address for address in addresses] or [
        _CPUS / f"cpu{cpu}" for cpu in cpus
    ]
    return tuple(sorted({path for path in wanted if path.exists()})) or (
        Path("/"),
    )


def is_device(resource: Path) -> bool:
    """Say whether a path of `resources` is a device's: its name is a PCI address."""
    return ":" in resource.name


@contextmanager
def hold(
    paths: Sequence[Path], waiting: Callable[[Path], None]
) -> Iterator[Sequence[Path]]:
    """Lock all `paths`, which it yields, in their order, so that two launches never wait for each
    other in a ring.

    `waiting(path)` is called before each retry while another process has the lock on `path`.
    """
    with ExitStack() as locks:
        for path in paths if os.environ.get(SWITCH) != "off" else ():
            locks.enter_context(_locked(path, waiting))
        yield paths


@contextmanager
def _locked(path: Path, waiting: Callable[[Path], None]) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waiting(path)
                time.sleep(random.Random().uniform(*_RETRY_SECONDS))
        yield
    finally:
        os.close(descriptor)  # which releases the lock


# "7: FLOCK  ADVISORY  WRITE 4321 00:16:3034 0 EOF": the process, then device and inode of what it
# has locked.
_FLOCK = re.compile(r"^\d+: FLOCK +\S+ +\S+ +(\d+) (\S+) ", re.MULTILINE)


def holder(path: Path) -> int | None:
    """Return the pid of the other process that has locked `path`.

    None if there is none, or if the system does not say: the process is in another container, or
    this is macOS.
    """
    try:
        listed = Path("/proc/locks").read_text()
        file = path.stat()
    except OSError:
        return None
    name = (
        f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
    )
    pids = (
        int(pid) for pid, locked in _FLOCK.findall(listed) if locked == name
    )
    return next((pid for pid in pids if pid != os.getpid()), None)
