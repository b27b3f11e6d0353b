"""Which environment variables the Python code of a process reads: the user's and its libraries',
without the standard library's, torch's and pytest's.

A value leaves the process as a digest: it may be a secret, and baselines end up in git.
"""

import hashlib
import os
import re
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import CodeType

from pytest_ddpperf.wire.source_trees import Trees

READ = "read:"  # before the name of such a variable, among recorded facts


def digest(value: str | None) -> str:
    """Return what is recorded of a value; None if the variable is not set."""
    if value is None:
        return "unset"
    return f"digest {hashlib.sha256(value.encode('utf-8', 'surrogateescape')).hexdigest()[:8]}"


_SECRET = re.compile(
    # "tokens" alone is none: --max-tokens
    r"(token|(api|access|auth|bearer|hf|hub|refresh)[-_]?tokens"
    r"|(secret|password|passwd|passphrase|webhook|(api|access|private)[-_]?key)s?"
    r"|(^|[-_])(pwd|pass|key|auth|credentials?))([-_](json|value|str|string|header|file))?$",
    re.IGNORECASE,
)
# variables in the value of an option, or in a command of a shell
_ASSIGNED = re.compile(
    r"""([\w.-]+)=("(?:\\[\s\S]|[^"\\])*"?|'[^']*'|[^\s,;'"]+)"""
)
# of "scheme://user:password@host"
_USER = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def is_secret(name: str) -> bool:
    """Say whether the name of a variable or an option suggests a secret, which no file and no
    report may show."""
    return _SECRET.search(name) is not None


def concealed(name: str, value: str) -> str:
    """Return a value as a file may hold it: the digest of a secret, which its name shows, also of
    one that is assigned in it, and of the user in a URL."""
    if is_secret(name) and value:
        return digest(value)
    value = _ASSIGNED.sub(
        lambda found: f"{found[1]}={concealed(found[1], found[2])}", value
    )
    return _USER.sub(lambda found: digest(found[0]), value)


def concealed_words(words: Sequence[str]) -> tuple[str, ...]:
    """Return the words of a command line as a file may hold them: see `concealed`."""
    shown = []
    name = ""  # of the option that the next word is the value of
    for word in words:
        option, equals, value = word.partition("=")
        if equals:
            shown.append(f"{concealed('', option)}={concealed(option, value)}")
        elif word.startswith("-"):
            shown.append(word)
        else:
            shown.append(concealed(name, word))
        name = word if word.startswith("-") and not equals else ""
    return tuple(shown)


# in this process, by name: the first value
_read: dict[str, str | None] = {}
# instructions that read all variables, to pass them on to a process, say
_bulk: set[tuple[CodeType, int]] = set()


class _Watched(os._Environ[str]):
    """`os.environ` that notes which variables are read."""

    def __getitem__(self, key: str) -> str:
        # torch.compile cannot follow how the reader is found
        compiler = sys.modules.get("torch.compiler")
        if compiler is not None and compiler.is_dynamo_compiling():
            return super().__getitem__(key)
        value = None
        try:
            value = super().__getitem__(key)
        finally:
            # each time would cost more the longer the reader's code is
            if key not in _read:
                reader = _reader()
                if reader is not None and reader not in _bulk:
                    _read[key] = value
        return str(value)

    def __iter__(self) -> Iterator[str]:
        if (reader := _reader()) is not None:
            _bulk.add(reader)
        return super().__iter__()


def _reader() -> tuple[CodeType, int] | None:
    """Return the instruction that reads `os.environ`; None if its code does not count."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(
        _THROUGH
    ):
        frame = frame.f_back
    return (
        (frame.f_code, frame.f_lasti)
        if _counts(frame.f_code.co_filename)
        else None
    )


# os.getenv, and methods that os.environ inherits; their files' names are frozen, or not, by
# version.
_THROUGH = (
    "<frozen os",
    "<frozen _collections_abc",
    os.__file__,
    str(Path(os.__file__).with_name("_collections_abc")),
)


@cache
def _counts(file: str) -> bool:
    """Whether code of this file is the user's, or of a library that is neither Python's nor torch's
    nor a test tool."""
    packages = [Path(__file__).parents[1]]
    for name in ("torch", "_pytest", "pluggy", "cloudpickle"):
        found = find_spec(name)
        if found is not None and found.origin:
            packages.append(Path(found.origin).parent)
    if file.startswith("<frozen") or any(
        file.startswith(f"{folder}{os.sep}") for folder in packages
    ):
        return False
    is_library = file.startswith(sysconfig.get_path("stdlib") + os.sep)
    return not is_library or "site-packages" in file or "dist-packages" in file


def watch() -> None:
    """Note from here on which variables are read."""
    os.environ.__class__ = _Watched


def read_so_far(trees: Trees | None = None) -> dict[str, str]:
    """Return the digests of the variables that were read, by name. A path in either of the `trees`
    counts as the same."""
    found = {}
    for name, value in [*_read.items()]:
        moved = trees.as_current(value) if trees and value else value
        found[name] = digest(moved)
    return found
