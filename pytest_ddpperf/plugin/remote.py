"""How remote pytests are called from a run: other versions, and other nodes."""

from __future__ import annotations

import os
import platform
import shlex
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_ddpperf import __version__
from pytest_ddpperf.launch.server_client import inherited
from pytest_ddpperf.options.settings import read_settings
from pytest_ddpperf.plugin.items import conftests, named_tests
from pytest_ddpperf.plugin.snapshot import ProcessSnapshot, snapshot_of
from pytest_ddpperf.plugin.state import Run
from pytest_ddpperf.records import codec
from pytest_ddpperf.records.errors import DdpPerfError, NodesError
from pytest_ddpperf.remote import rendezvous
from pytest_ddpperf.remote.node import NodeWorker
from pytest_ddpperf.remote.nodes import OtherNodes, describe_node
from pytest_ddpperf.remote.process import START_SECONDS, RemotePytest
from pytest_ddpperf.remote.rendezvous import Role, TorchrunStore, interface_of, role
from pytest_ddpperf.remote.version import BaseSide, Invocation, spelt_out
from pytest_ddpperf.remote.worktree import one_tree
from pytest_ddpperf.wire.boot import die_with_parent


def another_version(run: Run, items: Sequence[pytest.Item]) -> BaseSide:
    """Return the other version that was asked for, with the current tests; raises AgainstError."""
    return BaseSide(run.settings, _of_run(run, _kept(run, items)), run.templates)


def of_commit(run: Run, commit: str, seconds: float) -> BaseSide:
    """Start a commit's own tests, to be interleaved with today's, within so many seconds; raises
    DdpPerfError."""
    invocation = replace(_of_run(run, ()), own_tests=True)
    side = BaseSide(replace(run.settings, against=commit), invocation, run.templates)
    try:
        side.start(seconds)
        side.collect(None)
    except BaseException:
        side.close()
        raise
    return side


def _invocation(
    config: pytest.Config, kept: tuple[str, ...], snapshot: ProcessSnapshot
) -> Invocation:
    """Return how this pytest was called; the rest as `Invocation` has it."""
    return Invocation(
        arguments=(
            *config.getini("addopts"),
            *shlex.split(os.environ.get("PYTEST_ADDOPTS", "")),
            *spelt_out(
                map(str, config.invocation_params.args), config.invocation_params.dir
            ),
        ),
        caches=config.pluginmanager.hasplugin("cacheprovider"),
        tests=named_tests(config),
        folder=config.invocation_params.dir,
        rootdir=config.rootpath,
        kept=kept,
        ini=config.inipath,
        environ=snapshot.environ,
        sys_path=snapshot.sys_path,
    )


def _of_run(run: Run, kept: tuple[str, ...]) -> Invocation:
    found = _invocation(run.config, kept, run.snapshot)
    return replace(found, arguments=(*found.arguments, *seed(run.config)), rpc=run.rpc)


def _kept(run: Run, items: Sequence[pytest.Item]) -> tuple[str, ...]:
    """Return what both sides have from the working tree: tests, conftests, folders of tests, and
    the ini file."""
    tests = {
        os.path.realpath(item.path)
        for item in items
        if isinstance(item, pytest.Function)
    }
    own = {os.path.realpath(str(module.__file__)) for module in conftests(run.config)}
    root = Path(os.path.realpath(run.config.rootpath))
    folders = {
        path for path in map(os.path.dirname, tests | own) if _of_tests(Path(path))
    }
    folders -= {str(root), *map(str, root.parents)}
    ini = (
        {os.path.realpath(run.config.inipath)}
        if run.config.inipath is not None
        else set()
    )
    return tuple(sorted(tests | own | folders | ini))


def _of_tests(folder: Path) -> bool:
    """Whether a folder with a test module or a conftest holds tests alone, and no package that may
    be under test."""
    if folder.name.startswith("test"):
        return True
    packages = [
        path.parent
        for path in (folder / "__init__.py", *folder.glob("*/__init__.py"))
        if path.exists()
    ]
    return all(package.name.startswith("test") for package in packages)


