"""A verdict in words: the headline, the reason, what both sides are, the text of a failed gate. The
same in every report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pytest_ddpperf import text
from pytest_ddpperf.records.outcome import Outcome
from pytest_ddpperf.records.plan import MEAN, Plan, without_totals
from pytest_ddpperf.records.samples import (
    SESSIONS_KEPT,
    Comparison,
    CounterChange,
    Status,
    Verdict,
)
from pytest_ddpperf.verdict import stats
from pytest_ddpperf.verdict.decision import NOT_SYNCHRONISED

# A reason code in words, with the next step.
_WHY_NOT_GATED = {
    "disabled": "--ddp-disable",
    "gate-off": "gate=False",
    "debugging-variable": (
        "a debugging variable is set (CUDA_LAUNCH_BLOCKING, TORCH_DISTRIBUTED_DEBUG=DETAIL or "
        "NCCL_DEBUG=TRACE): unset it"
    ),
    "no-supported-limit": "its limits need more --ddp-steps or --ddp-launches",
}
_WHY_INCONCLUSIVE = {
    "not-confirmed": "further launches did not confirm it",
    "recompiled": "steps of most launches are not alike: see the notes",
    "goes-on": "it may only look faster: work goes on after the steps",
    "two-speeds": (
        "its launches have two speeds: in some, the allocator gives memory back in each step "
        "(see page faults in docs/measurement.md)"
    ),
    "machine-slower": (
        "the machine is slower: the baseline's own code is as slow today (not checked: data outside"
        " the repository, and what fixtures, native libraries or other programs read)"
    ),
}
# Of a range that lies beyond the limit as a whole.
_LATER_DO_NOT_CONFIRM = (
    "its range is of all launches, and the later ones alone do not confirm it: raise "
    "--ddp-launches"
)


def verdict_of(outcome: Outcome) -> str:
    """Return the verdict as reports show it."""
    if outcome.saved:
        return "SAVED"
    if is_red_by_loss(outcome):
        return "DIVERGED"
    return str(outcome.verdict) if outcome.verdict is not None else "failed"


def is_red_by_loss(outcome: Outcome) -> bool:
    """Return whether a test fails because its losses differ, and not because it is slower."""
    verdict, fails = outcome.verdict, outcome.fails and not outcome.error
    others = (Status.REGRESSED, Status.INCOMPARABLE)
    return (
        fails
        and verdict is not None
        and verdict.diverged is not None
        and verdict.status not in others
    )


def shown(verdict: Verdict) -> Comparison | CounterChange | None:
    """Return the change that every report shows of a verdict: of the counter that decided, else of
    a time."""
    if verdict.reason in ("counter-rose", "counter-fell"):
        return max(
            (c for c in verdict.counters if c.status is verdict.status),
            key=lambda c: abs(c.change),
        )
    return verdict.worst


def decided_on(outcome: Outcome) -> Comparison | CounterChange | None:
    """Return the change that the headline names: if the machine is slower, the change against the
    baseline."""
    verdict = outcome.verdict
    if (
        verdict is not None
        and verdict.reason == "machine-slower"
        and outcome.stored_verdict is not None
    ):
        verdict = outcome.stored_verdict
    return shown(verdict) if verdict is not None else None


def headline(outcome: Outcome) -> str:
    """Return "REGRESSED p50 2.36x (limit 10 %): <why>", or the like, on one line."""
    compared = None if is_red_by_loss(outcome) else decided_on(outcome)
    said = verdict_of(outcome)
    if compared is not None:
        said = (
            f"{said} {compared.limit.metric} {change(compared)} (limit"
            f" {text.limit(compared.limit)})"
        )
    return text.shortened(
        " ".join(": ".join(filter(None, (said, reason(outcome)))).split()), 1_000
    )


def change(compared: Comparison | CounterChange) -> str:
    if isinstance(compared, CounterChange):
        return text.counter_change(compared)
    return text.share(text.changed(compared).estimate)


def reason(outcome: Outcome) -> str:
    """Return what the verdict alone does not say, with the next step; "" if there is nothing to
    say."""
    verdict = outcome.verdict
    if verdict is None:
        return f"not measured: {outcome.error}"
    change = verdict.diverged
    differs = (
        f"computes something else: loss {text.loss_change(change)}"
        if change is not None
        else ""
    )
    # how to accept it
    usual = (
        ""
        if differs and verdict.status is Status.IMPROVED
        else _reason(outcome, verdict)
    )
    comes_first = verdict.status in (Status.REGRESSED, Status.INCOMPARABLE)
    return "; ".join(
        filter(None, (usual, differs) if comes_first else (differs, usual))
    )


def _reason(outcome: Outcome, verdict: Verdict) -> str:
    if verdict.status is Status.REGRESSED:
        return why(outcome)
    if verdict.status is Status.INCONCLUSIVE:
        usual = "launches of the same code differ by as much"
        worst = verdict.worst
        is_beyond = worst is not None and worst.change.low > text.limit_share(worst)
        if is_beyond and verdict.reason in ("not-confirmed", "undecided"):
            return _LATER_DO_NOT_CONFIRM
        if verdict.reason == "undecided":
            usual = "close to its limit: further launches would hardly decide it"
        return _WHY_INCONCLUSIVE.get(verdict.reason) or _noise(outcome) or usual
    if verdict.status is Status.IMPROVED:
        return "accept it with --ddp-save-baseline" if _is_stored(outcome) else ""
    if verdict.status is Status.PASS:
        if outcome.stored_verdict is not None:
            return "next to the baseline's own code it is not slower"
        slower = _slower_within_limit(verdict)
        return (
            slower
            if verdict.reason == "undecided" and slower
            else _noise(outcome) or slower
        )
    return why_not_compared(outcome)


def why(outcome: Outcome) -> str:
    """Return what is known of the cause: "CPU time +12 ms (the step: +13 ms); changed: net.py;
    torch 2.12 -> 2.13"."""
    side = outcome.baseline_side
    changed = list(side.differing) if side is not None else []
    for found in outcome.findings:
        if found.file in changed:
            changed.remove(found.file)
            amount = text.seconds(found.seconds or 0.0, signed=True)
            changed.insert(0, f"{found.file} ({found.function} {amount})")
    files = f"changed: {text.some(changed)}" if changed else ""
    if side is not None and side.same:
        files = "no file that differs was imported or read"
    differences = (
        text.some(outcome.verdict.differences) if outcome.verdict is not None else ""
    )
    return "; ".join(filter(None, (*outcome.evidence, files, differences)))


