"""What the rank server leaves when it ends; what it does for ranks is tested on launches. Here without torch."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_ddpperf.wire.channels import Lines
from tests.processes import gone, until

SERVE = """
import socket, sys
from pytest_ddpperf.rank.server import _Server
from pytest_ddpperf.wire.channels import Lines
control = Lines(socket.socket(fileno=int(sys.argv[1])))
server = _Server(control, sys.argv[2])
control.send({"event": "ready"})
server.serve()
"""


ENDED = """
import os, signal, subprocess, sys
from pytest_ddpperf.rank.server import _Server
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
    told = subprocess.run(
        [sys.executable, "-c", ENDED, waitid], env=environ, check=True, capture_output=True, text=True
    )
    until(lambda: gone([int(told.stdout)]))


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
                [sys.executable, "-c", SERVE, str(theirs.fileno()), str(folders[2])],
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
                pass_fds=[theirs.fileno()],
            )
        lines = Lines(ours)
        assert lines.receive() == [{"event": "ready"}]
        for folder in folders[:2]:
            lines.send({"op": "launch", "dir": str(folder)})
            if folder != folders[1] or launch == "over":
                lines.send({"op": "end"})
                assert lines.receive() == [{"event": "ended"}]
        assert all(folder.exists() for folder in folders), "pytest reads it after the end"
        if end == "stopped":
            lines.send({"op": "stop"})
        if end == "signalled":
            process.send_signal(signal.SIGTERM)
            process.wait(60)
    assert process.wait(60) == 0
    assert [path.name for path in tmp_path.iterdir() if path.name != "pytests"] == ["before"]
    assert folders[2].exists() == (end == "stopped")
