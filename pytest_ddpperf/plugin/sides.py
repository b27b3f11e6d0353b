"""How other versions are called from a run: the one that it is compared with, and those of baselines."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_ddpperf.against import BaseSide, Invocation
from pytest_ddpperf.launch.request import inherited
from pytest_ddpperf.led.arguments import spelt_out
from pytest_ddpperf.plugin.items import conftests, named_tests
from pytest_ddpperf.plugin.state import Run

PLUGIN = os.path.realpath(Path(__file__).parents[1])  # which both sides have from here


def another_version(run: Run, items: Sequence[pytest.Item]) -> BaseSide:
    """The one that was asked for, with the tests at hand; raises AgainstError."""
    asked = _of_run(run, _kept(run, items))
    if run.fleet is None:
        return BaseSide(run.settings, asked)
    from pytest_ddpperf.nodes.base import BaseOfNodes

    return BaseOfNodes(run.settings, asked, run.fleet, lambda: run.session.launcher)


def of_commit(run: Run, commit: str, seconds: float) -> BaseSide:
    """Start a commit's own tests, to be interleaved with today's, within so many seconds; raises DdpPerfError."""
    side = BaseSide(replace(run.settings, against=commit), replace(_of_run(run, (PLUGIN,)), own_tests=True))
    try:
        side.start(seconds)
        side.collect(None)
    except BaseException:
        side.close()
        raise
    return side


def invocation(
    config: pytest.Config,
    kept: tuple[str, ...],
    *,
    environ: Mapping[str, str],
    sys_path: Sequence[str],
) -> Invocation:
    """How this pytest was called; the rest as `Invocation` has it."""
    return Invocation(
        arguments=(
            *config.getini("addopts"),
            *shlex.split(os.environ.get("PYTEST_ADDOPTS", "")),
            *spelt_out(map(str, config.invocation_params.args), config.invocation_params.dir),
        ),
        caches=config.pluginmanager.hasplugin("cacheprovider"),
        tests=named_tests(config),
        folder=config.invocation_params.dir,
        rootdir=config.rootpath,
        kept=kept,
        environ=environ,
        sys_path=sys_path,
    )


def _of_run(run: Run, kept: tuple[str, ...]) -> Invocation:
    outset = run.outset
    environ = outset.environ if run.fleet is None else inherited(outset.environ)  # which would lead, too
    found = invocation(run.config, kept, environ=environ, sys_path=outset.sys_path)
    return replace(found, arguments=(*found.arguments, *seed(run.config)))


def _kept(run: Run, items: Sequence[pytest.Item]) -> tuple[str, ...]:
    """What comes from the working tree on both sides: tests, conftests, and the folders of tests they are in."""
    tests = {os.path.realpath(item.path) for item in items if isinstance(item, pytest.Function)}
    own = {os.path.realpath(str(module.__file__)) for module in conftests(run.config)}
    root = Path(os.path.realpath(run.config.rootpath))
    folders = {path for path in map(os.path.dirname, tests | own) if _of_tests(Path(path))}
    folders -= {str(root), *map(str, root.parents)}
    return (*sorted(tests | own | folders), PLUGIN)


def _of_tests(folder: Path) -> bool:
    """Whether a folder with a test module or a conftest holds tests alone, and no package that may be under test."""
    if folder.name.startswith("test"):
        return True
    packages = [path.parent for path in (folder / "__init__.py", *folder.glob("*/__init__.py")) if path.exists()]
    return all(package.name.startswith("test") for package in packages)


def seed(config: pytest.Config) -> list[str]:
    """pytest-randomly's, if it draws: both sides shall draw the same."""
    seed = config.getoption("randomly_seed", None)
    return [f"--randomly-seed={seed}"] if isinstance(seed, int) else []
