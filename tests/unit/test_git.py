"""What is asked of git, of real repositories."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from pytest_ddpperf import git as git_module
from pytest_ddpperf.git import (
    changed_files,
    checked_out,
    commit_named,
    first_changed_line,
    ignored_files,
    top_level,
    tree_of,
    worktrees,
)
from pytest_ddpperf.records.errors import GitError
from tests.git import git


def commit(folder: Path, **files: str) -> str:
    """Add files to a repository, `a__b` for a/b.py, which is made where there is none; the
    commit."""
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


def test_the_commit_is_told_whole_and_dirty_where_tracked_files_differ(
    tmp_path: Path,
) -> None:
    git(tmp_path, "init", "-q")
    assert checked_out(tmp_path)[0] == "", "no commit yet"
    (tmp_path / "file").write_text("1")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-qm", "first")
    git(tmp_path, "tag", "-a", "v1", "-m", "v1")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert len(head) == 40
    (tmp_path / "untracked").write_text("a new baseline, say")
    assert checked_out(tmp_path)[0] == head
    (tmp_path / "file").write_text("2")
    assert checked_out(tmp_path)[0] == head + "-dirty"
    (tmp_path / "below").mkdir()
    assert checked_out(tmp_path / "below")[0] == head + "-dirty"


@pytest.mark.parametrize(
    ("ref", "event", "is_head"),
    [
        (
            "refs/pull/7/merge",
            '{"pull_request": {"head": {"sha": "c0ffee"}}}',
            True,
        ),
        # pull_request_target
        (
            "refs/heads/main",
            '{"pull_request": {"head": {"sha": "c0ffee"}}}',
            False,
        ),
        ("refs/pull/7/merge", "{}", False),
        ("refs/pull/7/merge", '{"pull_request": null}', False),
        ("refs/pull/7/merge", "", False),
    ],
)
def test_the_merge_that_github_makes_of_a_pull_request_has_the_name_of_its_head(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ref: str,
    event: str,
    is_head: bool,
) -> None:
    top, file = tmp_path / "top", tmp_path / "event.json"
    merge = commit(top, a="1")
    file.write_text(event)
    for name, value in (
        ("GITHUB_REF", ref),
        ("GITHUB_SHA", merge),
        ("GITHUB_EVENT_PATH", str(file)),
    ):
        monkeypatch.setenv(name, value)
    assert checked_out(top)[0] == ("c0ffee" if is_head else merge)
    (top / "a.py").write_text("2")
    assert checked_out(top)[0] == (
        "c0ffee-dirty" if is_head else f"{merge}-dirty"
    )
    assert commit_named(top, "HEAD") == merge
    git(top, "commit", "--quiet", "--all", "-m", "after it")
    assert checked_out(top)[0] == git(top, "rev-parse", "HEAD")


def test_the_first_line_that_differs_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    top = tmp_path / "top"
    first = commit(top, below__a="1\n2\n3\n4\n", same="1")
    (top / "below" / "a.py").write_text("1\n2\nthree\n4\n5\n")
    (top / "below" / "new.py").write_text("1\n")
    monkeypatch.chdir(top / "below")
    assert first_changed_line(first, "below/a.py") == 3
    assert [
        first_changed_line(first, name)
        for name in ("same.py", "none.py", "below/new.py")
    ] == [
        0,
        0,
        0,
    ]
    assert first_changed_line("0" * 40, "below/a.py") == 0
    monkeypatch.chdir(tmp_path)
    assert first_changed_line(first, "below/a.py") == 0
    assert changed_files(top / "below", first) == ["a.py", "new.py"]


def test_reports_that_git_does_not_have_are_no_changed_files(
    tmp_path: Path,
) -> None:
    top = tmp_path / "top"
    first = commit(top, run="1", below__run="1")
    for name in ("run.py", "run.json", "below/run.json"):
        (top / name).write_text("2\n")
    reports = [top / "run.json", top / "run.py", None, tmp_path / "run.json"]
    changed = changed_files(top, first, reports=reports)
    assert changed == ["below/run.json", "run.py"]


def test_what_an_editable_install_writes_is_no_change(tmp_path: Path) -> None:
    """In no commit is a tree with it, and no rank reads it."""
    first = commit(tmp_path, run="1")
    (tmp_path / "src/net.egg-info").mkdir(parents=True)
    (tmp_path / "src/net.egg-info/SOURCES.txt").write_text("run.py\n")
    without = tmp_path / "baselines"
    assert tree_of(tmp_path, without) == tree_of(tmp_path, without, first)
    assert changed_files(tmp_path, first) == []


def test_temporary_files_are_no_files_of_the_working_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where TMPDIR is below it, our own are there, too. What git knows stays."""
    first = commit(tmp_path, run="1", below__tmp__run="1")
    folder = tmp_path / "below/tmp"
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    (folder / "new.py").write_text("2\n")
    without = tmp_path / "baselines"
    assert tree_of(tmp_path, without) == tree_of(tmp_path, without, first)
    assert changed_files(tmp_path, first) == []
    (folder / "run.py").write_text("2\n")
    assert tree_of(tmp_path, without) != tree_of(tmp_path, without, first)
    assert changed_files(tmp_path, first) == ["below/tmp/run.py"]
    # a folder of temporary files may be the only one where nothing else can be written
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert "below/tmp/new.py" in changed_files(tmp_path, first)


