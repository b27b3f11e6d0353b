"""Write and read the JSON of a run (the schema is in docs/json.md): one report, or several, the shards of a CI job."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from pytest_ddpperf.baseline import nonsense
from pytest_ddpperf.records import Limit, Outcome, RunInfo, Scalar, codec
from pytest_ddpperf.records.errors import FileError
from pytest_ddpperf.report import text
from pytest_ddpperf.report.summary import count
from pytest_ddpperf.verdict import stats

SCHEMA = 1
_BASE_FIELDS = ("run_id", "created", "version", "commit", "committed")


def report(outcomes: Sequence[Outcome], run: RunInfo) -> dict[str, Any]:
    """Return a run as plain JSON values, raw samples included; never NaN."""
    return {
        "schema": SCHEMA,
        "run_id": run.id,
        "created": run.created,
        "version": run.version,
        "commit": run.commit,
        "committed": run.committed,
        "machine": dict(run.facts),
        "summary": count(outcomes, run),
        "problem": run.problem,
        "messages": list(run.messages),
        "measurements": [_measurement(outcome) for outcome in outcomes],
    }


def _measurement(outcome: Outcome) -> dict[str, Any]:
    data: dict[str, Any] = dict(codec.encode(outcome))
    if outcome.measurement is not None:
        launches = outcome.measurement.samples.step_seconds
        data["percentile_seconds"] = {f"p{q}": stats.percentile(launches, q) for q in (10, 50, 75, 90, 95)}
    return data


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A measurement and its run."""

    outcome: Outcome
    run: RunInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """A measurement that only the baseline run has."""

    name: str
    ranks: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredReport:
    """The content of one or several files."""

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
        """Return all runs as one: the one that ended last, with the counts, problems and messages of all, and without a
        commit if they are not of one."""
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
    """Read the measurements of all files; raises FileError."""
    return merged([report_of(path, load(path)) for path in paths])


