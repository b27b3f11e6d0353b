"""`ddpperf bisect`: which commit, or which fact of the environment, made a test slower? By
interleaved comparisons.

Each comparison is a pytest of its own, with --ddp-against. All compare with the working tree, which
nothing checks out.
"""

import argparse
import math
import os
import shlex
import shutil
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from pytest_ddpperf import git, text
from pytest_ddpperf.baseline import Store
from pytest_ddpperf.cli import console
from pytest_ddpperf.cli.comparisons import (
    Compared,
    Key,
    NotMeasured,
    Runs,
    compare,
    difference,
    follow,
    key_of,
)
from pytest_ddpperf.history import bisection, entries
from pytest_ddpperf.records import codec
from pytest_ddpperf.records.errors import DdpPerfError, GitError
from pytest_ddpperf.records.outcome import Outcome
from pytest_ddpperf.records.plan import Limit
from pytest_ddpperf.records.samples import Comparison, Facts, Recording, Status
from pytest_ddpperf.remote.torchrun import Role, role
from pytest_ddpperf.verdict import observed, stats
from pytest_ddpperf.version import __version__
from pytest_ddpperf.wire.variables import concealed

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
    parser.add_argument(
        "--facts",
        action="store_true",
        help=(
            "keep the code, and compare with the variables and distributions that the baseline has"
            " otherwise"
        ),
    )
    parser.add_argument(
        "--build",
        metavar="CMD",
        help=(
            "with --facts: a command that makes the environment {venv} with the distributions"
            " {requirements}"
        ),
    )
    console.add_baseline_dir(parser, "--baseline-dir")
    console.add_path(
        parser,
        "--history",
        "add the answer to the history in this folder: see ddpperf history",
        metavar="DIR",
    )
    console.add_path(parser, "--json", "write the answer as JSON, too")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    place = _place(arguments)
    # so that it ends the pytest that it started
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if arguments.build and not arguments.facts:
        raise console.UsageError(
            "--build is for --facts: for commits there is ddp_against_setup"
        )
    if place is not None and not place.leads:
        if place.follows:
            follow(arguments.test, arguments.options, place)
        return console.OK
    runs = Runs(arguments.test, arguments.options, place)
    search = _of_facts if arguments.facts else _of_commits
    try:
        answer = search(arguments, runs)
    except KeyboardInterrupt:
        console.progress("")
        console.complain("interrupted: the same command goes on from here")
        raise
    except DdpPerfError as error:
        runs.end_nodes()
        # what stands in the way may be outside the repository, and soon be otherwise
        if isinstance(error, console.UsageError):
            runs.forget()
        raise
    runs.end_nodes()
    console.progress("")
    console.say(answer.lines)
    if arguments.json is not None:
        content = {
            "schema": 1,
            "created": text.now(),
            "version": __version__,
            "test": arguments.test,
            **answer.data,
        }
        console.write(arguments.json, codec.dumps(content))
    runs.forget()
    return console.OK if answer.found else console.NAMED_VERDICT


def _place(arguments: argparse.Namespace) -> Role | None:
    """Return the place among several nodes, if torchrun started this process on each; raises
    UsageError and NodesError."""
    place = role(os.environ)
    is_step = os.environ.get("SLURM_STEP_NUM_TASKS", "1") != "1"
    if not place.hosted if place else is_step:
        raise console.UsageError(
            "bisect over several nodes has to be started by torchrun: it uses its agent's store"
        )
    if place is not None and arguments.facts:
        raise console.UsageError("--facts does not run over several nodes")
    return place


class Answer(NamedTuple):
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


class Rise(NamedTuple):
    """The rise of one metric between the ends."""

    became_slower: bool | None  # None if that is open
    outcome: Outcome
    comparison: Comparison
    search: bisection.Bisection  # which has yet to begin