def seed(config: pytest.Config) -> list[str]:
    """pytest-randomly's, if it draws: both sides shall draw the same."""
    seed = config.getoption("randomly_seed", None)
    return [f"--randomly-seed={seed}"] if isinstance(seed, int) else []


# Options with which pytest runs no test, on whatever node: each says what it has to say.
_SAYS_ONLY = (
    "help",
    "version",
    "markers",
    "showfixtures",
    "show_fixtures_per_test",
    "cacheshow",
)


def main(config: pytest.Config) -> int | None:
    """The status of a pytest that does not lead, when all is over; None for one that is to go on as
    ever."""
    if _only_says(config):
        return None
    try:
        found = role(os.environ)
        if found is None or found.leads:
            return None
        die_with_parent(os.getppid(), signal.SIGTERM)
        if not found.follows:
            return pytest.ExitCode.OK  # the first of its node is that node's pytest
        return _work_for_leader(config, found)
    except KeyboardInterrupt:
        return pytest.ExitCode.INTERRUPTED
    except DdpPerfError as error:
        raise pytest.UsageError(
            f"pytest-ddpperf, node {os.environ.get('GROUP_RANK')}: {error}"
        ) from None


def _only_says(config: pytest.Config) -> bool:
    return any(config.getoption(name, None) for name in _SAYS_ONLY)


def meet_nodes(run: Run) -> OtherNodes | None:
    """Open the door to the other nodes, if torchrun started several and this pytest is the first
    one's; raises pytest.UsageError."""
    if _only_says(run.config):
        return None
    try:
        found = role(os.environ)
        if found is None or not found.leads:
            return None
        die_with_parent(os.getppid(), signal.SIGTERM)
        return OtherNodes(found, _versions(), run.settings.timeout_seconds)
    except DdpPerfError as error:
        raise pytest.UsageError(str(error)) from None


def _versions() -> dict[str, str]:
    """Of what has to be the same on all nodes."""
    return {
        "pytest-ddpperf": __version__,
        "pytest": pytest.__version__,
        "Python": platform.python_version(),
    }


def _work_for_leader(config: pytest.Config, found: Role) -> int:
    # torchrun's way to end it: nothing shall be left
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # a mistake is the same on all nodes: nobody waits for anybody
    settings = read_settings(config)
    # the first node may begin as much later
    seconds = max(START_SECONDS, settings.timeout_seconds)
    with closing(TorchrunStore(found, seconds)) as store:
        reported = store.answer()["found"]
    key = (os.environ.get(rendezvous.VARIABLE) or reported["secret"]).encode()
    where = f"{reported['address']}, port {reported['port']}"
    try:
        leader = rendezvous.connect_to_leader(
            reported["address"], reported["port"], key, found.node, seconds
        )
    except (NodesError, OSError) as error:
        raise NodesError(f"the pytest of node 0 at {where}: {error}") from None
    with leader.socket, tempfile.TemporaryDirectory(prefix="ddpperf-") as folder:
        leader.send(codec.encode_message(describe_node(_versions())))
        interface = interface_of(leader.socket.getsockname()[0])

        here = one_tree(config.rootpath)
        snapshot = snapshot_of(config)
        snapshot = snapshot._replace(environ=inherited(snapshot.environ))
        asked = _invocation(config, (), snapshot)

        def start(further: Sequence[str]) -> RemotePytest:
            # Its words are among the arguments.
            variables = {
                name: value
                for name, value in snapshot.environ.items()
                if name != "PYTEST_ADDOPTS"
            }
            remote_pytest = RemotePytest(
                f"node {found.node}",
                sys.executable,
                variables,
                config.invocation_params.dir,
            )
            # to launch as the first node does
            disabled = ["--ddp-disable"] if settings.disable else []
            message = asked.start(here, [*further, *disabled], Path(folder))
            remote_pytest.send(
                replace(
                    message, node=found.node, nodes=found.nodes, interface=interface
                )
            )
            return remote_pytest

        status = NodeWorker(leader, start).run()
    if status is None:
        print(
            f"pytest-ddpperf, node {found.node}: the pytest of node 0 is gone: it was at {where}",
            file=sys.stderr,
        )
        return pytest.ExitCode.TESTS_FAILED
    return status
