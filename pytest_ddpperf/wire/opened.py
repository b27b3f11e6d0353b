"""Which files of the user's repository the processes of a launch open: a rank and the interpreters
that it starts; and whether these form a process group of their own.

Python tells an audit hook (PEP 578) of each file before it is opened: modules, data, archives,
shared libraries. Each process adds a file once to a list in the folder of the launch, so that a
process that is killed has noted it, too.
"""

import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from importlib.util import source_from_cache
from pathlib import Path
from typing import Any

from pytest_ddpperf.records.errors import BaseSideError
from pytest_ddpperf.wire import layout
from pytest_ddpperf.wire.source_trees import (
    Trees,
    file_digest,
    install,
    is_code,
    refuse_files,
)

# the variable that names the folder of the launch
FOLDER = "PYTEST_DDPPERF_LAUNCH"
CHILDREN = os.path.join(os.path.dirname(__file__), "children")
_NAME = "opened"
# the file in the folder of the launch that says why it is refused: a rank's children form a group
OWN_GROUP = "own-group"
# The file that says the same of a group of one process. A helper may form one, so the launch goes
# on until its deadline.
OWN_GROUP_OF_ONE = "own-group-of-one"
_GROUPS = "torch.distributed.distributed_c10d"
_REMEDY = (
    "give the program of one rank, which runs as under torchrun, with RANK and WORLD_SIZE; with"
    " other variables, set them in ddp_benchmark.loop"
)
# By the module that has it, the function that forms a group, and what to do instead.
_FORMS = {
    _GROUPS: ("init_process_group", _REMEDY),
    "torch.distributed.rpc": (
        "init_rpc",
        "for torch.distributed.rpc there are rpc_benchmark and ddp_benchmark.command",
    ),
}
_RUNS_AGAIN = (
    "a process that the program started, a DataLoader's worker for example, ran the program again:"
    ' begin what it does with `if __name__ == "__main__":`'
)
_MOST = 2_000  # data files that a process adds
_MOST_LINKS = 40  # one after the other, as Linux allows
_REMEMBERED = 100_000  # paths that a process need not look at again
_WRITES = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
_FILE, _LIBRARY, _PROCESS = "fxp"  # what a line is about
_PYTHON = re.compile(r"([^-].*/)?python[\d.]*")
_SHELLS = "sh bash dash ksh zsh".split()
# Of the system, and of the interpreter.
_LIBRARIES = (
    "/lib/",
    "/lib64/",
    "/usr/lib/",
    "/usr/lib64/",
    f"{sys.prefix}/lib",
    f"{sys.base_prefix}/lib",
)


# What git ignores is behind a link in a worktree, and one side's folders may lie deeper: to resolve
# the whole path of each file, or of each folder, would make that side slower.
@lru_cache(10_000)
def _real_folder(path: str) -> str:
    """Return the path of a folder without links; what is above it has often been resolved."""
    return path if os.path.dirname(path) == path else _real_file(path)


def _real_file(path: str) -> str:
    """Return a path without links. To follow one costs little more than to see that there is none:
    the files of one side alone may be links."""
    for _ in range(_MOST_LINKS):
        folder, name = os.path.split(path)
        # a link may lead to what is above
        path = os.path.normpath(os.path.join(_real_folder(folder), name))
        try:
            target = os.readlink(path)
        except OSError:  # it is none
            return path
        path = os.path.join(os.path.dirname(path), target)
    return os.path.realpath(path)


def for_children(
    environ: Mapping[str, str], folder: str | os.PathLike[str]
) -> dict[str, str]:
    """Return the variables by which the interpreters that a rank starts come to `begin_child`."""
    path = os.pathsep.join(filter(None, (CHILDREN, environ.get("PYTHONPATH"))))
    return {FOLDER: str(folder), "PYTHONPATH": path}


