"""Two runs side by side: ours with the verdict of the gate, and those of PyTorch's DDP
benchmark."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from pytest_ddpperf import text
from pytest_ddpperf.records import quantiles
from pytest_ddpperf.records.errors import FileError
from pytest_ddpperf.records.outcome import Outcome, RunInfo
from pytest_ddpperf.records.plan import OF_TEST
from pytest_ddpperf.records.samples import Facts, FoundFacts, Status
from pytest_ddpperf.report import sentences, terminal
from pytest_ddpperf.report.json_report import Entry, StoredReport
from pytest_ddpperf.report.summary import last_line
from pytest_ddpperf.text import Lines

_LONGEST_LINE = 1_000  # characters, of facts about a machine
ONLY_BEFORE = "only in the base"


def lines(base: StoredReport, now: StoredReport) -> Lines:
    """Yield the comparison. `now` has the verdicts against `base`."""
    for name, report in (("base:", base), ("now:", now)):
        yield from (
            f"{name:<5} {path}: {_run(run)}"
            for path, run in zip(report.paths, report.runs, strict=True)
        )
    yield ""
    yield from terminal.table(now.outcomes, width=text.terminal_width())
    yield from (
        f"{gone.name} ({gone.ranks}): {ONLY_BEFORE}" for gone in now.only_before
    )
    yield ""
    yield from summary_lines(now)


def summary_lines(now: StoredReport) -> Lines:
    """Yield the lines below the figures; the counts are the last line."""
    for outcome in now.outcomes:
        verdict = outcome.verdict
        if verdict and (outcome.fails or verdict == Status.REGRESSED):
            yield f"{text.name(outcome)}:"
            failure = sentences.gate_failure(outcome, text.terminal_width() - 2)
            for line in failure.splitlines():
                yield f"  {line}".rstrip()
            yield ""
        elif outcome.evidence:
            yield f"{text.name(outcome)}: {'; '.join(outcome.evidence)}"
    yield from sentences.problems(now.outcomes)
    yield from now.messages
    yield last_line(now.outcomes, *now.runs, only_before=len(now.only_before))


def run_messages(report: StoredReport) -> list[str]:
    """Return the lines about a report that is shown alone, with the runs that `ddpperf diff`
    compared it with."""
    bases = (f"base: {_run(run)}" for run in report.bases)
    return [*bases, *report.run.messages, *report.messages]


def _run(run: RunInfo) -> str:
    facts = [run.created]
    if run.commit:
        facts.append(f"commit {text.commit(run.commit)}")
    for fact in ("torch", "device_model"):
        if run.facts.get(fact):
            facts.append(f"{fact} {run.facts[fact]}")
    return text.shortened(", ".join(filter(None, facts)), _LONGEST_LINE)


def remarks(outcomes: Sequence[Outcome]) -> Lines:
    """Yield what differs in the environment, and what was assumed about drift, once for all that
    share it."""
    verdicts = [
        each.verdict
        for each in outcomes
        if each.verdict and each.verdict.status.compared
    ]
    for differences, number in Counter(
        each.differences for each in verdicts
    ).items():
        if not differences:
            continue
        which = ""
        if number < len(outcomes):
            which = f" ({number} of {len(outcomes)} measurements)"
        shown = text.shortened(", ".join(differences), _LONGEST_LINE)
        yield f"differs from the base's environment{which}: {shown}"
    drifts = text.drifts(verdicts)
    if drifts:
        yield (
            f"two runs drift apart by an assumed {text.span(drifts)}: pytest --ddp-against measures"
            " both sides in one run"
        )


_PERCENTILES = (75, 95)
_RESULTS = "benchmark_results"
_LEAST_SECONDS = 0.001  # the original's three decimals show nothing of less


class Row(NamedTuple):
    """A row of a benchmark."""

    title: str
    ranks: int  # 0 without DDP
    seconds: tuple[float, ...]  # at _PERCENTILES
    steps: Sequence[float]  # of all ranks and launches together


# By "no ddp", the number of ranks, or the roles of an RPC launch.
Rows = dict[str, Row]
# The configuration; and the rows of each benchmark, by its name and batch size.
Sweep = tuple[Mapping[str, str], Mapping[tuple[str, int | None], Rows]]
_NO_DDP = "no ddp"
# The names of the facts of a test that are a benchmark's and a row's; others are of the
# configuration.
_MODEL, _ROW = f"{OF_TEST}model", f"{OF_TEST}row"


def is_theirs(content: Mapping[str, Any]) -> bool:
    """Return whether the content of a file is of PyTorch's benchmark."""
    return _RESULTS in content


