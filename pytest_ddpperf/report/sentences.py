"""A verdict in words: the headline, the reason, what both sides are, the text of a failed gate. The
same in every report."""

import re
from collections.abc import Mapping, Sequence

from pytest_ddpperf import text
from pytest_ddpperf.records.metric import DEVICE, FLOPS, WALL, without_totals
from pytest_ddpperf.records.outcome import DIVERGED, Outcome, Outcomes
from pytest_ddpperf.records.plan import Limits, Plan
from pytest_ddpperf.records.samples import (
    EXAMPLES,
    SESSIONS_KEPT,
    Change,
    Comparison,
    CounterChange,
    Reason,
    Status,
    Verdict,
)
from pytest_ddpperf.text import Lines

# A reason code in words, with the next step.
_WHY_NOT_GATED = {
    Reason.DISABLED: "--ddp-disable",
    Reason.GATE_OFF: "gate=False",
    Reason.DEBUGGING_VARIABLE: (
        "a debugging variable is set (CUDA_LAUNCH_BLOCKING, TORCH_DISTRIBUTED_DEBUG=DETAIL or "
        "NCCL_DEBUG=TRACE): unset it"
    ),
    Reason.NO_SUPPORTED_LIMIT: "its limits need more --ddp-steps or --ddp-launches",
}
_WHY_INCONCLUSIVE = {
    Reason.RECOMPILED: "steps of most launches are not alike: see the notes",
    Reason.GOES_ON: "it may only look faster: work goes on after the steps",
    Reason.TWO_SPEEDS: (
        "its launches have two speeds: in some, the allocator gives memory back in each step "
        "(see page faults in docs/measurement.md)"
    ),
    Reason.MACHINE_SLOWER: (
        "the machine is slower: the baseline's own code is as slow today (not checked: data outside"
        " the repository, and what fixtures, native libraries or other programs read)"
    ),
}


def base_name(outcomes: Outcomes) -> str:
    """Return what the figures of the other side are called: "before", or "reference" if that is
    what all were compared with; "base" if some were."""
    kinds = {
        each.has_reference
        for each in outcomes
        if each.comparisons or each.has_reference
    }
    if kinds == {True}:
        return "reference"
    return "base" if True in kinds else "before"


def column(outcomes: Outcomes) -> str:
    """Return the title of a column of step times, "p50: before -> now"; those of commands are wall
    times."""
    kinds = {bool(outcome.plan.command) for outcome in outcomes}
    shown = WALL if kinds == {True} else "p50"
    return f"{shown}: {base_name(outcomes)} -> now"


def decided_on(outcome: Outcome) -> Change | None:
    """Return the change that the headline names: if the machine is slower, the change against the
    baseline."""
    verdict = outcome.verdict
    if verdict and verdict.reason == Reason.MACHINE_SLOWER:
        verdict = outcome.stored_verdict or verdict
    return verdict.shown if verdict else None


def headline(outcome: Outcome) -> str:
    """Return "REGRESSED p50 2.36x (limit 10 %): <why>", or the like, on one line."""
    said = outcome.shown_status
    compared = decided_on(outcome)
    if compared and said != DIVERGED:
        limit = text.limit(compared.limit)
        said = (
            f"{said} {compared.limit.metric} {change(compared)} (limit {limit})"
        )
    if because := reason(outcome):
        said = f"{said}: {because}"
    return text.shortened(" ".join(said.split()), 1_000)


def change(compared: Change) -> str:
    if isinstance(compared, CounterChange):
        return text.counter_change(compared)
    return text.share(text.changed(compared).estimate)


def reason(outcome: Outcome) -> str:
    """Return what the verdict alone does not say, with the next step; "" if there is nothing to
    say."""
    verdict = outcome.verdict
    if verdict is None:
        return f"not measured: {outcome.error}"
    said = _reason(outcome, verdict)
    if verdict.diverged is None:
        return said
    differs = (
        f"computes something else: loss {text.loss_change(verdict.diverged)}"
    )
    if verdict.status is Status.IMPROVED:
        return differs  # and not how to accept it
    order = [differs, said]
    if verdict.status in (Status.REGRESSED, Status.INCOMPARABLE):
        order = [said, differs]
    return "; ".join(filter(None, order))