class CommitSearch:
    """The search for a commit, from the options of the command."""

    def __init__(self, arguments: argparse.Namespace, runs: Runs) -> None:
        """Raises GitError and UsageError."""
        self._runs = runs
        self._history = arguments.history
        self._test = arguments.test
        top = runs.top
        head = git.commit_named(top, "HEAD")
        good = arguments.good or _fast_commit(arguments)
        try:
            good = git.commit_named(top, good)
            bad = git.commit_named(top, arguments.bad or head)
        except GitError as error:
            if git.is_shallow(top):
                raise GitError(
                    f"{error}; this clone is shallow: git fetch --unshallow brings all"
                ) from None
            raise
        is_changed = bool(git.changed_files(top, head))
        self._commits = [good, *git.first_parents(top, good, bad)]
        if arguments.bad is None and is_changed:
            self._commits.append("")  # the working tree
        if len(self._commits) == 1:
            raise console.UsageError(
                f"there is nothing between {good[:12]} and {self._named(-1)}"
            )
        # Whether the slow end is the working tree, with which all are compared.
        self._ends_here = self._commits[-1] == "" or (
            bad == head and not is_changed
        )
        # looks at both ends
        self._first: list[Compared] = []
        self._last: list[Compared] = []
        if self._ends_here:
            self._last.append(Compared())
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
            rises = list(self._rises())
            slower = [rise for rise in rises if rise.became_slower]
            if slower:
                found = min(
                    slower, key=lambda rise: rise.search.whole.p_value()
                )
                limit = found.comparison.limit
                self._slower = found.outcome, limit
                self._key = key_of(found.outcome, limit)
                return found.search
            if all(rise.became_slower is False for rise in rises):
                break
        return None

    def _look_at_ends(self, again: int) -> None:
        """Add a comparison of both ends; raises UsageError."""
        ends = [(0, self._first)]
        if not self._ends_here:
            ends.append((-1, self._last))
        try:
            for place, looks in ends:
                doing = f"{len(self._runs.used) + 1}: comparing the ends"
                against = f"--ddp-against={self._commits[place]}"
                looks.append(
                    compare(self._runs, against, again=again, doing=doing)
                )
        except NotMeasured as why:
            console.warn(self._runs.output())
            raise console.UsageError(
                f"the ends cannot be compared: {why}"
            ) from None

    def _rises(self) -> Iterator[Rise]:
        """Yield the rises between the ends, of all that was compared."""
        for outcome in self._first[-1].outcomes or self._last[-1].outcomes:
            if outcome.verdict is None:
                continue
            for each in outcome.verdict.comparisons:
                with suppress(NotMeasured):
                    search = self._between_ends(key_of(outcome, each.limit))
                    bound = observed.bound_of(each)
                    became_slower = search.became_slower(bound, each.level)
                    yield Rise(became_slower, outcome, each, search)

    def _between_ends(self, key: Key) -> bisection.Bisection:
        """Return a search that has yet to begin; raises NotMeasured."""
        last = len(self._commits) - 1
        return bisection.Bisection(
            last=last,
            measured={
                0: difference(self._first, key),
                last: difference(self._last, key),
            },
        )

    def split(self, found: bisection.Bisection) -> None:
        """Measure commits until each gap is as small as it can be; raises UsageError.

        If CPU time rose, too, the first search is for where it did, since other work on the machine
        hardly changes it. But only a rise of step time is an answer: the second search, for that
        one, begins at the commits found.
        """
        first: list[int] = []
        with suppress(NotMeasured):
            key = self._key[0], observed.CPU_TIME.metric
            by_cpu_time = self._between_ends(key)
            if 2 * by_cpu_time.whole.estimate > found.whole.estimate:
                self._search(by_cpu_time, key)
                for gap in by_cpu_time.gaps():
                    first += [gap.before, gap.after]
                for place, why in by_cpu_time.skipped.items():
                    if place not in self._seen:
                        found.skipped[place] = why
        self._search(found, self._key, first)

    def _search(
        self, found: bisection.Bisection, key: Key, first: Sequence[int] = ()
    ) -> None:
        """Measure these commits `first`, then those between them."""
        places = [
            place
            for place in dict.fromkeys(first)
            if place not in found.measured
        ]
        while (place := places.pop(0) if places else found.next()) is not None:
            looks: list[Compared] = []
            is_first = place in first
            doing = self._where(len(first) if is_first else found.left())
            for launches in _LAUNCHES:
                try:
                    looks.append(self._look(place, launches, len(looks), doing))
                    self._seen[place] = difference(looks, self._key)
                    by_all = difference(looks, key)
                except NotMeasured as why:
                    found.skipped[place] = str(why)
                    break
                one_side = is_first or launches == _LAUNCHES[-1]
                if found.decide(place, by_all, one_side=one_side):
                    break
            else:
                found.skipped[place] = bisection.UNDECIDED

    def _look(
        self, place: int, launches: int, again: int, doing: str
    ) -> Compared:
        outcome, limit = self._slower
        # a marker may allow no more than the first comparison took
        launches = min(launches, max(_LAUNCHES[0], outcome.launches))
        most = 2 * max(launches, outcome.launches)
        own = limit.kind.own_figure
        asked = [
            f"--ddp-launches={launches}",
            f"--ddp-max-launches={most}",
            f"--ddp-threshold={self._key[1]}:{'99%' if own else _NO_LIMIT}",
            f"--ddp-against={self._commits[place]}",
        ]
        # how often a program writes a figure of the user's own is not known
        if not own:
            # a marker's further limits need theirs
            needed = max(
                stats.steps_needed(each.kind.percentile)
                for each in (limit, *outcome.limits)
            )
            steps = max(_STEPS, math.ceil(needed / launches))
            asked += [
                f"--ddp-min-time={_WINDOW_SECONDS}",
                f"--ddp-steps={steps}",
            ]
        return compare(self._runs, *asked, again=again, doing=doing)

    def _where(self, left: int) -> str:
        done = len(self._runs.used)
        more = max(left - 1, 1).bit_length()
        seconds = self._runs.seconds
        when = ""
        if seconds:
            minutes = math.ceil(more * fmean(seconds) / 60)
            when = f", {minutes} min"
        return f"{done + 1} of about {done + more}: {text.several(left, 'commit')} left{when}"

    def _named(self, place: int) -> str:
        return self._commits[place][:12] or "the working tree"

    def not_slower(self) -> Answer:
        """Return why there is nothing to look for."""
        between = f"from {self._named(0)} to {self._named(-1)}"
        lines = [
            f"{self._test}: nothing to look for {between}",
            self._first[-1].same,
        ]
        rises = list(self._rises())
        if rises:
            figures = [
                _change(
                    rise.comparison.limit,
                    rise.search.whole,
                    rise.comparison.level,
                )
                for rise in rises
            ]
            rose = self._counters_that_rose()
            beyond = f"slower beyond its limit {between}"
            answer = f"{self._test} did not become {beyond}"
            if any(rise.became_slower is None for rise in rises):
                answer = f"{self._test}: too noisy to decide whether it became {beyond}"
            elif rose:
                answer += (
                    "; times did not rise beyond a limit, but counters did"
                )
            lines = [answer, ", ".join([*figures, *rose])]
        return Answer(False, lines, {**self._ends, "commits": [], "found": []})

    def _counters_that_rose(self) -> list[str]:
        if not self._ends_here:
            return []
        verdict = self._first[-1].slowest()[0].verdict
        assert verdict is not None
        return [
            f"{each.limit.metric} {each.baseline:,} -> {each.now:,}"
            for each in verdict.counters
            if each.status is Status.REGRESSED
        ]

    @property
    def _ends(self) -> dict[str, Any]:
        return {
            "good": self._commits[0],
            "bad": self._commits[-1],
            "metric": self._key[1],
        }

    def answer(self, found: bisection.Bisection) -> Answer:
        """Return what the search found; raises GitError and FileError."""
        whole = _change(self._slower[1], found.whole, found.level)
        rows, commits = self._rows(found)
        lines = [
            f"{self._test}: {whole} from {self._named(0)} to {self._named(-1)}",
            "",
            *text.aligned(rows, left=(2,)),
            "",
        ]
        gaps = []
        left = 1.0
        for gap in found.gaps():
            words, data = self._gap(found, gap)
            lines += words
            gaps.append(data)
            left -= data["share"]
        if not gaps:
            lines.append(
                "this difference is not evident enough for a search: try again on a quieter machine"
            )
        elif left >= bisection.LEAST_PART:
            lines.append(
                f"the other {text.amount(left)} of it are smaller changes, or noise"
            )
        evidence = self._slower[0].evidence if self._first[-1].outcomes else ()
        if evidence:
            lines.append(
                f"the working tree, compared with {self._named(0)}: {'; '.join(evidence)}"
            )
        lines.append(
            f"a wrong commit is named in at most {text.amount(bisection.ERROR_RATE)} of searches;"
            f" {len(self._runs.used)} comparisons, {sum(self._runs.seconds) / 60:.1f} min"
        )
        answer = {
            **self._ends,
            "commits": commits,
            "found": gaps,
            "evidence": list(evidence),
            "error_rate": bisection.ERROR_RATE,
        }
        # a search that passed over all commits between the ends knows no more than before
        is_narrowed = len(found.measured) > 2 or not found.skipped
        return Answer(bool(gaps) and is_narrowed, lines, answer)

    def _rows(
        self, found: bisection.Bisection
    ) -> tuple[list[Sequence[str]], list[dict[str, Any]]]:
        """Return a row for each commit, and the commits as JSON."""
        rows: list[Sequence[str]] = [
            ("commit", "date", "slower than the first [range]", "subject")
        ]
        commits = []
        measured = {**self._seen, **found.measured}
        for place in sorted({*measured, *found.skipped}):
            commit = _described(self._runs.top, self._commits[place])
            if place in found.skipped:
                commit["skipped"] = found.skipped[place]
                reason = text.shortened(found.skipped[place], 100)
                shown = f"passed over: {reason}"
            else:
                rise = bisection.rise(measured[0], measured[place])
                change = bisection.interval(rise, found.level)
                commit["change"] = codec.encode(change)
                shown = text.interval(change) if place else "-"
            subject = text.shortened(commit["subject"], 60)
            rows.append((self._named(place), commit["date"], shown, subject))
            commits.append(commit)
        return rows, commits

    def _gap(
        self, found: bisection.Bisection, gap: bisection.Gap
    ) -> tuple[list[str], dict[str, Any]]:
        """Return a gap in which the test became slower, in words and as JSON; it is added to the
        history."""
        before = self._commits[gap.before]
        after = self._commits[gap.after]
        change = bisection.interval(gap.rise, found.level)
        part = gap.rise.estimate / found.whole.estimate
        commit = _described(self._runs.top, after)
        files = git.files_between(self._runs.top, before, after)
        count = gap.after - gap.before
        where = f"at {self._named(gap.after)}"
        if count > 1:
            where = f"after {before[:12]}, up to {self._named(gap.after)}"
        share = text.amount(min(part, 1.0))
        lines = [
            f"slower {where}: {text.interval(change)}, {share} of the change"
        ]
        if count > 1:
            lines.append(f"  any of these {count} commits may be it")
        elif after:
            lines.append(
                f"  {commit['author']}, {commit['date']}: {text.shortened(commit['subject'])}"
            )
        lines.append(f"  changes {text.some(files)}")
        if self._history is not None and count == 1 and after:
            record = entries.BisectedChange(
                test=replace(self._slower[0].test, label=""),
                good=self._commits[0],
                bad=self._commits[-1],
                commit=after,
                subject=commit["subject"],
            )
            path = entries.add_change(self._history, record)
            lines.append(f"  added to the history: {path}")
        return lines, {
            **commit,
            "before": before,
            "change": codec.encode(change),
            "share": part,
            "files": files,
            "split": count == 1,
        }


