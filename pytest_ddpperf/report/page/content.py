"""The card of each measurement: its texts, the same as in other reports, and its figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import median

from pytest_ddpperf.records import COUNTERS, Environment, Outcome, Phases, RunInfo, Scalar, Status
from pytest_ddpperf.report import failure, sentences, summary, terminal, text
from pytest_ddpperf.report.page import figures
from pytest_ddpperf.report.page.drawing import Figure, Sheet, Table
from pytest_ddpperf.report.summary import Concern
from pytest_ddpperf.verdict import stats

_LONGEST = 1_000  # characters of a line of the sentence; only what is hostile is longer


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A measurement."""

    anchor: str
    name: str
    kind: str  # of its verdict, in the style sheet
    status: str
    sentence: str
    change: str
    who: str
    opened: bool  # whether it is shown whole at first
    facts: tuple[tuple[str, str], ...]  # what and which
    metrics: Table | None
    remarks: tuple[str, ...]
    differences: tuple[str, ...]
    figures: tuple[Figure, ...]
    tables: tuple[Table, ...]  # of numbers that no figure shows
    accepts: str  # what the command does
    accept: str


def card(outcome: Outcome, sheet: Sheet, number: int) -> Card:
    verdict = outcome.verdict
    status = sentences.verdict_of(outcome)
    return Card(
        anchor=f"m{number}",
        name=text.name(outcome),
        kind=status.lower().replace(" ", "-"),
        status=status,
        sentence=_sentence(outcome, status),
        change=terminal.change(verdict),
        who=text.ranks(outcome.plan),
        opened=summary.concern(outcome) <= Concern.DOUBTFUL,
        facts=tuple(_facts(outcome)),
        metrics=_metrics(outcome),
        remarks=tuple(_remarks(outcome)),
        differences=verdict.differences if verdict is not None else (),
        figures=tuple(_figures(outcome, sheet)),
        tables=tuple(_tables(outcome)),
        accepts="Accept" if verdict is not None and verdict.status.compared else "Record",
        accept=outcome.accept if verdict is not None and verdict.status is not Status.PASS else "",
    )


def _sentence(outcome: Outcome, status: str) -> str:
    """Return the sentence without the status, which stands before it."""
    sentence = sentences.sentence(outcome).removeprefix(status).removeprefix(":").strip()
    return "\n".join(text.shortened(line, _LONGEST) for line in sentence.split("\n"))


def _facts(outcome: Outcome) -> Iterator[tuple[str, str]]:
    plan, measured = outcome.plan, outcome.measurement
    if outcome.file:
        yield "test", f"{text.shortened(outcome.file)}:{outcome.line}" if outcome.line else text.shortened(outcome.file)
    if plan.collective is not None:
        yield "collective", str(plan.collective)
    if outcome.batch_size is not None:
        yield "batch size", f"{outcome.batch_size} a rank"
    if measured is not None:
        seconds = stats.geometric_mean(stats.launch_quantiles(measured.samples.step_seconds, 50))
        yield "p50", text.seconds(seconds)
        if plan.collective is not None:
            yield "busbw", f"{plan.collective.busbw(seconds):.3g} GB/s"
        yield "launches", f"{measured.samples.launches} of {measured.samples.steps} steps, timing {plan.timing}"
    if outcome.baseline_side is not None:
        yield "against", sentences.compared_commits(outcome.baseline_side)
    if outcome.baseline_path:
        yield "baseline", outcome.baseline_path


def _metrics(outcome: Outcome) -> Table | None:
    verdict = outcome.verdict
    if verdict is None or not (verdict.comparisons or verdict.counters):
        return None
    head, *rows = failure.metrics(verdict.comparisons, verdict.counters, outcome.plan.collective)
    return Table(title="Limits", head=head, rows=tuple(rows))


def _remarks(outcome: Outcome) -> Iterator[str]:
    verdict = outcome.verdict
    yield from outcome.evidence
    if verdict is not None:
        if outcome.stored_verdict is not None:
            yield failure.suspected(outcome.stored_verdict)
        yield from sentences.left_out(verdict)
        if not outcome.evidence:
            yield from sentences.comparison_lines(outcome)
    yield from outcome.notes


