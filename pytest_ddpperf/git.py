"""What is asked of git: which commit is here, what another ref is, a worktree of it. Never touches
index or files."""

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from pytest_ddpperf.records.errors import GitError
from pytest_ddpperf.records.plan import Variables

_END_SECONDS = 5.0  # for a command to end after SIGTERM
# a cold cache on a network disk; beyond it the run goes on without the commit
_GIT_SECONDS = 10.0
# Variables that git sets for its hooks: with them, every command would be about that repository.
_OF_A_HOOK = """
    GIT_DIR GIT_WORK_TREE GIT_INDEX_FILE GIT_OBJECT_DIRECTORY GIT_COMMON_DIR GIT_NAMESPACE
    GIT_PREFIX GIT_ALTERNATE_OBJECT_DIRECTORIES
""".split()

_WARNINGS = re.compile(rb"(?m)^warning: .*\n?")


def git(
    path: Path,
    *arguments: str | Path,
    timeout: float | None = None,
    given: bytes = b"",
    offline: bool = False,
    variables: Variables | None = None,
) -> str:
    """Return what a git command that reads what is `given` prints, without the last newline; raises
    GitError.

    It runs none of the user's hooks and asks nothing of a terminal; with `offline` nor of another
    repository, which a partial clone does for the files that it lacks. `variables`: further ones of
    its environment."""
    command: list[Any] = [
        "git",
        "--no-optional-locks",
        "-c",
        f"core.hooksPath={os.devnull}",
        "-C",
        path,
        *arguments,
    ]
    environ = {
        **outside_of_hooks(),
        "LC_ALL": "C",
        "GIT_TERMINAL_PROMPT": "0",
        # `whole_tree` brings what the clone has
        "GIT_LFS_SKIP_SMUDGE": "1",
        **(variables or {}),
    }
    if offline:
        environ["GIT_ALLOW_PROTOCOL"] = "none"
    try:
        ended = run_whole(command, environ, timeout=timeout, given=given)
    except FileNotFoundError:
        raise GitError("git is not installed, or not on PATH") from None
    except subprocess.TimeoutExpired as error:
        raise GitError(
            f"git did not answer within {error.timeout:g} s"
        ) from None
    except (OSError, subprocess.SubprocessError) as error:
        raise GitError(str(error)) from None
    if ended.returncode:
        # warnings, of a folder that cannot be read, say; "needs merge" is in stdout
        said = _WARNINGS.sub(b"", ended.stderr) or ended.stdout
        raise GitError(said.decode(errors="replace").expandtabs(4).strip())
    return os.fsdecode(ended.stdout).removesuffix("\n")


def entries(said: str) -> list[str]:
    """Return the entries that git printed with -z: each ends with a zero byte."""
    return said.split("\0")[:-1]


def outside_of_hooks(environ: Variables | None = None) -> dict[str, str]:
    """Return an environment, by default this process's, without the variables that git sets for a
    hook."""
    outside = os.environ if environ is None else environ
    return {
        name: value for name, value in outside.items() if name not in _OF_A_HOOK
    }


