"""Which of two trees of one repository a module comes from: tests from the current one, all else from another version.

Works by files, whatever finds them, and by what links lead to: sys.path, an editable install's own finder, the entries
that pytest adds for test modules, a link to a package from anywhere. Standard library only: pytest's process, the rank
server and the ranks use it.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.machinery import BuiltinImporter, FrozenImporter, ModuleSpec, PathFinder
from importlib.util import spec_from_file_location
from types import ModuleType
from typing import Any

from pytest_ddpperf.records.errors import BaseSideError

_INSTALLED = (f"{os.sep}site-packages", f"{os.sep}dist-packages")
_PREFIXES = {os.path.realpath(prefix) for prefix in (sys.prefix, sys.exec_prefix, sys.base_prefix)}
# Finders that look where we look, or that say what we say.
_NOT_ASKED = ("_frozen_importlib", "importlib", "_pytest", "pytest_ddpperf")
_MOST_LINKS = 40  # from tree to tree, as Linux allows on the way to a file
_NAMED = 5

_real = cache(os.path.realpath)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trees:
    """Absolute paths, links resolved. Where there is one tree only, `hand` and `base` are the same."""

    current: str  # the top of the working tree
    base: str  # the top of the version that this side measures
    kept: tuple[str, ...]  # files, and folders with all in them, that come from the current tree for both sides

    def within(self, path: str) -> str | None:
        """A path of either tree as a relative one; None for what is in neither, or belongs to an interpreter."""
        for root in (self.base, self.current):
            if path == root or _below(path, root):
                break
        else:
            return None  # first, for it is what most of a process's modules are
        if any(part in path for part in _INSTALLED):
            return None
        if any(_below(path, prefix) and _below(prefix, self.current) for prefix in _PREFIXES):
            return None
        return path[len(root) + 1 :]

    def keeps(self, within: str) -> bool:
        """Whether it comes from the current tree for both sides: a test."""
        path = os.path.join(self.current, within)
        return any(path == keep or _below(path, keep) for keep in self.kept)

    def home(self, path: str) -> str:
        """Return where a file of either tree is to come from; a file outside both stays there."""
        within = self.within(path)
        if within is None:
            return path
        return os.path.join(self.current if self.keeps(within) else self.base, within).rstrip(os.sep)

    def followed(self, path: str) -> str:
        """Where what a path leads to is to come from, links resolved; the path itself if it leads there."""
        file = _real(path)
        for _ in range(_MOST_LINKS):
            home = self.home(file)
            if home == file:
                break
            file = _real(home)
        return path if file == _real(path) else file

    def portions(self, folder: str) -> list[str]:
        """What may be seen of a folder of a namespace package: the version's and, of the other tree's, what holds
        tests."""
        home = self.followed(folder)
        if home == folder:
            return [folder]
        with_tests = any(_below(keep, _real(folder)) for keep in self.kept)
        return [home] * os.path.isdir(home) + [folder] * with_tests

    def folders(self, entry: str) -> tuple[str, ...]:
        """Where to look for what a folder of sys.path has: the version's first."""
        within = self.within(_real(entry or os.getcwd()))
        if within is None:
            return (entry,)
        return tuple(os.path.join(root, within).rstrip(os.sep) for root in (self.base, self.current))

    def imported(self) -> list[str]:
        """Return the files of this side that this process's modules came from, sorted."""
        return sorted({within for path, within in self._paused() if path == os.path.join(self.base, within)})

    def others(self) -> list[str]:
        """Return the top-level modules that this process imported from outside both trees, sorted.

        Python's own and this plugin's are left out.
        """
        found = {name.partition(".")[0] for name, path in _loaded() if self.within(path) is None}
        return sorted(found - sys.stdlib_module_names - {__name__.partition(".")[0]})

    def refuse_strays(self) -> None:
        """Raises BaseSideError if this process imported anything but tests from the other tree: whatever way that went,
        what is measured would not be the version."""
        strays = sorted({within for path, within in self._paused() if path != os.path.join(self.base, within)})
        if strays:
            more = ", ..." if len(strays) > _NAMED else ""
            problem = "imported from the working tree, not from the version to compare with"
            raise BaseSideError(f"{problem}: {', '.join(strays[:_NAMED])}{more}")

    def _paused(self) -> Iterator[tuple[str, str]]:
        """The files of either tree that this process's modules came from, tests apart: absolute, and as `within`."""
        for _, path in _loaded():
            within = self.within(path)
            if within is not None and not self.keeps(within):
                yield path, within


def know_loaded() -> None:
    """Follow the links of what is imported by now, for all processes that will be forked from this one: of torch's two
    thousand files each would take a tenth of a second for it."""
    for _ in _loaded():
        pass


