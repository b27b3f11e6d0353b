"""Rules of the package: imports go down only, torch and pytest stay in few packages, and its size
has limits."""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

import pytest_ddpperf

PACKAGE = Path(__file__).parents[2] / "pytest_ddpperf"

# Each may import those before it only.
LAYERS = (
    "records",
    "text",
    "files",
    "git",
    "wire",
    "baseline",
    "verdict",
    "history",
    "explain",
    "options",
    "report",
    "rank",
    "launch",
    "remote",
    "compare",
    "doctor",
    "plugin",
    "cli",
    "__main__",
    "suite",
)
LEVEL = {package: level for level, package in enumerate(LAYERS)}
FILES = sorted(
    path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py"
)


def package_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imports_of(path: Path) -> set[str]:
    """Return the names of all modules that a file imports, inside functions and for type checking
    too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the direction"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def packages_imported_by(path: Path) -> set[str]:
    parts = [name.split(".") for name in imports_of(path)]
    return {
        p[1] for p in parts if p[0] == "pytest_ddpperf" and len(p) > 1 and p[1] in LEVEL
    }


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down_only(path: Path) -> None:
    package = package_of(path)
    assert package in LEVEL, f"{package} has no layer: add it to LAYERS"
    above = {
        other
        for other in packages_imported_by(path)
        if other != package and LEVEL[other] >= LEVEL[package]
    }
    assert not above, f"{package} may not import {', '.join(sorted(above))}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_two_packages_import_torch(path: Path) -> None:
    if package_of(path) not in ("rank", "suite"):
        assert not {name for name in imports_of(path) if name.split(".")[0] == "torch"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_three_packages_import_pytest(path: Path) -> None:
    if "pytest" in {name.split(".")[0] for name in imports_of(path)}:
        assert package_of(path) in ("options", "plugin", "suite")


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.glob("suite/*.py")), ids=lambda path: path.name
)
def test_the_suite_uses_nothing_that_users_could_not(path: Path) -> None:
    ours = {
        name.split(".", 1)[1]
        for name in imports_of(path)
        if name.startswith("pytest_ddpperf.")
    }
    assert {name for name in ours if not name.startswith("suite.")} <= set(
        pytest_ddpperf._HOMES
    )


def test_the_check_sees_an_import_upwards(tmp_path: Path) -> None:
    file = tmp_path / "stats.py"
    file.write_text(
        "def f():\n    from pytest_ddpperf.verdict.decision import judge\n    from pytest_ddpperf"
        " import git\n"
    )
    assert packages_imported_by(file) == {"verdict", "git"}


def test_every_package_has_a_layer() -> None:
    packages = {
        path.name
        for path in PACKAGE.iterdir()
        if path.is_dir() and path.name != "__pycache__"
    }
    files = {path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__"}
    assert packages | files == set(LAYERS)


def test_a_run_without_distributed_tests_imports_the_table_of_options_and_the_hooks_only() -> (
    None
):
    code = "import sys, pytest_ddpperf.plugin.hooks; print(*sorted(sys.modules))"
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    found = [name for name in output.split() if name.startswith("pytest_ddpperf")]
    modules = (
        "options",
        "options.definitions",
        "plugin",
        "plugin.hooks",
        "plugin.item_settings",
        "plugin.items",
        "plugin.reporter",
        "plugin.role",
        "plugin.snapshot",
        "plugin.state",
    )
    assert found == [
        "pytest_ddpperf",
        *(f"pytest_ddpperf.{package}" for package in modules),
    ]


# --- size


def code_tokens(source: str) -> int:
    """Count the tokens of code: no line ends, comments or docstrings. An expanded line costs
    nothing."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(
            node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        ):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                docstrings |= set(
                    range(first.lineno, (first.end_lineno or first.lineno) + 1)
                )
    no_code = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(
        token.type not in no_code and token.start[0] not in docstrings
        for token in tokens
    )


def test_tokens_are_those_of_code() -> None:
    assert (
        code_tokens(
            '"""Text."""\n\n# why\ndef f():\n    """More\n    text."""\n    return (\n        1\n  '
            "  )\n"
        )
        == 9
    )


def test_the_size_of_the_package_is_bounded() -> None:
    assert (
        sum(code_tokens(path.read_text()) for path in PACKAGE.rglob("*.py")) <= 188_000
    )


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_function_is_not_long(path: Path) -> None:
    functions = [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    ]
    assert [f.name for f in functions if (f.end_lineno or 0) - f.lineno + 1 > 95] == []