def run_whole(
    command: Sequence[Any] | str,
    environ: Variables,
    *,
    folder: Path | None = None,
    timeout: float | None = None,
    given: bytes = b"",
) -> subprocess.CompletedProcess[bytes]:
    """What came of a command, a shell's if it is a text, that reads what is `given`. Whatever
    happens meanwhile, Ctrl-C too, ends all of it, its children too, before this returns."""
    process = subprocess.Popen(
        command,
        shell=isinstance(command, str),
        cwd=folder,
        env=environ,
        stdin=subprocess.PIPE if given else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(given or None, timeout=timeout)
    except BaseException:
        with suppress(ProcessLookupError):
            # At SIGTERM git removes what it had begun.
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=_END_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    return subprocess.CompletedProcess(
        command, process.returncode, output, errors
    )


def checked_out(path: Path) -> tuple[str, str]:
    """Return the commit that is checked out at `path`, with "-dirty" if tracked files differ, and
    its time, ISO 8601 in UTC; two empty texts if git cannot say. Of a merge that GitHub made of a
    pull request, return the head."""
    ask = partial(git, path, timeout=_GIT_SECONDS)
    with suppress(GitError):
        commit = _without_merge(ask("rev-parse", "--verify", "HEAD"))
        # `git describe --dirty` writes the index, even without optional locks.
        changed = ask(
            "status", "--porcelain", "--untracked-files=no", "--no-renames"
        )
        seconds = ask(
            "show", "--no-patch", "--no-show-signature", "--format=%ct", "HEAD"
        )
        time = datetime.fromtimestamp(int(seconds), timezone.utc).isoformat()
        return f"{commit}-dirty" if changed else commit, time
    return "", ""


def _without_merge(commit: str) -> str:
    """Return the head of a pull request if a commit is the merge that a job of GitHub checked out,
    which is in no clone; else the commit."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        if commit == os.environ["GITHUB_SHA"] and os.environ[
            "GITHUB_REF"
        ].startswith("refs/pull/"):
            event = json.loads(
                Path(os.environ["GITHUB_EVENT_PATH"]).read_bytes()
            )
            return str(event["pull_request"]["head"]["sha"])
    return commit


def top_level(path: Path) -> Path:
    """The top of the working tree that `path` is in, links resolved; raises GitError."""
    return Path(git(path, "rev-parse", "--show-toplevel")).resolve()


def own_folder(path: Path) -> Path:
    """Return git's folder of the repository, worktree or submodule that a path is in; raises
    GitError."""
    return Path(git(path, "rev-parse", "--absolute-git-dir"))


def commit_named(path: Path, ref: str, *, offline: bool = False) -> str:
    """The hash of the commit that a ref names; raises GitError."""
    reported = ""
    # Older versions of git would take such a ref for an option.
    if not ref.startswith("-"):
        try:
            ask = partial(
                git, path, "rev-parse", "--verify", "--quiet", offline=offline
            )
            # what follows :/ would be a part of its text
            return ask(f"{ask(ref)}^{{commit}}")
        except GitError as error:
            reported = f" ({error})" if str(error) else ""
    raise GitError(f"{ref!r} is no commit of {path}{reported}")


def namesakes(path: Path, ref: str, commit: str) -> list[str]:
    """Return the refs of the same name that are other commits than the one that git takes: it takes
    a tag before a branch."""
    found = []
    for kind in ("tags", "heads", "remotes"):
        name = f"refs/{kind}/{ref}"
        with suppress(GitError):
            if commit_named(path, name, offline=True) != commit:
                found.append(name)
    return found


def tree_of(top: Path, without: Path, commit: str = "") -> str:
    """Return the git tree of a commit or, with "", of all files in the working tree that git does
    not ignore.

    Files below the folder `without` and Python's caches are left out, and temporary files that git
    does not know. With changes within a submodule it ends in "-dirty", which is the tree of no
    commit. Nothing is written into the repository. Raises GitError.
    """
    with tempfile.TemporaryDirectory() as folder:
        objects = Path(folder) / "objects"
        objects.mkdir()
        variables = {
            "GIT_INDEX_FILE": f"{folder}/index"
            if commit
            else _copy_of_index(top, folder),
            "GIT_OBJECT_DIRECTORY": str(objects),
            "GIT_ALTERNATE_OBJECT_DIRECTORIES": str(
                top / git(top, "rev-parse", "--git-path", "objects")
            ),
        }
        apart = partial(git, top, variables=variables, offline=bool(commit))
        if commit:
            apart("read-tree", commit)
        else:
            # the objects are thrown away: to compress them would take most of the time
            stage = partial(apart, "-c", "core.looseCompression=0")
            stage("add", "--update")
            # a repository within has a slash at its end
            new = "".join(
                f"{path.rstrip('/')}\0" for path in _untracked(apart, top)
            )
            stage(
                "update-index",
                "--add",
                "--remove",
                "-z",
                "--stdin",
                given=os.fsencode(new),
            )
        left_out = ["*.pyc"]
        real = without.resolve()
        if top in real.parents:
            left_out.append(real.relative_to(top).as_posix())
        apart(
            "rm",
            "--cached",
            "--force",
            "-r",
            "--quiet",
            "--ignore-unmatch",
            "--",
            *left_out,
        )
        tree = apart("write-tree", "--missing-ok")
        # changes within submodules are in no tree
        if not commit and apart(
            "diff", "--name-only", "--ignore-submodules=untracked"
        ):
            tree += "-dirty"
        return tree


def _copy_of_index(top: Path, folder: str) -> str:
    """Copy the index to a folder; raises GitError. There is no copy if nothing was ever added."""
    copy = f"{folder}/index"
    try:
        # With its time: git does not trust what it knows of files that are not older than the
        # index.
        shutil.copy2(own_folder(top) / "index", copy)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise GitError(str(error)) from None
    return copy


def ignored_files(top: Path, files: Sequence[str]) -> list[str]:
    """Return the files that git ignores, and no commit has; raises GitError."""
    try:
        said = git(
            top,
            "check-ignore",
            "-z",
            "--stdin",
            given=b"".join(os.fsencode(f"{file}\0") for file in files),
        )
    except GitError as error:
        # Git gives no answer if one of the files is in a submodule.
        if inside := re.search(r"is in submodule '(.+)'", str(error)):
            folder = f"{inside[1]}/"
            own = [file for file in files if file.startswith(folder)]
            if not own:  # the paths do not begin at the top
                raise
            found = ignored_files(
                top, [file for file in files if file not in own]
            )
            below = [file.removeprefix(folder) for file in own]
            there = ignored_files(top / folder, below)
            return found + [folder + file for file in there]
        if str(error):
            raise
        return []  # how git says that there are none
    return entries(said)


def all_ignored(top: Path) -> list[str]:
    """Return what is in the working tree, its submodules included, and git ignores: files, and
    folders of nothing else; raises GitError."""
    said = git(
        top,
        "ls-files",
        "--others",
        "--ignored",
        "--exclude-standard",
        "--directory",
        "-z",
    )
    found = [entry.rstrip("/") for entry in entries(said)]
    for entry in entries(git(top, "ls-files", "--stage", "-z")):
        facts, path = entry.split("\t", 1)
        # the mode of a submodule
        if facts.startswith("160000 ") and (top / path / ".git").exists():
            found += [f"{path}/{inside}" for inside in all_ignored(top / path)]
    return found


def untracked_folders(top: Path) -> list[str]:
    """Return the folders in the working tree in which git tracks no file, empty ones, too; raises
    GitError."""
    untracked = git(
        top, "ls-files", "--others", "--exclude-standard", "--directory", "-z"
    )
    return [entry for entry in entries(untracked) if entry.endswith("/")]


def last_change(top: Path, file: Path) -> str:
    """Return the last commit in this clone that changed a file; "" if there is none. Raises
    GitError."""
    return git(
        top,
        "log",
        "-1",
        "--no-show-signature",
        "--format=%H",
        "--",
        file,
        offline=True,
    )


def changed_files(
    top: Path,
    commit: str,
    *,
    timeout: float | None = None,
    reports: Sequence[Path | None] = (),
) -> list[str]:
    """Return paths from `top`, or a folder below it, of its files that differ between a commit and
    the working tree in more than the ends of their lines. Untracked files count, but for Python's
    caches, temporary files, those that git ignores, and `reports`. `timeout`: seconds for each
    command. Raises GitError."""
    # With --name-only git would not look at lines.
    how = """
        --numstat --relative --ignore-cr-at-eol --ignore-submodules=none -z --no-ext-diff
        --no-renames
    """.split()
    # It writes what it finds into the index, even without optional locks: so it gets a copy.
    with tempfile.TemporaryDirectory() as folder:
        copy = {"GIT_INDEX_FILE": _copy_of_index(top, folder)}
        apart = partial(git, top, timeout=timeout, variables=copy)
        # Files that git was asked not to look at may have changed.
        tagged = apart("ls-files", "-t", "-z").split("\0")
        present = [
            entry[2:]
            for entry in tagged
            if entry.startswith("S ") and os.path.lexists(top / entry[2:])
        ]
        if present:
            apart("update-index", "--no-skip-worktree", "--", *present)
        apart("update-index", "-q", "--really-refresh")
        counted = apart("diff", *how, commit, "--")
    differing = [line.split("\t", 2)[2] for line in entries(counted)]
    ask = partial(git, top, timeout=timeout)
    return sorted({*differing, *_untracked(ask, top, *reports)})


def _untracked(
    ask: Callable[..., str], top: Path, *left_out: Path | None
) -> list[str]:
    """Return the files that git does not know and does not ignore, without Python's caches,
    what `pip install -e` writes, temporary files and what is `left_out`; raises GitError. `ask`
    calls git in `top`."""
    excluded = ["--exclude=*.pyc", "--exclude=*.egg-info"]
    for path in (*left_out, tempfile.gettempdir()):
        if path is not None:
            place = os.path.relpath(
                os.path.realpath(path), os.path.realpath(top)
            )
            pattern = re.sub(r"[*?[\\]", r"\\\g<0>", place)
            excluded.append(f"--exclude=/{pattern}")
    said = ask("ls-files", "--others", "--exclude-standard", *excluded, "-z")
    return entries(said)


def first_changed_line(commit: str, file: str) -> int:
    """Return the number of the first line that differs from a commit, of a file from the top of
    this process's working tree; 0 if git cannot say."""
    with suppress(GitError):
        changes = git(
            Path(),
            "diff",
            "--unified=0",
            "--no-ext-diff",
            "--no-color",
            commit,
            "--",
            f":/{file}",
        )
        if hunk := re.search(r"^@@ \S+ \+(\d+)", changes, re.MULTILINE):
            return int(hunk[1])
    return 0


def is_shallow(top: Path) -> bool:
    """Whether the clone lacks older commits; raises GitError."""
    return git(top, "rev-parse", "--is-shallow-repository") == "true"


def worktrees(top: Path) -> list[Path]:
    """The folders of all worktrees of a repository, whether they still exist or not; raises
    GitError."""
    said = git(top, "worktree", "list", "--porcelain")
    return list(map(Path, re.findall(r"(?m)^worktree (.+)", said)))


def first_parents(top: Path, good: str, bad: str) -> list[str]:
    """The commits after `good` up to `bad`, oldest first, of branches that were merged only the
    merge; raises GitError, also where `good` is no ancestor."""
    try:
        git(top, "merge-base", "--is-ancestor", good, bad)
    except GitError as error:
        why = ": git merge-base shows one"
        if is_shallow(top):
            why = " in this clone, which is shallow: git fetch --unshallow"
        raise GitError(
            str(error) or f"{good[:12]} is no ancestor of {bad[:12]}{why}"
        ) from None
    # `good` may have been merged: asked at once, git would not look past the first parents for it
    ask = partial(git, top, "rev-list", f"{good}..{bad}")
    after = {*ask("--ancestry-path").split()}
    return [
        commit
        for commit in ask("--first-parent", "--reverse").split()
        if commit in after
    ]


def described(top: Path, commit: str) -> tuple[str, str, str]:
    """Return author, date and subject of a commit; raises GitError."""
    said = git(
        top,
        "show",
        "--no-patch",
        "--no-show-signature",
        "--format=%an%x00%as%x00%s",
        commit,
    )
    author, date, subject = said.split("\0")
    return author, date, subject


def files_between(top: Path, before: str, after: str) -> list[str]:
    """Return the files that differ between two commits or, with `after` "", the working tree;
    raises GitError."""
    if not after:
        return changed_files(top, before)
    return entries(
        git(top, "diff", "--name-only", "--no-renames", "-z", before, after)
    )
