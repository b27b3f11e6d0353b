"""When a measurement is judged, and which of its launches are: the rules of `verdict`, look after look."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from pytest_ddpperf import verdict as verdicts
from pytest_ddpperf.measuring import looks as rules
from pytest_ddpperf.measuring import provenance
from pytest_ddpperf.measuring.launches import Launches, measurement
from pytest_ddpperf.measuring.splits import split
from pytest_ddpperf.records import Environment, LaunchSamples, Limit, Measurement, Recording, Splits, Verdict


class Before(Protocol):
    """What launches are held against, in one view of them."""

    def __call__(self, start: int = 0, stop: int | None = None, /) -> tuple[Measurement, ...]:
        """The other side's launches start..stop, or the sessions of a baseline; none where there is nothing."""


class Reference(Protocol):
    """What a measurement is held against, as far as judging needs it."""

    @property
    def kept(self) -> Before: ...

    @property
    def as_taken(self) -> Before: ...

    @property
    def replaced(self) -> bool:
        """Whether launches of the other side were taken again."""

    def seconds(self, now: Launches, count: int) -> float:
        """What `count` launches a side come to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The launches of both sides in one of two ways to see them: unfit ones taken again, or all as they were taken."""

    now: Sequence[LaunchSamples]
    before: Before


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What a look came to."""

    verdict: Verdict
    view: View  # that the verdict is about
    ended: bool  # whether the measurement ends with it


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How a measurement shall be judged."""

    limits: tuple[Limit, ...]
    level: float  # the error rate
    interleaved: bool  # whether launches of both sides took turns
    not_gated: str | None  # the reason code of a measurement that is not held against anything
    confirming: int  # so many launches are taken however long they take, to confirm a suspicion of the first look
    max_seconds: float  # for all launches
    settles: bool  # a suspicion: until it is slower with evidence, or certainly not

    @property
    def saving(self) -> bool:
        return self.not_gated == "saving"


_Rule = Callable[[rules.Judge], tuple[Verdict, bool]]  # one of `looks`


class Judge:
    """Holds the launches of a measurement against its reference."""

    def __init__(self, terms: Terms, launches: Launches, reference: Reference, environment: Environment) -> None:
        self._terms, self._launches, self._reference, self._environment = terms, launches, reference, environment

    def affords(self, count: int) -> bool:
        """Whether so many launches fit into the time."""
        confirming = count <= self._terms.confirming and not self._terms.saving
        return confirming or self._reference.seconds(self._launches, count) <= self._terms.max_seconds

    @property
    def glances(self) -> bool:
        """Whether a measurement may end between two looks. Not where it acquits, which is a claim of its own."""
        return self._terms.interleaved and not self._terms.settles and self._terms.not_gated is None

    def glance(self, launches: int) -> Judged:
        """The verdict after so many launches of a side, between two looks."""
        return self._judged(partial(rules.glance, launches), final=False)

    def __call__(self, looks: Sequence[int], *, final: bool) -> Judged:
        """The verdict after `looks`; `final`: no further look will come."""
        enough = verdicts.not_slower if self._terms.settles else rules.decided
        return self._judged(partial(rules.follow, looks, final=final, enough=enough), final=final)

    def _judged(self, rule: _Rule, *, final: bool) -> Judged:
        """By both views of the launches.

        Whoever replaces launches might replace the slow ones. So they are judged as they were taken, too: a
        regression that those show is the verdict, and nothing ends before both have.
        """
        kept = self._by(rule, View(now=self._launches.kept, before=self._reference.kept), final=final)
        if self._launches.kept == self._launches.as_taken and not self._reference.replaced:
            return kept
        view = View(now=self._launches.as_taken, before=self._reference.as_taken)
        as_taken = self._by(rule, view, final=final)
        chosen = as_taken if as_taken.verdict == "REGRESSED" else kept
        return replace(chosen, ended=kept.ended and (as_taken.ended or self._terms.saving))

    def _by(self, rule: _Rule, view: View, *, final: bool) -> Judged:
        verdict, ended = rule(partial(self._verdict, view))
        current = self._measurement(view.now)
        verdict = verdicts.with_counters(verdict, current, view.before(), self._terms.limits)
        ended = ended or verdict.reason == "counter-rose"  # which no further launch would change
        if self._terms.saving:
            ended = final or not verdicts.coarse(current, self._terms.limits, level=self._terms.level)
        return Judged(verdict=verdict, view=view, ended=ended)

    def _verdict(self, view: View, start: int, stop: int, ease: float) -> Verdict:
        terms = self._terms
        return verdicts.judge_times(
            self._measurement(view.now[start:stop]),
            view.before(start, stop),
            terms.limits,
            not_gated=terms.not_gated,
            level=terms.level * ease,
            interleaved=terms.interleaved,
            stretches=[launch.stretches for launch in view.now[start:stop]],
        )

    def _measurement(self, launches: Sequence[LaunchSamples]) -> Measurement:
        return measurement(launches, self._environment)

    def recording(self, view: View) -> Recording:
        """What would be stored, with its resolution and whose code it is where it will be."""
        current, terms = self._measurement(view.now), self._terms
        if not terms.saving:
            return Recording(measurement=current)
        return Recording(
            measurement=current,
            resolution=verdicts.resolutions(current, terms.limits, level=terms.level),
            files=provenance.files([launch.files for launch in view.now]),
            distributions=provenance.distributions({module for launch in view.now for module in launch.others}),
        )

    def splits(self, looks: Sequence[int]) -> Splits:
        """How the launches of both sides, split otherwise, would have been judged."""
        hand = [self._measurement([launch]) for launch in self._launches.kept[: looks[-1]]]
        base = [self._reference.kept(place, place + 1)[0] for place in range(looks[-1])]
        stretches = [launch.stretches for launch in self._launches.kept[: looks[-1]]]
        return split(hand, base, stretches, self._terms.limits, looks, level=self._terms.level)