def why_not_compared(outcome: Outcome) -> str:
    """Return why nothing was compared, and what to do."""
    verdict = outcome.verdict
    assert verdict is not None
    differences = ", ".join(verdict.differences)
    if verdict.status is Status.NO_BASELINE:
        if outcome.baseline_side is not None:
            return (
                f"{outcome.baseline_side.version} was not "
                f"measured:\n{outcome.baseline_side.error}"
            )
        return (
            "record one with --ddp-save-baseline"
            if _is_stored(outcome)
            else "there is nothing to compare with"
        )
    if verdict.status is Status.NOT_GATED:
        if verdict.reason == "saving":
            return (
                ""
                if outcome.saved
                else f"not saved: {outcome.error or 'the test did not pass, or it is a rerun'}"
            )
        return _WHY_NOT_GATED.get(verdict.reason, verdict.reason)
    if verdict.reason == NOT_SYNCHRONISED:
        new = ", or save a new baseline" if _is_stored(outcome) else ""
        return (
            f"{verdict.differences[0]}: if that is meant, name its limit with "
            f"--ddp-threshold{new}"
        )
    if verdict.reason == "no-cpu-time-now":
        return "CPU time is limited, and the ranks used none"
    phases = " or ".join(limit.metric for limit in outcome.limits if limit.is_phase)
    if verdict.reason == "no-phase-now":
        return (
            f"{phases} cannot be seen in this step, or takes no time: its limit cannot be "
            "applied"
        )
    if verdict.reason == "unknown-counter-now":
        return f"{differences}: it is unknown, or differs between launches"
    differs = {
        "no-cpu-time": "CPU time is limited, and the baseline has none",
        "no-phase": f"the baseline does not have {phases}, which is limited",
        "baseline-support": f"the baseline has too few steps: {differences}",
    }.get(verdict.reason, differences)
    return (
        f"{differs}: measure as before, or save a new baseline"
        if _is_stored(outcome)
        else differs
    )