def load(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file; raises FileError."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise FileError(path, f"cannot be read: {error.strerror}") from error
    if not data.strip():
        raise FileError(path, "the file is empty")
    try:
        content = codec.loads(data)
    except (ValueError, RecursionError) as error:
        raise FileError(path, f"is not JSON, or not all of it: {error}") from error
    if not isinstance(content, dict):
        raise FileError(path, "is not a report: it holds no JSON object")
    return content


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """The fields of a report, as `report` writes them; the last two are added by `ddpperf diff`."""

    run_id: str = ""
    created: str = ""
    version: str = ""
    commit: str = ""
    committed: str = ""
    machine: Mapping[str, Scalar] = field(default_factory=dict)
    summary: Mapping[str, int] = field(default_factory=dict)
    problem: str = ""
    messages: tuple[str, ...] = ()
    measurements: tuple[Outcome, ...]
    base: Mapping[str, str] = field(default_factory=dict)
    only_in_base: tuple[Gone, ...] = ()


def report_of(path: Path, content: dict[str, Any]) -> StoredReport:
    """Decode what `load` read from `path`; raises FileError, which names the field."""
    schema = content.get("schema")
    if type(schema) is not int or schema < 1 or not isinstance(content.get("measurements"), list):
        raise FileError(path, "is not a report of pytest --ddp-json: it has no schema and measurements")
    if schema > SCHEMA:
        raise FileError(path, f"has schema {schema}; this version of pytest-ddpperf reads up to {SCHEMA}: upgrade it")
    try:
        file = codec.decode(_File, content)
    except codec.CodecError as error:
        raise FileError(path, str(error)) from error
    for number, outcome in enumerate(file.measurements):
        if problem := _problem(outcome):
            raise FileError(path, f"measurements[{number}].{problem}")
    run = RunInfo(
        id=file.run_id,
        created=file.created,
        version=file.version,
        commit=file.commit,
        committed=file.committed,
        facts=file.machine,
        skipped=file.summary.get("skipped", 0),
        never_measured=file.summary.get("never_measured", 0),
        other_failures=file.summary.get("other_failures", 0),
        problem=file.problem,
        messages=file.messages,
    )
    base: dict[str, Any] = {name: file.base[name] for name in _BASE_FIELDS if name in file.base}
    return StoredReport(
        paths=(path,),
        runs=(run,),
        entries=tuple(Entry(outcome=outcome, run=run) for outcome in file.measurements),
        bases=(RunInfo(id=base.pop("run_id", ""), **base),) if base else (),
        only_before=file.only_in_base,
    )


def _problem(outcome: Outcome) -> str:
    """Return what is invalid and why, or ""."""
    other = outcome.baseline_side.measurement if outcome.baseline_side is not None else None
    for place, measurement in (("measurement", outcome.measurement), ("baseline_side.measurement", other)):
        if measurement is not None and (wrong := nonsense(measurement.samples)):
            return f"{place}.samples.{wrong}"
    verdicts = filter(None, (outcome.verdict, outcome.stored_verdict))
    limits = [*outcome.limits]
    for verdict in verdicts:
        limits += [c.limit for c in verdict.comparisons] + [c.limit for c in verdict.counters]
    unknown = [limit.metric for limit in limits if not _is_metric(limit)]
    return f"limits: {unknown[0]!r} is not a metric" if unknown else ""


def _is_metric(limit: Limit) -> bool:
    try:
        return limit.is_counter or 0 < limit.percentile < 100
    except ValueError:
        return False


def merged(reports: Iterable[StoredReport]) -> StoredReport:
    """Return several reports as if one run had measured it all. If several runs measured the same on one kind of
    machine, a rerun of a job for example, the run that ended last counts, and a message says so."""
    reports = list(reports)
    entries = [entry for report in reports for entry in report.entries]
    kept: dict[Hashable, list[int]] = {}  # places in `entries`, by what was asked for
    again: set[int] = set()
    for place, entry in sorted(enumerate(entries), key=lambda item: item[1].run.created):
        alike = kept.setdefault(_asked(entry), [])
        others = [other for other in alike if not _is_rerun(entry, entries[other])]
        if len(others) < len(alike):
            again.add(place)
        alike[:] = [*others, place]
    counting = sorted(chain.from_iterable(kept.values()))
    repeated = (
        f"{text.name(entries[place].outcome)}: measured in several reports: that of {entries[place].run.created} counts"
        for place in counting
        if place in again
    )
    measured = {gone_of(entry.outcome) for entry in entries}
    gone = dict.fromkeys(gone for report in reports for gone in report.only_before)
    return StoredReport(
        paths=tuple(path for report in reports for path in report.paths),
        runs=tuple(run for report in reports for run in report.runs),
        entries=tuple(entries[place] for place in counting),
        messages=(*(line for report in reports for line in report.messages), *_of_several_commits(reports), *repeated),
        bases=tuple({str(base): base for report in reports for base in report.bases}.values()),
        only_before=tuple(each for each in gone if len(reports) == 1 or each not in measured),
    )


def gone_of(outcome: Outcome) -> Gone:
    return Gone(name=text.name(outcome), ranks=text.ranks(outcome.plan))


def _asked(entry: Entry) -> Hashable:
    """Return what is known of a measurement even if it failed: test, group, and the model of the machine."""
    model = "cpu_model" if entry.outcome.plan.device == "cpu" else "device_model"
    return *_group(entry.outcome), entry.run.facts.get(model)


def _is_rerun(entry: Entry, before: Entry) -> bool:
    """Whether two measurements of which the same was asked are of different runs, and of one kind of machine if both
    have figures."""
    one, other = entry.outcome, before.outcome
    known = one.measurement is not None and other.measurement is not None
    return entry.run is not before.run and (not known or identity(one) == identity(other))


def _of_several_commits(reports: Sequence[StoredReport]) -> Iterator[str]:
    """Yield which report is of which commit, if they are not all of one."""
    commits: dict[str, list[str]] = {}
    for report in reports:
        for path, run in zip(report.paths, report.runs, strict=True):
            commits.setdefault(text.commit(run.commit) or "no commit", []).append(path.name)
    if len(commits) > 1:
        named = (f"{commit} ({', '.join(paths)})" for commit, paths in commits.items())
        yield f"these reports are not of one commit: {'; '.join(named)}"


def identity(outcome: Outcome) -> Hashable:
    """Return what two measurements of the same share: test, group and kind of machine."""
    key = outcome.measurement.environment.key if outcome.measurement is not None else {}
    return *_group(outcome), frozenset(key.items())


def _group(outcome: Outcome) -> tuple[Hashable, ...]:
    plan = outcome.plan
    return outcome.test, plan.world_size, plan.roles, plan.device, plan.backend
