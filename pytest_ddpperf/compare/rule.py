"""When a measurement has rounds enough: looks declared in advance, a claim, its repetition.

After as many launches as a look says, all launches so far are judged:

- Within the limit and settled: the measurement ends. It also ends if further launches would hardly
  decide it.
- Beyond the limit, in either direction, for the first time: a claim. It alone decides nothing.
- At a later look: the launches since then, by themselves, must make the same claim on the same
  metric, at twice the error rate. All launches together have to make it, too. Only then it stands.

So a regression is reported only if launches that had no part in the first claim show it again, with
evidence of their own.

Between two looks the pairs so far end the measurement early if they are within the limit and
settled. That claims nothing, so it causes no false alarm. From the second look on, a measurement
also ends if the launches that are left would hardly settle it (a stop for futility: J. M. Lachin,
"A review of methods for futility stopping based on conditional power", Statistics in Medicine 24
(2005)).

All of it is computed from the rounds so far: nothing is launched, read or remembered here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from pytest_ddpperf.compare.job import Job
from pytest_ddpperf.compare.rounds import (
    Rounds,
    are_mostly_unfit,
    baseline_launches,
    combine,
    current_launches,
    expect_seconds,
    find_doubts,
    find_error,
)
from pytest_ddpperf.compare.sides import (
    NOTHING_STORED,
    OtherVersion,
    StoredBaseline,
)
from pytest_ddpperf.records.reason import Reason
from pytest_ddpperf.records.samples import (
    GOES_ON,
    Environment,
    Measurement,
    Status,
    Verdict,
)
from pytest_ddpperf.verdict import times
from pytest_ddpperf.verdict.decision import (
    given_up,
    with_counters,
    with_losses,
    with_work,
    without_blind_pass,
    without_claim,
    without_improvement,
    without_steady_windows,
)
from pytest_ddpperf.verdict.stats import Difference

# The verdict on launches start..stop, counted from 0, `stop` excluded, with so many times the error
# rate.
VerdictOn = Callable[[int, int, float], Verdict]
# The difference of logarithms behind each comparison of a verdict, on launches start..stop.
DifferencesOf = Callable[[Verdict, int, int], Sequence[Difference]]

# What confirms may err more often than what decides: all launches together, of which it is half,
# decide as well.
_CONFIRMING = 2.0
# A measurement goes on only if the launches that are left would settle it at least so often.
_FUTILE = 0.2
# what is left without confirmation
_CLAIMS = {Status.REGRESSED: Status.INCONCLUSIVE, Status.IMPROVED: Status.PASS}


def schedule(first: int, most: int) -> tuple[int, ...]:
    """Return after how many launches there are looks: `first`, then twice as many each time up to
    `most`, so that each look has as many fresh launches as made the claim of the one before.
    """
    looks = [first]
    while 2 * looks[-1] <= most:
        looks.append(2 * looks[-1])
    return tuple(looks)


def decided(verdict: Verdict) -> bool:
    """Whether further launches would hardly bring another verdict that claims nothing."""
    return verdict.status not in _CLAIMS and all(
        comparison.settled for comparison in verdict.comparisons
    )


def follow(
    looks: Sequence[int], judge: VerdictOn, *, final: bool
) -> tuple[Verdict, bool]:
    """Return the verdict after `looks` and whether it ends the measurement; `final`: no further
    look will come."""
    suspected: dict[Status, int] = {}  # after how many launches first
    for launches in looks:
        verdict = judge(0, launches, 1.0)
        status = verdict.status
        if not status.compared or decided(verdict):
            return verdict, True
        if status is Status.INCONCLUSIVE:
            suspected.setdefault(Status.REGRESSED, launches)
        elif status in _CLAIMS:
            since = suspected.setdefault(status, launches)
            if since < launches:
                fresh = judge(since, launches, _CONFIRMING)
                if _claimed(fresh, status) & _claimed(verdict, status):
                    return verdict, True
    if final and status in _CLAIMS:
        return without_claim(
            verdict, _CLAIMS[status], Reason.NOT_CONFIRMED
        ), True
    return verdict, final


def early_stop(launches: int, judge: VerdictOn) -> tuple[Verdict, bool]:
    """Return the verdict after `launches`, between two looks, and whether the measurement ends with
    it."""
    verdict = judge(0, launches, 1.0)
    return verdict, verdict.status is Status.PASS and decided(verdict)


def _claimed(verdict: Verdict, status: Status) -> set[str]:
    """Return the metrics for which a verdict claims that status. For others it may claim the
    opposite."""
    return {c.limit.metric for c in verdict.comparisons if c.status is status}


def is_futile(
    verdict: Verdict,
    launches: int,
    looks: Sequence[int],
    judge: VerdictOn,
    differences: DifferencesOf,
) -> bool:
    """Whether the launches that are left, after so many, would hardly settle a verdict."""
    if launches < looks[1] or launches >= looks[-1] or not verdict.comparisons:
        return False
    since = _suspected_since(launches, looks, judge)
    every = differences(verdict, 0, launches)
    fresh: Sequence[Difference | None] = [None] * len(every)
    if since is not None and launches - since >= times.LAUNCHES_NEEDED:
        fresh = differences(verdict, since, launches)
    chances = [
        difference.chance_to_settle(
            times.bound(
                comparison.limit, math.log(comparison.baseline_seconds)
            ),
            looks[-1],
            fresh=later,
            since=since,
            level=comparison.level,
            noise_level=times.SETTLED_LEVEL,
        )
        for comparison, difference, later in zip(
            verdict.comparisons, every, fresh, strict=True
        )
    ]
    passes = min(chance for chance, _ in chances)
    shows = max(chance for _, chance in chances)
    return passes + shows < _FUTILE


def _suspected_since(
    launches: int, looks: Sequence[int], judge: VerdictOn
) -> int | None:
    """Return the look that made a claim or, if none did, the next one that may; None if
    nothing could confirm it any more."""
    suspicious = (Status.REGRESSED, Status.INCONCLUSIVE)
    for look in looks:
        if look <= launches and judge(0, look, 1.0).status in suspicious:
            return look
    # at the last look nothing repeats a claim
    return next((look for look in looks[:-1] if look > launches), None)


# --- the rule


@dataclass(frozen=True, slots=True)
class Take:
    """A further round is to be taken, of so many until the next look."""

    planned: int


@dataclass(frozen=True, slots=True)
class Stop:
    """The measurement ends with this verdict."""

    verdict: Verdict


# Under these a run is measured, but its figures say nothing about the code.
_DEBUGGING: Mapping[str, tuple[str, ...]] = {
    "env:CUDA_LAUNCH_BLOCKING": ("1",),
    "env:TORCH_DISTRIBUTED_DEBUG": ("DETAIL",),
    "env:NCCL_DEBUG": ("TRACE",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What decides after each round: how a job is judged, and what it is compared with."""

    job: Job
    max_seconds: float  # for all rounds
    confirms: bool = False  # a suspicion
    other: OtherVersion | None = None  # whose launches are interleaved
    stored: StoredBaseline = NOTHING_STORED  # without another version

    def next(self, rounds: Rounds) -> Take | Stop:
        """Return what follows these rounds. Time for further ones is asked for at looks alone."""
        looks = schedule(self.job.launches, self.job.settings.max_launches)
        count = len(rounds)
        reached = [look for look in looks if look <= count]
        left = looks[len(reached) :]
        if not reached:
            return Take(left[0])
        # The smallest detectable change of the same code has to rest on all pairs.
        is_same = self.job.settings.against == "self"
        gives_up = not is_same and self.not_gated(rounds) is None
        judge = partial(self._judge, rounds)
        further = True
        if count in looks:
            further = bool(left) and self._has_time_for(left[0], rounds)
            verdict, ended = follow(reached, judge, final=not further)
        elif self.other is not None and gives_up:
            verdict, ended = early_stop(count, judge)
            # Calling suspected code as fast as the baseline's is a claim, which needs a look.
            ended = ended and not self.confirms
        else:
            return Take(left[0])
        if gives_up and further and not ended:
            differences = partial(self._differences, rounds)
            if is_futile(verdict, count, looks, judge, differences):
                verdict = given_up(verdict)
                ended = True
        verdict, ended = self._complete(
            rounds, verdict, ended, final=not further
        )
        return Take(left[0]) if further and not ended else Stop(verdict)

    def sides_of(
        self, rounds: Rounds, start: int = 0, stop: int | None = None
    ) -> tuple[Measurement, tuple[Measurement, ...]]:
        """Return what launches start..stop of the current side are together, and what they are
        compared with: the sessions of the stored baseline, or the same launches of the other
        version, if nothing went wrong there."""
        launches = current_launches(rounds)[start:stop]
        current = combine(launches, self.environment(rounds))
        if self.other is None:
            return current, self.stored.measurements
        there = baseline_launches(rounds)
        if not there or find_error(rounds):
            return current, ()
        environment = self.other.job.environment(there[-1].facts)
        return current, (combine(there[start:stop], environment),)

    def environment(self, rounds: Rounds) -> Environment:
        """Return the environment of the current side, as it was at the first look."""
        return self.job.environment(rounds[self.job.launches - 1].now.facts)

    def not_gated(self, rounds: Rounds) -> Reason | None:
        """Return the reason code of a measurement that is not compared with anything."""
        if self.job.settings.disable:
            return Reason.DISABLED
        if not self.job.gate:
            return Reason.GATE_OFF
        found = rounds[: self.job.launches][-1]
        facts = {**found.now.facts, **self.job.facts}
        for name, values in _DEBUGGING.items():
            if str(facts.get(name)).upper() in values:
                return Reason.DEBUGGING_VARIABLE
        return Reason.SAVING if self.job.settings.records else None

    def _has_time_for(self, count: int, rounds: Rounds) -> bool:
        """Whether `count` rounds fit into the time. Those that repeat a claim of the first
        look always do."""
        if (
            count <= 2 * self.job.launches
            and self.not_gated(rounds) != Reason.SAVING
        ):
            return True
        return expect_seconds(rounds, count) <= self.max_seconds

    def _complete(
        self, rounds: Rounds, verdict: Verdict, ended: bool, *, final: bool
    ) -> tuple[Verdict, bool]:
        """Add what does not depend on times to a verdict, and return whether the measurement ends
        with it."""
        current, before = self.sides_of(rounds)
        job = self.job
        counted = before
        if self.stored.counted_elsewhere is not None:
            counted = self.stored.counted_elsewhere[1:]
        verdict = with_losses(verdict, current, before, job.level)
        verdict = with_counters(verdict, current, counted, job.limits)
        verdict = with_work(verdict, current, before)
        # no further launch would change these
        ended = ended or verdict.reason in (
            Reason.COUNTER_ROSE,
            Reason.OTHER_EXAMPLES,
            Reason.NOT_SYNCHRONISED,
        )
        if self.not_gated(rounds) == Reason.SAVING:
            ended = final or not times.coarse(
                current, job.limits, level=job.level
            )
        now = current_launches(rounds)
        there = baseline_launches(rounds)
        if are_mostly_unfit(now) or are_mostly_unfit(there):
            verdict = without_steady_windows(verdict)
        if GOES_ON in find_doubts(now) and GOES_ON not in find_doubts(there):
            verdict = without_improvement(verdict)
        seen = without_blind_pass(verdict, current, before)
        return seen, ended and (final or seen == verdict)

    def _judge(
        self, rounds: Rounds, start: int, stop: int, ease: float
    ) -> Verdict:
        current, before = self.sides_of(rounds, start, stop)
        return times.judge_times(
            current,
            before,
            self.job.limits,
            not_gated=self.not_gated(rounds),
            level=self.job.level * ease,
            interleaved=self.other is not None,
            stretches=[each.now.stretches for each in rounds[start:stop]],
        )

    def _differences(
        self, rounds: Rounds, verdict: Verdict, start: int, stop: int
    ) -> Sequence[Difference]:
        current, before = self.sides_of(rounds, start, stop)
        return times.differences_of(
            verdict,
            current,
            before,
            interleaved=self.other is not None,
            stretches=[each.now.stretches for each in rounds[start:stop]],
        )
