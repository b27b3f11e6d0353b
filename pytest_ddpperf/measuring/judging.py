"""When a measurement has launches enough: looks declared in advance, a suspicion, its confirmation.

After as many launches as a look says, all launches so far are judged:

- Within the limit and settled: the measurement ends. So it does with what further launches would hardly decide.
- Beyond the limit, in either direction, for the first time: a suspicion. It alone decides nothing.
- At a later look: the launches since the suspicion, by themselves, must come to the same verdict on the same metric
  as all launches together. Only then it stands.

So however often was looked, a regression is reported only where launches that had no part in raising the suspicion
show it again, with evidence of their own.

Between two looks the pairs so far end the measurement early if they are within the limit and settled. That claims
nothing, so it causes no false alarm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from pytest_ddpperf import verdict as verdicts
from pytest_ddpperf.measuring.launches import Launches, distributions, measurement
from pytest_ddpperf.records import Environment, LaunchSamples, Limit, Measurement, Recording, Status, Verdict

# The verdict on launches start..stop, counted from 0, `stop` excluded, with so many times the error rate.
VerdictOn = Callable[[int, int, float], Verdict]

# What confirms may err more often than what decides: all launches together, of which it is half, decide as well.
_CONFIRMING = 2.0
_CLAIMS = {Status.REGRESSED: Status.INCONCLUSIVE, Status.IMPROVED: Status.PASS}  # what is left without confirmation


def schedule(first: int, most: int) -> tuple[int, ...]:
    """After how many launches is looked: `first`, then twice as many each time up to `most`, so that each look has
    as many fresh launches as raised the suspicion of the one before."""
    looks = [first]
    while 2 * looks[-1] <= most:
        looks.append(2 * looks[-1])
    return tuple(looks)


def decided(verdict: Verdict) -> bool:
    """Whether further launches would hardly bring another verdict that claims nothing."""
    return verdict.status not in _CLAIMS and all(comparison.settled for comparison in verdict.comparisons)


def follow(looks: Sequence[int], judge: VerdictOn, *, final: bool) -> tuple[Verdict, bool]:
    """The verdict after `looks`, and whether the measurement ends with it; `final`: no further look will come."""
    suspected: dict[Status, int] = {}  # after how many launches first
    for number, launches in enumerate(looks):
        verdict = judge(0, launches, 1.0)
        if not verdict.status.compared or decided(verdict):
            return verdict, True
        if verdict.status in _CLAIMS:
            since = suspected.setdefault(verdict.status, launches)
            if since < launches and _confirms(judge(since, launches, _CONFIRMING), verdict):
                return verdict, True
            if final and number == len(looks) - 1:
                verdict = _unconfirmed(verdict)
        elif verdict.status is Status.INCONCLUSIVE:
            suspected.setdefault(Status.REGRESSED, launches)
    return verdict, final


def early_stop(launches: int, judge: VerdictOn) -> tuple[Verdict, bool]:
    """Return the verdict after `launches`, between two looks, and whether the measurement ends with it."""
    verdict = judge(0, launches, 1.0)
    return verdict, verdict.status is Status.PASS and decided(verdict)


def _confirms(fresh: Verdict, verdict: Verdict) -> bool:
    return not _claimed(verdict, verdict.status).isdisjoint(_claimed(fresh, verdict.status))


def _claimed(verdict: Verdict, status: Status) -> set[str]:
    """The metrics of which it claims that. Of others it may claim the opposite, which confirms nothing."""
    return {c.limit.metric for c in verdict.comparisons if c.status is status}


def _unconfirmed(verdict: Verdict) -> Verdict:
    left, reason = _CLAIMS[verdict.status], "not-confirmed"
    comparisons = tuple(
        replace(comparison, status=left, reason=reason) if comparison.status is verdict.status else comparison
        for comparison in verdict.comparisons
    )
    return replace(verdict, status=left, reason=reason, comparisons=comparisons)


class Reference(Protocol):
    """The baseline side of a measurement, in the view of the judge."""

    @property
    def mostly_recompiled(self) -> bool:
        """Whether more than half of its launches recompiled within their window."""

    def measurements(self, start: int = 0, stop: int | None = None, /) -> tuple[Measurement, ...]:
        """Return its launches start..stop, or the sessions of a stored baseline; () if there is nothing."""

    def seconds(self, current: Launches, count: int) -> float:
        """Return how long `count` launches of each side take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How a measurement is judged."""

    limits: tuple[Limit, ...]
    level: float  # the error rate
    interleaved: bool  # whether the launches of both sides were interleaved
    not_gated: str | None  # the reason code of a measurement that is not compared with anything
    confirming: int  # launches that are taken however long they take, to confirm a suspicion of the first look
    max_seconds: float  # for all launches
    stops_early: bool = False  # whether the measurement may end between two looks

    @property
    def saving(self) -> bool:
        return self.not_gated == "saving"


_Rule = Callable[[VerdictOn], tuple[Verdict, bool]]  # one of `looks`


class Judge:
    """Compares the launches of a measurement with its baseline side."""

    def __init__(self, terms: Terms, launches: Launches, reference: Reference, environment: Environment) -> None:
        self._terms, self._launches, self._reference, self._environment = terms, launches, reference, environment

    def affords(self, count: int) -> bool:
        """Whether `count` launches fit into the time."""
        confirming = count <= self._terms.confirming and not self._terms.saving
        return confirming or self._reference.seconds(self._launches, count) <= self._terms.max_seconds

    @property
    def stops_early(self) -> bool:
        """Whether the measurement may end between two looks."""
        return self._terms.stops_early

    def early(self, launches: int) -> tuple[Verdict, bool]:
        """Return the verdict after `launches` of each side, between two looks, and whether it ends the measurement."""
        return self._judged(partial(early_stop, launches), final=False)

    def __call__(self, looks: Sequence[int], *, final: bool) -> tuple[Verdict, bool]:
        """Return the verdict after `looks` and whether it ends the measurement; `final`: no further look will come."""
        return self._judged(partial(follow, looks, final=final), final=final)

    def _judged(self, rule: _Rule, *, final: bool) -> tuple[Verdict, bool]:
        verdict, ended = rule(self._verdict)
        current = self._measurement(self._launches.taken)
        verdict = verdicts.with_counters(verdict, current, self._reference.measurements(), self._terms.limits)
        ended = ended or verdict.reason == "counter-rose"  # which no further launch would change
        if self._terms.saving:
            ended = final or not verdicts.coarse(current, self._terms.limits, level=self._terms.level)
        if self._launches.mostly_recompiled or self._reference.mostly_recompiled:
            verdict = verdicts.without_steady_windows(verdict)
        return verdict, ended

    def _verdict(self, start: int, stop: int, ease: float) -> Verdict:
        terms, current = self._terms, self._launches.taken[start:stop]
        return verdicts.judge_times(
            self._measurement(current),
            self._reference.measurements(start, stop),
            terms.limits,
            not_gated=terms.not_gated,
            level=terms.level * ease,
            interleaved=terms.interleaved,
            stretches=[launch.stretches for launch in current],
        )

    def _measurement(self, launches: Sequence[LaunchSamples]) -> Measurement:
        return measurement(launches, self._environment)

    def recording(self) -> Recording:
        """Return what would be stored; where it will be, with its resolution and what ranks imported."""
        launches, terms = self._launches.taken, self._terms
        current = self._measurement(launches)
        if not terms.saving:
            return Recording(measurement=current)
        return Recording(
            measurement=current,
            resolution=verdicts.resolutions(current, terms.limits, level=terms.level),
            distributions=distributions({module for launch in launches for module in launch.others}),
        )
