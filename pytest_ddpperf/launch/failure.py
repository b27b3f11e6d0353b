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


def waits_for_others(error: RankError) -> bool:
    """Whether a stack of a rank that hung ends in torch: then it most likely waits for the rank at fault."""
    stacks = error.traceback.split("\n\n")
    main = next((stack for stack in stacks if stack.startswith("Current thread")), stacks[-1])
    found = _INNERMOST.search(main)
    return found is not None and "/torch/" in found.group(1)