def _reason(outcome: Outcome, verdict: Verdict) -> str:
    if verdict.status is Status.REGRESSED:
        return why(outcome)
    if verdict.status is Status.INCONCLUSIVE:
        return _why_inconclusive(outcome, verdict)
    if verdict.status is Status.IMPROVED:
        return (
            "accept it with --ddp-save-baseline" if _is_stored(outcome) else ""
        )
    if verdict.status is Status.PASS:
        if outcome.stored_verdict:
            return "next to the baseline's own code it is not slower"
        slower = _slower_within_limit(verdict)
        if verdict.reason == Reason.UNDECIDED and slower:
            return slower
        return _noise(outcome) or slower
    return why_not_compared(outcome)


def _why_inconclusive(outcome: Outcome, verdict: Verdict) -> str:
    seen = _two_speeds(verdict)
    if seen and verdict.reason == Reason.TWO_SPEEDS:
        return f"{seen}: raise --ddp-max-launches to {2 * len(outcome.costs)}"
    if verdict.reason in _WHY_INCONCLUSIVE:
        return _WHY_INCONCLUSIVE[verdict.reason]
    if noise := _noise(outcome):
        return noise
    if verdict.reason == Reason.UNDECIDED:
        return (
            "close to its limit, and further launches would hardly decide it: use a quieter"
            " machine, or another limit"
        )
    return "launches of the same code differ by as much: more of them may decide it"


def _two_speeds(verdict: Verdict) -> str:
    """Return "4 of 10 launches are slow (31.0 ms instead of 25.0), 0 of 10 before"; "" if that is
    not what decided the verdict."""
    for each in verdict.comparisons:
        speeds = each.speeds
        decided = (
            each.status is verdict.status and each.reason == Reason.TWO_SPEEDS
        )
        if speeds is not None and decided:
            (slow, fast), unit = text.in_one_unit(
                [speeds.slow_seconds, speeds.fast_seconds]
            )
            return (
                f"{speeds.slow} of {speeds.launches} launches are slow"
                f" ({slow} {unit} instead of {fast}), {speeds.slow_before} of"
                f" {speeds.launches_before} before"
            )
    return ""


def why(outcome: Outcome) -> str:
    """Return what is known of the cause: "CPU time +12 ms (the step: +13 ms); changed: net.py;
    torch 2.12 -> 2.13"."""
    side = outcome.baseline_side
    changed = list(side.differing) if side else []
    for found in outcome.findings:
        if found.file in changed:
            changed.remove(found.file)
            amount = text.seconds(found.seconds or 0.0, signed=True)
            changed.insert(0, f"{found.file} ({found.function} {amount})")
    files = f"changed: {text.some(changed)}" if changed else ""
    if side and side.same and not outcome.plan.command:
        files = "no file that differs was imported or read"
    verdict = outcome.verdict
    differences = text.some(verdict.differences) if verdict else ""
    speeds = _two_speeds(verdict) if verdict else ""
    known = (speeds, *outcome.evidence, files, differences)
    return "; ".join(filter(None, known))


def _why_incomparable(outcome: Outcome, verdict: Verdict) -> str:
    """Return what keeps both sides from being compared. What is only recorded does not."""
    recorded: Mapping[str, object] = {}
    if outcome.measurement is not None:
        recorded = outcome.measurement.environment.recorded
    facts = [str(each) for each in verdict.facts if each.name not in recorded]
    return text.some([*verdict.details, *facts])


def why_not_compared(outcome: Outcome) -> str:
    """Return why nothing was compared, and what to do."""
    verdict = outcome.verdict
    assert verdict is not None
    is_stored, side = _is_stored(outcome), outcome.baseline_side
    if verdict.status is Status.NO_BASELINE:
        if side:
            return f"{side.version} was not measured:\n{side.error}"
        if is_stored:
            return "record one with --ddp-save-baseline"
        return "there is nothing to compare with"
    if verdict.reason == Reason.SAVING:
        if outcome.saved:
            return ""
        why = outcome.error or "the test did not pass, or it is a rerun"
        return f"not saved: {why}"
    if verdict.status is Status.NOT_GATED:
        return _WHY_NOT_GATED.get(verdict.reason, verdict.reason)
    if verdict.reason == Reason.NOT_SYNCHRONISED:
        new = ", or save a new baseline" if is_stored else ""
        option = "threshold=" if outcome.has_reference else "--ddp-threshold"
        return (
            f"{verdict.details[0]}: if that is meant, name its limit with "
            f"{option}{new}"
        )
    differences = _why_incomparable(outcome, verdict)
    if verdict.reason == Reason.UNKNOWN_METRIC_NOW:
        # no other baseline helps
        return (
            f"{differences}, or 0, or differs between launches: see the notes, if any, or remove"
            " its limit"
        )
    if verdict.reason == Reason.BASELINE_SUPPORT:
        differences = f"the baseline is too small: {differences}"
    if is_stored:
        return f"{differences}: measure as before, or save a new baseline"
    return differences