def _figures(outcome: Outcome, sheet: Sheet) -> Iterator[Figure]:
    both = figures.sides_of(outcome)
    if both is None:
        return
    now, base = both.now, both.base
    found = figures.find_shifts(outcome)
    if found:
        yield figures.draw_shifts(sheet, found, base.name if base is not None else "the baseline")
    yield figures.draw_distributions(sheet, now, base)
    q = _shown(outcome)
    if outcome.baseline_side is not None and base is not None and base.launches == now.launches:
        yield figures.draw_pairs(sheet, outcome.baseline_side.order, now, base, q)
    else:
        yield figures.draw_launches(sheet, now, base, q)


def _shown(outcome: Outcome) -> int:
    """Return the percentile that decided, or p50 if reports do not have that one for each launch."""
    worst = outcome.verdict.worst if outcome.verdict is not None else None
    found = worst.limit.percentile if worst is not None and not worst.limit.is_cpu_time else 50.0
    return int(found) if found in figures.PERCENTILES else 50


def _tables(outcome: Outcome) -> Iterator[Table]:
    if outcome.phases:
        yield _phases(outcome.phases)
    if outcome.measurement is None:
        return
    yield figures.rank_table(outcome)
    if counters := _counters(outcome):
        yield Table(title="What a step sends", head=("counter", "baseline", "now"), rows=counters)
    if outcome.recorded:
        yield Table(title="Recorded by steps", head=("figure", "least", "p50", "most"), rows=tuple(_recorded(outcome)))
    yield _environment(outcome)


def _phases(phases: Sequence[Phases]) -> Table:
    medians = {field.name: median(getattr(launch, field.name) for launch in phases) for field in fields(Phases)}
    whole = sum(medians.values()) or 1.0
    return Table(
        title=f"Phases of a launch, median of {len(phases)}",
        head=("phase", "seconds", "share"),
        rows=tuple((name, text.seconds(value), text.amount(value / whole)) for name, value in medians.items()),
    )


def _counters(outcome: Outcome) -> tuple[tuple[str, ...], ...]:
    """Return the counters that were measured; detailed ones only if they are not 0."""
    assert outcome.measurement is not None
    now = outcome.measurement.counters
    other = outcome.baseline_side.measurement if outcome.baseline_side is not None else None
    before: dict[str, int | None] = dict(other.counters) if other is not None else {}
    if outcome.verdict is not None and outcome.baseline_side is None:
        before = {changed.limit.metric: changed.baseline for changed in outcome.verdict.counters}
    shown = [name for name in {**now, **before} if now.get(name) or before.get(name) or name in COUNTERS]
    return tuple((name, *(_count(side.get(name)) for side in (before, now))) for name in shown)


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _recorded(outcome: Outcome) -> Iterator[tuple[str, ...]]:
    for name, launches in outcome.recorded.items():
        values = [value for launch in launches for rank in launch for value in rank if value is not None]
        if values:
            figures_ = (min(values), stats.quantile(values, 50), max(values))
            yield text.shortened(name), *(f"{value:.4g}" for value in figures_)


def _environment(outcome: Outcome) -> Table:
    """Return the environment of both sides if both are known; facts that differ come first."""
    assert outcome.measurement is not None
    other = outcome.baseline_side.measurement if outcome.baseline_side is not None else None
    now = _all_facts(outcome.measurement.environment)
    if other is None:
        return Table(title="Environment", head=("fact", "now"), rows=tuple((name, _fact(now[name])) for name in now))
    then = _all_facts(other.environment)
    names = sorted({**then, **now}, key=lambda name: then.get(name) == now.get(name))
    return Table(
        title="Environment",
        head=("fact", "baseline side", "now"),
        rows=tuple((name, _fact(then.get(name)), _fact(now.get(name))) for name in names),
    )


def _all_facts(environment: Environment) -> Mapping[str, Scalar]:
    classes = (environment.key, environment.must_match, environment.recorded)
    return {name.removeprefix("env:"): value for facts in classes for name, value in facts.items()}


def _fact(value: Scalar) -> str:
    return "-" if value is None else text.shortened(str(value))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCard:
    """A run with its machine and commit."""

    lines: tuple[str, ...]  # of the machine
    facts: tuple[tuple[str, str], ...]


def run_card(run: RunInfo) -> RunCard:
    named = (
        ("ended", run.created),
        ("commit", run.commit),
        ("committed", run.committed),
        ("pytest-ddpperf", run.version),
        ("run", run.id),
    )
    header = terminal.header(run.facts, verbose=False) if run.facts else ()
    return RunCard(
        lines=tuple(line.removeprefix("ddpperf: ") for line in header),
        facts=tuple((name, value) for name, value in named if value),
    )
