"""Whole pytest runs on real Gloo ranks.

A run of the fixture `run` differs from a user's in two ways, unless the test asks for a process of
its own:

- It is in this process, and takes the rank servers that earlier runs started. A user's run starts
  its own, which import torch for three seconds. So `RankServer` and `Templates` are replaced by
  `KeptServer` and `KeptTemplates`, which pass everything on and do not end with a run. And what a
  launch found out about the machine is kept, too.
- Reports have one line for each sentence, however long, so that a pattern can match it. So
  `text.wrapped` is replaced. tests/unit/test_report.py has how lines are wrapped.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import shutil
import socket
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

import pytest_ddpperf
from pytest_ddpperf import text
from pytest_ddpperf.launch import Launcher, launcher, template
from pytest_ddpperf.launch.server_client import RankServer
from pytest_ddpperf.launch.template import Templates, read_at_import
from pytest_ddpperf.records.samples import Facts
from pytest_ddpperf.wire.source_trees import Trees
from tests.templates import KeptTemplates

# A step that lasts LASTS milliseconds on a simulated clock of its rank: it takes no time, and load
# on the machine decides no verdict. tests/launch shows that real time is measured.
STEP = """
import os, time, pytest

def all_reduce():
    import torch, torch.distributed
    torch.distributed.all_reduce(torch.ones(1))

class OwnClock:
    monotonic, sleep, thread_time_ns = time.monotonic, time.sleep, time.thread_time_ns
    def __init__(self, *rooms):
        from pytest_ddpperf.rank import clock
        self.now = 1
        for room in (clock, *rooms):
            room.time = self
    def monotonic_ns(self):
        return self.now
    def go_on(self, milliseconds=None):
        if milliseconds is None:
            milliseconds = float(os.environ.get("LASTS", "5"))
        self.now += int(milliseconds * 1e6)

def lasting(ctx, milliseconds=None):
    clock = OwnClock()
    def step():
        all_reduce()
        clock.go_on(milliseconds)
    return step
"""

# A suspicion is confirmed by as many launches as raised it.
SMALL = [
    "--ddp-steps=10",
    "--ddp-min-time=0",
    "--ddp-launches=3",
    "--ddp-max-launches=6",
    "--ddp-warmup=2",
    "--ddp-threshold=p50:300%",
    "--ddp-confirm=never",
]
# The fewest launches that a comparison may take, for tests of something else than their number.
FEW = ("--ddp-launches=2", "--ddp-max-launches=4")

Run = Callable[..., pytest.RunResult]
_PROBE = Launcher.probe


class KeptServers:
    """Two rank servers for each environment and preload, kept from run to run: a launcher has one,
    and another one for references."""

    def __init__(self) -> None:
        self._servers: dict[object, RankServer] = {}
        self._places = cycle(("", "reference"))
        # of all servers, those that compare with another version included
        self._templates = Templates()
        self._facts: dict[object, Facts] = {}

    def rank_server(
        self, templates: Templates, trees: Trees | None, folder: str
    ) -> Any:
        """Replace the class `RankServer`, but for one that has two versions of the code."""
        has_two = trees is not None and trees.base != trees.current
        if has_two or folder:
            return RankServer(templates, trees, folder)
        return KeptServer(self, next(self._places))

    def templates(self) -> Templates:
        """Replace the class `Templates`."""
        return KeptTemplates(self._templates)

    def server(
        self, place: str, variables: Mapping[str, str], preload: Sequence[str]
    ) -> RankServer:
        wanted = (place, *read_at_import(variables).items(), *preload)
        server = self._servers.setdefault(wanted, RankServer(self._templates))
        server.ensure(variables, preload)
        return server

    def probe(
        self, by: Launcher, preload: Sequence[str], timeout: float
    ) -> Facts:
        """Replace the method `Launcher.probe`: what one launch found is what the next would find,
        as long as its ranks would have the same modules, variables and devices."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        known = (*preload, *read_at_import(os.environ).items(), visible)
        if by._facts is not None:
            return by._facts
        if known in self._facts:
            by._facts, by._visible = {**self._facts[known]}, visible
        found = _PROBE(by, preload, timeout)
        self._facts[known] = {**found}
        return found

    def stop(self) -> None:
        for server in self._servers.values():
            server.stop()
        self._templates.close()