def _is_stored(outcome: Outcome) -> bool:
    """Return whether it was compared with a stored baseline alone, which can be saved again."""
    return outcome.baseline_side is None and bool(outcome.baseline_path)


def _noise(outcome: Outcome) -> str:
    """Return what changes are too small to be detected, if their limits are smaller; and what would
    help."""
    assert outcome.verdict is not None
    coarse = [
        c
        for c in outcome.verdict.comparisons
        if 0 < text.limit_share(c) < text.resolution(c)
    ]
    if not coarse:
        return ""
    limits = " and ".join(dict.fromkeys(text.limit(c.limit) for c in coarse))
    found = ", ".join(
        f"{text.amount(text.resolution(c))} ({c.limit.metric})" for c in coarse
    )
    return (
        f"too noisy for a {limits} limit: the smallest change it can detect is"
        f" {found}{_remedy(outcome, coarse)}"
    )


# Four times as many launches halve what is detected. Where twice as fine is not fine enough, it is
# not launches that are missing. Twenty are what a measurement may take by default.
_TIMES_LAUNCHES, _USUAL_LAUNCHES = 4, 20


def _remedy(outcome: Outcome, coarse: Sequence[Comparison]) -> str:
    """Return what would make changes as small as the limits detectable."""
    assert outcome.verdict is not None
    if not (outcome.baseline_path or outcome.baseline_side):
        return ""  # of two reports, both of which are measured already
    stored = outcome.baseline_side is None
    needed = [c.launches_needed for c in coarse if c.launches_needed is not None]
    if stored and len(needed) < len(coarse):
        more = outcome.verdict.sessions < SESSIONS_KEPT
        return (
            "; add sessions with --ddp-extend-baseline"
            if more
            else "; compare with --ddp-against"
        )
    if needed and max(needed) <= _TIMES_LAUNCHES * max(
        _USUAL_LAUNCHES, len(outcome.costs)
    ):
        minutes = outcome.seconds * max(needed) / max(len(outcome.costs), 1) / 60
        return (
            f"; raise --ddp-launches to {max(needed)}"
            + f" (about {minutes:.0f} min)" * (minutes >= 1)
        )
    return (
        f"; {'compare with --ddp-against' if stored else 'use a quieter machine'}, or raise the"
        " limit"
    )


def _slower_within_limit(verdict: Verdict) -> str:
    """Return how much slower a test that passes is, if that is evident and at least half of its
    limit."""
    worst = max(
        verdict.comparisons,
        key=lambda c: c.change.estimate / (text.limit_share(c) or 1),
        default=None,
    )
    if (
        worst is None
        or worst.change.low <= 0
        or worst.change.estimate < text.limit_share(worst) / 2
    ):
        return ""
    where = "within" if worst.change.estimate <= text.limit_share(worst) else "at about"
    return (
        f"{worst.limit.metric} {change(worst)}: slower, {where} the limit of"
        f" {text.limit(worst.limit)}"
    )


