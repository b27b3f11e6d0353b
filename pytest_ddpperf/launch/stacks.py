"""The Python stacks of ranks that hang, as faulthandler writes them: how to ask for them, and what
they say."""

import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

_OURS = str(Path(__file__).parents[1] / "rank")


def without_our_frames(stacks: str) -> str:
    """faulthandler's stacks without our own thread and the frames between the rank's start and the
    user's code."""
    return "\n".join(
        line
        for line in _without_our_thread(stacks).splitlines()
        if f'File "{_OURS}' not in line and 'File "<string>"' not in line
    )


def _without_our_thread(stacks: str) -> str:
    return "\n\n".join(
        thread
        for thread in stacks.split("\n\n")
        if " in _tell_started" not in thread
    )


_FRAME = re.compile(r'^  File "([^"]+)"', re.MULTILINE)


def frames_written(stacks: str) -> int:
    """Return how many frames a rank has written, 0 until all are there: a busy rank may pause
    anywhere. The main thread's frames come last, and faulthandler ends a stack that is too long
    with "..."."""
    if not stacks.endswith((" in <module>\n", "...\n")):
        return 0
    return len(_FRAME.findall(_without_our_thread(stacks)))


# Locks and queues are waited for in Python: who does so is the frame above.
_LOCKS = ("/threading.py", "/queue.py")
# Where torch runs what a process that only serves is called for.
_HANDLER = "/torch/distributed/rpc/internal.py"


def waits_for_others(stacks: str, *, serves: bool) -> bool:
    """Judge by its stacks whether a rank that hung most likely waits for the one at fault.

    Its main thread is in torch or in this package or, if it only serves, all its handlers are in
    torch."""
    if serves:
        return all(map(_waits, handlers(stacks)))
    threads = stacks.split("\n\n")
    current = (each for each in threads if each.startswith("Current thread"))
    return _waits(next(current, threads[-1]))


def handlers(stacks: str) -> list[str]:
    """Return the threads of a process that run a call for another one."""
    return [thread for thread in stacks.split("\n\n") if _HANDLER in thread]


def _waits(thread: str) -> bool:
    paths = [
        path for path in _FRAME.findall(thread) if not path.endswith(_LOCKS)
    ]
    return bool(paths) and ("/torch/" in paths[0] or paths[0].startswith(_OURS))


# A process that wrote nothing more from one look to the next has finished.
_STACKS_LOOK_SECONDS = 0.1
# A process that has written nothing by then is stuck in the kernel, or has ended.
_STACKS_LONGEST_SECONDS = 5.0


def await_stacks(
    send: Callable[[], None], sizes: Callable[[], Sequence[int]]
) -> None:
    """Ask for stacks with `send`, and wait until each process has written its own, by the `sizes`
    of them."""
    before = sizes()
    seen = before
    send()
    until = time.monotonic() + _STACKS_LONGEST_SECONDS
    while time.monotonic() < until:
        time.sleep(_STACKS_LOOK_SECONDS)
        now = sizes()
        if now == seen and all(
            size > first for size, first in zip(now, before, strict=True)
        ):
            return
        seen = now
