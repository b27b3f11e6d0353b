"""`ddpperf bisect`: which commit, or which fact of the environment, made a test slower? By
interleaved comparisons.

Each comparison is a pytest of its own, with --ddp-against. All compare with the working tree, which
nothing checks out.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import shutil
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pytest_ddpperf import git, text
from pytest_ddpperf.baseline import Store
from pytest_ddpperf.cli import console
from pytest_ddpperf.cli.comparisons import (
    Compared,
    NotMeasured,
    Runs,
    compare,
    difference,
    key_of,
    progress,
)
from pytest_ddpperf.history import bisection, entries
from pytest_ddpperf.records import codec
from pytest_ddpperf.records.outcome import Outcome
from pytest_ddpperf.records.plan import Limit
from pytest_ddpperf.records.samples import Comparison, Recording, Scalar, Status
from pytest_ddpperf.verdict import stats, times

_ABOUT = """\
Finds the commit at which a test became slower. It compares the fast and the slow version first,
then commits between them, each interleaved with the working tree, whose tests all have. Options
for pytest follow after --.
"""
# Looks at a commit take so many pairs of launches each, until all together decide.
_LAUNCHES = (8, 8, 16)
_WINDOW_SECONDS = 0.5
_STEPS = 10  # at least, so that even long steps take seconds, not minutes
# so that a comparison takes as many launches as are asked, whatever they show
_NO_LIMIT = "1000%"


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "bisect",
        help="find the commit that made a test slower",
        usage=(
            "%(prog)s [-h] [--good REF] [--bad REF] [--facts [--build CMD]] [...] TEST [-- PYTEST'S"
            " OPTIONS]"
        ),
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "test",
        metavar="TEST",
        help="the test, as pytest takes it: tests/test_step.py::test_train",
    )
    parser.add_argument(
        "--good",
        metavar="REF",
        help="a commit that is fast enough (default: the baseline's)",
    )
    parser.add_argument(
        "--bad",
        metavar="REF",
        help="a commit that is slower (default: the working tree)",
    )
    facts = (
        "keep the code, and compare with the variables and distributions that the baseline has"
        " otherwise"
    )
    parser.add_argument("--facts", action="store_true", help=facts)
    build = (
        "with --facts: a command that makes the environment {venv} with the distributions"
        " {requirements}"
    )
    parser.add_argument("--build", metavar="CMD", help=build)
    what = "the folder of baselines (default: baselines)"
    parser.add_argument(
        "--baseline-dir", type=Path, default=Path("baselines"), metavar="DIR", help=what
    )
    kept = "add the answer to the history in this folder: see ddpperf history"
    parser.add_argument("--history", type=Path, metavar="DIR", help=kept)
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help="write the answer as JSON, too"
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    # so that it ends the pytest that it started
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    runs = Runs(arguments.test, arguments.options)
    try:
        answer = (
            _of_facts(arguments, runs)
            if arguments.facts
            else _of_commits(arguments, runs)
        )
    except console.UsageError:
        # what stands in the way may be outside the repository, and soon be otherwise
        runs.forget()
        raise
    except KeyboardInterrupt:
        progress("")
        console.complain("interrupted: the same command goes on from here")
        raise
    progress("")
    console.say(answer.lines)
    if arguments.json is not None:
        console.write_json(arguments.json, {"test": arguments.test, **answer.data})
    runs.forget()
    return console.OK if answer.found else console.NAMED_VERDICT


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command found, in words and as JSON."""

    found: bool
    lines: Sequence[str]
    data: Mapping[str, Any]


# --- commits


def _of_commits(arguments: argparse.Namespace, runs: Runs) -> Answer:
    search = CommitSearch(arguments, runs)
    ends = search.compare_ends()
    if ends is None:
        return search.not_slower()
    search.split(ends)
    return search.answer(ends)


