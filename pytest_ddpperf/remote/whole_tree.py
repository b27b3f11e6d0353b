"""What git does not check out with a worktree of a commit: submodules, files of Git LFS, and what
it ignores. All comes from the repository's own copies: nothing is fetched."""

import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from pytest_ddpperf import git
from pytest_ddpperf.records.errors import GitError
from pytest_ddpperf.wire.source_trees import Trees, is_code

# What stands for a file whose content git does not have:
# https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md
_POINTER = re.compile(
    rb"version https://git-lfs\.github\.com/spec/v1\n(?:.*\n)*?oid sha256:(\w+)\n"
)
_POINTER_BYTES = 1024  # at most
_TEMPORARY = "TMPDIR TEMP TMP".split()
_INDEX_SECONDS = 2.0  # git may compare whole seconds
# In all ignored folders that are mirrored: a virtual environment would cost seconds.
_TOO_MANY_FILES = 10_001


class Part(NamedTuple):
    """The repository, or one of its submodules, in both trees."""

    folder: Path  # git's own
    commit: str
    here: Path  # in the current tree
    there: Path  # in the version's

    def ask(self, *words: str, index: str = "") -> str:
        """Return what a git command prints that is run in the version's tree, with an `index` of
        its own; raises GitError."""
        variables = {
            "GIT_DIR": str(self.folder),
            "GIT_WORK_TREE": str(self.there),
        }
        if index:
            variables["GIT_INDEX_FILE"] = index
        return git.git(self.there, *words, variables=variables, offline=True)


def complete(trees: Trees, commit: str) -> list[str]:
    """Complete a worktree of a commit; return, by path from its top, the submodules and files of
    Git LFS that this clone lacks. Raises GitError and OSError.

    What is empty in the current tree stays so: it is the same on both sides."""
    top, there = Path(trees.current), Path(trees.base)
    _leave_out_sparse(top, there)
    whole = Part(git.own_folder(top), commit, top, there)
    index = git.own_folder(there) / "index"
    lacking = [*_bring_large_files(whole, str(index))]
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
    common = part.ask("rev-parse", "--git-common-dir")
    store = part.there / common / "lfs" / "objects"
    for file in git.entries(
        part.ask("ls-files", "-z", ":(attr:filter=lfs)", index=index)
    ):
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
        found = _POINTER.match(file.read(_POINTER_BYTES))
    return found[1].decode() if found is not None else ""


def _check_out_submodules(part: Part) -> Iterator[Path]:
    """Check out the submodules that a commit records, recursively; yield those of which this clone
    lacks the commit."""
    for line in git.entries(
        part.ask("ls-tree", "-r", "-z", "--full-tree", part.commit)
    ):
        facts, path = line.split("\t", 1)
        _, kind, recorded = facts.split()
        if kind != "commit":
            continue
        here, there = part.here / path, part.there / path
        if here.is_dir():
            if not any(here.iterdir()):
                continue
        elif not there.is_dir():  # both are sparse
            continue
        there.mkdir(parents=True, exist_ok=True)
        for folder in _git_folders(part, here):
            if _has(folder, recorded):
                break
        else:
            yield there
            continue
        own = Part(folder, recorded, here, there)
        with tempfile.TemporaryDirectory() as temporary:
            # Another index: nothing is written into the repository, nor, with submodule.recurse,
            # into those of submodules within.
            index = os.path.join(temporary, "index")
            words = """
                -c core.sparseCheckout=false read-tree --reset -u --no-recurse-submodules
            """.split()
            own.ask(*words, recorded, index=index)
            yield from _bring_large_files(own, index)
        yield from _check_out_submodules(own)


def _git_folders(part: Part, here: Path) -> Iterator[Path]:
    """Yield git's folder of a submodule in the current tree, then those of all submodules that a
    repository has or had: a commit is the same in each."""
    if (here / ".git").exists():
        yield git.own_folder(here)
    for head in (part.folder / "modules").rglob("HEAD"):
        if (head.parent / "objects").is_dir():
            yield head.parent