def _is_stored(outcome: Outcome) -> bool:
    """Return whether it was compared with a stored baseline alone, which can be saved again."""
    return outcome.baseline_side is None and bool(outcome.baseline_path)


def _noise(outcome: Outcome) -> str:
    """Return what changes are too small to be detected, if their limits are smaller; and what would
    help."""
    coarse = [
        c
        for c in outcome.comparisons
        if 0 < text.limit_share(c) < text.resolution(c)
    ]
    if not coarse:
        return ""
    if of_device := _device_is_known(outcome, coarse):
        return of_device
    limits = " and ".join(dict.fromkeys(text.limit(c.limit) for c in coarse))
    return (
        f"too noisy for a {limits} limit: the smallest change it can detect is"
        f" {text.resolutions(coarse)}{_remedy(outcome, coarse)}"
    )


# A device that waits for more of a step waits for a host, whose noise the step has.
_WAITS = 0.1


def _device_is_known(outcome: Outcome, coarse: Sequence[Comparison]) -> str:
    """Return what is known of the device's work where the step is too noisy; "" if nothing is."""
    fine = [
        c
        for c in outcome.comparisons
        if c.limit.metric == DEVICE and c not in coarse
    ]
    if not fine:
        return ""
    change = fine[0].change
    said = text.interval(change)
    if change.low <= 0 <= change.high:
        said = (
            f"unchanged within {text.amount(max(abs(change.low), change.high))}"
        )
    busy = outcome.measured.busy_share
    why = ""
    if busy is not None:
        why = f" (a step keeps the device busy for {text.amount(busy)})"
        if (outcome.measured.waiting_share or 0.0) > _WAITS:
            why = f", as the host is noisy{why}"
    return (
        f"device time: {said}; the step: a change below {text.resolutions(coarse)} could not be "
        f"seen{why}"
    )


# Four times as many launches halve what is detected. Where twice as fine is not fine enough, it is
# not launches that are missing. Twenty are what a measurement may take by default.
_TIMES_LAUNCHES, _USUAL_LAUNCHES = 4, 20


def _remedy(outcome: Outcome, coarse: Sequence[Comparison]) -> str:
    """Return what would make changes as small as the limits detectable."""
    assert outcome.verdict is not None
    if not (outcome.baseline_path or outcome.baseline_side):
        return ""  # of two reports, both of which are measured already
    stored, launches = outcome.baseline_side is None, len(outcome.costs)
    needed = [
        c.launches_needed for c in coarse if c.launches_needed is not None
    ]
    if stored and len(needed) < len(coarse):
        if outcome.verdict.sessions < SESSIONS_KEPT:
            return "; add sessions with --ddp-extend-baseline"
        return "; compare with --ddp-against"
    most = _TIMES_LAUNCHES * max(_USUAL_LAUNCHES, launches)
    if needed and max(needed) <= most:
        seconds = outcome.seconds - outcome.waited_seconds
        minutes = seconds * max(needed) / max(launches, 1) / 60
        about = f" (about {minutes:.0f} min)" if minutes >= 1 else ""
        return (
            f"; raise --ddp-launches to {max(needed)}{about}, or make the machine quieter"
            " (ddpperf doctor)"
        )
    other = "compare with --ddp-against" if stored else "use a quieter machine"
    return f"; {other}, or raise the limit"


def _slower_within_limit(verdict: Verdict) -> str:
    """Return how much slower a test that passes is, if that is evident and at least half of its
    limit."""
    worst = max(
        verdict.comparisons,
        key=lambda c: c.change.estimate / (text.limit_share(c) or 1),
        default=None,
    )
    if worst is None or worst.change.low <= 0:
        return ""
    limit = text.limit_share(worst)
    estimate = text.resolved(worst.limit.kind, worst.change.estimate)
    if estimate < limit / 2:
        return ""
    where = "within" if estimate <= limit else "at about"
    how = "worse" if worst.limit.kind.own_figure else "slower"
    return (
        f"{worst.limit.metric} {change(worst)}: {how}, {where} the limit of"
        f" {text.limit(worst.limit)}"
    )


def problems(
    outcomes: Outcomes, *, reasons: bool = True, quiet: bool = False
) -> Lines:
    """Yield what the table does not say, a line each; a line that holds for several tests appears
    once.

    `reasons`: include those of verdicts. `quiet`: only what stands with -q, too."""
    named: dict[str, dict[str, str]] = {}  # by line and whole name
    for outcome in outcomes:
        if quiet:
            said = [*_essentials(outcome)]
        else:
            said = [*(_reasons(outcome) if reasons else ()), *notes(outcome)]
        for line in said:
            names = named.setdefault(line, {})
            names[text.name(outcome)] = _short_name(outcome)
    for line, names in named.items():
        who = text.some([*names.values()], 3)
        if len(names) > 1:
            who = f"{len(names)} tests ({who})"
        yield f"{who}: {line}"


