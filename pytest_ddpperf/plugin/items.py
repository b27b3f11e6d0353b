"""Read from a pytest item what the plugin needs: fixtures, world sizes, names and modules."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

from pytest_ddpperf.options.definitions import ROWS

if TYPE_CHECKING:
    from pytest_ddpperf.options.settings import Settings
    from pytest_ddpperf.plugin.process import PytestProcess
    from pytest_ddpperf.records.errors import OptionError

WORLD_SIZE = "ddp_world_size"
RPC = "rpc_benchmark"
BENCHMARKS = frozenset({"ddp_benchmark", "collective_benchmark", RPC})
FIXTURES = BENCHMARKS | {"ddp_run"}
# Settings that a baseline's path holds, that must be the same on both sides, or that the guard
# compares.
_CHOOSE_BASELINE = """
    world_sizes trainers parameter_servers backend device warmup timing baseline_dir limits
    launches max_launches
""".split()
COLLECTED = pytest.StashKey[str]()  # the node id as collected
# folders, wherever an environment is
_INSTALLED = frozenset({"site-packages", "dist-packages"})


def uses(item: pytest.Item, fixtures: Collection[str]) -> bool:
    """Say whether a test uses one of these fixtures, directly or through another."""
    return any(name in fixtures for name in getattr(item, "fixturenames", ()))


def is_distributed(item: pytest.Item) -> bool:
    return uses(item, FIXTURES)


def measures(item: pytest.Item) -> bool:
    return uses(item, BENCHMARKS)


PYTEST_BENCHMARK = "benchmark pytest_benchmark.plugin"


def has_any(plugins: pytest.PytestPluginManager, names: str) -> bool:
    """Say whether a plugin is there, by one of its `names`: of its entry point, or of its module
    (`-p`)."""
    return any(map(plugins.hasplugin, names.split()))


def with_place(item: pytest.Item, error: OptionError) -> str:
    """Return the text of a mistake with the test's name and line, since no traceback shows them."""
    name, line = _named(item), item.reportinfo()[1]
    if line is not None:
        name += f" (line {line + 1})"
    return f"{name}: {error}"


def named_tests(config: pytest.Config) -> tuple[str, ...]:
    """Return the words that name tests, of the command line and of `addopts`; () if `testpaths`
    names them, or nothing does."""
    return (
        tuple(config.args)
        if config.args_source is config.ArgsSource.ARGS
        else ()
    )


def words_of_call(config: pytest.Config) -> list[str]:
    """Return what pytest was called with, PYTEST_ADDOPTS included."""
    return [
        *shlex.split(os.environ.get("PYTEST_ADDOPTS", "")),
        *map(str, config.invocation_params.args),
    ]


def _words_of_ini(config: pytest.Config) -> list[str]:
    from pytest_ddpperf.remote.version import spelt_out

    return [*spelt_out(config.getini("addopts"), config.invocation_params.dir)]


def only_prints(config: pytest.Config, further: str = "") -> bool:
    """Say whether pytest has an option with which it prints something and runs no test, or one of
    the `further` options."""
    names = f"help version markers showfixtures show_fixtures_per_test cacheshow {further}"
    return any(config.getoption(name, None) for name in names.split())


# Plugins that run a part of all tests, by their entry points and modules, with their option for
# that, and the words that undo it.
_DIVIDE = {
    "pytest-split pytest_split.plugin": ("splits", "--splits=1 --group=1"),
    "test-groups pytest_test_groups": (
        "test-group",
        "--test-group-count=1 --test-group=1",
    ),
    "pytest-testmon testmon.pytest_testmon": ("testmon", "--no-testmon"),
}


def words_for_all(config: pytest.Config) -> Iterator[str]:
    """Yield what lets all tests run in a call that runs a part of them."""
    for names, (option, words) in _DIVIDE.items():
        if has_any(config.pluginmanager, names) and config.getoption(option):
            yield from words.split()


def selects_tests(config: pytest.Config) -> bool:
    """Say whether the call names single tests, or those that the last run left, or whether a plugin
    gives it a part of all tests."""
    by_last_run = re.compile(r"--(lf|last-failed|sw|stepwise)\b")
    by_call, by_ini = words_of_call(config), _words_of_ini(config)
    return (
        any(map(by_last_run.match, by_call))
        or any(words_for_all(config))
        or any(
            "::" in word and (word in by_call or word not in by_ini)
            for word in named_tests(config)
        )
    )


def leaves_tests_out(run: PytestProcess) -> bool:
    """Say whether the call selects tests, or a plugin does, so that tests which are not there mean
    nothing. What the ini file selects is not meant."""
    selects = re.compile(
        # the last one is pytest-shard's
        r"-[dfhlqsvxV]*[km]|--deselect|--ignore(-glob)?(=|$)|--shard-id"
    )
    by_ini = any(map(selects.match, _words_of_ini(run.config)))
    if run.deselected and not by_ini:
        return True
    by_call = map(selects.match, words_of_call(run.config))
    return any(by_call) or selects_tests(run.config)


