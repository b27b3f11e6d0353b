"""A commit checked out beside the working tree, and gone again afterwards. Knows git, and nothing of what for."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pytest_ddpperf.against.folder import Folder, alive, is_of_this_host
from pytest_ddpperf.git import git, worktrees
from pytest_ddpperf.records.errors import GitError


class Worktree(Folder):
    """A folder with a worktree of one commit. Worktrees of runs that were killed go first."""

    def __init__(self, top: Path, commit: str, *, offline: bool = False, timeout: float | None = None) -> None:
        """`offline`: nothing is brought from elsewhere. `timeout`: seconds that git has. Raises GitError or OSError,
        with nothing left."""
        super().__init__()
        self._top = top
        # Named by git after the repository; the folder around it is ours to recognise.
        self.tree = self.path / (top.name or "tree")
        try:
            with _alone(top):
                _remove_leftovers(top)
                self._add(commit, offline, timeout)
        except BaseException:
            super().remove()
            raise

    def _add(self, commit: str, offline: bool, timeout: float | None) -> None:
        command = ("worktree", "add", "--detach", "--quiet", self.tree, commit)
        try:
            git(self._top, *command, offline=offline, timeout=timeout)
        except BaseException:
            _forget(self._top, self.tree)
            with suppress(GitError, OSError):  # where it is empty: git leaves that behind
                Path(git(self._top, "rev-parse", "--path-format=absolute", "--git-path", "worktrees").strip()).rmdir()
            raise

    def remove(self) -> None:
        """Leave nothing, in the repository neither."""
        super().remove()
        with _alone(self._top):
            _forget(self._top, self.tree)


@contextmanager
def _alone(top: Path) -> Iterator[None]:
    """No other run adds or removes a worktree of the repository meanwhile: git trips over one that is half made."""
    descriptor = -1
    try:
        with suppress(GitError, OSError):  # without locks on its file system, the odds are still good
            descriptor = os.open(top / git(top, "rev-parse", "--git-common-dir").removesuffix("\n"), os.O_RDONLY)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _remove_leftovers(top: Path) -> None:
    for tree in worktrees(top):
        if is_of_this_host(tree.parent) and not alive(tree.parent):
            shutil.rmtree(tree.parent, ignore_errors=True)
            _forget(top, tree)


def _forget(top: Path, tree: Path) -> None:
    """Let git know that a worktree is gone."""
    with suppress(GitError):  # it was not added yet, or somebody else removed it
        git(top, "worktree", "remove", "--force", "--force", tree)
