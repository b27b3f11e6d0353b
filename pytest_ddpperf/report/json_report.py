"""Write and read the JSON of a run (the schema is in docs/json.md): one report, or several, the
shards of a CI job."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from pytest_ddpperf import text
from pytest_ddpperf.baseline.content import nonsense
from pytest_ddpperf.records import codec, quantiles
from pytest_ddpperf.records.errors import FileError
from pytest_ddpperf.records.outcome import Outcome, RunInfo
from pytest_ddpperf.records.record import record
from pytest_ddpperf.report.summary import OF_RUNS, count

SCHEMA = 1
T = TypeVar("T")


def report(outcomes: Sequence[Outcome], run: RunInfo) -> dict[str, Any]:
    """Return a run as plain JSON values, raw samples included; never NaN."""
    data = codec.encode(run)
    for name in OF_RUNS:  # they are in the summary
        del data[name]
    return {
        "schema": SCHEMA,
        "run_id": data.pop("id"),
        "machine": data.pop("facts"),
        **data,
        "summary": count(outcomes, run),
        "measurements": [_measurement(outcome) for outcome in outcomes],
    }


def _measurement(outcome: Outcome) -> dict[str, Any]:
    data: dict[str, Any] = codec.encode(outcome)
    for name in ("verdict", "stored_verdict"):
        verdict = getattr(outcome, name)
        if verdict:
            data[name]["differences"] = list(verdict.differences)
            data[name]["dropped"] = list(verdict.dropped)
    if outcome.measurement:
        launches = outcome.measurement.samples.step_seconds
        percentiles = () if outcome.plan.command else (10, 50, 75, 90, 95)
        data["percentile_seconds"] = {
            f"p{q}": quantiles.percentile(launches, q) for q in percentiles
        }
        data["busy_share"] = outcome.measurement.busy_share
        data["mean_seconds"] = quantiles.mean(launches)
    return data


@record
class Entry:
    """A measurement and its run."""

    outcome: Outcome
    run: RunInfo


@record
class Gone:
    """A measurement that only the baseline run has."""

    name: str
    ranks: str


@record
class StoredReport:
    """The content of one or several files."""

    paths: tuple[Path, ...]
    runs: tuple[RunInfo, ...]
    # in the order of the files, each measurement once
    entries: tuple[Entry, ...]
    messages: tuple[str, ...] = ()  # about measurements that several files have
    bases: tuple[RunInfo, ...] = ()  # that `ddpperf diff` compared with
    only_before: tuple[Gone, ...] = ()  # that those have, and no file here

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        return tuple(entry.outcome for entry in self.entries)

    @property
    def run(self) -> RunInfo:
        """Return all runs as one: the one that ended last, with the counts, problems, messages and
        sections of all, and without a commit if they are not of one."""
        last = max(self.runs, key=lambda run: run.created)
        sections: dict[str, tuple[str, ...]] = {}
        for run in self.runs:
            for title, lines in run.sections.items():
                sections[title] = (*sections.get(title, ()), *lines)
        if len({run.commit for run in self.runs}) > 1:
            last = replace(last, commit="", committed="")
        problems = dict.fromkeys(
            run.problem for run in self.runs if run.problem
        )
        messages = dict.fromkeys(
            line for run in self.runs for line in run.messages
        )
        return replace(
            last,
            guard=tuple(
                dict.fromkeys(each for run in self.runs for each in run.guard)
            ),
            too_weak=next(
                (run.too_weak for run in self.runs if run.too_weak), ""
            ),
            skipped=sum(run.skipped for run in self.runs),
            never_measured=sum(run.never_measured for run in self.runs),
            other_failures=sum(run.other_failures for run in self.runs),
            problem="; ".join(problems),
            messages=tuple(messages),
            sections=sections,
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
        raise FileError(
            path, f"is not JSON, or not all of it: {error}"
        ) from error
    if not isinstance(content, dict):
        raise FileError(path, "is not a report: it holds no JSON object")
    return content


def report_of(path: Path, content: dict[str, Any]) -> StoredReport:
    """Decode what `load` read from `path`; raises FileError, which names the field."""
    schema, measurements = content.get("schema"), content.get("measurements")
    if (
        type(schema) is not int
        or schema < 1
        or not isinstance(measurements, list)
    ):
        raise FileError(
            path,
            "is not a report of pytest --ddp-json: it has no schema and measurements",
        )
    if schema > SCHEMA:
        raise FileError(
            path,
            f"has schema {schema}; this version of pytest-ddpperf reads up to {SCHEMA}: upgrade it",
        )
    counts = _table(path, content, "summary")
    run = _decode(path, RunInfo, _run_fields({**counts, **content}))
    outcomes = _decode(path, tuple[Outcome, ...], measurements, "measurements")
    for number, outcome in enumerate(outcomes):
        sides = {
            "measurement": outcome.measurement,
            "baseline_side.measurement": outcome.other_side,
        }
        for place, side in sides.items():
            if side and (problem := nonsense(side.samples)):
                raise FileError(
                    path, f"measurements[{number}].{place}.samples.{problem}"
                )
    base = _table(path, content, "base")
    gone = content.get("only_in_base", ())
    return StoredReport(
        paths=(path,),
        runs=(run,),
        entries=tuple(Entry(outcome=outcome, run=run) for outcome in outcomes),
        bases=(_decode(path, RunInfo, _run_fields(base), "base"),)
        if base
        else (),
        only_before=_decode(path, tuple[Gone, ...], gone, "only_in_base"),
    )


def _table(path: Path, content: Mapping[str, Any], name: str) -> dict[str, Any]:
    return _decode(path, dict[str, Any], content.get(name, {}), name)


def _run_fields(content: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **content,
        "id": content.get("run_id", ""),
        "facts": content.get("machine", {}),
    }


def _decode(path: Path, kind: type[T], data: object, place: str = "") -> T:
    try:
        return codec.decode(kind, data)
    except codec.CodecError as error:
        inner = error.path
        dot = "." if place and inner and not inner.startswith("[") else ""
        raise FileError(
            path, f"{place}{dot}{inner}: {error.problem}"
        ) from error


def merged(reports: Sequence[StoredReport]) -> StoredReport:
    """Return several reports as if one run had measured it all. If several runs measured the same
    on one kind of machine, a rerun of a job for example, the run that ended last counts, and a
    message says so."""
    entries = [entry for report in reports for entry in report.entries]
    by_end = sorted(entries, key=lambda entry: entry.run.created)
    latest = {_asked(entry): entry.run for entry in by_end}
    counting, repeated = [], set()
    for entry in entries:
        if entry.run is latest[_asked(entry)]:
            counting.append(entry)
        else:
            repeated.add(_asked(entry))
    messages = [line for report in reports for line in report.messages]
    runs = [run for report in reports for run in report.runs]
    commits = {text.commit(run.commit) or "no commit" for run in runs}
    if len(commits) > 1:
        messages.append(
            f"these reports are of several commits: {', '.join(sorted(commits))}"
        )
    for entry in counting:
        if _asked(entry) in repeated:
            messages.append(
                f"{text.name(entry.outcome)}: measured in several reports: that of"
                f" {entry.run.created} counts"
            )
    gone = dict.fromkeys(
        gone for report in reports for gone in report.only_before
    )
    if len(reports) > 1:
        for entry in entries:
            gone.pop(gone_of(entry.outcome), None)
    bases = {str(base): base for report in reports for base in report.bases}
    return StoredReport(
        paths=tuple(path for report in reports for path in report.paths),
        runs=tuple(run for report in reports for run in report.runs),
        entries=tuple(counting),
        messages=tuple(messages),
        bases=tuple(bases.values()),
        only_before=tuple(gone),
    )


def gone_of(outcome: Outcome) -> Gone:
    return Gone(name=text.name(outcome), ranks=text.ranks(outcome.plan))


def _asked(entry: Entry) -> Hashable:
    """Return what is known of a measurement even if it failed: test, group, and the model of the
    machine."""
    plan = entry.outcome.plan
    model = "cpu_model" if plan.device == "cpu" else "device_model"
    return *_group(entry.outcome), plan.nodes, entry.run.facts.get(model)


def identity(outcome: Outcome) -> Hashable:
    """Return what two measurements of the same share: test, group and kind of machine."""
    key = outcome.measurement.environment.key if outcome.measurement else {}
    return *_group(outcome), frozenset(key.items())


def _group(outcome: Outcome) -> tuple[Hashable, ...]:
    plan = outcome.plan
    return outcome.test, plan.world_size, plan.roles, plan.device, plan.backend