def _change(limit: Limit, found: stats.Difference, level: float) -> str:
    change = text.changed_as(limit.kind, bisection.interval(found, level))
    return f"{limit.metric} {text.interval(change)}"


def _described(top: Path, commit: str) -> dict[str, Any]:
    author, date, subject = "", "", "uncommitted changes"
    if commit:
        author, date, subject = git.described(top, commit)
    return {
        "commit": commit,
        "author": author,
        "date": date,
        "subject": subject,
    }


def _fast_commit(arguments: argparse.Namespace) -> str:
    session = _last_session(arguments)
    if not session.commit or session.commit.endswith("-dirty"):
        raise console.UsageError(
            "the baseline is not of a commit: name one with --good"
        )
    return session.commit


def _last_session(
    arguments: argparse.Namespace, key: Facts | None = None
) -> Recording:
    """Return the newest session of the test's baselines: of those with this `key`, if there are
    any; raises UsageError and BaselineError."""
    store = Store(arguments.baseline_dir)
    test = arguments.test
    sessions = []
    for path in store.files() if os.path.isdir(store.root) else ():
        baseline = store.read_file(path)
        name = f"{baseline.test.module}.py::{baseline.test.name}"
        without_parameters, _, _ = name.partition("[")
        # of several world sizes, each has a baseline
        size = f"ws{baseline.environment.key.get('world_size')}]"
        sized = (
            f"{name[:-1]}-{size}" if name.endswith("]") else f"{name}[{size}"
        )
        if f"/{test}".endswith(
            (f"/{name}", f"/{without_parameters}", f"/{sized}")
        ):
            sessions.append(baseline.sessions[-1])
    if not sessions:
        raise console.UsageError(
            f"{store.root} has no baseline of this test: name a fast commit with --good, or"
            " --baseline-dir"
        )
    return max(
        sessions,
        key=lambda each: (
            each.measurement.environment.key == key,
            each.created,
        ),
    )