@pytest.mark.parametrize(
    ("name", "ignored"), [("t[ab]", ""), ("tb", "t*\n"), ("link", "")]
)
def test_the_folder_of_temporary_files_may_be_ignored_or_have_any_name(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    ignored: str,
) -> None:
    top = tmp_path / "top"
    first = commit(top, run="1")
    (top / ".gitignore").write_text(ignored)
    folder = tmp_path / name if name == "link" else top / name
    if name == "link":
        (top / "below").mkdir()
        folder.symlink_to(top / "below")
    else:
        folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    without = top / "baselines"
    before = tree_of(top, without)
    (folder / "new.py").write_text("2\n")
    assert tree_of(top, without) == before
    assert changed_files(top, first) == [".gitignore"]
    (top / "ta.py").write_text("2\n")
    assert (tree_of(top, without) == before) == bool(ignored)


def test_the_time_of_a_commit_is_told_in_utc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git(tmp_path, "init", "-q")
    git(tmp_path, "config", "log.showSignature", "true")
    assert checked_out(tmp_path)[1] == "", "no commit yet"
    monkeypatch.setenv("GIT_COMMITTER_DATE", "2026-01-02T03:04:05+09:00")
    git(tmp_path, "commit", "--allow-empty", "-qm", "first")
    assert checked_out(tmp_path)[1] == "2026-01-01T18:04:05+00:00"


def test_without_git_the_commit_is_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert checked_out(tmp_path)[0] == ""
    assert checked_out(tmp_path / "missing")[0] == ""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert checked_out(Path(__file__).parent) == ("", "")
    with pytest.raises(GitError, match="git is not installed, or not on PATH"):
        top_level(Path(__file__).parent)


def test_git_that_does_not_answer_knows_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(tmp_path)
    fake = tmp_path / "git"
    fake.write_text("#!/bin/sh\nexec sleep 60\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(git_module, "_GIT_SECONDS", 0.05)
    assert checked_out(tmp_path)[0] == ""


def test_all_files_that_differ_are_told_less_those_that_git_ignores(
    tmp_path: Path,
) -> None:
    top = tmp_path / "a repo"
    first = commit(
        top,
        same="1",
        edited="1",
        gone="1",
        renamed="a text that is long enough to be found again",
    )
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
        ".gitignore",
        "below/two\nlines.py",
        "committed.py",
        "edited.py",
        "gone.py",
        "renamed.py",
        "stäged it.py",
        "to.py",
    ]


def test_files_of_a_submodule_are_not_ignored(tmp_path: Path) -> None:
    for name in ("part", "top"):
        (tmp_path / name).mkdir()
        git(tmp_path / name, "init", "--quiet")
        git(
            tmp_path / name,
            "commit",
            "--quiet",
            "--allow-empty",
            "-m",
            "a commit",
        )
    top = tmp_path / "top"
    git(
        top,
        "-c",
        "protocol.file.allow=always",
        "submodule",
        "--quiet",
        "add",
        str(tmp_path / "part"),
        "third",
    )
    (top / ".gitignore").write_text("data\n")
    assert ignored_files(top, ["third/data", "data", "third/x.py"]) == ["data"]
    assert ignored_files(top, ["third/data"]) == []
    with pytest.raises(GitError, match="is in submodule 'third'"):
        ignored_files(top, [str(top / "third/data")])


