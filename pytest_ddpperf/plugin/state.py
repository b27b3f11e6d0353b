"""The state of the plugin in one pytest process: its run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import cached_property
from typing import TYPE_CHECKING

import pytest

from pytest_ddpperf.plugin.items import RPC, measures, modules_by_name, uses
from pytest_ddpperf.plugin.role import (
    LeadsVersion,
    LooksAtVersion,
    PytestRole,
    choose_role,
)

if TYPE_CHECKING:
    from pytest_ddpperf.launch.template import Templates
    from pytest_ddpperf.options.settings import Settings
    from pytest_ddpperf.plugin.place import Places
    from pytest_ddpperf.plugin.results import RunResults
    from pytest_ddpperf.plugin.session import Session
    from pytest_ddpperf.records.samples import FoundFacts


class Run:
    """The plugin's state in one pytest process. Ranks and reports are imported when a distributed
    test needs them."""

    def __init__(self, config: pytest.Config) -> None:
        """Raises pytest.UsageError if torchrun's other nodes cannot be met."""
        self.config = config
        self.items: list[pytest.Item] = []  # distributed tests
        self.deselected: list[pytest.Item] = []  # distributed tests, too
        # node ids of tests, and of what could not be collected
        self.failed: set[str] = set()
        # node ids of tests whose marker asks for more than this machine has
        self.lacking: set[str] = set()
        # node ids of distributed tests that have begun
        self.begun: set[str] = set()
        self.sections: dict[str, tuple[str, ...]] = {}  # of `add_section`
        # distributed tests that were not skipped; with xdist, those of all workers
        self.ran = 0
        self.pytest_session: pytest.Session | None = None
        self.role: PytestRole = choose_role(self)
        # whether another process reports
        self.worker = self.role.works_for_leader or hasattr(
            config, "workerinput"
        )

    @cached_property
    def settings(self) -> Settings:
        """Return the settings of the run, read once; raises OptionError."""
        from pytest_ddpperf.options.settings import read_settings

        return read_settings(self.config)

    @cached_property
    def templates(self) -> Templates:
        """Return what rank servers are forked from."""
        from pytest_ddpperf.launch.template import Templates

        return self.role.templates or Templates()

    @property
    def rpc(self) -> bool:
        """Say whether there will be RPC launches: as the leader says, so that both sides import the
        same."""
        if self.role.rpc is not None:
            return self.role.rpc
        return any(uses(item, {RPC}) for item in self.items)

    @cached_property
    def session(self) -> Session:
        """Return what measures; raises DdpPerfError under pytest-forked."""
        from pytest_ddpperf.launch import Launcher
        from pytest_ddpperf.plugin.session import Session
        from pytest_ddpperf.records.errors import DdpPerfError
        from pytest_ddpperf.remote.worktree import one_tree

        # results and rank servers would end with each test
        if self.config.getoption("forked", False):
            raise DdpPerfError(
                "--forked is not supported: drop it, ranks are processes of their own anyway"
            )
        settings, role, rootdir = self.settings, self.role, self.config.rootpath
        confirms = settings.confirm_seconds and not settings.records
        side_of = role.confirms(self) if confirms else ""
        # Always: to note what ranks read takes time, and the sessions of a baseline do.
        trees = role.trees or one_tree(rootdir)
        launcher = Launcher(
            lambda: modules_by_name(self.config, self.items),
            rpc=self.rpc,
            trees=trees,
            folder=role.folder,
            nodes=role.other_nodes,
            takes_locks=not settings.disable,  # else nothing is measured
            templates=self.templates,
        )
        return Session(settings, rootdir, launcher, trees, side_of)

    @cached_property
    def places(self) -> Places:
        """Return where tests run; raises as `session`."""
        from pytest_ddpperf.plugin.place import Places

        return Places(self.settings, self.role, self.session.facts)

    def machine(self) -> FoundFacts:
        """Return the facts, with the places that tests were given so far, in words."""
        return {
            **self.session.facts(),
            "places": str(self.places),
            **self.role.facts(),
        }

    def start_others(self, items: Sequence[pytest.Item]) -> None:
        """Let other nodes or the other version collect at the same time as this pytest; raises
        DdpPerfError."""
        if self.settings.comparison_option:
            from pytest_ddpperf.plugin import remote

            other_nodes = self.role.other_nodes
            side = remote.another_version(self, items, other_nodes)
            has_any = any(map(measures, self.items))
            why = side.checkout.nothing_to_compare() if has_any else ""
            kind = LooksAtVersion if why or not has_any else LeadsVersion
            self.role = kind(side)
            self.role.lead(other_nodes)
            if kind is LooksAtVersion:
                self.role.start(self)
                if why:
                    self._skip_measurements(why)
                return
        # first: git opens files, of which some are watched from then on
        _ = self.report
        self.role.start(self)

    def _skip_measurements(self, why: str) -> None:
        """Let no test measure."""
        for item in filter(measures, self.items):
            item.add_marker(pytest.mark.skip(reason=why))
        self.items = [item for item in self.items if not measures(item)]
        self.report.messages.append(why)

    @cached_property
    def report(self) -> RunResults:
        """Return the results of the run; the first call begins them."""
        from pytest_ddpperf.plugin.results import begin_results

        return begin_results(self.config.rootpath, self.sections)

    def end(self, refused: str, *, writes: bool) -> None:
        """Complete the results, and write the requested reports if it `writes` any. `refused`: why
        pytest ran no test, if it did not."""
        if "report" not in vars(self):
            return
        report = self.report
        if "session" in vars(self):
            report.messages += self.session.messages()
        report.messages += self.role.messages()
        report.note_unused(self.settings.limits)
        report.end(self.failed, refused, self.role.changed())
        report.guard, report.too_weak = self.role.guard(self, report.outcomes)
        if writes:
            report.write_files(self.settings, self.config.rootpath)

    @property
    def reported(self) -> bool:
        """Say whether there is anything to report."""
        if "report" not in vars(self):
            return False
        return bool(self.role.messages()) or not self.report.empty

    @property
    def exit_status(self) -> int:
        """Return pytest's, as far as it is known."""
        if self.pytest_session is None:
            return pytest.ExitCode.USAGE_ERROR
        return int(self.pytest_session.exitstatus)

    def close(self) -> None:
        with ExitStack() as closing:
            if self.items:
                closing.callback(self.templates.close)
            if "session" in vars(self):
                closing.callback(self.session.close)
            # first: a worktree, in which fixtures are torn down, goes with its rank server
            closing.callback(self.role.close, self.exit_status)


RUN = pytest.StashKey[Run]()


def node_count(config: pytest.Config) -> int:
    """Return over how many nodes torchrun started the run, this one included. It is the same on all
    nodes, so a conftest may generate tests by it."""
    return config.stash[RUN].role.nodes


def add_section(
    config: pytest.Config, title: str, lines: Iterable[str]
) -> None:
    """Add lines of text below a title to all reports of a run: the terminal, JSON, Markdown and the
    page.

    Call it from a conftest's `pytest_sessionstart` to its `pytest_sessionfinish`. Of equal titles
    the last call holds.
    """
    if isinstance(lines, str):
        raise TypeError(
            "add_section: lines must be a list of lines, not one text"
        )
    config.stash[RUN].sections[title] = tuple(lines)
