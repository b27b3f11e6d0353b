"""Write and read the JSON of a run (the schema is in docs/json.md): one report, or several, the shards of a CI job."""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from pytest_ddpperf.baseline import nonsense
from pytest_ddpperf.records import Limit, Outcome, RunInfo, Scalar, codec
from pytest_ddpperf.records.errors import ReportError
from pytest_ddpperf.report import text
from pytest_ddpperf.report.summary import count
from pytest_ddpperf.verdict import stats

SCHEMA = 1


def report(outcomes: Sequence[Outcome], run: RunInfo) -> dict[str, Any]:
    """Raw samples included; never NaN."""
    return {
        "schema": SCHEMA,
        "run_id": run.id,
        "created": run.created,
        "version": run.version,
        "commit": run.commit,
        "committed": run.committed,
        "machine": dict(run.facts),
        "summary": asdict(count(outcomes, run)),
        "problem": run.problem,
        "messages": list(run.messages),
        "measurements": [_measurement(outcome) for outcome in outcomes],
    }


def _measurement(outcome: Outcome) -> dict[str, Any]:
    data: dict[str, Any] = dict(codec.encode(outcome))
    if outcome.measurement is not None:
        launches = outcome.measurement.samples.step_seconds
        data["percentile_seconds"] = {
            f"p{q}": stats.geometric_mean(stats.launch_quantiles(launches, q)) for q in (10, 50, 75, 90, 95)
        }
    return data


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A measurement, with the run that it is of."""

    outcome: Outcome
    run: RunInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """A measurement that only the baseline run has."""

    name: str
    ranks: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredReport:
    """What one or several files say."""

    paths: tuple[Path, ...]
    runs: tuple[RunInfo, ...]
    entries: tuple[Entry, ...]  # in the order of the files, each measurement once
    messages: tuple[str, ...] = ()  # about measurements that several files have
    bases: tuple[RunInfo, ...] = ()  # that `ddpperf diff` compared with
    only_before: tuple[Gone, ...] = ()  # that those have, and no file here

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        return tuple(entry.outcome for entry in self.entries)

    @property
    def run(self) -> RunInfo:
        """All runs as one: what the one that ended last was, and the counts, problems and remarks of all; of no commit,
        where they are not of one."""
        last = max(self.runs, key=lambda run: run.created)
        if len({run.commit for run in self.runs}) > 1:
            last = replace(last, commit="", committed="")
        return replace(
            last,
            skipped=sum(run.skipped for run in self.runs),
            never_measured=sum(run.never_measured for run in self.runs),
            other_failures=sum(run.other_failures for run in self.runs),
            problem="; ".join(dict.fromkeys(run.problem for run in self.runs if run.problem)),
            messages=tuple(dict.fromkeys(line for run in self.runs for line in run.messages)),
        )


def read(paths: Sequence[Path]) -> StoredReport:
    """The measurements of all files; raises ReportError."""
    return merged([report_of(path, load(path)) for path in paths])


def load(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file; raises ReportError."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ReportError(path, f"cannot be read: {error.strerror}") from error
    if not data.strip():
        raise ReportError(path, "the file is empty")
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ReportError(path, f"is not JSON, or not all of it: {error}") from error
    if not isinstance(content, dict):
        raise ReportError(path, "is not a report: it holds no JSON object")
    return content


def report_of(path: Path, content: dict[str, Any]) -> StoredReport:
    """What `load` read from `path`; raises ReportError, which names the field."""
    schema = content.get("schema")
    if type(schema) is not int or schema < 1 or not isinstance(content.get("measurements"), list):
        raise ReportError(path, "is not a report of pytest --ddp-json: it has no schema and measurements")
    if schema > SCHEMA:
        raise ReportError(path, f"has schema {schema}; this version of pytest-ddpperf reads up to {SCHEMA}: upgrade it")
    run = _run(path, content)
    entries = []
    for number, data in enumerate(content["measurements"]):
        try:
            outcome = codec.decode(Outcome, data, of_another_version=True)
        except codec.CodecError as error:
            raise ReportError(path, f"measurements[{number}]{'.' if error.path else ': '}{error}") from error
        if problem := _problem(outcome):
            raise ReportError(path, f"measurements[{number}].{problem}")
        entries.append(Entry(outcome=outcome, run=run))
    bases, only_before = _diff_fields(path, content)
    return StoredReport(paths=(path,), runs=(run,), entries=tuple(entries), bases=bases, only_before=only_before)


@dataclass(frozen=True, slots=True, kw_only=True)
class _DiffFields:
    """What `ddpperf diff --json` adds."""

    base: Mapping[str, Scalar] | None = None
    only_in_base: tuple[Gone, ...] = ()


def _diff_fields(path: Path, content: dict[str, Any]) -> tuple[tuple[RunInfo, ...], tuple[Gone, ...]]:
    fields = {name: content[name] for name in ("base", "only_in_base") if name in content}
    try:
        found = codec.decode(_DiffFields, fields, of_another_version=True)
    except codec.CodecError as error:
        raise ReportError(path, str(error)) from error
    return (_run(path, dict(found.base), "base."),) if found.base is not None else (), found.only_in_base


# Of what all measurements share, by field: where the file has it.
_FIELDS = {
    "id": "run_id",
    "created": "created",
    "version": "version",
    "commit": "commit",
    "committed": "committed",
    "facts": "machine",
    "skipped": "summary.skipped",
    "never_measured": "summary.never_measured",
    "other_failures": "summary.other_failures",
    "problem": "problem",
    "messages": "messages",
}


def _run(path: Path, content: dict[str, Any], within: str = "") -> RunInfo:
    summary = content.get("summary")
    flat = {**content, **{f"summary.{name}": n for name, n in (summary if isinstance(summary, dict) else {}).items()}}
    fields = {field: flat[name] for field, name in _FIELDS.items() if name in flat}
    try:
        return codec.decode(RunInfo, fields, of_another_version=True)
    except codec.CodecError as error:
        field = re.split(r"[.[]", error.path)[0]
        raise ReportError(path, f"{within}{_FIELDS[field]}{error.path[len(field) :]}: {error.problem}") from error


def _problem(outcome: Outcome) -> str:
    """Return what is invalid and why, or ""."""
    other = outcome.baseline_side.measurement if outcome.baseline_side is not None else None
    for place, measurement in (("measurement", outcome.measurement), ("baseline_side.measurement", other)):
        if measurement is not None and (wrong := nonsense(measurement.samples)):
            return f"{place}.samples.{wrong}"
    verdicts = filter(None, (outcome.verdict, outcome.stored_verdict))
    limits = list(outcome.limits)
    for verdict in verdicts:
        limits += [each.limit for each in verdict.comparisons]
        limits += [each.limit for each in verdict.counters]
    unknown = [limit.metric for limit in limits if not _is_metric(limit)]
    return f"limits: {unknown[0]!r} is not a metric" if unknown else ""


def _is_metric(limit: Limit) -> bool:
    try:
        return limit.is_counter or 0 < limit.percentile < 100
    except ValueError:
        return False


def merged(reports: Iterable[StoredReport]) -> StoredReport:
    """As if one run had measured it all. What several of them measured on one kind of machine, a rerun of a job say,
    counts as the run that ended last has it; a message says so."""
    reports = list(reports)
    entries = [entry for report in reports for entry in report.entries]
    left: dict[Hashable, list[int]] = {}  # places of what counts so far
    again: set[int] = set()  # places of what counts instead of another
    for place in sorted(range(len(entries)), key=lambda place: entries[place].run.created):
        of_it = left.setdefault(_asked(entries[place]), [])
        others = [other for other in of_it if not _again(entries[place], entries[other])]
        if len(others) < len(of_it):
            again.add(place)
        of_it[:] = [*others, place]
    kept = sorted(chain.from_iterable(left.values()))
    repeated = (
        f"{text.name(entries[place].outcome)}: measured in several reports: that of {entries[place].run.created} counts"
        for place in kept
        if place in again
    )
    return StoredReport(
        paths=tuple(path for report in reports for path in report.paths),
        runs=tuple(run for report in reports for run in report.runs),
        entries=tuple(entries[place] for place in kept),
        messages=(*(line for report in reports for line in report.messages), *_of_several_commits(reports), *repeated),
        bases=tuple({str(base): base for report in reports for base in report.bases}.values()),
        only_before=tuple(dict.fromkeys(_gone(reports))),
    )


def _gone(reports: Sequence[StoredReport]) -> Iterator[Gone]:
    """Of what one shard has not, another may have a measurement."""
    measured = [{gone_of(outcome) for outcome in report.outcomes} for report in reports]
    for number, report in enumerate(reports):
        others = set().union(*measured[:number], *measured[number + 1 :])
        yield from (gone for gone in report.only_before if gone not in others)


def gone_of(outcome: Outcome) -> Gone:
    return Gone(name=text.name(outcome), ranks=text.ranks(outcome.plan))


def _asked(entry: Entry) -> Hashable:
    """What is known of a measurement even where it failed: test, group, and what the run says of the machine."""
    plan, model = entry.outcome.plan, "cpu_model" if entry.outcome.plan.device == "cpu" else "device_model"
    return (
        entry.outcome.test, plan.world_size, plan.roles, plan.device, plan.backend, entry.run.facts.get(model)
    )  # fmt: skip


def _again(entry: Entry, before: Entry) -> bool:
    """Whether of two of which the same was asked one is the other once more: by another run, and on the same machine as
    far as anybody knows."""
    one, other = entry.outcome, before.outcome
    known = one.measurement is not None and other.measurement is not None
    return entry.run is not before.run and (not known or identity(one) == identity(other))


def _of_several_commits(reports: Sequence[StoredReport]) -> Iterator[str]:
    """Yield which report is of which commit, if they are not all of one."""
    of_it: dict[str, list[str]] = {}
    for report in reports:
        for path, run in zip(report.paths, report.runs, strict=True):
            of_it.setdefault(text.commit(run.commit) or "no commit", []).append(path.name)
    if len(of_it) > 1:
        named = (f"{commit} ({', '.join(paths)})" for commit, paths in of_it.items())
        yield f"these reports are not of one commit: {'; '.join(named)}"


def identity(outcome: Outcome) -> Hashable:
    """What two measurements share that are of the same: test, group and kind of machine."""
    plan = outcome.plan
    key = outcome.measurement.environment.key if outcome.measurement is not None else {}
    return outcome.test, plan.world_size, plan.roles, plan.device, plan.backend, frozenset(key.items())
