"""What is asked of git, of real repositories."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pytest_ddpperf import git as git_module
from pytest_ddpperf.git import (
    changed_files,
    commit_named,
    commit_of,
    commit_time,
    last_change,
    top_level,
    why_unknown,
    worktrees,
)
from pytest_ddpperf.records.errors import GitError
from tests.git import git


def commit(folder: Path, **files: str) -> str:
    """Add files to a repository, `a__b` for a/b.py, which is made where there is none; the commit."""
    if not (folder / ".git").exists():
        folder.mkdir(parents=True, exist_ok=True)
        git(folder, "init", "--quiet", "--initial-branch=main")
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--allow-empty", "-m", "a commit")
    return git(folder, "rev-parse", "HEAD")


def test_the_commit_is_told_whole_and_dirty_where_tracked_files_differ(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    assert commit_of(tmp_path) == "", "no commit yet"
    (tmp_path / "file").write_text("1")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-qm", "first")
    git(tmp_path, "tag", "-a", "v1", "-m", "v1")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert len(head) == 40
    (tmp_path / "untracked").write_text("a new baseline, say")
    assert commit_of(tmp_path) == head
    (tmp_path / "file").write_text("2")
    assert commit_of(tmp_path) == head + "-dirty"
    (tmp_path / "below").mkdir()
    assert commit_of(tmp_path / "below") == head + "-dirty"


def test_the_time_of_a_commit_is_told_in_utc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(tmp_path, "init", "-q")
    git(tmp_path, "config", "log.showSignature", "true")
    assert commit_time(tmp_path) == "", "no commit yet"
    monkeypatch.setenv("GIT_COMMITTER_DATE", "2026-01-02T03:04:05+09:00")
    git(tmp_path, "commit", "--allow-empty", "-qm", "first")
    assert commit_time(tmp_path) == "2026-01-01T18:04:05+00:00"


def test_the_last_change_of_a_file_is_told_by_its_commit_alone_where_that_is_signed(tmp_path: Path) -> None:
    text = f"tree {git(tmp_path, 'rev-parse', commit(tmp_path, a='1') + '^{tree}')}\n"
    text += "author a <a@b> 0 +0000\ncommitter a <a@b> 0 +0000\ngpgsig -----BEGIN PGP SIGNATURE-----\n \n a\n"
    (tmp_path / "signed").write_text(text + " -----END PGP SIGNATURE-----\n\nsigned\n")
    signed = git(tmp_path, "hash-object", "-t", "commit", "-w", tmp_path / "signed")
    git(tmp_path, "reset", "--quiet", signed)
    git(tmp_path, "config", "log.showSignature", "true")
    (tmp_path / "gpg").write_text("#!/bin/sh\necho gpg: of nobody >&2\n")
    (tmp_path / "gpg").chmod(0o755)
    git(tmp_path, "config", "gpg.program", tmp_path / "gpg")
    assert git(tmp_path, "log", "-1", "--format=%H") != signed, "git adds a word on the signature"
    assert last_change(tmp_path, tmp_path / "a.py") == signed


def test_without_git_the_commit_is_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert commit_of(tmp_path) == ""
    assert commit_of(tmp_path / "missing") == ""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit_of(Path(__file__).parent) == commit_time(Path(__file__).parent) == ""
    with pytest.raises(GitError, match="git is not installed, or not on PATH"):
        top_level(Path(__file__).parent)


def test_the_reason_for_an_unknown_commit_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_unknown(tmp_path) == "", "outside a repository there is no more to say"
    git(tmp_path, "init", "-q")
    assert why_unknown(tmp_path).startswith("fatal: ")
    commit(tmp_path)
    assert why_unknown(tmp_path) == "git could not say when the run began, and can now"
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    reported = why_unknown(tmp_path)
    assert reported.startswith(f"fatal: detected dubious ownership in repository at '{tmp_path}' To add an exception")
    assert "\n" not in reported
    fake = tmp_path / "git"
    fake.write_text("#!/bin/sh\nexec sleep 60\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(git_module, "_GIT_SECONDS", 0.05)
    assert commit_of(tmp_path) == ""
    assert why_unknown(tmp_path) == "git did not answer within 0.05 s"
    fake.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert why_unknown(tmp_path) == "git is not installed, or not on PATH"


def test_what_git_refuses_it_says_itself(tmp_path: Path) -> None:
    with pytest.raises(GitError, match=r"not a git repository"):
        top_level(tmp_path)


@pytest.mark.parametrize("name", ["a repo", "répo", "two\nlines"])
def test_the_top_is_found_from_below_with_links_resolved(tmp_path: Path, name: str) -> None:
    top = tmp_path / name
    commit(top, a__b="")
    (tmp_path / "link").symlink_to(top)
    assert top_level(top / "a") == top_level(tmp_path / "link/a") == top


def test_refs_of_all_kinds_name_a_commit(tmp_path: Path) -> None:
    first = commit(tmp_path, a="1")
    git(tmp_path, "tag", "-a", "v1", "-m", "v1")
    git(tmp_path, "branch", "feature/x")
    second = commit(tmp_path, a="2")
    for ref in ("v1", "feature/x", "HEAD~1", "main^", first, first[:8], "refs/tags/v1"):
        assert commit_named(tmp_path, ref) == first
    assert commit_named(tmp_path, "main") == second


@pytest.mark.parametrize("ref", ["nothing", "--all", "-h", "HEAD:a.py", "HEAD~9", "v1..main", "0" * 40, "a b", "@{9}"])
def test_what_names_no_commit_is_refused(tmp_path: Path, ref: str) -> None:
    commit(tmp_path, a="1")
    git(tmp_path, "tag", "v1")
    with pytest.raises(GitError):
        commit_named(tmp_path, ref)


def test_all_files_that_differ_are_told_less_those_that_git_ignores(tmp_path: Path) -> None:
    top = tmp_path / "a repo"
    first = commit(top, same="1", edited="1", gone="1", renamed="a text that is long enough to be found again")
    assert changed_files(top, first) == []
    (top / ".gitignore").write_text("ignored*\n")
    commit(top, committed="1")
    (top / "edited.py").write_text("2")
    (top / "gone.py").unlink()
    (top / "renamed.py").rename(top / "to.py")
    (top / "stäged it.py").write_text("1")
    git(top, "add", "stäged it.py")
    (top / "below").mkdir()
    (top / "below/two\nlines.py").write_text("1")
    (top / "ignored.py").write_text("1")
    assert changed_files(top, first) == [
        ".gitignore", "below/two\nlines.py", "committed.py", "edited.py", "gone.py", "renamed.py", "stäged it.py",
        "to.py",
    ]  # fmt: skip


def test_a_file_put_back_as_it_was_differs_no_more(tmp_path: Path) -> None:
    first = commit(tmp_path, a="1")
    commit(tmp_path, a="2")
    (tmp_path / "a.py").write_text("1")
    assert changed_files(tmp_path, first) == []


@pytest.mark.parametrize("ends", [b"\n", b"\r\n"], ids=["lf", "crlf"])
@pytest.mark.parametrize("by", ["autocrlf", "attribute", "nothing"])
def test_a_text_whose_lines_end_otherwise_does_not_differ(tmp_path: Path, by: str, ends: bytes) -> None:
    lines = [b"one", b"two", b""]
    (tmp_path / "text.py").write_bytes(ends.join(lines))
    (tmp_path / "edited.py").write_bytes(ends.join(lines))
    (tmp_path / "binary").write_bytes(b"\0" + ends.join(lines))
    first = commit(tmp_path, same="1\n")
    if by == "autocrlf":
        git(tmp_path, "config", "core.autocrlf", "true")
    if by == "attribute":
        (tmp_path / ".git/info/attributes").write_text("*.py text eol=crlf\n")
    for other in (b"\n", b"\r\n"):
        (tmp_path / "text.py").write_bytes(other.join(lines))
        (tmp_path / "edited.py").write_bytes(other.join([b"three", *lines]))
        (tmp_path / "binary").write_bytes(b"\0" + other.join(lines))
        (tmp_path / "empty.py").touch()
        git(tmp_path, "add", "empty.py")
        assert changed_files(tmp_path, first) == ["binary"] * (other != ends) + ["edited.py", "empty.py"]
        git(tmp_path, "rm", "-q", "--cached", "empty.py")
        assert changed_files(tmp_path, first) == ["binary"] * (other != ends) + ["edited.py", "empty.py"], "untracked"


def test_a_submodule_with_other_work_differs(tmp_path: Path) -> None:
    top, other = tmp_path / "top", tmp_path / "other"
    commit(other, a="1")
    commit(top)
    git(top, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", other, "below")
    first = commit(top)
    assert changed_files(top, first) == []
    (top / "below/a.py").write_text("2")
    assert changed_files(top, first) == ["below"]
    commit(top / "below")
    assert changed_files(top, first) == ["below"]


def test_what_changed_within_the_tick_of_a_commit_differs(tmp_path: Path) -> None:
    """git looks into what is as young as its index: a file may have been written again, as long as before."""
    file = tmp_path / "a.py"
    commit(tmp_path, a="1")
    git(tmp_path, "config", "core.trustctime", "false")
    os.utime(file, (10**9, 10**9))
    git(tmp_path, "update-index", "--refresh")
    head = git(tmp_path, "rev-parse", "HEAD")
    file.write_text("2")
    for path in (file, tmp_path / ".git/index"):
        os.utime(path, (10**9, 10**9))
    assert changed_files(tmp_path, head) == ["a.py"]


def test_all_worktrees_are_listed_those_that_are_gone_too(tmp_path: Path) -> None:
    top, other = tmp_path / "a repo", tmp_path / "an other"
    commit(top)
    git(top, "worktree", "add", "--detach", other)
    assert worktrees(top) == worktrees(other) == [top, other]
    other.rename(tmp_path / "moved")
    assert worktrees(top) == [top, other]


@pytest.mark.parametrize(
    "name", ["GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY"]
)
def test_what_git_tells_its_hooks_of_another_repository_has_no_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    top, other = tmp_path / "top", tmp_path / "other"
    head = commit(top, a="1")
    commit(other, b="1")
    below = {"GIT_WORK_TREE": "", "GIT_INDEX_FILE": ".git/index", "GIT_OBJECT_DIRECTORY": ".git/objects"}
    monkeypatch.setenv(name, str(other / below.get(name, ".git")))
    assert (top_level(top), commit_of(top), commit_named(top, "HEAD")) == (top, head, head)
    assert changed_files(top, head) == []


def test_neither_the_index_nor_a_file_is_touched(tmp_path: Path) -> None:
    head = commit(tmp_path, a="1")
    os.utime(tmp_path / "a.py", (0, 0))  # git status would now write what it found into the index, and so does describe
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert commit_of(tmp_path) == head
    changed_files(tmp_path, head)
    worktrees(tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
