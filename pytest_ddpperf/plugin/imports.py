"""The files that the code of a test imports, by the import statements of its module, of conftests
and of all that these import."""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from pytest_ddpperf.plugin.snapshot import take_snapshot
from pytest_ddpperf.wire.source_trees import Trees

# Code with one of these names may use a file that no import statement names, or leave a process
# that does.
_BUILTINS = frozenset(("__import__", "eval", "exec"))
_OTHER_WAYS = frozenset(
    (
        *("exec_module", "import_module", "importorskip", "load_module"),
        *("pytest_plugins", "reload", "run_module", "run_path"),
        *("spec_from_file_location", "Popen", "Process", "fork", "popen"),
        *("multiprocessing", "subprocess", "system"),
    )
)


def imported_files(item: pytest.Item, trees: Trees) -> frozenset[str] | None:
    """Return the files of the repository, from its top, that the code of a test imports and that
    this process has imported; None if it may use others.

    It may, too, where the environment or the search path is another one than at the start: a module
    that is imported may have changed them.
    """
    start = take_snapshot(item.config)
    has_changed = _differ(start.environ) or _differ_outside(
        trees, start.sys_path
    )
    if has_changed or _shares_fixtures(item, trees):
        return None
    plugins = item.config.pluginmanager.get_plugins()
    modules = [plugin for plugin in plugins if isinstance(plugin, ModuleType)]
    module = getattr(item, "module", None)
    if not isinstance(module, ModuleType):
        return None
    modules.append(module)
    found: set[str] = set()
    done: set[int] = set()
    while modules:
        module = modules.pop()
        file = getattr(module, "__file__", None)
        within = trees.within(os.path.realpath(file)) if file else None
        if file is None or within is None or id(module) in done:
            continue
        done.add(id(module))
        found.add(within)
        if not file.endswith(".py"):
            return None
        names = _imports(file, module.__package__ or "")
        if names is None:
            return None
        for name in names:
            imported = sys.modules.get(name)
            if imported is not None:
                modules.append(imported)
    return frozenset(found)


def _differ(environ: Mapping[str, str]) -> bool:
    """Whether variables are other ones now, but for those that pytest sets."""

    def own(variables: Mapping[str, str]) -> dict[str, str]:
        return {
            name: value
            for name, value in variables.items()
            if not name.startswith("PYTEST_")
        }

    return own(os.environ) != own(environ)


def _differ_outside(trees: Trees, sys_path: Sequence[str]) -> bool:
    """Whether the search path has other folders now, outside the repository."""

    def outside(folders: Sequence[str]) -> list[str]:
        return [
            folder
            for folder in folders
            if folder and trees.within(os.path.realpath(folder)) is None
        ]

    return outside(sys.path) != outside(sys_path)


def _shares_fixtures(item: pytest.Item, trees: Trees) -> bool:
    """Whether a fixture of the repository that the test uses may have been set up by another
    test."""
    info = getattr(item, "_fixtureinfo", None)
    if info is None:
        return True
    for definitions in info.name2fixturedefs.values():
        for definition in definitions:
            if definition.scope == "function":
                continue
            code = getattr(definition.func, "__code__", None)
            if code is None or trees.within(code.co_filename) is not None:
                return True
    return False


@cache
def _imports(file: str, package: str) -> frozenset[str] | None:
    """Return the names that import statements of a file may import; None if it may import others.
    `package`: of its module."""
    tree = ast.parse(Path(file).read_bytes())
    found: set[str] = set()
    for node in ast.walk(tree):
        if _uses_other_ways(node):
            return None
        for name in _named(node, package):
            parts = name.split(".")
            if _OTHER_WAYS.intersection(parts):
                return None
            found.update(
                ".".join(parts[: end + 1]) for end in range(len(parts))
            )
    return frozenset(found)


def _uses_other_ways(node: ast.AST) -> bool:
    match node:
        case ast.Name(id=name):
            return name in _OTHER_WAYS or name in _BUILTINS
        case ast.Attribute(attr=name):
            return name in _OTHER_WAYS
    return False


def _named(node: ast.AST, package: str) -> Iterator[str]:
    match node:
        case ast.Import(names=names):
            for each in names:
                yield each.name
        case ast.ImportFrom(module=module, names=names, level=level):
            name = "." * level + (module or "")
            home = importlib.util.resolve_name(name, package) if level else name
            yield home
            for each in names:
                yield f"{home}.{each.name}"
