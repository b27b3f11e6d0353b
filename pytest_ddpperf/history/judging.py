"""What the steps of a history come to: which are evidence among all series, which were accepted or undone, and what
else changed with them. The statistics are `steps`'s; this decides."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp, expm1, log1p

from pytest_ddpperf.history import steps
from pytest_ddpperf.history.accepted import Accepted
from pytest_ddpperf.history.steps import Point, Step
from pytest_ddpperf.history.tracks import Mark, Track, differing
from pytest_ddpperf.history.walk import Series
from pytest_ddpperf.records import Interval, Limit, Status
from pytest_ddpperf.verdict.stats import holm

# How likely any step at all is told of a history in which nothing changed.
LEVEL = 0.01
# The place of a step errs by a point or two, and moves as more points come.
_NEAR = 2
_BEFORE = 5  # points that say how long steps took before one


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A step with what it means."""

    track: Track
    metric: str
    status: Status  # REGRESSED, IMPROVED; PASS where it is within the limit; INCONCLUSIVE with one point only
    reason: str  # "step", "within-limit", "accepted", "undone", "same-commit", "suspected"
    place: int  # of `after` in the track
    before: Mark  # the last run before it
    after: Mark  # the first after it
    change: Interval  # relative, with its 95 % interval
    seconds: tuple[float, float]  # of the metric, before and after
    p_value: float
    points: int  # after it, up to the next step or the end
    differences: tuple[str, ...] = ()  # of the environment and of counters: "torch 2.12 -> 2.13"
    why: str = ""  # it was accepted


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """All steps, worst first, and what they were found in."""

    tracks: Sequence[Track]
    metrics: Sequence[str]
    found: Sequence[Found]
    short: int = 0  # series with too few points to tell anything


