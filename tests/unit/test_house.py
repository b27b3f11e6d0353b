"""The house's rules: imports go down only, torch stays in rank/ and suite/, and a room that grows is asked to split."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import pytest_ddpperf

PACKAGE = Path(__file__).parents[2] / "pytest_ddpperf"

# From the ground up, a storey a room.
STOREYS = (
    "records",
    "files",
    "git",
    "wire",
    "baseline",
    "verdict",
    "history",
    "options",
    "report",
    "rank",
    "launch",
    "remote",
    "measuring",
    "doctor",
    "plugin",
    "cli",
    "__main__",
    "suite",
)
LEVEL = {room: level for level, room in enumerate(STOREYS)}
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imports_of(path: Path) -> set[str]:
    """Dotted names of all modules a file imports, inside functions and for type checking too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the direction"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def rooms_imported_by(path: Path) -> set[str]:
    parts = [name.split(".") for name in imports_of(path)]
    return {p[1] for p in parts if p[0] == "pytest_ddpperf" and len(p) > 1 and p[1] in LEVEL}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down_only(path: Path) -> None:
    room = room_of(path)
    assert room in LEVEL, f"{room} has no storey: give it one"
    above = {other for other in rooms_imported_by(path) if other != room and LEVEL[other] >= LEVEL[room]}
    assert not above, f"{room} may not import {', '.join(sorted(above))}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_two_rooms_import_torch(path: Path) -> None:
    if room_of(path) not in ("rank", "suite"):
        assert not {name for name in imports_of(path) if name.split(".")[0] == "torch"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_three_rooms_know_pytest(path: Path) -> None:
    if "pytest" in {name.split(".")[0] for name in imports_of(path)}:
        assert room_of(path) in ("options", "plugin", "suite")


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("suite/*.py")), ids=lambda path: path.name)
def test_the_suite_uses_nothing_that_users_could_not(path: Path) -> None:
    ours = {name.split(".", 1)[1] for name in imports_of(path) if name.startswith("pytest_ddpperf.")}
    assert {name for name in ours if not name.startswith("suite.")} <= set(pytest_ddpperf._HOMES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_has_at_most_450_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 450


def test_the_check_sees_an_import_upwards(tmp_path: Path) -> None:
    file = tmp_path / "stats.py"
    file.write_text("def f():\n    from pytest_ddpperf.verdict import judge\n    from pytest_ddpperf import git\n")
    assert rooms_imported_by(file) == {"verdict", "git"}


def test_every_room_has_a_storey_and_every_storey_a_room() -> None:
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    files = {path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__"}
    assert rooms | files == set(STOREYS)


def test_a_run_without_distributed_tests_imports_the_table_of_options_and_the_hooks_only() -> None:
    code = "import sys, pytest_ddpperf.plugin.hooks; print(*sorted(sys.modules))"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    found = [name for name in output.split() if name.startswith("pytest_ddpperf")]
    rooms = ("options", "options.table", "plugin", "plugin.declared", "plugin.hooks", "plugin.items")
    rooms += ("plugin.outset", "plugin.reporter", "plugin.state")
    assert found == ["pytest_ddpperf", *(f"pytest_ddpperf.{room}" for room in rooms)]
