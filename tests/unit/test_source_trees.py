"""Which of two trees a module comes from. What changes how a process imports runs in processes of
its own."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from pytest_ddpperf.wire import source_trees as trees_module
from pytest_ddpperf.wire.source_trees import Trees, file_digest

TREES = Trees(
    current="/w/current",
    base="/t/base",
    kept=("/w/current/tests", "/w/current/test_top.py"),
)
INSTALLED = "venv/lib/python3/site-packages"


def test_an_interpreter_below_the_top_is_not_of_the_tree_but_one_above_does_not_matter() -> (
    None
):
    prefix = os.path.realpath(sys.prefix)
    below = replace(TREES, current=os.path.dirname(prefix))
    assert below.within(os.path.join(prefix, "lib", "a.py")) is None
    assert (
        below.within(prefix + "2/a.py") == os.path.basename(prefix) + "2/a.py"
    )
    above = replace(TREES, current=os.path.join(prefix, "work"))
    assert above.within(os.path.join(prefix, "work", "a.py")) == "a.py"


# --- imports

CODE = """
import importlib, json, os, sys
from importlib.util import module_from_spec, spec_from_file_location
from pytest_ddpperf.records.errors import BaseSideError
from pytest_ddpperf.wire.source_trees import Trees, install
trees = Trees(**json.loads(sys.argv[1]))
class Editable:  # an editable install's finder
    mapping = {mapping}
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        for file in cls.mapping.get(name, ()):
            if os.path.exists(file := os.path.normpath(os.path.join(trees.current, file))):
                return spec_from_file_location(name, file)
sys.meta_path.append(Editable)
def load(file):
    spec = spec_from_file_location(os.path.basename(file), os.path.join(trees.current, file))
    sys.modules[spec.name] = module_from_spec(spec)
def refusal():
    try:
        trees.refuse_strays()
    except BaseSideError as error:
        return str(error)
install(trees)
{after}
found = []
for name in sys.argv[2:]:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        assert error.name and name.startswith(error.name)
        found.append(str(error))
    else:
        found.append(module.__file__ or sorted(module.__path__))
