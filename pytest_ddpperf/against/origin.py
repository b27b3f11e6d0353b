"""Whose code a stored session measured: the commit at hand that has it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pytest_ddpperf.git import commit_named, contents, git, ignored_files, last_change, top_level
from pytest_ddpperf.records import Recording
from pytest_ddpperf.records.errors import GitError
from pytest_ddpperf.wire.trees import digest

_NAMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """A commit whose files hold what the session's ranks imported, or why there is none."""

    commit: str = ""
    why: str = ""
    fetch: str = ""  # the command that would bring it
    built: tuple[str, ...] = ()  # of its files, those that git ignores and no commit has


def origin_of(session: Recording, baseline: Path, rootdir: Path, *, builds: bool = False) -> Origin:
    """The commit that was recorded, else the last that changed the file of the `baseline`, else HEAD: the first that
    holds the session's files, but for those that git ignores where a set-up `builds` them. Nothing is fetched. One that
    was recorded with uncommitted changes is none by itself: they may be in what a step reads and nobody imports."""
    if not session.files:
        return Origin(why="the baseline does not say whose code it is: ranks imported nothing of the repository then")
    unknown = [file for file, held in session.files.items() if not held]
    if unknown:
        return Origin(why=f"changed while the baseline was recorded, or could not be read: {_named(unknown)}")
    try:
        top = top_level(rootdir)
        built = ignored_files(top, list(session.files)) if builds else []
    except GitError as error:
        return Origin(why=f"git has no code of another time: {error}")
    files = {file: held for file, held in session.files.items() if file not in built}
    recorded, dirty, _ = session.commit.partition("-dirty")
    candidates = list(dict.fromkeys(_candidates(top, recorded, baseline)))
    if recorded and recorded not in candidates and _is_shallow(top):
        # What is here is the code at hand, and says nothing about files that are not imported.
        named = f"git fetch --depth=1 {_remote(top)} {recorded}"
        return Origin(
            why=f"commit {recorded[:12]} of the baseline is not in this clone, which is shallow",
            fetch="git fetch --unshallow" if dirty else named,  # a commit after it has the code
        )
    missing: dict[str, list[str]] = {}
    lacking: Origin | None = None
    for commit in candidates:
        try:
            wrong = _otherwise(top, commit, files)
        except GitError as error:
            lacking = lacking or Origin(
                why=f"this clone lacks files of commit {commit[:12]}: {str(error).rpartition(chr(10))[2]}",
                fetch=f"git diff --stat HEAD {commit}",  # which, unlike a fetch, brings what a partial clone left out
            )
            continue
        if not wrong and not (dirty and commit == recorded):
            return Origin(commit=commit, built=tuple(built))
        missing[commit] = wrong
    if lacking is not None:
        return lacking
    if recorded and recorded not in missing:
        return Origin(
            why=f"commit {recorded[:12]} of the baseline is not in this clone",
            fetch=f"git fetch {_remote(top)} {recorded}",
        )
    if not missing:
        return Origin(why="the repository has no commit")
    commit, wrong = next(iter(missing.items()))
    if not wrong:
        return Origin(why=f"it was recorded with uncommitted changes to {commit[:12]}, and is not committed since")
    had = ", which had uncommitted changes" if dirty else ""
    return Origin(why=f"no commit at hand holds the baseline's code: in {commit[:12]}{had}, {_named(wrong)} differs")


def never_at_hand(session: Recording, rootdir: Path, *, builds: bool = False) -> str:
    """Why no commit will ever hold the files of a session that is being stored; "" if one may, once they are committed
    together with the baseline, or where a set-up `builds` those that are not."""
    if not session.files:
        return "ranks imported nothing of a repository"
    if unknown := [file for file, held in session.files.items() if not held]:
        return f"changed meanwhile, or could not be read: {_named(unknown)}"
    try:
        ignored = ignored_files(top_level(rootdir), list(session.files))
    except GitError as error:
        return f"git has no code of another time: {error}"
    if not ignored or builds:
        return ""
    return f"ignored by git: {_named(ignored)}; --ddp-against-setup builds what a commit lacks"


def _candidates(top: Path, recorded: str, baseline: Path) -> Iterator[str]:
    """That are in the repository."""
    named = [recorded] * bool(re.fullmatch("[0-9a-f]{40,64}", recorded))
    with suppress(GitError):
        changed = git(top, "status", "--porcelain", "--no-renames", "--", baseline, offline=True)
        if not changed:  # else the last commit of it has another session
            named.append(last_change(top, baseline))
    for ref in (*named, "HEAD"):
        with suppress(GitError):
            yield commit_named(top, ref, offline=True)


def _otherwise(top: Path, commit: str, files: Mapping[str, str]) -> list[str]:
    """The files that the commit lacks, or that held something else then; raises GitError."""
    pairs = zip(files, contents(top, commit, list(files)), strict=True)
    return [file for file, data in pairs if data is None or digest(data) != files[file]]


def _is_shallow(top: Path) -> bool:
    with suppress(GitError):
        return git(top, "rev-parse", "--is-shallow-repository").strip() == "true"
    return False


def _remote(top: Path) -> str:
    with suppress(GitError):
        remotes = git(top, "remote").split()
        return "origin" if "origin" in remotes or not remotes else remotes[0]
    return "origin"


def _named(files: list[str]) -> str:
    return ", ".join(files[:_NAMED]) + (", ..." if len(files) > _NAMED else "")
