"""The results of one run: its outcomes and its reports. Does not import pytest."""

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from pytest_ddpperf import files, text
from pytest_ddpperf.git import changed_files, checked_out, git, ignored_files
from pytest_ddpperf.history import entries
from pytest_ddpperf.options.settings import Settings
from pytest_ddpperf.records import codec
from pytest_ddpperf.records.errors import DdpPerfError, GitError
from pytest_ddpperf.records.guard import Loosened
from pytest_ddpperf.records.outcome import Outcome, RunInfo
from pytest_ddpperf.records.plan import Limits
from pytest_ddpperf.records.record import record
from pytest_ddpperf.records.samples import Facts
from pytest_ddpperf.report import guard, json_report, sentences, terminal
from pytest_ddpperf.version import __version__

# Of each of two commands, whose answers are for hints only: a run waits no longer for a repository
# that is slow to read, and does not ask again at its end.
_GIT_SECONDS = 3.0


def uncommitted_files(rootdir: Path) -> set[str] | None:
    """Return the files of the repository that are not as in its commit; None if git cannot say,
    or not soon."""
    try:
        return {*changed_files(rootdir, "HEAD", timeout=_GIT_SECONDS)}
    except GitError:
        return None


@record
class TestResults:
    """What one test adds to a run. Crosses from a worker of xdist's as plain values."""

    __test__ = False

    outcomes: tuple[Outcome, ...] = ()
    skipped: bool = False
    # its node id, if it passed without a call of its fixture
    never_measured: str = ""
    facts: Facts = field(default_factory=dict)  # of its machine
    usage_error: str = ""