def moved_rootdir(config: pytest.Config) -> str:
    """Return, in words, that an option's value moved pytest's rootdir, and what to write; "" if
    none did. pytest finds its rootdir before it knows our options: it takes a word that names a
    path for one of tests."""
    call, rootdir = config.invocation_params, config.rootpath
    if config.inipath or config.option.rootdir or rootdir == call.dir:
        return ""
    with_value = {row.option for row in ROWS if row.parser}
    for option, value in pairwise(map(str, call.args)):
        leads_away = value.startswith(("..", "/"))
        if leads_away and option in with_value and (call.dir / value).exists():
            return (
                f"pytest takes {value} for a path of tests, and its rootdir is {rootdir}: write"
                f" {option}={value}, or set it in an ini file"
            )
    return ""


def accept_command(item: pytest.Item, settings: Settings) -> str:
    """Return the command that records this test's baseline, with the options that choose its
    file."""
    config = item.config
    words = ["pytest", _named(item)]
    for row in ROWS:
        is_given = settings.sources[row.field] == "command line"
        if row.field == "launches" and settings.launches == 1:
            continue  # a baseline needs two
        if is_given and row.field in _CHOOSE_BASELINE:
            # else a path may be taken for one of tests
            words.append(f"{row.option}={config.getoption(row.key)}")
    given = config.option.inifilename or config.option.rootdir
    # pytest would look for its rootdir where the test is
    if given or not item.path.is_relative_to(config.rootpath):
        start = config.invocation_params.dir
        # the null device serves as an empty ini file
        ini = (
            os.path.relpath(config.inipath, start)
            if config.inipath
            else os.devnull
        )
        words += [
            "-c",
            ini,
            "--rootdir",
            os.path.relpath(config.rootpath, start),
        ]
    for pair in config.option.override_ini or ():
        words += ["-o", pair]
    # xdist's workers may not record, and `addopts` may ask for some
    is_worker = hasattr(config, "workerinput")
    if is_worker or config.getoption("numprocesses", None) == 0:
        words += ["-n", "0"]
    return shlex.join([*words, "--ddp-save-baseline"])


def marked_settings(item: pytest.Item, of_run: Settings) -> Settings:
    """Return the settings of one test: its markers over those of the run; those of its parameters
    are the closest. Raises MarkerError."""
    from pytest_ddpperf.options.settings import with_markers

    marks = getattr(getattr(item, "callspec", None), "marks", ())
    closest = [mark for mark in marks if mark.name == "ddp"]
    for node in item.iter_parents():
        own = [mark for mark in node.own_markers if mark.name == "ddp"]
        # a class has those of its bases first
        closest += reversed(own) if isinstance(node, pytest.Class) else own
    return with_markers(of_run, closest)


def has_own_sizes(metafunc: pytest.Metafunc) -> bool:
    """Say whether a test's parameters have a world size, as a value or by a marker."""
    return any(
        WORLD_SIZE in call.params
        or any("world_size" in mark.kwargs for mark in call.marks)
        for call in metafunc._calls
    )


def nodeid_of(item: pytest.Item) -> str:
    """Return the node id as collected, by which pytest finds the test. Afterwards conftests may
    rename it, and xdist's workers add the group of --dist loadgroup."""
    return item.stash.get(COLLECTED, item.nodeid)


def _named(item: pytest.Item) -> str:
    """Return the node id from where pytest was called, to be pasted there."""
    return f"{os.path.relpath(item.path, item.config.invocation_params.dir)}::{_within(item)}"


def _within(item: pytest.Item) -> str:
    """Return the part of the node id after the module."""
    return nodeid_of(item).partition("::")[2]


def module_of(config: pytest.Config, item: pytest.Item) -> str:
    """Return `TestId.module`: the path from rootdir, or the import name if the test is outside it
    or installed.

    Where an installed package lies depends on the machine and on Python's version."""
    path = Path(item.path)
    if path.is_relative_to(config.rootpath):
        below = path.relative_to(config.rootpath)
        if not _INSTALLED.intersection(below.parts):
            return below.with_suffix("").as_posix()
    return str(getattr(getattr(item, "module", None), "__name__", path.stem))


def name_of(item: pytest.Item) -> str:
    """Return `TestId.name`: the node id after the module without the world size, which the
    environment names."""
    name = _within(item)
    callspec = getattr(item, "callspec", None)
    if callspec is None or WORLD_SIZE not in callspec.params:
        return name
    stem = name.removesuffix(f"[{callspec.id}]")
    own = f"ws{callspec.params[WORLD_SIZE]}"
    others = callspec.id.removesuffix(own).removesuffix("-")
    return f"{stem}[{others}]" if others else stem


def modules_by_name(
    config: pytest.Config, items: Sequence[pytest.Item]
) -> Mapping[str, str]:
    """Return the files of test modules, conftests and their packages by module name."""
    test_modules = [getattr(item, "module", None) for item in items]
    modules = [each for each in test_modules if isinstance(each, ModuleType)]
    modules += conftests(config)
    # Outside packages all conftests have one name: by that the last of them is imported. A notebook
    # has no file.
    modules.sort(key=lambda module: sys.modules.get(module.__name__) is module)
    return {
        module.__name__: file
        for module in modules
        if (file := getattr(module, "__file__", None))
    }


def conftests(config: pytest.Config) -> list[ModuleType]:
    """Return all conftests, also those that share a name."""
    plugins = config.pluginmanager.get_plugins()
    modules = [each for each in plugins if isinstance(each, ModuleType)]
    return [
        module
        for module in modules
        if Path(getattr(module, "__file__", None) or "").name == "conftest.py"
    ]
