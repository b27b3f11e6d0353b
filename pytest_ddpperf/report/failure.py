"""The text of a failed gate, which replaces a traceback."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_ddpperf.records.outcome import Outcome
from pytest_ddpperf.records.plan import MEAN, Plan, without_totals
from pytest_ddpperf.records.samples import Comparison, CounterChange, Verdict
from pytest_ddpperf.report import sentences, text


def gate_failure(outcome: Outcome, width: int = text.WIDTH) -> str:
    """Return why a verdict fails its test, and the command that would accept the new figures."""
    return "\n".join(_gate_failure(outcome, width))


def _gate_failure(outcome: Outcome, width: int) -> Iterator[str]:
    verdict, compared = outcome.verdict, sentences.decided_on(outcome)
    assert verdict is not None
    if compared is None:
        p50 = f" (step time p50 {sentences.p50(outcome)})" if outcome.measurement is not None else ""
        yield f"{verdict}{p50}: {sentences.why_not_compared(outcome)}"
    else:
        if verdict.diverged is not None and sentences.is_red_by_loss(outcome):
            yield f"DIVERGED: loss {text.loss_change(verdict.diverged)}"
        else:
            yield _result(verdict, compared, outcome.plan)
        if said := sentences.reason(outcome):
            yield from text.wrapped(f"why: {said}", width, "     ")
        yield ""
        yield from (f"  {line}" for line in text.aligned(metrics(verdict, outcome.plan), left=(3,)))
        yield ""
        yield from text.wrapped(f"measured: {sentences.measured(outcome)}", width, " " * 10)
    for note in (*sentences.left_out(verdict), *outcome.notes):
        yield from text.wrapped(f"note:     {note}", width, " " * 10)
    if outcome.traces:
        yield f"traces:   {outcome.traces}"
    if outcome.accept:
        yield f"accept:   {outcome.accept}" if compared is not None else f"record:   {outcome.accept}"


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
    """Return a row for each limit below one of titles: the same in every report. Counters that have a default limit
    have a row if they changed."""
    rows: list[tuple[str, ...]] = [("metric", "before", "now", "change [range]", "limit")]
    counters = [each for each in verdict.counters if each.now != each.baseline or not each.limit.default]
    finer = without_totals([each.limit.metric for each in counters])
    shown = [each for each in counters if each.limit.metric in finer or not each.limit.default]
    all_compared: list[Comparison | CounterChange] = [*verdict.comparisons, *shown]
    for compared in all_compared:
        figures = text.both_sides(compared, plan.collective)
        rows.append((compared.limit.metric, *figures, change_of(compared), text.limit(compared.limit)))
    return rows
