"""A temporary folder that can be told from what a killed run left, which goes when the next run makes one."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

_PREFIX = "ddpperf-against-"
_ALIVE = ".alive"  # locked while the run that made the folder lives
_ATTEMPTS = 20


class Folder:
    """A temporary folder of this run's own: `path`."""

    def __init__(self) -> None:
        """Raises OSError."""
        _remove_leftovers()
        self.path = Path(os.path.realpath(tempfile.mkdtemp(prefix=f"{_PREFIX}{_host()}-")))
        try:
            # It gets its name when it is locked: to other runs a lock that is there and free is a killed one's.
            unnamed = self.path / f"{_ALIVE}-soon"
            self._lock = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            unnamed.rename(self.path / _ALIVE)
        except BaseException:
            shutil.rmtree(self.path, ignore_errors=True)
            raise

    def remove(self) -> None:
        """Leave nothing of it."""
        for _ in range(_ATTEMPTS):
            shutil.rmtree(self.path, ignore_errors=True)
            if not self.path.exists():
                break
            time.sleep(0.1)  # ranks that were killed may still have been writing
        os.close(self._lock)


def is_of_this_host(folder: Path) -> bool:
    """Whether a folder is one of these, by its name: to others that share a repository, a container's is not there."""
    return folder.name.startswith(f"{_PREFIX}{_host()}-")


def _host() -> str:
    return hashlib.sha256(os.uname().nodename.encode()).hexdigest()[:6]


def alive(folder: Path) -> bool:
    """Whether the run that made a folder lives, as far as can be told."""
    try:
        descriptor = os.open(folder / _ALIVE, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:  # another user's
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _remove_leftovers() -> None:
    with suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            with suppress(OSError):  # another run removed it meanwhile
                folder = Path(entry.path)
                if is_of_this_host(folder) and _is_own(entry) and (folder / _ALIVE).exists() and not alive(folder):
                    shutil.rmtree(folder, ignore_errors=True)


def _is_own(entry: os.DirEntry[str]) -> bool:
    """Whether it is a folder, and this user's: anybody may put a link of any name into the folder that all share."""
    return entry.is_dir(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid == os.getuid()