class CommitSearch:
    """The search for a commit, from the options of the command."""

    def __init__(self, arguments: argparse.Namespace, runs: Runs) -> None:
        """Raises GitError and UsageError."""
        self._runs, self._history, self._test = runs, arguments.history, arguments.test
        top, head = runs.top, git.commit_named(runs.top, "HEAD")
        good = git.commit_named(top, arguments.good or _fast_commit(arguments))
        bad = head if arguments.bad is None else git.commit_named(top, arguments.bad)
        is_changed = bool(git.changed_files(top, head))
        self._commits = [good, *git.first_parents(top, good, bad)]
        if arguments.bad is None and is_changed:
            self._commits.append("")  # the working tree
        if len(self._commits) == 1:
            raise console.UsageError(
                f"there is nothing between {good[:12]} and {self._named(-1)}"
            )
        # Whether the slow end is the working tree, with which all are compared.
        self._ends_here = self._commits[-1] == "" or (bad == head and not is_changed)
        self._first = list[Compared]()  # looks at both ends
        self._last = [Compared()] * self._ends_here
        # the measurement, and what of it, that is searched for
        self._slower: tuple[Outcome, Limit]
        self._key = ("", "")
        # of all commits that were measured
        self._seen: dict[int, stats.Difference] = {}

    def compare_ends(self) -> bisection.Bisection | None:
        """Compare both ends, again while the answer is open. Return None unless the test became
        slower beyond its limit. Raises UsageError."""
        for again in range(len(_LAUNCHES)):
            self._look_at_ends(again)
            rises = [*self._rises()]
            if slower := [each for each in rises if each[0]]:
                _, outcome, compared, found = min(
                    slower, key=lambda each: each[-1].whole.p_value()
                )
                self._slower, self._key = (
                    (outcome, compared.limit),
                    key_of(outcome, compared.limit),
                )
                return found
            if all(is_slower is False for is_slower, *_ in rises):
                break
        return None

    def _look_at_ends(self, again: int) -> None:
        """Add a comparison of both ends; raises UsageError."""
        try:
            for place, looks in ((0, self._first), (-1, self._last))[
                : 2 - self._ends_here
            ]:
                words = f"{len(self._runs.used) + 1}: comparing the ends"
                looks.append(
                    compare(
                        self._runs,
                        f"--ddp-against={self._commits[place]}",
                        again=again,
                        doing=words,
                    )
                )
        except NotMeasured as why:
            console.warn(self._runs.output())
            raise console.UsageError(f"the ends cannot be compared: {why}") from None

    def _rises(
        self,
    ) -> Iterator[tuple[bool | None, Outcome, Comparison, bisection.Bisection]]:
        """Yield what was compared in each measurement: whether it became slower, and its rise
        between the ends."""
        for outcome in self._first[-1].outcomes or self._last[-1].outcomes:
            for each in (
                outcome.verdict.comparisons if outcome.verdict is not None else ()
            ):
                with suppress(NotMeasured):
                    found = self._between_ends(key_of(outcome, each.limit))
                    bound = times.bound(each.limit, math.log(each.baseline_seconds))
                    yield found.became_slower(bound, each.level), outcome, each, found

    def _between_ends(self, key: tuple[str, str]) -> bisection.Bisection:
        """Return a search that has yet to begin; raises NotMeasured."""
        last = len(self._commits) - 1
        measured = {0: difference(self._first, key), last: difference(self._last, key)}
        return bisection.Bisection(last=last, measured=measured)

    def split(self, found: bisection.Bisection) -> None:
        """Measure commits until each gap is as small as it can be; raises UsageError.

        If CPU time rose, too, the first search is for where it did, since other work on the machine
        hardly changes it. But only a rise of step time is an answer: the second search, for that
        one, begins at the commits found.
        """
        first: list[int] = []
        with suppress(NotMeasured):
            key = self._key[0], times.CPU_TIME.metric
            by_cpu_time = self._between_ends(key)
            if 2 * by_cpu_time.whole.estimate > found.whole.estimate:
                self._search(by_cpu_time, key)
                first = [
                    place
                    for gap in by_cpu_time.gaps()
                    for place in (gap.before, gap.after)
                ]
                found.skipped = {
                    place: why
                    for place, why in by_cpu_time.skipped.items()
                    if place not in self._seen
                }
        self._search(found, self._key, first)

    def _search(
        self,
        found: bisection.Bisection,
        key: tuple[str, str],
        first: Sequence[int] = (),
    ) -> None:
        """Measure these commits `first`, then those between them."""
        places = iter(
            [place for place in dict.fromkeys(first) if place not in found.measured]
        )
        while (place := next(places, None) or found.next()) is not None:
            looks: list[Compared] = []
            left = len(first) if place in first else found.left()
            for launches in _LAUNCHES:
                try:
                    looks.append(
                        self._look(
                            place, launches, again=len(looks), doing=self._where(left)
                        )
                    )
                    self._seen[place] = difference(looks, self._key)
                    by_all = difference(looks, key)
                except NotMeasured as why:
                    found.skipped[place] = str(why)
                    break
                if found.decide(
                    place, by_all, one_side=place in first or launches == _LAUNCHES[-1]
                ):
                    break
            else:
                found.skipped[place] = bisection.UNDECIDED

    def _look(self, place: int, launches: int, *, again: int, doing: str) -> Compared:
        outcome, limit = self._slower
        steps = max(
            _STEPS, math.ceil(stats.steps_needed(limit.kind.percentile) / launches)
        )
        asked = (
            *(
                f"--ddp-launches={launches}",
                f"--ddp-max-launches={2 * max(launches, outcome.launches)}",
            ),
            *(f"--ddp-min-time={_WINDOW_SECONDS}", f"--ddp-steps={steps}"),
            *(
                f"--ddp-threshold={self._key[1]}:{_NO_LIMIT}",
                f"--ddp-against={self._commits[place]}",
            ),
        )
        return compare(self._runs, *asked, again=again, doing=doing)

    def _where(self, left: int) -> str:
        done = len(self._runs.used)
        more = max(left - 1, 1).bit_length()
        minutes = math.ceil(
            more * sum(self._runs.seconds) / max(len(self._runs.seconds), 1) / 60
        )
        when = f", {minutes} min" if minutes else ""
        return f"{done + 1} of about {done + more}: {text.several(left, 'commit')} left{when}"

    def _named(self, place: int) -> str:
        return self._commits[place][:12] or "the working tree"

    def not_slower(self) -> Answer:
        """Return why there is nothing to look for."""
        between, rises = f"from {self._named(0)} to {self._named(-1)}", [*self._rises()]
        why = [f"{self._test}: nothing to look for {between}", self._first[-1].same]
        if rises:
            judged = self._first[-1].slowest()[0].verdict if self._ends_here else None
            counters = (
                [each for each in judged.counters if each.status is Status.REGRESSED]
                if judged
                else []
            )
            rose = [
                f"{each.limit.metric} {each.baseline:,} -> {each.now:,}"
                for each in counters
            ]
            figures = [
                f"{each.limit.metric} {_interval(found.whole, each.level)}"
                for _, _, each, found in rises
            ]
            is_open = any(is_slower is None for is_slower, *_ in rises)
            said = (
                ": too noisy to decide whether it became"
                if is_open
                else " did not become"
            )
            only = (
                "; times did not rise beyond a limit, but counters did"
                if counters and not is_open
                else ""
            )
            why = [
                f"{self._test}{said} slower beyond its limit {between}{only}",
                ", ".join([*figures, *rose]),
            ]
        return Answer(
            found=False, lines=why, data={**self._ends, "commits": [], "found": []}
        )

    @property
    def _ends(self) -> dict[str, Any]:
        return {
            "good": self._commits[0],
            "bad": self._commits[-1],
            "metric": self._key[1],
        }

    def answer(self, found: bisection.Bisection) -> Answer:
        """Return what the search found; raises GitError and FileError."""
        top, level = self._runs.top, found.level
        commits: list[dict[str, Any]] = []
        rows = [("commit", "date", "slower than the first [range]", "subject")]
        measured = {**self._seen, **found.measured}
        for place in sorted({*measured, *found.skipped}):
            row = _described(top, self._commits[place])
            if place not in found.skipped:
                change = bisection.interval(
                    bisection.rise(measured[0], measured[place]), level
                )
                commits.append({**row, "change": codec.encode(change)})
                shown = text.interval(change) if place else "-"
            else:
                commits.append({**row, "skipped": found.skipped[place]})
                shown = f"passed over: {found.skipped[place]}"
            rows.append(
                (
                    self._named(place),
                    row["date"],
                    shown,
                    text.shortened(row["subject"], 60),
                )
            )
        lines = [
            (
                f"{self._test}: {self._key[1]} {_interval(found.whole, level)} from"
                f" {self._named(0)} to {self._named(-1)}"
            ),
            "",
        ]
        lines += [*text.aligned(rows, left=(2,)), ""]
        gaps = [self._gap(found, gap) for gap in found.gaps()]
        for words, _ in gaps:
            lines += words
        left = 1 - sum(each["share"] for _, each in gaps)
        if not gaps:
            lines.append(
                "this difference is not evident enough for a search: try again on a quieter machine"
            )
        elif left >= bisection.LEAST_PART:
            lines.append(
                f"the other {text.amount(left)} of it are smaller changes, or noise"
            )
        evidence = self._slower[0].evidence if self._first[-1].outcomes else ()
        lines += [
            f"the working tree, compared with {self._named(0)}: {'; '.join(evidence)}"
        ] * bool(evidence)
        cost = f"{len(self._runs.used)} comparisons, {sum(self._runs.seconds) / 60:.1f} min"
        lines.append(
            f"a wrong commit is named in at most {text.amount(bisection.ERROR_RATE)} of searches;"
            f" {cost}"
        )
        data = {
            **self._ends,
            "commits": commits,
            "found": [each for _, each in gaps],
            "evidence": list(evidence),
        }
        return Answer(
            found=bool(gaps),
            lines=lines,
            data={**data, "error_rate": bisection.ERROR_RATE},
        )

    def _gap(
        self, found: bisection.Bisection, gap: bisection.Gap
    ) -> tuple[list[str], dict[str, Any]]:
        """Return a gap in which the test became slower, in words and as JSON; it is added to the
        history."""
        before, after = self._commits[gap.before], self._commits[gap.after]
        change, part = (
            bisection.interval(gap.rise, found.level),
            gap.rise.estimate / found.whole.estimate,
        )
        row, files = (
            _described(self._runs.top, after),
            git.files_between(self._runs.top, before, after),
        )
        is_one = gap.after - gap.before == 1
        where = (
            f"at {self._named(gap.after)}"
            if is_one
            else f"after {before[:12]}, up to {self._named(gap.after)}"
        )
        lines = [
            f"slower {where}: {text.interval(change)}, {text.amount(min(part, 1.0))} of the change"
        ]
        if is_one and after:
            lines.append(
                f"  {row['author']}, {row['date']}: {text.shortened(row['subject'])}"
            )
        elif not is_one:
            lines.append(f"  any of these {gap.after - gap.before} commits may be it")
        lines.append(f"  changes {text.some(files)}")
        if self._history is not None and is_one and after:
            test, (good, *_, bad) = (
                replace(self._slower[0].test, label=""),
                self._commits,
            )
            record = entries.BisectedChange(
                test=test, good=good, bad=bad, commit=after, subject=row["subject"]
            )
            lines.append(
                f"  added to the history: {entries.add_change(self._history, record)}"
            )
        data = {
            "before": before,
            "change": codec.encode(change),
            "share": part,
            "files": files,
            "split": is_one,
        }
        return lines, {**row, **data}


