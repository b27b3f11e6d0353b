"""The version to compare with: which commit it is, and its worktree in a temporary folder."""

import fcntl
import glob
import hashlib
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path

from pytest_ddpperf import git, text
from pytest_ddpperf.launch import describe_end
from pytest_ddpperf.options.settings import Settings
from pytest_ddpperf.records.errors import (
    NOTHING_DIFFERS,
    AgainstError,
    GitError,
)
from pytest_ddpperf.records.messages import Sources
from pytest_ddpperf.records.outcome import Version
from pytest_ddpperf.remote.whole_tree import (
    complete,
    link_ignored,
    move_variables,
    still_lacks,
)
from pytest_ddpperf.wire.boot import contents, search_path_of_new
from pytest_ddpperf.wire.source_trees import Trees, is_code
from pytest_ddpperf.wire.variables import concealed_words

_PREFIX = "ddpperf-against-"
_ATTEMPTS = 20


def _own_prefix() -> str:
    """Return how these folders are named where this process sees their owners: a container's are
    not seen by others that share a repository or a temporary folder."""
    seen = os.uname().nodename
    with suppress(OSError):
        seen += os.readlink("/proc/self/ns/pid")
    return f"{_PREFIX}{hashlib.sha256(seen.encode()).hexdigest()[:6]}-"


