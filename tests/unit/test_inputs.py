"""What ranks used that no commit has, and what of it changed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pytest_ddpperf.compare.source import (
    find_changed_inputs,
    find_inputs,
    select_code,
)
from pytest_ddpperf.records.samples import LaunchSamples
from pytest_ddpperf.wire.source_trees import file_digest
from tests.git import git
from tests.unit.test_launches import LAUNCH


@pytest.fixture
def top(tmp_path: Path) -> Path:
    git(tmp_path, "init", "--quiet")
    (tmp_path / ".gitignore").write_text("data/\n*.so\n")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x").write_text("1")
    return tmp_path


def launch(top: Path, *files: str, **libraries: str) -> LaunchSamples:
    digests = {
        file: file_digest(str(top / file)) or "of code" for file in files
    }
    return replace(LAUNCH, files=digests, libraries=libraries)


def test_inputs_are_what_git_ignores_and_libraries_from_outside(
    top: Path,
) -> None:
    found = find_inputs(
        top,
        (
            launch(top, "net.py", "data/x"),
            launch(top, "fast/_c.so", **{"a.so": "x"}),
        ),
    )
    assert found == {
        "fast/_c.so": "of code",
        "data/x": file_digest(str(top / "data/x")),
        "library a.so": "x",
    }
    assert select_code(found) == ["fast/_c.so"]
    assert find_inputs(top, (launch(top),)) == {}


def test_a_baseline_names_twenty_at_most_and_code_first(top: Path) -> None:
    for name in range(30):
        (top / "data" / f"{name:02}").write_text("1")
    many = launch(top, *(f"data/{name:02}" for name in range(30)), "fast/_c.so")
    found = find_inputs(top, (many,))
    assert [*found] == [
        "fast/_c.so",
        *(f"data/{name:02}" for name in range(19)),
    ]
    assert list(find_changed_inputs(top, found, (many,))) == [], (
        "nothing is known of the others"
    )


def test_what_changed_is_told_apart(top: Path) -> None:
    recorded = {
        "data/x": "another",
        "data/gone": "1",
        "library old.so": "1",
        "_c.so": "which each version builds",
    }
    current = (
        launch(top, "data/x", "data/new", "fast/_c.so", **{"new.so": "1"}),
    )
    assert list(find_changed_inputs(top, recorded, current)) == [
        "data/gone (gone, and in no commit)",
        "data/new (new, and in no commit)",
        "data/x (changed, and in no commit)",
        "library new.so (new, and in no commit)",
        "library old.so (gone, and in no commit)",
    ]
    written = replace(LAUNCH, files={"data/x": "", "data/new": ""})
    assert list(find_changed_inputs(top, {"data/x": "1"}, (written,))) == [], (
        "by this run"
    )
    assert (
        list(find_changed_inputs(top, {"data/x": ""}, (launch(top, "data/x"),)))
        == []
    ), "by that of the baseline"
    same = {"data/x": file_digest(str(top / "data/x"))}
    assert list(find_changed_inputs(top, same, (launch(top),))) == [], (
        "whether today's code reads it or not"
    )
