"""The loop of a measurement: a round of launches, then what the rule says."""

import math
import statistics
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from itertools import dropwhile

from pytest_ddpperf.baseline import Store
from pytest_ddpperf.compare.interleaving import take_round
from pytest_ddpperf.compare.job import Job
from pytest_ddpperf.compare.own_figures import check_launch, check_measurement
from pytest_ddpperf.compare.result import Measured
from pytest_ddpperf.compare.rounds import Rounds, expect_seconds
from pytest_ddpperf.compare.rule import Rule, Take
from pytest_ddpperf.compare.sides import (
    CurrentSide,
    OtherVersion,
    begin,
    read_stored,
)
from pytest_ddpperf.launch import Launcher, Observer
from pytest_ddpperf.records.errors import BaseSideError, DdpPerfError
from pytest_ddpperf.records.outcome import REFERENCE
from pytest_ddpperf.records.samples import LaunchSamples, Status
from pytest_ddpperf.remote.version import BaseSide
from pytest_ddpperf.wire.source_trees import MODULE, is_code

# All launches of a measurement, but those that repeat its first claim: twenty launches of half a
# minute. One that takes longer would hold up the job for what is rarely decided by more launches.
MAX_SECONDS = 600.0


def carry_out(
    job: Job,
    launcher: Launcher,
    store: Store,
    observer: Observer,
    base: BaseSide | None = None,
    *,
    steps: int | None = None,
    confirm_seconds: float | None = None,
) -> Measured:
    """Launch, judge, and go on while the verdict is open: compare with the store or, with `base` or
    a reference, with launches there that are interleaved with these. Raises LaunchError and the
    other errors of a launch, and BaselineError; BaseSideError if there is nothing to confirm with.

    `steps` is the length of each window; with None the first launch decides. `confirm_seconds`
    limit a comparison that confirms a suspicion."""
    rule = _first_rule(job, confirm_seconds)
    side: BaseSide | None = None
    rounds: Rounds = ()
    with ExitStack() as at_end:
        if base is not None and job.gate:
            # first, so that nothing works there while a current launch is timed
            other = begin(base, job)
            if other.error and rule.confirms:
                raise BaseSideError(other.error)
            rule = replace(rule, other=other)
            if not other.error:
                at_end.callback(base.end_measurement)
                side = base
        while isinstance(asked := rule.next(rounds), Take):
            current = CurrentSide(job, launcher, len(rounds))
            pair = current, current.reference or side
            found = take_round(rounds, asked.planned, *pair, observer, steps)
            check_launch(job, found.now)
            there = found.before
            if side is not None and not rounds and there is not None:
                found = replace(
                    found, error=side.lacking(found.now.files, there.files)
                )
            rounds = (*rounds, found)
            if len(rounds) == job.launches and rule.other is None:
                rule = _with_stored(rule, store, rounds)
        measurement, before = rule.sides_of(rounds)
        check_measurement(job, measurement)
        measured = Measured(
            job=job,
            verdict=asked.verdict,
            fails=job.is_failed_by(asked.verdict),
            rounds=rounds,
            measurement=measurement,
            before=before,
            stored=rule.stored,
            other=rule.other,
        )
        expected = expect_seconds(rounds, len(rounds) + 1)
        if side is not None and expected < rule.max_seconds:
            measured = with_stacks(measured, launcher, side, observer)
        return measured


def _first_rule(job: Job, confirm_seconds: float | None) -> Rule:
    """Return the rule of a measurement before it has another version or a stored baseline."""
    max_seconds = MAX_SECONDS
    if confirm_seconds is not None:
        max_seconds = min(MAX_SECONDS, confirm_seconds)
    other = None
    if job.reference is not None:
        other = OtherVersion(REFERENCE, job.reference)
    return Rule(
        job=job,
        max_seconds=max_seconds,
        confirms=confirm_seconds is not None,
        other=other,
    )


def _with_stored(rule: Rule, store: Store, rounds: Rounds) -> Rule:
    """Read the stored baseline, for the machine that the first launches found."""
    stored = read_stored(
        store, rule.job, rule.environment(rounds), rule.not_gated(rounds)
    )
    return replace(rule, stored=stored)


# How long steps run in a launch that samples stacks: hundreds of samples of each rank, in a tenth
# of the time that a comparison takes which ends with a regression.
_SAMPLED_SECONDS = 1.2


def with_stacks(
    measured: Measured, launcher: Launcher, base: BaseSide, observer: Observer
) -> Measured:
    """Add a launch of each side that shows whose functions take longer, if the verdict is REGRESSED
    with evidence of a change, and several modules differ. The time of a function that is the same
    on both sides counts for its caller."""
    verdict = measured.verdict
    is_slower = verdict.status is Status.REGRESSED and any(
        each.p_value <= each.level for each in verdict.comparisons
    )
    code = [file for file in measured.differing if is_code(file)]
    has_stacks = not measured.job.plan.command
    is_asked = is_slower and has_stacks and len(code) >= 2
    if not is_asked or measured.other is None:
        return measured
    step_seconds = statistics.median(measured.launches[0].step_seconds)
    steps = math.ceil(_SAMPLED_SECONDS / step_seconds)
    plan, plan_there = (
        replace(job.plan.exactly(steps), stacks=True)
        for job in (measured.job, measured.other.job)
    )
    job = replace(measured.job, plan=plan)
    try:
        current = CurrentSide(job, launcher, len(measured.rounds))
        now = current.measure(observer, None)
        before = base.sample_stacks(observer, plan_there)
    except DdpPerfError as error:  # the verdict stands
        why = (
            f"which file takes longer is unknown: {str(error).splitlines()[0]}"
        )
        return replace(measured, further_notes=(why,))
    changed = {file: base.tree.changed_functions(file) for file in code}
    sampled = tuple(_of_changed(each, changed) for each in (now, before))
    return replace(measured, sampled=sampled)


def _of_changed(
    launch: LaunchSamples, changed: Mapping[str, set[str]]
) -> LaunchSamples:
    """Return the stacks of a launch without the innermost functions that are the same on both
    sides; `changed` are the names of the others, by file."""

    def is_same(function: str) -> bool:
        file, _, name = function.rpartition(":")
        # a class or function that it is within may be the one that differs
        names = {MODULE, *name.split(".")}
        return names.isdisjoint(changed.get(file, ()))

    ranks = []
    for stacks in launch.stacks:
        functions = tuple(
            (tuple(dropwhile(is_same, names)), count)
            for names, count in stacks.functions
        )
        ranks.append(replace(stacks, functions=functions))
    return replace(launch, stacks=tuple(ranks))
