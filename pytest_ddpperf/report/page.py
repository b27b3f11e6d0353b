"""A run as one HTML file: offline, without script. Each measurement has its texts, as in other
reports, and figures."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from pytest_ddpperf import text
from pytest_ddpperf.records.metric import WALL
from pytest_ddpperf.records.outcome import Outcome, RunInfo
from pytest_ddpperf.records.samples import Status
from pytest_ddpperf.report import (
    causes,
    diff_report,
    figures,
    guard,
    sentences,
    summary,
    terminal,
)
from pytest_ddpperf.report.json_report import StoredReport

_SHOWN = "p5 p10 p25 p50 p75 p90 p95 mean".split()


class Table(NamedTuple):
    """A table, as the template shows it; the first cell names a row."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def html(stored: StoredReport) -> str:
    """Return a page of the measurements of some runs, the worst first. Raises MissingExtraError."""
    figures.check("a page")
    ordered = summary.worst_first(stored.outcomes)
    with figures.style():
        cards = [
            _card(outcome, number) for number, outcome in enumerate(ordered, 1)
        ]
    return rendered(
        "run.html",
        title=summary.last_line(
            ordered, *stored.runs, only_before=len(stored.only_before)
        ),
        counts=summary.count(ordered, *stored.runs),
        cards=cards,
        only_before=stored.only_before,
        runs=list(map(_run_facts, stored.runs)),
        problem=stored.run.problem,
        messages=[*guard.lines(stored.run), *diff_report.run_messages(stored)],
        sections={
            title: "\n".join(lines)
            for title, lines in stored.run.sections.items()
        },
    )


