"""How this pytest was called, and how a remote one is."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_ddpperf import __version__
from pytest_ddpperf.records import codec
from pytest_ddpperf.records.messages import StartPytest
from pytest_ddpperf.wire import boot
from pytest_ddpperf.wire.source_trees import Trees

# By how much of the command line follows an option as its value. Both sides would write the same files.
_FLAGS = {
    *("--ddp-save-baseline", "--ddp-extend-baseline", "--ddp-disable"),
    *("-x", "--exitfirst", "--lf", "--last-failed", "--ff", "--failed-first", "--nf", "--new-first"),
    *("--sw", "--stepwise", "--sw-skip", "--stepwise-skip", "--sw-reset", "--stepwise-reset", "--cache-clear"),
    *("--pdb", "--trace", "--no-cov", "--no-cov-on-fail", "--cov-append", "--cov-branch"),
    *("--self-contained-html", "--json-report"),
    *("--benchmark-autosave", "--benchmark-save-data", "--collect-only", "--co", "--fail-on-flaky"),
}
_WITH_VALUE = {
    *("--ddp-confirm", "--ddp-suite-plots", "--ddp-markdown", "--ddp-html", "--ddp-history", "--ddp-trace"),
    *("--ddp-json", "--ddp-against", "--ddp-against-setup", "--ddp-against-python", "--ddp-against-env"),
    *("--ddp-against-option", "--junitxml", "--junit-xml", "--junitprefix", "--junit-prefix", "--basetemp"),
    *("--maxfail", "--lfnf", "--last-failed-no-failures", "--pastebin", "--log-file", "--report-log", "--html"),
    *("--csv", "--json-report-file", "--alluredir", "--benchmark-json", "--benchmark-save"),
    *("--benchmark-compare-fail", "--cov-report", "--cov-config", "--cov-fail-under", "--cov-context"),
    # Who leads says how often a test is run again, and waits for no delay but its own.
    *("--reruns", "--reruns-delay", "--reruns-delay-backoff-factor", "--reruns-mode", "--force-reruns"),
    *("--max-suite-reruns", "--only-rerun", "--rerun-except", "--rerun-exclude-path"),
}
_WITH_OPTIONAL_VALUE = {"--cov", "--benchmark-compare", "--benchmark-histogram", "--debug"}

# Options whose values are paths, from where pytest is called: those of pytest that a remote one keeps.
_OF_PATHS = {"-c", "--config-file", "--rootdir", "--confcutdir", "--ignore", "--ignore-glob"}
# What comes before a path in a word: of "--option=path", "-cpath" and the "key=path" of -o; else nothing.
_OPTION_NAME = re.compile(r"^(?:-c(?=.)|[\w-]+=|)", re.DOTALL)


def remote_arguments(arguments: Sequence[str], tests: Collection[str]) -> list[str]:
    """Return the arguments of a remote pytest, without those that write, select or are about another version.

    `arguments` are all of this run's, those of the ini file and of PYTEST_ADDOPTS first; `tests` are those that
    name tests. Of a named test the whole file is collected: a parameter may exist on one side only.
    """
    kept, words = [], list(arguments)
    while words:
        word = words.pop(0)
        name, equals, _ = word.partition("=")
        if name in _FLAGS or word == "--":
            continue
        if name in _WITH_VALUE or name in _WITH_OPTIONAL_VALUE:
            value_follows = name in _WITH_VALUE or not (words and words[0].startswith("-"))
            if not equals and words and value_follows:
                words.pop(0)
            continue
        if re.fullmatch("-[a-z]*x[a-z]*", word) and set(word[1:]) <= set("xvqsl"):  # -xvs
            word = word.replace("x", "")
            if word == "-":
                continue
        kept.append(word.partition("::")[0] if word in tests else word)
    return kept


def spelt_out(words: Iterable[str], folder: Path) -> Iterator[str]:
    """With the lines of a file in place of "@file", as pytest reads them from where it is called. A pipe was read."""
    for word in words:
        if not word.startswith("@"):
            yield word
        elif (file := folder / word[1:]).is_file():
            yield from spelt_out(os.fsdecode(file.read_bytes()).splitlines(), folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """How this pytest was called."""

    arguments: tuple[str, ...]  # all of them: of the ini file, of the environment, of the command line
    tests: tuple[str, ...]  # those that name tests
    folder: Path  # where it was called
    rootdir: Path
    caches: bool  # whether pytest's cache is on
    kept: tuple[str, ...]  # as `Trees.kept`: tests, and the ini file
    ini: Path | None = None  # which pytest read
    own_tests: bool = False  # whether the other version runs its own tests and conftests
    # As they were before conftests and tests, which may have changed them by now; None: as they are.
    environ: Mapping[str, str] | None = None
    sys_path: Sequence[str] | None = None

    def arguments_in(self, trees: Trees) -> list[str]:
        """Return the arguments of the other version's pytest; the tests have the same paths in its tree."""
        arguments = remote_arguments(self.arguments, self.tests)
        if trees.base == trees.current:
            return arguments
        moved = self._moved(trees, arguments)
        ini = ["-c", _there(trees, self.ini)] if self.ini is not None and not self.own_tests else []
        return [*moved, f"--rootdir={_there(trees, self.rootdir)}", *ini]

    def start(self, trees: Trees, further: Sequence[str], folder: Path) -> StartPytest:
        """Return the first message to a remote pytest, which has `further` arguments and `folder` for itself. It may
        share a disk with this one, so it does not write into its cache."""
        cache = ["-o", f"cache_dir={folder / 'cache'}"] if self.caches else []
        return StartPytest(
            sys_path=boot.search_path(self.sys_path),
            version=__version__,
            trees=codec.encode(trees),
            arguments=[*self.arguments_in(trees), *further, "-o", "addopts=", *cache],
            argv=sys.argv,
            folder=str(folder),
            parent=os.getpid(),
            own_tests=self.own_tests,
        )

    def _moved(self, trees: Trees, words: Iterable[str]) -> Iterator[str]:
        """Yield the words of a command line, with paths in the repository moved to the version's tree: tests, values of
        `_OF_PATHS`, and whatever else is absolute."""
        tests = {test.partition("::")[0] for test in self.tests}
        before = ""
        for word in words:
            option = "" if word in tests else _OPTION_NAME.findall(word)[0]
            path = word[len(option) :]
            if os.path.isabs(path) or word in tests or {option.rstrip("="), before} & _OF_PATHS:
                path = self._path_in(trees, path)
            yield option + path
            before = word

    def _path_in(self, trees: Trees, path: str) -> str:
        """Return the path in the version's tree; the same one if it is relative and leads there, or where it did."""
        here, folder = os.path.join(self.folder, path), self.folder_in(trees)
        there = _there(trees, here)
        leads_there = os.path.commonpath([os.path.normpath(folder / path), trees.base]) == trees.base
        stays = there == here and folder == self.folder
        return path if not os.path.isabs(path) and (leads_there or stays) else there

    def folder_in(self, trees: Trees) -> Path:
        """Return the folder where the other version's pytest is called."""
        return Path(_there(trees, self.folder))


def _there(trees: Trees, path: Path | str) -> str:
    """Return the same path in the version's tree."""
    within = trees.within(os.path.realpath(path))
    return os.path.join(trees.base, within) if within is not None else str(path)
