"""What is asked of git: which commit is here, what another ref is, a worktree of it. Never touches index or files."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

from pytest_ddpperf.errors import GitError

_GIT_SECONDS = 10.0  # a cold cache on a network disk; beyond it the run goes on without the commit
# What git tells its hooks of one repository would send us to that, wherever we ask.
_OF_A_HOOK = (
    *("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_COMMON_DIR", "GIT_NAMESPACE"),
    *("GIT_PREFIX", "GIT_ALTERNATE_OBJECT_DIRECTORIES"),
)


def git(path: Path, *arguments: str | Path, timeout: float | None = None) -> str:
    """What a git command prints; raises GitError. Runs none of the user's hooks and asks nothing of a terminal."""
    command: list[Any] = ["git", "--no-optional-locks", "-c", f"core.hooksPath={os.devnull}", "-C", path, *arguments]
    environ = {name: value for name, value in os.environ.items() if name not in _OF_A_HOOK}
    try:
        result = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout,
            env={**environ, "LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0"},
            start_new_session=True,  # Ctrl-C is ours to handle: a worktree is added or removed as a whole
        )
    except FileNotFoundError:
        raise GitError("git is not installed, or not on PATH") from None
    except (OSError, subprocess.SubprocessError) as error:
        raise GitError(str(error)) from None
    if result.returncode:
        raise GitError(result.stderr.decode(errors="replace").strip())
    return os.fsdecode(result.stdout)


def commit_of(path: Path) -> str:
    """The commit checked out at `path`, with "-dirty" where tracked files differ; "" where git cannot say."""
    arguments = ["describe", "--always", "--dirty", "--abbrev=64", "--exclude=*"]  # the whole hash, never a tag
    try:
        return git(path, *arguments, timeout=_GIT_SECONDS).strip()
    except GitError:
        return ""


def top_level(path: Path) -> Path:
    """The top of the working tree that `path` is in, links resolved; raises GitError."""
    return Path(os.path.realpath(git(path, "rev-parse", "--show-toplevel").removesuffix("\n")))


def commit_named(path: Path, ref: str) -> str:
    """The hash of the commit that a ref names; raises GitError."""
    return git(path, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}").strip()


def changed_files(top: Path, commit: str) -> list[str]:
    """Paths from `top` of all files that differ between a commit and the working tree, untracked ones included but
    for those that git ignores; raises GitError."""
    differing = git(top, "diff", "--name-only", "-z", "--no-ext-diff", "--no-renames", commit, "--")
    untracked = git(top, "ls-files", "--others", "--exclude-standard", "-z")
    return sorted({*filter(None, (differing + untracked).split("\0"))})


def worktrees(top: Path) -> list[Path]:
    """The folders of all worktrees of a repository, whether they still exist or not; raises GitError."""
    lines = git(top, "worktree", "list", "--porcelain").splitlines()
    return [Path(line.removeprefix("worktree ")) for line in lines if line.startswith("worktree ")]
