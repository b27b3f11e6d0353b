"""The files of a history: one for each run, and one for each change point that was accepted.

A file is never rewritten and no two runs share a name, so branches that each add files merge
without a conflict.
"""

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

from pytest_ddpperf.baseline.content import environment_name
from pytest_ddpperf.files import write
from pytest_ddpperf.records import codec
from pytest_ddpperf.records.errors import FileError
from pytest_ddpperf.records.figure import Better
from pytest_ddpperf.records.metric import Metric, metric_of
from pytest_ddpperf.records.outcome import Outcome, RunInfo
from pytest_ddpperf.records.quantiles import launch_quantiles
from pytest_ddpperf.records.record import record
from pytest_ddpperf.records.samples import Facts, Interval, Reason, TestId

SCHEMA = 1
METRICS = ("p10", "p50", "p90")
# more add little to the mean of a run, and the file stays small
MAX_LAUNCHES = 16
# significant ones: a tenth of what the quietest machine can distinguish
_DIGITS = 5
# Facts that may explain a change point. The rest is in the JSON report of the run.
_RECORDED = "python torch cuda hip nccl driver host".split()
_VARIABLE = "env:"
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


@record
class HistoryFigure:
    """A figure of the user's own."""

    better: Better
    launches: tuple[float, ...]  # its mean in each


@record
class HistoryMeasurement:
    """One measurement of a run, without its samples."""

    test: TestId
    environment: str  # the name of its folder below the baselines
    # with "steps": the number of steps behind each percentile
    must_match: Facts
    recorded: Facts
    counters: Mapping[str, int]
    # by METRICS, one value per launch
    launch_seconds: Mapping[str, tuple[float, ...]]
    # the environment's own facts; {} in older entries
    key: Facts = field(default_factory=dict)
    # seconds, the mean over ranks, of those that are known
    phases: Mapping[str, float] = field(default_factory=dict)
    # of the user's own
    figures: Mapping[str, HistoryFigure] = field(default_factory=dict)
    why: str = ""  # its baseline was saved, as of `Recording`

    def kind(self, metric: str) -> Metric:
        """Return a metric in the direction that it has here."""
        own = self.figures.get(metric)
        return metric_of(metric, own.better if own else "")

    def launches(self, metric: str) -> tuple[float, ...]:
        """Return the figure of each launch, of which more is worse; () if there is none."""
        own = self.figures.get(metric)
        if own is None:
            return self.launch_seconds.get(metric, ())
        if own.better == "lower":
            return own.launches
        return tuple(1 / each for each in own.launches)


@record
class HistoryEntry:
    """One run of one commit."""

    commit: str
    committed: str  # ISO 8601, UTC
    created: str  # when the run ended, ISO 8601, UTC
    measurements: tuple[HistoryMeasurement, ...]


@record
class AcceptedChange:
    """A change point of one series that is meant to stay."""

    commit: str  # the first one that was measured after it
    test: TestId
    environment: str
    must_match: Facts
    metric: str
    change: Interval  # relative, with its 95 % interval when it was accepted
    why: str


@record
class BisectedChange:
    """A commit that `ddpperf bisect` found between two others, at which a test became slower."""

    test: TestId
    good: str
    bad: str
    commit: str
    subject: str


def make_entry(outcomes: Iterable[Outcome], run: RunInfo) -> HistoryEntry:
    """Return the measurements of a run that describe its commit alone."""
    measurements = [
        _measurement_of(outcome)
        for outcome in outcomes
        if _describes_its_commit(outcome)
    ]
    measurements.sort(key=lambda each: (each.environment, str(each.test)))
    return HistoryEntry(
        commit=run.commit,
        committed=run.committed,
        created=run.created,
        measurements=tuple(measurements),
    )


def _describes_its_commit(outcome: Outcome) -> bool:
    """Whether the launches were neither interleaved with another version nor slowed down or
    shortened on purpose."""
    if outcome.measurement is None or (
        outcome.baseline_side is not None and outcome.stored_verdict is None
    ):
        return False
    return outcome.verdict is None or outcome.verdict.reason not in (
        Reason.DISABLED,
        Reason.DEBUGGING_VARIABLE,
    )


def _measurement_of(outcome: Outcome) -> HistoryMeasurement:
    measured = outcome.measured
    environment = measured.environment
    samples = measured.samples
    # The asked number of steps only: percentiles depend on how many steps they are taken from, and
    # the length of a window depends on the speed.
    steps = min(outcome.plan.steps, samples.steps)
    launches = [
        launch[:steps] for launch in samples.step_seconds[:MAX_LAUNCHES]
    ]
    launch_seconds = {}
    for metric in METRICS:
        quantiles = launch_quantiles(launches, float(metric[1:]))
        launch_seconds[metric] = tuple(map(_rounded, quantiles))
    recorded = {
        name: value
        for name, value in environment.recorded.items()
        if name in _RECORDED or name.startswith(_VARIABLE)
    }
    phases = {
        name: _rounded(seconds)
        for name, seconds in measured.mean_phases.items()
        if seconds is not None
    }
    counters = {
        name: count
        for name, count in measured.counters.items()
        if count is not None
    }
    figures = {}
    for name, found in samples.figures.items():
        means = found.by_launch()[:MAX_LAUNCHES]
        if means and min(means) > 0:
            figures[name] = HistoryFigure(
                better=found.figure.better, launches=tuple(map(_rounded, means))
            )
    whys = [session.why for session in outcome.sessions]
    if outcome.saved:
        whys.append(outcome.why)
    return HistoryMeasurement(
        test=outcome.test,
        environment=environment_name(environment),
        key=environment.key,
        must_match={**environment.must_match, "steps": steps},
        recorded=recorded,
        counters=counters,
        launch_seconds=launch_seconds,
        phases=phases,
        figures=figures,
        why="; ".join(filter(None, whys)),
    )


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.{_DIGITS}g}")


