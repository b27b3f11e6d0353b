"""When a measurement has rounds enough: looks declared in advance, and what each may spend.

At each look all launches so far are judged. The measurement ends with a regression or an
improvement that has evidence at the share of the test's error rate that the look may spend, or
when everything is settled. Shares grow as O'Brien and Fleming's boundary does: K. K. G. Lan and
D. L. DeMets, "Discrete sequential boundaries for clinical trials", Biometrika 70 (1983). The
shares of all looks add up to one, so by Bonferroni's inequality the rate of the test holds however
its looks are correlated. The last look may spend all that is left, also if time makes it the last.

Between two looks the pairs so far end the measurement early if they are within the limit and
settled. That claims nothing, so it causes no false alarm. From the second look on, a measurement
also ends if the launches that are left would hardly settle it (a stop for futility: J. M. Lachin,
"A review of methods for futility stopping based on conditional power", Statistics in Medicine 24
(2005)).

All of it is computed from the rounds so far: nothing is launched, read or remembered here.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

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
from pytest_ddpperf.records.record import record
from pytest_ddpperf.records.samples import (
    GOES_ON,
    Environment,
    Measurement,
    Status,
    Verdict,
)
from pytest_ddpperf.verdict import observed, stats, times
from pytest_ddpperf.verdict.decision import (
    given_up,
    with_counters,
    with_losses,
    with_two_speeds,
    with_work,
    without_gate,
    without_improvement,
    without_steady_windows,
)
from pytest_ddpperf.verdict.stats import Difference

# A measurement goes on only if the launches that are left would settle it at least so often.
_FUTILE = 0.2
_CLAIMS = (Status.REGRESSED, Status.IMPROVED)


def schedule(first: int, most: int) -> tuple[int, ...]:
    """Return after how many launches there are looks: `first`, then twice as many each time up to
    `most`."""
    looks = [first]
    while 2 * looks[-1] <= most:
        looks.append(2 * looks[-1])
    return tuple(looks)


class Spending(NamedTuple):
    """What evidence costs after some launches."""

    level: float  # the error rate of the last look
    share: float  # of `level`, what may be spent now; 0 between two looks


def spending(
    launches: int, looks: Sequence[int], level: float, *, final: bool = False
) -> Spending:
    """Return what a test of error rate `level` may spend after so many launches; `final`: no
    further look will come."""
    spent = [
        stats.spent(level, look / looks[-1])
        for look in looks
        if look < launches
    ]
    before = spent[-1] if spent else 0.0
    if final:
        return Spending(level - before, 1.0)
    last = level
    if len(looks) > 1:
        last -= stats.spent(level, looks[-2] / looks[-1])
    own = 0.0
    if launches in looks:
        own = stats.spent(level, launches / looks[-1]) - before
    return Spending(last, own / last)


def ends(verdict: Verdict) -> bool:
    """Whether a verdict at a look ends the measurement: it claims something, or further launches
    would hardly bring another."""
    return verdict.status in _CLAIMS or all(
        comparison.settled for comparison in verdict.comparisons
    )


def is_futile(
    verdict: Verdict,
    launches: int,
    looks: Sequence[int],
    differences: Sequence[Difference],
) -> bool:
    """Whether the launches that are left, after so many, would hardly settle a verdict;
    `differences` are those behind its comparisons."""
    if launches < looks[1] or launches >= looks[-1] or not verdict.comparisons:
        return False
    if any(each.reason == Reason.TWO_SPEEDS for each in verdict.comparisons):
        return False  # the share of slow launches is in no difference
    chances = []
    for comparison, difference in zip(
        verdict.comparisons, differences, strict=True
    ):
        bound = observed.bound_of(comparison)
        chance = difference.chance_to_settle(
            bound,
            times.seen(bound),
            looks[-1],
            level=comparison.level,
            noise_level=times.SETTLED_LEVEL,
        )
        chances.append(chance)
    passes = min(chance for chance, _ in chances)
    shows = max(chance for _, chance in chances)
    return passes + shows < _FUTILE


# --- the rule


class Take(NamedTuple):
    """A further round is to be taken, of so many until the next look."""

    planned: int


class Stop(NamedTuple):
    """The measurement ends with this verdict."""

    verdict: Verdict


# Under these a run is measured, but its figures say nothing about the code.
_DEBUGGING: Mapping[str, tuple[str, ...]] = {
    "env:CUDA_LAUNCH_BLOCKING": ("1",),
    "env:TORCH_DISTRIBUTED_DEBUG": ("DETAIL",),
    "env:NCCL_DEBUG": ("TRACE",),
}


@record
class Rule:
    """What decides after each round: how a job is judged, and what it is compared with."""

    job: Job
    max_seconds: float  # for all rounds
    confirms: bool = False  # a suspicion
    other: OtherVersion | None = None  # whose launches are interleaved
    stored: StoredBaseline = NOTHING_STORED  # without another version

    def next(self, rounds: Rounds) -> Take | Stop:
        """Return what follows these rounds. Whether further ones fit into `max_seconds` is asked at
        looks alone."""
        looks = schedule(self.job.launches, self.job.settings.max_launches)
        count = len(rounds)
        left = [look for look in looks if look > count]
        if count < looks[0]:
            return Take(left[0])
        # The smallest detectable change of the same code has to rest on all pairs.
        is_same = self.job.settings.against == "self"
        may_give_up = not is_same and self.not_gated(rounds) is None
        at_look = count in looks
        if not at_look and (self.other is None or not may_give_up):
            return Take(left[0])
        further = bool(left)
        if at_look and further:
            further = self._has_time_for(left[0], rounds)
        spends = spending(count, looks, self.job.level, final=not further)
        if self.other is None and count == looks[0] and further:
            # A disturbance may last as long as these launches, which no other side shares.
            spends = Spending(spends.level, 0.0)
        current, before = self.sides_of(rounds)
        stretches = [each.now.stretches for each in rounds]
        verdict = times.judge_times(
            current,
            before,
            self.job.limits([current, *before]),
            not_gated=self.not_gated(rounds),
            level=spends.level,
            share=spends.share,
            interleaved=self.other is not None,
            stretches=stretches,
        )
        ended = not further or ends(verdict)
        if not at_look:
            # Calling suspected code as fast as the baseline's is a claim, which needs a look.
            is_early = verdict.status is Status.PASS and not self.confirms
            ended = ended and (is_early or not verdict.status.compared)
        if may_give_up and not ended:
            differences = times.differences_of(
                verdict,
                current,
                before,
                interleaved=self.other is not None,
                stretches=stretches,
            )
            if is_futile(verdict, count, looks, differences):
                verdict = given_up(verdict)
                ended = True
        verdict, ended = self._complete(
            rounds, verdict, ended, final=not further
        )
        if further and not ended:
            return Take(left[0])
        if not (self.job.gate or self.job.settings.disable):
            verdict = without_gate(verdict)
        return Stop(verdict)

    def sides_of(
        self, rounds: Rounds
    ) -> tuple[Measurement, tuple[Measurement, ...]]:
        """Return what the launches of the current side are together, and what they are compared
        with: the sessions of the stored baseline, or the launches of the other version, if nothing
        went wrong there."""
        current = combine(current_launches(rounds), self.environment(rounds))
        if self.other is None:
            return current, self.stored.measurements
        there = baseline_launches(rounds)
        if not there or find_error(rounds):
            return current, ()
        environment = self.other.job.environment(there[-1].facts)
        return current, (combine(there, environment),)

    def environment(self, rounds: Rounds) -> Environment:
        """Return the environment of the current side, as it was at the first look."""
        return self.job.environment(rounds[self.job.launches - 1].now.facts)

    def not_gated(self, rounds: Rounds) -> Reason | None:
        """Return the reason code of a measurement that is not compared with anything."""
        if self.job.settings.disable:
            return Reason.DISABLED
        # with a reference its ratio is asked for, too
        if not self.job.gate and self.job.reference is None:
            return Reason.GATE_OFF
        found = rounds[: self.job.launches][-1]
        facts = {**found.now.facts, **self.job.facts}
        for name, values in _DEBUGGING.items():
            if str(facts.get(name)).upper() in values:
                return Reason.DEBUGGING_VARIABLE
        saves = self.job.settings.records and self.job.reference is None
        return Reason.SAVING if saves else None

    def _has_time_for(self, count: int, rounds: Rounds) -> bool:
        """Whether `count` rounds fit into the time. Those up to the second look always do: with
        few pairs only large changes have evidence."""
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
        limits = job.limits([current, *before])
        verdict = with_counters(verdict, current, counted, limits)
        verdict = with_work(verdict, current, before)
        # no further launch would change these
        ended = ended or verdict.reason in (
            Reason.COUNTER_ROSE,
            Reason.OTHER_EXAMPLES,
            Reason.NOT_SYNCHRONISED,
        )
        if self.not_gated(rounds) == Reason.SAVING:
            ended = final or not times.coarse(current, limits, level=job.level)
        now = current_launches(rounds)
        there = baseline_launches(rounds)
        if are_mostly_unfit(now) or are_mostly_unfit(there):
            verdict = without_steady_windows(verdict)
        if GOES_ON in find_doubts(now) and GOES_ON not in find_doubts(there):
            verdict = without_improvement(verdict)
        return with_two_speeds(verdict, current, before), ended