def _loaded() -> Iterator[tuple[str, str]]:
    """The modules of this process that came from a file: name and file, links resolved."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and os.path.isabs(file):
            yield name, _real(file)


def digests(root: str, files: Sequence[str]) -> dict[str, str]:
    """By path from `root`, what a file holds, less how the lines of a text end; "" for one that cannot be read."""
    found = {}
    for file in files:
        path = os.path.join(root, file)
        try:
            stat = os.stat(path)
            found[file] = _digest(path, stat.st_mtime_ns, stat.st_size)
        except OSError:
            found[file] = ""
    return found


@cache
def _digest(path: str, modified: int, size: int) -> str:
    with open(path, "rb") as file:
        return digest(file.read())


def digest(data: bytes) -> str:
    """Of what a file holds, as `digests` has it."""
    if b"\0" not in data:  # a text to git, which may end its lines otherwise in each tree; Python reads both alike
        data = data.replace(b"\r\n", b"\n")
    return hashlib.sha256(data).hexdigest()[:16]


def _below(path: str, folder: str) -> bool:
    return path.startswith(folder + os.sep)


def install(trees: Trees) -> Any:
    """Let this process import from both trees: sys.path is mapped, and a finder put before all others and returned."""
    sys.path[:] = [trees.followed(folder) if os.path.isabs(folder) else folder for folder in sys.path]
    finder = _Finder(trees)
    sys.meta_path.insert(0, finder)
    return finder


class _Finder:
    """Finds what is in one of the trees, in the one it is to come from."""

    def __init__(self, trees: Trees) -> None:
        self._trees = trees

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Raises ModuleNotFoundError for what only the wrong tree has: whoever is asked next would take it."""
        __tracebackhide__ = True
        if BuiltinImporter.find_spec(name, path) or FrozenImporter.find_spec(name, path):
            return None
        trees, portions, ours, stray = self._trees, [], False, False
        for entry in sys.path if path is None else path:
            folders = trees.folders(entry)
            for folder in folders:
                spec = PathFinder.find_spec(name, [folder], target)
                if spec is None:
                    continue
                if spec.loader is None or spec.origin is None:  # of a namespace package
                    for part in spec.submodule_search_locations or ():
                        seen = trees.portions(part)
                        portions += seen
                        ours = ours or len(folders) > 1 or seen != [part]
                        stray = stray or not seen
                elif (found := self._at_home(spec)) is not None:
                    return found
                else:
                    stray = True
        for spec in self._otherwise(name, path, target):
            if (found := self._at_home(spec)) is not None:
                return found
            stray = True
        if portions and (ours or stray):  # Python would look in sys.path alone
            namespace = ModuleSpec(name, None, is_package=True)
            namespace.submodule_search_locations = list(dict.fromkeys(portions))
            return namespace
        if stray:
            raise _missing(name)
        return None

    def located(self, name: str, file: str) -> str:
        """Where the module of a file is to be loaded from; raises ModuleNotFoundError."""
        __tracebackhide__ = True
        home = self._trees.followed(file)
        if not os.path.exists(home):
            raise _missing(name)
        return home

    def _at_home(self, spec: ModuleSpec) -> ModuleSpec | None:
        """Return what was found in the tree that it is to come from, or outside both; None if that tree lacks it."""
        origin = str(spec.origin)
        home = self._trees.followed(origin) if spec.has_location else origin
        if home == origin:
            return spec
        for file in map(self._trees.followed, _forms(home)):
            if os.path.exists(file):
                folders = spec.submodule_search_locations or [os.path.dirname(file)]
                package = [*map(self._trees.followed, folders)] if _is_package(file) else None
                return spec_from_file_location(spec.name, file, submodule_search_locations=package)
        return None

    def _otherwise(self, name: str, path: Sequence[str] | None, target: ModuleType | None) -> Iterator[ModuleSpec]:
        """What the finders of editable installs have in one of the trees."""
        for finder in sys.meta_path:
            if str(getattr(finder, "__module__", "")).startswith(_NOT_ASKED) or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None and spec.has_location and self._trees.within(_real(str(spec.origin))) is not None:
                yield spec


def _missing(name: str) -> ModuleNotFoundError:
    return ModuleNotFoundError(f"No module named {name!r} in the version that this is measured with", name=name)


def _is_package(file: str) -> bool:
    return os.path.basename(file).startswith("__init__.")


def _forms(file: str) -> tuple[str, str]:
    """The file of a module, and what it may be in another version: a module for a package, or the other way."""
    if _is_package(file):
        return file, f"{os.path.dirname(file)}.py"
    return file, os.path.join(os.path.splitext(file)[0], "__init__.py")