# The folders of what is known of change points.
_FOLDERS: dict[type, str] = {
    AcceptedChange: "accepted",
    BisectedChange: "bisected",
}
T = TypeVar("T")


def why_unfit(run: RunInfo) -> str:
    """Return why a run cannot be part of a history, or "". File names and the order of runs depend
    on these fields."""
    if not run.commit or not run.committed:
        return "what was measured is not a commit of a git repository"
    if run.commit.endswith("-dirty"):
        return f"the working tree differs from commit {run.commit[:12]}: commit what is measured"
    return _invalid_field(run)


def _invalid_field(run: RunInfo | HistoryEntry) -> str:
    if not _COMMIT.fullmatch(run.commit):
        return f"commit: {run.commit!r:.80} is not the hash of a commit"
    for name, value in (("committed", run.committed), ("created", run.created)):
        try:
            is_utc = datetime.fromisoformat(value).utcoffset() == timedelta(0)
        except ValueError:
            is_utc = False
        if not is_utc:
            return f"{name}: {value!r:.80} is not a time in UTC in ISO 8601"
    return ""


def add_entry(folder: Path, entry: HistoryEntry) -> Path:
    """Write an entry and return its path; a file that exists already stays as it is. Raises
    FileError."""
    committed = datetime.fromisoformat(entry.committed)
    return _add(
        folder, f"{committed:%Y%m%dT%H%M%SZ}-{entry.commit[:12]}", entry
    )


def add_change(folder: Path, change: AcceptedChange | BisectedChange) -> Path:
    """Write an accepted change point, or what a search found, and return its path. Raises
    FileError."""
    return _add(folder / _FOLDERS[type(change)], change.commit[:12], change)


def _add(
    folder: Path,
    name: str,
    record: HistoryEntry | AcceptedChange | BisectedChange,
) -> Path:
    content = codec.dumps({"schema": SCHEMA, **codec.encode(record)})
    path = (
        folder
        / f"{name}-{hashlib.sha256(content.encode()).hexdigest()[:8]}.json"
    )
    try:
        if not path.exists():
            write(path, content)
    except OSError as error:
        raise FileError(path, f"cannot be written: {error.strerror}") from error
    return path


def read_entries(folder: Path) -> list[HistoryEntry]:
    """Return all runs in the order of their commits, runs of one second in the order in which they
    were measured.

    Raises FileError, which names the file.
    """
    entries = []
    for path, content in _read_files(folder):
        entry = _decode(HistoryEntry, path, content)
        problem = _invalid_field(entry)
        for measurement in entry.measurements:
            problem = problem or _invalid_durations(measurement)
        if problem:
            raise FileError(path, problem)
        entries.append(entry)
    return sorted(
        entries,
        key=lambda entry: (entry.committed, entry.created, entry.commit),
    )


def _invalid_durations(measurement: HistoryMeasurement) -> str:
    for metric in METRICS:
        seconds = measurement.launch_seconds.get(metric, ())
        if not seconds or min(seconds) <= 0:
            return f"{measurement.test}: launch_seconds.{metric} are not durations: {list(seconds)}"
    for name, own in measurement.figures.items():
        if not own.launches or min(own.launches) <= 0:
            return f"{measurement.test}: figures.{name}: {list(own.launches)} are not above 0"
    return ""


def read_changes(folder: Path, kind: type[T]) -> list[T]:
    """Return all AcceptedChange, or all BisectedChange; raises FileError, which names the file."""
    within = folder / _FOLDERS[kind]
    files = _read_files(within) if within.exists() else ()
    return [_decode(kind, path, content) for path, content in files]


def _read_files(folder: Path) -> Iterator[tuple[Path, bytes]]:
    path = folder
    try:
        for name in sorted(os.listdir(folder)):
            path = folder / name
            if name.endswith(".json"):
                yield path, path.read_bytes()
    except OSError as error:
        raise FileError(path, f"cannot be read: {error.strerror}") from error


def _decode(kind: type[Any], path: Path, content: bytes) -> Any:
    try:
        data = codec.loads(content)
        if not isinstance(data, dict) or data.pop("schema", None) != SCHEMA:
            raise FileError(
                path, f"is not a file of a history with schema {SCHEMA}"
            )
        return codec.decode(kind, data)
    except (ValueError, RecursionError) as error:
        raise FileError(
            path, f"is not a valid file of a history: {error}"
        ) from error
