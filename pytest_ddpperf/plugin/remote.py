"""How remote pytests are called from a run: other versions, and other nodes."""

import os
import platform
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_ddpperf.launch.request import inherited
from pytest_ddpperf.options import definitions
from pytest_ddpperf.options.settings import read_settings
from pytest_ddpperf.plugin.items import (
    conftests,
    has_any,
    named_tests,
    only_prints,
    words_for_all,
    words_of_call,
)
from pytest_ddpperf.plugin.process import PytestProcess
from pytest_ddpperf.plugin.snapshot import take_snapshot
from pytest_ddpperf.records.errors import DdpPerfError, NodesError
from pytest_ddpperf.remote import rendezvous
from pytest_ddpperf.remote.interfaces import interface_of
from pytest_ddpperf.remote.node_pytests import NodePytests
from pytest_ddpperf.remote.node_worker import NodeWorker
from pytest_ddpperf.remote.nodes import (
    ConnectedNodes,
    OtherNodes,
    describe_node,
)
from pytest_ddpperf.remote.process import START_SECONDS
from pytest_ddpperf.remote.torchrun import Role, TorchrunStore, join_step, role
from pytest_ddpperf.remote.version import (
    BaseSide,
    Invocation,
    remote_arguments,
    spelt_out,
)
from pytest_ddpperf.version import __version__
from pytest_ddpperf.wire.boot import die_with_parent
from pytest_ddpperf.wire.channels import Lines


def another_version(
    run: PytestProcess,
    items: Sequence[pytest.Item],
    nodes: ConnectedNodes | None,
) -> BaseSide:
    """Return the other version that was asked for, with the current tests, on this node and all
    other `nodes`; raises AgainstError."""
    return BaseSide(
        run.settings, _of_run(run, _kept(run, items)), run.templates, nodes
    )


def start_commit(
    run: PytestProcess,
    nodes: ConnectedNodes | None,
    commit: str,
    seconds: float,
) -> BaseSide:
    """Start a commit's own tests, on this node and all other `nodes`, to be interleaved with
    today's, within so many seconds; raises DdpPerfError."""
    invocation = replace(_of_run(run, ()), own_tests=True)
    side = BaseSide(
        replace(run.settings, against=commit),
        invocation,
        run.templates,
        nodes,
        seconds=seconds,
    )
    try:
        side.start()
        side.collect(None)
    except BaseException:
        side.close()
        raise
    return side


def _invocation(config: pytest.Config, kept: tuple[str, ...]) -> Invocation:
    """Return how this pytest was called; `kept` is as `Invocation` has it."""
    call, snapshot = config.invocation_params, take_snapshot(config)
    called_with = (*words_of_call(config), *words_for_all(config))
    # the tests that others depend on do not run there
    if (
        has_any(config.pluginmanager, "dependency pytest_dependency")
        and config.getoption("ddp_against_python") is None
    ):
        called_with += ("--ignore-unknown-dependency",)
    words = (*config.getini("addopts"), *called_with)
    files = [Path(word[1:]).name for word in words if word.startswith("@")]
    return Invocation(
        arguments=tuple(spelt_out(words, call.dir)),
        called_with=called_with,
        caches=config.pluginmanager.hasplugin("cacheprovider"),
        tests=named_tests(config),
        folder=call.dir,
        rootdir=config.rootpath,
        kept=kept,
        ini=config.inipath,
        patterns=(*config.getini("python_files"), *files),
        environ=snapshot.environ,
        sys_path=snapshot.sys_path,
        cores=snapshot.cores,
    )


def _of_run(run: PytestProcess, kept: tuple[str, ...]) -> Invocation:
    found = _invocation(run.config, kept)
    return replace(
        found, arguments=(*found.arguments, *seed(run.config)), rpc=run.rpc
    )


def _kept(run: PytestProcess, items: Sequence[pytest.Item]) -> tuple[str, ...]:
    """Return what both sides have from the working tree: tests, conftests, folders of tests, and
    the ini file."""
    config = run.config
    paths = [item.path for item in items if isinstance(item, pytest.Function)]
    paths += [Path(str(module.__file__)) for module in conftests(config)]
    kept = set(map(os.path.realpath, paths))
    root = config.rootpath.resolve()
    for folder in {Path(path).parent for path in kept} - {root, *root.parents}:
        if _holds_tests_only(folder):
            kept.add(str(folder))
    if config.inipath is not None:
        kept.add(os.path.realpath(config.inipath))
    return tuple(sorted(kept))


