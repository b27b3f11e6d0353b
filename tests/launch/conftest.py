"""A launcher of one's own: its temporary folders, its server's descendants and its descriptors can be counted."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pytest_ddpperf.launch import Launcher
from pytest_ddpperf.records import LaunchSamples, Plan


@dataclass
class Recorder:
    """An observer that remembers."""

    streams: bool = False
    lines: list[tuple[str, str, str]] = field(default_factory=list)
    waited: list[Path] = field(default_factory=list)

    def waiting(self, resource: Path) -> None:
        self.waited.append(resource)

    def progress(self, phase: object, step: int, steps: int, marks_ns: object) -> None:
        pass

    def output(self, name: str, stream: str, line: str) -> None:
        self.lines.append((name, stream, line))


class Bench:
    """Launches on Gloo, with short words for tests."""

    def __init__(self, tmp: Path) -> None:
        self.tmp = tmp
        self.launcher = Launcher(dict)
        self.recorder = Recorder()

    def plan(self, *, ranks: int = 2, timeout: float = 30.0, steps: int = 3, warmup: int = 1) -> Plan:
        return Plan(world_size=ranks, backend="gloo", device="cpu", warmup=warmup, steps=steps, timeout_seconds=timeout)

    def measure(self, setup: Any, **plan: Any) -> LaunchSamples:
        return self.launcher.measure(self.plan(**plan), setup, self.recorder)

    def call(self, function: Any, *args: Any, **plan: Any) -> list[Any]:
        return self.launcher.call(self.plan(**plan), function, args, self.recorder)

    @property
    def server(self) -> int:
        process = self.launcher._server._process
        assert process is not None
        return process.pid

    def left(self) -> list[str]:
        """What a launch left behind: processes below the server, and folders."""
        return [f"process {pid}" for pid in descendants(self.server)] + [
            f"file {path.name}" for path in self.tmp.iterdir() if path.name.startswith(("ddpperf-", "pymp-"))
        ]


def descendants(pid: int) -> list[int]:
    """All living processes below `pid`, from /proc."""
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
    return below + [grandchild for child in below for grandchild in descendants(child)]


def gone(pids: list[int], seconds: float = 5.0) -> bool:
    """Whether the processes end in time (a zombie has ended)."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if not any(alive(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(scope="session")
def shared_bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """One rank server for all: torch is imported once, and once more with what RPC needs."""
    tmp = tmp_path_factory.mktemp("tmp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp))
        patch.setattr(tempfile, "tempdir", str(tmp))
        bench = Bench(tmp)
        bench.call(lambda ctx: None)
        yield bench
        bench.launcher.close()


@pytest.fixture
def bench(shared_bench: Bench) -> Iterator[Bench]:
    """After each test nothing is left, no descriptor is lost, and the next launch works."""
    shared_bench.recorder = Recorder()
    before = descriptors()
    yield shared_bench
    assert shared_bench.call(lambda ctx: ctx.rank) == [0, 1]
    assert shared_bench.left() == []
    assert descriptors() <= before