def with_own(
    environ: Mapping[str, str], own: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables of a rank, replaced by a program's own. The folders on PYTHONPATH from
    which this side's code is imported stay on it."""
    given = {**environ, **own}
    if given["PYTHONPATH"] != environ["PYTHONPATH"]:
        paths = CHILDREN, given["PYTHONPATH"], environ["PYTHONPATH"]
        given["PYTHONPATH"] = os.pathsep.join(paths)
    return given


def watch(folder: str, trees: Trees) -> None:
    """Note from here on what this process opens, and what interpreters it starts."""
    events = _Notes(os.path.join(folder, _NAME), trees).events

    # called often: for each id() and sys._getframe(), too
    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in events:
            # What is no path, and what ends with the interpreter. A list that cannot be written is
            # an error.
            with suppress(
                TypeError, ValueError, AttributeError, RecursionError
            ):
                events[event](*arguments)

    sys.addaudithook(hook)


def note_open_files() -> None:
    """Tell the audit hooks of this process which files it has open or maps by now, to read them:
    native code may have opened these. Only Linux says so."""
    found: set[str] = set()
    with (
        suppress(OSError),
        open("/proc/self/maps", errors="surrogateescape") as maps,
    ):
        for line in maps:
            # address, permissions, offset, device and inode come first
            found.update(line.rstrip("\n").split(maxsplit=5)[5:])
    with suppress(OSError):
        for number in os.listdir("/proc/self/fd"):
            with suppress(OSError), open(f"/proc/self/fdinfo/{number}") as info:
                flags = int(info.read().split("flags:", 1)[1].split()[0], 8)
                if flags & os.O_ACCMODE != os.O_WRONLY:
                    found.add(os.readlink(f"/proc/self/fd/{number}"))
    for path in filter(os.path.isabs, found):
        sys.audit("open", path, None, os.O_RDONLY)


def noting_first(read: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that reads a file in native code, by its second argument, and notifies
    the audit hooks before."""

    def noting(owner: Any, path: str, *args: Any, **options: Any) -> Any:
        sys.audit("open", path, None, os.O_RDONLY)
        return read(owner, path, *args, **options)

    return noting


def begin_child(folder: str) -> None:
    """Let an interpreter that a rank of the launch in `folder` started import from the rank's side,
    and `watch` it."""
    try:
        request = Path(folder, "request.json").read_bytes()
    except FileNotFoundError:  # the launch is over
        return
    fields = json.loads(request)["trees"]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        # in each process that imports torch: a command's ranks, workers that are not forked
        if event != "import" or arguments[0] not in _FORMS:
            return
        if arguments[0] == _GROUPS:
            layout.draw()
        # now, before its functions have further names
        module: Any = importlib.import_module(arguments[0])
        name, remedy = _FORMS[arguments[0]]
        form = noting_group(getattr(module, name), folder, remedy)
        setattr(module, name, form)

    sys.addaudithook(hook)
    if fields is None:
        return
    trees = Trees(**fields)
    install(trees)
    watch(folder, trees)


def noting_group(
    form: Callable[..., Any], folder: str, remedy: str = _REMEDY
) -> Callable[..., Any]:
    """Return a function that forms a process group in a child of a rank, and notes that before,
    with what to do instead."""

    def noting(*args: Any, **options: Any) -> Any:
        import multiprocessing

        size = options.get("world_size") or -1
        if size < 0:
            size = int(os.environ.get("WORLD_SIZE", 1))
        why = (
            f"the program starts ranks itself, {size} processes that form a group of their own:"
            f" {remedy}"
        )
        name = OWN_GROUP
        if size == 1:
            why = f"a process that the program started formed a group of its own: {remedy}"
            name = OWN_GROUP_OF_ONE
        elif getattr(multiprocessing.current_process(), "_inheriting", False):
            why = _RUNS_AGAIN
        # the folder goes with the launch, which a helper may outlast
        with suppress(FileNotFoundError):
            Path(folder, name).write_text(why)
        return form(*args, **options)

    return noting


class _Notes:
    """What a process opened by now; `events` takes the arguments of each audit event that
    counts."""

    def __init__(self, log: str, trees: Trees) -> None:
        self._log, self._trees = log, trees
        self._seen: set[str] = set()
        self._data = 0  # files that were added
        self.events: dict[str, Callable[..., None]] = {
            "open": self._opened,
            "import": self._imported,
            "sqlite3.connect": self._opened,
            "ctypes.dlopen": self._loaded,
            "subprocess.Popen": self._executed,
            "os.posix_spawn": self._executed,
            "os.exec": self._executed,
            "os.system": lambda command: self._executed(
                "sh", ("sh", "-c", command)
            ),
        }

    def _opened(self, path: Any, mode: object = None, flags: int = 0) -> None:
        if flags & _WRITES or isinstance(path, int) or path in self._seen:
            return
        path = os.path.abspath(os.fsdecode(path))
        if path in self._seen:
            return
        if len(self._seen) >= _REMEMBERED:
            self._seen.clear()
        self._seen.add(path)
        if sys.pycache_prefix and path.endswith(".pyc"):
            # outside of the trees; the source is only asked for its time
            path = source_from_cache(path)
        real = _real_file(path)
        if self._trees.within(real) is None:
            return
        if not is_code(real):
            if self._data == _MOST:
                return
            self._data += 1
        self._add(_FILE, real)

    def _imported(self, module: str, path: str | None, *_: object) -> None:
        if path:  # of an extension module, which Python does not open itself
            self._opened(path)

    def _loaded(self, name: Any) -> None:
        path = os.fsdecode(name)
        if os.sep not in path or os.path.abspath(path) in self._seen:
            return
        self._opened(path)
        real = os.path.realpath(path)
        installed = real.startswith(_LIBRARIES) or "-packages" in real
        if self._trees.within(real) is None and not installed:
            self._add(_LIBRARY, real)

    def _executed(self, path: Any, arguments: Any, *more: Any) -> None:
        environ = more[-1] if more else None  # the last of all but os.system
        words = [os.fsdecode(word) for word in arguments or (path,)]
        for word in words:
            if os.path.isfile(word):
                self._opened(word)
        is_python = _PYTHON.fullmatch(words[0]) is not None
        if (is_python and not _is_watched(environ)) or _ignores_variables(
            words
        ):
            self._add(_PROCESS, " ".join(words))

    def _add(self, kind: str, what: str) -> None:
        with open(self._log, "ab", buffering=0) as log:
            log.write(os.fsencode(f"{kind}{what}\0"))


def _is_watched(environ: Mapping[Any, Any] | None) -> bool:
    """Whether an interpreter with these variables, or with this process's, comes to
    `begin_child`."""
    if environ is None:
        given: Mapping[str, str] = os.environ
    else:
        given = {os.fsdecode(k): os.fsdecode(v) for k, v in environ.items()}
    return FOLDER in given and CHILDREN in given.get("PYTHONPATH", "").split(
        os.pathsep
    )


def _ignores_variables(words: Sequence[str]) -> bool:
    """Whether a command starts an interpreter that does not read PYTHONPATH, or does not import
    sitecustomize."""
    if os.path.basename(words[0]) in _SHELLS:
        words = [part.strip("'\"") for word in words for part in word.split()]
    return any(
        _has_option(words[place + 1 :])
        for place, word in enumerate(words)
        if _PYTHON.fullmatch(word)
    )


def _has_option(words: Sequence[str]) -> bool:
    """Whether -I, -E or -S is among the options of an interpreter, which come first."""
    options = iter(words)
    for option in options:
        if not option.startswith("-") or option[1:2] in ("", "-", "c", "m"):
            break
        if option in ("-X", "-W"):
            next(options, None)
        elif option[1] not in "XW" and {*"IES"} & {*option}:
            return True
    return False


class Opened:
    """What the processes of a launch opened, by the list in its folder."""

    def __init__(self, folder: str) -> None:
        noted = b""
        with suppress(FileNotFoundError):
            noted = Path(folder, _NAME).read_bytes()
        self._lines = sorted(set(os.fsdecode(noted).split("\0")[:-1]))

    def _noted(self, kind: str) -> list[str]:
        return [line[1:] for line in self._lines if line.startswith(kind)]

    def files(self, trees: Trees) -> Iterator[tuple[str, str]]:
        """Yield the files of the repository, tests left out: path from its top, and real path in
        either tree."""
        for real in map(_source, self._noted(_FILE)):
            within = trees.within(real)
            if within is None or _is_metadata(within) or trees.keeps(within):
                continue
            yield within, real

    def digests(self, trees: Trees, before: float) -> dict[str, str]:
        """Return the digest of each file that exists. It is "" if the file was modified at or after
        `before`, in seconds since the epoch: what the run itself writes, a cache or a checkpoint,
        is no input of it."""
        found = {}
        for within, real in self.files(trees):
            with suppress(OSError):
                is_older = os.stat(real).st_mtime < before
                found[within] = file_digest(real) if is_older else ""
        return found

    @property
    def libraries(self) -> dict[str, str]:
        """Return the digests, by name, of shared libraries that ctypes loaded from outside the
        repository."""
        return {
            os.path.basename(path): file_digest(path)
            for path in self._noted(_LIBRARY)
        }

    def refuse_strays(self, trees: Trees) -> None:
        """Raise BaseSideError if a process may have used a file of the other tree that is not the
        same in this one."""
        if trees.base == trees.current:
            return
        for command in self._noted(_PROCESS):
            raise BaseSideError(
                f"{command!r} may have run code of the working tree: start it with the PYTHONPATH"
                " of its rank, and without -I, -E or -S"
            )
        strays = {
            within
            for within, real in self.files(trees)
            if _is_stray(real, trees.own(within))
        }
        refuse_files(sorted(strays), "read")


def _is_stray(real: str, own: str) -> bool:
    if real == own:
        return False
    # data that git ignores is linked, with its folder
    if not os.path.exists(own) or os.path.realpath(own) == real:
        return is_code(real)
    return file_digest(real) != file_digest(own)


def _source(path: str) -> str:
    """Return the module of a compiled one."""
    folder, name = os.path.split(path)
    if os.path.basename(folder) != "__pycache__":
        return path
    return os.path.join(os.path.dirname(folder), f"{name.partition('.')[0]}.py")


def _is_metadata(within: str) -> bool:
    parts = within.split(os.sep)
    return parts[0] == ".git" or any(
        part.endswith((".egg-info", ".dist-info")) for part in parts
    )