def _holds_tests_only(folder: Path) -> bool:
    """Say whether a folder with a test module or a conftest holds tests alone, and no package that
    may be under test."""
    if folder.name.startswith("test"):
        return True
    if (folder / "__init__.py").exists():
        return False
    packages = [file.parent.name for file in folder.rglob("__init__.py")]
    return all(name.startswith("test") for name in packages)


def seed(config: pytest.Config) -> list[str]:
    """Return the option with pytest-randomly's seed, if there is one: both sides have to draw the
    same."""
    number = config.getoption("randomly_seed", None)
    return [f"--randomly-seed={number}"] if isinstance(number, int) else []


def for_nodes(config: pytest.Config) -> list[str]:
    """Return the options that the pytests of other nodes get from this one: a seed, and settings,
    for `ddpperf bisect` has those of a comparison on the first node only."""
    given = [
        f"{row.option}={config.getoption(row.key)}"
        for row in definitions.ROWS
        if row.of_run and row.metavar and config.getoption(row.key) is not None
    ]
    return [*seed(config), *remote_arguments(given, ())]


def main(config: pytest.Config) -> int | None:
    """Work for the first node's pytest if torchrun or srun started this one on another node, and
    return the exit status; None if this pytest has to run as usual."""
    if only_prints(config):  # on each node for itself
        return None
    node = os.environ.get("GROUP_RANK", os.environ.get("SLURM_NODEID"))
    try:
        join_step(os.environ)
        found = role(os.environ)
        if found is None or found.leads:
            return None
        die_with_parent(os.getppid(), signal.SIGTERM)
        if not found.follows:
            # the first of its node is that node's pytest
            return pytest.ExitCode.OK
        return _work_for_leader(config, found)
    except KeyboardInterrupt:
        return pytest.ExitCode.INTERRUPTED
    except DdpPerfError as error:
        raise pytest.UsageError(
            f"pytest-ddpperf, node {node}: {error}"
        ) from None


def meet_nodes(run: PytestProcess) -> OtherNodes | None:
    """Open the door to the other nodes, if torchrun started several and this pytest is the first
    one's; raises pytest.UsageError."""
    if only_prints(run.config):
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
    """Return the versions that have to be the same on all nodes."""
    return {
        "pytest-ddpperf": __version__,
        "pytest": pytest.__version__,
        "Python": platform.python_version(),
    }


def _work_for_leader(config: pytest.Config, found: Role) -> int:
    # torchrun ends it by this signal: no process may be left
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # a mistake is the same on all nodes, so none waits for another
    settings = read_settings(config)
    # the first node may begin later by as much
    seconds = max(START_SECONDS, settings.timeout_seconds)
    with closing(TorchrunStore(found, seconds)) as store:
        reported = store.answer()["found"]
    key = (os.environ.get(rendezvous.VARIABLE) or reported["secret"]).encode()
    where = f"{reported['address']}, port {reported['port']}"

    def connect(port: int) -> Lines:
        connected = rendezvous.connect_to_leader(
            reported["address"], port, key, found.node, seconds
        )
        connected.send(describe_node(_versions()))
        return connected

    try:
        leader = connect(reported["port"])
    except (NodesError, OSError) as error:
        raise NodesError(f"the pytest of node 0 at {where}: {error}") from None
    # what this process starts works for another job than torchrun's
    for name in os.environ.keys() - inherited(os.environ).keys():
        del os.environ[name]
    called = replace(
        _invocation(config, ()),
        environ=inherited(take_snapshot(config).environ),
    )
    place = {
        "node": found.node,
        "nodes": found.nodes,
        "interface": interface_of(leader.socket.getsockname()[0]),
    }
    with (
        leader.socket,
        tempfile.TemporaryDirectory(prefix="ddpperf-") as folder,
        closing(
            NodePytests(settings, called, place, Path(folder), connect)
        ) as pytests,
    ):
        status = NodeWorker(leader, pytests.start, pytests.serve_version).run()
    if status is None:
        print(
            f"pytest-ddpperf, node {found.node}: the pytest of node 0 is gone: it was at {where}",
            file=sys.stderr,
        )
        return pytest.ExitCode.TESTS_FAILED
    return status