@dataclass(slots=True)
class RunResults:
    """All outcomes of a run; with xdist they come from the workers."""

    begun: RunInfo  # what is known of the run before its first test
    # before the first test; None: not known
    uncommitted: Collection[str] | None = ()
    # by node id and label
    _outcomes: dict[tuple[str, str], Outcome] = field(default_factory=dict)
    skipped: int = 0
    never_measured: list[str] = field(default_factory=list)  # node ids
    facts: Facts = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)  # about the whole run
    sections: dict[str, tuple[str, ...]] = field(default_factory=dict)
    guard: tuple[Loosened, ...] = ()  # what is weaker than before
    too_weak: str = ""  # why that makes the run red; "" if it does not
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
            or self.messages
            or self.guard
        )

    def end(
        self,
        failed: Collection[str] = (),
        refused: str = "",
        changed: Sequence[str] = (),
    ) -> None:
        """Finish the run. `failed`: node ids of all failures, measured or not. `changed`: files
        that differ from the other version's.

        Add a message on those that no rank is known to have read, and a usage error if none
        imported any file of the repository. Tests without a baseline side, or with a reference,
        do not count."""
        self.refused = refused
        measured = {
            outcome.nodeid for outcome in self.outcomes if outcome.fails
        }
        # xdist's workers add the group of --dist loadgroup to a name
        names = {*failed} | {name.rpartition("@")[0] for name in failed}
        self.other_failures = len(failed) - len(names & measured)
        others = [each for each in self.outcomes if not each.has_reference]
        sides = [
            outcome.baseline_side
            for outcome in others
            if outcome.baseline_side is not None
            and outcome.stored_verdict is None
            and not outcome.baseline_side.error
        ]
        if not sides:
            return
        read: set[str] = set()
        for outcome in others:
            if outcome.baseline_side is not None:
                read.update(outcome.baseline_side.read)
        # a submodule was read if a file in it was
        read.update(
            str(folder) for file in [*read] for folder in Path(file).parents
        )
        unread = [file for file in changed if file not in read]
        if not any(side.imported or not side.same for side in sides):
            self.usage_error = (
                f"the run fails: no test imported what differs between {sides[0].version} and"
                " the working tree, nor any file of this repository: if tests measure its code,"
                " install it with pip install -e ."
            )
        elif unread:
            self.messages.append(
                f"no rank is known to have read what differs in {text.some(unread)}"
            )

    def note_unused(self, limits: Limits) -> None:
        """Add a message on limits of the run on figures of the user's own that no test has."""
        self.messages += sentences.unused_limits(limits, self.outcomes)

    def take(self, message: Mapping[str, Any]) -> None:
        """Add the results of one test, a TestResults in plain values."""
        results = codec.decode(TestResults, message)
        for outcome in results.outcomes:
            # of reruns, the last counts
            self._outcomes[outcome.nodeid, outcome.test.label] = outcome
        if results.skipped:
            self.skipped += 1
        if results.never_measured:
            self.never_measured.append(results.never_measured)
        if results.facts:
            # each of xdist's workers knows the places of its own tests
            both = [
                known.get("places", "") for known in (self.facts, results.facts)
            ]
            places = dict.fromkeys(
                "\n".join(map(str, both)).strip().splitlines()
            )
            self.facts = {**results.facts, "places": "\n".join(places)}
        if results.usage_error:
            self.usage_error = results.usage_error

    def note_files(self, rootdir: Path, baselines: Path) -> None:
        """Add messages on saved baselines that other clones will not have, or without their code,
        and on files that tests wrote. `baselines` is the folder of all."""
        saved = [each.baseline_path for each in self.outcomes if each.saved]
        with suppress(GitError):
            if saved and (ignored := ignored_files(rootdir, saved)):
                self.messages.append(
                    f"git ignores {text.some(ignored, 1)}: other clones have no baseline: change"
                    " .gitignore, or name another folder with --ddp-baseline-dir"
                )
        if self.uncommitted is None:
            return
        now = uncommitted_files(rootdir)
        if now is None:
            return
        traces = [each.traces for each in self.outcomes if each.traces]
        folder = os.path.relpath(baselines, rootdir)
        # pytest-cov writes `.coverage` in every run
        own = (f"{folder}/", ".coverage", *traces)
        found = [file for file in sorted(now) if not file.startswith(own)]
        before = [file for file in found if file in self.uncommitted]
        new = [file for file in found if file not in self.uncommitted]
        if saved and before:
            self.messages.append(
                f"the baselines are of changes that are in no commit ({text.some(before, 3)}):"
                " commit both together"
            )
        if new:
            self.messages.append(
                f"files changed while tests ran: {text.some(new, 3)}: a program that resumes from"
                " its files does something else in its next launch (let it write to a temporary"
                " folder)"
            )

    def header(self, verbosity: int) -> Iterator[str]:
        """Yield versions, backend and devices, from a probe rank."""
        yield from terminal.header(
            self.facts, verbose=verbosity > 0, width=text.terminal_width()
        )

    def lines(self, verbosity: int, width: int) -> Iterator[str]:
        """Yield the table, the problems and the counts."""
        run = self.run
        every = [*run.messages, *self.unwritten, *guard.lines(run)]
        if self.usage_error:
            every.append(self.usage_error)
        yield from terminal.report(
            self.outcomes, run, every, verbosity=verbosity, width=width
        )

    @property
    def run(self) -> RunInfo:
        """Return what all outcomes share. The run ends at the first call, for all reports alike."""
        if not self._ended:
            self._ended = text.now()
        return replace(
            self.begun,
            created=self._ended,
            facts=self.facts,
            skipped=self.skipped,
            never_measured=len(self.never_measured),
            other_failures=self.other_failures,
            problem=self.refused or self.usage_error,
            messages=(
                *self.messages,
                *(
                    f"{nodeid}: never measured: it does not call its fixture"
                    for nodeid in self.never_measured
                ),
            ),
            guard=self.guard,
            too_weak=self.too_weak,
            sections=self.sections,
        )

    def stored(self) -> json_report.StoredReport:
        """Return the run as if its JSON had been read, for other reports."""
        return json_report.report_of(Path("run.json"), self.data())

    def data(self) -> dict[str, Any]:
        """Return all results as plain JSON values."""
        return json_report.report(self.outcomes, self.run)

    # --- reports that are files

    def write_files(self, settings: Settings, rootdir: Path) -> None:
        """Write the requested reports, and add to the history. What could not be written is in
        `unwritten`, and why."""
        from pytest_ddpperf.report import markdown, page

        reports: tuple[tuple[str, Path | None, Callable[[], str]], ...] = (
            ("json", settings.json_path, lambda: codec.dumps(self.data())),
            (
                "markdown",
                settings.markdown_path,
                lambda: markdown.report(self.stored()),
            ),
            ("html", settings.html_path, lambda: page.html(self.stored())),
        )
        for name, path, text_of in reports:
            if path is not None:
                with self._noting_errors(
                    f"--ddp-{name} {path} was not written"
                ):
                    files.write(path, text_of(), append=markdown.appends(path))
        if settings.history_dir is not None and not self.empty:
            with self._noting_errors("--ddp-history"):
                self.add_to_history(settings.history_dir, rootdir)

    @contextmanager
    def _noting_errors(self, what: str) -> Iterator[None]:
        """Let the summary say why a report was not written. Other reports are still written, but
        the run fails."""
        try:
            yield
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            if isinstance(error, OSError | DdpPerfError):
                why = getattr(error, "strerror", None) or str(error)
            self.unwritten.append(f"{what}: {why}")

    def add_to_history(self, folder: Path, measured: Path) -> None:
        """Add the measurements of the code in `measured` to the history in a folder, or say why
        not; raises FileError."""
        entry = entries.make_entry(self.outcomes, self.run)
        why = entries.why_unfit(self.run)
        if not entry.measurements:
            why = "no measurement of this commit alone can be added (see docs/history.md)"
        if not why:
            path = entries.add_entry(folder, entry)
            self.messages.append(
                f"--ddp-history: {text.several(len(entry.measurements), 'measurement')} added"
                f" as {path}"
            )
            return
        if not self.run.commit:
            try:
                git(measured, "rev-parse", "HEAD")
            except GitError as error:
                why += f": {' '.join(str(error).split())}"
        self.messages.append(f"--ddp-history: nothing was added: {why}")


def begin_results(
    rootdir: Path, sections: dict[str, tuple[str, ...]]
) -> RunResults:
    """Describe a run at its start: saved baselines would change the state of the working tree."""
    commit, committed = checked_out(rootdir)
    return RunResults(
        RunInfo(
            id=uuid4().hex,
            version=__version__,
            commit=commit,
            committed=committed,
        ),
        uncommitted_files(rootdir),
        sections=sections,
    )
