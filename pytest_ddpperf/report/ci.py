"""Verdicts for CI services: GitHub's workflow commands, and properties of a test for JUnit XML."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pytest_ddpperf.records.outcome import Outcome
from pytest_ddpperf.records.samples import CounterChange
from pytest_ddpperf.report import sentences, summary, text
from pytest_ddpperf.report.summary import Concern
from pytest_ddpperf.verdict import stats

# GitHub shows ten of a kind and step, and drops the others without a word.
_SHOWN = 10

_COMMANDS = {Concern.FAILS: "error", Concern.DOUBTFUL: "warning", Concern.IMPROVED: "notice"}

_LONGEST_LINE = 1_000  # characters


def annotated(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yield a workflow command for each of the worst ten; the last one says how many more there are."""
    concerning = [outcome for outcome in summary.worst_first(outcomes) if summary.concern(outcome) is not Concern.NONE]
    shown, more = concerning[:_SHOWN], len(concerning) - _SHOWN
    for place, outcome in enumerate(shown, 1):
        last = [f"and {text.several(more, 'more measurement')} to look at"] if more > 0 and place == _SHOWN else []
        accept = [f"accept: {outcome.accept}"] if outcome.accept else []
        yield _command(outcome, [sentences.headline(outcome), *accept, *last])


def _command(outcome: Outcome, message: Sequence[str]) -> str:
    file, line = _place(outcome)
    properties = {"title": f"{sentences.verdict_of(outcome)}: {text.name(outcome)}", "file": file}
    if line:
        properties["line"] = str(line)
    body = "\n".join(text.shortened(part, _LONGEST_LINE) for part in "\n".join(message).split("\n"))
    return (
        f"::{_COMMANDS[summary.concern(outcome)]} "
        f"{','.join(f'{name}={_property(value)}' for name, value in properties.items())}::{_data(body)}"
    )


def _place(outcome: Outcome) -> tuple[str, int]:
    """Return the file and line to annotate: code that differs if it is known, else the test. Line 0 is the whole
    file."""
    if outcome.baseline_side is not None and outcome.baseline_side.differing:
        return outcome.baseline_side.differing[0], 0
    return outcome.file or outcome.nodeid.partition("::")[0], outcome.line


def _data(value: str) -> str:
    """Escape a message as GitHub's toolkit does."""
    return value.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(value: str) -> str:
    """Escape a property, which a comma or a colon would end."""
    return _data(text.printable(value)).replace(":", "%3A").replace(",", "%2C")


_NAMES = ("verdict", "reason", "metric", "ratio", "interval", "resolution", "against", "against_commit", "p50")


def junit_names(label: str) -> tuple[str, ...]:
    """Return all properties that a measurement may have."""
    prefix = f"ddpperf.{label}." if label else "ddpperf."
    return tuple(prefix + name for name in _NAMES)


def junit_properties(outcome: Outcome) -> list[tuple[str, str]]:
    """Return ddpperf.verdict, .reason, .p50 (seconds); with a comparison .metric, .ratio (now / baseline), .interval
    (of the ratio), .resolution (the smallest detectable change); compared with another version .against and
    .against_commit.

    A named measurement has its name in the property's: ddpperf.forward.verdict.
    """
    prefix = f"ddpperf.{outcome.test.label}." if outcome.test.label else "ddpperf."
    values: dict[str, str] = {}
    if outcome.verdict is not None:
        values |= {"verdict": str(outcome.verdict), "reason": outcome.verdict.reason}
        worst = outcome.verdict.worst
        counted = sentences.shown(outcome.verdict)
        if isinstance(counted, CounterChange):
            values |= {"metric": counted.limit.metric, "ratio": f"{1 + counted.change:.4f}"}
        elif worst is not None:
            values["metric"] = worst.limit.metric
            change = text.changed(worst)
            values["ratio"] = f"{1 + change.estimate:.4f}"
            values["interval"] = f"{1 + change.low:.4f}..{1 + change.high:.4f}"
            values["resolution"] = f"{text.resolution(worst):.4f}"
    if outcome.baseline_side is not None:
        version = outcome.baseline_side.version
        values |= {"against": str(version), "against_commit": version.commit}
    if outcome.measurement is not None:
        p50 = stats.percentile(outcome.measurement.samples.step_seconds, 50)
        values["p50"] = f"{p50:.9f}"
    return [(prefix + name, value) for name, value in values.items()]
