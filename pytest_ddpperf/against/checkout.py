"""The version to compare with: which one it is, and its tree."""

from __future__ import annotations

import math
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from pytest_ddpperf.against.folder import Folder
from pytest_ddpperf.against.worktree import Worktree
from pytest_ddpperf.git import changed_files, commit_named, commit_of, git, outside_of_hooks, run_whole, top_level
from pytest_ddpperf.launch import describe_end
from pytest_ddpperf.options import Settings
from pytest_ddpperf.records import Version
from pytest_ddpperf.records.errors import AgainstError, CheckoutError, GitError
from pytest_ddpperf.wire.trees import Trees

_SHOWN = 4000  # characters of what another process wrote


class Checkout:
    """Which version is asked for and, from `check_out` to `remove`, a temporary folder of its side, with a worktree of
    it where it is another commit."""

    def __init__(self, settings: Settings, rootdir: Path, kept: Sequence[str], *, offline: bool = False) -> None:
        """`kept` as `Trees.kept`; `offline`: nothing is brought from other repositories. Raises AgainstError."""
        self._settings, self._kept, self._offline = settings, tuple(kept), offline
        self._folder: Folder | None = None
        ref = settings.against or ""
        self._another = ref not in ("", "self")
        try:
            self.top = top_level(rootdir)
        except GitError as error:
            if self._another:
                problem = f"{ref} is a version in git, and {rootdir} has none: {error}"
                raise AgainstError("--ddp-against", problem) from None
            self.top = Path(os.path.realpath(rootdir))
        now = commit_of(self.top)
        self.version = Version(
            ref=ref,
            commit=self._commit(ref) if self._another else now,
            now=now,
            python=settings.against_python or "",
            environ=settings.against_env or (),
            option=settings.against_option or (),
        )
        self.at_hand = Trees(hand=str(self.top), base=str(self.top), kept=self._kept)

    def _commit(self, ref: str) -> str:
        try:
            return commit_named(self.top, ref, offline=self._offline)
        except GitError as error:
            said = f" ({error})" if str(error) else ""
            problem = f"{ref!r} is no commit of {self.top}{said}"
            raise AgainstError("--ddp-against", problem, _remedy(self.top, ref)) from None

    @property
    def assignments(self) -> dict[str, str]:
        """The variables that are to be otherwise."""
        pairs = (text.partition("=") for text in self.version.environ)
        return {name: value for name, assigned, value in pairs if assigned}

    def environ(self, outside: Mapping[str, str]) -> dict[str, str]:
        """The variables `outside`, less those that are to be unset, with those that are to be otherwise."""
        return {**{n: v for n, v in outside.items() if n not in self.version.environ}, **self.assignments}

    def check_out(self, environ: Mapping[str, str] | None = None, until: float = math.inf) -> Trees:
        """The version's tree beside the one at hand, set up under the variables `environ`, this process's if nothing is
        said, until then by the monotonic clock; raises AgainstError."""
        try:
            self._folder = folder = self._add(until) if self._another else Folder()
        except (GitError, OSError) as error:
            raise CheckoutError(self._settings.beside, self._unavailable(error)) from None
        if not isinstance(folder, Worktree):
            return self.at_hand
        if self._settings.against_setup is not None:
            self._set_up(self._settings.against_setup, folder.tree, environ, until)
        return Trees(hand=str(self.top), base=str(folder.tree), kept=self._kept)

    @property
    def folder(self) -> Path:
        """For what this side leaves: it goes with `remove`."""
        assert self._folder is not None, "check_out comes first"
        return self._folder.path

    def _add(self, until: float) -> Worktree:
        return Worktree(self.top, self.version.commit, offline=self._offline, timeout=_left(until))

    def _unavailable(self, error: Exception) -> str:
        """Why there is no tree, in one line: git's last says what is wrong."""
        *_, said = str(error).splitlines() or [""]
        brings = f"; git diff --stat HEAD {self.version.commit} brings it" if "promisor" in said else ""
        return f"{self.version} cannot be checked out: {said}{brings}"

    def _set_up(self, command: str, folder: Path, environ: Mapping[str, str] | None, until: float) -> None:
        seconds = _left(until)
        try:
            ended = run_whole(command, self.environ(outside_of_hooks(environ)), folder=folder, timeout=seconds)
        except subprocess.TimeoutExpired:
            problem = f"{command!r} did not end within the {seconds:.0f} s that there were"
            raise CheckoutError("--ddp-against-setup", problem) from None
        if ended.returncode:
            written = (ended.stdout + ended.stderr).decode(errors="replace")[-_SHOWN:].rstrip()
            problem = f"{command!r} {describe_end(ended.returncode)} in a worktree of {self.version}\n{written}"
            raise CheckoutError("--ddp-against-setup", problem)

    def changed(self) -> list[str]:
        """Files other than tests that differ between the trees; raises AgainstError."""
        if not self._another:
            return []
        try:
            files = changed_files(self.top, self.version.commit)
        except GitError as error:
            raise AgainstError("--ddp-against", f"git cannot tell what differs from {self.version}: {error}") from None
        return [file for file in files if not self.at_hand.keeps(file)]

    def remove(self) -> None:
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.remove()


def _left(until: float) -> float | None:
    """Seconds until then; None for ever."""
    return None if until == math.inf else max(0.0, until - time.monotonic())


def _remedy(top: Path, ref: str) -> str:
    with suppress(GitError):
        if git(top, "rev-parse", "--is-shallow-repository").strip() == "true":
            remote, _, branch = ref.partition("/")
            if branch and remote in git(top, "remote").split():
                return f"this clone is shallow: git fetch --depth=1 {remote} +{branch}:refs/remotes/{ref} brings it"
            return "this clone is shallow: git fetch --unshallow brings all commits, --deepen=N some more"
    return "git fetch brings what other repositories have; git branch --all and git tag list what there is"