def problems(
    outcomes: Sequence[Outcome], *, reasons: bool = True, quiet: bool = False
) -> Iterator[str]:
    """Yield what the table does not say, a line each; a line that holds for several tests appears
    once.

    `reasons`: include those of verdicts. `quiet`: only what stands with -q, too."""
    named: dict[str, dict[str, None]] = {}
    for outcome in outcomes:
        said = (*(_reasons(outcome) if reasons else ()), *_notes(outcome))
        for line in _essentials(outcome) if quiet else said:
            named.setdefault(line, {})[_short_name(outcome)] = None
    for line, names in named.items():
        who = (
            next(iter(names))
            if len(names) == 1
            else f"{len(names)} tests ({text.some([*names], 3)})"
        )
        yield f"{who}: {line}"


def _short_name(outcome: Outcome) -> str:
    """Return the name without its file: the table above has that."""
    label = f" ({outcome.test.label})" if outcome.test.label else ""
    return text.shortened(
        (outcome.nodeid.rpartition("::")[2] or outcome.nodeid) + label, 60
    )


def _reasons(outcome: Outcome) -> Iterator[str]:
    verdict = outcome.verdict
    # A failure is shown above, and a missing baseline is counted below, with what to do.
    counted = verdict is not None and (
        (verdict.status is Status.NO_BASELINE and outcome.baseline_side is None)
        or (verdict.reason in ("disabled", "gate-off") and bool(outcome.baseline_path))
    )
    if not (outcome.fails or counted) and (said := reason(outcome)):
        suspected = (
            shown(outcome.stored_verdict)
            if outcome.stored_verdict is not None
            else None
        )
        if suspected is not None:
            said = f"{suspected.limit.metric} {change(suspected)} against the baseline: {said}"
        yield said
    if outcome.fails and outcome.error:
        yield outcome.error


def _essentials(outcome: Outcome) -> Iterator[str]:
    """Yield why a verdict decides nothing; of others what a PASS may have missed, and what was not
    compared."""
    verdict = outcome.verdict
    if verdict is None:
        return
    if verdict.status in (Status.INCONCLUSIVE, Status.NO_BASELINE, Status.INCOMPARABLE):
        yield from (*_reasons(outcome), *_notes(outcome))
        return
    if verdict.status is Status.PASS and (noise := _noise(outcome)):
        yield noise
    yield from left_out(verdict)


def _notes(outcome: Outcome) -> tuple[str, ...]:
    return (
        *(left_out(outcome.verdict) if outcome.verdict is not None else ()),
        *outcome.notes,
    )


def left_out(verdict: Verdict) -> Iterator[str]:
    """Yield what was not compared: default limits without support, and the steps of other nodes;
    and which counters fell to 0."""
    fell = {
        c.limit.metric: c.baseline for c in verdict.counters if c.now == 0 < c.baseline
    }
    if fell:
        yield (
            "fell to 0:"
            f" {', '.join(f'{name} {fell[name]:,} -> 0' for name in without_totals([*fell]))}"
        )
    if verdict.first_node:
        yield (
            "the clocks of the nodes are not known closely enough: the first node's steps are"
            " compared"
        )
    limits: dict[str, list[str]] = {}
    for line in verdict.dropped:
        limit, _, because = line.partition(": ")
        limits.setdefault(because, []).append(limit)
    for because, of_it in limits.items():
        yield f"dropped the default limit{'s' * (len(of_it) > 1)} {text.some(of_it, 3)}: {because}"


def measured(outcome: Outcome) -> str:
    """Return what both sides are: "10 interleaved launches of each side; main (fe7daa7) and
    9e7bda6"."""
    side, launches = outcome.baseline_side, len(outcome.costs)
    if side is not None:
        now = text.commit(side.version.now)
        return (
            f"{launches} interleaved launches of each side; {side.version} and"
            f" {now or 'the working tree'}"
        )
    if not outcome.sessions:
        return text.several(launches, "launch")
    before = sum(
        len(next(iter(session.launch_seconds.values()), ()))
        for session in outcome.sessions
    )
    last = outcome.sessions[-1]
    when = ", ".join(
        filter(None, (last.created.partition("T")[0], text.commit(last.commit)))
    )
    several = (
        f"'s {len(outcome.sessions)} sessions" if len(outcome.sessions) > 1 else ""
    )
    return (
        f"{launches} launches now, {before} in the baseline{several}"
        + f" ({when})" * bool(when)
    )


