"""Which files of the user's repository the processes of a launch open: a rank and the interpreters that it starts.

Python tells an audit hook (PEP 578) of each file before it is opened: modules, data, archives, shared libraries. Each
process adds a file once to a list in the folder of the launch, so that a process that is killed has noted it, too.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from pytest_ddpperf.records.errors import BaseSideError
from pytest_ddpperf.wire.source_trees import CODE, Trees, file_digest, install, refuse

FOLDER = "PYTEST_DDPPERF_LAUNCH"  # the variable that names the folder of the launch
CHILDREN = os.path.join(os.path.dirname(__file__), "children")
_NAME = "opened"
_MOST = 2_000  # files that a process adds
_WRITES = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
_FILE, _LIBRARY, _PROCESS = "fxp"  # what a line is about
# A command with which Python does not read PYTHONPATH, or not import sitecustomize; a shell's, too.
_APART = re.compile(r"python[\d.]*['\"]?(\s+-[A-Za-z]+)*?\s+-[A-Za-z]*[IES]")
_LIBRARIES = ("/lib/", "/lib64/", "/usr/")  # of the system, which the kernel's and Python's versions stand for


def for_children(environ: Mapping[str, str], folder: str | os.PathLike[str]) -> dict[str, str]:
    """Return the variables by which the interpreters that a rank starts come to `begin_child`."""
    path = os.pathsep.join(filter(None, (CHILDREN, environ.get("PYTHONPATH"))))
    return {FOLDER: str(folder), "PYTHONPATH": path}


def watch(folder: str, trees: Trees) -> None:
    """Note from here on what this process opens, and what interpreters it starts."""
    sys.addaudithook(_Watch(os.path.join(folder, _NAME), trees))


def begin_child() -> None:
    """Let an interpreter that a rank started import from the rank's side, and `watch` it."""
    folder = os.environ.get(FOLDER, "")
    with suppress(OSError):  # the launch is over
        with open(os.path.join(folder, "request.json")) as file:
            trees = Trees(**json.load(file)["trees"])
        if trees.base != trees.current:
            install(trees)
        watch(folder, trees)


class _Watch:
    def __init__(self, log: str, trees: Trees) -> None:
        self._log, self._trees = log, trees
        self._seen: set[str] = set()
        self._events: dict[str, Callable[..., None]] = {
            "open": self._opened,
            "import": self._imported,
            "sqlite3.connect": self._opened,
            "ctypes.dlopen": self._loaded,
            "subprocess.Popen": self._started,
            "os.posix_spawn": lambda path, arguments, environ: self._started(path, arguments, None, environ),
            "os.system": lambda command: self._started(command, (command,), None, None),
            "os.exec": lambda path, arguments, environ: self._started(path, arguments, None, environ),
        }

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if (note := self._events.get(event)) is not None:
            with suppress(TypeError, ValueError, OSError):  # what is no path; the user's code goes on
                note(*arguments)

    def _opened(self, path: Any, mode: object = None, flags: int = 0) -> None:
        if flags & _WRITES or isinstance(path, int) or len(self._seen) > _MOST:
            return
        path = os.path.abspath(os.fsdecode(path))
        if path in self._seen:
            return
        self._seen.add(path)
        real = os.path.realpath(path)
        if self._trees.within(real) is not None:
            self._add(_FILE, real)

    def _imported(self, module: str, path: str | None, *_: object) -> None:
        if path:  # of an extension module, which Python does not open itself
            self._opened(path)

    def _loaded(self, name: Any) -> None:
        if os.sep not in (path := os.fsdecode(name)) or path in self._seen:
            return
        self._opened(path)
        real = os.path.realpath(path)
        installed = real.startswith((*_LIBRARIES, sys.prefix, sys.base_prefix)) or "-packages" in real
        if self._trees.within(real) is None and not installed:
            self._add(_LIBRARY, real)

    def _started(self, path: Any, arguments: Sequence[Any], folder: object, environ: Mapping[Any, Any] | None) -> None:
        words = [os.fsdecode(word) for word in (arguments or (path,))]
        for word in words:
            if os.path.isfile(word):
                self._opened(word)
        is_python = os.path.basename(os.fsdecode(path or words[0])).startswith("python")
        without = environ is not None and FOLDER not in {os.fsdecode(name) for name in environ}
        if _APART.search(command := " ".join(words)) or (is_python and without):
            self._add(_PROCESS, command)

    def _add(self, kind: str, what: str) -> None:
        with open(self._log, "ab", buffering=0) as log:
            log.write(os.fsencode(f"{kind}{what}\0"))


class Opened:
    """What the processes of a launch opened, by the list in its folder."""

    def __init__(self, folder: str) -> None:
        try:
            with open(os.path.join(folder, _NAME), "rb") as log:
                lines = sorted({os.fsdecode(line) for line in log.read().split(b"\0")[:-1]})
        except OSError:
            lines = []
        self._lines = lines

    def _of(self, kind: str) -> list[str]:
        return [line[1:] for line in self._lines if line.startswith(kind)]

    def files(self, trees: Trees) -> Iterator[tuple[str, str]]:
        """Yield the files of the repository, tests left out: path from its top, and real path in either tree."""
        for real in map(_source, self._of(_FILE)):
            within = trees.within(real)
            if within is not None and not _is_metadata(within) and not trees.keeps(within):
                yield within, real

    def digests(self, trees: Trees, before: float) -> dict[str, str]:
        """Return the digests of those files that there are, and that were last written `before` a time of the epoch:
        what a run itself writes, a cache or a checkpoint, is no input of it."""
        found = {}
        for within, real in self.files(trees):
            with suppress(OSError):
                if os.stat(real).st_mtime < before:
                    found[within] = file_digest(real)
        return {within: digest for within, digest in found.items() if digest}

    @property
    def libraries(self) -> dict[str, str]:
        """Return the digests, by name, of shared libraries that ctypes loaded from outside the repository."""
        return {os.path.basename(path): file_digest(path) for path in self._of(_LIBRARY)}

    def refuse_strays(self, trees: Trees) -> None:
        """Raise BaseSideError if a process may have used a file of the other tree that is not the same in this one."""
        if trees.base == trees.current:
            return
        for command in self._of(_PROCESS):
            raise BaseSideError(
                f"{command!r} ran without the variables of its rank, so it may have run code of the working tree"
            )
        strays = {within for within, real in self.files(trees) if _is_stray(real, trees.own(within))}
        refuse(sorted(strays), "read")


def _is_stray(real: str, own: str) -> bool:
    if real == own:
        return False
    is_there = os.path.exists(own)
    return file_digest(real) != file_digest(own) if is_there else real.endswith(CODE)


def _source(path: str) -> str:
    """Return the module of a compiled one."""
    folder, name = os.path.split(path)
    if os.path.basename(folder) != "__pycache__":
        return path
    return os.path.join(os.path.dirname(folder), f"{name.partition('.')[0]}.py")


def _is_metadata(within: str) -> bool:
    parts = within.split(os.sep)
    return parts[0] == ".git" or any(part.endswith((".egg-info", ".dist-info")) for part in parts)
