"""What a series is drawn by: how long each run took, how far that may be off, and the level between steps. Knows
nothing of drawing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from pytest_ddpperf.history import steps
from pytest_ddpperf.history.entry import order
from pytest_ddpperf.history.judging import Found, Judged
from pytest_ddpperf.history.tracks import Mark, Track, differing

_SIDES = 1.96  # standard errors: 95 %


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One metric of a series. The tuples of floats are seconds, an item a run."""

    track: Track
    metric: str
    seconds: tuple[float, ...]  # the geometric mean over launches
    bounds: tuple[tuple[float, float], ...]  # its 95 % interval; empty where the series is too short to tell
    levels: tuple[float, ...]  # what all runs between two steps tell of it; empty there, too
    found: tuple[Found, ...]  # in order, a suspicion last

    @property
    def breaks(self) -> tuple[int, ...]:
        """The places of the first runs after its steps; a lone last run may be a step, or not."""
        last = len(self.seconds) - 1
        return tuple(found.place for found in self.found if found.place < last)


def curve(judged: Judged, track: Track, metric: str) -> Curve:
    """What a figure shows of a series in one metric."""
    points = track.points(metric)
    own = [found for found in judged.found if found.track is track and found.metric == metric]
    drawn = Curve(
        track=track,
        metric=metric,
        seconds=tuple(math.exp(point.value) for point in points),
        bounds=(),
        levels=(),
        found=tuple(sorted(own, key=lambda found: found.place)),
    )
    if len(points) - len(drawn.breaks) < steps.FEWEST_POINTS:
        return drawn
    fitted = steps.fitted(steps.series_of(points), set(drawn.breaks))
    return Curve(
        track=track,
        metric=metric,
        seconds=drawn.seconds,
        bounds=tuple(
            (math.exp(point.value - _SIDES * error), math.exp(point.value + _SIDES * error))
            for point, error in zip(points, fitted.errors, strict=True)
        ),
        levels=tuple(map(math.exp, fitted.levels)),
        found=drawn.found,
    )


def chains(tracks: Sequence[Track]) -> list[tuple[Track, ...]]:
    """Series of one test and environment that followed one another, as facts that must match changed; one that goes on
    beside another stands by itself."""
    groups: dict[tuple[str, object], list[list[Track]]] = {}
    for track in sorted(tracks, key=lambda track: order(track.marks[0].run)):
        of_test = groups.setdefault((track.environment, track.test), [])
        ended = (chain for chain in of_test if order(chain[-1].marks[-1].run) < order(track.marks[0].run))
        chain = next(ended, None)
        if chain is None:
            of_test.append([track])
        else:
            chain.append(track)
    return [tuple(chain) for of_test in groups.values() for chain in of_test]


def changes(marks: Sequence[Mark]) -> dict[int, tuple[str, ...]]:
    """What of an environment changed, by the place of the first run with it: "torch 2.12 -> 2.13"."""
    pairs = enumerate(pairwise(marks), 1)
    told = {at: tuple(differing(before.kept.recorded, after.kept.recorded)) for at, (before, after) in pairs}
    return {at: differences for at, differences in told.items() if differences}