print(json.dumps({result}))
"""
OURS = Path(trees_module.__file__).parents[2]
REFUSED = (
    "imported from the working tree, not from the version to compare with: "
)


@pytest.fixture
def trees(tmp_path: Path) -> Trees:
    top = tmp_path / "with blanks"
    for folder in ("current", "base"):
        (top / folder).mkdir(parents=True)
    return Trees(
        current=str(top / "current"),
        base=str(top / "base"),
        kept=(str(top / "current/tests"),),
    )


def write(top: str, *files: str) -> None:
    for file in files:
        path = Path(top, file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def write_both(trees: Trees, *files: str) -> None:
    write(trees.current, *files)
    write(trees.base, *files)


def link(trees: Trees, name: str, target: str) -> None:
    """Let a name relative to the current tree lead to a file or folder of it."""
    path = Path(trees.current, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(Path(trees.current, target))


def process(
    trees: Trees,
    *names: str,
    path: tuple[str, ...] = ("src",),
    after: str = "",
    mapping: dict[str, list[str]] | None = None,
    result: str = "found",
    python: str = sys.executable,
) -> object:
    """Return what a process that works in the version's tree prints after it imported modules,
    paths shortened.

    `path` is relative to the current tree; `mapping` has the files by which an editable install
    finds a module.
    """
    code = CODE.format(mapping=mapping or {}, after=after, result=result)
    folders = [
        *(os.path.join(trees.current, folder) for folder in path),
        str(OURS),
    ]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    command = [python, "-c", code, json.dumps(asdict(trees)), *names]
    run = subprocess.run(
        command, cwd=trees.base, env=environ, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    return json.loads(
        run.stdout.replace(os.path.dirname(trees.current) + os.sep, "")
    )


def missing(name: str) -> str:
    return f"No module named {name!r} in the version to compare with"


@pytest.mark.parametrize(
    ("path", "after"),
    [
        (("src",), ""),
        ((), "sys.path.insert(0, os.path.join(trees.current, 'src'))"),
        ((), "sys.path.insert(0, os.path.join(trees.base, 'src'))"),
    ],
    ids=["PYTHONPATH", "inserted", "of the version"],
)
def test_a_package_below_src_is_the_versions(
    trees: Trees, path: tuple[str, ...], after: str
) -> None:
    write_both(
        trees,
        "src/pkg/__init__.py",
        "src/pkg/mod.py",
        "src/pkg/sub/deep.py",
        "src/ns/a.py",
    )
    write(trees.base, "src/pkg/old.py", "src/ns/old.py")
    write(trees.current, "src/pkg/new.py", "src/new.py")
    names = ["pkg", "pkg.mod", "pkg.sub.deep", "pkg.old", "ns.a", "ns.old"]
    found = process(
        trees, *names, "pkg.new", "new", "none", path=path, after=after
    )
    assert isinstance(found, list)
    files = [
        "pkg/__init__",
        "pkg/mod",
        "pkg/sub/deep",
        "pkg/old",
        "ns/a",
        "ns/old",
    ]
    assert found[:-3] == [f"base/src/{file}.py" for file in files]
    assert found[-3].startswith("No module named 'pkg.new'")
    assert found[-2].startswith("No module named 'new'")
    assert found[-1] == "No module named 'none'"


def test_a_flat_package_and_tests_next_to_it_are_the_versions(
    trees: Trees,
) -> None:
    write_both(
        trees,
        "pkg/__init__.py",
        "module.py",
        "tests/__init__.py",
        "tests/test_a.py",
    )
    assert process(trees, "pkg", "module", "tests.test_a", path=()) == [
        "base/pkg/__init__.py",
        "base/module.py",
        "base/tests/test_a.py",
    ]


def test_what_an_editable_install_finds_is_the_versions(trees: Trees) -> None:
    write_both(
        trees,
        "lib/pkg/__init__.py",
        "lib/pkg/mod.py",
        "lib/single.py",
        "lib/became_package.py",
    )
    write(trees.current, "lib/gone.py", "lib/became_module/__init__.py")
    Path(trees.base, "lib/became_package.py").unlink()
    write(trees.base, "lib/became_package/__init__.py", "lib/became_module.py")
    write(os.path.dirname(trees.current), "outside/third.py")
    write(os.path.dirname(trees.current), "outside/ns2/part.py")
    mapping = {
        "pkg": ["lib/pkg/__init__.py"],
        "third": ["../outside/third.py"],
        "became_module": ["lib/became_module/__init__.py"],
        **{
            name: [f"lib/{name}.py"]
            for name in ("single", "gone", "became_package")
        },
    }
    assert process(trees, *mapping, "pkg.mod", mapping=mapping, path=()) == [
        "base/lib/pkg/__init__.py",
        "outside/third.py",
        "base/lib/became_module.py",
        "base/lib/single.py",
        missing("gone"),
        "base/lib/became_package/__init__.py",
        "base/lib/pkg/mod.py",
    ]


@pytest.mark.parametrize("folder", ["../lib", f"../{INSTALLED}", INSTALLED])
def test_what_a_link_leads_to_is_the_versions(
    trees: Trees, folder: str
) -> None:
    write_both(
        trees,
        "src/pkg/__init__.py",
        "src/pkg/mod.py",
        "src/single.py",
        "src/ns/part.py",
    )
    write(trees.current, "src/pkg/new.py", "src/new.py")
    for name in ("pkg", "single.py", "ns", "new.py"):
        link(trees, f"{folder}/{name}", f"src/{name}")
    names = ("pkg", "pkg.mod", "single", "ns.part", "new")
    assert process(trees, *names, path=(folder,)) == [
        *(
            f"base/src/{file}.py"
            for file in ("pkg/__init__", "pkg/mod", "single", "ns/part")
        ),
        missing("new"),
    ]
    files = ["src/pkg/__init__.py", "src/pkg/mod.py"]
    assert (
        process(trees, "pkg.mod", path=(folder,), result="trees.imported()")
        == files
    )
    one = replace(trees, base=trees.current)
    assert (
        process(one, "pkg.mod", path=(folder,), result="trees.imported()")
        == files
    )


def test_the_path_is_that_of_the_version(trees: Trees) -> None:
    write(trees.current, "tests/a.py", "src/a.py", "lib/site-packages/a.py")
    path = ("src", "tests", "lib/site-packages", "", "gone")
    assert process(trees, path=path, result="sys.path[:7]") == [
        "",
        "base/src",
        "base/tests",
        "current/lib/site-packages",
        "base",
        "base/gone",
        str(OURS),
    ]


# --- what was imported


def test_the_others_are_asked_once_for_a_module_that_nobody_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And again when it may have come."""
    trees = Trees(
        current=str(tmp_path / "current"), base=str(tmp_path / "base"), kept=()
    )
    asked: list[str] = []

    class Other:
        def find_spec(
            self, name: str, path: object = None, target: object = None
        ) -> None:
            asked.append(name)

    monkeypatch.setattr(trees_module, "_found_nowhere", set())
    monkeypatch.setattr(sys, "meta_path", [trees, Other()])
    for _ in range(3):
        assert trees.find_spec("nobody_has") is None
    assert asked == ["nobody_has"]
    monkeypatch.syspath_prepend(tmp_path)
    trees.find_spec("nobody_has")
    trees.find_spec("nobody_has")
    importlib.invalidate_caches()
    trees.find_spec("nobody_has")
    assert len(asked) == 3


