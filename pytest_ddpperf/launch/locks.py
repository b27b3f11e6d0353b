"""Host-wide locks, so that no two pytest processes, of any user, time steps on the same core or device at once."""

from __future__ import annotations

import fcntl
import os
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

# Runs that wait retry at random intervals (seconds), so that each has a fair chance when a lock becomes free.
_RETRY_SECONDS = (0.005, 0.05)
_CPUS = Path("/sys/devices/system/cpu")
_PCI = Path("/sys/bus/pci/devices")
# For tests of this project that need ranks but measure nothing: "off" takes no locks.
SWITCH = "DDPPERF_LOCKS"


def resources(cpus: Sequence[int], addresses: Sequence[str] = ()) -> tuple[Path, ...]:
    """Return the paths that a launch locks, sorted: its devices (PCI addresses) or, if it has none, its cores.

    Each is a folder of sysfs, which every user may open. A lock on such a descriptor works across users and leaves
    nothing behind; lock files in a shared folder would need the right mode from the first user. Where sysfs does not
    show them (macOS, some sandboxes) one lock serves for the whole host.
    """
    wanted = [_PCI / address for address in addresses] or [_CPUS / f"cpu{cpu}" for cpu in cpus]
    return tuple(sorted({path for path in wanted if path.exists()})) or (Path("/"),)


def is_device(resource: Path) -> bool:
    """Say whether a path of `resources` is a device's: its name is a PCI address."""
    return ":" in resource.name


@contextmanager
def hold(paths: Sequence[Path], waiting: Callable[[Path], None]) -> Iterator[Sequence[Path]]:
    """Lock all `paths`, which it yields, in their order, so that two launches never wait for each other in a ring.

    `waiting(path)` is called before each retry while another process has the lock on `path`.
    """
    with ExitStack() as locked:
        for path in paths if os.environ.get(SWITCH) != "off" else ():
            locked.enter_context(_locked(path, waiting))
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
                time.sleep(random.uniform(*_RETRY_SECONDS))
        yield
    finally:
        os.close(descriptor)  # which releases the lock


# "7: FLOCK  ADVISORY  WRITE 4321 00:16:3034 0 EOF": the process, then device and inode of what it has locked.
_FLOCK = re.compile(r"^\d+: FLOCK +\S+ +\S+ +(\d+) (\S+) ", re.MULTILINE)


def holder(path: Path) -> int | None:
    """Return the pid of the other process that has locked `path`.

    None if there is none, or if the system does not say: the process is in another container, or this is macOS.
    """
    try:
        listed = Path("/proc/locks").read_text()
        file = path.stat()
    except OSError:
        return None
    name = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
    pids = (int(pid) for pid, locked in _FLOCK.findall(listed) if locked == name)
    return next((pid for pid in pids if pid != os.getpid()), None)
