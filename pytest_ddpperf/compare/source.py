"""What a stored session was recorded with: the commit that has its code, and what else ranks used.

What differs from it today may make the same code slower.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from pytest_ddpperf import text
from pytest_ddpperf.compare.packages import distributions
from pytest_ddpperf.compare.result import Measured
from pytest_ddpperf.compare.rounds import Launches
from pytest_ddpperf.git import (
    commit_named,
    git,
    ignored_files,
    last_change,
    top_level,
    tree_of,
)
from pytest_ddpperf.records.errors import GitError
from pytest_ddpperf.records.record import record
from pytest_ddpperf.records.samples import (
    Digests,
    Distribution,
    Facts,
    Recording,
)
from pytest_ddpperf.wire.source_trees import file_digest, is_code
from pytest_ddpperf.wire.variables import READ, digest


@record
class Source:
    """The commit that has a session's code or, with commit "", why there is none."""

    commit: str = ""
    why: str = ""
    fetch: str = ""  # the command that would fetch it


def find_source(
    session: Recording, baseline: Path, baseline_dir: Path, rootdir: Path
) -> Source:
    """Return the commit whose tree, without the baselines' folder, is the session's.

    Candidates are the recorded commit, the last one that changed the file of the `baseline`, and
    HEAD. Nothing is fetched.
    """
    if not session.tree:
        code = select_code(session.inputs)
        why = (
            f"git ignored {text.some(code)}"
            if code
            else "git had no tree of it"
        )
        return Source(why=f"the baseline does not identify its code: {why}")
    try:
        top = top_level(rootdir)
    except GitError as error:
        return Source(why=f"git cannot find the baseline's code: {error}")
    recorded = session.commit.partition("-dirty")[0]
    candidates = dict.fromkeys(_candidates(top, recorded, baseline))
    for commit in candidates:
        try:
            if tree_of(top, baseline_dir, commit) == session.tree:
                return Source(commit=commit)
        except GitError:
            continue  # a partial clone does not have its trees
    if not recorded or recorded in candidates:
        return Source(
            why="the baseline was recorded with files that are in no commit"
        )
    what = f"{_remote(top)} {recorded}"
    if "-dirty" in session.commit:
        what = "--unshallow"
    return Source(
        why=f"commit {recorded[:12]} of the baseline is not in this clone",
        fetch=f"git fetch {what}",
    )


def _candidates(top: Path, recorded: str, baseline: Path) -> Iterator[str]:
    """Yield the candidates that are in the repository."""
    named = []
    if re.fullmatch("[0-9a-f]{40,64}", recorded):
        named.append(recorded)
    with suppress(GitError):
        changed = git(
            top,
            "status",
            "--porcelain",
            "--no-renames",
            "--",
            baseline,
            offline=True,
        )
        if not changed:  # else the last commit of it has another session
            named.append(last_change(top, baseline))
    for ref in (*named, "HEAD"):
        with suppress(GitError):
            yield commit_named(top, ref, offline=True)


def _remote(top: Path) -> str:
    remotes: list[str] = []
    with suppress(GitError):
        remotes = git(top, "remote").split()
    return remotes[0] if remotes and "origin" not in remotes else "origin"


# What ranks used that no commit has: files that git ignores, and shared libraries from outside. So
# many a baseline names.
_MOST_INPUTS = 20
_LIBRARY = "library "


def find_inputs(top: Path, launches: Launches) -> dict[str, str]:
    """Return the digests of files, by their paths from `top`, "" for those that the run wrote, and
    of libraries by name; raises GitError."""
    files: dict[str, str] = {}
    found: dict[str, str] = {}
    for launch in launches:
        files.update(launch.files)
        for name, content in launch.libraries.items():
            found[f"{_LIBRARY}{name}"] = content
    for file in ignored_files(top, list(files)) if files else ():
        found[file] = files[file]
    names = sorted(found, key=lambda name: (not is_code(name), name))
    return {name: found[name] for name in names[:_MOST_INPUTS]}


def select_code(names: Iterable[str]) -> list[str]:
    """Return those of the inputs that are code of the repository, which each version has to
    build."""
    return [
        name
        for name in names
        if is_code(name) and not name.startswith(_LIBRARY)
    ]


def find_changed_inputs(
    top: Path, recorded: Digests, launches: Launches
) -> Iterator[str]:
    """Yield, in words, which inputs are not as they were recorded; raises GitError."""
    current = find_inputs(top, launches)
    names = {*recorded}
    if len(recorded) < _MOST_INPUTS:
        names |= {*current}
    for name in sorted(names - {*select_code(names)}):
        before = recorded.get(name)
        now = current.get(name) or file_digest(str(top / name))
        # the run wrote it, then or now
        is_output = before == "" or current.get(name) == ""
        if before == now or is_output:
            continue
        change = "changed" if now else "gone"
        if before is None:
            change = "new"
        yield f"{name} ({change}, and in no commit)"


def find_causes(measured: Measured, top: Path) -> Iterator[str]:
    """Yield, in words, what else may make the same code slower and is not as it was when the
    baseline was recorded; raises GitError."""
    last = measured.stored.sessions[-1]
    yield from find_changed_facts(
        last, measured.measurement.environment.recorded
    )
    yield from find_changed_distributions(last.distributions, measured.launches)
    yield from find_changed_inputs(top, last.inputs, measured.launches)


# Recorded facts that may make the same code slower. Measured ones (clocks, temperatures) differ in
# every run.
_CAUSES = "pytest-ddpperf python torch cuda hip nccl driver".split()
_VARIABLE, _OPTION = "env:", "--"


def find_changed_facts(last: Recording, current: Facts) -> Iterator[str]:
    """Yield, in words, which facts may make the same code slower and are not as they were
    recorded. `current` are the recorded facts of today's environment."""
    recorded = last.measurement.environment.recorded
    for name in sorted({*current, *recorded}):
        before = recorded.get(name, "unset")
        now = current.get(name, "unset")
        is_cause = name in _CAUSES or name.startswith(_VARIABLE)
        if name.startswith(_OPTION):  # which conftests had on both occasions
            is_cause = name in current and name in recorded
        if is_cause and before != now:
            yield f"{name.removeprefix(_VARIABLE)} {before} -> {now}"
    for name, before in recorded.items():
        if name.startswith(READ):
            variable = name.removeprefix(READ)
            # whether today's code reads it or not
            now = current.get(name, digest(os.environ.get(variable)))
            if before != now:
                yield f"{variable} {before} -> {now}"


def find_changed_distributions(
    recorded: Mapping[str, Distribution], launches: Launches
) -> Iterator[str]:
    """Yield, in words, which installed distributions are not as they were recorded, or are not
    known well enough to tell."""
    current = distributions(launches)
    for name in sorted({*recorded, *current}):
        before = recorded.get(name)
        now = current.get(name)
        if before != now:
            yield f"{name} {_version(before)} -> {_version(now)}"
        elif now is not None and not now.digest:
            yield f"{name} (its files are not known)"


def _version(distribution: Distribution | None) -> str:
    if distribution is None:
        return "not imported"
    return distribution.version or "an unknown version"
