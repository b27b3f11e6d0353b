"""The baseline side of a comparison with another version: how its pytest is called, as are those of
other nodes, and the proof that it is another."""

import math
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from pytest_ddpperf import text
from pytest_ddpperf.launch import Observer
from pytest_ddpperf.launch.paused_launch import dropping
from pytest_ddpperf.launch.template import Templates, read_at_import
from pytest_ddpperf.options.settings import Settings
from pytest_ddpperf.records import codec
from pytest_ddpperf.records.errors import (
    NOTHING_DIFFERS,
    AgainstError,
    BaseSideError,
    GitError,
)
from pytest_ddpperf.records.guard import ALL_FILES, Judged
from pytest_ddpperf.records.messages import (
    Deliver,
    Drop,
    Dropped,
    EndMeasurement,
    Launched,
    LaunchFailed,
    LeaveTest,
    MeasureAs,
    Paused,
    PauseLaunch,
    ReadyToMeasure,
    RunStretch,
    SampleStacks,
    ServeVersion,
    Sources,
    StartPytest,
    StretchDone,
    TakeLaunch,
    changed,
)
from pytest_ddpperf.records.plan import Function, Plan, Variables
from pytest_ddpperf.records.record import record
from pytest_ddpperf.records.samples import Digests, LaunchSamples
from pytest_ddpperf.remote.nodes import ConnectedNodes, OtherNodes
from pytest_ddpperf.remote.process import START_SECONDS, RemotePytest, Tests
from pytest_ddpperf.remote.reach import Imports, Reach
from pytest_ddpperf.remote.worktree import Checkout, differing_files
from pytest_ddpperf.version import __version__
from pytest_ddpperf.wire import boot
from pytest_ddpperf.wire.source_trees import Trees

# By how much of the command line follows an option as its value. Both sides would write the same
# files.
_FLAGS = """
    --ddp-save-baseline --ddp-extend-baseline --ddp-disable
    -x --exitfirst --lf --last-failed --ff --failed-first --nf --new-first --cache-clear
    --sw --stepwise --sw-skip --stepwise-skip --sw-reset --stepwise-reset
    --pdb --trace --collect-only --co
    --no-cov --no-cov-on-fail --cov-append --cov-branch
    --self-contained-html --json-report --benchmark-autosave --benchmark-save-data --fail-on-flaky
""".split()
# The last two lines: who leads says how often a test is run again, and waits for no delay but its
# own.
_WITH_VALUE = """
    --ddp-confirm --ddp-suite-plots --ddp-markdown --ddp-html --ddp-history --ddp-trace --ddp-json
    --ddp-against --ddp-against-setup --ddp-against-python --ddp-against-env --ddp-against-option
    --ddp-reason
    --junitxml --junit-xml --junitprefix --junit-prefix --basetemp --maxfail --pastebin --log-file
    --lfnf --last-failed-no-failures --report-log --html --csv --json-report-file --alluredir
    --benchmark-json --benchmark-save --benchmark-compare-fail
    --cov-report --cov-config --cov-fail-under --cov-context
    --reruns --reruns-delay --reruns-delay-backoff-factor --reruns-mode --force-reruns
    --max-suite-reruns --only-rerun --rerun-except --rerun-exclude-path
""".split()
_WITH_OPTIONAL_VALUE = (
    "--cov --benchmark-compare --benchmark-histogram --debug".split()
)

# Options whose values are paths, from where pytest is called: those of pytest that a remote one
# keeps.
_OF_PATHS = (
    "-c --config-file --rootdir --confcutdir --ignore --ignore-glob".split()
)
# What comes before a path in a word: of "--option=path", "-cpath" and the "key=path" of -o; else
# nothing.
_OPTION_NAME = re.compile(r"^(?:-c(?=.)|[\w-]+=|)", re.DOTALL)


