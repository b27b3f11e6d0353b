"""Rules of the package: imports go down only and never in a circle, torch and pytest stay in few
packages, code is not squeezed, and its size has limits."""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "pytest_ddpperf"

# Each may import those before it only.
LAYERS = (
    "version",
    "marks",
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
    "pytest_ddpperf",  # its top, which has the public names
    "suite",
)
LEVEL = {package: level for level, package in enumerate(LAYERS)}
FILES = sorted(PACKAGE.rglob("*.py"))


def module_of(path: Path) -> str:
    """Return the name of a file's module: "pytest_ddpperf.git"."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {module_of(path): path for path in FILES}


def package_of(module: str) -> str:
    """Return the package or the single module below the top: "git"; "pytest_ddpperf" for the top
    itself."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


@cache
def imports_of(path: Path) -> set[str]:
    """Return the names of all modules that a file imports, inside functions and for type checking
    too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, (
                f"{path}: relative imports hide the direction"
            )
            for alias in node.names:
                full_name = f"{node.module}.{alias.name}"
                names.add(
                    full_name if full_name in MODULES else str(node.module)
                )
    return names


def own_imports_of(path: Path) -> set[str]:
    """Return the modules of this package that a file imports."""
    return imports_of(path) & MODULES.keys()


def packages_imported_by(path: Path) -> set[str]:
    return {package_of(module) for module in own_imports_of(path)}


def find_circle(graph: Mapping[str, set[str]]) -> list[str]:
    """Return names that import each other in a circle, the first one at both ends; none if there is
    no circle."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        circle: list[str] = error.args[1]
        return circle[::-1]  # graphlib names who is imported first
    return []


def longest_path(graph: Mapping[str, set[str]]) -> list[str]:
    """Return the longest chain of names, each of which imports the next one."""
    longest: dict[str, list[str]] = {}
    for name in TopologicalSorter(graph).static_order():
        below = max(
            (longest[each] for each in graph[name]), key=len, default=[]
        )
        longest[name] = [name, *below]
    return max(longest.values(), key=len)


def package_graph() -> dict[str, set[str]]:
    graph: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        package = package_of(module)
        graph.setdefault(package, set()).update(
            packages_imported_by(path) - {package}
        )
    return graph


@pytest.mark.parametrize(
    "path", FILES, ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_imports_go_down_only(path: Path) -> None:
    package = package_of(module_of(path))
    assert package in LEVEL, f"{package} has no layer: add it to LAYERS"
    above = {
        other
        for other in packages_imported_by(path)
        if other != package and LEVEL[other] >= LEVEL[package]
    }
    assert not above, f"{package} may not import {', '.join(sorted(above))}"


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {name: own_imports_of(path) for name, path in MODULES.items()}
    circle = find_circle(graph)
    assert not circle, " -> ".join(circle)


def test_packages_stand_on_at_most_11_floors() -> None:
    path = longest_path(package_graph())
    assert len(path) <= 11, " -> ".join(path)


def test_a_circle_is_named_and_the_longest_path_is_found() -> None:
    graph = {"a": {"b", "d"}, "b": {"c"}, "c": {"d"}, "d": set[str]()}
    assert find_circle(graph) == []
    assert longest_path(graph) == ["a", "b", "c", "d"]
    assert find_circle(graph | {"d": {"b"}}) in (
        ["b", "c", "d", "b"],
        ["c", "d", "b", "c"],
        ["d", "b", "c", "d"],
    )


@pytest.mark.parametrize(
    "path", FILES, ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_only_two_packages_import_torch(path: Path) -> None:
    if package_of(module_of(path)) not in ("rank", "suite"):
        assert not {
            name for name in imports_of(path) if name.split(".")[0] == "torch"
        }


@pytest.mark.parametrize(
    "path", FILES, ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_only_three_packages_import_pytest(path: Path) -> None:
    if "pytest" in {name.split(".")[0] for name in imports_of(path)}:
        assert package_of(module_of(path)) in ("options", "plugin", "suite")


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.glob("suite/*.py")), ids=lambda path: path.name
)
def test_the_suite_uses_nothing_that_users_could_not(path: Path) -> None:
    assert packages_imported_by(path) <= {"suite", "pytest_ddpperf"}


def test_the_check_sees_an_import_upwards(tmp_path: Path) -> None:
    file = tmp_path / "stats.py"
    file.write_text(
        "def f():\n"
        "    from pytest_ddpperf.verdict.decision import judge\n"
        "    from pytest_ddpperf import git\n"
    )
    assert packages_imported_by(file) == {"verdict", "git"}
    assert own_imports_of(file) == {
        "pytest_ddpperf.verdict.decision",
        "pytest_ddpperf.git",
    }


def test_every_package_has_a_layer() -> None:
    packages = {
        path.name
        for path in PACKAGE.iterdir()
        if path.is_dir() and path.name != "__pycache__"
    }
    files = {
        path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__"
    }
    assert packages | files | {"pytest_ddpperf"} == set(LAYERS)


def test_a_run_without_distributed_tests_imports_the_table_of_options_and_the_hooks_only() -> (
    None
):
    code = (
        "import sys, pytest_ddpperf.plugin.hooks; print(*sorted(sys.modules))"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    found = [
        name for name in output.split() if name.startswith("pytest_ddpperf")
    ]
    modules = (
        "marks",
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
        "version",
    )
    assert found == [
        "pytest_ddpperf",
        *(f"pytest_ddpperf.{package}" for package in modules),
    ]


# --- plain code

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FLAGS = (ast.Compare, ast.BoolOp)
NO_STATEMENTS = (*COMPREHENSIONS, ast.BoolOp, ast.IfExp)


def is_flag(node: ast.expr) -> bool:
    """Whether an expression is a bool, as far as one can see."""
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Not)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id in ("bool", "any", "all", "isinstance")
    return isinstance(node, FLAGS)


def nested_comprehensions(node: ast.AST) -> int:
    """Return how many comprehensions are inside each other, at most."""
    inside = [
        nested_comprehensions(child) for child in ast.iter_child_nodes(node)
    ]
    return isinstance(node, COMPREHENSIONS) + max(inside, default=0)


def squeezed(tree: ast.Module) -> Iterator[str]:
    """Yield what ruff has no rule for: code that saves a line and costs the reader more."""
    for node in ast.walk(tree):
        found = ""
        match node:
            case ast.Expr(value=value) if isinstance(value, NO_STATEMENTS):
                found = "an expression for its effect: write a loop or an if"
            case ast.IfExp() if ast.IfExp in map(
                type, ast.iter_child_nodes(node)
            ):
                found = "a condition inside a condition: write an if"
            case ast.Assign(targets=[_, _, *_]):
                found = "several assignments at once: write one a line"
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                if is_flag(left) or is_flag(right):
                    found = "a product with a flag: write an if"
            case ast.Starred(value=ast.Call(func=ast.Name(id="filter"))):
                found = "*filter(...): write an if"
        if isinstance(node, COMPREHENSIONS) and nested_comprehensions(node) > 2:
            found = "three comprehensions inside each other: write a loop"
        if found:
            yield f"line {node.lineno}: {found}"


@pytest.mark.parametrize(
    "path", FILES, ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_code_is_not_squeezed(path: Path) -> None:
    assert list(squeezed(ast.parse(path.read_text()))) == []


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("[print(each) for each in (1, 2)]", "an expression for its effect"),
        ("found and print(found)", "an expression for its effect"),
        ("x = a if b else c if d else e", "a condition inside a condition"),
        ("a = b = 0", "several assignments at once"),
        ("x = 's' * (number != 1)", "a product with a flag"),
        ("x = 2 * (not a)", "a product with a flag"),
        ("x = bool(a) * 'with changes'", "a product with a flag"),
        ("x = [*filter(None, a)]", "*filter"),
        (
            "x = [[[c for c in b] for b in a] for a in d]",
            "three comprehensions",
        ),
    ],
)
def test_the_check_sees_squeezed_code(code: str, found: str) -> None:
    (problem,) = squeezed(ast.parse(code))
    assert problem.startswith(f"line 1: {found}")


