"""Which of two trees of one repository a module comes from: the worktree of the version that this
side measures.

A side's pytest runs in its worktree, with tests that were copied into it. What leads back to the
current tree all the same (an editable install, a symbolic link, an absolute entry of sys.path) is
found in the worktree, too, at the same place. Standard library only: pytest's process, the rank
server and the ranks use it.
"""

import ast
import hashlib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_file_location
from itertools import islice
from pathlib import Path
from types import ModuleType

from pytest_ddpperf.records.errors import BaseSideError
from pytest_ddpperf.records.record import record

_INSTALLED = (f"{os.sep}site-packages", f"{os.sep}dist-packages")
_OF_PACKAGE = re.compile(rf".*(?:{'|'.join(_INSTALLED)}){os.sep}([^/.]+)")
# Where compilers keep what they generate, by the variable that says so. (A rank always has that of
# Inductor.)
_CACHES = {
    "TORCHINDUCTOR_CACHE_DIR": "/torchinductor",
    "TRITON_CACHE_DIR": os.path.expanduser("~/.triton/cache"),
}
_PREFIXES = {
    os.path.realpath(prefix)
    for prefix in (sys.prefix, sys.exec_prefix, sys.base_prefix)
}
_PLUGIN = __name__.partition(".")[0]  # the same on both sides, wherever it is
_NAMED = 5

real_path = cache(os.path.realpath)
# Names of modules that no finder has, with the search path and the number of finders.
_found_nowhere: set[tuple[str, tuple[str, ...], int]] = set()


