"""`ddpperf baseline`: what is stored, what of it belongs to no test any more, what its code lacks to be measured."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path
from typing import Any

from pytest_ddpperf.baseline import Store
from pytest_ddpperf.cli import asked, console, stale
from pytest_ddpperf.records import Baseline
from pytest_ddpperf.records.errors import BaselineError
from pytest_ddpperf.report import stored, text

_PRUNE = """\
Without further options these are baselines of tests that are gone: their file is not there, or does not have their
name in it. --older-than and --environment, which together mean both, choose others instead.
"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("baseline", help="list, show and prune stored baselines", allow_abbrev=False)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    listed = _command(commands, "list", _list, "what is stored, by environment")
    _add_choice(listed)
    show = _command(commands, "show", _show, "a baseline in words")
    show.add_argument("files", type=Path, nargs="+", metavar="FILE")
    prune = _command(commands, "prune", _prune, "delete what belongs to no test any more", _PRUNE)
    _add_choice(prune)
    prune.add_argument("--older-than", type=_days, metavar="DAYS", help="those without a session of the last DAYS days")
    prune.add_argument(
        "--rootdir", type=Path, metavar="DIR", help="where pytest has its rootdir (default: what holds --baseline-dir)"
    )
    prune.add_argument("--yes", action="store_true", help="delete them; else they are only told")
    commits = _command(commands, "commits", _commits, "commits to fetch, so that suspicions can be settled")
    _add_choice(commits)


def _command(commands: Any, name: str, run: Any, words: str, description: str = "") -> argparse.ArgumentParser:
    told = f"{words[0].upper()}{words[1:]}. {description}"
    parser: argparse.ArgumentParser = commands.add_parser(name, help=words, description=told, allow_abbrev=False)
    parser.set_defaults(run=run)
    return parser


def _add_choice(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--baseline-dir",
        type=Path,
        default=Path("baselines"),
        metavar="DIR",
        help="where they are (default: baselines)",
    )
    parser.add_argument(
        "--environment", metavar="NAME", help="only those of it, which is a folder; * and ? as in a shell"
    )
    asked.add_k(parser, "tests")


def _days(value: str) -> float:
    try:
        days = float(value)
    except ValueError:
        days = -1.0
    if not 0 <= days < 1e6:  # nan is neither
        raise argparse.ArgumentTypeError(f"{value!r}: a number of days, from 0")
    return days


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """A baseline and where it is."""

    path: Path
    environment: str
    baseline: Baseline


class _Chosen:
    """The baselines that a command is about; what cannot be read is told, and ends it with status 4."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.store = Store(arguments.baseline_dir)
        self.status = console.OK
        self.modules: set[str] = set()  # of all that were read, those that -k leaves out too
        self._matches, self._environment = arguments.matches, arguments.environment

    def __iter__(self) -> Iterator[_Found]:
        files = [(path.relative_to(self.store.root).parts[0], path) for path in self.store.files()]
        names = dict.fromkeys(name for name, _ in files)
        chosen = {name for name in names if self._environment is None or fnmatchcase(name, self._environment)}
        if self._environment is not None and not chosen:
            have = ", ".join(names) or "none"
            raise console.UsageError(f"--environment {self._environment}: there is no such one; there are {have}")
        for name, path in files:
            if name not in chosen:
                continue
            try:
                baseline = self.store.read_file(path)
            except BaselineError as error:
                console.complain(f"error: {error}")
                self.status = console.USAGE_ERROR
                continue
            self.modules.add(baseline.test.module)
            if self._matches is None or self._matches(
                f"{baseline.test.module}::{baseline.test.name} {baseline.test.label}"
            ):
                yield _Found(path=path, environment=name, baseline=baseline)


def _list(arguments: argparse.Namespace) -> int:
    chosen = _Chosen(arguments)
    found = list(chosen)
    environments = 0
    for environment, of_it in groupby(found, key=lambda each: each.environment):
        console.say((*stored.table(environment, (each.baseline for each in of_it)), ""))
        environments += 1
    console.say([f"{text.several(len(found), 'baseline')} in {text.several(environments, 'environment')}"])
    return chosen.status


def _show(arguments: argparse.Namespace) -> int:
    for path in arguments.files:
        console.say(stored.one(path, Store(path.parent).read_file(path)))
    return console.OK


def _prune(arguments: argparse.Namespace) -> int:
    chosen = _Chosen(arguments)
    found = list(chosen)
    narrowed = arguments.older_than is not None or arguments.environment is not None
    why = _why_not_wanted if narrowed else _why_gone
    pruned = {each.path: words for each in found if (words := why(each, arguments))}
    if not narrowed:
        _refuse_all(chosen.modules, pruned, arguments)
    for path, words in pruned.items():
        if arguments.yes:
            chosen.store.remove(path)
        console.say([f"{'removed' if arguments.yes else 'would remove'} {path}: {words}"])
    of = f"{len(pruned)} of {text.several(len(found), 'baseline')}"
    if not pruned or arguments.yes:
        console.say([f"{of} removed"])
    else:
        console.say([f"{of} would be removed: --yes removes them"])
    return chosen.status


def _why_not_wanted(found: _Found, arguments: argparse.Namespace) -> str:
    if arguments.older_than is None:
        return f"environment {found.environment}"
    if not stale.is_older(found.baseline, arguments.older_than):
        return ""
    return f"last recorded {found.baseline.sessions[-1].created}"


def _why_gone(found: _Found, arguments: argparse.Namespace) -> str:
    return stale.why_gone(found.baseline.test, _rootdir(arguments))


def _rootdir(arguments: argparse.Namespace) -> Path:
    rootdir: Path = arguments.rootdir or arguments.baseline_dir.absolute().parent
    return rootdir


def _refuse_all(modules: set[str], pruned: dict[Path, str], arguments: argparse.Namespace) -> None:
    """Where not one test file of all `modules` is there it is not the tests that are gone."""
    if pruned and not any((_rootdir(arguments) / f"{module}.py").is_file() for module in modules):
        raise console.UsageError(
            f"no test file of these baselines is below {_rootdir(arguments)}: name pytest's rootdir with --rootdir"
        )


def _commits(arguments: argparse.Namespace) -> int:
    from pytest_ddpperf.against.origin import origin_of  # with all that measures

    chosen = _Chosen(arguments)
    fetch: dict[str, None] = {}
    notes: dict[str, int] = {}
    for each in chosen:
        session = each.baseline.sessions[-1]
        origin = origin_of(session, each.path.absolute(), chosen.store.root.absolute())
        if origin.commit:
            continue
        if origin.fetch.startswith("git fetch") and not session.commit.endswith("-dirty"):
            fetch[session.commit] = None
        else:
            why = f"{origin.why}: {origin.fetch} brings it" if origin.fetch else origin.why
            notes[why] = notes.get(why, 0) + 1
    console.say(fetch)
    for why, number in notes.items():
        console.complain(f"{text.several(number, 'baseline')}: {why}")
    return chosen.status
