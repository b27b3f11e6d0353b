"""What came of one pytest run: its outcomes, its reports. Knows no pytest."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from uuid import uuid4

from pytest_ddpperf import __version__
from pytest_ddpperf.git import commit_of, commit_time
from pytest_ddpperf.records import Outcome, RunInfo, Scalar, codec
from pytest_ddpperf.report import json_report, markdown, page, terminal
from pytest_ddpperf.report.summary import count


def begin(rootdir: Path) -> RunInfo:
    """A run of the code in `rootdir`: once, since what it saves makes the working tree another."""
    return RunInfo(id=uuid4().hex, version=__version__, commit=commit_of(rootdir), committed=commit_time(rootdir))


@dataclass(slots=True)
class Report:
    """All outcomes of a run, wherever they were measured: under xdist they come from the workers."""

    begun: RunInfo  # what is known of the run before its first test
    _outcomes: dict[tuple[str, str], Outcome] = field(default_factory=dict)  # by node id and label
    skipped: int = 0
    never_measured: list[str] = field(default_factory=list)  # node ids
    facts: Mapping[str, Scalar] = field(default_factory=dict)
    told: list[str] = field(default_factory=list)  # of the run, beyond its outcomes
    usage_error: str = ""  # found in a worker, or at the end, where pytest cannot say it
    refused: str = ""  # another one, for which pytest ran no test, and which it says itself
    other_failures: int = 0  # as in `RunInfo`
    unwritten: list[str] = field(default_factory=list)  # reports that could not be written, and why
    _ended: str = ""

    @property
    def outcomes(self) -> list[Outcome]:
        return list(self._outcomes.values())

    @property
    def empty(self) -> bool:
        return not (self._outcomes or self.skipped or self.never_measured or self.usage_error or self.unwritten)

    def end(self, failed: Collection[str] = (), refused: str = "") -> None:
        """No more will come. `failed`: node ids of all that failed, measured or not. If no test imported what differs,
        that is told; if none imported anything of the repository, nothing was compared. Those of which the other side
        has nothing say nothing of it."""
        self.refused = refused
        self.other_failures = len({*failed} - {outcome.nodeid for outcome in self.outcomes if outcome.fails})
        asked = (outcome.baseline_side for outcome in self.outcomes if outcome.stored_verdict is None)
        sides = [beside for beside in asked if beside is not None and not beside.error]
        if not sides or not all(beside.same for beside in sides):
            return
        told = f"no test imported a file that differs between {sides[0].version} and the code at hand"
        if any(beside.imported for beside in sides):
            self.told.append(told)
        else:
            self.usage_error = f"{told}, nor any file of this repository: is the package installed, but not editable?"

    def take(self, message: Mapping[str, Any]) -> None:
        """Add what one test has to say (`message` as made by `telling`)."""
        for data in message.get("outcomes", ()):
            outcome = codec.decode(Outcome, data)
            self._outcomes[outcome.nodeid, outcome.test.label] = outcome  # of reruns, the last counts
        self.skipped += bool(message.get("skipped"))
        self.never_measured += filter(None, [message.get("never_measured")])
        self.facts = message.get("facts") or self.facts
        self.usage_error = message.get("usage_error") or self.usage_error

    def header(self, verbosity: int) -> Iterator[str]:
        """Versions, backend and devices, from a probe rank."""
        yield from terminal.header(self.facts, verbose=verbosity > 0)

    def lines(self, verbosity: int, *, header: bool) -> Iterator[str]:
        """The table, what is to be told, and the counts; with the header where it was not shown before."""
        if header and self.facts:
            yield from self.header(verbosity)
        yield from terminal.table(self.outcomes, verbosity=verbosity)
        yield from filter(None, (*self.told, *self.unwritten, self.usage_error))
        if verbosity > 0:
            yield from terminal.expected_false_alarms(self.outcomes)
        yield from terminal.summary(self.outcomes, self.run, never_measured=self.never_measured)

    @property
    def run(self) -> RunInfo:
        """What all outcomes share; the run ends when that is asked for first, for all reports alike."""
        self._ended = self._ended or datetime.now(timezone.utc).isoformat(timespec="seconds")
        return replace(
            self.begun,
            created=self._ended,
            facts=self.facts,
            skipped=self.skipped,
            never_measured=len(self.never_measured),
            other_failures=self.other_failures,
            problem=self.refused or self.usage_error,
            messages=(*self.told, *terminal.unmeasured(self.never_measured)),
        )

    def markdown(self) -> str:
        """For people, where they look at a change."""
        run = self.run
        return markdown.report(
            self.outcomes, count(self.outcomes, run), problem=run.problem, messages=self._remarks(), run=run
        )

    def html(self) -> str:
        """A page; raises MissingExtraError."""
        run = self.run
        return page.html(self.outcomes, [run], problem=run.problem, messages=self._remarks())

    def _remarks(self) -> list[str]:
        """Of the run as a whole."""
        remarks = terminal.remarks(self.outcomes, never_measured=self.never_measured)
        return [*self.told, *remarks]

    def data(self) -> dict[str, Any]:
        """Everything, as plain JSON values."""
        return json_report.report(self.outcomes, self.run)


def telling(
    outcomes: list[Outcome],
    *,
    skipped: bool,
    never_measured: str,
    facts: Mapping[str, Scalar],
    usage_error: str,
) -> dict[str, Any]:
    """What one test has to say to the report, in plain values that may cross a process."""
    return {
        "outcomes": [codec.encode(outcome) for outcome in outcomes],
        "skipped": skipped,
        "never_measured": never_measured,
        "facts": dict(facts),
        "usage_error": usage_error,
    }
