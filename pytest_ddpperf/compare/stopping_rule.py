"""When a measurement has launches enough: looks declared in advance, a suspicion, its confirmation.

After as many launches as a look says, all launches so far are judged:

- Within the limit and settled: the measurement ends. It also ends if further launches would hardly
  decide it.
- Beyond the limit, in either direction, for the first time: a suspicion. It alone decides nothing.
- At a later look: the launches since the suspicion, by themselves, must come to the same verdict on
  the same metric as all launches together. Only then it stands.

So a regression is reported only if launches that had no part in raising the suspicion show it
again, with evidence of their own.

Between two looks the pairs so far end the measurement early if they are within the limit and
settled. That claims nothing, so it causes no false alarm. From the second look on, a measurement
also ends if the launches that are left would hardly settle it (a stop for futility: J. M. Lachin,
"A review of methods for futility stopping based on conditional power", Statistics in Medicine 24
(2005)).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from pytest_ddpperf.compare.baseline_side import Interleaved, Stored
from pytest_ddpperf.compare.launches import CurrentSide, Job, measurement
from pytest_ddpperf.records.samples import (
    GOES_ON,
    Environment,
    Measurement,
    Reason,
    Scalar,
    Status,
    Verdict,
)
from pytest_ddpperf.verdict import times
from pytest_ddpperf.verdict.decision import (
    given_up,
    with_counters,
    with_losses,
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
    `most`, so that each look has as many fresh launches as raised the suspicion of the one before.
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
    for number, launches in enumerate(looks):
        verdict = judge(0, launches, 1.0)
        if not verdict.status.compared or decided(verdict):
            return verdict, True
        if verdict.status in _CLAIMS:
            since = suspected.setdefault(verdict.status, launches)
            if since < launches and _confirms(
                judge(since, launches, _CONFIRMING), verdict
            ):
                return verdict, True
            if final and number == len(looks) - 1:
                verdict = without_claim(
                    verdict, _CLAIMS[verdict.status], Reason.NOT_CONFIRMED
                )
        elif verdict.status is Status.INCONCLUSIVE:
            suspected.setdefault(Status.REGRESSED, launches)
    return verdict, final


def early_stop(launches: int, judge: VerdictOn) -> tuple[Verdict, bool]:
    """Return the verdict after `launches`, between two looks, and whether the measurement ends with
    it."""
    verdict = judge(0, launches, 1.0)
    return verdict, verdict.status is Status.PASS and decided(verdict)


def _confirms(fresh: Verdict, verdict: Verdict) -> bool:
    return not _claimed(verdict, verdict.status).isdisjoint(
        _claimed(fresh, verdict.status)
    )


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
    suspicious = (Status.REGRESSED, Status.INCONCLUSIVE)
    since = next(
        (
            look
            for look in looks
            if look <= launches and judge(0, look, 1.0).status in suspicious
        ),
        None,
    )
    # a suspicion may yet be raised, but at the last look nothing confirms it
    if since is None:
        since = next((look for look in looks[:-1] if look > launches), None)
    every = differences(verdict, 0, launches)
    enough = since is not None and launches - since >= times.LAUNCHES_NEEDED
    fresh = (
        differences(verdict, since, launches)
        if since is not None and enough
        else [None] * len(every)
    )
    chances = [
        difference.chance_to_settle(
            times.bound(comparison.limit, math.log(comparison.baseline_seconds)),
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
    return (
        min(passes for passes, _ in chances) + max(shows for _, shows in chances)
        < _FUTILE
    )


# Under these a run is measured, but its figures say nothing about the code.
_DEBUGGING: Mapping[str, tuple[str, ...]] = {
    "env:CUDA_LAUNCH_BLOCKING": ("1",),
    "env:TORCH_DISTRIBUTED_DEBUG": ("DETAIL",),
    "env:NCCL_DEBUG": ("TRACE",),
}


def why_not_gated(job: Job, facts: Mapping[str, Scalar]) -> Reason | None:
    """Return the reason code of a measurement that is not compared with anything."""
    if job.settings.disable:
        return Reason.DISABLED
    if not job.gate:
        return Reason.GATE_OFF
    if any(
        str(facts.get(name)).upper() in values for name, values in _DEBUGGING.items()
    ):
        return Reason.DEBUGGING_VARIABLE
    return Reason.SAVING if job.settings.records else None


class Judge:
    """Lets both sides launch, and judges them at each look."""

    def __init__(
        self,
        job: Job,
        current: CurrentSide,
        side: Stored | Interleaved,
        *,
        max_seconds: float,
        stops_early: bool,
        gives_up: bool,
    ) -> None:
        """`max_seconds` are for all launches; `stops_early`: an interleaved comparison may end
        between two looks; `gives_up`: a measurement ends if it would hardly be settled."""
        self._job, self._current, self._side = job, current, side
        self._max_seconds, self._stops_early, self._gives_up = (
            max_seconds,
            stops_early,
            gives_up,
        )
        self._not_gated: Reason | None = None
        self.environment = Environment()  # of the launches, from the first look on

    def decide(self) -> Verdict:
        """Launch until a look or an early stop ends it, or until there is no time for the next
        look. Raises the errors of a launch, and BaselineError."""
        looks = schedule(self._job.launches, self._job.settings.max_launches)
        self._side.take(self._current, looks[0], planned=looks[0])
        self._not_gated = why_not_gated(
            self._job, {**self._current.facts, **self._job.facts}
        )
        self._gives_up &= self._not_gated is None
        self.environment = self._job.environment(self._current)
        self._side.read(self.environment, self._not_gated)
        for number, look in enumerate(looks, 1):
            for count in range(len(self._current.taken) + 1, look):
                self._side.take(self._current, count, planned=look)
                if self._side.interleaved and self._gives_up:
                    verdict, ended = self._completed(
                        *self._between(count, looks), final=False
                    )
                    if ended:
                        return verdict
            self._side.take(self._current, look, planned=look)
            further = number < len(looks) and self._has_time_for(looks[number])
            verdict, ended = follow(looks[:number], self._verdict, final=not further)
            if further and not ended:
                verdict, ended = self._given_up(verdict, look, looks)
            verdict, ended = self._completed(verdict, ended, final=not further)
            if ended or not further:
                break
        return verdict

    def _between(self, count: int, looks: Sequence[int]) -> tuple[Verdict, bool]:
        """Return the verdict after `count` launches, between two looks, and whether the measurement
        ends with it."""
        verdict, ended = early_stop(count, self._verdict)
        return (
            (verdict, True)
            if ended and self._stops_early
            else self._given_up(verdict, count, looks)
        )

    def _given_up(
        self, verdict: Verdict, count: int, looks: Sequence[int]
    ) -> tuple[Verdict, bool]:
        """Return what is left of a verdict if the measurement ends because it would hardly be
        settled."""
        if self._gives_up and is_futile(
            verdict, count, looks, self._verdict, self._differences
        ):
            return given_up(verdict), True
        return verdict, False

    def _has_time_for(self, count: int) -> bool:
        """Whether `count` launches fit into the time. Those that confirm a suspicion of the first
        look always do."""
        if count <= 2 * self._job.launches and self._not_gated != Reason.SAVING:
            return True
        return self._side.seconds(self._current, count) <= self._max_seconds

    def _completed(
        self, verdict: Verdict, ended: bool, *, final: bool
    ) -> tuple[Verdict, bool]:
        """Add what does not depend on times to a verdict, and return whether the measurement ends
        with it."""
        current = self._measurement()
        verdict = with_losses(
            verdict, current, self._side.measurements(), self._job.level
        )
        verdict = with_counters(
            verdict, current, self._side.counted(), self._job.limits
        )
        # which no further launch would change
        ended = ended or verdict.reason in (
            Reason.COUNTER_ROSE,
            Reason.NOT_SYNCHRONISED,
        )
        if self._not_gated == Reason.SAVING:
            ended = final or not times.coarse(
                current, self._job.limits, level=self._job.level
            )
        if self._current.mostly_unfit or self._side.mostly_unfit:
            verdict = without_steady_windows(verdict)
        if GOES_ON in self._current.doubts() and not self._side.goes_on:
            verdict = without_improvement(verdict)
        seen = without_blind_pass(verdict, current, self._side.measurements())
        return seen, ended and (final or seen is verdict)

    def _verdict(self, start: int, stop: int, ease: float) -> Verdict:
        return times.judge_times(
            self._measurement(start, stop),
            self._side.measurements(start, stop),
            self._job.limits,
            not_gated=self._not_gated,
            level=self._job.level * ease,
            interleaved=self._side.interleaved,
            stretches=[launch.stretches for launch in self._current.taken[start:stop]],
        )

    def _differences(
        self, verdict: Verdict, start: int, stop: int
    ) -> Sequence[Difference]:
        return times.differences_of(
            verdict,
            self._measurement(start, stop),
            self._side.measurements(start, stop),
            interleaved=self._side.interleaved,
            stretches=[launch.stretches for launch in self._current.taken[start:stop]],
        )

    def _measurement(self, start: int = 0, stop: int | None = None) -> Measurement:
        return measurement(self._current.taken[start:stop], self.environment)