def theirs(
    path: Path,
    content: Mapping[str, Any],
    matches: Callable[[str], bool] | None,
) -> Sweep:
    """Return the benchmarks with a matching name in a file of PyTorch's benchmark; raises
    FileError."""
    try:
        benchmarks = {
            (
                text.shortened(each["model"]),
                int(each["batch_size"]),
            ): _read_rows(each["result"])
            for each in content[_RESULTS]
        }
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise FileError(
            path,
            f"{_RESULTS} is not as PyTorch's benchmark writes it: {type(error).__name__}: {error}",
        ) from error
    facts = {
        name: text.shortened(str(value))
        for name, value in content.items()
        if name != _RESULTS
    }
    return facts, {
        key: rows
        for key, rows in benchmarks.items()
        if matches is None or matches(_title(*key))
    }


def _read_rows(results: Sequence[Mapping[str, Any]]) -> Rows:
    rows: Rows = {}
    single = [result for result in results if len(result["ranks"]) == 1]
    for result in results:
        seconds = result["measurements"]
        if not 0 < min(seconds) <= max(seconds) < math.inf:
            raise ValueError("measurements are positive numbers")
        # Of two rows of a single rank the first is without DDP; the file does not say so.
        ranks = (
            0
            if len(single) > 1 and result is single[0]
            else len(result["ranks"])
        )
        taken = tuple(quantiles.quantile(seconds, q) for q in _PERCENTILES)
        rows[str(ranks) if ranks else _NO_DDP] = Row(
            f"{ranks} GPUs" if ranks else _NO_DDP, ranks, taken, seconds
        )
    return rows


def ours(report: StoredReport) -> Sweep:
    """Return a report with a benchmark for each model of the suite's sweep, or each test, and a row
    for each number of ranks. Raises FileError if it has measurements of several machines."""
    facts: dict[str, dict[str, None]] = {}
    benchmarks: dict[tuple[str, int | None], Rows] = {}
    for entry in report.entries:
        outcome, plan = entry.outcome, entry.outcome.plan
        if plan.command:
            continue  # its steps are not known
        if outcome.measurement is None:
            continue  # the lines below the figures have its error
        for fact, value in _facts(entry).items():
            facts.setdefault(fact, {})[str(value or "-")] = None
        given = _of_test(outcome)
        model = text.shortened(str(given.get(_MODEL, outcome.test)))
        ranks = plan.world_size
        title = (
            plan.roles
            or f"{ranks} {'ranks' if plan.device == 'cpu' else 'GPUs'}"
        )
        key = plan.roles or str(ranks)
        if given.get(_ROW) == _NO_DDP:
            ranks, title, key = 0, _NO_DDP, _NO_DDP
        rows = benchmarks.setdefault((model, outcome.batch_size), {})
        if key in rows:
            raise FileError(
                report.paths[0],
                f"has {outcome.test} of several machines, which PyTorch's form cannot show",
            )
        samples = outcome.measurement.samples
        taken = tuple(
            quantiles.percentile(samples.step_seconds, q) for q in _PERCENTILES
        )
        steps = [
            seconds
            for launch in samples.rank_seconds
            for rank in launch
            for seconds in rank
        ]
        rows[key] = Row(title, ranks, taken, steps)
    ordered = {
        key: dict(sorted(rows.items(), key=lambda row: row[1].ranks))
        for key, rows in benchmarks.items()
    }
    return {fact: ", ".join(values) for fact, values in facts.items()}, ordered


def _of_test(outcome: Outcome) -> Facts:
    """Return the facts that the test gave."""
    known = (
        outcome.measurement.environment.must_match
        if outcome.measurement
        else {}
    )
    return {
        name: fact for name, fact in known.items() if name.startswith(OF_TEST)
    }