def _interval(found: stats.Difference, level: float) -> str:
    return text.interval(bisection.interval(found, level))


def _described(top: Path, commit: str) -> dict[str, str]:
    author, date, subject = (
        git.described(top, commit) if commit else ("", "", "uncommitted changes")
    )
    return {"commit": commit, "author": author, "date": date, "subject": subject}


def _fast_commit(arguments: argparse.Namespace) -> str:
    session = _last_session(arguments)
    if not session.commit or session.commit.endswith("-dirty"):
        raise console.UsageError(
            "the baseline is not of a commit: name one with --good"
        )
    return session.commit


def _last_session(arguments: argparse.Namespace) -> Recording:
    """Return the newest session of the test's baselines; raises UsageError and BaselineError."""
    store, test, sessions = Store(arguments.baseline_dir), arguments.test, []
    for path in store.files() if store.root.is_dir() else ():
        baseline = store.read_file(path)
        named = f"{baseline.test.module}.py::{baseline.test.name}"
        if any(
            name == test or test.endswith(f"/{name}")
            for name in (named, named.partition("[")[0])
        ):
            sessions.append(baseline.sessions[-1])
    if not sessions:
        missing = f"{store.root} has no baseline of this test"
        raise console.UsageError(
            f"{missing}: name a fast commit with --good, or --baseline-dir"
        )
    return max(sessions, key=lambda session: session.created)


