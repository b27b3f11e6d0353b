"""A run in short: how many measurements have which verdict, and which come first. And verdicts for
CI services: GitHub's workflow commands, and properties of a test for JUnit XML."""

from collections import Counter
from collections.abc import Iterator, Sequence
from enum import IntEnum

from pytest_ddpperf import text
from pytest_ddpperf.git import first_changed_line
from pytest_ddpperf.records.outcome import (
    DIVERGED,
    FAILED,
    SAVED,
    Outcome,
    Outcomes,
    RunInfo,
)
from pytest_ddpperf.records.samples import CounterChange, Reason, Status
from pytest_ddpperf.report import sentences

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
}
# These count tests, and come from the runs.
OF_RUNS = "skipped never_measured other_failures".split()
# The last line counts what reports show.
_SHOWN = {
    **_COMPARED,
    **_NOT_COMPARED,
    "diverged": DIVERGED,
    "failed_to_measure": FAILED,
    "saved": SAVED,
}


def count(outcomes: Outcomes, *runs: RunInfo) -> dict[str, int]:
    """Return how many outcomes were measured and compared, how many have which verdict, and the
    counts of the runs. Those that failed have no figures: a rank failed, or a baseline could not be
    read."""
    verdicts = [each.verdict for each in outcomes if each.verdict]
    statuses = Counter(verdict.status for verdict in verdicts)
    by_name = {
        name: statuses[status]
        for name, status in (_COMPARED | _NOT_COMPARED).items()
    }
    return {
        "measured": len(outcomes),  # failed ones included
        "compared": sum(by_name[name] for name in _COMPARED),
        **by_name,
        "diverged": sum(each.shown_status == DIVERGED for each in outcomes),
        "failed": len(outcomes) - len(verdicts),
        **{name: sum(getattr(run, name) for run in runs) for name in OF_RUNS},
    }


def last_line(
    outcomes: Outcomes,
    *runs: RunInfo,
    only_before: int = 0,
    with_cost: bool = False,
) -> str:
    """Return "compared with main (fe7daa7): 1 regressed, 2 passed (3 of 3 compared)".

    `only_before` is the number of measurements that only the baseline run has. `with_cost`: add
    what it took."""
    counts = count(outcomes, *runs)
    shown = Counter(outcome.shown_status for outcome in outcomes)
    numbers = {name: shown[status] for name, status in _SHOWN.items()}
    numbers["skipped"] = counts["skipped"]
    numbers["never_measured"] = counts["never_measured"]
    parts = [
        f"{number} {name.replace('_', ' ')}"
        for name, number in numbers.items()
        if number
    ]
    if counts["other_failures"]:
        parts.append(text.several(counts["other_failures"], "other failure"))
    if only_before:
        parts.append(f"{only_before} only in the base")
    cost = _cost(outcomes) if with_cost else ""
    compared = f"{counts['compared']} of {counts['measured']} compared"
    unreached = sum(map(sentences.is_unreached, outcomes))
    if unreached:
        compared += f", {unreached} unreached by the change"
    line = f"{', '.join(parts) or 'nothing measured'} ({compared}){cost}"
    if counts["compared"]:
        return f"compared with {_base(outcomes)}: {line}"
    for outcome in outcomes:
        if outcome.shown_status == Status.NO_BASELINE and outcome.baseline_path:
            return f"{line}: record baselines with --ddp-save-baseline"
    return line


def _cost(outcomes: Outcomes) -> str:
    seconds = sum(outcome.seconds for outcome in outcomes)
    waited = sum(outcome.waited_seconds for outcome in outcomes)
    if seconds < 1:
        return ""
    if waited < 1:
        return f" in {seconds:.0f} s"
    return f" in {seconds:.0f} s ({waited:.0f} s of it waiting for other runs)"


def _base(outcomes: Outcomes) -> str:
    """Return what most reports name once: the other version or stored baselines, and references of
    tests."""
    others = [each for each in outcomes if not each.has_reference]
    sides = (
        each.baseline_side for each in others if each.stored_verdict is None
    )
    versions = {str(side.version) for side in sides if side}
    found: list[str] = []
    if versions:
        found += versions if len(versions) == 1 else ["other versions"]
    elif any(outcome.baseline_path for outcome in others):
        found.append("baselines")
    references = len(outcomes) - len(others)
    if references:
        found.append("the reference" if references == 1 else "references")
    return " and ".join(found) or "the base"


# Not compared, though nobody asked for that.
_UNINTENDED = (Reason.DEBUGGING_VARIABLE, Reason.NO_SUPPORTED_LIMIT)


class Concern(IntEnum):
    """The attention that a measurement needs, most first."""

    FAILS = 0  # its test
    DOUBTFUL = 1  # its test passes, but not because all is well
    IMPROVED = 2
    NONE = 3


def concern(outcome: Outcome) -> Concern:
    if outcome.fails:
        return Concern.FAILS
    if outcome.verdict is None or outcome.verdict.diverged:
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
    Status.REGRESSED,
    None,
    Status.INCONCLUSIVE,
    Status.INCOMPARABLE,
    Status.NO_BASELINE,
    Status.IMPROVED,
    Status.PASS,
    Status.NOT_GATED,
)


