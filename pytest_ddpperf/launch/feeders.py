"""Who feeds ranks from outside of their launch: it goes on while the ranks are stopped between
stretches, so that what they read next is ready without having cost any time."""

from __future__ import annotations

import glob
import os
import stat
from contextlib import suppress
from pathlib import Path

from pytest_ddpperf.wire.boot import children, contents

_Pipes = set[tuple[int, int]]  # device and inode of each


def find_feeder(server: int) -> str:
    """Return, in words, a process that writes to a pipe which the ranks of this rank server read,
    or what they started, and which is not stopped with them; "" if there is none, or on a system
    without /proc."""
    stopped = _descendants(server)
    read: _Pipes = set()
    for pid in stopped:
        read |= _pipes(pid, but=os.O_WRONLY)
    # inherited, so not of a launch
    read -= _pipes(server, but=None)
    if not read:
        return ""
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        if pid == server or pid in stopped:
            continue
        if read & _pipes(pid, but=os.O_RDONLY):
            return f"{contents(folder / 'comm')} (pid {pid})"
    return ""


def _descendants(pid: int) -> set[int]:
    found: set[int] = set()
    for child in children(pid):
        found |= {child, *_descendants(child)}
    return found


def _pipes(pid: int, *, but: int | None) -> _Pipes:
    """Return the pipes that a process has open, those in one mode left out."""
    found: _Pipes = set()
    for link in glob.glob(f"/proc/{pid}/fd/*"):
        # closed meanwhile, or another user's
        with suppress(OSError, IndexError):
            status = os.stat(link)
            if not stat.S_ISFIFO(status.st_mode):
                continue
            info = contents(Path(link.replace("/fd/", "/fdinfo/")))
            flags = info.partition("flags:")[2].split()[0]
            if int(flags, 8) & os.O_ACCMODE != but:
                found.add((status.st_dev, status.st_ino))
    return found
