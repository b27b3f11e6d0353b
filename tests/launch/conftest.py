"""A launcher of one's own: its temporary folders, its server's descendants and its descriptors can
be counted."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pytest_ddpperf.launch import (
    Launcher,
    Observer,
    placement,
    run,
    server_client,
    stacks,
)
from pytest_ddpperf.launch.paused_launch import PausedLaunch
from pytest_ddpperf.launch.template import Templates
from pytest_ddpperf.records.plan import Plan
from pytest_ddpperf.records.samples import LaunchSamples
from tests.processes import descendants
from tests.templates import KeptTemplates


@dataclass
class Recorder(Observer):
    """An observer that remembers."""

    streams: bool = False
    lines: list[tuple[str, str, str]] = field(default_factory=list)
    waited: list[Path] = field(default_factory=list)

    def waiting(self, resource: Path) -> None:
        self.waited.append(resource)

    def output(self, name: str, stream: str, line: str) -> None:
        self.lines.append((name, stream, line))


class Bench:
    """Launches on Gloo, with short words for tests."""

    def __init__(self, tmp: Path) -> None:
        self.tmp = tmp
        self.launcher = Launcher(dict, rpc=True)
        self.recorder = Recorder()
        self.failed = False

    def plan(
        self,
        *,
        ranks: int = 2,
        steps: int = 3,
        warmup: int = 1,
        boundary: str = "",
    ) -> Plan:
        return Plan(
            world_size=ranks,
            backend="gloo",
            device="cpu",
            warmup=warmup,
            steps=steps,
            boundary=boundary,
        )

    def measure(self, setup: Any, **plan: Any) -> LaunchSamples:
        return self.launch(self.plan(**plan), setup)

    def launch(self, plan: Plan, setup: Any, *others: Any) -> LaunchSamples:
        with self._noting():
            return self.launcher.measure(plan, setup, self.recorder, others)

    @contextmanager
    def paused(self, setup: Any, **plan: Any) -> Iterator[PausedLaunch]:
        with (
            self._noting(),
            self.launcher.pause(
                self.plan(**plan), setup, self.recorder
            ) as launch,
        ):
            yield launch

    def call(self, function: Any, *args: Any, **plan: Any) -> list[Any]:
        with self._noting():
            return self.launcher.call(
                self.plan(**plan), function, args, self.recorder
            )

    @contextmanager
    def temporary_files(self) -> Iterator[None]:
        """Let temporary files be made in `tmp`: what is left there was left by a launch."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TMPDIR", str(self.tmp))
            patch.setattr(tempfile, "tempdir", str(self.tmp))
            yield

    @contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.failed = True
            raise

    @contextmanager
    def over_once(self, arrived: int, *, left: int = 99) -> Iterator[None]:
        """Launches meanwhile wait no longer once so many threads of ranks have arrived, no more
        than `left` processes are left, and all of them rest."""
        with (
            pytest.MonkeyPatch.context() as patch,
            tempfile.TemporaryDirectory() as folder,
        ):
            patch.setenv(_ARRIVALS, folder)
            patch.setattr(
                run,
                "time",
                Patience(lambda: self._rests(Path(folder), arrived, left)),
            )
            yield

    def _rests(self, folder: Path, arrived: int, left: int) -> bool:
        if len(arrivals(folder)) < arrived:
            return False
        alive = descendants(self.server)
        return len(alive) <= left and not any(
            map(at_work, [self.server, *alive])
        )

    @property
    def server(self) -> int:
        pid = self.launcher._server.pid
        assert pid
        return pid

    @property
    def of_templates(self) -> int:
        """Count the descriptors of templates, a connection and a log each. A change of variables
        leaves two."""
        return 2 * len(self.launcher.templates._templates)

    def templates(self) -> Templates:
        """Return templates for another launcher, which then need not import torch anew."""
        return KeptTemplates(self.launcher.templates)

    def left(self) -> list[str]:
        """What a launch left behind: processes below the server, and folders."""
        return [f"process {pid}" for pid in descendants(self.server)] + [
            f"file {path.name}"
            for path in self.tmp.iterdir()
            if path.name.startswith(("ddpperf-", "pymp-"))
        ]


