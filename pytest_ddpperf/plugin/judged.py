"""Read from collected tests what each would be measured and judged by. Nothing runs."""

import ast
import inspect
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from _pytest.skipping import evaluate_skip_marks, evaluate_xfail_marks

from pytest_ddpperf.options.settings import Settings
from pytest_ddpperf.plugin.imports import imported_names
from pytest_ddpperf.plugin.items import (
    BENCHMARKS,
    RPC,
    WORLD_SIZE,
    marked_settings,
    measures,
    module_of,
    name_of,
    nodeid_of,
    uses,
)
from pytest_ddpperf.plugin.process import PytestProcess
from pytest_ddpperf.records.errors import MarkerError
from pytest_ddpperf.records.guard import EVERY_SIZE, Judged, JudgedTest
from pytest_ddpperf.records.plan import TIME_LIMITS, Limits
from pytest_ddpperf.remote.worktree import INI_FILES
from pytest_ddpperf.verdict.decision import red_names
from pytest_ddpperf.verdict.guard import DESELECTED
from pytest_ddpperf.wire.source_trees import Trees, digest

# What a project's ini file selects tests by, what it loads, and what it does to the other version.
# The last ones are of plugins that set variables, if there are any.
_INI = """
    addopts python_files python_classes python_functions testpaths norecursedirs usefixtures
    ddp_against_setup ddp_baseline_dir env env_files
""".split()
_COLLECTIVE = "collective_benchmark"
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def read_judged(run: PytestProcess, trees: Trees) -> Judged:
    """Return how the collected tests of this pytest would be judged."""
    tests = []
    for items, why_not in ((run.items, ""), (run.deselected, DESELECTED)):
        for item in items:
            if measures(item):
                tests.append(_read_test(item, run.settings, trees, why_not))
    ini: list[object] = [run.settings.preload]
    for name in _INI:
        with suppress(ValueError):
            ini.append(run.config.getini(name))
    return Judged(
        tests=tuple(tests),
        red=tuple(
            red_names(run.settings.fail_on, run.settings.baseline_missing)
        ),
        ini=digest(repr(ini).encode()),
    )


def why_not_judged(run: PytestProcess) -> Iterator[tuple[tuple[str, str], str]]:
    """Yield the module and the name of each test that its marks keep from being judged, and why; ""
    if only a condition (`skipif`) skips it."""
    for item in run.items:
        if why := _why_not(item):
            marks = {mark.name for mark in item.iter_markers()}
            if not marks & {"skip", "xfail"}:
                why = ""
            yield (module_of(run.config, item), name_of(item)), why


def differing_files(
    run: PytestProcess, files: Sequence[str], before: Judged, now: Judged
) -> list[str]:
    """Return those of the files that may have a part in distributed tests: their modules,
    conftests, whatever else is next to tests, and the ini file if it selects other tests.

    What those modules import comes first, and counts even if it is named like a test module."""
    patterns = run.config.getini("python_files")
    modules = {test.file for test in before.tests}
    imported = {*_imported(run)}
    found = []
    for file in files:
        name = Path(file).name
        is_test = any(fnmatch(name, pattern) for pattern in patterns)
        is_helper = not is_test or name in {"conftest.py", *imported}
        if name not in INI_FILES and (file in modules or is_helper):
            found.append(file)
    inipath = run.config.inipath
    if before.ini and before.ini != now.ini:
        found.append(inipath.name if inipath is not None else "the ini file")
    return sorted(found, key=lambda file: Path(file).name not in imported)


def _imported(run: PytestProcess) -> Iterator[str]:
    """Yield the names of the files that modules of distributed tests may import."""
    for item in run.items:
        module: Any = getattr(item, "module", None)
        file = getattr(module, "__file__", None)
        if file is not None and measures(item):
            names = imported_names(file, module.__package__ or "")
            for name in names or ():
                yield name.rpartition(".")[2] + ".py"