def _facts(entry: Entry) -> FoundFacts:
    """Return the configuration, by the names of the original if it has one."""
    plan, run = entry.outcome.plan, entry.run
    facts = {
        name.removeprefix(OF_TEST): fact
        for name, fact in _of_test(entry.outcome).items()
        if name not in (_MODEL, _ROW)
    }
    digits, dirty, _ = run.commit.partition("-dirty")
    device = "cpu_model" if plan.device == "cpu" else "device_model"
    return {
        **facts,
        "commit": digits[:12] + dirty,
        "cuda_version": run.facts.get("cuda"),
        "device": run.facts.get(device),
        "distributed_backend": plan.backend,
        "nccl_version": run.facts.get("nccl"),
        "pytorch_version": run.facts.get("torch"),
    }


def in_form_of_pytorch(report: StoredReport) -> dict[str, Any]:
    """Return what the suite's sweep measured as PyTorch's benchmark writes it, with the steps of
    all ranks and launches together. Raises FileError without a sweep, or if a model has no row
    without DDP: PyTorch's diff leaves out the first row, which it takes for that one."""
    swept = tuple(
        entry for entry in report.entries if _MODEL in _of_test(entry.outcome)
    )
    if not swept:
        raise FileError(
            report.paths[0],
            "has no measurement of the suite's sweep, as PyTorch's benchmark writes it",
        )
    facts, benchmarks = ours(replace(report, entries=swept))
    for (model, _), rows in benchmarks.items():
        if _NO_DDP not in rows:
            raise FileError(
                report.paths[0],
                f"has no row of {model} without DDP, with which PyTorch's benchmark begins",
            )
    return {
        **facts,
        _RESULTS: [
            {
                "model": model,
                "batch_size": batch_size,
                "result": [
                    {
                        "ranks": [*range(row.ranks or 1)],
                        "measurements": row.steps,
                    }
                    for row in rows.values()
                ],
            }
            for (model, batch_size), rows in benchmarks.items()
        ],
    }


def _title(name: str, batch_size: int | None) -> str:
    return (
        name if batch_size is None else f"{name} with batch size {batch_size}"
    )


def in_common(base: Sweep, now: Sweep) -> bool:
    """Return whether any row is in both."""
    return any(
        rows.keys() & base[1].get(key, {}).keys()
        for key, rows in now[1].items()
    )


def side_by_side(base: Sweep, now: Sweep) -> Lines:
    """Yield the form, line by line."""
    yield f"{'':20s} {'baseline':>20s}      {'test':>20s}"
    yield f"{'':20s} {'-' * 20:>20s}      {'-' * 20:>20s}"
    for name in sorted({*base[0], *now[0]}):
        named = text.shortened(name)
        yield f"{named + ':':20s} {base[0].get(name, '-'):>20s}  vs  {now[0].get(name, '-'):>20s}"
    yield ""
    for key in dict.fromkeys([*now[1], *base[1]]):
        yield from (f"Benchmark: {_title(*key)}", "")
        if key in base[1] and key in now[1]:
            yield from _table(base[1][key], now[1][key], key[1])
        else:
            yield f"  only in {'baseline' if key in base[1] else 'test'}"
        yield ""


def _table(base: Rows, now: Rows, batch_size: int | None) -> Lines:
    yield f"{'':>10s}" + f"{'sec/iter':>16s}{'ex/sec':>10s}{'diff':>10s}" * len(
        _PERCENTILES
    )
    for key in dict.fromkeys([*now, *base]):
        head = f"{(now.get(key) or base[key]).title}:"
        if key not in base or key not in now:
            yield f"{head:>10s}  only in {'baseline' if key in base else 'test'}"
            continue
        cells = []
        for q, before, after in zip(
            _PERCENTILES, base[key].seconds, now[key].seconds, strict=True
        ):
            # Of time less is better, so a slowdown is negative.
            change = -100 * ((after - before) / before)
            rate, time = f"{'-':>9s}", f"{text.seconds(after):>9s}"
            if batch_size is not None:
                rate = f"{int(batch_size / after):7d}/s"
            if after >= _LEAST_SECONDS:
                time = f"{after:8.3f}s"
            cells.append(f"  p{q:02d}: {time} {rate} {change:+8.1f}%")
        yield f"{head:>10s}" + "".join(cells)