# --- facts


def _of_facts(arguments: argparse.Namespace, runs: Runs) -> Answer:
    """Compare the working tree with itself under each fact that the baseline has otherwise."""
    session = _last_session(arguments)
    outcomes = runs.run(
        f"--ddp-baseline-dir={arguments.baseline_dir}", "--ddp-baseline-missing=warn"
    ).outcomes
    measured = [each for each in outcomes if each.measurement is not None]
    if not measured:
        raise console.UsageError(f"{arguments.test} was not measured")
    facts = _facts(session, measured[0].measured.environment.recorded)
    rows, found = (
        [("fact", "before -> now", "change [range]", "verdict")],
        list[dict[str, Any]](),
    )
    for number, (name, before, now) in enumerate(facts, 1):
        progress(f"{number} of {len(facts)}: {name}")
        try:
            compared = compare(runs, _set_back(arguments, runs, name, before))
            if not compared.outcomes:
                raise NotMeasured("nothing differs")
            outcome, change = compared.slowest()
            cells = (
                f"{change.limit.metric} {text.interval(text.changed(change))}",
                str(outcome.verdict),
            )
        except NotMeasured as why:
            cells = "-", f"not measured: {why}"
        rows.append(
            (
                name.removeprefix(_VARIABLE),
                f"{before or 'unset'} -> {now or 'unset'}",
                *cells,
            )
        )
        found.append(
            {
                "fact": name,
                "before": before,
                "now": now,
                "change": cells[0],
                "verdict": cells[1],
            }
        )
    slower = [row for row in rows if row[3] == Status.REGRESSED.value]
    lines = (
        [*text.aligned(rows, left=(1, 2))]
        if facts
        else ["variables and distributions are as in the baseline"]
    )
    by = f"slower by {text.some([f'{row[0]} {row[1]}' for row in slower])}"
    lines += [
        "",
        f"{arguments.test}: {by if slower else 'no fact alone makes it slower beyond its limit'}",
    ]
    return Answer(found=bool(slower), lines=lines, data={"facts": found})


