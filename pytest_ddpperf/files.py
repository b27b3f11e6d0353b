"""Files that are written whole or not at all, and the locks of files and folders."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

# Who waits retries at random intervals, so that each has a fair chance when a lock becomes free.
_RETRY_SECONDS = (0.005, 0.05)


@contextmanager
def locked(path: Path, waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the lock of a file or folder; raises OSError, also if its file system has no locks.

    It excludes the processes of all users, and leaves nothing behind. `waiting` is called before each retry while
    another process has the lock; without it, nothing is done meanwhile.
    """
    import fcntl  # Windows, where reports can be read, has none

    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | (fcntl.LOCK_NB if waiting is not None else 0))
                break
            except BlockingIOError:
                if waiting is not None:
                    waiting()
                time.sleep(random.uniform(*_RETRY_SECONDS))
        yield
    finally:
        os.close(descriptor)  # which releases the lock


def write(path: Path, text: str, *, append: bool = False) -> None:
    """Write `text` as UTF-8 in place of the content of `path`, or after it; make its folder if there is none.

    Raises OSError, and then the file is as it was. A link stays one; a pipe is written to as it is.
    """
    data = text.encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    if append or (path.exists() and not path.is_file()):
        with open(path, "ab") as file:
            file.write(data)
    else:
        _replace(Path(os.path.realpath(path)), data)


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{uuid4().hex}.tmp")  # on the same file system
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        with suppress(OSError):  # gone after a replacement; else the first error counts
            temporary.unlink()
