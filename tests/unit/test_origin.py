"""Which commit has the code of a stored session."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from pytest_ddpperf.against.origin import Origin, never_at_hand, origin_of
from pytest_ddpperf.against.worktree import Worktree
from pytest_ddpperf.records import Recording
from pytest_ddpperf.records.errors import GitError
from pytest_ddpperf.wire.trees import digests
from tests.git import git
from tests.unit.test_codec import MEASUREMENT


@dataclass
class Stored:
    """A repository with a file of code and the file of a baseline."""

    top: Path

    @property
    def baseline(self) -> Path:
        return self.top / "baseline.json"

    def code(self, text: str) -> None:
        (self.top / "net.py").write_text(text)

    def commit(self) -> str:
        git(self.top, "add", "--all")
        git(self.top, "commit", "--quiet", "--allow-empty", "-m", "a commit")
        return git(self.top, "rev-parse", "HEAD")

    def session(self, commit: str) -> Recording:
        """Of the code as it is, recorded at that commit."""
        self.baseline.write_text(commit)
        return Recording(measurement=MEASUREMENT, commit=commit, files=digests(str(self.top), ["net.py"]))

    def origin(self, session: Recording) -> Origin:
        return origin_of(session, self.baseline, self.top)


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    top = tmp_path / "top"
    top.mkdir()
    git(top, "init", "--quiet", "--initial-branch=main")
    (top / "net.py").write_text("first\n")
    return Stored(top)


def test_it_is_the_recorded_commit(stored: Stored) -> None:
    session = stored.session(first := stored.commit())
    stored.code("second\n")
    stored.commit()
    assert stored.origin(session) == Origin(commit=first)


def test_of_a_dirty_tree_it_is_the_commit_that_has_the_baseline_and_its_code(stored: Stored) -> None:
    before = stored.commit()
    stored.code("second\n")
    session = stored.session(f"{before}-dirty")
    together = stored.commit()
    stored.code("third\n")
    stored.commit()
    assert stored.origin(session) == Origin(commit=together)


def test_what_a_step_reads_and_nobody_imports_is_of_the_commit_that_has_the_baseline(stored: Stored) -> None:
    (stored.top / "net.yaml").write_text("small")
    before = stored.commit()
    (stored.top / "net.yaml").write_text("large")
    session = stored.session(f"{before}-dirty")
    assert stored.origin(session).why == (
        f"it was recorded with uncommitted changes to {before[:12]}, and is not committed since"
    )
    together = stored.commit()
    assert stored.origin(session) == Origin(commit=together)
    session = stored.session(f"{together}-dirty")
    assert stored.origin(session).commit == "", "the last commit of the baseline's file has another session"


def test_where_the_recorded_one_is_not_there_it_is_head_if_that_holds_the_same(stored: Stored) -> None:
    session = stored.session("1" * 40)
    head = stored.commit()
    assert stored.origin(session) == Origin(commit=head)
    (stored.top / "net.py").write_bytes(b"first\r\n")
    assert stored.origin(replace(session, files=digests(str(stored.top), ["net.py"]))).commit == head, "as git sees it"


def test_what_is_not_there_is_told_with_the_command_that_brings_it(stored: Stored) -> None:
    session = stored.session("1" * 40)
    stored.code("second\n")
    stored.commit()
    origin = stored.origin(session)
    assert origin.why == f"commit {'1' * 12} of the baseline is not in this clone"
    assert origin.fetch == f"git fetch origin {'1' * 40}"
    git(stored.top, "remote", "add", "upstream", str(stored.top))
    assert stored.origin(session).fetch == f"git fetch upstream {'1' * 40}"


def test_in_a_shallow_clone_the_code_at_hand_is_not_taken_for_the_baselines(stored: Stored, tmp_path: Path) -> None:
    """Files that nobody imports may have changed since, which only the recorded commit has."""
    first = stored.commit()
    session = stored.session(first)
    stored.commit()
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "--quiet", "--depth=1", stored.top.as_uri(), str(clone))
    origin = origin_of(session, clone / "baseline.json", clone)
    assert origin.why == f"commit {first[:12]} of the baseline is not in this clone, which is shallow"
    assert origin.fetch == f"git fetch --depth=1 origin {first}"
    git(clone, *origin.fetch.split()[1:])
    assert origin_of(session, clone / "baseline.json", clone) == Origin(commit=first)
    dirty = replace(session, commit="1" * 40 + "-dirty")
    assert origin_of(dirty, clone / "baseline.json", clone).fetch == "git fetch --unshallow"


def test_in_a_partial_clone_nothing_is_brought_but_the_command_told_that_would(stored: Stored, tmp_path: Path) -> None:
    session = stored.session(first := stored.commit())
    stored.code("second\n")
    head = stored.commit()
    clone = partial(stored, tmp_path)
    origin = origin_of(session, clone / "baseline.json", clone)
    assert origin.why.startswith(f"this clone lacks files of commit {first[:12]}: fatal: could not fetch ")
    with pytest.raises(GitError, match="could not fetch"):
        Worktree(clone, first, offline=True)
    assert origin.fetch == f"git diff --stat HEAD {first}"
    git(clone, *origin.fetch.split()[1:])
    assert origin_of(session, clone / "baseline.json", clone) == Origin(commit=first)
    Worktree(clone, first, offline=True).remove()
    assert git(clone, "rev-parse", "HEAD") == head


def test_in_a_partial_clone_a_commit_that_is_there_serves_where_the_recorded_one_is_not_whole(
    stored: Stored, tmp_path: Path
) -> None:
    """It was recorded with uncommitted changes, and committed with its code."""
    before = stored.commit()
    stored.code("second\n")
    session = stored.session(f"{before}-dirty")
    together = stored.commit()
    assert origin_of(session, partial(stored, tmp_path) / "baseline.json", tmp_path / "clone") == Origin(
        commit=together
    )


def test_a_commit_that_no_branch_has_is_not_brought(stored: Stored, tmp_path: Path) -> None:
    stored.commit()
    stored.code("second\n")
    squashed = stored.commit()
    session = stored.session(squashed)
    git(stored.top, "reset", "--quiet", "--hard", "HEAD~1")
    git(stored.top, "config", "uploadpack.allowAnySHA1InWant", "true")
    clone = partial(stored, tmp_path)
    before = sorted((clone / ".git/objects").rglob("*"))
    origin = origin_of(session, clone / "baseline.json", clone)
    assert origin.why == f"commit {squashed[:12]} of the baseline is not in this clone"
    assert origin.fetch == f"git fetch origin {squashed}"
    assert sorted((clone / ".git/objects").rglob("*")) == before


def partial(stored: Stored, folder: Path) -> Path:
    """A clone that brings what files hold when that is asked for."""
    git(stored.top, "config", "uploadpack.allowFilter", "true")
    git(folder, "clone", "--quiet", "--filter=blob:none", stored.top.as_uri(), str(folder / "clone"))
    return folder / "clone"


def test_code_that_was_never_committed_is_nowhere(stored: Stored) -> None:
    first = stored.commit()
    stored.code("second\n")
    session = stored.session(f"{first}-dirty")
    stored.code("third\n")
    origin = stored.origin(session)
    assert (origin.commit, origin.fetch) == ("", "")
    assert origin.why == (
        f"no commit at hand holds the baseline's code: in {first[:12]}, which had uncommitted changes, net.py differs"
    )
    assert stored.origin(replace(session, files={**session.files, "gone.py": "0" * 16})).why.endswith(
        "net.py, gone.py differs"
    )


def test_what_git_ignores_is_of_the_commit_where_a_set_up_builds_it(stored: Stored) -> None:
    (stored.top / ".gitignore").write_text("_version.py\n")
    (stored.top / "_version.py").write_text("1")
    commit = stored.commit()
    files = digests(str(stored.top), ["net.py", "_version.py"])
    session = replace(stored.session(commit), files=files)
    assert stored.origin(session).why.endswith("_version.py differs")
    found = origin_of(session, stored.baseline, stored.top, builds=True)
    assert found == Origin(commit=commit, built=("_version.py",))


def test_what_cannot_be_known_is_told(stored: Stored, tmp_path: Path) -> None:
    session = stored.session("")
    assert stored.origin(session).why == "the repository has no commit"
    assert stored.origin(replace(session, files={})).why.startswith("the baseline does not say whose code it is")
    assert stored.origin(replace(session, files={"net.py": ""})).why.endswith("could not be read: net.py")
    assert origin_of(session, stored.baseline, tmp_path).why.startswith("git has no code of another time: ")


def test_code_that_no_commit_will_ever_hold_is_told_when_it_is_stored(stored: Stored, tmp_path: Path) -> None:
    session = stored.session("")
    assert never_at_hand(session, stored.top) == ""
    (stored.top / ".gitignore").write_text("net.py\n")
    assert never_at_hand(session, stored.top) == (
        "ignored by git: net.py; --ddp-against-setup builds what a commit lacks"
    )
    assert never_at_hand(session, stored.top, builds=True) == ""
    git(stored.top, "add", "--force", "net.py")
    assert never_at_hand(session, stored.top) == "", "what is tracked is committed whatever is ignored"
    assert never_at_hand(replace(session, files={}), stored.top) == "ranks imported nothing of a repository"
    assert never_at_hand(replace(session, files={"net.py": ""}), stored.top).startswith("changed meanwhile")
    assert never_at_hand(session, Path(os.path.realpath(tmp_path))).startswith("git has no code of another time: ")
