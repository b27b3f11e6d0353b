"""Finds a process outside of a launch that feeds its ranks. It goes on while they are stopped
between stretches, so what they read next has cost no time."""

import glob
import os
import stat
from contextlib import suppress
from pathlib import Path

from pytest_ddpperf.wire.boot import children, contents

_Pipes = set[tuple[str, int, int]]  # name of the link, device and inode of each


def find_feeder(server: int) -> str:
    """Name a process that writes to a pipe which processes below this rank server read, and that is
    not below it; "" if there is none, or without /proc."""
    below = _descendants(server)
    read: _Pipes = set()
    for pid in below:
        read |= _pipes(pid, but=os.O_WRONLY)
    # ranks inherited these from their server: they belong to no launch
    read -= _pipes(server, but=None)
    names = {name for name, _, _ in read}
    if not names:
        return ""
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        if pid == server or pid in below:
            continue
        if read & _pipes(pid, but=os.O_RDONLY, names=names):
            return f"{contents(folder / 'comm')} (pid {pid})"
    return ""


def count_helpers(server: int, ranks: int) -> int:
    """Return how many processes each of so many ranks below this rank server has started, on
    average."""
    return max(len(_descendants(server)) - ranks, 0) // ranks


def _descendants(pid: int) -> set[int]:
    found: set[int] = set()
    for child in children(pid):
        found |= {child, *_descendants(child)}
    return found


def _pipes(
    pid: int, *, but: int | None, names: set[str] | None = None
) -> _Pipes:
    """Return the pipes that a process has open, except those in the mode `but`; with `names` only
    those."""
    found: _Pipes = set()
    for link in glob.glob(f"/proc/{pid}/fd/*"):
        # it was closed meanwhile, or belongs to another user
        with suppress(OSError, IndexError):
            name = os.readlink(link)
            # a file of another process may be on a disk that does not answer
            if names is not None and name not in names:
                continue
            status = os.stat(link)
            if not stat.S_ISFIFO(status.st_mode):
                continue
            info = contents(Path(link.replace("/fd/", "/fdinfo/")))
            flags = info.partition("flags:")[2].split()[0]
            if int(flags, 8) & os.O_ACCMODE != but:
                found.add((name, status.st_dev, status.st_ino))
    return found