class KeptServer:
    """A `RankServer` of `KeptServers`, which stays when a run ends."""

    def __init__(self, servers: KeptServers, place: str) -> None:
        self._servers, self._place = servers, place

    def ensure(
        self, variables: Mapping[str, str], preload: Sequence[str]
    ) -> None:
        self._server = self._servers.server(self._place, variables, preload)

    @property
    def pid(self) -> int:
        return self._server.pid

    @property
    def socket(self) -> socket.socket:
        return self._server.socket

    def send(self, *message: Any) -> None:
        self._server.send(*message)

    def receive(self, *timeout: float) -> list[dict[str, Any]]:
        return self._server.receive(*timeout)

    def stop(self) -> None:
        pass


@pytest.fixture(scope="session")
def kept_servers() -> Iterator[KeptServers]:
    # pytester removes from sys.modules what a run imported. Torch cannot be imported twice, and our
    # own modules would exist twice: so all are imported before.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of TorchScript
        for module in pkgutil.walk_packages(
            pytest_ddpperf.__path__, "pytest_ddpperf."
        ):
            importlib.import_module(module.name)
    servers = KeptServers()
    # Templates keep the first one and the last: a test that sets variables must not be the first.
    servers._templates.fork_server(os.environ)[0].close()
    yield servers
    servers.stop()


@pytest.fixture(scope="session")
def short_folder() -> Iterator[Path]:
    """Make a folder with a short path: a test's folder is too long for the name of a socket."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.fixture
def temporary(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """Set the folder of temporary files, and check that the test leaves none of ours."""
    monkeypatch.setenv("TMPDIR", str(short_folder))
    monkeypatch.setattr(tempfile, "tempdir", str(short_folder))
    yield short_folder
    left = list(short_folder.glob("ddpperf-*"))
    for path in left:
        shutil.rmtree(path, ignore_errors=True)  # it is no other test's
    assert left == []


@pytest.fixture
def run(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    kept_servers: KeptServers,
    temporary: Path,
) -> Run:
    """Run pytest on the files of `pytester`: small measurements, no CI, no other plugin that
    reorders or measures."""
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    for name in (
        "PYTEST_ADDOPTS",
        "PYTEST_XDIST_WORKER",
        "PYTEST_XDIST_WORKER_COUNT",
        "PYTEST_XDIST_TESTRUNUID",
    ):
        monkeypatch.delenv(name, raising=False)

    def run(
        *args: str,
        small: bool = True,
        benchmark: bool = False,
        own: bool = False,
        is_interrupted: bool = False,
    ) -> pytest.RunResult:
        """Run in this process with the kept rank servers (see the module's docstring); with `own`,
        in a process of its own as a user does, where nothing is replaced. A Ctrl-C ends the tests
        of this process, too, unless `is_interrupted` says that it is of that run."""
        fixed = ["-p", "no:randomly", "-p", "no:cacheprovider"]
        fixed += [] if benchmark else ["-p", "no:benchmark"]
        fixed += SMALL if small else []
        if own:
            return pytester.runpytest_subprocess(*fixed, *args, timeout=600)
        with monkeypatch.context() as patch:
            # as `python -m pytest` has it
            patch.syspath_prepend(str(pytester.path))
            patch.setattr(launcher, "RankServer", kept_servers.rank_server)
            patch.setattr(template, "Templates", kept_servers.templates)
            patch.setattr(
                Launcher,
                "probe",
                lambda *asked: kept_servers.probe(*asked),
            )
            patch.setattr(text, "wrapped", lambda line, *width: [line])
            return pytester.runpytest_inprocess(
                *fixed, *args, no_reraise_ctrlc=is_interrupted
            )

    return run


def last_line(result: pytest.RunResult) -> str:
    """Return the counts of a run, without its cost and the advice behind them."""
    (found,) = [
        match[1]
        for line in result.outlines
        if (match := re.match(r"(.* compared\))(?: in \d+ s)?(?:$|: )", line))
    ]
    return found


def report_of(result: pytest.RunResult, test: str) -> pytest.LineMatcher:
    """Return the lines that a run reports of one test that failed."""
    lines: list[str] = []
    is_inside = False
    for each in result.outlines:
        if heading := re.fullmatch(r"__+ (\S+) __+|==+ .* ==+", each):
            is_inside = heading[1] == test
        elif is_inside:
            lines.append(each)
    assert lines, f"{test} did not fail"
    return pytest.LineMatcher(lines)


def line(result: pytest.RunResult, start: str) -> str:
    """Return the last line of the output that starts with `start`."""
    return next(
        line for line in reversed(result.outlines) if line.startswith(start)
    )
