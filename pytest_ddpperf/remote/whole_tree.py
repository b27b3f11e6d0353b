"""What git does not check out with a worktree of a commit: submodules, files of Git LFS, and what
it ignores. All comes from the repository's own copies: nothing is fetched."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pytest_ddpperf import git
from pytest_ddpperf.records.errors import GitError
from pytest_ddpperf.wire.source_trees import Trees, is_code

# The first line of what stands for a file whose content git does not have:
# https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md
_POINTER = b"version https://git-lfs.github.com/spec/v1\n"
_POINTER_BYTES = 1024  # at most
_INDEX_SECONDS = 2.0  # git may compare whole seconds


@dataclass(frozen=True, slots=True)
class Part:
    """The repository, or one of its submodules, in both trees."""

    folder: Path  # git's own
    commit: str
    here: Path  # in the current tree
    there: Path  # in the version's

    def ask(
        self,
        *words: str | Path,
        index: str = "",
        offline: bool = True,
    ) -> str:
        """Return what a git command prints that is run in the version's tree, with an `index` of
        its own; raises GitError."""
        variables = {
            "GIT_DIR": str(self.folder),
            "GIT_WORK_TREE": str(self.there),
        }
        if index:
            variables["GIT_INDEX_FILE"] = index
        return git.git(self.there, *words, variables=variables, offline=offline)


def complete(trees: Trees, commit: str) -> list[str]:
    """Complete a worktree of a commit; return, by path from its top, the submodules and files of
    Git LFS that this clone lacks. Raises GitError and OSError.

    What is empty in the current tree stays so: it is the same on both sides."""
    top, there = Path(trees.current), Path(trees.base)
    _leave_out_sparse(top, there)
    folder = git.git(top, "rev-parse", "--absolute-git-dir").rstrip("\n")
    own = git.git(there, "rev-parse", "--absolute-git-dir").rstrip("\n")
    whole = Part(Path(folder), commit, top, there)
    index = os.path.join(own, "index")
    lacking = [*_bring_large_files(whole, index)]
    lacking += _check_out_submodules(whole)
    # Git opens files that are not older than its index, whenever it is asked for changes: what
    # differs would seem to be used.
    later = time.time() + _INDEX_SECONDS
    os.utime(index, (later, later))
    return [str(path.relative_to(there)) for path in lacking]


def still_lacks(path: Path) -> bool:
    """Whether a submodule is empty, or a file of Git LFS has no content."""
    if path.is_dir():
        return not any(path.iterdir())
    return not path.exists() or bool(_object_of(path))


def _leave_out_sparse(top: Path, there: Path) -> None:
    """Remove what the current tree leaves out, since it is sparse: before 2.36, git does not
    let a worktree be so, too."""
    for entry in git.git(top, "ls-files", "-t", "-z").split("\0"):
        tag, _, file = entry.partition(" ")
        if tag == "S" and not os.path.lexists(top / file):
            (there / file).unlink(missing_ok=True)


def _bring_large_files(part: Part, index: str) -> Iterator[Path]:
    """Bring the content of files of Git LFS; yield those that this clone lacks, and that the
    current tree has."""
    common = part.ask("rev-parse", "--git-common-dir").rstrip("\n")
    store = part.there / common / "lfs" / "objects"
    listed = part.ask("ls-files", "-z", ":(attr:filter=lfs)", index=index)
    for file in listed.split("\0")[:-1]:
        there, here = part.there / file, part.here / file
        name = _object_of(there)
        if not name or _object_of(here):
            continue
        content = store / name[:2] / name[2:4] / name
        if content.exists():
            shutil.copyfile(content, there)
        elif here.exists():
            yield there


def _object_of(path: Path) -> str:
    """Return the name of the object that a pointer of Git LFS stands for; "" if it is none."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        start = file.read(_POINTER_BYTES)
    found = re.search(rb"^oid sha256:(\w+)$", start, re.MULTILINE)
    is_pointer = start.startswith(_POINTER) and found is not None
    return found[1].decode() if is_pointer and found is not None else ""


def _check_out_submodules(part: Part) -> Iterator[Path]:
    """Check out the submodules that a commit records, recursively; yield those of which this clone
    lacks the commit."""
    for path, recorded in _recorded_submodules(part):
        here, there = part.here / path, part.there / path
        if here.is_dir() and not any(here.iterdir()):
            continue
        folder = _git_folder(part, path)
        own = Part(folder or part.folder, recorded, here, there)
        there.mkdir(parents=True, exist_ok=True)
        if folder is None or not _has_commit(own):
            yield there
            continue
        with tempfile.TemporaryDirectory() as temporary:
            # Another index: nothing is written into the repository.
            index = os.path.join(temporary, "index")
            whole = ("-c", "core.sparseCheckout=false")
            own.ask(*whole, "read-tree", "--reset", "-u", recorded, index=index)
            yield from _bring_large_files(own, index)
        yield from _check_out_submodules(own)


def _recorded_submodules(part: Part) -> Iterator[tuple[str, str]]:
    """Yield path and commit of each submodule of a commit."""
    listed = part.ask("ls-tree", "-r", "-z", "--full-tree", part.commit)
    for line in listed.split("\0")[:-1]:
        facts, path = line.split("\t", 1)
        _, kind, recorded = facts.split()
        if kind == "commit":
            yield path, recorded


def _git_folder(part: Part, path: str) -> Path | None:
    """Return the git folder of a submodule that the current tree has, or had; None if there is
    none."""
    here = part.here / path
    if (here / ".git").exists():
        found = git.git(here, "rev-parse", "--absolute-git-dir")
        return Path(found.rstrip("\n"))
    blob = f"--blob={part.commit}:.gitmodules"
    keys = r"^submodule\..*\.path$"
    try:
        listed = part.ask("config", "-z", blob, "--get-regexp", keys)
    except GitError:  # it names none
        return None
    for entry in listed.split("\0")[:-1]:
        key, _, value = entry.partition("\n")
        name = key.removeprefix("submodule.").removesuffix(".path")
        kept = part.folder / "modules" / name
        if value == path and kept.is_dir():
            return kept
    return None


def _has_commit(part: Part) -> bool:
    try:
        part.ask("cat-file", "-e", f"{part.commit}^{{tree}}")
    except GitError:
        return False
    return True


def link_ignored(trees: Trees) -> list[Path]:
    """Let the version's tree have the data that git ignores, but no code; return the links. Raises
    GitError and OSError."""
    links = []
    for entry in git.all_ignored(Path(trees.current)):
        there = Path(trees.base, entry)
        if there.name == "__pycache__" or is_code(entry):
            continue
        if there.parent.is_dir() and not os.path.lexists(there):
            there.symlink_to(Path(trees.current, entry))
            links.append(there)
    return links


def move_variables(trees: Trees, environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables in which all paths in the current tree lead into the version's."""
    place = re.compile(rf"(?<![\w.-]){re.escape(trees.current)}(?![\w.-])")
    found = {}
    for name, value in environ.items():
        parts = value.split(os.pathsep)
        for number, part in enumerate(parts):
            # what follows "file:" is no path
            if os.path.isabs(part) and not part.startswith("//"):
                parts[number] = trees.followed(part)
            else:
                parts[number] = place.sub(trees.base, part)
        found[name] = os.pathsep.join(parts)
    return found