def unused_limits(limits: Limits, outcomes: Outcomes) -> Lines:
    """Yield that no test has some figures of the users' own that these limits are on."""
    used = {each.metric for one in outcomes for each in one.limits}
    unused = [
        limit.metric
        for limit in limits
        if limit.kind.own_figure and limit.metric not in used
    ]
    are_known = all(one.measurement is not None for one in outcomes)
    if unused and outcomes and are_known:
        yield (
            f"there is a limit on {text.some(unused)}, and no test has such a figure: check the"
            " name"
        )


def _short_name(outcome: Outcome) -> str:
    """Return the name without its file: the table above has that."""
    label = f" ({outcome.test.label})" if outcome.test.label else ""
    name = re.sub(r"^[^[]*::", "", outcome.nodeid)
    return text.shortened(name + label, 60)


def _reasons(outcome: Outcome) -> Lines:
    verdict, side = outcome.verdict, outcome.baseline_side
    # A failure is shown above, and a missing baseline is counted below, with what to do.
    counted = False
    if verdict and verdict.status is Status.NO_BASELINE:
        counted = side is None
    elif verdict and verdict.reason in (Reason.DISABLED, Reason.GATE_OFF):
        counted = outcome.baseline_path != "" or side is not None
    if not (outcome.fails or counted) and (said := reason(outcome)):
        stored = outcome.stored_verdict
        suspected = stored.shown if stored else None
        if suspected:
            said = f"{suspected.limit.metric} {change(suspected)} against the baseline: {said}"
        yield said
    if outcome.fails and outcome.error:
        yield outcome.error


def _essentials(outcome: Outcome) -> Lines:
    """Yield why a verdict decides nothing; of others what a PASS may have missed, and what was not
    compared."""
    verdict = outcome.verdict
    if verdict is None:
        return
    if verdict.status in (
        Status.INCONCLUSIVE,
        Status.NO_BASELINE,
        Status.INCOMPARABLE,
    ):
        yield from (*_reasons(outcome), *notes(outcome))
        return
    if verdict.reason == Reason.SAVING:
        yield from _reasons(outcome)  # of what was not saved
    if verdict.status is Status.PASS and (noise := _noise(outcome)):
        yield noise
    yield from left_out(verdict, _whose(outcome))


def notes(outcome: Outcome) -> list[str]:
    """Return what else the user should know."""
    verdict = outcome.verdict
    dropped = left_out(verdict, _whose(outcome)) if verdict else ()
    return [*dropped, *outcome.notes]


def _whose(outcome: Outcome) -> str:
    return "the reference" if outcome.has_reference else "before"


# What a step does less of, by its name in `Verdict.less`.
_LESS = {
    FLOPS: "does {} the operations",
    "gradient_bytes": "synchronises {} the gradient bytes",
    EXAMPLES: "takes {} the examples",
}


def left_out(verdict: Verdict, whose: str = "before") -> Lines:
    """Yield what was not compared: default limits without support; which counters fell to 0, and
    what a step does less of."""
    fell = {
        c.limit.metric: f"{c.limit.metric} {c.baseline:,} -> 0"
        for c in verdict.counters
        if c.now == 0 < c.baseline
    }
    if fell:
        names = without_totals([*fell])
        yield f"fell to 0: {', '.join(fell[name] for name in names)}"
    for less in verdict.less:
        share = f"{less.now / less.before:.2f}x"
        yield f"a step {_LESS[less.name].format(share)} of {whose}"
    limits: dict[str, list[str]] = {}
    for dropped in verdict.dropped_limits:
        limits.setdefault(dropped.why, []).append(str(dropped.limit))
    for why, names in limits.items():
        plural = "s" if len(names) > 1 else ""
        yield f"dropped the default limit{plural} {text.some(names, 3)}: {why}"


def is_unreached(outcome: Outcome) -> bool:
    """Whether the test uses nothing that differs, so that one launch of it was enough."""
    verdict = outcome.verdict
    return verdict is not None and verdict.reason == Reason.UNREACHED