def _start_of(pid: int) -> str:
    """Return when a process began, in the kernel's ticks; "" if that is not known."""
    fields = contents(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return "".join(fields[19:20])


def _is_abandoned(folder: Path) -> bool:
    """Whether the owner of such a folder, which its name has, is gone."""
    name = folder.name
    if not name.startswith(_own_prefix()):
        return False
    pid, _, rest = name.removeprefix(_own_prefix()).partition("-")
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except (ValueError, OverflowError, OSError):
        return False  # of another user, or no number of a process
    # another process may have its number by now
    return _start_of(int(pid)) != rest.partition("-")[0]


class Worktree:
    """A temporary folder of this run's own, `path`, and a worktree of a commit in it, `tree`, if
    one is given. If this run is killed, its rank server removes the folder, or else the next
    run."""

    def __init__(
        self,
        top: Path,
        commit: str = "",
        *,
        offline: bool = False,
        timeout: float | None = None,
    ) -> None:
        """`offline`: nothing is fetched. `timeout`: seconds that git has. Raises GitError or
        OSError, with nothing left."""
        self._top, self._commit = top, commit
        # the marker of its owner is there as soon as the folder is
        owner = f"{_own_prefix()}{os.getpid()}-{_start_of(os.getpid())}-"
        self.path = Path(tempfile.mkdtemp(prefix=owner)).resolve()
        for folder in self.path.parent.glob(f"{_own_prefix()}*"):
            if _is_abandoned(folder):
                shutil.rmtree(folder, ignore_errors=True)
        # Named by git after the repository; the folder around it is ours to recognise.
        self.tree = self.path / (top.name or "tree")
        if commit:
            try:
                with _alone(top):
                    _forget_old_worktrees(top)
                    self._add(offline, timeout)
            except BaseException:
                self._clear()
                raise

    def _add(self, offline: bool, timeout: float | None) -> None:
        try:
            git.git(
                self._top,
                "worktree",
                "add",
                "--detach",
                "--quiet",
                self.tree,
                self._commit,
                offline=offline,
                timeout=timeout,
            )
        except BaseException:
            _forget(self._top, self.tree)
            # where it is empty: git leaves that behind
            with suppress(GitError, OSError):
                asked = "rev-parse --path-format=absolute --git-path worktrees"
                Path(git.git(self._top, *asked.split())).rmdir()
            raise

    def remove(self) -> None:
        """Leave nothing, in the repository neither."""
        self._clear()
        if self._commit:
            with _alone(self._top):
                _forget(self._top, self.tree)

    def _clear(self) -> None:
        for _ in range(_ATTEMPTS):
            shutil.rmtree(self.path, ignore_errors=True)
            if not self.path.exists():
                break
            # ranks that were killed may still have been writing
            time.sleep(0.1)


@contextmanager
def _alone(top: Path) -> Iterator[None]:
    """No other run adds or removes a worktree of the repository meanwhile: git trips over one that
    is half made."""
    with ExitStack() as locked:
        # without locks on its file system, the odds are still good
        with suppress(GitError, OSError):
            common = git.git(top, "rev-parse", "--git-common-dir")
            descriptor = os.open(top / common, os.O_RDONLY)
            locked.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


def _forget_old_worktrees(top: Path) -> None:
    """Let git know that the worktrees of runs that were killed are gone."""
    for tree in git.worktrees(top):
        if not tree.parent.name.startswith(_own_prefix()):
            continue
        # in another folder for temporary files
        if _is_abandoned(tree.parent):
            shutil.rmtree(tree.parent, ignore_errors=True)
        if not tree.exists():
            _forget(top, tree)


def _forget(top: Path, tree: Path) -> None:
    """Let git know that a worktree is gone."""
    # it was not added yet, or somebody else removed it
    with suppress(GitError):
        git.git(top, "worktree", "remove", "--force", "--force", tree)


# Files that pytest may read its settings from.
INI_FILES = """
    pytest.ini .pytest.ini pytest.toml .pytest.toml pyproject.toml tox.ini setup.cfg
""".split()
_SHOWN = 4000  # characters of what another process wrote


class Checkout:
    """Which version is asked for and, from `check_out` to `remove`, a temporary folder of its side,
    with a worktree of it where it is another commit."""

    def __init__(
        self,
        settings: Settings,
        rootdir: Path,
        kept: Sequence[str],
        *,
        own_tests: bool = False,
    ) -> None:
        """`kept` as `Trees.kept`. With `own_tests` it is the commit as it was, and nothing is
        fetched for it. Raises AgainstError."""
        self._settings, self._own_tests = settings, own_tests
        self._folder: Worktree | None = None
        ref = settings.against or ""
        is_other = ref not in ("", "self")
        try:
            self.top = git.top_level(rootdir)
        except GitError as error:
            if is_other:
                raise AgainstError(
                    "--ddp-against",
                    f"{ref} is a git ref, and git cannot read the repository of {rootdir}: {error}",
                ) from None
            self.top = rootdir.resolve()
        now = git.checked_out(self.top)[0]
        # the commit that is checked out; "" if it is no other one
        self.other_commit = self._commit(ref) if is_other else ""
        self.version = Version(
            ref=ref,
            commit=self.other_commit or now,
            now=now,
            python=settings.against_python or "",
            environ=concealed_words(settings.against_env or ()),
            option=concealed_words(settings.against_option or ()),
        )
        self.current_trees = Trees(
            current=str(self.top), base=str(self.top), kept=tuple(kept)
        )

    def _commit(self, ref: str) -> str:
        try:
            commit = git.commit_named(self.top, ref, offline=self._own_tests)
        except GitError as error:
            raise AgainstError(
                "--ddp-against", str(error), _remedy(self.top, ref)
            ) from None
        if others := git.namesakes(self.top, ref, commit):
            raise AgainstError(
                "--ddp-against",
                f"{ref!r} is {commit[:12]}, and {text.some(others)} is another commit",
                f"write {others[0]}, or delete one",
            )
        return commit

    @property
    def assignments(self) -> dict[str, str]:
        """The variables that are to be otherwise."""
        return dict(
            word.split("=", 1) for word in self._settings.against_env or ()
        )

    def environ_in(
        self, trees: Trees, outside: Mapping[str, str]
    ) -> dict[str, str]:
        """The variables `outside` as processes in the version's tree have them."""
        environ = {
            **move_variables(trees, outside),
            # else `uv run` installs this version into the environment that both sides have
            "UV_NO_SYNC": "1",
            **self.assignments,
        }
        folders: list[str] = []
        if "PYTHONPATH" in environ:
            folders += environ["PYTHONPATH"].split(os.pathsep)
        # what an editable install adds, for interpreters that they may start
        if not self.version.python:
            for entry in search_path_of_new():
                if os.path.isabs(entry) and trees.followed(entry) != entry:
                    folders.append(trees.followed(entry))
        if folders:
            environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(folders))
        return environ

    def check_out(
        self,
        environ: Mapping[str, str] | None = None,
        until: float = math.inf,
        look: Callable[[Trees], None] | None = None,
    ) -> Trees:
        """Check the version out next to the current tree and set it up; raises AgainstError.

        `environ` are the variables of the set-up, by default this process's; `until` is its end by
        the monotonic clock. `look` is called while the version has its own tests.
        """
        commit = self.other_commit
        try:
            folder = Worktree(
                self.top, commit, offline=self._own_tests, timeout=_left(until)
            )
            self._folder = folder
            if not commit:
                return self.current_trees
            trees = replace(self.current_trees, base=str(folder.tree))
            lacking = complete(trees, commit)
            self._set_up(trees, environ, until)
            # both sides have the current tree's tests
            lacking = [
                path
                for path in lacking
                if still_lacks(folder.tree / path) and not trees.keeps(path)
            ]
            if lacking:
                raise GitError(
                    f"this clone lacks what that commit has as {text.some(lacking)} (a submodule,"
                    " or a file of Git LFS): fetch it, or bring it with --ddp-against-setup"
                )
            link_ignored(trees)
            if look is not None:
                look(trees)
            if not self._own_tests:
                copy_tests(trees)
        except (GitError, OSError) as error:
            raise AgainstError(
                self._settings.comparison_option, self._unavailable(error)
            ) from None
        return trees

    def lacking(
        self, files: Mapping[str, str], *, are_current: bool = True
    ) -> list[str]:
        """Return those of one side's files, with their digests, that git ignores and the other side
        lacks, but for data that the run wrote itself; raises GitError."""
        if self._folder is None or not self.other_commit:
            return []
        own, other = self.top, self._folder.tree
        if not are_current:
            own, other = other, own
        found = [
            file
            for file, digest in files.items()
            if (digest or is_code(file))
            and (own / file).exists()
            and not (other / file).exists()
            and not _is_made_alike(file)
        ]
        return git.ignored_files(self.top, found) if found else []

    @property
    def folder(self) -> Path:
        """For what this side leaves: it goes with `remove`."""
        assert self._folder is not None, "check_out comes first"
        return self._folder.path

    def _unavailable(self, error: Exception) -> str:
        """Why there is no tree, in one line: git's first error and its last line say what is
        wrong."""
        *errors, last = str(error).splitlines() or [""]
        errors = [line for line in errors if line.startswith("error: ")]
        said = "; ".join([*errors[:1], last])
        if "promisor" in last:
            said += f"; git diff --stat HEAD {self.version.commit} brings it"
        is_refused = "Permission denied" in last or "Read-only file" in last
        if is_refused and "/worktrees/" in last:
            said += "; git writes into .git: make a clone that this user may write to"
        if "unable to write" in said:
            said += f"; is there space in {tempfile.gettempdir()}?"
        return f"{self.version} cannot be checked out: {said}"

    def _set_up(
        self, trees: Trees, environ: Mapping[str, str] | None, until: float
    ) -> None:
        """Run the command that sets the version up, if one is given; raises AgainstError and
        OSError."""
        command = self._settings.against_setup
        if command is None:
            return
        seconds = _left(until)
        try:
            ended = git.run_whole(
                command,
                self.environ_in(trees, git.outside_of_hooks(environ)),
                folder=Path(trees.base),
                timeout=seconds,
            )
        except subprocess.TimeoutExpired:
            raise AgainstError(
                "--ddp-against-setup",
                f"{command!r} did not end within the {seconds:.0f} s that there were",
            ) from None
        if ended.returncode:
            written = (ended.stdout + ended.stderr).decode(errors="replace")
            raise AgainstError(
                "--ddp-against-setup",
                f"{command!r} {describe_end(ended.returncode)} in a worktree of"
                f" {self.version}\n{written[-_SHOWN:].rstrip()}",
            )

    @cached_property
    def changed(self) -> tuple[str, ...]:
        """Files other than tests, baselines and documentation that differ between the trees, by
        git; raises AgainstError."""
        return tuple(
            file
            for file in self._differing
            if not is_documentation(file) and not self._is_apart(file)
        )

    def _is_apart(self, file: str) -> bool:
        """Whether a file is a test, which both sides have from the current tree, or a baseline."""
        folder = glob.escape(os.path.realpath(self._settings.baseline_dir))
        return self.current_trees.keeps(file) or fnmatch(
            str(self.top / file), f"{folder}/*/*/*.json"
        )

    def changed_tests(self, patterns: Sequence[str]) -> list[str]:
        """Test modules, by the `patterns` of their names, conftests, ini files and what is next to
        tests, as far as they differ between the trees; raises AgainstError."""
        names = ("conftest.py", *INI_FILES, *patterns)
        return [
            file
            for file in self._differing
            if self.current_trees.keeps(file)
            or any(fnmatch(Path(file).name, name) for name in names)
        ]

    @cached_property
    def _differing(self) -> list[str]:
        """The files that differ between the trees; raises AgainstError."""
        if not self.other_commit:
            return []
        asked = self._settings
        reports = (
            asked.json_path,
            asked.markdown_path,
            asked.html_path,
            self.top / ".coverage",  # of an earlier run with pytest-cov
        )
        try:
            return git.changed_files(
                self.top, self.version.commit, reports=reports
            )
        except GitError as error:
            raise AgainstError(
                "--ddp-against",
                f"git cannot compare with {self.version}: {error}",
            ) from None

    def certain_files(self) -> dict[Path, str]:
        """Return files of both sides, one of which has to be opened to run or read anything that
        differs: all of that is Python source or documentation that both sides have. Each with the
        one that differs, from the top, or "" for any. {} if more may differ. Raises GitError."""
        has_more = self._otherwise or self._own_tests or sys.pycache_prefix
        if self._folder is None or has_more:
            return {}
        found: dict[Path, str] = {}
        for file in self._differing:
            if self._is_apart(file):
                continue
            here, there = self.top / file, self._folder.tree / file
            is_known = file.endswith(".py") or is_documentation(file)
            if not is_known or not _are_alike(here, there):
                return {}
            for source in (here, there):
                # of an import that finds it, the source is not opened
                name = f"{glob.escape(source.stem)}.*.pyc"
                compiled = (source.parent / "__pycache__").glob(name)
                found |= dict.fromkeys((source, *compiled), file)
        if found:
            # by which git begins, for what it shows of a commit
            found[self._head] = ""
        return found

    @cached_property
    def _head(self) -> Path:
        # asked once: git opens this file, which would count as a use by the test
        return git.own_folder(self.top) / "HEAD"

    @property
    def _otherwise(self) -> bool:
        """Whether more than the commit may differ, or it is no other one."""
        version = self.version
        asked = version.python or version.environ or version.option
        has_setup = self._settings.against_setup is not None
        return bool(not self.other_commit or asked or has_setup)

    def nothing_to_compare(self) -> str:
        """Return, in words, that nothing differs that a rank could import or read; "" if something
        may. Code that git ignores may: the version would lack it. Raises AgainstError and
        GitError."""
        if self.changed or self._otherwise:
            return ""
        for file in git.all_ignored(self.top):
            if is_code(file) and not _is_made_alike(file):
                return ""
        but = ""
        if self._differing:
            but = f" but {text.some(self._differing)}"
        return f"{NOTHING_DIFFERS} {self.version}{but}: nothing to compare"

    def remove(self) -> None:
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.remove()


