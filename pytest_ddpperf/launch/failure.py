"""Which rank's end was the first cause, and what is known of each."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from pathlib import Path

from pytest_ddpperf.errors import LaunchError
from pytest_ddpperf.records import RankError, RankOutput


def describe_exit(status: int) -> str:
    """A rank's end without a result, in words; `status` is negative for a signal."""
    if status < 0:
        try:
            name = signal.Signals(-status).name
        except ValueError:
            name = f"signal {-status}"
        hint = " (the kernel's out-of-memory killer sends it too)" if name == "SIGKILL" else ""
        return f"killed by {name}{hint}"
    return f"exited with status {status} without delivering a result"


def launch_error(errors: Iterable[RankError], output: tuple[RankOutput, ...]) -> LaunchError:
    """The earliest error that is not a lost connection first: connections are lost because a rank ended."""
    ordered = sorted(errors, key=lambda error: (error.lost_connection, error.when, waits_for_others(error)))
    return LaunchError(ordered[0], tuple(ordered[1:]), output)


_OURS = str(Path(__file__).parents[1] / "rank")


def without_our_frames(stacks: str) -> str:
    """faulthandler's stacks without the frames between the rank's start and the user's code."""
    lines = (line for line in stacks.splitlines() if f'File "{_OURS}' not in line and 'File "<string>"' not in line)
    return "\n".join(lines)


_INNERMOST = re.compile(r'most recent call first\):\n  File "([^"]+)"')


# The phase of those who only serve, as `Board.describe` has it, and where torch runs what they are called for.
SERVING = "serving"
_HANDLER = "/torch/distributed/rpc/internal.py"


def waits_for_others(error: RankError) -> bool:
    """Whether a rank that hung most likely waits for the one at fault: its main thread's stack ends in torch or, of
    one that only serves, all its handlers' stacks do."""
    if error.phase == SERVING:
        return all(map(_ends_in_torch, _handlers(error.traceback)))
    stacks = error.traceback.split("\n\n")
    main = next((stack for stack in stacks if stack.startswith("Current thread")), stacks[-1])
    return _ends_in_torch(main)


def handles_a_call(stacks: str) -> bool:
    """Whether a process is at work for another, by its threads' stacks."""
    return bool(_handlers(stacks))


def _handlers(stacks: str) -> list[str]:
    return [stack for stack in stacks.split("\n\n") if _HANDLER in stack]


def _ends_in_torch(stack: str) -> bool:
    found = _INNERMOST.search(stack)
    return found is not None and "/torch/" in found.group(1)
