"""The decision: is the current measurement worse than the baseline, and does that fail the test?

The only place that decides, times included (by `times`, on the statistics of `stats`). Counters
have no noise. Knows nothing of files, pytest or reports. docs/statistics.md has the choices made
here, with the figures they rest on.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Any, Literal

from pytest_ddpperf.baseline.content import fact_changes
from pytest_ddpperf.records.metric import FLOPS, SENT
from pytest_ddpperf.records.plan import Limit, Limits
from pytest_ddpperf.records.quantiles import launch_quantiles
from pytest_ddpperf.records.samples import (
    EXAMPLES,
    CounterChange,
    Counters,
    Dropped,
    Fall,
    LossChange,
    Measurement,
    Measurements,
    Reason,
    Status,
    Verdict,
)
from pytest_ddpperf.verdict.observed import bound_of
from pytest_ddpperf.verdict.speeds import find_lowest
from pytest_ddpperf.verdict.stats import difference
from pytest_ddpperf.verdict.times import (
    LAUNCHES_NEEDED,
    TEST_LEVEL,
    gravest,
    judge_times,
)


def judge(
    current: Measurement,
    baseline: Measurements,
    limits: Limits,
    *,
    level: float = TEST_LEVEL,
    **how: Any,
) -> Verdict:
    """Compare `current` with the sessions of a baseline: its times, as `judge_times` does, its
    counters and losses."""
    verdict = judge_times(current, baseline, limits, level=level, **how)
    verdict = with_losses(verdict, current, baseline, level)
    verdict = with_counters(verdict, current, baseline, limits)
    verdict = with_work(verdict, current, baseline)
    return with_two_speeds(verdict, current, baseline)


def without_steady_windows(verdict: Verdict) -> Verdict:
    """Return the verdict on launches of which most say little of steady training, since they
    recompiled within their window, for example: nothing is claimed to be within a limit. A slowdown
    stays one: recompiling takes time, too."""
    if verdict.status in (Status.PASS, Status.IMPROVED):
        return replace(
            verdict, status=Status.INCONCLUSIVE, reason=Reason.RECOMPILED
        )
    return verdict


def without_improvement(verdict: Verdict) -> Verdict:
    """Return the verdict on steps that leave work behind, if those of the baseline do not:
    INCONCLUSIVE instead of IMPROVED, for they may only seem to be faster."""
    if verdict.status is Status.IMPROVED:
        return without_claim(verdict, Status.INCONCLUSIVE, Reason.GOES_ON)
    return verdict


def without_gate(verdict: Verdict) -> Verdict:
    """Return what is left of a verdict that no gate asked for: its comparisons, if the sides can be
    compared."""
    return replace(
        verdict,
        status=Status.NOT_GATED,
        reason=Reason.GATE_OFF,
        comparisons=verdict.comparisons if verdict.status.compared else (),
        diverged=None,
    )


def unreached() -> Verdict:
    """Return the verdict on a test that runs and reads nothing that differs: it was not compared,
    and cannot have become slower by the change."""
    return Verdict(status=Status.PASS, reason=Reason.UNREACHED)


# What a minor page fault costs, about: the kernel finds and clears a page. Up to 1e-6 on hardware,
# 3e-6 in a virtual machine.
FAULT_SECONDS = 2e-6
# Launches have two speeds, too, if their page faults differ by this share of a step.
_SPEEDS = 0.1


def with_two_speeds(
    verdict: Verdict, current: Measurement, baseline: Measurements
) -> Verdict:
    """Return the verdict; an INCONCLUSIVE of launches of two speeds has these as its reason,
    unless they recompile or leave work behind."""
    sides = [current.samples, *(session.samples for session in baseline)]
    faults = [each for samples in sides for each in samples.most_page_faults]
    apart = max(faults, default=0.0) - min(faults, default=0.0)
    step = median(current.samples.step_seconds[0])
    are_seen = any(
        each.reason == Reason.TWO_SPEEDS for each in verdict.comparisons
    )
    if not are_seen and apart * FAULT_SECONDS <= _SPEEDS * step:
        return verdict
    if verdict.status is not Status.INCONCLUSIVE or verdict.reason in (
        Reason.RECOMPILED,
        Reason.GOES_ON,
    ):
        return verdict
    return without_claim(verdict, Status.INCONCLUSIVE, Reason.TWO_SPEEDS)


def fails(
    verdict: Verdict,
    *,
    fail_on: frozenset[str] | None,
    baseline_missing: Literal["warn", "fail"],
) -> bool:
    """Whether a verdict fails its test; `fail_on`, when given, names exactly those that do. Never
    one that is saved: a project whose ini file names what is not gated could not record a baseline.
    """
    if fail_on is not None:
        if verdict.reason == Reason.SAVING:
            return False
        named = verdict.status.value.lower().replace(" ", "-") in fail_on
        return named or (verdict.diverged is not None and "diverged" in fail_on)
    missing = verdict.status in (Status.NO_BASELINE, Status.INCOMPARABLE)
    if missing or verdict.reason == Reason.DEBUGGING_VARIABLE:
        return baseline_missing == "fail"
    return verdict.status is Status.REGRESSED


def red_names(
    fail_on: frozenset[str] | None, baseline_missing: Literal["warn", "fail"]
) -> list[str]:
    """Return what makes a run red, by the names of --ddp-fail-on."""
    if fail_on is not None:
        return sorted(fail_on)
    if baseline_missing == "fail":
        return ["regressed", "no-baseline", "incomparable"]
    return ["regressed"]


# A change beyond this share of its limit is worth the seconds of a confirmation.
# docs/evidence.md has the rates.
SUSPICIOUS = 0.5


def is_suspected(verdict: Verdict, share: float = SUSPICIOUS) -> bool:
    """Whether the times of a verdict against a stored baseline are worth a second look. Counters
    have no noise, but only a second look shows which files made them rise."""
    if not verdict.status.compared:
        return False
    for each in verdict.comparisons:
        if math.log1p(each.change.estimate) > share * bound_of(each):
            return True
        # however little the mean of all launches changes
        if each.speeds is not None and each.reason == Reason.TWO_SPEEDS:
            return True
    # Other work on a machine only makes launches slower, the fastest of them least, and their low
    # percentiles least. So a baseline of a busy hour hides slower code from all other figures.
    if not verdict.comparisons:
        return False
    limits = [each.limit for each in verdict.comparisons]
    lowest = verdict.comparisons[find_lowest(limits)]
    return math.log1p(lowest.fastest or 0.0) > share * bound_of(lowest)


# The fastest launch's p10 of unchanged code differed by at most 1.29 times between eleven sessions
# of a noisy machine.
_PLAUSIBLE = 2.5


def implausible_ratio(recorded: Measurements, now: Measurement) -> float:
    """Return how many times its recorded time the baseline's code takes now, if no drift of the
    machine explains it: then it may not do what it did when it was recorded. Else return 0.

    A session's time is the p10 of its fastest launch, which other work on the machine disturbs
    least.
    """
    before = [_fastest(session) for session in recorded]
    today = _fastest(now)
    if min(before) / _PLAUSIBLE <= today <= max(before) * _PLAUSIBLE:
        return 0.0
    return today / before[-1]


def _fastest(session: Measurement) -> float:
    return min(launch_quantiles(session.samples.step_seconds, 10))


# A comparison that is INCONCLUSIVE for these reasons does not say that steps were slower.
_NOT_SLOWER = (Reason.TOO_NOISY, Reason.GOES_ON, Reason.TWO_SPEEDS)


def confirm(
    stored: Verdict, interleaved: Verdict, causes: Sequence[str]
) -> Verdict | None:
    """Return the verdict of a test whose baseline said `stored` and whose baseline's own code,
    today, `interleaved`; None if the comparison decides nothing.

    `causes` are what else may have changed since the baseline was recorded, which both sides share
    today.
    """
    if interleaved.status is Status.REGRESSED:
        reason = interleaved.reason
        if reason != Reason.COUNTER_ROSE:  # reports show that counter
            reason = Reason.CONFIRMED
        return replace(interleaved, reason=reason)
    if any(each.status is Status.REGRESSED for each in stored.counters):
        return None  # counts have no noise, and no machine makes them rise
    if stored.reason == Reason.RECOMPILED:
        # its launches say little of steady training, however fast the machine was
        return None
    if (
        causes
        or interleaved.status not in (Status.PASS, Status.IMPROVED)
        or not _is_clear(stored, interleaved)
    ):
        return None
    if interleaved.reason == Reason.UNDECIDED:
        return None  # it may be slower by about its limit
    interleaved = replace(
        interleaved, facts=stored.facts, sessions=stored.sessions
    )
    was_slower = stored.status is Status.REGRESSED or any(
        compared.status is Status.INCONCLUSIVE
        and compared.reason not in _NOT_SLOWER
        for compared in stored.comparisons
    )
    if was_slower:
        return replace(
            interleaved,
            status=Status.INCONCLUSIVE,
            reason=Reason.MACHINE_SLOWER,
        )
    if stored.status is interleaved.status:
        return interleaved
    return replace(interleaved, status=Status.PASS, reason=Reason.WITHIN_LIMIT)


def without_claim(verdict: Verdict, left: Status, reason: Reason) -> Verdict:
    """Return the verdict with another status, also of the comparisons that decided it."""
    comparisons = tuple(
        replace(each, status=left, reason=reason)
        if each.status is verdict.status
        else each
        for each in verdict.comparisons
    )
    return replace(verdict, status=left, reason=reason, comparisons=comparisons)


def given_up(verdict: Verdict) -> Verdict:
    """Return what is left of a verdict that further launches would hardly settle: PASS if no range
    reaches twice its limit, else what the launches so far say without a claim."""
    is_near = all(
        each.change.high < 2 * math.expm1(bound_of(each))
        for each in verdict.comparisons
    )
    if is_near:
        return without_claim(verdict, Status.PASS, Reason.UNDECIDED)
    if verdict.status is Status.PASS or verdict.reason == Reason.TOO_NOISY:
        return verdict
    return without_claim(verdict, Status.INCONCLUSIVE, Reason.UNDECIDED)


def _is_clear(stored: Verdict, interleaved: Verdict) -> bool:
    """Whether the comparison has all limits and leaves none open: each is settled, or its bound
    excludes the claim."""
    found = {each.limit.metric: each for each in interleaved.comparisons}
    for comparison in stored.comparisons:
        each = found.get(comparison.limit.metric)
        if each is None:
            return False
        claim = -1.0
        if comparison.status is Status.REGRESSED:
            claim = comparison.change.low
        if not each.settled and each.change.high >= claim:
            return False
    return True


def with_counters(
    verdict: Verdict,
    current: Measurement,
    baseline: Measurements,
    limits: Limits,
) -> Verdict:
    """Add the verdict on counters to that on times. Limited counters are compared with the
    baseline's last session.

    Counts have no noise: more than the limit allows is REGRESSED, as much less is IMPROVED. A
    counter that is unknown on one side is INCOMPARABLE if the limit is the user's, unless something
    else is REGRESSED; a default limit is dropped, without a word if the baseline does not know the
    counter. If no times were compared, default limits only find regressions. All limits do so if
    the times are INCOMPARABLE because some are unknown, or if the baseline is another machine's, of
    which only counters are compared. Steps that send nothing
    any more are INCOMPARABLE, for they train something else, unless they are REGRESSED.
    """
    unknown = verdict.status in (Status.NO_BASELINE, Status.INCOMPARABLE)
    only_rises = (
        unknown and verdict.reason != Reason.MUST_MATCH and bool(baseline)
    )
    if not (
        verdict.status.compared
        or verdict.reason == Reason.NO_SUPPORTED_LIMIT
        or only_rises
    ):
        return verdict
    found, why_unknown = _count(verdict, current, baseline[-1], limits)
    decided = _decided(found)
    if decided.status is Status.REGRESSED:
        return decided
    if only_rises:
        return replace(verdict, counters=found.counters)
    if found.details:
        return replace(found, status=Status.INCOMPARABLE, reason=why_unknown)
    lost = _lost_traffic(current, baseline[-1], limits)
    if lost and decided.status.compared:
        return replace(
            found,
            status=Status.INCOMPARABLE,
            reason=Reason.NOT_SYNCHRONISED,
            details=(lost,),
        )
    return decided


def _count(
    verdict: Verdict, current: Measurement, before: Measurement, limits: Limits
) -> tuple[Verdict, Reason]:
    """Add to a verdict what became of limited counters, and those that are unknown; and return the
    reason code of the latter."""
    changes = []
    dropped = [*verdict.dropped_limits]
    details = []
    reason = Reason.UNKNOWN_METRIC
    for limit in limits:
        if not limit.kind.is_exact:
            continue
        now = current.counters.get(limit.metric)
        earlier = before.counters.get(limit.metric)
        if now is not None and earlier is not None:
            changes.append(_counter_change(limit, earlier, now))
        elif limit.default:
            if earlier is not None:
                dropped.append(Dropped(limit=limit, why="unknown now"))
        elif now is None:
            reason = Reason.UNKNOWN_METRIC_NOW
            details.append(f"{limit.metric} is unknown now")
        else:
            details.append(f"{limit.metric} is unknown in the baseline")
    return (
        replace(
            verdict,
            counters=tuple(changes),
            dropped_limits=tuple(dropped),
            details=tuple(details),
        ),
        reason,
    )


_COUNTED_REASONS = {
    Status.REGRESSED: Reason.COUNTER_ROSE,
    Status.IMPROVED: Reason.COUNTER_FELL,
    Status.PASS: Reason.WITHIN_LIMIT,
}


def _decided(verdict: Verdict) -> Verdict:
    """Return the verdict with the status and the reason of its counters if they are graver, or if
    no times were compared and a counter rose, or the user limits one."""
    changes = verdict.counters
    if not changes:
        return verdict
    counted = gravest(change.status for change in changes)
    if verdict.status.compared:
        decides = gravest((verdict.status, counted)) is not verdict.status
    else:
        is_asked = any(not change.limit.default for change in changes)
        decides = is_asked or counted is Status.REGRESSED
    if not decides:
        return verdict
    return replace(verdict, status=counted, reason=_COUNTED_REASONS[counted])


_SENT_COUNTS = tuple(f"{kind}.count" for kind in (*SENT, "collectives"))
_SENT_BYTES = tuple(f"{kind}.bytes" for kind in SENT)
# As a share: without gradients no more is left. A logged loss has a few bytes.
_HARDLY_ANY = 0.01
# Of the gradients' bytes, what is sent less if nothing sends them: figures of the training are.
_NEARLY_ALL = 0.9


def _lost_traffic(
    current: Measurement, before: Measurement, limits: Limits
) -> str:
    """Return, in words, that a step sends nothing any more, or hardly anything and no gradients,
    though the baseline's does; "" if it sends more, or the user limits one of the counters that
    fell. Launches of RPC and of one collective synchronise no gradients."""
    now, base = current.counters, before.counters
    is_other = (
        "roles" in current.environment.key
        or "collective" in current.environment.must_match
    )
    names = (*_SENT_COUNTS, "gradient_bytes", *_SENT_BYTES)
    sent = {name: count for name in names if (count := base.get(name))}
    if is_other or not sent or None in map(now.get, _SENT_COUNTS):
        return ""
    gradients = base.get("gradient_bytes") or 0
    most = _HARDLY_ANY * _amount(base)
    if now.get("gradient_bytes"):
        most = 0  # DDP may have gradients that its hook sends to nobody
    elif gradients:
        most = max(most, _amount(base) - _NEARLY_ALL * gradients)
    if _amount(now) > most:
        return ""
    if any(limit.metric in sent for limit in limits if not limit.default):
        return ""
    reduced = {"all_reduce.count", "reduce_scatter.count", "gradient_bytes"}
    what = (
        "gradients are no longer synchronised"
        if reduced & sent.keys()
        else "a step no longer sends anything"
    )
    # what is unknown last: no limit can be on it
    fell = min(
        sent,
        key=lambda name: (
            now.get(name) is None,
            (now.get(name) or 0) / sent[name],
        ),
    )
    left = now.get(fell)
    return f"{what}: {fell} {sent[fell]:,} -> {'unknown' if left is None else left}"


def _amount(counters: Counters) -> int:
    """Return what a step sends, in bytes and operations."""
    return sum(
        counters.get(name) or 0 for name in (*_SENT_COUNTS, *_SENT_BYTES)
    )


def _counter_change(limit: Limit, before: int, now: int) -> CounterChange:
    allowed = 1 + limit.value + 1e-9  # 15 % of 100 are 15
    status = Status.PASS
    if now > before * allowed:
        status = Status.REGRESSED
    elif now * allowed < before:
        status = Status.IMPROVED
    return CounterChange(limit=limit, status=status, baseline=before, now=now)


# A smaller fall is "1.00x".
_FELL = 0.995


def with_work(
    verdict: Verdict, current: Measurement, baseline: Measurements
) -> Verdict:
    """Add what a step does less of than that of the baseline's last session: then a shorter step
    is no faster code.

    With another number of examples a step, times say nothing about each other, as with another
    batch size: INCOMPARABLE, unless a step with fewer examples is REGRESSED. The time per example
    would be no better: it falls with the number of examples, whatever the code."""
    # None where only counters are compared, with those of another machine.
    if not verdict.status.compared or not baseline:
        return verdict
    before = baseline[-1]
    sides: dict[str, tuple[float | None, float | None]] = {
        name: (before.counters.get(name), current.counters.get(name))
        for name in (FLOPS, "gradient_bytes")
    }
    # What fell to 0 is shown anyway.
    if sides["gradient_bytes"][1] == 0:
        del sides["gradient_bytes"]
    examples = _examples(before), _examples(current)
    earlier, now = (fmean(side) if side else None for side in examples)
    sides[EXAMPLES] = earlier, now
    less = []
    for name, (base, own) in sides.items():
        if base and own is not None and own < _FELL * base:
            less.append(Fall(name=name, before=base, now=own))
    verdict = replace(verdict, less=tuple(less))
    if earlier is None or now is None:
        return verdict
    if _FELL * earlier < now < earlier / _FELL:
        return verdict
    # Examples may vary from step to step, and so do the means of launches.
    if max(map(min, examples)) <= min(map(max, examples)):
        return verdict
    if verdict.status is Status.REGRESSED and now < earlier:
        return verdict
    return replace(
        verdict,
        status=Status.INCOMPARABLE,
        reason=Reason.OTHER_EXAMPLES,
        details=(f"examples a step {earlier:.4g} -> {now:.4g}",),
    )


def _examples(side: Measurement) -> list[float]:
    """Return how many examples all ranks process in a step, the mean of each launch; [] if steps do
    not return it."""
    return [
        sum(map(fmean, ranks)) for ranks in side.samples.examples or () if ranks
    ]


# Relative. Sums in another order changed float32 losses of a small GPT by at most 1.4e-7 in 25
# steps.
_SAME_LOSS = 1e-6


def with_losses(
    verdict: Verdict, current: Measurement, baseline: Measurements, level: float
) -> Verdict:
    """Add whether the losses differ from those of the baseline's last session, over the first steps
    of all launches.

    By Welch's t-test on the means of launches, two-sided. Losses that are finite on one side alone
    differ."""
    if not verdict.status.compared:
        return verdict
    losses = baseline[-1].samples.losses or (), current.samples.losses or ()
    steps = min((len(launch) for side in losses for launch in side), default=0)
    if not steps or min(map(len, losses)) < LAUNCHES_NEEDED:
        return verdict
    launches = [
        [_mean_loss(launch[:steps]) for launch in side] for side in losses
    ]
    before, now = (None if math.isnan(x) else x for x in map(fmean, launches))
    differs = before != now
    if before is not None and now is not None:
        noise = difference(launches[1], launches[:1]).reach(level / 2)
        least = _SAME_LOSS * max(abs(before), abs(now))
        differs = abs(now - before) > max(noise, least)
    diverged = LossChange(before=before, now=now) if differs else None
    return replace(verdict, diverged=diverged)


def _mean_loss(losses: Sequence[float | None]) -> float:
    """Return the mean of the losses of a launch; NaN if one is not finite."""
    return fmean(math.nan if loss is None else loss for loss in losses)


# Figures of which their own run said that they say nothing about the code: that holds whatever they
# are compared with.
_SAY_NOTHING = (Reason.DEBUGGING_VARIABLE, Reason.DISABLED)


def refused(
    current: Measurement,
    before: Measurement,
    *,
    now: Verdict | None,
    then: Verdict | None,
) -> Verdict | None:
    """Why `current`, which its own run called `now`, is not to be compared with `before`, which was
    called `then`; None where it is."""
    reasons = [verdict.reason for verdict in (now, then) if verdict]
    not_gated = [reason for reason in reasons if reason in _SAY_NOTHING]
    if now and now.reason == Reason.GATE_OFF:
        not_gated.append(Reason.GATE_OFF)
    if not_gated:
        return Verdict(status=Status.NOT_GATED, reason=not_gated[0])
    machines = fact_changes(current.environment.key, before.environment.key)
    if machines:  # to the store that is another baseline
        return Verdict(
            status=Status.INCOMPARABLE, reason=Reason.MUST_MATCH, facts=machines
        )
    launches = before.samples.launches
    if launches < LAUNCHES_NEEDED:
        return Verdict(
            status=Status.INCOMPARABLE,
            reason=Reason.BASELINE_SUPPORT,
            details=(
                f"{launches} launch, and a comparison needs {LAUNCHES_NEEDED} a side",
            ),
        )
    return None