def p50(outcome: Outcome) -> str:
    """Return the step time at p50 of the current side."""
    return text.seconds(stats.percentile(outcome.measured.samples.step_seconds, 50))


def gate_failure(outcome: Outcome, width: int = text.WIDTH) -> str:
    """Return why a verdict fails its test, and the command that would accept the new figures."""
    return "\n".join(_gate_failure(outcome, width))


def _gate_failure(outcome: Outcome, width: int) -> Iterator[str]:
    verdict, compared = outcome.verdict, decided_on(outcome)
    assert verdict is not None
    if compared is None:
        took = (
            f" (step time p50 {p50(outcome)})"
            if outcome.measurement is not None
            else ""
        )
        yield from text.wrap_text(
            f"{verdict}{took}: {why_not_compared(outcome)}", width
        )
    else:
        if verdict.diverged is not None and is_red_by_loss(outcome):
            yield f"DIVERGED: loss {text.loss_change(verdict.diverged)}"
        else:
            yield from text.wrapped(_result(verdict, compared, outcome.plan), width)
        if said := reason(outcome):
            yield from text.wrapped(f"why: {said}", width, "     ")
        yield ""
        yield from (
            f"  {line}"
            for line in text.aligned(metrics(verdict, outcome.plan), left=(3,))
        )
        yield ""
        yield from text.wrapped(f"measured: {measured(outcome)}", width, " " * 10)
    for note in (*left_out(verdict), *outcome.notes):
        yield from text.wrapped(f"note:     {note}", width, " " * 10)
    if outcome.traces:
        yield f"traces:   {outcome.traces}"
    if outcome.accept:
        line = (
            f"accept:   {outcome.accept}"
            if compared is not None
            else f"record:   {outcome.accept}"
        )
        # which a shell reads as one
        yield line if len(line) <= width else line.replace(" -", f" \\\n{' ' * 10}-")


def _result(verdict: Verdict, compared: Comparison | CounterChange, plan: Plan) -> str:
    before, now = text.both_sides(compared, plan.collective)
    metric, change = compared.limit.metric, change_of(compared)
    if metric.startswith(("p", MEAN)) and not compared.limit.is_counter:
        metric = f"step time {metric}"
    return f"{verdict}: {metric} {before} -> {now}, {change} (limit {text.limit(compared.limit)})"


def change_of(compared: Comparison | CounterChange) -> str:
    """Return the change of a metric, of times with its bounds."""
    if isinstance(compared, CounterChange):
        return text.counter_change(compared)
    return text.interval(text.changed(compared))


def metrics(verdict: Verdict, plan: Plan) -> list[tuple[str, ...]]:
    """Return a row for each limit below one of titles: the same in every report. Counters that have
    a default limit have a row if they changed."""
    rows: list[tuple[str, ...]] = [
        ("metric", "before", "now", "change [range]", "limit")
    ]
    counters = [
        each
        for each in verdict.counters
        if each.now != each.baseline or not each.limit.default
    ]
    finer = without_totals([each.limit.metric for each in counters])
    shown = [
        each
        for each in counters
        if each.limit.metric in finer or not each.limit.default
    ]
    all_compared: list[Comparison | CounterChange] = [*verdict.comparisons, *shown]
    for compared in all_compared:
        figures = text.both_sides(compared, plan.collective)
        rows.append(
            (
                compared.limit.metric,
                *figures,
                change_of(compared),
                text.limit(compared.limit),
            )
        )
    return rows
