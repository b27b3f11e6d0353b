"""The files that the code of a test imports, by what its module, conftests and all that these
import name."""

import ast
import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from pytest_ddpperf.plugin.snapshot import take_snapshot
from pytest_ddpperf.wire.source_trees import Trees

# Code with one of these names may use a file that no import statement names, or leave a process
# that does.
_BUILTINS = frozenset("__import__ eval exec".split())
_OTHER_WAYS = frozenset(
    """
    exec_module import_module importorskip load_module pytest_plugins reload run_module run_path
    spec_from_file_location Popen Process fork popen entry_points getfixturevalue multiprocessing
    subprocess system
    pickle cloudpickle dill joblib unsafe_load instantiate locate
    """.split()
)


def imported_files(
    item: pytest.Item | None, trees: Trees
) -> frozenset[str] | None:
    """Return the files of the repository, from its top, that the code of a test imports and that
    this process has imported; None if it may use others, and without a test.

    It may, too, where the environment, the search path or the working directory is another one than
    at the start: a module that is imported may have changed them.
    """
    module = getattr(item, "module", None)
    if item is None or not isinstance(module, ModuleType):
        return None
    start = take_snapshot(item.config)
    has_changed = (
        _differ(start.environ)
        or _differ_outside(trees, start.sys_path)
        or Path.cwd() != item.config.invocation_params.dir
    )
    if has_changed or _shares_fixtures(item, trees):
        return None
    plugins = item.config.pluginmanager.get_plugins()
    modules = [plugin for plugin in plugins if isinstance(plugin, ModuleType)]
    modules.append(module)
    found: set[str] = set()
    done: set[int] = set()
    while modules:
        module = modules.pop()
        file = getattr(module, "__file__", None) or ""
        if not os.path.isabs(file):  # torch.ops has "_ops.py"
            continue
        within = trees.within(os.path.realpath(file))
        if within is None or id(module) in done:
            continue
        done.add(id(module))
        found.add(within)
        if not file.endswith(".py"):
            return None
        named = imported_names(file, module.__package__ or "")
        if named is None:
            return None
        names = {module.__name__, *named}
        # parents first
        for name in sorted(sys.modules):
            parent, _, last = name.rpartition(".")
            if parent in names and f".{last}" in names:
                names.add(name)
            if name in names:
                modules.append(sys.modules[name])
    return frozenset(found)


def _differ(environ: Mapping[str, str]) -> bool:
    """Whether variables are other ones now, but for the one that pytest sets for each test."""
    own = {"PYTEST_CURRENT_TEST": ""}
    return {**os.environ, **own} != {**environ, **own}


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
def imported_names(file: str, package: str) -> frozenset[str] | None:
    """Return the names that a file may import; None if it may import others. With a dot before
    them: names that it may take from a package. `package`: of its module."""
    tree = ast.parse(Path(file).read_bytes())
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in _OTHER_WAYS | _BUILTINS:
            return None
        for name in _named(node, package):
            parts = name.split(".")
            if _OTHER_WAYS.intersection(parts):
                return None
            found.update(
                ".".join(parts[: end + 1]) for end in range(len(parts))
            )
    return frozenset(found - {""})


def _named(node: ast.AST, package: str) -> Iterator[str]:
    match node:
        case ast.Import(names=names):
            for each in names:
                yield each.name
        case ast.ImportFrom(module=module, names=names, level=level):
            name = "." * level + (module or "")
            # raised of a relative name in a module of no package
            with suppress(ImportError):
                home = importlib.util.resolve_name(name, package)
                yield home
                for each in names:
                    yield f"{home}.{each.name}"
        case ast.Attribute(attr=name):
            yield f".{name}"
        case ast.Constant(value=str(text)):
            # of `getattr`, `sys.modules` or `pkgutil.resolve_name`
            yield text.partition(":")[0]
            yield f".{text}"
