"""What the rank server leaves when it ends; what it does for ranks is tested on launches. Here
without torch."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from pytest_ddpperf.launch import template
from pytest_ddpperf.launch.server_client import RankServer
from pytest_ddpperf.launch.template import Templates
from pytest_ddpperf.records.messages import (
    BeginLaunch,
    DumpStacks,
    EndLaunch,
    ForkRank,
    HoldStore,
    LaunchEnded,
    PauseRanks,
    RankEnded,
    RanksPaused,
    ResumeRanks,
    ServerAnswer,
    ServerReady,
    StopServer,
)
from pytest_ddpperf.wire.channels import Lines
from tests.processes import descendants, ended, gone, until

_A = TypeVar("_A")

SERVE = """
import socket, sys
from pytest_ddpperf.rank.fork_server import _Server
from pytest_ddpperf.records.messages import ServerReady
from pytest_ddpperf.wire.channels import Lines
control = Lines(socket.socket(fileno=int(sys.argv[1])))
server = _Server(control, sys.argv[2])
control.send(ServerReady(1))
server.serve()
"""


RANK_THAT_RAISES = """
import pytest_ddpperf.rank
class lifecycle:
    def run(rank, directory, channel):
        raise ValueError("before it has a log")
pytest_ddpperf.rank.lifecycle = lifecycle
"""

RANK_THAT_ENDS_WHEN_TOLD = """
import os
import pytest_ddpperf.rank
class lifecycle:
    def run(rank, directory, channel):
        channel.send(b"here")
        channel.recv(1)
        os._exit(5)
pytest_ddpperf.rank.lifecycle = lifecycle
"""

NO_FORK = """
import os
def fork():
    raise BlockingIOError(11, "no process is left")
os.fork = fork
"""

NO_PYTEST = """
from pytest_ddpperf.wire.channels import Lines
send = Lines.send
def to_nobody(self, message, *descriptors):
    if type(message).__name__ == "LaunchEnded":
        raise BrokenPipeError
    send(self, message, *descriptors)
Lines.send = to_nobody
"""

STORE_WHERE_NO_CHILDREN_ARE_TOLD = """
import time
import pytest_ddpperf.rank
from pytest_ddpperf.wire import boot
boot.children = list
class store:
    def serve(descriptor):
        time.sleep(600)
pytest_ddpperf.rank.group = store
"""

ENDED = """
import os, signal, subprocess, sys
from pytest_ddpperf.rank.fork_server import _Server
if sys.argv[1] == "without":
    del os.waitid
server = object.__new__(_Server)
child = subprocess.Popen(["sh", "-c", "sleep 1000 & echo $!; exit 3"], start_new_session=True, stdout=subprocess.PIPE)
left = int(child.stdout.readline())
server._ranks = {child.pid}
while not (told := server._ended())[0]:
    pass
assert told[0] == child.pid and os.waitstatus_to_exitcode(told[1]) == 3, told
print(left)
"""


@pytest.mark.parametrize("waitid", ["with", "without"])
def test_what_a_rank_leaves_in_its_group_ends_with_it(waitid: str) -> None:
    """macOS has waitid from Python 3.13 on."""
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    reported = subprocess.run(
        [sys.executable, "-c", ENDED, waitid],
        env=environ,
        check=True,
        capture_output=True,
        text=True,
    )
    until(lambda: gone([int(reported.stdout)]))


@pytest.mark.parametrize("end", ["stopped", "left alone", "signalled"])
@pytest.mark.parametrize("launch", ["under way", "over"])
def test_a_server_takes_folders_along_and_pytests_own_only_if_that_was_killed(
    tmp_path: Path, launch: str, end: str
) -> None:
    folders = [tmp_path / name for name in ("before", "launch", "pytests")]
    for folder in folders:
        (folder / "below").mkdir(parents=True)
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    SERVE,
                    str(theirs.fileno()),
                    str(folders[2]),
                ],
                env={
                    **os.environ,
                    "PYTHONPATH": str(Path(__file__).parents[2]),
                },
                pass_fds=[theirs.fileno()],
            )
        lines = Lines(ours)
        assert lines.receive(ServerAnswer) == [ServerReady(1)]
        for folder in folders[:2]:
            lines.send(BeginLaunch(str(folder)))
            if folder != folders[1] or launch == "over":
                lines.send(EndLaunch())
                assert lines.receive(ServerAnswer) == [LaunchEnded()]
        assert all(folder.exists() for folder in folders), (
            "pytest reads it after the end"
        )
        if end == "stopped":
            lines.send(StopServer())
        if end == "signalled":
            process.send_signal(signal.SIGTERM)
            process.wait(60)
    assert process.wait(60) == 0
    assert [
        path.name for path in tmp_path.iterdir() if path.name != "pytests"
    ] == ["before"]
    assert folders[2].exists() == (end == "stopped")


@contextmanager
def leader(
    played: str, pytests: str = ""
) -> Iterator[tuple[Lines, subprocess.Popen[str]]]:
    """A server in which some part is played, with a folder of pytest's own, and the line to it."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                played + SERVE,
                str(theirs.fileno()),
                pytests,
            ],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            pass_fds=[theirs.fileno()],
            stderr=subprocess.PIPE,
            text=True,
        )
        theirs.close()
        with ended(process):
            lines = Lines(ours)
            await_answer(lines, ServerReady)
            yield lines, process