@record
class Trees:
    """Absolute paths, links resolved. Where there is one tree only, `current` and `base` are the
    same."""

    current: str  # the top of the working tree
    base: str  # the top of the version that this side measures
    # tests: files, and folders with all in them, of the current tree that `base` has
    # copies of
    kept: tuple[str, ...]

    def within(self, path: str) -> str | None:
        """Return a path of either tree as a relative one; None if it is in neither, or belongs to
        an interpreter."""
        for root in (self.base, self.current):
            if path == root or _below(path, root):
                break
        else:
            return None  # first, for it is what most of a process's modules are
        if any(part in path for part in _INSTALLED):
            return None
        if any(
            (path == prefix or _below(path, prefix))
            and _below(prefix, self.current)
            for prefix in _PREFIXES
        ):
            return None
        return path[len(root) + 1 :]

    def keeps(self, within: str) -> bool:
        """Whether a relative path is a test, which both sides have from the current tree."""
        path = os.path.join(self.current, within)
        return any(path == keep or _below(path, keep) for keep in self.kept)

    def followed(self, path: str) -> str:
        """Return where this side has what a path leads to: the path itself unless that is in the
        current tree."""
        file = real_path(path)
        within = self.within(file)
        home = (
            file
            if within is None
            else os.path.join(self.base, within).rstrip(os.sep)
        )
        return path if home == file else home

    def as_current(self, words: str) -> str:
        """Return a text with paths in this side's tree as if they were in the current one."""
        return words.replace(self.base, self.current)

    def imported(self) -> list[str]:
        """Return the files of this side that this process's modules came from, tests left out,
        sorted."""
        return sorted(
            {
                within
                for path, within in self._modules()
                if path == self.own(within)
            }
        )

    def own(self, within: str) -> str:
        """Return where this side has a relative path."""
        return os.path.join(self.base, within)

    def digests(self, files: Iterable[str]) -> dict[str, str]:
        """Return, by relative path, the `file_digest` of this side's files."""
        return {file: file_digest(self.own(file)) for file in files}

    def changed_functions(self, within: str) -> set[str]:
        """Return the names of the functions and classes of a Python file that differ between both
        trees. A difference within a nested one counts for the inner one only. `MODULE` is among
        them if other code differs, or if the file cannot be read. Comments do not count."""
        try:
            before, now = (
                {*_functions(ast.parse(Path(top, within).read_bytes()))}
                for top in (self.base, self.current)
            )
        except (OSError, SyntaxError, ValueError, RecursionError):
            return {MODULE}
        return {name for name, _ in before ^ now}

    def others(self) -> list[str]:
        """Return what this process imported from outside both trees, sorted: of installed packages
        the names in their folder, of others the top-level modules, as "name@folder", by the
        folder that a search path has.

        Python's own, this plugin's, and what compilers generated are left out.
        """
        left_out = {*sys.stdlib_module_names, _PLUGIN}
        caches = [
            os.path.realpath(os.environ.get(variable) or default)
            for variable, default in _CACHES.items()
        ]
        found = set()
        for name, path in _loaded():
            top, *below = name.split(".")
            if top in left_out or self.within(path) is not None:
                continue
            if any(_below(path, folder) for folder in caches):
                continue
            if installed := _OF_PACKAGE.match(path):
                # what a package brings along (setuptools/_vendor) is a part of it
                found.add(installed[1])
            # None of a namespace
            elif not below or not getattr(
                sys.modules.get(top), "__file__", None
            ):
                is_package = os.path.basename(path).startswith("__init__.")
                found.add(
                    f"{top}@{Path(path).parents[len(below) + is_package]}"
                )
        return sorted(found)

    def refuse_strays(self) -> None:
        """Raise BaseSideError if this process imported anything from the other tree.

        However that came about, what is measured would not be the version. A file that is the same
        there may be: an interpreter has sitecustomize before its imports go to the other tree.
        """
        if self.base == self.current:
            return
        refuse_files(
            sorted(
                {
                    within
                    for path, within in self._modules()
                    if path != self.own(within)
                    and file_digest(path) != file_digest(self.own(within))
                }
            ),
            "imported",
        )

    def _modules(self) -> Iterator[tuple[str, str]]:
        """Yield the files of either tree that this process's modules came from: absolute, and as
        `within`."""
        for name, path in _loaded():
            within = self.within(path)
            if (
                within is not None
                and not self.keeps(within)
                and name.partition(".")[0] != _PLUGIN
            ):
                yield path, within

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Ask all other finders, and move what they find in the current tree to the version's.

        Raise ModuleNotFoundError for what only the current tree has: whoever is asked next would
        take it.
        """
        __tracebackhide__ = True
        if name.partition(".")[0] == _PLUGIN:
            return None
        asked = (
            name,
            tuple(sys.path if path is None else path),
            len(sys.meta_path),
        )
        if asked in _found_nowhere:
            # all others are asked behind this one: a step that looks for a module shall
            # not wait twice
            return None
        is_missing = False
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = (
                finder.find_spec(name, path, target)
                if hasattr(finder, "find_spec")
                else None
            )
            if spec is None:
                continue
            if (moved := self._moved(spec)) is not None:
                return moved
            is_missing = True
        if is_missing:
            raise ModuleNotFoundError(
                f"No module named {name!r} in the version to compare with",
                name=name,
            )
        _found_nowhere.add(asked)
        return None

    def invalidate_caches(self) -> None:
        """For `importlib.invalidate_caches`, after files were made."""
        _found_nowhere.clear()

    def _moved(self, spec: ModuleSpec) -> ModuleSpec | None:
        """Return what was found, in the version's tree where it is in one; None if that tree lacks
        it."""
        folders = list(spec.submodule_search_locations or ())
        moved = list(map(self.followed, folders))
        if spec.origin is None or not spec.has_location:
            if moved == folders:
                return spec
            namespace = ModuleSpec(spec.name, None, is_package=True)
            namespace.submodule_search_locations = list(
                dict.fromkeys(filter(os.path.isdir, moved))
            )
            return namespace if namespace.submodule_search_locations else None
        home = self.followed(spec.origin)
        if home == spec.origin:
            return spec
        if os.path.exists(home):
            is_package = spec.submodule_search_locations is not None
            return spec_from_file_location(
                spec.name,
                home,
                submodule_search_locations=moved if is_package else None,
            )
        # A module there may be a package in the version, or the other way.
        folder = os.path.dirname(home)
        return PathFinder.find_spec(
            spec.name, [os.path.dirname(folder) if folders else folder]
        )


MODULE = "<module>"  # the name of code that is in no function
_WITH_NAME = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def _functions(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the name and the own code of each function and class within a node, and of the node if
    it is one, or a module. Own code is without the bodies of those within it, which are removed
    from the node."""
    for each in ast.iter_child_nodes(node):
        yield from _functions(each)
        if isinstance(each, _WITH_NAME):
            each.body = []
    if isinstance(node, _WITH_NAME):
        yield node.name, ast.dump(node)
    elif isinstance(node, ast.Module):
        yield MODULE, ast.dump(node)


