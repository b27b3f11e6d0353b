"""What is to be looked at as annotations of a CI service, lines of its log that it shows beside the code: GitHub's
workflow commands. Writes nothing, and calls nobody."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pytest_ddpperf.records import Outcome
from pytest_ddpperf.report import failure, sentences, text, worst
from pytest_ddpperf.report.worst import Concern

# GitHub shows ten of a kind and step, and drops the others without a word.
_SHOWN = 10

_COMMANDS = {Concern.FAILS: "error", Concern.DOUBTFUL: "warning", Concern.IMPROVED: "notice"}

_LONGEST_LINE = 1_000  # characters


def annotated(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yield a workflow command for each of the worst ten; the last one says how many more there are."""
    concerning = [outcome for outcome in worst.first(outcomes) if worst.concern(outcome) is not Concern.NONE]
    shown, more = concerning[:_SHOWN], len(concerning) - _SHOWN
    for place, outcome in enumerate(shown, 1):
        last = [f"and {text.several(more, 'more measurement')} to look at"] if more > 0 and place == _SHOWN else []
        yield _command(outcome, [*_message(outcome), *last])


def _message(outcome: Outcome) -> Iterator[str]:
    yield sentences.sentence(outcome)
    yield from outcome.evidence
    if outcome.verdict is not None and outcome.verdict.status.compared:
        yield from failure.differences(outcome.verdict)
    yield from failure.remedy(outcome)


def _command(outcome: Outcome, message: Sequence[str]) -> str:
    file, line = _place(outcome)
    properties = {"title": f"{sentences.verdict_of(outcome)}: {text.name(outcome)}", "file": file}
    if line:
        properties["line"] = str(line)
    told = "\n".join(text.shortened(part, _LONGEST_LINE) for part in "\n".join(message).split("\n"))
    return (
        f"::{_COMMANDS[worst.concern(outcome)]} "
        f"{','.join(f'{name}={_property(value)}' for name, value in properties.items())}::{_data(told)}"
    )


def _place(outcome: Outcome) -> tuple[str, int]:
    """Where it is shown: at code that differs, which a reviewer sees, where that is known; else at the test. From the
    top of the repository; the line is 0 where it is all of the file."""
    if outcome.baseline_side is not None and outcome.baseline_side.differing:
        return outcome.baseline_side.differing[0], 0
    return outcome.file or outcome.nodeid.partition("::")[0], outcome.line


def _data(value: str) -> str:
    """As GitHub's toolkit escapes a message: it ends with its line."""
    return value.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(value: str) -> str:
    """As it escapes a property, which ends with a comma or the message's colons, too."""
    return _data(text.printable(value)).replace(":", "%3A").replace(",", "%2C")