def concerning(outcomes: Outcomes) -> list[Outcome]:
    """Return those that need attention, the worst first."""
    return [
        each
        for each in worst_first(outcomes)
        if concern(each) is not Concern.NONE
    ]


def worst_first(outcomes: Outcomes) -> list[Outcome]:
    """Return the worst first: by concern, verdict and the size of the change; what is alike stays
    in its order."""

    def key(outcome: Outcome) -> tuple[int, int, float]:
        status = outcome.verdict.status if outcome.verdict else None
        return concern(outcome), _ORDER.index(status), -_change_size(outcome)

    return sorted(outcomes, key=key)


def _change_size(outcome: Outcome) -> float:
    """Return the change that is shown; without direction if it is for the better."""
    shown = outcome.shown
    if shown is None:
        return 0.0
    change = (
        shown.change
        if isinstance(shown, CounterChange)
        else shown.change.estimate
    )
    return abs(change) if outcome.verdict == Status.IMPROVED else change


# GitHub shows so many of a kind and step, and drops the others without a word.
MOST_COMMANDS = 10

_COMMANDS = {
    Concern.FAILS: "error",
    Concern.DOUBTFUL: "warning",
    Concern.IMPROVED: "notice",
}

_LONGEST_LINE = 1_000  # characters


def annotated(outcomes: Outcomes, most: int = MOST_COMMANDS) -> Iterator[str]:
    """Yield a workflow command for each of the worst; the last one says how many more there are."""
    ordered = concerning(outcomes)
    more = len(ordered) - most
    for place, outcome in enumerate(ordered[:most], 1):
        message = [sentences.headline(outcome)]
        if outcome.accept:
            is_compared = sentences.decided_on(outcome) is not None
            verb = "accept" if is_compared else "record"
            message.append(f"{verb}: {outcome.accept}")
        if more > 0 and place == most:
            message.append(
                f"and {text.several(more, 'more measurement')} to look at"
            )
        yield _command(outcome, message)


def _command(outcome: Outcome, message: Sequence[str]) -> str:
    file, line = _place(outcome)
    properties = {
        "title": f"{outcome.shown_status}: {text.name(outcome)}",
        "file": file,
    }
    if line:
        properties["line"] = str(line)
    places = ",".join(
        f"{name}={_property(value)}" for name, value in properties.items()
    )
    lines = "\n".join(message).split("\n")
    body = "\n".join(text.shortened(each, _LONGEST_LINE) for each in lines)
    return f"::{_COMMANDS[concern(outcome)]} {places}::{escaped(body)}"


def _place(outcome: Outcome) -> tuple[str, int]:
    """Return the file and line to annotate: code that differs if it is known, else the test. Line 0
    is the whole file."""
    side = outcome.baseline_side
    if side and side.differing:
        slower = [found.file for found in outcome.findings if found.file]
        file = [*slower, *side.differing][0]
        return file, first_changed_line(side.version.commit, file)
    return outcome.file or outcome.nodeid.partition("::")[0], outcome.line


def escaped(value: str) -> str:
    """Escape a message as GitHub's toolkit does."""
    return value.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(value: str) -> str:
    """Escape a property, which a comma or a colon would end."""
    return (
        escaped(text.printable(value)).replace(":", "%3A").replace(",", "%2C")
    )


def junit_prefix(label: str) -> str:
    """Return what the names of a measurement's properties have before their last dot."""
    return f"ddpperf.{label}" if label else "ddpperf"


def junit_properties(outcome: Outcome) -> list[tuple[str, str]]:
    """Return ddpperf.verdict, .reason, .p50 (seconds); with a comparison .metric, .ratio (now /
    baseline), .interval (of the ratio), .resolution (the smallest detectable change); compared with
    another version .against and .against_commit.

    A named measurement has its name in the property's: ddpperf.forward.verdict.
    """
    values: dict[str, str] = {}
    verdict = outcome.verdict
    if verdict:
        values["verdict"] = str(verdict)
        values["reason"] = str(verdict.reason)
        shown = verdict.shown
        if shown:
            values["metric"] = shown.limit.metric
        if isinstance(shown, CounterChange):
            values["ratio"] = f"{1 + shown.change:.4f}"
        elif shown:
            change = text.changed(shown)
            values["ratio"] = f"{1 + change.estimate:.4f}"
            values["interval"] = f"{1 + change.low:.4f}..{1 + change.high:.4f}"
            values["resolution"] = f"{text.resolution(shown):.4f}"
    if outcome.baseline_side:
        version = outcome.baseline_side.version
        values |= {"against": str(version), "against_commit": version.commit}
    if outcome.measurement:
        values["p50"] = f"{outcome.measurement.samples.p50:.9f}"
    prefix = junit_prefix(outcome.test.label)
    return [(f"{prefix}.{name}", value) for name, value in values.items()]