def test_the_check_lets_plain_code_pass() -> None:
    plain = (
        "print(2 * a, [[c for c in b] for b in a])\nx = 1 if a and b else 2\n"
    )
    assert list(squeezed(ast.parse(plain))) == []


# --- size

NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
# Python 3.12 and later divide an f-string into tokens. It counts as one, as any other string does.
FSTRING_START = getattr(tokenize, "FSTRING_START", None)
FSTRING_END = getattr(tokenize, "FSTRING_END", None)
WITH_DOCSTRING = (
    ast.Module,
    ast.ClassDef,
    ast.FunctionDef,
    ast.AsyncFunctionDef,
)


def docstring_lines(source: str) -> set[int]:
    lines: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, WITH_DOCSTRING)
            and ast.get_docstring(node) is not None
        ):
            docstring = node.body[0]
            last = docstring.end_lineno or docstring.lineno
            lines.update(range(docstring.lineno, last + 1))
    return lines


def tokens_of_code(source: str) -> Iterator[tokenize.TokenInfo]:
    """Yield the tokens of code: no line ends, comments or docstrings. An expanded line costs a
    trailing comma at most."""
    docstrings = docstring_lines(source)
    open_fstrings = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == FSTRING_END:
            open_fstrings -= 1
            continue
        is_code = token.type not in NO_CODE and token.start[0] not in docstrings
        if is_code and not open_fstrings:
            yield token
        if token.type == FSTRING_START:
            open_fstrings += 1


def count_tokens(source: str) -> int:
    return sum(1 for _ in tokens_of_code(source))


def count_lines(source: str) -> int:
    """Count the lines that have code on them."""
    lines: set[int] = set()
    for token in tokens_of_code(source):
        lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines)


def test_tokens_and_lines_are_those_of_code() -> None:
    source = """\
'''Text.'''

# why
def f():
    '''More
    text.'''
    return (
        1
    )
"""
    assert count_tokens(source) == 9
    assert count_lines(source) == 4


def test_the_size_of_the_package_is_bounded() -> None:
    assert sum(count_tokens(path.read_text()) for path in FILES) <= 223_000


def test_code_is_not_dense() -> None:
    """Average the tokens of a line: pytest has 6.4, pluggy 6.2."""
    sources = [path.read_text() for path in FILES]
    tokens = sum(map(count_tokens, sources))
    assert tokens / sum(map(count_lines, sources)) <= 7.5


@pytest.mark.parametrize(
    "path", FILES, ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_a_function_has_at_most_60_lines(path: Path) -> None:
    functions = [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    ]
    assert [
        f.name for f in functions if (f.end_lineno or 0) - f.lineno + 1 > 60
    ] == []
