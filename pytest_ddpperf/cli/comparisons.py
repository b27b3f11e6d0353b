"""Comparisons of the working tree with other versions, each by a run of pytest of its own: for
`ddpperf bisect`."""

import hashlib
import itertools
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import IO

from pytest_ddpperf import git, text
from pytest_ddpperf.cli import console
from pytest_ddpperf.history.bisection import SAME
from pytest_ddpperf.records.errors import NOTHING_DIFFERS, NodesError
from pytest_ddpperf.records.outcome import Outcome
from pytest_ddpperf.records.plan import Limit
from pytest_ddpperf.records.samples import Comparison, Reason, Status
from pytest_ddpperf.remote.process import START_SECONDS
from pytest_ddpperf.remote.torchrun import Role, TorchrunStore
from pytest_ddpperf.report import json_report, sentences
from pytest_ddpperf.verdict import observed, stats
from pytest_ddpperf.version import __version__

_END_SECONDS = 60.0  # for the other nodes to hear that the search is over


class NotMeasured(Exception):
    """Why a version could not be compared, on one line."""

    def __init__(self, why: str) -> None:
        super().__init__(text.shortened(" ".join(why.split())))


class Runs:
    """Runs of pytest on one test of the working tree.

    Their reports are kept in the user's cache until there is an answer, so that the same command
    goes on after it was interrupted."""

    def __init__(
        self, test: str, options: Sequence[str], place: Role | None = None
    ) -> None:
        """`place` is this node's among several. Raises GitError."""
        self.top = git.top_level(Path.cwd())
        self._test, self._options = test, options
        self._meetings = _meetings(place) if place else None
        try:
            home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
            cache = Path(home, "pytest-ddpperf")
            cache.mkdir(parents=True, exist_ok=True)
        except (OSError, RuntimeError) as error:
            raise console.UsageError(
                f"there is no folder for reports: {error}: name one with XDG_CACHE_HOME"
            ) from None
        same = (
            os.getcwd(),
            sys.executable,
            __version__,
            git.tree_of(self.top, cache),
            test,
            *options,
        )
        self.folder = cache / f"bisect-{_digest(*same)}"
        self._output = self.folder / "output"
        self._output.unlink(missing_ok=True)
        self.used = set[Path]()  # the reports that were asked for
        self.seconds: list[float] = []  # what each run of pytest took

    def run(
        self, *asked: str, again: int = 0, doing: str = ""
    ) -> json_report.StoredReport:
        """Return the report of a run with these options, that one or a further one. If there is
        none yet, it says what it is `doing`, and runs pytest. Raises UsageError if pytest did not
        come to measure."""
        path = self.folder / f"{_digest(*asked, str(again))}.json"
        self.used.add(path)
        if not path.exists():
            if doing:
                console.progress(doing)
            began = time.monotonic()
            try:
                self._pytest(path, asked)
            finally:
                console.progress("")
            self.seconds.append(time.monotonic() - began)
        return json_report.read([path])

    def _pytest(self, path: Path, asked: Sequence[str]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(".new")
        new.unlink(missing_ok=True)
        words = (
            self._test,
            "-q",
            "--color=no",
            "-o",
            f"cache_dir={self.folder / 'cache'}",
            f"--ddp-json={new}",
            "--ddp-confirm=never",
            *asked,
            *self._options,
        )
        meeting = next(self._meetings) if self._meetings else None
        with self._output.open("w") as file:
            _run(words, meeting, file)
        if not new.exists():
            raise console.UsageError(
                f"no report was written by pytest {shlex.join(words)}\n"
                + "\n".join(self.output()[-50:])
            )
        new.rename(path)

    def output(self) -> list[str]:
        """Return what the last run wrote, if one was taken now."""
        return (
            self._output.read_text(errors="replace").rstrip().splitlines()
            if self._output.exists()
            else []
        )

    def forget(self) -> None:
        """Remove the reports."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def end_nodes(self) -> None:
        """Let the other nodes end, if there are any."""
        if self._meetings:
            meeting = next(self._meetings)
            # one that is gone hears nothing, and does not change the answer
            with (
                suppress(NodesError),
                closing(TorchrunStore(meeting, _END_SECONDS, {})) as store,
            ):
                store.answer()


def follow(test: str, options: Sequence[str], place: Role) -> None:
    """Run pytest on this node whenever the first one does, until that has an answer. Raises
    GitError, as the first one does, and NodesError."""
    git.top_level(Path.cwd())
    for meeting in _meetings(place):
        with closing(TorchrunStore(meeting, START_SECONDS)) as store:
            found = store.answer()["found"]
        if not found:
            return
        _run((test, "-q", *options), meeting)


def _meetings(place: Role) -> Iterator[Role]:
    """Yield the place in each comparison, which has an id of its own in torchrun's store."""
    for number in itertools.count():
        yield replace(place, run=f"{place.run}-{number}")


def _run(
    words: Sequence[str], meeting: Role | None, output: IO[str] | None = None
) -> None:
    environ = {**os.environ}
    if meeting:
        environ["TORCHELASTIC_RUN_ID"] = meeting.run
    # A session of its own, so that Ctrl-C ends it once, and it can remove what it made.
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *words],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
        env=environ,
        preexec_fn=console.end_with_us(),
    )
    try:
        process.wait()
    except BaseException:
        process.send_signal(signal.SIGINT)
        process.wait()
        raise