def remote_arguments(
    arguments: Sequence[str], tests: Collection[str]
) -> list[str]:
    """Return the arguments of a remote pytest, without those that write, select or are about
    another version.

    `arguments` are all of this run's, those of the ini file and of PYTEST_ADDOPTS first; `tests`
    are those that name tests. Of a named test the whole file is collected: a parameter may exist on
    one side only.
    """
    kept, words = [], list(arguments)
    while words:
        word = words.pop(0)
        name, equals, _ = word.partition("=")
        if name in _FLAGS or word == "--":
            continue
        if name in _WITH_VALUE or name in _WITH_OPTIONAL_VALUE:
            if equals or not words:
                continue
            if name in _WITH_VALUE or not words[0].startswith("-"):
                words.pop(0)
            continue
        # -xvs
        if re.fullmatch("-[vqsl]*x[xvqsl]*", word):
            word = word.replace("x", "")
            if word == "-":
                continue
        kept.append(word.partition("::")[0] if word in tests else word)
    return kept


def spelt_out(words: Iterable[str], *folders: Path) -> Iterator[str]:
    """With the lines of a file in place of "@file", as pytest reads them from where it is called:
    the first of these folders that has it. A pipe was read."""
    for word in words:
        if not word.startswith("@"):
            yield word
            continue
        for folder in folders:
            file = folder / word[1:]
            if file.is_file():
                lines = os.fsdecode(file.read_bytes()).splitlines()
                yield from spelt_out(lines, *folders)
                break


@record
class Invocation:
    """How this pytest was called."""

    # all of them: of the ini file, of the environment, of the command line
    arguments: tuple[str, ...]
    # of them, those that are not of the ini file; "@file" as it was given
    called_with: tuple[str, ...] = ()
    # whether it has the `addopts` of its own ini file
    reads_addopts: bool = False
    tests: tuple[str, ...]  # those that name tests
    folder: Path  # where it was called
    rootdir: Path
    caches: bool  # whether pytest's cache is on
    kept: tuple[str, ...]  # as `Trees.kept`: tests, and the ini file
    ini: Path | None = None  # which pytest read
    # of the names of test modules, and of files of arguments
    patterns: tuple[str, ...] = ()
    # whether the other version runs its own tests and conftests
    own_tests: bool = False
    rpc: bool | None = None  # as `StartPytest` has it
    # As they were before conftests and tests, which may have changed them by now; None, and of
    # cores (): as they are.
    environ: Variables | None = None
    sys_path: Sequence[str] | None = None
    cores: tuple[int, ...] = ()

    def arguments_in(self, trees: Trees) -> list[str]:
        """Return the arguments of the other version's pytest; the tests have the same paths in its
        tree."""
        arguments = remote_arguments(self.arguments, self.tests)
        if trees.base == trees.current:
            return arguments
        arguments = [
            *self._moved(trees, arguments),
            f"--rootdir={_there(trees, self.rootdir)}",
        ]
        if self.ini is not None and not self.own_tests:
            arguments += ["-c", _there(trees, self.ini)]
        return arguments

    def start(
        self, trees: Trees, further: Sequence[str], folder: Path
    ) -> StartPytest:
        """Return the first message to a remote pytest, which has `further` arguments and `folder`
        for itself. It may share a disk with this one, so it does not write into its cache."""
        cache = ["-o", f"cache_dir={folder / 'cache'}"] if self.caches else []
        addopts = [] if self.reads_addopts else ["-o", "addopts="]
        return StartPytest(
            sys_path=boot.search_path(self.sys_path),
            version=__version__,
            trees=codec.encode(trees),
            arguments=[*self.arguments_in(trees), *further, *addopts, *cache],
            argv=sys.argv,
            folder=str(folder),
            own_tests=self.own_tests,
            rpc=self.rpc,
            cores=self.cores,
        )

    def to_collect_own_tests(self, trees: Trees) -> "Invocation | None":
        """Return how the other version's own tests are collected, as its own ini file says; None if
        the call names tests that it does not have."""
        gone = [
            test
            for test in self.tests
            if (self.folder / _file_of(test)).exists()
            and not os.path.exists(_there(trees, self.folder / _file_of(test)))
        ]
        folder = self.folder_in(trees)
        if not folder.is_dir() or (gone and len(gone) == len(self.tests)):
            return None
        words = spelt_out(self.called_with, folder, self.folder)
        return replace(
            self,
            arguments=tuple(word for word in words if word not in gone),
            own_tests=True,
            reads_addopts=True,
        )

    def _moved(self, trees: Trees, words: Iterable[str]) -> Iterator[str]:
        """Yield the words of a command line, with paths in the repository moved to the version's
        tree: tests, values of `_OF_PATHS`, and whatever else is absolute."""
        tests = set(map(_file_of, self.tests))
        before = ""
        for word in words:
            option = "" if word in tests else _OPTION_NAME.findall(word)[0]
            path = word[len(option) :]
            is_value = option.rstrip("=") in _OF_PATHS or before in _OF_PATHS
            if os.path.isabs(path) or word in tests or is_value:
                path = self._path_in(trees, path)
            yield option + path
            before = word

    def _path_in(self, trees: Trees, path: str) -> str:
        """Return the path in the version's tree; the same one if it is relative and leads there, or
        where it did."""
        here, folder = os.path.join(self.folder, path), self.folder_in(trees)
        there = _there(trees, here)
        moved = Path(os.path.normpath(folder / path))
        leads_there = moved.is_relative_to(trees.base)
        stays = there == here and folder == self.folder
        return (
            path
            if not os.path.isabs(path) and (leads_there or stays)
            else there
        )

    def folder_in(self, trees: Trees) -> Path:
        """Return the folder where the other version's pytest is called."""
        return Path(_there(trees, self.folder))


