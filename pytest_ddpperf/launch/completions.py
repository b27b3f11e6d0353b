"""The group's step times out of its ranks' marks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


def completions(starts: Sequence[float], ends: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """The group's step times, between successive completions of the whole group, the first from the common start.

    `starts` is by rank, `ends` rank x step, all on one clock and in one unit, which is the result's. They add up to
    the wall time of the window.
    """
    marks = [max(starts), *(max(step) for step in zip(*ends, strict=True))]
    return tuple(after - before for before, after in pairwise(marks))
