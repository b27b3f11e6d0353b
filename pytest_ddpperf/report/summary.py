"""A run in short: how many measurements have which verdict, and which come first. And verdicts for
CI services: GitHub's workflow commands, and properties of a test for JUnit XML."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum

from pytest_ddpperf import text
from pytest_ddpperf.git import first_changed_line
from pytest_ddpperf.records.outcome import Outcome, RunInfo
from pytest_ddpperf.records.samples import CounterChange, Status
from pytest_ddpperf.report import sentences
from pytest_ddpperf.verdict import stats

# The counts of a run by verdict, in the order of its last line: those that were compared, then the
# others.
_COMPARED = {
    "regressed": Status.REGRESSED,
    "passed": Status.PASS,
    "improved": Status.IMPROVED,
    "inconclusive": Status.INCONCLUSIVE,
}
_NOT_COMPARED = {
    "without_baseline": Status.NO_BASELINE,
    "incomparable": Status.INCOMPARABLE,
    "not_gated": Status.NOT_GATED,
    "failed": None,  # no figures: a rank failed, or a baseline could not be read
}
# These count tests, and come from the runs.
_OF_RUNS = ("skipped", "never_measured", "other_failures")


def count(outcomes: Sequence[Outcome], *runs: RunInfo) -> dict[str, int]:
    """Return how many outcomes were measured and compared, how many have which verdict, and the
    counts of the runs."""
    statuses = [
        outcome.verdict.status if outcome.verdict is not None else None
        for outcome in outcomes
    ]
    return {
        "measured": len(outcomes),  # failed ones included
        "compared": sum(statuses.count(status) for status in _COMPARED.values()),
        **{
            name: statuses.count(status)
            for name, status in (_COMPARED | _NOT_COMPARED).items()
        },
        **{name: sum(getattr(run, name) for run in runs) for name in _OF_RUNS},
    }


def last_line(
    outcomes: Sequence[Outcome],
    *runs: RunInfo,
    only_before: int = 0,
    with_cost: bool = False,
) -> str:
    """Return "compared with main (fe7daa7): 1 regressed, 2 passed (3 of 3 compared)".

    `only_before` is the number of measurements that only the baseline run has. `with_cost`: add
    what it took."""
    counts = count(outcomes, *runs)
    saved = sum(outcome.saved > 0 for outcome in outcomes)
    numbers = {
        name.replace("_", " "): counts[name] for name in (*_COMPARED, *_NOT_COMPARED)
    }
    numbers["not gated"] -= saved
    numbers["diverged"] = 0
    names = {status: name for name, status in _COMPARED.items()}
    for outcome in filter(sentences.is_red_by_loss, outcomes):
        assert outcome.verdict is not None, "it has a loss"
        numbers[names[outcome.verdict.status]] -= 1
        numbers["diverged"] += 1
    numbers["failed to measure"] = numbers.pop("failed")
    numbers |= {
        "saved": saved,
        "skipped": counts["skipped"],
        "never measured": counts["never_measured"],
    }
    parts = [f"{number} {what}" for what, number in numbers.items() if number]
    parts += [text.several(counts["other_failures"], "other failure")] * bool(
        counts["other_failures"]
    )
    parts += [f"{only_before} only in the base"] * bool(only_before)
    seconds = sum(outcome.seconds for outcome in outcomes) if with_cost else 0.0
    cost = f" in {seconds:.0f} s" if seconds >= 1 else ""
    waited = sum(outcome.waited_seconds for outcome in outcomes)
    cost += (
        f" ({waited:.0f} s of it waiting for other runs)"
        if cost and waited >= 1
        else ""
    )
    line = (
        f"{', '.join(parts) or 'nothing measured'} ({counts['compared']} of {counts['measured']}"
        f" compared){cost}"
    )
    missing = any(
        outcome.baseline_path
        for outcome in outcomes
        if outcome.verdict == Status.NO_BASELINE.value
    )
    advice = (
        ": record baselines with --ddp-save-baseline"
        if missing and not counts["compared"]
        else ""
    )
    return (
        f"compared with {_base(outcomes)}: {line}"
        if counts["compared"]
        else line + advice
    )


def _base(outcomes: Sequence[Outcome]) -> str:
    """Return what most reports name once: the other version, or stored baselines."""
    sides = (each.baseline_side for each in outcomes if each.stored_verdict is None)
    versions = {str(side.version) for side in sides if side is not None}
    if versions:
        return versions.pop() if len(versions) == 1 else "other versions"
    return (
        "baselines"
        if any(outcome.baseline_path for outcome in outcomes)
        else "the base"
    )


# Not compared, though nobody asked for that.
_UNINTENDED = ("debugging-variable", "no-supported-limit")


class Concern(IntEnum):
    """The attention that a measurement needs, most first."""

    FAILS = 0  # its test
    DOUBTFUL = 1  # its test passes, but not because all is well
    IMPROVED = 2
    NONE = 3


def concern(outcome: Outcome) -> Concern:
    if outcome.fails:
        return Concern.FAILS
    if outcome.verdict is None or outcome.verdict.diverged is not None:
        return Concern.DOUBTFUL
    status, reason = outcome.verdict.status, outcome.verdict.reason
    if status is Status.IMPROVED:
        return Concern.IMPROVED
    if status is Status.PASS or (
        status is Status.NOT_GATED and reason not in _UNINTENDED
    ):
        return Concern.NONE
    return Concern.DOUBTFUL


# None: not even measured.
_ORDER = (
    *(
        Status.REGRESSED,
        None,
        Status.INCONCLUSIVE,
        Status.INCOMPARABLE,
        Status.NO_BASELINE,
    ),
    *(Status.IMPROVED, Status.PASS, Status.NOT_GATED),
)


def worst_first(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return the worst first: by concern, verdict and the size of the change; what is alike stays
    in its order."""

    def key(outcome: Outcome) -> tuple[int, int, float]:
        verdict = outcome.verdict
        return (
            concern(outcome),
            _ORDER.index(verdict.status if verdict is not None else None),
            -_change_size(outcome),
        )

    return sorted(outcomes, key=key)


