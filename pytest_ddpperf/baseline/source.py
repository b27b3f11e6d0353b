"""The code of a stored session: the commit that has the git tree that the session was measured with."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pytest_ddpperf.git import commit_named, git, last_change, top_level, tree_of
from pytest_ddpperf.records import Recording
from pytest_ddpperf.records.errors import GitError


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The commit that has a session's code or, with commit "", why there is none."""

    commit: str = ""
    why: str = ""
    fetch: str = ""  # the command that would fetch it


def find_source(session: Recording, baseline: Path, baseline_dir: Path, rootdir: Path) -> Source:
    """Return the commit whose tree, without the baselines' folder, is the session's.

    Candidates are the recorded commit, the last one that changed the file of the `baseline`, and HEAD. Nothing is
    fetched.
    """
    if not session.tree:
        return Source(why="the baseline does not say which code it is of: git had no tree of it")
    try:
        top = top_level(rootdir)
    except GitError as error:
        return Source(why=f"git has no code of another time: {error}")
    recorded = session.commit.partition("-dirty")[0]
    for commit in dict.fromkeys(_candidates(top, recorded, baseline)):
        try:
            if tree_of(top, baseline_dir, commit) == session.tree:
                return Source(commit=commit)
        except GitError:
            continue  # a partial clone does not have its trees
    remote = _remote(top)
    if recorded and not _is_present(top, recorded):
        return Source(
            why=f"commit {recorded[:12]} of the baseline is not in this clone",
            fetch="git fetch --unshallow" if "-dirty" in session.commit else f"git fetch {remote} {recorded}",
        )
    return Source(why="the baseline was recorded with files that are in no commit")


def _candidates(top: Path, recorded: str, baseline: Path) -> Iterator[str]:
    """Yield the candidates that are in the repository."""
    named = [recorded] * bool(re.fullmatch("[0-9a-f]{40,64}", recorded))
    with suppress(GitError):
        changed = git(top, "status", "--porcelain", "--no-renames", "--", baseline, offline=True)
        if not changed:  # else the last commit of it has another session
            named.append(last_change(top, baseline))
    for ref in (*named, "HEAD"):
        with suppress(GitError):
            yield commit_named(top, ref, offline=True)


def _is_present(top: Path, commit: str) -> bool:
    try:
        return bool(commit_named(top, commit, offline=True))
    except GitError:
        return False


def _remote(top: Path) -> str:
    with suppress(GitError):
        remotes = git(top, "remote").split()
        return "origin" if "origin" in remotes or not remotes else remotes[0]
    return "origin"
