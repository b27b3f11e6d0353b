"""The state of the plugin in one pytest process: how it began, its run, and the settings of its
tests."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property, partial
from typing import TYPE_CHECKING, NamedTuple

import pytest

from pytest_ddpperf.plugin.items import (
    RPC,
    WORLD_SIZE,
    measures,
    modules_by_name,
    uses,
    with_place,
    world_sizes,
)

if TYPE_CHECKING:
    from _pytest.outcomes import Failed

    from pytest_ddpperf.compare.confirm import SideOf
    from pytest_ddpperf.launch.template import Templates
    from pytest_ddpperf.options.settings import Settings
    from pytest_ddpperf.plugin.leader_connection import LeaderConnection
    from pytest_ddpperf.plugin.results import RunResults
    from pytest_ddpperf.plugin.session import Session
    from pytest_ddpperf.remote.nodes import OtherNodes
    from pytest_ddpperf.remote.version import BaseSide


LEADER: pytest.StashKey[LeaderConnection] = pytest.StashKey()


# --- before the user's conftests

_PLAIN = (bool, int, float, str, list, tuple, dict, type(None))
_LONGEST = 200  # characters of a value that is worth a line of a baseline
_SECRET = (
    # as against --max-tokens
    r"(token|(api|access|auth|bearer|hf|hub|refresh)[-_]?tokens"
    r"|(secret|password|passwd|passphrase|(api|access|private)[-_]?key)s?"
    r"|(^|[-_])(pwd|pass|auth|credentials?))([-_](json|value|str|string|header|file))?$"
)


class ProcessSnapshot(NamedTuple):
    """Environment, import path and options before any conftest, and before any other plugin's hook.
    The pytest of another version starts from these; its own conftests set the rest."""

    environ: Mapping[str, str]
    sys_path: tuple[str, ...]
    options: frozenset[str]  # by name in `config.option`


SNAPSHOT = pytest.StashKey[ProcessSnapshot]()


def take_snapshot(config: pytest.Config) -> ProcessSnapshot:
    options = {**vars(config.known_args_namespace), **vars(config.option)}
    return ProcessSnapshot(dict(os.environ), tuple(sys.path), frozenset(options))


def snapshot_of(config: pytest.Config) -> ProcessSnapshot:
    """Return the snapshot; a new one if a conftest's `pytest_plugins` loaded the plugin later."""
    return config.stash.get(SNAPSHOT, None) or take_snapshot(config)


# Set by coverage.py, by pytest-cov before 7, or by the user, to measure processes that this one
# starts.
_TRACING = ("COVERAGE_PROCESS_CONFIG", "COV_CORE_DATAFILE", "COVERAGE_PROCESS_START")


def traces_ranks() -> bool:
    """Say whether coverage traces ranks. It may trace one side only, by --cov or by the folder of
    the sources."""
    return any(map(os.environ.get, _TRACING))


def own_options(config: pytest.Config) -> dict[str, str]:
    """Return the options that the user's conftests added, with the `repr` of their values.

    Options that may be secrets are left out, and paths, which mean nothing on another day."""
    # xdist adds an option of its own to its workers.
    before = {
        *(
            config.stash[SNAPSHOT].options
            if SNAPSHOT in config.stash
            else vars(config.option)
        ),
        "loadgroup",
    }
    added = {
        name: value
        for name, value in sorted(vars(config.option).items())
        if name not in before
    }
    plain = {
        name: repr(value)
        for name, value in added.items()
        if isinstance(value, _PLAIN) and not holds_secret(name)
    }
    short = {
        name: text
        for name, text in plain.items()
        if len(text) <= _LONGEST and not {os.sep, "<"} & {*text}
    }
    return {"--" + name.replace("_", "-"): text for name, text in short.items()}


def holds_secret(option: str) -> bool:
    """Say whether an option's name suggests a secret, which no file and no report may show."""
    return re.search(_SECRET, option, re.IGNORECASE) is not None


# --- one run