def _change_size(outcome: Outcome) -> float:
    """Return the largest change, of those that decided if any did; without direction if it is for
    the better."""
    verdict = outcome.verdict
    if verdict is None:
        return 0.0
    changes = [verdict.worst.change.estimate] if verdict.worst is not None else []
    changes += [
        counter.change
        for counter in verdict.counters
        if counter.status is verdict.status
    ]
    return max(
        map(abs, changes) if verdict.status is Status.IMPROVED else changes, default=0.0
    )


# GitHub shows ten of a kind and step, and drops the others without a word.
_SHOWN = 10

_COMMANDS = {
    Concern.FAILS: "error",
    Concern.DOUBTFUL: "warning",
    Concern.IMPROVED: "notice",
}

_LONGEST_LINE = 1_000  # characters


def annotated(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yield a workflow command for each of the worst ten; the last one says how many more there
    are."""
    concerning = [
        outcome
        for outcome in worst_first(outcomes)
        if concern(outcome) is not Concern.NONE
    ]
    shown, more = concerning[:_SHOWN], len(concerning) - _SHOWN
    for place, outcome in enumerate(shown, 1):
        last = (
            [f"and {text.several(more, 'more measurement')} to look at"]
            if more > 0 and place == _SHOWN
            else []
        )
        accept = [f"accept: {outcome.accept}"] if outcome.accept else []
        yield _command(outcome, [sentences.headline(outcome), *accept, *last])


def _command(outcome: Outcome, message: Sequence[str]) -> str:
    file, line = _place(outcome)
    properties = {
        "title": f"{sentences.verdict_of(outcome)}: {text.name(outcome)}",
        "file": file,
    }
    if line:
        properties["line"] = str(line)
    body = "\n".join(
        text.shortened(part, _LONGEST_LINE) for part in "\n".join(message).split("\n")
    )
    places = ",".join(
        f"{name}={_property(value)}" for name, value in properties.items()
    )
    return f"::{_COMMANDS[concern(outcome)]} {places}::{_data(body)}"


def _place(outcome: Outcome) -> tuple[str, int]:
    """Return the file and line to annotate: code that differs if it is known, else the test. Line 0
    is the whole file."""
    side = outcome.baseline_side
    if side is not None and side.differing:
        file = next(
            (found.file for found in outcome.findings if found.file), side.differing[0]
        )
        return file, first_changed_line(side.version.commit, file)
    return outcome.file or outcome.nodeid.partition("::")[0], outcome.line


def _data(value: str) -> str:
    """Escape a message as GitHub's toolkit does."""
    return value.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(value: str) -> str:
    """Escape a property, which a comma or a colon would end."""
    return _data(text.printable(value)).replace(":", "%3A").replace(",", "%2C")


_NAMES = (
    "verdict",
    "reason",
    "metric",
    "ratio",
    "interval",
    "resolution",
    "against",
    "against_commit",
    "p50",
)


def junit_names(label: str) -> tuple[str, ...]:
    """Return all properties that a measurement may have."""
    prefix = f"ddpperf.{label}." if label else "ddpperf."
    return tuple(prefix + name for name in _NAMES)


def junit_properties(outcome: Outcome) -> list[tuple[str, str]]:
    """Return ddpperf.verdict, .reason, .p50 (seconds); with a comparison .metric, .ratio (now /
    baseline), .interval (of the ratio), .resolution (the smallest detectable change); compared with
    another version .against and .against_commit.

    A named measurement has its name in the property's: ddpperf.forward.verdict.
    """
    prefix = f"ddpperf.{outcome.test.label}." if outcome.test.label else "ddpperf."
    values: dict[str, str] = {}
    if outcome.verdict is not None:
        values |= {"verdict": str(outcome.verdict), "reason": outcome.verdict.reason}
        shown = sentences.shown(outcome.verdict)
        if isinstance(shown, CounterChange):
            values |= {"metric": shown.limit.metric, "ratio": f"{1 + shown.change:.4f}"}
        elif shown is not None:
            values["metric"] = shown.limit.metric
            change = text.changed(shown)
            values["ratio"] = f"{1 + change.estimate:.4f}"
            values["interval"] = f"{1 + change.low:.4f}..{1 + change.high:.4f}"
            values["resolution"] = f"{text.resolution(shown):.4f}"
    if outcome.baseline_side is not None:
        version = outcome.baseline_side.version
        values |= {"against": str(version), "against_commit": version.commit}
    if outcome.measurement is not None:
        p50 = stats.percentile(outcome.measurement.samples.step_seconds, 50)
        values["p50"] = f"{p50:.9f}"
    return [(prefix + name, value) for name, value in values.items()]