def _file_of(test: str) -> str:
    """Return the file or the folder of a word that names tests."""
    return test.partition("::")[0]


def _there(trees: Trees, path: Path | str) -> str:
    """Return the same path in the version's tree."""
    within = trees.within(os.path.realpath(path))
    return os.path.join(trees.base, within) if within is not None else str(path)


def nothing_differs(
    current: Sources, base: Sources, environ: Variables, option: Sequence[str]
) -> bool:
    """Whether both sides of one tree seem to run the same, before anything ran: `environ` and
    `option` are what was asked to be otherwise."""
    if (current.python, current.prefix) != (base.python, base.prefix) or option:
        return False
    if any(os.environ.get(name) != value for name, value in environ.items()):
        return False
    return not differing_files(current.files, base.files)


@dataclass
class RemotePausedLaunch:
    steps: int
    step_seconds: float
    helpers: int
    # sends an order and returns the answer, which has to be of a kind, or raises BaseSideError
    _ask: Function
    over: bool = False

    def stretch(self, steps: int) -> None:
        """Run so many steps, of which the first is not counted; returns when all ranks rest. Raises
        BaseSideError."""
        try:
            self._ask(RunStretch(steps), StretchDone)
        except BaseSideError:
            self.over = True
            raise

    def deliver(self) -> LaunchSamples:
        """End it and return its samples; raises BaseSideError."""
        self.over = True
        launched: Launched = self._ask(Deliver(), Launched)
        return launched.samples

    def drop(self) -> None:
        """End it as `deliver` does, clean-up included, whatever comes of it."""
        if not self.over:
            self.over = True
            with suppress(BaseSideError):
                self._ask(Drop(), Dropped)


# Beyond what a launch may take: whoever hangs there says so before we say it of the whole side.
_SILENCE_SECONDS = 10.0
# For a pytest that leads others to find out which one is gone, and to end what ranks are left.
_NODES_SECONDS = 60.0