# the folder in which threads of ranks say so
_ARRIVALS = "DDPPERF_TEST_ARRIVALS"
# What libraries have for news, which they look for again and again.
_POLLING = ("TP_", "gloo_")
# Beyond what a process on a busy machine takes from the news of another to its work on it.
_REST_SECONDS = 0.3


class Patience:
    """In place of `time` in a launch: whatever may be waited for has passed once nothing can happen
    any more.

    So a test waits as long as it takes on a slow machine, and no longer.
    """

    sleep, monotonic_ns = (
        staticmethod(time.sleep),
        staticmethod(time.monotonic_ns),
    )

    def __init__(self, rests: Callable[[], bool]) -> None:
        self._rests = rests
        self._since, self._looks = 0.0, 0
        self._at_end = False

    def monotonic(self) -> float:
        now = time.monotonic()
        if not self._at_end:
            self._since, self._looks = (
                (self._since or now, self._looks + 1)
                if self._rests()
                else (0.0, 0)
            )
            # Not at the first looks: what was sent before them is read between two, and this
            # process may stand still.
            self._at_end = (
                self._looks > 2 and self._since <= now - _REST_SECONDS
            )
        return now + 1e6 * self._at_end


def arrive() -> None:
    """Called in a rank, where a test wants it."""
    Path(os.environ[_ARRIVALS], str(threading.get_native_id())).touch()


def arrivals(folder: Path | None = None) -> list[str]:
    """Who has: in a rank, or as `folder` says."""
    return os.listdir(folder or os.environ[_ARRIVALS])


def hang() -> None:
    arrive()
    time.sleep(3600)


def at_work(pid: int) -> bool:
    """Whether a thread of it runs or wants to."""
    for task in Path(f"/proc/{pid}/task").glob("*/stat"):
        try:
            name, _, fields = task.read_text().partition("(")[2].rpartition(")")
        except OSError:
            continue
        if fields.split()[0] in "RD" and not name.startswith(_POLLING):
            return True
    return False


def listeners(pids: list[int]) -> set[str]:
    """Addresses that the processes listen on, as /proc/net/tcp and tcp6 have them (hexadecimal)."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = os.readlink(link)
            except OSError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.add(fields[1].partition(":")[0])
    return found


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# of the package: tests of other packages that follow in the same process have the usual times
@pytest.fixture(scope="package", autouse=True)
def _without_hurry() -> Iterator[None]:
    """Whoever will say something is waited for; where nobody will, `over_once` ends the wait. And
    the machine has its cores to itself, as far as a quota goes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "_GRACE_SECONDS", 60.0)
        patch.setattr(run, "_CAUSE_GRACE_SECONDS", 60.0)
        patch.setattr(server_client, "_END_SECONDS", 60.0)
        patch.setattr(stacks, "_STACKS_LOOK_SECONDS", 0.3)
        patch.setattr(stacks, "_STACKS_LONGEST_SECONDS", 30.0)
        patch.setattr(placement, "quota_cores", lambda root: None)
        yield


@pytest.fixture(scope="session")
def shared_bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """One rank server for all: torch is imported once, and once more with what RPC needs."""
    bench = Bench(tmp_path_factory.mktemp("tmp"))
    with bench.temporary_files():
        bench.call(lambda ctx: None)
    yield bench
    bench.launcher.close()


@pytest.fixture
def bench(shared_bench: Bench) -> Iterator[Bench]:
    """After each test nothing is left, no descriptor is lost, and after a failure the next launch
    works."""
    shared_bench.recorder, shared_bench.failed = Recorder(), False
    before = descriptors() - shared_bench.of_templates
    with shared_bench.temporary_files():
        yield shared_bench
        if shared_bench.failed:
            assert shared_bench.call(lambda ctx: ctx.rank) == [0, 1]
    assert shared_bench.left() == []
    assert descriptors() - shared_bench.of_templates <= before