def test_what_was_imported_from_the_other_tree_is_refused(trees: Trees) -> None:
    files = [
        "src/pkg/mod.py",
        "tests/helper.py",
        "flat.py",
        f"{INSTALLED}/dep.py",
        "sitecustomize.py",
    ]
    write(trees.current, *files)
    write(trees.base, "src/pkg/__init__.py", "sitecustomize.py")
    after = f"for file in {files}: load(file)"
    assert (
        process(trees, "pkg", after=after, result="refusal()")
        == REFUSED + "flat.py, src/pkg/mod.py"
    )
    assert (
        process(
            replace(trees, base=trees.current), after=after, result="refusal()"
        )
        is None
    ), "there is one tree"
    write(trees.current, *(f"src/{letter}.py" for letter in "abcdef"))
    after = "for letter in 'fedcba': load(f'src/{letter}.py')"
    found = process(trees, after=after, result="refusal()")
    assert (
        found
        == REFUSED + "src/a.py, src/b.py, src/c.py, src/d.py, src/e.py, ..."
    )


def test_what_a_compiler_generates_is_in_neither_tree(
    trees: Trees, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of temporary files may be in the working tree."""
    cache = os.path.join(trees.current, ".tmp/torchinductor_me")
    generated = os.path.join(cache, "threads-1/ab/cab.py")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", cache)
    assert trees.within(generated) is None
    assert trees.within(os.path.join(trees.current, ".tmp/a.py")) == ".tmp/a.py"


def test_a_link_of_the_version_that_leads_to_the_other_tree_is_refused(
    trees: Trees,
) -> None:
    write(trees.current, "src/two.py")
    Path(trees.base, "src").mkdir()
    Path(trees.base, "src/one.py").symlink_to(Path(trees.current, "src/two.py"))
    assert process(trees, "one", result="refusal()") == REFUSED + "src/two.py"


def test_the_versions_own_files_are_listed_and_what_is_outside_by_its_top_level_modules(
    trees: Trees, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_both(
        trees,
        "src/pkg/__init__.py",
        "src/pkg/mod.py",
        "src/pkg/unused.py",
        "src/ns/a.py",
        "tests/helper.py",
    )
    write(trees.current, f"{INSTALLED}/dep/sub/mod.py")
    write(os.path.dirname(trees.current), "outside/third.py")
    write(os.path.dirname(trees.current), "outside/ns2/part.py")
    # as setuptools brings packages along, and as compilers keep what they generate
    write(trees.current, f"{INSTALLED}/single.py")
    write(trees.current, f"{INSTALLED}/dep/_vendor/brought/mod.py")
    for variable in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        cache = os.path.join(os.path.dirname(trees.current), variable)
        write(cache, f"ab/{variable.lower()}.py")
        monkeypatch.setenv(variable, cache)
    names = [
        "single",
        "brought.mod",
        "torchinductor_cache_dir",
        "triton_cache_dir",
        "pkg.mod",
        "ns.a",
        "helper",
        "dep.sub.mod",
        "third",
        "ns2.part",
        "json",
    ]
    after = """
import types
for number, file in enumerate([None, 3, "relative.py", "", "<string>"]):
    sys.modules[f"odd{number}"] = module = types.ModuleType(f"odd{number}")
    module.__file__ = file
sys.modules["not a module"] = None
"""
    for each in (trees, replace(trees, base=trees.current)):
        imported, others = process(  # type: ignore[misc]
            each,
            *names,
            path=(
                "src",
                "tests",
                INSTALLED,
                "../outside",
                f"{INSTALLED}/dep/_vendor",
                "../TORCHINDUCTOR_CACHE_DIR/ab",
                "../TRITON_CACHE_DIR/ab",
            ),
            after=after,
            result="[trees.imported(), trees.others()]",
        )
        assert imported == [
            "src/ns/a.py",
            "src/pkg/__init__.py",
            "src/pkg/mod.py",
        ]
        # Debian's Python has a sitecustomize
        assert {"ns2@outside", "third@outside"} == {
            each
            for each in others
            if "@" in each and not each.startswith("sitecustomize@")
        }
        assert set(others) >= {"dep", "single"}
        left_out = {"pkg", "ns", "helper", "json", "pytest_ddpperf", "brought"}
        assert not left_out & set(others)


def test_a_digest_changes_with_what_a_file_holds(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for name, data in {
        "lf": b"a\nb\n",
        "crlf": b"a\r\nb\r\n",
        "cr": b"a\rb\r",
    }.items():
        (tmp_path / f"{name}.py").write_bytes(data)
        (tmp_path / f"{name}.so").write_bytes(b"\0" + data)
    names = ["lf.py", "crlf.py", "cr.py", "lf.so", "crlf.so", "cr.so"]
    trees = Trees(current=str(tmp_path), base=str(tmp_path), kept=())
    found = trees.digests(names)
    assert list(found) == names
    assert found["lf.py"] == found["crlf.py"], (
        "git may end the lines of a text otherwise in each tree"
    )
    assert len(set(found.values())) == 5
    (tmp_path / "lf.py").write_text("more")
    assert file_digest(str(tmp_path / "lf.py")) not in found.values()
    assert trees.digests(["gone.py", "folder"]) == {"gone.py": "", "folder": ""}


NET = """
import torch

def helper(x):
    return x

class Net:
    size = 1

    def forward(self, x):
        def twice(y):
            return y
        return helper(twice(x))

    def backward(self, x):
        return [each for each in x]
"""


CHANGES: dict[str, tuple[str | None, set[str]]] = {
    "nothing": (NET, set()),
    "comments": (
        f"# a comment\n\n{NET}".replace("return y", "return y  # y"),
        set(),
    ),
    "method": (NET.replace("helper(twice(x))", "helper(x)"), {"forward"}),
    "nested": (NET.replace("return y", "return -y"), {"twice"}),
    "comprehension": (
        NET.replace("each for each", "-each for each"),
        {"backward"},
    ),
    "attribute": (NET.replace("size = 1", "size = 2"), {"Net"}),
    "default": (
        NET.replace("backward(self, x)", "backward(self, x=1)"),
        {"Net", "backward"},
    ),
    "import": (NET.replace("import torch", "import torch.nn"), {"<module>"}),
    "new": (f"{NET}\ndef more(): pass", {"<module>", "more"}),
    "no Python": ("def torch(:", {"<module>"}),
    "no text": ("\0", {"<module>"}),
    "too deep": (f"x = 1{' + 1' * 3000}", {"<module>"}),
    "gone": (None, {"<module>"}),
}


@pytest.mark.parametrize(("now", "changed"), CHANGES.values(), ids=CHANGES)
def test_the_functions_that_differ_are_known_wherever_their_lines_are(
    tmp_path: Path, now: str | None, changed: set[str]
) -> None:
    trees = Trees(
        current=str(tmp_path / "now"), base=str(tmp_path / "before"), kept=()
    )
    for side, text in (("now", now), ("before", NET)):
        (tmp_path / side).mkdir()
        if text is not None:
            (tmp_path / side / "net.py").write_text(text)
    assert trees.changed_functions("net.py") == changed