def test_a_tree_with_changes_within_a_submodule_is_that_of_no_commit(
    tmp_path: Path,
) -> None:
    """New files in it, such as what was built there, are no changes."""
    top, part = tmp_path / "top", tmp_path / "part"
    commit(part, run="1")
    commit(top, run="1")
    words = ("protocol.file.allow=always", "submodule", "--quiet", "add")
    git(top, "-c", *words, str(part), "third")
    last = commit(top)
    without = top / "baselines"
    (top / "third/built.so").touch()
    assert tree_of(top, without) == tree_of(top, without, last)
    (top / "third/run.py").write_text("2\n")
    assert tree_of(top, without) != tree_of(top, without, last)
    assert tree_of(top, without, last) == git(top, "rev-parse", "HEAD^{tree}")


def test_a_warning_of_gits_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container's user may have the home of root."""
    commit(tmp_path, a="")
    script = tmp_path / "bin/git"
    script.parent.mkdir()
    real = shutil.which("git")
    script.write_text(
        f"#!/bin/sh\necho 'warning: unable to access it' >&2\nexec {real} \"$@\"\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(script.parent), prepend=os.pathsep)
    assert ignored_files(tmp_path, ["a.py"]) == []
    with pytest.raises(GitError, match=r"^fatal: [^\n]*$"):
        git_module.git(tmp_path, "log", "nowhere", "--")


def test_commands_that_git_advises_have_no_tab(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    advice = b"fatal: dubious ownership\n\tgit config --global ...\n"
    monkeypatch.setattr(
        git_module,
        "run_whole",
        lambda *_, **__: subprocess.CompletedProcess((), 128, b"", advice),
    )
    with pytest.raises(GitError, match="ownership\n    git config"):
        top_level(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "GIT_DIR",
        "GIT_WORK_TREE",
        "GIT_INDEX_FILE",
        "GIT_COMMON_DIR",
        "GIT_OBJECT_DIRECTORY",
    ],
)
def test_what_git_tells_its_hooks_of_another_repository_has_no_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    top, other = tmp_path / "top", tmp_path / "other"
    head = commit(top, a="1")
    commit(other, b="1")
    below = {
        "GIT_WORK_TREE": "",
        "GIT_INDEX_FILE": ".git/index",
        "GIT_OBJECT_DIRECTORY": ".git/objects",
    }
    monkeypatch.setenv(name, str(other / below.get(name, ".git")))
    assert (top_level(top), checked_out(top)[0], commit_named(top, "HEAD")) == (
        top,
        head,
        head,
    )
    assert changed_files(top, head) == []


def test_a_commit_may_be_named_by_its_message(tmp_path: Path) -> None:
    first = commit(tmp_path, a="1")
    git(
        tmp_path,
        "commit",
        "--quiet",
        "--allow-empty",
        "-m",
        "Make steps slower",
    )
    named = commit_named(tmp_path, ":/Make steps")
    assert named == commit_named(tmp_path, "HEAD") != first
    with pytest.raises(GitError, match="is no commit"):
        commit_named(tmp_path, ":/Make them faster")
    with pytest.raises(GitError, match="is no commit"):
        commit_named(tmp_path, "HEAD:a.py")


def test_neither_the_index_nor_a_file_is_touched(tmp_path: Path) -> None:
    head = commit(tmp_path, a="1")
    # git status would now write what it found into the index, and so does describe
    os.utime(tmp_path / "a.py", (0, 0))
    before = {
        path: path.read_bytes()
        for path in tmp_path.rglob("*")
        if path.is_file()
    }
    assert checked_out(tmp_path)[0] == head
    changed_files(tmp_path, head)
    worktrees(tmp_path)
    assert {
        path: path.read_bytes()
        for path in tmp_path.rglob("*")
        if path.is_file()
    } == before


def test_a_merge_with_conflicts_is_named(tmp_path: Path) -> None:
    top = tmp_path / "top"
    first = commit(top, a="1")
    commit(top, a="2")
    git(top, "checkout", "--quiet", "-b", "other", first)
    commit(top, a="3")
    with pytest.raises(subprocess.CalledProcessError):
        git(top, "merge", "main")
    with pytest.raises(GitError, match=r"a\.py: needs merge"):
        changed_files(top, first)