class BaseSide:
    """The other version: a process of its own, from `start` to `close`, which leaves nothing. One
    test at a time."""

    def __init__(
        self,
        settings: Settings,
        invocation: Invocation,
        templates: Templates,
        nodes: ConnectedNodes | None = None,
        *,
        seconds: float | None = None,
    ) -> None:
        """`templates`: its rank server is forked from the same one as this pytest's. `nodes`: on
        which it has a pytest, too. `seconds`: that there are to check it out and to collect. Raises
        AgainstError."""
        assert nodes is None or isinstance(nodes, OtherNodes), (
            "a worker leads none"
        )
        self._nodes = nodes
        self._seconds = seconds
        self._templates = templates
        self._settings, self._invocation = settings, invocation
        self._option = settings.comparison_option  # that asked for it
        self.checkout = Checkout(
            settings,
            invocation.rootdir,
            invocation.kept,
            own_tests=invocation.own_tests,
        )
        self.version = self.checkout.version
        self.trees = self.checkout.current_trees
        # how its own tests would be judged or, if they are not known to differ, the current ones
        # with its code; None if that is not known
        self.own_tests: Judged | None = None
        # files of tests, conftests and ini files that differ
        self.changed_tests: Sequence[str] = ()
        self._looks_always = False
        self._closing = ExitStack()
        # what differs, if all of it is known; None: anything may
        self._reach: Reach | None = None
        # measurements of the test that were not compared, by label
        self._passed_over: set[str] = set()
        # when it has to have collected, by the monotonic clock
        self._until = math.inf
        if seconds is not None:
            self._until = time.monotonic() + seconds

    def start(self) -> None:
        """Check the version out and let its pytest collect, in the background, on all nodes; raises
        AgainstError and NodesError."""
        if self._nodes is None:
            self.make_tree(self._look)
            self._start_here()
            return
        order = ServeVersion(
            commit=self.checkout.other_commit,
            kept=tuple(
                self.trees.within(path) or path for path in self.trees.kept
            ),
            own_tests=self._invocation.own_tests,
            seconds=self._seconds,
        )
        with self._nodes.serving_version(order) as connected:
            self.make_tree(self._look)
            came = connected(self._left)
            self._start_here(
                nodes=self._nodes.count,
                address=self._nodes.address,
                connections={
                    node: lines.socket.fileno() for node, lines in came.items()
                },
            )

    def make_tree(self, look: Callable[[Trees], None] | None = None) -> None:
        """Check the version out on this node; `close` removes it. `look` as in
        `Checkout.check_out`. Raises AgainstError."""
        self._closing.callback(self.checkout.remove)
        self.tree = self.checkout.check_out(
            self._invocation.environ, self._until, look
        )

    def _start_here(self, **place: Any) -> None:
        """Let its pytest on this node collect; `place` as in `start_pytest`. Raises
        AgainstError."""
        with suppress(OSError):
            if files := self.checkout.certain_files():
                self._reach = Reach(files)
                self._closing.callback(self._reach.close)
        self.remote_pytest = self.start_pytest(**place)
        self.tests = Tests(self.remote_pytest, self._patience)
        try:
            self.tests.hello(self._to_start)
        except BaseSideError as error:
            raise self._unlike_ours(error) from None

    @property
    def _patience(self) -> float:
        """How long its pytest may say nothing of a test: what a test does there is the user's. It
        waits for those of other nodes as long as this pytest does, and is the one to say that one
        of them does not answer."""
        seconds = max(START_SECONDS, self._settings.timeout_seconds)
        if self._nodes is not None:
            seconds += _NODES_SECONDS
        return seconds + _SILENCE_SECONDS

    def start_pytest(self, **place: Any) -> RemotePytest:
        """Start its pytest on this node, once it is checked out; `place` are fields of StartPytest
        about the nodes. It uses a rank server that is forked from the same template as ours;
        another interpreter, or one with other variables, starts its own. Raises AgainstError."""
        python = sys.executable
        if self._settings.against_python is not None:
            python = os.path.abspath(
                shutil.which(self._settings.against_python) or ""
            )
        message = replace(self._first_message(), **place)
        descriptors = [*message.connections.values()]
        try:
            with ExitStack() as passed_on:
                # libraries may read variables when they are loaded
                if not (self.version.python or self.version.environ):
                    rank_server, _ = self._templates.fork_server(os.environ)
                    number = passed_on.enter_context(rank_server).fileno()
                    descriptors.append(number)
                    message = replace(
                        message,
                        rank_server=number,
                        variables=read_at_import(os.environ),
                    )
                remote_pytest = RemotePytest(
                    str(self.version),
                    python,
                    self._environ(),
                    self._invocation.folder_in(self.tree),
                    descriptors,
                )
        except OSError as error:
            raise AgainstError(
                self._option, f"{python} cannot be started: {error}"
            ) from None
        self._closing.callback(remote_pytest.close)
        try:
            remote_pytest.send(message)
        except BaseSideError as error:
            raise self._unlike_ours(error) from None
        return remote_pytest

    def look(self, *, always: bool) -> None:
        """Collect the version's own tests, if any differ or `always`, and nothing more; raises
        AgainstError."""
        self._looks_always = always
        if always or self.checkout.changed_tests(self._invocation.patterns):
            with self._closing:
                self.make_tree(self._look)

    def _look(self, trees: Trees) -> None:
        """Let the version's own tests be collected in its tree, if any differ from the current
        ones."""
        self.tree = trees
        self.changed_tests = self.checkout.changed_tests(
            self._invocation.patterns
        )
        if self._invocation.own_tests or not (
            self.changed_tests or self._looks_always
        ):
            return
        invocation = self._invocation.to_collect_own_tests(trees)
        if invocation is None:
            why = "it has none of the tests of this call"
            self.own_tests = Judged(file_errors={ALL_FILES: why})
            return
        message = invocation.start(
            trees, ["--collect-only"], self.checkout.folder
        )
        environ = self._environ()
        # copies of the current tests will have the same names
        environ["PYTHONDONTWRITEBYTECODE"] = "1"
        # Its OSError is that of the checkout: the version's pytest could not start either.
        remote_pytest = RemotePytest(
            str(self.version),
            sys.executable,
            environ,
            invocation.folder_in(trees),
        )
        try:
            remote_pytest.send(message)
            tests = Tests(remote_pytest, self._to_start)
            tests.hello(self._to_start)
            judged = tests.collect(self._to_start).judged
            self.own_tests = replace(judged, file_errors=tests.errors)
        except BaseSideError as error:
            *_, last = str(error).splitlines() or [""]
            self.own_tests = Judged(file_errors={ALL_FILES: last})
        finally:
            remote_pytest.close()

    @property
    def _left(self) -> float:
        return max(0.0, self._until - time.monotonic())

    @property
    def _to_start(self) -> float:
        return min(START_SECONDS, self._left)

    def _first_message(self) -> StartPytest:
        further = list(self._settings.against_option or ())
        if self._settings.trace_dir is not None:
            further.append(f"--ddp-trace={self._settings.trace_dir}")
        start = self._invocation.start(self.tree, further, self.checkout.folder)
        return replace(start, sys_path=None) if self.version.python else start

    def _unlike_ours(self, error: BaseSideError) -> AgainstError:
        if self.version.python:
            return AgainstError(
                "--ddp-against-python",
                str(error),
                f"pytest-ddpperf {__version__} must be installed for that interpreter",
            )
        return AgainstError(self._option, str(error))

    @property
    def environ(self) -> dict[str, str]:
        """The variables of its ranks, if conftests there set the same as here."""
        return {**os.environ, **self.checkout.assignments}

    def _environ(self) -> dict[str, str]:
        """Return the variables of its pytest."""
        outside = self._invocation.environ or os.environ
        environ = self.checkout.environ_in(self.tree, outside)
        environ.pop("PYTEST_ADDOPTS", None)  # they are among the arguments
        return environ

    def collect(self, here: Sources | None) -> None:
        """Wait until the other side has collected, on all nodes; raises AgainstError if one of them
        cannot be used, and if it has the same code, and nothing else differs from `here`."""
        try:
            collected = self.tests.collect(self._to_start)
            if self._nodes is not None:
                self.tests.started(
                    min(START_SECONDS + _NODES_SECONDS, self._left)
                )
        except BaseSideError as error:
            if self.tests.lacks_conftest:
                return  # which every test will report: it lacks the code
            raise AgainstError(self._option, str(error)) from None
        if self._reach is not None:
            self._reach.collected(here.files if here is not None else ())
        # another Python may parse the same function differently
        otherwise = self.version.option or self.version.python
        if (
            self.checkout.other_commit
            and not otherwise
            and not self.changed_tests
        ):
            # its ini file is the current one
            self.own_tests = replace(collected.judged, ini="")
        if self.version.ref or here is None:
            return
        if nothing_differs(
            here,
            collected.sources,
            self.checkout.assignments,
            self.version.option,
        ):
            raise AgainstError(
                self._option,
                f"{NOTHING_DIFFERS} {self.version}: interpreter, environment and all files that"
                " Python imports are the same",
                "--ddp-against self measures how far the same code differs from itself",
            )

    def lacking(self, files: Digests, own: Digests) -> str:
        """Return, in words, which of the `files` that the current side used git ignores and this
        side lacks, or the other way which of its `own`, by their digests; or ""."""
        try:
            lacking = self.checkout.lacking(files)
            here = self.checkout.lacking(own, are_current=False)
        except GitError as error:
            return f"git cannot tell which files it ignores: {error}"
        if lacking:
            named = text.some(lacking)
            return f"it lacks {named}, which git ignores: ddp_against_setup can build it"
        if here:
            named = text.some(here)
            return f"it has {named}, which git ignores and the working tree lacks: build it there"
        return ""

    # --- one test

    def is_unreached(self, nodeid: str, imports: Imports) -> bool:
        """Say whether it is certain that no file that differs has a part in the test so far, which
        is among those of this side. `imports`: what its code imports."""
        if self._reach is None or self.tests.why_missing(nodeid):
            return False
        return not self._reach.reaches(imports)

    def pass_over(self, label: str) -> None:
        """Let a later measurement of the same test begin after this one."""
        self._passed_over.add(label)

    def begin(self, nodeid: str, label: str, here: Plan) -> ReadyToMeasure:
        """Let a test run there up to its measurement of this name, which has the plan `here`;
        return what it asks for there. Raises BaseSideError."""
        with self.tests.output_shown_once():
            self.tests.enter(nodeid)
            ended = (
                f"the test ended there without measuring {label or 'anything'}"
            )
            next_ready = partial(
                self.tests.receive, ReadyToMeasure, Observer(), ended
            )
            ready: ReadyToMeasure = next_ready()
            # a measurement that raised no suspicion here
            while ready.label != label and (
                self._invocation.own_tests or ready.label in self._passed_over
            ):
                self.remote_pytest.send(TakeLaunch(steps=1))
                event = self.tests.receive(
                    Launched | LaunchFailed, Observer(), ended
                )
                if isinstance(event, Launched):
                    self.remote_pytest.send(EndMeasurement())
                ready = next_ready()
            if ready.label != label:
                # else the test there would wait for ever
                self.remote_pytest.send(LeaveTest())
                raise BaseSideError(
                    f"there the test measured {ready.label!r} where it measures {label!r} here"
                )
            plan = ready.plan
            # its options may have changed since; only the code is to be compared
            if self._invocation.own_tests:
                if (plan.rpc, plan.master) != (here.rpc, here.master):
                    raise BaseSideError(
                        f"there the test has {plan.roles or 'ranks'}, here {here.roles or 'ranks'}"
                    )
                # the nodes there have begun with their shares
                shares, own_shares = plan.over_nodes, here.over_nodes
                if shares != own_shares:
                    raise BaseSideError(
                        f"there the test has {shares or 'one node'},"
                        f" here {own_shares or 'one node'}"
                    )
                plan = plan.measured_as(here)
                self.remote_pytest.send(MeasureAs(plan))
            return changed(ready, plan=plan)

    def measure(self, observer: Observer, steps: int | None) -> LaunchSamples:
        """Take one launch of the measurement that `begin` reached; raises BaseSideError.

        `steps` is the length of the window; None leaves that to the launch.
        """
        return self.tests.ask(observer, TakeLaunch(steps), Launched).samples

    def sample_stacks(self, observer: Observer, plan: Plan) -> LaunchSamples:
        """Take a further launch, of this `plan`, which samples stacks; raises BaseSideError."""
        return self.tests.ask(observer, SampleStacks(plan), Launched).samples

    def pause(
        self, observer: Observer, steps: int | None
    ) -> AbstractContextManager[RemotePausedLaunch]:
        """Yield a launch as `measure` takes it, which has warmed up and is paused; it ends with the
        context."""
        paused = self.tests.ask(observer, PauseLaunch(steps), Paused)
        ask = partial(self.tests.ask, observer)
        return dropping(
            RemotePausedLaunch(
                paused.steps, paused.step_seconds, paused.helpers, ask
            )
        )

    def end_measurement(self) -> None:
        """Let the test go on: its measurement is over."""
        with suppress(BaseSideError):  # the next test will report it
            self.remote_pytest.send(EndMeasurement())

    def leave(self) -> None:
        """End the test there, and wait for it."""
        self._passed_over.clear()
        self.tests.leave()
        if self._reach is not None:
            try:
                self._reach.end_test(self.checkout.certain_files())
            except (GitError, OSError):
                self._reach = None

    def close(self) -> None:
        """End the process, and remove the worktree."""
        self._closing.close()
