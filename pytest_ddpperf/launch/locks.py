"""Host-wide locks: no two pytest processes, of whatever user, time steps on the same core or device at once."""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

_POLL_SECONDS = 0.05
_CPUS = Path("/sys/devices/system/cpu")
_PCI = Path("/sys/bus/pci/devices")
# Where those stand who wait for a resource, from the back of the queue to its front: what sysfs has in the folder of
# every device, and every system in "/".
_PLACES = ("power", "uevent", "usr", "etc")


def resources(cpus: Sequence[int], addresses: Sequence[str] = ()) -> tuple[Path, ...]:
    """What a launch must hold alone, sorted: its devices (PCI addresses) or, without any, its cores.

    Each is a folder of sysfs, which every user may open. A lock on such a descriptor works across users and leaves
    nothing behind; lock files in a shared folder would need the right mode from whoever comes first. Where sysfs
    does not show them (macOS, some sandboxes) one lock serves for the whole host.
    """
    wanted = [_PCI / address for address in addresses] or [_CPUS / f"cpu{cpu}" for cpu in cpus]
    return tuple(sorted(path for path in wanted if path.exists())) or (Path("/"),)


@contextmanager
def hold(paths: Sequence[Path], waiting: Callable[[Path], None]) -> Iterator[Sequence[Path]]:
    """Hold all `paths`, which it yields (in their order, so that two launches never wait for each other in a ring).

    Who waits for one queues: a place is left when the next is taken, so nobody is overtaken, least of all by who
    releases and comes again. Those for whom the places do not suffice are let in by chance. `waiting(path)` is called
    again and again while another process has it or is before us.
    """
    with ExitStack() as held:
        for path in paths:
            standing = ExitStack()
            for place in (*_queue(path), path):
                with standing:
                    ahead = ExitStack()
                    ahead.enter_context(_locked(place, partial(waiting, path)))
                standing = ahead
            held.enter_context(standing)
        yield paths


def _queue(path: Path) -> list[Path]:
    return [path / name for name in _PLACES if (path / name).exists()]


@contextmanager
def _locked(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waiting()
                time.sleep(_POLL_SECONDS)
        yield
    finally:
        os.close(descriptor)  # which releases the lock


# "7: FLOCK  ADVISORY  WRITE 4321 00:16:3034 0 EOF": the process, and device and inode of what it has.
_FLOCK = re.compile(r"^\d+: FLOCK +\S+ +\S+ +(\d+) (\S+) ", re.MULTILINE)


def holder(path: Path) -> int | None:
    """The other process that has `path` or, where nobody has, is first in its queue; None where the system does not
    tell: of another container, or on macOS."""
    try:
        told = Path("/proc/locks").read_text()
        files = [place.stat() for place in (path, *reversed(_queue(path)))]
    except OSError:
        return None
    pids = {file: int(pid) for pid, file in _FLOCK.findall(told) if int(pid) != os.getpid()}
    names = (f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}" for file in files)
    return next((pids[name] for name in names if name in pids), None)