# --- facts


def _of_facts(arguments: argparse.Namespace, runs: Runs) -> Answer:
    """Compare the working tree with itself under each fact that the baseline has otherwise."""
    _last_session(arguments)  # else nothing needs to be measured
    outcomes = runs.run(
        f"--ddp-baseline-dir={arguments.baseline_dir}",
        "--ddp-baseline-missing=warn",
    ).outcomes
    measured = [each for each in outcomes if each.measurement is not None]
    if not measured:
        why = "; ".join(each.error for each in outcomes)
        why = why or "it failed, or was skipped"
        raise console.UsageError(f"{arguments.test} was not measured: {why}")
    here = measured[0].measured.environment
    facts = _facts(_last_session(arguments, here.key), here.recorded)
    rows = [("fact", "before -> now", "change [range]", "verdict")]
    found = []
    slower = []
    for number, (name, before, now) in enumerate(facts, 1):
        console.progress(f"{number} of {len(facts)}: {name}")
        change, verdict = _compare_with(arguments, runs, name, before)
        short_name = name.removeprefix(_VARIABLE)
        values = f"{before or 'unset'} -> {now or 'unset'}"
        rows.append((short_name, values, change, verdict))
        if verdict == Status.REGRESSED.value:
            slower.append(f"{short_name} {values}")
        found.append(
            {
                "fact": name,
                "before": before,
                "now": now,
                "change": change,
                "verdict": verdict,
            }
        )
    lines = ["variables and distributions are as in the baseline"]
    if facts:
        lines = list(text.aligned(rows, left=(1, 2)))
    answer = "no fact that was compared makes it slower beyond its limit alone"
    if slower:
        answer = f"slower by {text.some(slower)}"
    lines += ["", f"{arguments.test}: {answer}"]
    return Answer(bool(slower), lines, {"facts": found})