def _read_test(
    item: pytest.Item, of_run: Settings, trees: Trees, why_not: str
) -> JudgedTest:
    function = _function_of(item)
    test = JudgedTest(
        nodeid=nodeid_of(item),
        file=trees.within(os.path.realpath(item.path)) or "",
        why_not=why_not or _why_not(item),
        overridden=tuple(_overridden(item)),
        marks=tuple(sorted({mark.name for mark in item.iter_markers()})),
    )
    if function is not None:
        # marks are known by themselves
        wrappers = [
            wrapper
            for wrapper in function.decorator_list
            if not ast.unparse(wrapper).startswith("pytest.mark.")
        ]
        parts = map(ast.dump, (*wrappers, function.args, *function.body))
        body = digest("".join(parts).encode())
        test = replace(test, labels=_labels(function), body=body)
    with suppress(MarkerError):
        settings = marked_settings(item, of_run)
        source, inipath = settings.sources["limits"], item.config.inipath
        if source == "ini" and inipath is not None:
            source = inipath.name
        sizes = getattr(getattr(item, "callspec", None), "params", {})
        is_rpc = uses(item, {RPC})
        servers = settings.parameter_servers if is_rpc else 0
        size = sizes.get(WORLD_SIZE, settings.world_sizes[0])
        return replace(
            test,
            limits=_applying(item, settings.limits),
            limits_from=source,
            nodes=settings.nodes,
            settings={
                # more of them may hide what is slow on one
                "ranks": str(settings.trainers if is_rpc else size),
                "parameter-servers": str(servers),
                "launches": settings.launches,
                "max-launches": settings.max_launches,
                "steps": settings.steps,
                "min-time": settings.min_seconds,
                "backend": settings.backend,
                "device": settings.device,
                "timing": settings.timing,
                "turns": settings.turns,
                # more of it may hide slow steps, and less as well
                "warmup": str(settings.warmup),
            },
        )
    return test


def _applying(item: pytest.Item, limits: Limits) -> Limits:
    """Return the limits that may apply to a test; the default ones if there is none."""
    others = []
    if not uses(item, {_COLLECTIVE}):
        others.append("busbw")
    if not uses(item, {RPC}):
        others += ["rpc.calls", "rpc.bytes"]
    found = [limit for limit in limits if limit.metric not in others]
    return tuple(found) or TIME_LIMITS


def _why_not(item: pytest.Item) -> str:
    """Return why a test would not be judged, by its marks; "" if it would."""
    # Conditions that cannot be evaluated fail the test.
    with suppress(Exception, pytest.fail.Exception):
        if (skip := evaluate_skip_marks(item)) is not None:
            return f'skipped: "{skip.reason}"'
        xfail = evaluate_xfail_marks(item)
        if xfail is not None and not item.config.option.runxfail:
            return f'expected to fail: "{xfail.reason}"'
    return ""


def _overridden(item: pytest.Item) -> Iterator[str]:
    """Yield the plugin's fixtures that something else overrides. pytest has no public way."""
    known = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {})
    for name in sorted({*BENCHMARKS, WORLD_SIZE} & {*known}):
        function = inspect.unwrap(known[name][-1].func)
        module = getattr(function, "__module__", "")
        # a test of several sizes: what pytest makes of our parameter
        is_size = name == WORLD_SIZE and module == "_pytest.python"
        if not (is_size or module.startswith("pytest_ddpperf.")):
            yield f"{name} ({module})"


def _function_of(item: pytest.Item) -> _Function | None:
    """Return the function of a test; None if its source is not known."""
    function: Any = getattr(item, "function", None)
    with suppress(OSError, TypeError, SyntaxError, ValueError):
        source = inspect.getsource(inspect.unwrap(function))
        if source[:1].isspace():  # of a class; lines of a text may begin at 0
            source = f"if True:\n{source}"
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, _Function):
                return node
    return None


def _labels(function: _Function) -> tuple[str, ...] | None:
    """Return the labels of the measurements of a test that are compared with another version; None
    if it calls its fixture in a way that does not show them."""
    args = function.args
    if not BENCHMARKS & {each.arg for each in args.args + args.kwonlyargs}:
        return None  # another fixture calls it
    found: list[str] = []
    named = 0
    for node in ast.walk(function):
        if isinstance(node, ast.Name):
            # else it is passed on to another function
            named += node.id in BENCHMARKS
        fixture = getattr(node, "func", None)
        if isinstance(fixture, ast.Attribute):
            fixture = fixture.value
        if (
            not isinstance(node, ast.Call)
            or not isinstance(fixture, ast.Name)
            or fixture.id not in BENCHMARKS
        ):
            continue
        named -= 1
        given = {each.arg: _constant(each.value) for each in node.keywords}
        label = given.get("name", "")
        if None in given or not isinstance(label, str):
            return None  # known only when it runs
        if fixture.id == _COLLECTIVE:
            label = f"{label}-{EVERY_SIZE}" if label else EVERY_SIZE
        if given.get("gate", True) is True and "reference" not in given:
            found.append(label)
    return None if named else tuple(found)


def _constant(node: ast.expr) -> object:
    """Return the value of a constant; None for anything else."""
    return node.value if isinstance(node, ast.Constant) else None