def is_code(file: str) -> bool:
    """Whether a file is code by its name, Python's or a library's: each version has its own."""
    return file.endswith(
        (".py", ".pyc", ".so", ".pyd", ".dylib")
    ) or ".so." in os.path.basename(file)


def refuse_files(strays: Sequence[str], how: str) -> None:
    """Raise BaseSideError if there are files of the other tree that this side has used."""
    if strays:
        more = ", ..." if len(strays) > _NAMED else ""
        problem = (
            f"{how} from the working tree, not from the version to compare with"
        )
        raise BaseSideError(f"{problem}: {', '.join(strays[:_NAMED])}{more}")


def know_loaded(known: int = 0) -> None:
    """Resolve the links of all files imported by now, but for the first `known` modules, for the
    processes that are forked from this one: torch has two thousand files, for which each rank would
    take a tenth of a second."""
    for _ in _loaded(known):
        pass


def _loaded(known: int = 0) -> Iterator[tuple[str, str]]:
    """Yield the name and the file, links resolved, of each module of this process that came from a
    file, the last one first, without the first `known`. Python counts references to a module that
    is looked at, and so copies memory that this process shares with the one that forked it."""
    names = islice(reversed(sys.modules), max(len(sys.modules) - known, 0))
    for name in list(names):
        file = getattr(sys.modules[name], "__file__", None)
        if isinstance(file, str) and os.path.isabs(file):
            yield name, real_path(file)


def file_digest(path: str) -> str:
    """Return the `digest` of a file, of a large one by its size and both its ends; "" if it cannot
    be read."""
    try:
        stat = os.stat(path)
        return _digest(path, stat.st_mtime_ns, stat.st_size)
    except OSError:
        return ""


_LARGE = 4 << 20  # bytes
_END = 1 << 20


@cache
def _digest(path: str, modified: int, size: int) -> str:
    with open(path, "rb") as file:
        if size < _LARGE or is_code(path):
            return digest(file.read())
        start = file.read(_END)
        file.seek(-_END, os.SEEK_END)
        return digest(b"%d\0%b%b" % (size, start, file.read()))


def digest(data: bytes) -> str:
    """Return a short digest of a file's content, whichever way its lines end."""
    # a text to git, which may end its lines otherwise in each tree; Python reads both
    # alike
    if b"\0" not in data:
        data = data.replace(b"\r\n", b"\n")
    return hashlib.sha256(data).hexdigest()[:16]


def _below(path: str, folder: str) -> bool:
    return path.startswith(folder + os.sep)


def install(trees: Trees) -> None:
    """Let this process import from the version's tree: map sys.path, and put a finder before all
    others. Where there is one tree it changes nothing, and an import takes as long on both sides
    of a comparison."""
    sys.path[:] = [
        trees.followed(folder) if os.path.isabs(folder) else folder
        for folder in sys.path
    ]
    if trees not in sys.meta_path:  # once: each asks all those behind itself
        sys.meta_path.insert(0, trees)