def _compare_with(
    arguments: argparse.Namespace, runs: Runs, name: str, before: str
) -> tuple[str, str]:
    """Return the change and the verdict where a fact is as it was."""
    try:
        compared = compare(runs, _set_back(arguments, runs, name, before))
        if not compared.outcomes:
            raise NotMeasured("nothing differs")
    except NotMeasured as why:
        return "-", f"not measured: {why}"
    outcome, comparison = compared.slowest()
    change = text.interval(text.changed(comparison))
    return f"{comparison.limit.metric} {change}", str(outcome.verdict)


_VARIABLE = "env:"


def _facts(session: Recording, now: Facts) -> list[tuple[str, str, str]]:
    """Return the variables and distributions that differ: name, before and now, "" for none."""
    from importlib import metadata  # costs more than all else here

    before = session.measurement.environment.recorded
    facts = [
        (name, str(before.get(name) or ""), str(now.get(name) or ""))
        for name in sorted({*before, *now})
        if name.startswith(_VARIABLE) and before.get(name) != now.get(name)
    ]
    for name, distribution in sorted(session.distributions.items()):
        installed = ""
        with suppress(metadata.PackageNotFoundError):
            installed = metadata.version(name)
        if distribution.version and installed != distribution.version:
            facts.append((name, distribution.version, installed))
    return facts


def _set_back(
    arguments: argparse.Namespace, runs: Runs, name: str, before: str
) -> str:
    """Return the option that compares with the fact as it was; raises NotMeasured."""
    if name.startswith(_VARIABLE):
        variable = name.removeprefix(_VARIABLE)
        if not before:
            raise NotMeasured(
                "the baseline had it unset: unset it, and compare with the baseline"
            )
        if before == concealed(variable, before):
            return f"--ddp-against-env={variable}={before}"
        raise NotMeasured("the baseline has only a digest of its value")
    if arguments.build is None:
        raise NotMeasured("--build makes an environment with it")
    venv = runs.folder / f"{name}-{before}"
    if not (venv / "built").exists():
        command = arguments.build.replace("{venv}", shlex.quote(str(venv)))
        command = command.replace(
            "{requirements}", shlex.quote(f"{name}=={before}")
        )
        # Remove what an interrupted build left.
        shutil.rmtree(venv, ignore_errors=True)
        ended = git.run_whole(command, os.environ)
        if ended.returncode or not venv.is_dir():
            output = (
                (ended.stdout + ended.stderr).decode(errors="replace").strip()
            )
            *_, last = output.splitlines() or ["it made no environment"]
            raise NotMeasured(f"{command} failed: {last}")
        (venv / "built").touch()
    return f"--ddp-against-python={venv / 'bin/python'}"