def _has(folder: Path, commit: str) -> bool:
    """Whether a repository, by git's folder, has a commit."""
    whole = Part(folder, commit, folder, folder)
    try:
        whole.ask("cat-file", "-e", f"{commit}^{{tree}}")
    except GitError:
        return False
    return True


def link_ignored(trees: Trees) -> None:
    """Let the version's tree have the data that git ignores, but no code, and empty folders. Raises
    GitError and OSError."""
    left = _TOO_MANY_FILES
    top = Path(trees.current)
    untracked = git.untracked_folders(top)
    empty = [folder for folder in untracked if not _count_files(top / folder)]
    for entry in (*git.all_ignored(top), *empty):
        there = Path(trees.base, entry)
        if there.name == "__pycache__" or is_code(entry):
            continue
        # a link there may lead to the user's own files
        is_within = there.parent == there.parent.resolve()
        if is_within and not os.path.lexists(there):
            there.parent.mkdir(parents=True, exist_ok=True)
            here = top / entry
            count = _count_files(here)
            if count < left:
                left -= count
                _mirror(here, there)
            else:
                _link_file(here, there)


def _count_files(folder: Path) -> int:
    """Return how many files a folder has; too many if it is no folder, or a link, or cannot be read
    as a whole."""
    errors: list[OSError] = []
    tree = os.walk(folder, onerror=errors.append)
    files = (file for *_, files in tree for file in files)
    count = len([*islice(files, _TOO_MANY_FILES)])
    return _TOO_MANY_FILES if errors or folder.is_symlink() else count


def _mirror(here: Path, there: Path) -> None:
    """Make a folder of links to the data in another: what walks along folders, as `os.walk`, goes
    into no link to a folder. It is as old as the other, and lists the same in the same order.

    No hard links: SQLite can damage a database that has two."""
    entries = [
        entry
        for entry in os.scandir(here)
        # temporary files, and the version's tree with them, may be in it
        if not is_code(entry.name) and Path(entry) not in there.parents
    ]
    _link(entries, there)
    if os.listdir(there) != [entry.name for entry in entries]:
        # some file systems list the newest first
        for made in [*os.scandir(there)]:
            remove = (
                os.rmdir if made.is_dir(follow_symlinks=False) else os.unlink
            )
            remove(made)
        _link(entries[::-1], there)
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            _mirror(Path(entry), there / entry.name)
    status = here.stat()
    os.utime(there, ns=(status.st_atime_ns, status.st_mtime_ns))


def _link(entries: Sequence[os.DirEntry[str]], there: Path) -> None:
    there.mkdir(exist_ok=True)
    for entry in entries:
        made = there / entry.name
        if entry.is_dir(follow_symlinks=False):
            made.mkdir()
        else:
            _link_file(Path(entry), made)


def _link_file(here: Path, there: Path) -> None:
    """Link data. An empty file is the version's own, because what locks files (filelock) refuses
    links."""
    if here.is_file() and not here.lstat().st_size:
        # it need not be readable
        there.touch()
        shutil.copystat(here, there)
    else:
        there.symlink_to(here)


def move_variables(trees: Trees, environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables in which all paths in the current tree lead into the version's, but those
    of the folder for temporary files: both sides write into one."""
    # "/repository/.." leads out of it; "-I/repository" leads there
    place = re.compile(
        rf"((?:^|[^\w.-])(?:-[a-zA-Z]+)?){re.escape(trees.current)}(?![\w.-]|/\.\.)"
    )
    found = {}
    for name, value in environ.items():
        if name in _TEMPORARY:
            found[name] = value and os.path.join(os.getcwd(), value)
            continue
        parts = value.split(os.pathsep)
        for number, part in enumerate(parts):
            # what follows "file:" is no path
            is_path = os.path.isabs(part) and not part.startswith("//")
            # As it is written: a link in the tree has a target of its own on each side.
            normal = os.path.normpath(part)
            if trees.within(normal) is not None or not is_path:
                parts[number] = place.sub(
                    lambda found: found[1] + trees.base, part
                )
            else:
                parts[number] = trees.followed(part)
        found[name] = os.pathsep.join(parts)
    return found