class Run:
    """The plugin's state in one pytest process. Ranks and reports are imported when a distributed
    test needs them."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        # the pytest that asked for this one, if any
        self.leader = config.stash.get(LEADER, None)
        # another process reports
        self.worker = self.leader is not None or hasattr(config, "workerinput")
        self.items: list[pytest.Item] = []  # distributed tests
        # node ids of tests, and of what could not be collected
        self.failed: set[str] = set()
        self.begun: set[str] = set()  # node ids of distributed tests that have begun
        self.sections: dict[str, tuple[str, ...]] = {}  # of `add_section`
        # distributed tests that were not skipped; with xdist, those of all workers
        self.ran = 0
        self.snapshot = snapshot_of(config)
        # the other nodes, if this pytest leads them
        self.other_nodes: OtherNodes | None = None
        self.pytest_session: pytest.Session | None = None
        self._base: BaseSide | None = None
        self._session: Session | None = None
        self._report: RunResults | None = None

    @cached_property
    def settings(self) -> Settings:
        """Return the settings of the run, read once; raises OptionError."""
        from pytest_ddpperf.options.settings import read_settings

        return read_settings(self.config)

    @property
    def nodes(self) -> int:
        """Return the number of nodes, this one included."""
        if self.other_nodes is not None:
            return self.other_nodes.role.nodes
        return self.leader.nodes if self.leader is not None else 1

    @cached_property
    def templates(self) -> Templates:
        """Return the templates of rank servers, with what the leader gave."""
        from pytest_ddpperf.launch.template import Templates

        return self.leader.templates if self.leader is not None else Templates()

    @property
    def rpc(self) -> bool:
        """Say whether there will be RPC launches: as the leader says, so that both sides import the
        same."""
        if self.leader is not None and self.leader.rpc is not None:
            return self.leader.rpc
        return any(uses(item, {RPC}) for item in self.items)

    @property
    def session(self) -> Session:
        """Return what measures; the first call makes it. Raises DdpPerfError under
        pytest-forked."""
        if self._session is None:
            from pytest_ddpperf.plugin.session import Session
            from pytest_ddpperf.records.errors import DdpPerfError

            # results and rank servers would end with each test
            if self.config.getoption("forked", False):
                raise DdpPerfError(
                    "--forked is not supported: drop it, ranks are processes of their own anyway"
                )
            self._session = Session(
                self.settings,
                self.config.rootpath,
                lambda: modules_by_name(self.config, self.items),
                rpc=self.rpc,
                base=self._base,
                leader=self.leader,
                side_of=self._confirms(),
                other_nodes=self.other_nodes,
                nodes=self.nodes,
                templates=self.templates,
            )
        return self._session

    def _confirms(self) -> SideOf | str:
        """Return what starts the baseline side that confirms suspicions, or why there is none; ""
        if none was asked."""
        settings = self.settings
        if (
            not settings.confirm_seconds
            or settings.records
            or settings.comparison_option
            or self.leader is not None
        ):
            return ""
        if self.other_nodes is not None:
            return "not supported over several nodes"
        if traces_ranks():
            return (
                "not supported with coverage in ranks: add --no-cov, or run pytest without "
                "coverage"
            )
        if self.worker:
            return "not supported under xdist: add -n 0"
        from pytest_ddpperf.plugin import remote

        return partial(remote.of_commit, self)

    def start_others(self, items: Sequence[pytest.Item]) -> None:
        """Let other nodes and the other version collect at the same time as this pytest; raises
        DdpPerfError."""
        from pytest_ddpperf.plugin import remote

        if self.settings.comparison_option and any(
            measures(item) for item in self.items
        ):
            self._base = remote.another_version(self, items)
        if self.other_nodes is not None:
            self.other_nodes.start(remote.seed(self.config))
        if self._base is not None:
            self._base.start()

    def is_kept(self, path: str) -> bool:
        """Return whether the other version would have a file from the working tree."""
        trees = self._base.trees if self._base is not None else None
        within = trees.within(os.path.realpath(path)) if trees is not None else None
        return trees is not None and within is not None and trees.keeps(within)

    def await_others(self) -> None:
        """Wait until they have collected. Raises AgainstError if nothing differs from the other
        version, and NodesError if another node has other code or another kind of machine."""
        from pytest_ddpperf.remote.worktree import one_tree, sources_here

        if self._base is not None:
            self._base.collect(sources_here(self._base.trees))
        if self.other_nodes is not None:
            self.other_nodes.collected(
                sources_here(one_tree(self.config.rootpath)), self.session.facts()
            )

    @property
    def report(self) -> RunResults:
        """Return the results of the run; the first call begins them."""
        if self._report is None:
            from pytest_ddpperf.plugin.results import (
                RunResults,
                describe_run,
                uncommitted_files,
            )

            root = self.config.rootpath
            self._report = RunResults(
                describe_run(root), uncommitted_files(root), sections=self.sections
            )
        return self._report

    def place(self, item: pytest.Item) -> None:
        """Check that a test can run here. Raises MarkerError and what `Session.place` raises."""
        settings = settings_of(item)
        if uses(item, {RPC}):
            certain = settings.sources["trainers"] != "default"
            self.session.place(
                settings, settings.trainers, settings.parameter_servers, certain=certain
            )
        for world_size in (
            world_sizes(item, settings) if uses(item, {WORLD_SIZE}) else ()
        ):
            self.session.place(settings, world_size)

    def end(self, refused: str) -> None:
        """Complete the results. `refused`: why pytest ran no test, if it did not."""
        if self._report is None:
            return
        if self._session is not None:
            self.report.messages += self._session.messages()
        if self.other_nodes is not None:
            self.report.messages += self.other_nodes.reported
        self.report.end(self.failed, refused)

    @property
    def reported(self) -> bool:
        """Say whether there is anything to report."""
        refused_nodes = self.other_nodes is not None and bool(self.other_nodes.reported)
        return self._report is not None and (refused_nodes or not self._report.empty)

    def end_test(self) -> None:
        """End a distributed test; on the baseline side and on other nodes too."""
        if self._session is not None:
            self._session.end_test()

    def close(self) -> None:
        with ExitStack() as closing:
            if self.other_nodes is not None:
                session = self.pytest_session
                status = (
                    session.exitstatus
                    if session is not None
                    else pytest.ExitCode.USAGE_ERROR
                )
                closing.callback(self.other_nodes.close, int(status))
            if self._session is not None:
                closing.callback(self._session.close)
            if self._base is not None:
                closing.callback(self._base.close)
            if self.items:  # first: whoever waits for a rank server hears of its end
                closing.callback(self.templates.close)


RUN = pytest.StashKey[Run]()


def node_count(config: pytest.Config) -> int:
    """Return over how many nodes torchrun started the run, this one included. It is the same on all
    nodes, so a conftest may generate tests by it."""
    return config.stash[RUN].nodes


def add_section(config: pytest.Config, title: str, lines: Iterable[str]) -> None:
    """Add lines of text below a title to all reports of a run: the terminal, JSON, Markdown and the
    page.

    Call it in a conftest's `pytest_sessionfinish`, or before. Of equal titles the last call holds.
    """
    if isinstance(lines, str):
        raise TypeError("add_section: lines must be a list of lines, not one text")
    config.stash[RUN].sections[title] = tuple(lines)


def settings_of(item: pytest.Item) -> Settings:
    """Return the settings of one test, its markers included; those of its parameters are the
    closest. Raises MarkerError."""
    from pytest_ddpperf.options.settings import with_markers
    from pytest_ddpperf.records.errors import MarkerError

    callspec = getattr(item, "callspec", None)
    closest = (
        [mark for mark in callspec.marks if mark.name == "ddp"]
        if callspec is not None
        else []
    )
    for mark in (
        closest if callspec is not None and WORLD_SIZE in callspec.params else ()
    ):
        if "world_size" in mark.kwargs:
            where, allowed = (
                "a parameter's @pytest.mark.ddp(world_size=...)",
                "the test itself runs with several",
            )
            raise MarkerError(
                where, mark.kwargs["world_size"], f"{allowed}: give the test one list"
            )
    return with_markers(
        item.config.stash[RUN].settings, [*closest, *item.iter_markers("ddp")]
    )


def own_settings(item: pytest.Item) -> Settings:
    """Return the settings of a test that runs; a mistake in its marker fails the test."""
    from pytest_ddpperf.records.errors import MarkerError

    try:
        return settings_of(item)
    except MarkerError as error:
        problem = with_place(item, error)
    raise plain_failure(problem)


def plain_failure(problem: str) -> Failed:
    """Return an ordinary test failure without a traceback of ours."""
    from pytest_ddpperf import text

    return pytest.fail.Exception(
        "\n".join(text.wrap_text(problem, text.terminal_width())), pytrace=False
    )
