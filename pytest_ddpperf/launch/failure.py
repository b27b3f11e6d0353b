"""Which rank's end was the first cause, and what is known of each."""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Iterable
from pathlib import Path

from pytest_ddpperf.records import RankError, RankOutput
from pytest_ddpperf.records.errors import DdpPerfError, LaunchError


def describe_exit(status: int, *, delivered: bool = False) -> str:
    """A rank's end before it was due, its result `delivered` or not, in words; `status` is negative for a signal."""
    if status < 0:
        try:
            name = signal.Signals(-status).name
        except ValueError:
            name = f"signal {-status}"
        hint = " (the kernel's out-of-memory killer sends it too)" if name == "SIGKILL" else ""
        return f"killed by {name}{hint}"
    return f"exited with status {status} {'in its clean-up' if delivered else 'without delivering a result'}"


def describe_end(status: int) -> str:
    """How another process ended, in words."""
    return describe_exit(status) if status < 0 else f"exited with status {status}"


def launch_error(errors: Iterable[RankError], output: tuple[RankOutput, ...]) -> LaunchError:
    """The earliest error that is not a lost connection first: connections are lost because a rank ended. Who merely
    was not at its end, at no time of its own, comes last."""

    def order(error: RankError) -> tuple[bool, bool, float, bool]:
        return error.when == math.inf, error.lost_connection, error.when, error.waits

    ordered = sorted(errors, key=order)
    return LaunchError(ordered[0], tuple(ordered[1:]), output)


_OURS = str(Path(__file__).parents[1] / "rank")


def without_our_frames(stacks: str) -> str:
    """faulthandler's stacks without the frames between the rank's start and the user's code."""
    lines = (line for line in stacks.splitlines() if f'File "{_OURS}' not in line and 'File "<string>"' not in line)
    return "\n".join(lines)


_FRAME = re.compile(r'^  File "([^"]+)"', re.MULTILINE)
# Locks and queues are waited for in Python: who does so is the frame above.
_LOCKS = ("/threading.py", "/queue.py")
# The phase of those who only serve, as `Board.describe` has it, and where torch runs what they are called for.
SERVING = "serving"
_HANDLER = "/torch/distributed/rpc/internal.py"


def waits_for_others(phase: str, stacks: str) -> bool:
    """Whether a rank that hung most likely waits for the one at fault, by its stacks with our frames in them: its
    main thread is in torch or in what is ours or, of one that only serves, all its handlers are in torch."""
    if phase == SERVING:
        return all(map(_waits, _handlers(stacks)))
    threads = stacks.split("\n\n")
    return _waits(next((thread for thread in threads if thread.startswith("Current thread")), threads[-1]))


def handles_a_call(stacks: str) -> bool:
    """Whether a process is at work for another, by its threads' stacks."""
    return bool(_handlers(stacks))


def _handlers(stacks: str) -> list[str]:
    return [thread for thread in stacks.split("\n\n") if _HANDLER in thread]


def _waits(thread: str) -> bool:
    innermost = next((path for path in _FRAME.findall(thread) if not path.endswith(_LOCKS)), "")
    return "/torch/" in innermost or innermost.startswith(_OURS)


_SHOWN = 2000  # characters of what a rank wrote


def with_output(error: DdpPerfError) -> str:
    """With what the ranks wrote to stderr: at hand it has sections of its own in the report."""
    written = [output for output in error.output if output.stderr] if isinstance(error, LaunchError) else []
    return "\n".join([str(error), *(f"stderr {output.name}:\n{output.stderr[-_SHOWN:]}" for output in written)])