def await_answer(lines: Lines, kind: type[_A]) -> _A:
    """Wait for the server's next answer of a kind."""
    while (received := lines.receive(ServerAnswer)) is not None:
        for answer in received:
            if isinstance(answer, kind):
                return answer
    pytest.fail(f"no {kind.__name__}")


def ask_for_rank(lines: Lines) -> socket.socket:
    """Its channel."""
    channel, its = socket.socketpair()
    with its:
        lines.send(ForkRank(0), its.fileno())
    return channel


def test_an_error_of_the_servers_own_is_written_and_takes_no_folder_along(
    tmp_path: Path,
) -> None:
    with (
        leader(NO_FORK, str(tmp_path)) as (lines, process),
        open(os.devnull) as channel,
    ):
        # In one piece, after which it may have ended.
        socket.send_fds(
            lines.socket,
            [b'{"kind": "ForkRank", "rank": 0}\n'],
            [channel.fileno()],
        )
        _, written = process.communicate(timeout=60)
    assert process.returncode == 1
    assert written.endswith("BlockingIOError: [Errno 11] no process is left\n")
    assert tmp_path.exists(), "pytest goes on in it, with another server"


def test_a_server_whose_pytest_is_gone_when_it_reports_ends_in_order(
    tmp_path: Path,
) -> None:
    with leader(NO_PYTEST, str(tmp_path / "tree")) as (lines, process):
        (tmp_path / "tree").mkdir()
        lines.send(EndLaunch())
        _, written = process.communicate(timeout=60)
    assert (process.returncode, written) == (0, "")
    assert not (tmp_path / "tree").exists()


def test_an_error_of_a_rank_that_has_no_log_yet_is_written() -> None:
    with leader(RANK_THAT_RAISES) as (lines, process):
        ask_for_rank(lines).close()
        assert await_answer(lines, RankEnded).status == 70
        lines.socket.close()
        _, written = process.communicate(timeout=60)
    assert process.returncode == 0
    assert written.endswith("ValueError: before it has a log\n")


def test_a_rank_that_has_nowhere_to_write_its_stacks_does_not_end_of_being_asked_for_them() -> (
    None
):
    with (
        leader(RANK_THAT_ENDS_WHEN_TOLD) as (lines, _),
        ask_for_rank(lines) as channel,
    ):
        assert channel.recv(4) == b"here"
        for request in (
            DumpStacks(),
            PauseRanks(),
            ResumeRanks(),
        ):
            lines.send(request)
        await_answer(lines, RanksPaused)
        channel.send(b"x")
        assert await_answer(lines, RankEnded).status == 5


def test_a_store_ends_with_its_launch_where_the_kernel_tells_no_children() -> (
    None
):
    with (
        leader(STORE_WHERE_NO_CHILDREN_ARE_TOLD) as (lines, process),
        socket.socket() as bound,
    ):
        lines.send(HoldStore(), bound.fileno())
        until(lambda: descendants(process.pid))
        store = descendants(process.pid)
        lines.send(EndLaunch())
        await_answer(lines, LaunchEnded)
        assert gone(store)


def test_a_server_that_has_not_started_yet_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        server = RankServer(Templates())
        server._lines = Lines(ours)
        monkeypatch.setattr(
            server,
            "_has_ended",
            lambda seconds: pytest.fail("it hears nothing"),
        )
        server.stop()


def test_a_template_is_asked_to_end_before_it_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    child: Any = SimpleNamespace(
        lines=SimpleNamespace(send=lambda message: None),
        process=SimpleNamespace(terminate=lambda: said.append("SIGTERM")),
        close=lambda seconds: said.append("close"),
    )
    monkeypatch.setattr(template.boot, "Child", lambda *started: child)
    template.Template({}).close()
    assert said == ["SIGTERM", "close"]