def judge(
    tracks: Sequence[Track],
    limits: Sequence[Limit],
    accepted: Sequence[Accepted] = (),
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Judged:
    """The steps of all series in the metrics of `limits`.

    The largest step of each series is held against the level by Holm's procedure, each further one of a series against
    the share that its largest had.
    """
    candidates: list[tuple[Track, Limit, list[Point], Series]] = []
    first: list[float] = []
    short = 0
    for number, track in enumerate(tracks):
        progress(number, len(tracks))
        if len(track.marks) < steps.FEWEST_POINTS:
            short += 1
            continue
        for limit in limits:
            points = track.points(limit.metric)
            series = steps.series_of(points)
            largest = steps.largest(series)
            candidates.append((track, limit, points, series))
            first.append(largest.p_value if largest is not None else 1.0)
    found: list[Found] = []
    for (track, limit, points, series), evidence in zip(candidates, holm(first, LEVEL), strict=True):
        of_track = steps.steps(series, evidence.level) if evidence.enough else []
        of_track = _between_commits(track, series, sorted(of_track, key=lambda step: step.place))
        suspicion = steps.suspicion(series, {step.place for step in of_track})
        if suspicion is not None and suspicion.p_value > LEVEL / len(candidates):
            suspicion = None
        whys = _whys(track, limit.metric, [*of_track, suspicion] if suspicion else of_track, accepted)
        found += _judged(track, limit, points, of_track, whys)
        if suspicion is not None:
            why = whys.get(suspicion.place, "")
            status, reason = Status.INCONCLUSIVE, "suspected"
            if _same_commit(track, suspicion.place):
                status, reason = Status.PASS, "same-commit"
            elif why:
                status, reason = Status.PASS, "accepted"
            found.append(_found(track, limit, points, suspicion, len(points), status, reason, why))
    return Judged(
        tracks=tracks,
        metrics=[limit.metric for limit in limits],
        found=sorted(found, key=_badness),
        short=short,
    )


def _badness(found: Found) -> tuple[int, float]:
    order = (Status.REGRESSED, Status.INCONCLUSIVE, Status.IMPROVED, Status.PASS)
    return order.index(found.status), -abs(found.change.estimate)


def _between_commits(track: Track, series: Series, of_track: Sequence[Step]) -> list[Step]:
    """Steps in their order. One between runs of one commit is moved to between two commits where it is hardly less
    likely there: else code that is slower would be told to be the machine."""
    settled = list(of_track)
    for number, step in enumerate(settled):
        if _same_commit(track, step.place):
            near = range(max(step.place - _NEAR, 1), min(step.place + _NEAR + 1, len(track.marks)))
            places = [place for place in near if not _same_commit(track, place)]
            others = {other.place for other in settled if other is not step}
            settled[number] = steps.moved(series, step, others, places)
    return settled


def _same_commit(track: Track, place: int) -> bool:
    return track.marks[place - 1].run.commit == track.marks[place].run.commit


def _judged(
    track: Track, limit: Limit, points: Sequence[Point], of_track: Sequence[Step], whys: Mapping[int, str]
) -> Iterator[Found]:
    places = [*(step.place for step in of_track), len(points)]
    for number, step in enumerate(of_track):
        later = sum(other.change for other in of_track[number + 1 :] if not _same_commit(track, other.place))
        status = Status.REGRESSED if step.change > 0 else Status.IMPROVED
        reason = "step"
        why = whys.get(step.place, "")
        if _same_commit(track, step.place):
            status, reason = Status.PASS, "same-commit"
        elif why:
            status, reason = Status.PASS, "accepted"
        elif abs(step.change) <= _least(limit, points, step):
            status, reason = Status.PASS, "within-limit"
        elif status is Status.REGRESSED and later <= -step.change / 2:
            status, reason = Status.PASS, "undone"
        yield _found(track, limit, points, step, places[number + 1], status, reason, why)


def _least(limit: Limit, points: Sequence[Point], step: Step) -> float:
    """The limit as a logarithm."""
    share = limit.value if limit.unit == "%" else limit.value / exp(_level(points, step.place))
    return log1p(share)


def acceptance(found: Found, why: str) -> Accepted:
    """What says that this step is meant to stay."""
    return Accepted(
        commit=found.after.run.commit,
        test=found.track.test,
        environment=found.track.environment,
        must_match=found.track.must_match,
        metric=found.metric,
        change=found.change,
        why=why,
    )


def _whys(track: Track, metric: str, found: Sequence[Step], accepted: Sequence[Accepted]) -> dict[int, str]:
    """Why steps were accepted, by their places. An acceptance is of one step: of those that may be it, the nearest."""
    series = (track.environment, track.test, track.must_match, metric)
    whys: dict[int, str] = {}
    for each in accepted:
        if (each.environment, each.test, each.must_match, each.metric) != series:
            continue
        places = [place for place, mark in enumerate(track.marks) if mark.run.commit == each.commit]
        fitting = [
            (distance, step.place)
            for step in found
            if (distance := min((abs(step.place - place) for place in places), default=_NEAR + 1)) <= _NEAR
            and _may_be(step, each.change)
        ]
        if fitting:
            whys[min(fitting)[1]] = each.why
    return whys


def _may_be(step: Step, accepted: Interval) -> bool:
    """Whether it has the same direction, and is not evidently larger: their intervals meet."""
    low, high = step.bounds()
    if accepted.estimate > 0:
        return step.change > 0 and low <= accepted.high
    return step.change < 0 and high >= accepted.low


def _level(points: Sequence[Point], place: int) -> float:
    some = [point.value for point in points[max(place - _BEFORE, 0) : place]]
    return sum(some) / len(some)


def _found(
    track: Track,
    limit: Limit,
    points: Sequence[Point],
    step: Step,
    end: int,
    status: Status,
    reason: str,
    why: str = "",
) -> Found:
    low, high = step.bounds()
    before, after = track.marks[step.place - 1], track.marks[step.place]
    level = exp(_level(points, step.place))
    return Found(
        track=track,
        metric=limit.metric,
        status=status,
        reason=reason,
        place=step.place,
        before=before,
        after=after,
        change=Interval(estimate=expm1(step.change), low=low, high=high),
        seconds=(level, level * exp(step.change)),
        p_value=step.p_value,
        points=end - step.place,
        differences=(
            *differing(before.kept.recorded, after.kept.recorded),
            *differing(before.kept.counters, after.kept.counters),
        ),
        why=why,
    )
