"""Host-wide locks: no two pytest processes, of whatever user, time steps on the same core or device at once."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

_POLL_SECONDS = 0.05
_CPUS = Path("/sys/devices/system/cpu")
_PCI = Path("/sys/bus/pci/devices")


def resources(cpus: Sequence[int], addresses: Sequence[str] = ()) -> tuple[Path, ...]:
    """What a launch must hold alone, sorted: its devices (PCI addresses) or, without any, its cores.

    Each is a folder of sysfs, which every user may open. A lock on such a descriptor works across users and leaves
    nothing behind; lock files in a shared folder would need the right mode from whoever comes first. Where sysfs
    does not show them (macOS, some sandboxes) one lock serves for the whole host.
    """
    wanted = [_PCI / address for address in addresses] or [_CPUS / f"cpu{cpu}" for cpu in cpus]
    return tuple(sorted(path for path in wanted if path.exists())) or (Path("/"),)


@contextmanager
def hold(paths: Sequence[Path], waiting: Callable[[Path], None]) -> Iterator[None]:
    """Hold all `paths` (in their order, so that two launches never wait for each other in a ring).

    `waiting(path)` is called again and again while another process has one of them.
    """
    with ExitStack() as stack:
        for path in paths:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, descriptor)  # which releases the lock
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    waiting(path)
                    time.sleep(_POLL_SECONDS)
        yield
