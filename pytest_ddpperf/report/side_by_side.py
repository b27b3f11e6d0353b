"""Two runs side by side, as lines for a terminal: the runs, a row per limit, remarks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from pytest_ddpperf.records import Outcome, RunInfo, Status
from pytest_ddpperf.report import sentences, text
from pytest_ddpperf.report.json_report import StoredReport
from pytest_ddpperf.report.summary import count, last_line

_TITLES = ("", "ranks", "metric", "base", "now", "change [bounds]", "limit", "resolves", "verdict")
_LONGEST_LINE = 1_000  # characters, of facts about a machine
ONLY_BEFORE = "only in the base"
_BLANK = ("-",) * (len(_TITLES) - 3)


def lines(base: StoredReport, now: StoredReport) -> Iterator[str]:
    """Yield the comparison. `now` has the verdicts against `base`."""
    yield from about(base, now)
    yield ""
    rows = [row for outcome in now.outcomes for row in _rows(outcome)]
    rows += [(gone.name, gone.ranks, *_BLANK, ONLY_BEFORE) for gone in now.only_before]
    yield from text.aligned([_TITLES, *rows])
    yield ""
    yield from summary_lines(base, now)


def summary_lines(base: StoredReport, now: StoredReport) -> Iterator[str]:
    """Yield the lines below the figures; the counts are the last line."""
    for outcome in now.outcomes:
        yield from sentences.summary_lines(outcome)
        if outcome.verdict is not None and outcome.verdict.status is Status.REGRESSED:
            yield f"{text.name(outcome)}: {sentences.sentence(outcome)}"
            yield from (f"  {line}" for line in outcome.evidence)
    yield from remarks(base, now)
    yield last_line(count(now.outcomes, *now.runs), len(now.only_before))


def about(base: StoredReport, now: StoredReport) -> Iterator[str]:
    """A line a file: when, of which commit, with which torch."""
    yield from _side("base", base)
    yield from _side("now", now)


def remarks(base: StoredReport, now: StoredReport) -> Iterator[str]:
    """Yield the lines about both runs."""
    yield from (*base.messages, *now.messages)
    yield from _differences(now.outcomes)
    yield from _drift(now.outcomes)


def _side(name: str, report: StoredReport) -> Iterator[str]:
    for path, run in zip(report.paths, report.runs, strict=True):
        yield f"{name + ':':<5} {path}: {_run(run)}"


def bases(report: StoredReport) -> Iterator[str]:
    """Yield a line for each run that `ddpperf diff` compared with."""
    yield from (f"base: {_run(run)}" for run in report.bases)


def _run(run: RunInfo) -> str:
    commit = text.commit(run.commit).replace("-dirty", " with uncommitted changes")
    facts = [
        run.created,
        f"commit {commit}" * bool(commit),
        *(f"{fact} {run.facts[fact]}" for fact in ("torch", "device_model") if run.facts.get(fact)),
    ]
    return text.shortened(", ".join(filter(None, facts)), _LONGEST_LINE)


def _rows(outcome: Outcome) -> Iterator[tuple[str, ...]]:
    """A row a limit, and one where there is none."""
    who = text.name(outcome), text.ranks(outcome.plan)
    verdict, plan = outcome.verdict, outcome.plan
    if verdict is None or not verdict.status.compared:
        yield (*who, *_BLANK, str(verdict) if verdict is not None else "not measured")
        return
    for c in verdict.comparisons:
        figures = [text.figure(c, seconds, plan.collective) for seconds in (c.baseline_seconds, c.now_seconds)]
        limit = str(c.limit).partition(":")[2]
        found = text.interval(text.changed(c)), limit, text.amount(text.resolution(c)), str(c.status)
        yield (*who, c.limit.metric, *figures, *found)
        who = "", ""
    for counted in verdict.counters:
        metric, _, limit = str(counted.limit).partition(":")
        change = text.counted(counted).removeprefix(metric).strip()
        counts = f"{counted.baseline:,}", f"{counted.now:,}"
        yield (*who, metric, *counts, f"{change}, counted", limit, "all", str(counted.status))
        who = "", ""


def _differences(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """What is otherwise in the environment, once for all that share it."""
    compared = [outcome.verdict for outcome in outcomes if outcome.verdict is not None]
    found = Counter(verdict.differences for verdict in compared if verdict.status.compared and verdict.differences)
    for differences, number in found.items():
        of = f" ({number} of {len(outcomes)} measurements)" if number < len(outcomes) else ""
        shown = text.shortened(", ".join(differences), _LONGEST_LINE)
        yield f"differs from the base's environment{of}: {shown}"


def _drift(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """What was assumed, since nobody measured both sides on one occasion."""
    comparisons = [c for outcome in outcomes if outcome.verdict is not None for c in outcome.verdict.comparisons]
    assumed = [c.drift for c in comparisons if c.drift is not None]
    if assumed:
        yield (
            f"the base is one session, which cannot tell how far sessions drift apart: {text.span(assumed)} was "
            "assumed; pytest --ddp-against measures both sides on one occasion, without any"
        )
