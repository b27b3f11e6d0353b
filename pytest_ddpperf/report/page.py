"""A run as one HTML file: offline, without script. Each measurement has its texts, as in other
reports, and figures."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pytest_ddpperf import text
from pytest_ddpperf.records.outcome import Outcome, RunInfo
from pytest_ddpperf.records.samples import Environment, LaunchRankSteps, Scalar, Status
from pytest_ddpperf.report import (
    causes,
    diff_report,
    figures,
    sentences,
    summary,
    terminal,
)
from pytest_ddpperf.report.json_report import StoredReport
from pytest_ddpperf.verdict import stats

_SHOWN = ("p5", "p10", "p25", "p50", "p75", "p90", "p95", "mean")


# title, head and rows, as the template shows it; the first cell names a row
Table = dict[str, Any]


def html(stored: StoredReport) -> str:
    """Return a page of the measurements of some runs, the worst first. Raises MissingExtraError."""
    figures.check("a page")
    ordered = summary.worst_first(stored.outcomes)
    counts = summary.count(ordered, *stored.runs)
    with figures.style():
        cards = [_card(outcome, number) for number, outcome in enumerate(ordered, 1)]
    return rendered(
        "run.html",
        title=summary.last_line(
            ordered, *stored.runs, only_before=len(stored.only_before)
        ),
        counts=counts,
        cards=cards,
        only_before=stored.only_before,
        runs=list(map(_run_facts, stored.runs)),
        problem=stored.run.problem,
        messages=diff_report.run_messages(stored),
        sections={
            title: "\n".join(lines) for title, lines in stored.run.sections.items()
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
        # not of Markup, which is safe
        finalize=lambda value: text.printable(value) if type(value) is str else value,
    )
    environment.filters["breakable"] = _breakable
    return environment.get_template(template).render(**content)


def _breakable(name: str) -> Any:
    """Let a narrow screen break a long name where its parts end."""
    from markupsafe import Markup

    return Markup("<wbr>").join(re.split(r"(?<=[/:_\[-])(?=\w)", text.printable(name)))


def _run_facts(run: RunInfo) -> dict[str, Any]:
    names = {
        "ended": "created",
        "commit": "commit",
        "committed": "committed",
        "pytest-ddpperf": "version",
    }
    facts = [
        (title, value) for title, name in names.items() if (value := getattr(run, name))
    ]
    header = terminal.header(run.facts, verbose=False) if run.facts else ()
    return {
        "lines": [line.removeprefix("ddpperf: ") for line in header],
        "facts": facts,
    }


def _card(outcome: Outcome, number: int) -> dict[str, Any]:
    """Return what the template shows of a measurement."""
    verdict, status = outcome.verdict, sentences.verdict_of(outcome)
    drawn, tables = _measured(outcome)
    limits = verdict is not None and (verdict.comparisons or verdict.counters)
    return {
        "anchor": f"m{number}",
        "name": text.name(outcome),
        "kind": status.lower().replace(" ", "-"),  # in the style sheet
        "status": status,
        # the status is before it
        "sentence": sentences.headline(outcome).removeprefix(status).lstrip(": "),
        "change": terminal.change(outcome) or "-",
        "who": text.ranks(outcome.plan),
        "opened": summary.concern(outcome) <= summary.Concern.DOUBTFUL,
        "facts": list(_facts(outcome)),
        "metrics": sentences.metrics(verdict, outcome.plan)
        if verdict is not None and limits
        else [],
        "remarks": list(_remarks(outcome)),
        "differences": verdict.differences if verdict is not None else (),
        "figures": drawn,
        "tables": tables,
        "accepts": "Accept"
        if verdict is not None and verdict.status.compared
        else "Record",
        "accept": outcome.accept
        if verdict is not None and verdict.status is not Status.PASS
        else "",
    }


def _facts(outcome: Outcome) -> Iterator[tuple[str, str]]:
    plan, measured = outcome.plan, outcome.measurement
    if outcome.file:
        yield (
            "test",
            f"{text.shortened(outcome.file)}:{outcome.line}"
            if outcome.line
            else text.shortened(outcome.file),
        )
    if plan.collective is not None:
        yield "collective", str(plan.collective)
    if outcome.batch_size is not None:
        yield "batch size", f"{outcome.batch_size} a rank"
    if measured is not None:
        seconds = stats.percentile(measured.samples.step_seconds, 50)
        yield "p50", text.seconds(seconds)
        if plan.collective is not None:
            yield "busbw", f"{plan.collective.busbw(seconds):.3g} GB/s"
        yield (
            "launches",
            f"{measured.samples.launches} of {measured.samples.steps} steps, timing {plan.timing}",
        )
    if measured is not None and (outcome.baseline_side is not None or outcome.sessions):
        yield "measured", sentences.measured(outcome)
    if outcome.baseline_path:
        yield "baseline", outcome.baseline_path


def _remarks(outcome: Outcome) -> Iterator[str]:
    yield from outcome.evidence
    if outcome.baseline_side is not None:
        yield from outcome.baseline_side.error.splitlines()
        yield from (f"changed: {file}" for file in outcome.baseline_side.differing)
    if outcome.verdict is not None:
        yield from sentences.left_out(outcome.verdict)
    yield from outcome.notes


def _measured(outcome: Outcome) -> tuple[list[dict[str, str]], list[Table]]:
    """Return the figures and the tables of a measurement."""
    if outcome.measurement is None:
        return [], []
    now, base = figures.sides_of(outcome)
    metric = _decisive(outcome, now)
    pairs = len(now.at(metric))
    interleaved = (
        base is not None
        and outcome.baseline_side is not None
        and len(base.at(metric)) == pairs
    )
    drawn = []
    if outcome.verdict is not None and outcome.verdict.comparisons:
        against = base.name if base is not None else "the baseline"
        drawn.append(figures.draw_changes(outcome.verdict.comparisons, against))
    drawn.append(figures.draw_distributions(now, base))
    if now.phases:
        drawn.append(figures.draw_phases(now, base))
    drawn.append(figures.draw_launches(now, base, metric, interleaved=interleaved))
    return drawn, list(_tables(outcome, [now] if base is None else [base, now]))


def _decisive(outcome: Outcome, side: figures.Side) -> str:
    """Return the metric that decided, or p50 if reports do not have that one for each launch."""
    shown = sentences.shown(outcome.verdict) if outcome.verdict is not None else None
    return (
        shown.limit.metric
        if shown is not None and shown.limit.metric in side.sessions[0]
        else "p50"
    )


def _tables(outcome: Outcome, sides: Sequence[figures.Side]) -> Iterator[Table]:
    yield Table(
        title="Step times",
        head=("", *_SHOWN),
        rows=tuple(
            (side.name, *(text.seconds(side.middle(shown)) for shown in _SHOWN))
            for side in sides
        ),
    )
    yield _ranks(outcome)
    if counters := _counters(outcome):
        yield Table(
            title="Counters of a step", head=("counter", "before", "now"), rows=counters
        )
    if outcome.recorded:
        yield Table(
            title="Recorded by steps",
            head=("figure", "least", "p50", "most"),
            rows=tuple(_recorded(outcome)),
        )
    yield _environment(outcome)


def _ranks(outcome: Outcome) -> Table:
    """Return each rank's own step times, CPU time and wait for RPC, of both sides if they are
    known."""
    samples = outcome.measured.samples
    columns = {
        f"p{q}": causes.by_rank(samples.rank_seconds, q) for q in (10, 50, 90, 95)
    }
    columns |= {
        "CPU p50": _medians(samples.cpu_seconds),
        "blocked in RPC, p50": _medians(samples.blocked_seconds),
    }
    other = (
        outcome.baseline_side.measurement if outcome.baseline_side is not None else None
    )
    if other is not None and len(other.samples.rank_seconds[0]) == len(
        samples.rank_seconds[0]
    ):
        columns["before, p50"] = causes.by_rank(other.samples.rank_seconds, 50)
        columns["before, CPU p50"] = _medians(other.samples.cpu_seconds)
    columns = {title: values for title, values in columns.items() if values}
    return Table(
        title="Trainers' own steps" if outcome.plan.rpc else "Ranks' own steps",
        head=("", *columns),
        rows=tuple(
            (
                outcome.plan.name(rank),
                *(text.seconds(values[rank]) for values in columns.values()),
            )
            for rank in range(len(samples.rank_seconds[0]))
        ),
    )


def _medians(durations: LaunchRankSteps | None) -> list[float]:
    """Return each rank's median over all steps of all launches, in seconds: there may be steps
    without any wait."""
    ranks = range(len(durations[0])) if durations else ()
    return [
        stats.quantile(
            [step for launch in durations or () for step in launch[rank]], 50
        )
        for rank in ranks
    ]


def _counters(outcome: Outcome) -> tuple[tuple[str, ...], ...]:
    """Return the counters that are not 0."""
    now = outcome.measured.counters
    other = (
        outcome.baseline_side.measurement if outcome.baseline_side is not None else None
    )
    before: dict[str, int | None] = dict(other.counters) if other is not None else {}
    if outcome.verdict is not None and outcome.baseline_side is None:
        before = {
            changed.limit.metric: changed.baseline
            for changed in outcome.verdict.counters
        }
    shown = [name for name in {**now, **before} if now.get(name) or before.get(name)]
    return tuple(
        (name, *(_cell(side.get(name), ",") for side in (before, now)))
        for name in shown
    )


def _recorded(outcome: Outcome) -> Iterator[tuple[str, ...]]:
    for name, launches in outcome.recorded.items():
        values = [
            value
            for launch in launches
            for rank in launch
            for value in rank
            if value is not None
        ]
        if values:
            shown = (min(values), stats.quantile(values, 50), max(values))
            yield text.shortened(name), *(f"{value:.4g}" for value in shown)


def _environment(outcome: Outcome) -> Table:
    """Return the environment of both sides if both are known; facts that differ come first."""
    other = (
        outcome.baseline_side.measurement if outcome.baseline_side is not None else None
    )
    sides = {"now": _all_facts(outcome.measured.environment)}
    if other is not None:
        sides = {"before": _all_facts(other.environment), **sides}
    names = list(dict.fromkeys(name for facts in sides.values() for name in facts))
    names.sort(key=lambda name: len({facts.get(name) for facts in sides.values()}) == 1)
    return Table(
        title="Environment",
        head=("fact", *sides),
        rows=tuple(
            (name, *(_cell(facts.get(name)) for facts in sides.values()))
            for name in names
        ),
    )


def _all_facts(environment: Environment) -> Mapping[str, Scalar]:
    classes = (environment.key, environment.must_match, environment.recorded)
    return {
        name.removeprefix("env:"): value
        for facts in classes
        for name, value in facts.items()
    }


def _cell(value: Scalar, form: str = "") -> str:
    return "-" if value is None else text.shortened(format(value, form))