def is_documentation(file: str) -> bool:
    """Whether a file is for people by its name, and read by no step: `*.md` and `*.rst`, `*.txt` in
    docs/ or doc/ at the top, and all in .github/."""
    top = file.partition("/")[0]
    if file.endswith(".txt"):
        return top in ("docs", "doc")
    return file.endswith((".md", ".rst")) or top == ".github"


def _are_alike(*files: Path) -> bool:
    """Whether these are regular files, executable all or none."""
    return all(file.is_file() and not file.is_symlink() for file in files) and (
        len({os.access(file, os.X_OK) for file in files}) == 1
    )


def _is_made_alike(file: str) -> bool:
    """Whether a file has the version's number alone: of setuptools-scm, say."""
    return Path(file).name == "_version.py"


def copy_tests(trees: Trees) -> None:
    """Give the version's tree the current tests, and no conftest that the current tree lacks;
    raises OSError."""
    base, current = Path(trees.base), Path(trees.current)
    for conftest in base.rglob("conftest.py"):
        if not (current / conftest.relative_to(base)).exists():
            conftest.unlink()
    for path in trees.kept:
        within = trees.within(path)
        if within is None:
            continue
        there = base
        for part in Path(within).parts:
            there /= part
            # it may lead to the user's own files
            if there.is_symlink():
                there.unlink()
        if os.path.isdir(path):
            shutil.rmtree(there, ignore_errors=True)
            shutil.copytree(
                path,
                there,
                symlinks=True,
                ignore=shutil.ignore_patterns("__pycache__", "*.sock"),
            )
        else:
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, there)