_VARIABLE = "env:"


def _facts(session: Recording, now: Mapping[str, Scalar]) -> list[tuple[str, str, str]]:
    """Return the variables and distributions that differ: name, before and now, "" for none."""
    from importlib import metadata  # costs more than all else here

    before = session.measurement.environment.recorded
    names = sorted(
        name
        for name in {*before, *now}
        if name.startswith(_VARIABLE) and before.get(name) != now.get(name)
    )
    facts = [
        (name, str(before.get(name) or ""), str(now.get(name) or "")) for name in names
    ]
    for name, distribution in sorted(session.distributions.items()):
        installed = ""
        with suppress(metadata.PackageNotFoundError):
            installed = metadata.version(name)
        if distribution.version and installed != distribution.version:
            facts.append((name, distribution.version, installed))
    return facts


def _set_back(arguments: argparse.Namespace, runs: Runs, name: str, before: str) -> str:
    """Return the option that compares with the fact as it was; raises NotMeasured."""
    if name.startswith(_VARIABLE):
        variable = name.removeprefix(_VARIABLE)
        if not before:
            raise NotMeasured(
                "the baseline had it unset: unset it, and compare with the baseline"
            )
        return f"--ddp-against-env={variable}={before}"
    if arguments.build is None:
        raise NotMeasured("--build makes an environment with it")
    venv = runs.folder / f"{name}-{before}"
    if not (venv / "built").exists():
        command = arguments.build.replace("{venv}", shlex.quote(str(venv)))
        command = command.replace("{requirements}", shlex.quote(f"{name}=={before}"))
        shutil.rmtree(venv, ignore_errors=True)  # of a build that was interrupted
        ended = git.run_whole(command, os.environ)
        if ended.returncode or not venv.is_dir():
            said = (
                (ended.stdout + ended.stderr)
                .decode(errors="replace")
                .strip()
                .splitlines()
            )
            raise NotMeasured(
                f"{command} failed: {said[-1] if said else 'it made no environment'}"
            )
        (venv / "built").touch()
    return f"--ddp-against-python={venv / 'bin/python'}"
