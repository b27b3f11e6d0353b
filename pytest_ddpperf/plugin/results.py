"""The results of one run: its outcomes and its reports. Does not import pytest."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from uuid import uuid4

from pytest_ddpperf import text
from pytest_ddpperf.git import changed_files, checked_out, ignored_files
from pytest_ddpperf.records import codec
from pytest_ddpperf.records.errors import GitError
from pytest_ddpperf.records.outcome import Outcome, RunInfo
from pytest_ddpperf.records.samples import Scalar
from pytest_ddpperf.report import json_report, terminal
from pytest_ddpperf.text import terminal_width
from pytest_ddpperf.version import __version__


def describe_run(rootdir: Path) -> RunInfo:
    """Describe the run at its start: saved baselines would change the state of the working tree."""
    commit, committed = checked_out(rootdir)
    return RunInfo(
        id=uuid4().hex, version=__version__, commit=commit, committed=committed
    )


def uncommitted_files(rootdir: Path) -> set[str]:
    """Return the files of the repository that are not as in its commit; none if git cannot say."""
    with suppress(GitError):
        return {*changed_files(rootdir, "HEAD")}
    return set()


@dataclass(slots=True)
class RunResults:
    """All outcomes of a run; with xdist they come from the workers."""

    begun: RunInfo  # what is known of the run before its first test
    uncommitted: Collection[str] = ()  # files before the first test
    # by node id and label
    _outcomes: dict[tuple[str, str], Outcome] = field(default_factory=dict)
    skipped: int = 0
    never_measured: list[str] = field(default_factory=list)  # node ids
    facts: Mapping[str, Scalar] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)  # about the whole run
    sections: dict[str, tuple[str, ...]] = field(default_factory=dict)
    # found in a worker, or at the end, where pytest cannot say it
    usage_error: str = ""
    # another one, for which pytest ran no test, and which it says itself
    refused: str = ""
    other_failures: int = 0  # as in `RunInfo`
    # reports that could not be written, and why
    unwritten: list[str] = field(default_factory=list)
    _ended: str = ""

    @property
    def outcomes(self) -> list[Outcome]:
        return list(self._outcomes.values())

    @property
    def empty(self) -> bool:
        return not (
            self._outcomes
            or self.skipped
            or self.never_measured
            or self.usage_error
            or self.unwritten
        )

    def end(self, failed: Collection[str] = (), refused: str = "") -> None:
        """Finish the run. `failed`: node ids of all failures, measured or not.

        Add a message if no test imported a file that differs, and a usage error if none imported
        any file of the repository. Tests without a baseline side do not count."""
        self.refused = refused
        self.other_failures = len(
            {*failed} - {outcome.nodeid for outcome in self.outcomes if outcome.fails}
        )
        asked = (
            outcome.baseline_side
            for outcome in self.outcomes
            if outcome.stored_verdict is None
        )
        sides = [side for side in asked if side is not None and not side.error]
        if not sides or not all(side.same for side in sides):
            return
        reason = (
            f"no test imported a file that differs between {sides[0].version} and the working "
            "tree"
        )
        if any(side.imported for side in sides):
            self.messages.append(reason)
        else:
            self.usage_error = (
                f"{reason}, nor any file of this repository: is the package installed, but not"
                " editable?"
            )

    def take(self, message: Mapping[str, Any]) -> None:
        """Add the results of one test, in plain values."""
        for data in message.get("outcomes", ()):
            outcome = codec.decode(Outcome, data)
            # of reruns, the last counts
            self._outcomes[outcome.nodeid, outcome.test.label] = outcome
        self.skipped += bool(message.get("skipped"))
        self.never_measured += filter(None, [message.get("never_measured")])
        # each of xdist's workers knows the places of its own tests
        if facts := message.get("facts"):
            places = "\n".join(
                str(known.get("places") or "") for known in (self.facts, facts)
            ).splitlines()
            self.facts = {
                **facts,
                "places": "\n".join(dict.fromkeys(filter(None, places))),
            }
        self.usage_error = message.get("usage_error") or self.usage_error

    def note_files(self, rootdir: Path, baselines: Path) -> None:
        """Add messages on saved baselines that other clones will not have, or without their code,
        and on files that tests wrote. `baselines` is the folder of all."""
        saved = [each.baseline_path for each in self.outcomes if each.saved]
        own = (
            os.path.relpath(baselines, rootdir),
            *(each.traces for each in self.outcomes if each.traces),
        )
        found = [
            file
            for file in sorted(uncommitted_files(rootdir))
            if not file.startswith(own)
        ]
        before = [file for file in found if file in self.uncommitted]
        new = [file for file in found if file not in before]
        with suppress(GitError):
            if ignored := ignored_files(rootdir, saved):
                remedy = (
                    "change .gitignore, or name another folder with --ddp-baseline-dir"
                )
                self.messages.append(
                    f"git ignores {text.some(ignored, 1)}: other clones have no baseline: {remedy}"
                )
        if saved and before:
            self.messages.append(
                f"the baselines are of changes that are in no commit ({text.some(before, 3)}):"
                " commit both together"
            )
        if new:
            self.messages.append(
                f"new files since the tests began: {text.some(new, 3)}: a program that resumes from"
                " its files does something else in its next launch"
            )

    def header(self, verbosity: int) -> Iterator[str]:
        """Yield versions, backend and devices, from a probe rank."""
        yield from terminal.header(
            self.facts, verbose=verbosity > 0, width=terminal_width()
        )

    def lines(self, verbosity: int, width: int) -> Iterator[str]:
        """Yield the table, the problems and the counts."""
        messages = (
            (*self.messages, *terminal.unmeasured(self.never_measured))
            if verbosity >= 0
            else ()
        )
        every = tuple(filter(None, (*messages, *self.unwritten, self.usage_error)))
        yield from terminal.report(
            self.outcomes, self.run, every, verbosity=verbosity, width=width
        )

    @property
    def run(self) -> RunInfo:
        """Return what all outcomes share. The run ends at the first call, for all reports alike."""
        self._ended = self._ended or datetime.now(timezone.utc).isoformat(
            timespec="seconds"
        )
        return replace(
            self.begun,
            created=self._ended,
            facts=self.facts,
            skipped=self.skipped,
            never_measured=len(self.never_measured),
            other_failures=self.other_failures,
            problem=self.refused or self.usage_error,
            messages=(*self.messages, *terminal.unmeasured(self.never_measured)),
            sections=self.sections,
        )

    def stored(self) -> json_report.StoredReport:
        """Return the run as if its JSON had been read, for other reports."""
        return json_report.report_of(Path("run.json"), self.data())

    def data(self) -> dict[str, Any]:
        """Return all results as plain JSON values."""
        return json_report.report(self.outcomes, self.run)