def _left(until: float) -> float | None:
    """Seconds until then; None for ever."""
    return None if until == math.inf else max(0.0, until - time.monotonic())


def _remedy(top: Path, ref: str) -> str:
    with suppress(GitError):
        if git.is_shallow(top):
            remote, _, branch = ref.partition("/")
            if branch and remote in git.git(top, "remote").split():
                return (
                    f"this clone is shallow: git fetch --depth=1 {remote}"
                    f" +{branch}:refs/remotes/{ref} brings it"
                )
            return (
                "this clone is shallow: git fetch --unshallow brings all commits, --deepen=N some"
                " more"
            )
    return "git fetch may bring it; git branch --all and git tag list what there is"


def sources_here(trees: Trees) -> Sources:
    """Return what this process runs."""
    return Sources(
        python=platform.python_version(),
        prefix=os.path.realpath(sys.prefix),
        files=trees.digests(trees.imported()),
    )


def differing_files(
    one: Mapping[str, str], other: Mapping[str, str]
) -> tuple[str, ...]:
    """The files that are on one side only, or hold something else there, sorted."""
    return tuple(
        sorted(
            file for file in {*one, *other} if one.get(file) != other.get(file)
        )
    )


def one_tree(rootdir: Path) -> Trees:
    """The repository; where git knows none, the rootdir."""
    try:
        top = git.top_level(rootdir)
    except GitError:
        top = rootdir.resolve()
    return Trees(current=str(top), base=str(top), kept=())