def rendered(template: str, **content: Any) -> str:
    """Return a page by a template. All of `content` is escaped, and characters that move a cursor
    or turn the direction of writing around are spelt out."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("pytest_ddpperf.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # Markup is safe, so only plain texts are changed.
        finalize=lambda value: (
            text.printable(value) if type(value) is str else value
        ),
    )
    return environment.get_template(template).render(**content)


def _run_facts(run: RunInfo) -> dict[str, Any]:
    names = {
        "ended": "created",
        "commit": "commit",
        "committed": "committed",
        "pytest-ddpperf": "version",
    }
    facts = [
        (title, value)
        for title, name in names.items()
        if (value := getattr(run, name))
    ]
    lines = list(terminal.about(run.facts))
    return {"lines": lines, "facts": facts}


def _card(outcome: Outcome, number: int) -> dict[str, Any]:
    """Return what the template shows of a measurement."""
    verdict, status = outcome.verdict, outcome.shown_status
    drawn, tables = _measured(outcome)
    metrics, accept = [], ""
    if verdict:
        if verdict.comparisons or verdict.counters:
            base = sentences.base_name([outcome])
            metrics = sentences.metrics(verdict, outcome.plan, base)
        if verdict.status is not Status.PASS:
            accept = outcome.accept
    is_compared = verdict is not None and verdict.status.compared
    return {
        "anchor": f"m{number}",
        "name": text.name(outcome),
        "kind": status.lower().replace(" ", "-"),  # in the style sheet
        "status": status,
        # the status is before it
        "sentence": sentences.headline(outcome)
        .removeprefix(status)
        .lstrip(": "),
        "change": terminal.change(outcome) or "-",
        "who": text.ranks(outcome.plan),
        "opened": summary.concern(outcome) <= summary.Concern.DOUBTFUL,
        "facts": list(_facts(outcome)),
        "metrics": metrics,
        "remarks": list(_remarks(outcome)),
        "differences": verdict.differences if verdict else (),
        "figures": drawn,
        "tables": tables,
        "accepts": "Accept" if is_compared else "Record",
        "accept": accept,
    }


def _facts(outcome: Outcome) -> Iterator[tuple[str, str]]:
    plan, measured = outcome.plan, outcome.measurement
    if outcome.file:
        place = text.shortened(outcome.file)
        yield "test", f"{place}:{outcome.line}" if outcome.line else place
    if plan.collective:
        yield "collective", str(plan.collective)
    if outcome.batch_size is not None:
        yield "batch size", f"{outcome.batch_size} a rank"
    if measured:
        samples = measured.samples
        seconds = samples.p50
        yield WALL if plan.command else "p50", text.seconds(seconds)
        for said in terminal.device(measured):
            yield "device", said.removeprefix("device: ")
        if plan.collective:
            yield "busbw", f"{plan.collective.busbw(seconds):.3g} GB/s"
        window = (
            f"{samples.launches} of {samples.steps} steps, timing {plan.timing}"
        )
        if plan.command:
            window = str(samples.launches)
        yield "launches", window
        if outcome.baseline_side or outcome.sessions:
            yield "measured", sentences.measured(outcome)
    if outcome.baseline_path:
        yield "baseline", outcome.baseline_path


def _remarks(outcome: Outcome) -> Iterator[str]:
    yield from outcome.evidence
    side = outcome.baseline_side
    if side:
        yield from side.error.splitlines()
        for file in side.differing:
            yield f"changed: {file}"
    yield from sentences.notes(outcome)


def _measured(outcome: Outcome) -> tuple[list[dict[str, str]], list[Table]]:
    """Return the figures and the tables of a measurement."""
    if outcome.measurement is None:
        return [], []
    now, base = figures.sides_of(outcome)
    metric = "p50"
    # the one that decided, if reports have it for each launch
    if outcome.shown and outcome.shown.limit.metric in now.sessions[0]:
        metric = outcome.shown.limit.metric
    drawn = []
    if outcome.comparisons:
        against = base.name if base else "the baseline"
        drawn.append(figures.draw_changes(outcome.comparisons, against))
    if not outcome.plan.command:
        drawn.append(figures.draw_distributions(now, base))
    if now.phases:
        drawn.append(figures.draw_phases(now, base))
    interleaved = False
    if base and outcome.baseline_side:
        interleaved = len(base.at(metric)) == len(now.at(metric))
    drawn.append(
        figures.draw_launches(
            now,
            base,
            metric,
            title=WALL if outcome.plan.command else metric,
            interleaved=interleaved,
        )
    )
    sides = [now] if base is None else [base, now]
    return drawn, list(_tables(outcome, sides))


def _tables(outcome: Outcome, sides: Sequence[figures.Side]) -> Iterator[Table]:
    if not outcome.plan.command:
        times = []
        for side in sides:
            middles = (text.seconds(side.middle(each)) for each in _SHOWN)
            times.append((side.name, *middles))
        yield Table("Step times", ("", *_SHOWN), times)
        yield _ranks(outcome)
    if counters := _counters(outcome):
        yield Table(
            "Counters of a step",
            ("counter", sentences.base_name([outcome]), "now"),
            counters,
        )


def _ranks(outcome: Outcome) -> Table:
    """Return each rank's own step times; of the other side p50, if it is known."""
    samples = outcome.measured.samples
    columns = {
        f"p{q}": causes.by_rank(samples.rank_seconds, q)
        for q in (10, 50, 90, 95)
    }
    ranks = len(samples.rank_seconds[0])
    other = outcome.other_side
    if other and len(other.samples.rank_seconds[0]) == ranks:
        base = sentences.base_name([outcome])
        columns[f"{base}, p50"] = causes.by_rank(other.samples.rank_seconds, 50)
    rows = []
    for rank in range(ranks):
        cells = [text.seconds(values[rank]) for values in columns.values()]
        rows.append((outcome.plan.name(rank), *cells))
    title = "Trainers' own steps" if outcome.plan.rpc else "Ranks' own steps"
    return Table(title, ("", *columns), rows)


def _counters(outcome: Outcome) -> tuple[tuple[str, ...], ...]:
    """Return the counters that are not 0."""
    now = outcome.measured.counters
    before: dict[str, int | None] = {}
    if outcome.other_side:
        before = dict(outcome.other_side.counters)
    elif outcome.verdict and not outcome.baseline_side:
        before = {
            each.limit.metric: each.baseline
            for each in outcome.verdict.counters
        }
    return tuple(
        (name, _cell(before.get(name)), _cell(now.get(name)))
        for name in {**now, **before}
        if now.get(name) or before.get(name)
    )


def _cell(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"