def measured(outcome: Outcome) -> str:
    """Return what both sides are: "10 interleaved launches of each side; main (fe7daa7) and
    9e7bda6"."""
    side, launches = outcome.baseline_side, len(outcome.costs)
    if outcome.has_reference:
        return (
            f"{launches} interleaved launches of the test and of the reference"
        )
    if side:
        now = text.commit(side.version.now) or "the working tree"
        if side.error or is_unreached(outcome):
            return f"{text.several(launches, 'launch')} of {now}"
        return f"{launches} interleaved launches of each side; {side.version} and {now}"
    sessions = outcome.sessions
    if not sessions:
        return text.several(launches, "launch")
    before = sum(
        len(next(iter(session.launch_seconds.values()), ()))
        for session in sessions
    )
    several = f"'s {len(sessions)} sessions" if len(sessions) > 1 else ""
    said = f"{text.several(launches, 'launch')} now, {before} in the baseline{several}"
    date = text.date(sessions[-1].created)
    when = ", ".join(filter(None, (date, text.commit(sessions[-1].commit))))
    return f"{said} ({when})" if when else said


def p50(outcome: Outcome) -> str:
    """Return the step time at p50 of the current side."""
    return text.seconds(outcome.measured.samples.p50)


def gate_failure(outcome: Outcome, width: int = text.WIDTH) -> str:
    """Return why a verdict fails its test, and the command that would accept the new figures."""
    return "\n".join(_gate_failure(outcome, width))


# What is in quotes is a part of its own.
_BEFORE_OPTION = re.compile(r"""'[^']*'|"[^"]*"| (?=-)""")


def _gate_failure(outcome: Outcome, width: int) -> Lines:
    verdict, compared = outcome.verdict, decided_on(outcome)
    assert verdict is not None
    if compared is None:
        took = ""
        if outcome.measurement:
            took = f" (step time p50 {p50(outcome)})"
            if outcome.plan.command:
                took = f" (wall {p50(outcome)})"
        said = f"{verdict}{took}: {why_not_compared(outcome)}"
        yield from text.wrap_text(said, width)
    else:
        yield from _comparison(outcome, verdict, compared, width)
    for note in notes(outcome):
        yield from text.wrapped(f"note:     {note}", width, " " * 10)
    if outcome.traces:
        yield f"traces:   {outcome.traces}"
    if outcome.accept:
        title = "record:   " if compared is None else "accept:   "
        line = title + outcome.accept
        if len(line) > width:
            # A shell reads the divided command as one line.
            end = f" \\\n{' ' * 10}"
            line = _BEFORE_OPTION.sub(
                lambda part: end if part[0] == " " else part[0], line
            )
        yield line


def _comparison(
    outcome: Outcome, verdict: Verdict, compared: Change, width: int
) -> Lines:
    """Yield the result, the reason, the metrics, and what was measured."""
    if verdict.diverged and outcome.shown_status == DIVERGED:
        yield f"DIVERGED: loss {text.loss_change(verdict.diverged)}"
    else:
        before, now = text.both_sides(compared, outcome.plan.collective)
        limit = compared.limit
        result = (
            f"{verdict}: {limit.kind.title}{limit.metric} {before} -> {now},"
            f" {change_of(compared)} (limit {text.limit(limit)})"
        )
        yield from text.wrapped(result, width)
    if said := reason(outcome):
        yield from text.wrapped(f"why: {said}", width, "     ")
    yield ""
    rows = metrics(verdict, outcome.plan, base_name([outcome]))
    for line in text.aligned(rows, left=(3,)):
        yield f"  {line}"
    yield ""
    yield from text.wrapped(f"measured: {measured(outcome)}", width, " " * 10)


def change_of(compared: Change) -> str:
    """Return the change of a metric, of times with its bounds."""
    if isinstance(compared, CounterChange):
        return text.counter_change(compared)
    return text.interval(text.changed(compared))


def metrics(
    verdict: Verdict, plan: Plan, base: str = "before"
) -> list[tuple[str, ...]]:
    """Return a row for each limit below one of titles: the same in every report. Counters that have
    a default limit have a row if they changed."""
    counters = [
        c
        for c in verdict.counters
        if c.now != c.baseline or not c.limit.default
    ]
    finer = without_totals([c.limit.metric for c in counters])
    shown = [
        c for c in counters if c.limit.metric in finer or not c.limit.default
    ]
    rows: list[tuple[str, ...]] = [
        ("metric", base, "now", "change [range]", "limit")
    ]
    all_compared: list[Change] = [*verdict.comparisons, *shown]
    for each in all_compared:
        figures = text.both_sides(each, plan.collective)
        limit = text.limit(each.limit)
        rows.append((each.limit.metric, *figures, change_of(each), limit))
    return rows
