"""A commit checked out beside the working tree, and gone again afterwards. Knows git, and nothing of what for."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from pytest_ddpperf.git import git, worktrees
from pytest_ddpperf.records.errors import GitError

_PREFIX = "ddpperf-against-"
_ATTEMPTS = 20
_ALIVE = "alive"  # locked while the run that made the folder lives


class Worktree:
    """A worktree of one commit in a temporary folder of its own. Worktrees of runs that were killed go first."""

    def __init__(self, top: Path, commit: str) -> None:
        """Raises GitError, with nothing left."""
        self._top = top
        _remove_leftovers(top)
        # Named by git after the repository; the folder around it is ours to recognise.
        folder = Path(os.path.realpath(tempfile.mkdtemp(prefix=_PREFIX)))
        self.path = folder / (top.name or "tree")
        self._lock = os.open(folder / _ALIVE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            git(top, "worktree", "add", "--detach", "--quiet", self.path, commit)
        except BaseException:
            self.remove()
            with suppress(GitError, OSError):  # where it is empty: git leaves that behind
                Path(git(top, "rev-parse", "--path-format=absolute", "--git-path", "worktrees").strip()).rmdir()
            raise

    def remove(self) -> None:
        """Leave nothing, in the repository neither."""
        _remove(self._top, self.path)
        os.close(self._lock)


def _remove_leftovers(top: Path) -> None:
    for path in worktrees(top):
        if path.parent.name.startswith(_PREFIX) and not _alive(path.parent / _ALIVE):
            _remove(top, path)
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):  # of which git knows nothing, or no longer
        if folder.stat().st_uid == os.getuid() and (folder / _ALIVE).exists() and not _alive(folder / _ALIVE):
            shutil.rmtree(folder, ignore_errors=True)


def _alive(lock: Path) -> bool:
    """Whether the run that holds a lock lives."""
    try:
        descriptor = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:  # another user's
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _remove(top: Path, path: Path) -> None:
    with suppress(GitError):  # it was not added yet, or somebody else removed it
        git(top, "worktree", "remove", "--force", "--force", path)
    for _ in range(_ATTEMPTS):
        shutil.rmtree(path.parent, ignore_errors=True)
        if not path.parent.exists():
            break
        time.sleep(0.1)  # ranks that were killed may still have been writing