def _digest(*words: str) -> str:
    return hashlib.sha256(os.fsencode("\0".join(words))).hexdigest()[:16]


Key = tuple[str, str]  # the label of a measurement, and a metric


@dataclass(frozen=True)
class Compared:
    """The working tree compared with another version."""

    # of the measurements; () if both versions are the same
    outcomes: Sequence[Outcome] = ()
    same: str = ""  # what is the same, in pytest's words

    @cached_property
    def logs(self) -> dict[Key, tuple[list[float], list[float]]]:
        """The logarithms of the working tree's launches and of the other version's, in pairs."""
        found = {}
        for outcome in self.outcomes:
            verdict, side = outcome.verdict, outcome.baseline_side
            if not verdict or not side or not side.measurement:
                continue
            sides = observed.alike([outcome.measured, side.measurement])
            now, other = sides
            limits = [each.limit for each in verdict.comparisons]
            cpu_time = observed.CPU_TIME  # where it is known, too
            if all(observed.has_figure(cpu_time, each) for each in sides):
                limits.append(cpu_time)
            for limit in limits:
                found[key_of(outcome, limit)] = observed.paired(
                    limit, now, other, side.stretches
                )
        return found

    def slowest(self) -> tuple[Outcome, Comparison]:
        """Return the measurement that differs most, of those that regressed if any did, with its
        largest change."""
        pairs = [
            (each, one) for each in self.outcomes for one in each.comparisons
        ]
        return max(
            pairs,
            key=lambda pair: (
                pair[0].verdict == "REGRESSED",
                pair[1].change.estimate,
            ),
        )


def key_of(outcome: Outcome, limit: Limit) -> Key:
    """Return what a limit is on, as a metric of time."""
    return outcome.test.label, limit.kind.timed_as or limit.metric


def difference(looks: Sequence[Compared], key: Key) -> stats.Difference:
    """Return how much longer the working tree takes than a version, as a logarithm, by all looks at
    it. The pairs that differ most have no part in it: a busy machine may slow down one launch of a
    pair. Raises NotMeasured."""
    if not looks[-1].outcomes:
        return SAME
    if not all(key in look.logs for look in looks):
        raise NotMeasured(f"{key[1]} was not compared")
    now, other = (
        [each for look in looks for each in look.logs[key][side]]
        for side in (0, 1)
    )
    return stats.paired(now, other, trim=observed.TRIM)


def compare(
    runs: Runs, *asked: str, again: int = 0, doing: str = ""
) -> Compared:
    """Compare as options ask. Measurements without a comparison are left out. Raises NotMeasured,
    and UsageError."""
    report = runs.run(*asked, again=again, doing=doing)
    for said in (report.run.problem, *report.run.messages):
        if NOTHING_DIFFERS in said:
            return Compared(same=said)
    if report.run.problem:
        raise NotMeasured(report.run.problem)
    if not report.outcomes:
        raise NotMeasured(
            "the test measured nothing: it failed, or was skipped"
        )
    if len({each.nodeid for each in report.outcomes}) > 1:
        named = text.some([each.nodeid for each in report.outcomes])
        raise console.UsageError(
            "several tests: name one of them, and if addopts names others, add `-- -o addopts=`:"
            f" {named}"
        )
    outcomes = [each for each in report.outcomes if not each.has_reference]
    if not outcomes:
        raise console.UsageError(
            "the test is compared with its reference, not with other commits"
        )
    compared = [
        each
        for each in outcomes
        if each.comparisons and each.verdict != Status.INCOMPARABLE
    ]
    if not compared:
        # what cannot be compared says more than what was not reached
        first = max(
            outcomes, key=lambda each: each.verdict == Status.INCOMPARABLE
        )
        verdict = first.verdict
        if verdict and verdict.reason is Reason.UNREACHED:
            return Compared(same="nothing that the test reads differs")
        raise NotMeasured(sentences.reason(first))
    return Compared(compared)
