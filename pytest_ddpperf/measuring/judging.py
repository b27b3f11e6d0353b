"""When a measurement is judged: the rules of `verdict`, look after look."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from pytest_ddpperf import verdict as verdicts
from pytest_ddpperf.measuring import installed
from pytest_ddpperf.measuring import looks as rules
from pytest_ddpperf.measuring.launches import Launches, measurement
from pytest_ddpperf.records import Environment, LaunchSamples, Limit, Measurement, Recording, Verdict


class Reference(Protocol):
    """The baseline side of a measurement, as far as judging needs it."""

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

    @property
    def saving(self) -> bool:
        return self.not_gated == "saving"


_Rule = Callable[[rules.Judge], tuple[Verdict, bool]]  # one of `looks`


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
        """Whether a measurement may end between two looks."""
        return self._terms.interleaved and self._terms.not_gated is None

    def early(self, launches: int) -> tuple[Verdict, bool]:
        """Return the verdict after `launches` of each side, between two looks, and whether it ends the measurement."""
        return self._judged(partial(rules.early_stop, launches), final=False)

    def __call__(self, looks: Sequence[int], *, final: bool) -> tuple[Verdict, bool]:
        """Return the verdict after `looks` and whether it ends the measurement; `final`: no further look will come."""
        return self._judged(partial(rules.follow, looks, final=final), final=final)

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
            distributions=installed.distributions({module for launch in launches for module in launch.others}),
        )
