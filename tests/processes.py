"""Processes of this machine, from /proc, and their ends."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import AnyStr


def descendants(pid: int) -> list[int]:
    """All living processes below `pid`."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] != "Z":
                parents[int(entry.name)] = int(fields[1])
    below = [child for child, parent in parents.items() if parent == pid]
    return below + [
        grandchild for child in below for grandchild in descendants(child)
    ]


def until(condition: Callable[[], object], seconds: float = 600.0) -> None:
    """Wait for what will be soon, even on a busy machine."""
    given_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < given_up
        time.sleep(0.05)


def gone(pids: list[int]) -> bool:
    """Whether all processes have ended (a zombie has)."""
    return not any(map(alive, pids))


def alive(pid: int) -> bool:
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            != "Z"
        )
    except OSError:
        return False


@contextmanager
def ended(
    process: subprocess.Popen[AnyStr],
) -> Iterator[subprocess.Popen[AnyStr]]:
    """It ends with the block at the latest, and takes its ranks along."""
    with process:
        try:
            yield process
        finally:
            process.kill()


def on_terminal(*arguments: str) -> tuple[int, str]:
    """How a pytest ends that has a terminal, as TERM says which, and what it shows there."""
    written = b""

    def read(descriptor: int) -> bytes:
        nonlocal written
        data = os.read(descriptor, 65536)
        written += data
        return data

    status = pty.spawn([sys.executable, "-m", "pytest", *arguments], read)
    return os.waitstatus_to_exitcode(status), written.decode()
