"""Stacks of processes that hang, which faulthandler writes at a signal, line by line."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

# Who has written nothing more from one look to the next has written all.
_LOOK_SECONDS = 0.1
# Who has written nothing by then is stuck in the kernel, or has ended.
_LONGEST_SECONDS = 5.0


def ask(send: Callable[[], None], sizes: Callable[[], Sequence[int]]) -> None:
    """Ask for stacks, and wait until each process has written its own: `sizes` are those of what they write to."""
    before = seen = sizes()
    send()
    until = time.monotonic() + _LONGEST_SECONDS
    while time.monotonic() < until:
        time.sleep(_LOOK_SECONDS)
        now = sizes()
        if now == seen and all(size > first for size, first in zip(now, before, strict=True)):
            return
        seen = now
