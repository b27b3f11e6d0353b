"""Which commit has the code of a stored session."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from pytest_ddpperf.compare.source import Source, find_source
from pytest_ddpperf.git import tree_of
from pytest_ddpperf.records.samples import Recording
from tests.git import git
from tests.unit.test_codec import MEASUREMENT


@dataclass
class Project:
    """A repository with a file of code and a folder of baselines."""

    top: Path

    @property
    def baseline(self) -> Path:
        return self.top / "baselines" / "a.json"

    def write(self, name: str, content: str) -> None:
        (self.top / name).write_text(content)

    def commit(self) -> str:
        git(self.top, "add", "--all")
        git(self.top, "commit", "--quiet", "--allow-empty", "-m", "a commit")
        return git(self.top, "rev-parse", "HEAD")

    def tree(self, commit: str = "") -> str:
        return tree_of(self.top, self.top / "baselines", commit)

    def session(self, commit: str) -> Recording:
        """Save a baseline of the code as it is."""
        session = Recording(
            measurement=MEASUREMENT, commit=commit, tree=self.tree()
        )
        self.baseline.write_text(commit)
        return session

    def source(self, session: Recording) -> Source:
        return find_source(
            session, self.baseline, self.top / "baselines", self.top
        )


@pytest.fixture
def project(tmp_path: Path) -> Project:
    top = tmp_path / "top"
    (top / "baselines").mkdir(parents=True)
    git(top, "init", "--quiet", "--initial-branch=main")
    (top / "net.py").write_text("first\n")
    (top / ".gitignore").write_text("built\n")
    return Project(top)


def test_the_tree_is_of_all_files_but_baselines_ignored_ones_and_caches(
    project: Project,
) -> None:
    commit = project.commit()
    before = project.tree()
    assert project.tree(commit) == before
    for name in ("baselines/b.json", "built", "net.pyc"):
        project.write(name, "x")
    assert project.tree() == before
    objects = sorted(
        path for path in (project.top / ".git").rglob("*") if path.is_file()
    )
    contents = {path: path.read_bytes() for path in objects}
    project.write("data.txt", "untracked")
    assert project.tree() != before
    assert {
        path: path.read_bytes()
        for path in (project.top / ".git").rglob("*")
        if path.is_file()
    } == contents


def test_it_is_the_recorded_commit(project: Project) -> None:
    project.write("baselines/a.json", "of another day")
    session = project.session(first := project.commit())
    project.write("net.py", "second\n")
    project.commit()
    project.write("baselines/a.json", "and changed since")
    assert project.source(session) == Source(commit=first)


def test_it_is_the_commit_that_the_baseline_came_with(project: Project) -> None:
    """It was recorded with uncommitted changes, which were committed together with it."""
    first = project.commit()
    project.write("data.txt", "1")
    session = project.session(f"{first}-dirty")
    second = project.commit()
    project.write("net.py", "third\n")
    project.commit()
    assert project.source(session) == Source(commit=second)


def test_an_amended_commit_is_found_by_its_tree_alone(project: Project) -> None:
    session = project.session(project.commit())
    git(project.top, "add", "--all")
    git(project.top, "commit", "--quiet", "--amend", "--no-edit")
    assert project.source(session).commit
    project.write("net.py", "slower\n")
    git(project.top, "commit", "--quiet", "--all", "--amend", "--no-edit")
    git(project.top, "reflog", "expire", "--expire=now", "--all")
    git(project.top, "gc", "--quiet", "--prune=now")
    found = project.source(session)
    assert (found.commit, found.fetch) == (
        "",
        f"git fetch origin {session.commit}",
    )
    assert (
        found.why
        == f"commit {session.commit[:12]} of the baseline is not in this clone"
    )


def test_code_that_git_ignored_is_named(project: Project) -> None:
    session = replace(
        project.session(project.commit()),
        tree="",
        inputs={"data/x": "1", "fast/_c.so": "1"},
    )
    why = "the baseline does not identify its code: git ignored fast/_c.so"
    assert project.source(session) == Source(why=why)


def test_files_that_were_never_committed_are_in_no_commit(
    project: Project,
) -> None:
    commit = project.commit()
    project.write("data.txt", "1")
    session = project.session(f"{commit}-dirty")
    assert (
        project.source(session).why
        == "the baseline was recorded with files that are in no commit"
    )


def test_a_shallow_clone_has_a_command_that_fetches_it(
    project: Project, tmp_path: Path
) -> None:
    session = project.session(commit := project.commit())
    project.commit()
    project.write("net.py", "second\n")
    project.commit()
    git(
        tmp_path,
        "clone",
        "--quiet",
        "--depth=1",
        f"file://{project.top}",
        "clone",
    )
    clone = Project(tmp_path / "clone")
    assert clone.source(session).fetch == f"git fetch origin {commit}"
    git(clone.top, "fetch", "--quiet", "--unshallow")
    assert clone.source(session) == Source(commit=commit)


@pytest.mark.parametrize("tree", ["", "a" * 40])
def test_outside_git_and_without_a_tree_there_is_none(
    tmp_path: Path, tree: str
) -> None:
    session = Recording(measurement=MEASUREMENT, commit="", tree=tree)
    found = find_source(
        session, tmp_path / "a.json", tmp_path, Path(os.path.abspath(os.sep))
    )
    assert found.commit == ""
    assert ("does not identify its code" in found.why) == (tree == "")
