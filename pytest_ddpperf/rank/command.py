"""One run of a command that starts its ranks itself. This process is no rank: it starts the command
and waits for it. All that the command leaves behind ends with the launch."""

import os
import signal
import subprocess
import time
from pathlib import Path

from pytest_ddpperf.rank.process import Rank
from pytest_ddpperf.records.errors import DdpPerfError
from pytest_ddpperf.records.plan import Command, Variables
from pytest_ddpperf.records.samples import Window
from pytest_ddpperf.wire import opened, payload
from pytest_ddpperf.wire.channels import Phase
from pytest_ddpperf.wire.figures import FigureReader


def run(rank: Rank, folder: Path, environ: Variables) -> Window:
    """Run the command of a launch, with these variables, to its end; return its wall time as that
    of the only step, and its figures. Raises DdpPerfError if it does not exit with status 0."""
    _, command, _ = payload.loads((folder / "payload").read_bytes())
    if rank.trees is not None:
        opened.watch(str(folder), rank.trees)
    logs = [
        str(folder / f"rank{rank.number}.{name}") for name in ("out", "err")
    ]
    reader = FigureReader(rank.plan.figures, command.cwd, logs, _has_ended=True)
    reader.begin()
    rank.enter(Phase.STEPS)
    began = time.monotonic_ns()
    status = _run_to_end(command, opened.with_own(environ, command.env))
    ended = time.monotonic_ns()
    if status:
        raise DdpPerfError(describe_status(status))
    return Window(
        marks_ns=((began, ended),),
        cpu_ns=None,
        examples=None,
        blocked_ns=(0,),
        counters={},
        unsettled="",
        warmup=0,
        figures=reader.read(),
    )


def _run_to_end(command: Command, environ: Variables) -> int:
    """Return the exit status, negative for a signal; raises DdpPerfError."""
    try:
        return subprocess.call(
            command.words,
            cwd=command.cwd,
            env=environ,
            stdin=subprocess.DEVNULL,
        )
    except OSError as error:
        raise DdpPerfError(
            f"{command.words[0]} cannot be started: {os.strerror(error.errno or 0)}"
        ) from None


def describe_status(status: int) -> str:
    """Describe the exit status of a command, negative for a signal; a shell says 128 + the signal
    of what it ran."""
    number = -status if status < 0 else status - 128
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"exited with status {status}"
    if status < 0:
        return f"was killed by {name}"
    return f"exited with status {status} (as after {name})"
