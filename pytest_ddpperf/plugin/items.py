"""What a test is to the plugin: the fixtures it asks for, its world sizes, its place and its names."""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_ddpperf.options.table import ROWS

if TYPE_CHECKING:
    from pytest_ddpperf.options import Settings
    from pytest_ddpperf.records.errors import MarkerError

WORLD_SIZE = "_ddp_world_size"
RPC = "rpc_benchmark"
BENCHMARKS = frozenset({"ddp_benchmark", "collective_benchmark", RPC})
FIXTURES = BENCHMARKS | {"ddp_run"}
# Settings that a baseline's path holds, or that must be the same on both sides.
_CHOOSE_BASELINE = frozenset(
    {"world_sizes", "trainers", "parameter_servers", "backend", "device", "warmup", "timing", "baseline_dir"}
)
_INSTALLED = frozenset({"site-packages", "dist-packages"})  # folders, wherever an environment is


def uses(item: pytest.Item, fixtures: Collection[str]) -> bool:
    """Whether a test asks for one of these fixtures, itself or by another."""
    return any(name in fixtures for name in getattr(item, "fixturenames", ()))


def is_distributed(item: pytest.Item) -> bool:
    return uses(item, FIXTURES)


def world_sizes(item: pytest.Item, settings: Settings) -> tuple[int, ...]:
    """The one of a test that is parametrised with several; else those it was asked to have."""
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    return (parameters[WORLD_SIZE],) if WORLD_SIZE in parameters else settings.world_sizes


def with_place(item: pytest.Item, error: MarkerError) -> str:
    """A mistake with the test it is of, and its place: the text stands where no traceback tells."""
    path, line, name = item.reportinfo()
    place = os.path.relpath(path, item.config.invocation_params.dir) + (f":{line + 1}" if line is not None else "")
    return f"{place}: {name}: {error}"


def named_tests(config: pytest.Config) -> tuple[str, ...]:
    """The words of the command line that name tests; none where the ini file does, or nothing."""
    return tuple(config.args) if config.args_source is config.ArgsSource.ARGS else ()


def accept_command(item: pytest.Item, settings: Settings) -> str:
    """Return the command that records this test's baseline, with the options that choose its file."""
    config = item.config
    words = ["pytest", f"{os.path.relpath(item.path, config.invocation_params.dir)}::{_within(item)}"]
    for row in ROWS:
        if row.field in _CHOOSE_BASELINE and settings.sources[row.field] == "command line":
            words += [row.option, config.getoption(row.key)]
    if hasattr(config, "workerinput"):  # xdist's workers may not record
        words += ["-n", "0"]
    return shlex.join([*words, "--ddp-save-baseline"])


def nodeid_of(item: pytest.Item) -> str:
    """As it was collected: with --dist loadgroup xdist's workers add the group."""
    return f"{item.nodeid.partition('::')[0]}::{_within(item)}"


def _within(item: pytest.Item) -> str:
    """The node id behind the module."""
    above = (pytest.Session, pytest.Directory, pytest.File)
    return "::".join(node.name for node in item.listchain() if not isinstance(node, above))


def module_of(config: pytest.Config, item: pytest.Item) -> str:
    """`TestId.module`: the path from rootdir, or the import name of what is outside it or installed, in an environment
    below rootdir say: where that is depends on the machine and on Python's version."""
    path = Path(item.path)
    if path.is_relative_to(config.rootpath):
        below = path.relative_to(config.rootpath)
        if not _INSTALLED.intersection(below.parts):
            return below.with_suffix("").as_posix()
    return str(getattr(getattr(item, "module", None), "__name__", path.stem))


def name_of(item: pytest.Item, world_size: int) -> str:
    """`TestId.name`: the node id behind the module, less the world size, which has its place in the environment."""
    name = _within(item)
    callspec = getattr(item, "callspec", None)
    if callspec is None or WORLD_SIZE not in callspec.params:
        return name
    stem = name.removesuffix(f"[{callspec.id}]")
    others = callspec.id.removesuffix(f"ws{world_size}").removesuffix("-")
    return f"{stem}[{others}]" if others else stem
