"""Which of two trees a module comes from. What changes how a process imports runs in processes of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from pytest_ddpperf.wire import trees as trees_module
from pytest_ddpperf.wire.trees import Trees, digests

# --- paths

TREES = Trees(current="/w/hand", base="/t/base", kept=("/w/hand/tests", "/w/hand/test_top.py"))


@pytest.mark.parametrize(
    ("path", "within"),
    [
        ("/w/hand", ""),
        ("/t/base", ""),
        ("/w/hand/src/a.py", "src/a.py"),
        ("/t/base/src/a.py", "src/a.py"),
        ("/w/hand2/a.py", None),
        ("/w", None),
        ("/elsewhere/a.py", None),
        ("", None),
        ("/w/hand/venv/lib/python3.11/site-packages/a.py", None),
        ("/w/hand/lib/dist-packages/a.py", None),
    ],
)
def test_a_path_of_either_tree_is_told_from_its_top(path: str, within: str | None) -> None:
    assert TREES.within(path) == within


def test_an_interpreter_below_the_top_is_not_of_the_tree_but_one_above_is_no_matter() -> None:
    prefix = os.path.realpath(sys.prefix)
    below = replace(TREES, current=os.path.dirname(prefix))
    assert below.within(os.path.join(prefix, "lib", "a.py")) is None
    assert below.within(prefix + "2/a.py") == os.path.basename(prefix) + "2/a.py"
    above = replace(TREES, current=os.path.join(prefix, "work"))
    assert above.within(os.path.join(prefix, "work", "a.py")) == "a.py"


def test_a_version_checked_out_below_the_top_is_the_versions() -> None:
    trees = replace(TREES, base="/w/hand/tmp/base")
    assert trees.within("/w/hand/tmp/base/a.py") == "a.py"
    assert trees.home("/w/hand/tmp/base/a.py") == "/w/hand/tmp/base/a.py"


@pytest.mark.parametrize(
    ("within", "keeps"),
    [
        ("tests", True),
        ("tests/below/a.py", True),
        ("test_top.py", True),
        ("tests2/a.py", False),
        ("test_top.py2", False),
        ("src/tests/a.py", False),
        ("", False),
    ],
)
def test_tests_are_kept_with_all_in_their_folders(within: str, keeps: bool) -> None:
    assert TREES.keeps(within) is keeps


@pytest.mark.parametrize(
    ("path", "home"),
    [
        ("/w/hand/src/a.py", "/t/base/src/a.py"),
        ("/t/base/src/a.py", "/t/base/src/a.py"),
        ("/w/hand/tests/a.py", "/w/hand/tests/a.py"),
        ("/t/base/tests/a.py", "/w/hand/tests/a.py"),
        ("/w/hand", "/t/base"),
        ("/elsewhere/a.py", "/elsewhere/a.py"),
        ("", ""),
    ],
)
def test_a_file_comes_from_the_version_and_a_test_from_the_current_tree(path: str, home: str) -> None:
    assert TREES.home(path) == home


def test_a_folder_is_looked_for_in_the_version_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert TREES.folders("/w/hand/src") == TREES.folders("/t/base/src") == ("/t/base/src", "/w/hand/src")
    assert TREES.folders("/w/hand") == ("/t/base", "/w/hand")
    assert TREES.folders("/elsewhere") == ("/elsewhere",)
    here = replace(TREES, current=str(tmp_path))
    (tmp_path / "src").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "src")
    assert here.folders(str(tmp_path / "link")) == ("/t/base/src", f"{tmp_path}/src")
    monkeypatch.chdir(tmp_path)
    assert here.folders("") == ("/t/base", str(tmp_path)), "the working folder"


# --- imports

CODE = """
import importlib, json, os, sys
from pytest_ddpperf.wire.trees import Trees, install
trees = Trees(**json.loads(sys.argv[1]))
{before}
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


@pytest.fixture
def trees(tmp_path: Path) -> Trees:
    top = tmp_path / "with blanks"
    for folder in ("hand", "base"):
        (top / folder).mkdir(parents=True)
    return Trees(current=str(top / "hand"), base=str(top / "base"), kept=(str(top / "hand/tests"),))


def write(top: str, *files: str) -> None:
    for file in files:
        path = Path(top, file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def process(
    trees: Trees,
    *names: str,
    path: tuple[str, ...] = ("src",),
    before: str = "",
    after: str = "",
    result: str = "found",
    python: str = sys.executable,
) -> object:
    """What a process that works in the tree at hand says after it imported modules; without the trees' parent.

    `path` is relative to the tree at hand.
    """
    command = [python, "-c", CODE.format(before=before, after=after, result=result), json.dumps(asdict(trees)), *names]
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*(os.path.join(trees.current, p) for p in path), str(OURS)]),
    }
    run = subprocess.run(command, cwd=trees.current, env=environ, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.replace(os.path.dirname(trees.current) + os.sep, ""))


def missing(name: str) -> str:
    return f"No module named {name!r} in the version that this is measured with"


def test_a_package_below_src_is_the_versions(trees: Trees) -> None:
    for top in (trees.current, trees.base):
        write(top, "src/pkg/__init__.py", "src/pkg/mod.py", "src/pkg/sub/__init__.py", "src/pkg/sub/deep.py")
    names = ["pkg", "pkg.mod", "pkg.sub", "pkg.sub.deep"]
    assert process(trees, *names) == [
        "base/src/pkg/__init__.py", "base/src/pkg/mod.py", "base/src/pkg/sub/__init__.py", "base/src/pkg/sub/deep.py",
    ]  # fmt: skip


@pytest.mark.parametrize("path", [(), (".",)], ids=["working folder", "PYTHONPATH"])
def test_a_flat_package_is_the_versions_and_the_tests_beside_it_are_not(trees: Trees, path: tuple[str, ...]) -> None:
    for top in (trees.current, trees.base):
        write(top, "pkg/__init__.py", "module.py", "tests/__init__.py", "tests/test_a.py", "conftest.py")
    trees = replace(trees, kept=(*trees.kept, f"{trees.current}/conftest.py"))
    assert process(trees, "pkg", "module", "tests.test_a", "conftest", path=path) == [
        "base/pkg/__init__.py", "base/module.py", "hand/tests/test_a.py", "hand/conftest.py",
    ]  # fmt: skip


def test_what_pytest_puts_into_the_path_later_makes_no_difference(trees: Trees) -> None:
    for top in (trees.current, trees.base):
        write(top, "pkg/__init__.py", "src/other.py", "tests/test_a.py")
    after = "sys.path[0:0] = [trees.current, os.path.join(trees.current, 'tests'), os.path.join(trees.current, 'src')]"
    assert process(trees, "pkg", "other", "test_a", after=after, path=()) == [
        "base/pkg/__init__.py", "base/src/other.py", "hand/tests/test_a.py",
    ]  # fmt: skip


def test_a_module_that_the_version_lacks_is_not_found(trees: Trees) -> None:
    write(trees.current, "src/new.py", "src/new_pkg/__init__.py", "src/pkg/__init__.py", "src/pkg/new.py", "flat.py")
    write(trees.base, "src/pkg/__init__.py")
    names = ["new", "new_pkg", "pkg.new", "flat"]
    assert process(trees, *names) == [missing(name) for name in names]


def test_a_module_that_neither_has_is_not_found_in_pythons_words(trees: Trees) -> None:
    write(trees.base, "src/pkg/__init__.py")
    assert process(trees, "none", "pkg.none") == ["No module named 'none'", "No module named 'pkg.none'"]


def test_a_module_that_only_the_version_has_is_found(trees: Trees) -> None:
    write(trees.current, "src/pkg/__init__.py")
    write(trees.base, "src/pkg/__init__.py", "src/pkg/old.py", "src/old.py", "old_path/there.py")
    assert process(trees, "old", "pkg.old", "there", path=("src", "old_path")) == [
        "base/src/old.py", "base/src/pkg/old.py", "base/old_path/there.py",
    ]  # fmt: skip


@pytest.mark.parametrize(("one", "other"), [("module.py", "package/__init__.py"), ("package/__init__.py", "module.py")])
def test_a_module_may_have_become_a_package_and_back(trees: Trees, one: str, other: str) -> None:
    in_hand, in_base = (name.replace("package", "x").replace("module", "x") for name in (one, other))
    write(trees.current, f"src/{in_hand}", "src/pkg/__init__.py", f"src/pkg/{in_hand}")
    write(trees.base, f"src/{in_base}", "src/pkg/__init__.py", f"src/pkg/{in_base}")
    assert process(trees, "x", "pkg.x") == [f"base/src/{in_base}", f"base/src/pkg/{in_base}"]


def test_a_module_of_the_version_may_be_elsewhere_current_trees(trees: Trees) -> None:
    write(trees.current, "src/pkg/__init__.py")
    write(trees.base, "pkg/__init__.py")
    assert process(trees, "pkg") == ["base/pkg/__init__.py"], "by the working folder, as for the version's own tests"


# --- namespace packages


def test_a_namespace_package_has_what_the_version_and_others_have(trees: Trees) -> None:
    write(trees.current, "src/ns/both.py", "src/ns/new.py")
    write(trees.base, "src/ns/both.py", "src/ns/old.py")
    write(os.path.dirname(trees.current), "elsewhere/ns/third.py")
    assert process(trees, "ns.both", "ns.old", "ns.third", "ns.new", path=("src", "../elsewhere")) == [
        "base/src/ns/both.py", "base/src/ns/old.py", "elsewhere/ns/third.py", missing("ns.new"),
    ]  # fmt: skip


def test_a_namespace_that_the_version_lacks_is_not_found(trees: Trees) -> None:
    write(trees.current, "src/ns/new.py")
    assert process(trees, "ns") == [missing("ns")]


def test_a_namespace_that_became_a_package_is_the_namespace_it_was(trees: Trees) -> None:
    write(trees.current, "src/pkg/__init__.py", "src/pkg/mod.py", "src/pkg/sub/__init__.py", "src/pkg/sub/deep.py")
    write(trees.base, "src/pkg/mod.py", "src/pkg/sub/deep.py")
    assert process(trees, "pkg.mod", "pkg.sub.deep") == ["base/src/pkg/mod.py", "base/src/pkg/sub/deep.py"]


def test_a_package_that_became_a_namespace_is_the_package_it_was(trees: Trees) -> None:
    write(trees.current, "src/pkg/mod.py")
    write(trees.base, "src/pkg/__init__.py", "src/pkg/mod.py")
    assert process(trees, "pkg", "pkg.mod") == ["base/src/pkg/__init__.py", "base/src/pkg/mod.py"]


def test_a_mere_folder_hides_no_module(trees: Trees) -> None:
    write(trees.current, "src/thing/data.txt", "json/data.txt")
    write(trees.base, "src/thing.py", "json/data.txt")
    assert process(trees, "thing", "json") == ["base/src/thing.py", json.__file__]


# --- tests


def test_tests_are_those_current_trees_new_or_not(trees: Trees) -> None:
    write(trees.current, "tests/__init__.py", "tests/helper.py", "tests/new/__init__.py", "tests/new/helper.py")
    write(trees.base, "tests/__init__.py", "tests/helper.py", "tests/old.py")
    assert process(trees, "tests", "tests.helper", "tests.new.helper", "tests.old") == [
        "hand/tests/__init__.py", "hand/tests/helper.py", "hand/tests/new/helper.py", missing("tests.old"),
    ]  # fmt: skip


@pytest.mark.parametrize("package", [True, False], ids=["package", "folder"])
@pytest.mark.parametrize("there", [True, False], ids=["old", "new"])
def test_tests_inside_a_package_are_those_current_trees(trees: Trees, package: bool, there: bool) -> None:
    tests = ["src/pkg/tests/helper.py", *["src/pkg/tests/__init__.py"] * package]
    trees = replace(trees, kept=(f"{trees.current}/src/pkg/tests",))
    write(trees.current, "src/pkg/__init__.py", "src/pkg/mod.py", *tests)
    write(trees.base, "src/pkg/__init__.py", "src/pkg/mod.py", *(tests if there else []))
    assert process(trees, "pkg.tests.helper", "pkg.mod") == ["hand/src/pkg/tests/helper.py", "base/src/pkg/mod.py"]


def test_tests_inside_a_package_that_the_version_lacks_are_found(trees: Trees) -> None:
    trees = replace(trees, kept=(f"{trees.current}/src/ns/tests",))
    write(trees.current, "src/ns/mod.py", "src/ns/tests/helper.py")
    assert process(trees, "ns.tests.helper", "ns.mod") == ["hand/src/ns/tests/helper.py", missing("ns.mod")]


# --- other finders

# As setuptools' for an editable install: `mapping` is of names to paths without a suffix.
EDITABLE = """
from importlib.util import spec_from_file_location
from pathlib import Path
mapping = {mapping}
class Editable:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in mapping:
            place = Path(os.path.abspath(os.path.join(trees.current, mapping[name])))
            for file in (place / "__init__.py", place.with_suffix(".py")):
                if file.exists():
                    return spec_from_file_location(name, file)
sys.meta_path.append(Editable)
"""


def test_what_an_editable_install_finds_is_the_versions(trees: Trees) -> None:
    for top in (trees.current, trees.base):
        write(top, "lib/pkg/__init__.py", "lib/pkg/mod.py", "lib/single.py", "lib/pkg_tests/__init__.py")
    write(trees.base, "lib/pkg/old.py")
    write(trees.current, "lib/pkg/new.py")
    trees = replace(trees, kept=(f"{trees.current}/lib/pkg_tests",))
    before = EDITABLE.format(mapping={name: f"lib/{name}" for name in ("pkg", "single", "pkg_tests")})
    assert process(trees, "pkg", "pkg.mod", "pkg.old", "pkg.new", "single", "pkg_tests", before=before, path=()) == [
        "base/lib/pkg/__init__.py", "base/lib/pkg/mod.py", "base/lib/pkg/old.py", missing("pkg.new"),
        "base/lib/single.py", "hand/lib/pkg_tests/__init__.py",
    ]  # fmt: skip


def test_what_an_editable_install_finds_and_the_version_lacks_is_not_found(trees: Trees) -> None:
    write(trees.current, "lib/pkg/__init__.py", "lib/single.py")
    before = EDITABLE.format(mapping={name: f"lib/{name}" for name in ("pkg", "single")})
    assert process(trees, "pkg", "single", before=before, path=()) == [missing("pkg"), missing("single")]


@pytest.mark.parametrize(("current_trees", "there"), [("x/__init__.py", "x.py"), ("x.py", "x/__init__.py")])
def test_what_an_editable_install_finds_may_have_become_a_package_and_back(
    trees: Trees, current_trees: str, there: str
) -> None:
    write(trees.current, f"lib/{current_trees}")
    write(trees.base, f"lib/{there}")
    assert process(trees, "x", before=EDITABLE.format(mapping={"x": "lib/x"}), path=()) == [f"base/lib/{there}"]


def test_what_another_finder_finds_elsewhere_is_left_to_it(trees: Trees) -> None:
    write(os.path.dirname(trees.current), "elsewhere/pkg/__init__.py", "elsewhere/pkg/mod.py")
    before = EDITABLE.format(mapping={"pkg": "../elsewhere/pkg"})
    assert process(trees, "pkg", "pkg.mod", before=before, path=()) == [
        "elsewhere/pkg/__init__.py", "elsewhere/pkg/mod.py",
    ]  # fmt: skip


def test_a_namespace_of_an_editable_install_is_the_versions(trees: Trees) -> None:
    for top in (trees.current, trees.base):
        write(top, "lib/pkg/__init__.py", "lib/pkg/mod.py")
    # Its finder is asked by a path that is none.
    before = (
        EDITABLE.format(mapping={"ns.pkg": "lib/pkg"})
        + """
from importlib.machinery import ModuleSpec
class Namespaces:
    @staticmethod
    def find_spec(name, target=None):
        if name == "ns":
            spec = ModuleSpec(name, None, is_package=True)
            spec.submodule_search_locations = ["no path"]
            return spec
def hook(path):
    if path != "no path":
        raise ImportError
    return Namespaces
sys.path_hooks.append(hook)
sys.path.append("no path")
"""
    )
    assert process(trees, "ns.pkg", "ns.pkg.mod", before=before, path=()) == [
        "base/lib/pkg/__init__.py", "base/lib/pkg/mod.py",
    ]  # fmt: skip


@pytest.mark.parametrize("way", ["../elsewhere", "tests/../../elsewhere", "link"])
def test_a_folder_outside_is_left_alone_even_where_the_way_to_it_begins_inside(trees: Trees, way: str) -> None:
    write(os.path.dirname(trees.current), "elsewhere/pkg/__init__.py", "elsewhere/pkg/mod.py", "elsewhere/module.py")
    write(trees.current, "tests/test_a.py")
    Path(trees.current, "link").symlink_to(Path(trees.current).parent / "elsewhere")
    after = f"sys.path.insert(0, os.path.join(trees.current, {way!r}))"
    assert process(trees, "pkg", "pkg.mod", "module", after=after) == [
        f"hand/{way}/pkg/__init__.py", f"hand/{way}/pkg/mod.py", f"hand/{way}/module.py",
    ]  # fmt: skip


def test_the_way_to_a_folder_inside_is_no_matter(trees: Trees) -> None:
    for top in (trees.current, trees.base):
        write(top, "src/pkg/__init__.py", "src/pkg/mod.py")
    write(trees.current, "tests/test_a.py")
    after = "sys.path.insert(0, os.path.join(trees.current, 'tests', '..', 'src'))"
    names = ["base/src/pkg/__init__.py", "base/src/pkg/mod.py"]
    assert process(trees, "pkg", "pkg.mod", after=after, path=()) == names
    assert process(trees, "pkg", "pkg.mod", after="sys.path.insert(0, 'src')", path=()) == names


def test_a_module_that_another_finder_makes_up_is_left_to_it(trees: Trees) -> None:
    before = """
from importlib.machinery import ModuleSpec
class MakesUp:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return ModuleSpec(name, MakesUp, origin="made up") if name == "virtual" else None
    create_module = staticmethod(lambda spec: None)
    @staticmethod
    def exec_module(module):
        module.__file__ = "no file"
sys.meta_path.append(MakesUp)
"""
    assert process(trees, "virtual", before=before) == ["no file"]


def test_what_is_built_into_python_stays_built_in(trees: Trees) -> None:
    name = next((name for name in sorted(sys.builtin_module_names, reverse=True) if name not in sys.modules), None)
    if name is None:
        pytest.skip("all built-in modules are imported")
    write(trees.current, f"src/{name}.py")
    write(trees.base, f"src/{name}.py")
    result = f"getattr(importlib.import_module({name!r}), '__file__', None)"
    assert process(trees, result=result) is None


def test_what_is_loaded_by_its_file_is_the_versions(trees: Trees) -> None:
    for top in (trees.current, trees.base):
        write(top, "perf/__init__.py", "tests/__init__.py")
    write(trees.current, "new/__init__.py")
    after = """
def located(file):
    try:
        return sys.meta_path[0].located("name", os.path.join(trees.current, file))
    except ModuleNotFoundError as error:
        return str(error)
"""
    files = ["perf/__init__.py", "tests/__init__.py", "new/__init__.py"]
    assert process(trees, after=after, result=f"[located(file) for file in {files}]") == [
        "base/perf/__init__.py", "hand/tests/__init__.py", missing("name"),
    ]  # fmt: skip


def test_importlibs_own_question_is_answered_alike(trees: Trees) -> None:
    for top in (trees.current, trees.base):
        write(top, "src/pkg/__init__.py")
    write(trees.current, "src/new.py")
    result = "[importlib.util.find_spec('pkg').origin, importlib.util.find_spec('json').origin]"
    spec = importlib.util.find_spec("json")
    assert spec is not None
    assert process(trees, before="import importlib.util", result=result) == ["base/src/pkg/__init__.py", spec.origin]


# --- links


def link(top: str, place: str, target: str) -> None:
    path = Path(top, place)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


INSTALLED = "lib/python3/site-packages"


@pytest.mark.parametrize("folder", ["../lib", f"../{INSTALLED}", f"venv/{INSTALLED}", "untracked"])
def test_what_a_link_from_anywhere_leads_to_is_the_versions(trees: Trees, folder: str) -> None:
    names = ("src/pkg/__init__.py", "src/pkg/mod.py", "src/pkg/sub/__init__.py", "src/single.py", "src/ns/part.py")
    for top in (trees.current, trees.base):
        write(top, *names, "tests/helper.py")
    write(trees.current, "src/pkg/new.py", "src/new.py")
    for name in ("pkg", "single.py", "ns", "new.py"):
        link(trees.current, f"{folder}/{name}", f"{trees.current}/src/{name}")
    link(trees.current, f"{folder}/helper.py", f"{trees.current}/tests/helper.py")
    names = ("pkg.sub", "pkg.mod", "single", "ns.part", "helper", "pkg.new", "new")
    assert process(trees, *names, path=(folder,)) == [
        "base/src/pkg/sub/__init__.py", "base/src/pkg/mod.py", "base/src/single.py", "base/src/ns/part.py",
        os.path.normpath(f"hand/{folder}/helper.py"), missing("pkg.new"), missing("new"),
    ]  # fmt: skip
    result = "[trees.imported(), sys.modules['pkg'].__path__]"
    files = ["src/pkg/__init__.py", "src/pkg/mod.py"]
    assert process(trees, "pkg.mod", path=(folder,), result=result) == [files, ["base/src/pkg"]]
    one = replace(trees, base=trees.current)
    assert process(one, "pkg.mod", path=(folder,), result="trees.imported()") == files


@pytest.mark.parametrize("absolute", [True, False], ids=["absolute", "relative"])
def test_what_a_link_of_both_trees_leads_to_is_the_versions(trees: Trees, absolute: bool) -> None:
    for top in (trees.current, trees.base):
        write(top, "src/pkg/__init__.py", "src/pkg/mod.py", "src/single.py", "src/ns/part.py")
        link(top, "lib", f"{trees.current}/src" if absolute else "src")  # as git checks it out
        for name in ("pkg", "single.py", "ns"):
            link(top, f"linked/{name}", f"{trees.current}/lib/{name}" if absolute else f"../lib/{name}")
    result = "[os.path.realpath(sys.modules[name].__file__) for name in sys.argv[2:]]"
    for folder in ("lib", "linked"):
        found = process(trees, "pkg", "pkg.mod", "single", "ns.part", path=(folder,), result=result)
        assert found == [f"base/src/{name}" for name in ("pkg/__init__.py", "pkg/mod.py", "single.py", "ns/part.py")]


def test_a_package_may_be_made_of_links_to_files(trees: Trees) -> None:
    for top in (trees.current, trees.base):
        write(top, "src/pkg/__init__.py", "src/pkg/mod.py", "src/pkg/other.py")
    for name in ("__init__.py", "mod.py"):
        link(trees.current, f"../lib/pkg/{name}", f"{trees.current}/src/pkg/{name}")
    write(trees.current, "../lib/pkg/generated.py")
    assert process(trees, "pkg", "pkg.mod", "pkg.generated", "pkg.other", path=("../lib",)) == [
        "base/src/pkg/__init__.py", "base/src/pkg/mod.py", "lib/pkg/generated.py", "No module named 'pkg.other'",
    ]  # fmt: skip


@pytest.mark.parametrize(("current_trees", "there"), [("x/__init__.py", "x.py"), ("x.py", "x/__init__.py")])
def test_what_a_link_leads_to_may_have_become_a_package_and_back(trees: Trees, current_trees: str, there: str) -> None:
    write(trees.current, f"src/{current_trees}")
    write(trees.base, f"src/{there}")
    linked = current_trees.partition("/")[0]
    link(trees.current, f"../lib/{linked}", f"{trees.current}/src/{linked}")
    assert process(trees, "x", path=("../lib",)) == [f"base/src/{there}"]


def test_a_link_that_leads_out_stays_as_it_is(trees: Trees) -> None:
    outside = ("pkg/__init__.py", "pkg/mod.py", "single.py", "ns/part.py")
    write(os.path.dirname(trees.current), *(f"elsewhere/{name}" for name in outside))
    write(trees.base, "src/other.py")
    for name in ("pkg", "single.py", "ns"):
        link(trees.current, f"src/{name}", f"../../elsewhere/{name}")
    link(trees.base, "src/pkg", f"{os.path.dirname(trees.current)}/elsewhere/pkg")
    link(trees.base, "src/single.py", "../gone.py")
    assert process(trees, "pkg.mod", "single", "ns.part", "other") == [
        "base/src/pkg/mod.py", "hand/src/single.py", "hand/src/ns/part.py", "base/src/other.py",
    ]  # fmt: skip


def test_links_of_the_version_that_lead_round_by_the_other_tree_are_refused(trees: Trees) -> None:
    write(trees.current, "src/one.py", "src/two.py")
    link(trees.base, "src/one.py", f"{trees.current}/src/two.py")
    link(trees.base, "src/two.py", f"{trees.current}/src/one.py")
    assert process(trees, "one", after=STRAY.format(files=[]), result="refusal()") == REFUSED + "src/two.py"


def test_a_namespace_is_that_of_others_where_the_version_has_no_part_in_it(trees: Trees) -> None:
    write(trees.current, "src/ns/new.py")
    write(os.path.dirname(trees.current), "elsewhere/ns/third.py")
    assert process(trees, "ns.third", "ns.new", path=("src", "../elsewhere")) == [
        "elsewhere/ns/third.py", "No module named 'ns.new'",
    ]  # fmt: skip


# --- what is not the version's


REFUSED = "imported from the working tree, not from the version to compare with: "
STRAY = """
from importlib.util import module_from_spec, spec_from_file_location
for file in {files}:
    spec = spec_from_file_location(os.path.basename(file), os.path.join(trees.current, file))
    sys.modules[spec.name] = module_from_spec(spec)
from pytest_ddpperf.records.errors import BaseSideError
def refusal():
    try:
        trees.refuse_strays()
    except BaseSideError as error:
        return str(error)
"""


def test_what_was_imported_from_the_other_tree_all_the_same_is_refused(trees: Trees) -> None:
    files = ["src/pkg/mod.py", "tests/helper.py", "flat.py", "venv/lib/python3/site-packages/dep.py"]
    write(trees.current, *files)
    write(trees.base, "src/pkg/__init__.py")
    after = STRAY.format(files=files)
    assert process(trees, "pkg", after=after, result="refusal()") == REFUSED + "flat.py, src/pkg/mod.py"
    assert process(replace(trees, base=trees.current), after=after, result="refusal()") is None, "there is one tree"
    many = [f"src/{letter}.py" for letter in "fedcba"]
    found = process(trees, after=STRAY.format(files=many), result="refusal()")
    assert found == REFUSED + "src/a.py, src/b.py, src/c.py, src/d.py, src/e.py, ..."


# --- what is installed


def test_what_is_installed_below_the_top_is_left_alone(trees: Trees) -> None:
    installed = "venv/lib/python3/site-packages"
    write(trees.current, f"{installed}/dep/__init__.py", f"{installed}/dep/mod.py", f"{installed}/single.py")
    assert process(trees, "dep", "dep.mod", "single", path=("src", installed)) == [
        f"hand/{installed}/dep/__init__.py", f"hand/{installed}/dep/mod.py", f"hand/{installed}/single.py",
    ]  # fmt: skip


def test_an_interpreter_below_the_top_is_left_alone(trees: Trees) -> None:
    python = Path(trees.current, "venv/bin/python")
    python.parent.mkdir(parents=True)
    python.symlink_to(os.path.realpath(sys.executable))
    (python.parents[1] / "pyvenv.cfg").write_text(f"home = {os.path.dirname(os.path.realpath(sys.executable))}\n")
    write(trees.current, "venv/share/tool.py", "venv2/share/other.py")
    paths = ("venv/share", "venv2/share")
    assert process(trees, "tool", "other", path=paths, python=str(python)) == [
        "hand/venv/share/tool.py", missing("other"),
    ]  # fmt: skip


def test_the_path_is_that_of_the_version(trees: Trees) -> None:
    write(trees.current, "tests/a.py", "src/a.py", "lib/site-packages/a.py")
    path = ("src", "tests", "lib/site-packages", "", "gone")
    result = "sys.path[:7]"
    assert process(trees, path=path, result=result) == [
        "", "base/src", "hand/tests", "hand/lib/site-packages", "base", "base/gone", str(OURS),
    ]  # fmt: skip


# --- what was imported


def test_of_what_was_imported_the_versions_own_files_are_listed(trees: Trees) -> None:
    installed = "venv/lib/python3/site-packages"
    for top in (trees.current, trees.base):
        write(top, "src/pkg/__init__.py", "src/pkg/mod.py", "src/pkg/unused.py", "src/ns/a.py", "tests/helper.py")
    write(trees.current, f"{installed}/dep.py")
    write(os.path.dirname(trees.current), "elsewhere/third.py")
    names = ["pkg.mod", "ns.a", "helper", "dep", "third", "json"]
    path = ("src", "tests", installed, "../elsewhere")
    files = ["src/ns/a.py", "src/pkg/__init__.py", "src/pkg/mod.py"]
    assert process(trees, *names, path=path, result="trees.imported()") == files
    # Without an install it is the side at hand.
    one = replace(trees, base=trees.current)
    assert process(one, *names, path=path, result="trees.imported()") == files


def test_what_was_imported_from_elsewhere_is_listed_by_its_top_level_modules(trees: Trees) -> None:
    installed = "venv/lib/python3/site-packages"
    for top in (trees.current, trees.base):
        write(top, "pkg/__init__.py", "helper.py")
    write(trees.current, f"{installed}/dep/sub/mod.py", f"{installed}/six.py")
    write(os.path.dirname(trees.current), "elsewhere/third.py")
    names = ["pkg", "helper", "dep.sub.mod", "six", "third", "json.decoder"]
    found = process(trees, *names, path=("", installed, "../elsewhere"), result="trees.others()")
    assert set(found) >= {"dep", "six", "third"}
    assert not {"pkg", "helper", "json", "pytest_ddpperf"} & set(found)


def test_a_module_with_an_odd_file_is_not_listed(trees: Trees) -> None:
    after = """
import types
for number, file in enumerate([None, 3, "relative.py", "", "<string>"]):
    sys.modules[f"odd{number}"] = module = types.ModuleType(f"odd{number}")
    module.__file__ = file
sys.modules["not a module"] = None
"""
    assert process(trees, after=after, result="trees.imported()") == []


def test_digests_tell_what_files_hold(tmp_path: Path) -> None:
    (tmp_path / "a b.py").write_text("1")
    (tmp_path / "same.py").write_text("1")
    (tmp_path / "other.py").write_text("2")
    (tmp_path / "folder").mkdir()
    found = digests(str(tmp_path), ["a b.py", "same.py", "other.py", "gone.py", "folder"])
    assert list(found) == ["a b.py", "same.py", "other.py", "gone.py", "folder"]
    assert found["a b.py"] == found["same.py"] != found["other.py"]
    assert (found["gone.py"], found["folder"]) == ("", "")


def test_a_text_whose_lines_end_otherwise_is_the_same(tmp_path: Path) -> None:
    for name, data in {"lf": b"a\nb\n", "crlf": b"a\r\nb\r\n", "cr": b"a\rb\r"}.items():
        (tmp_path / f"{name}.py").write_bytes(data)
        (tmp_path / f"{name}.so").write_bytes(b"\0" + data)
    found = digests(str(tmp_path), ["lf.py", "crlf.py", "cr.py", "lf.so", "crlf.so", "cr.so"])
    assert found["lf.py"] == found["crlf.py"]
    assert len(set(found.values())) == 5


def test_a_file_that_changed_has_another_digest(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text("1")
    before = digests(str(tmp_path), ["a.py"])
    file.write_text("22")
    assert digests(str(tmp_path), ["a.py"]) != before
    file.write_text("1")
    assert digests(str(tmp_path), ["a.py"]) == before


def test_links_of_what_is_loaded_are_followed_once_for_all_ranks() -> None:
    trees_module.know_loaded()
    before = trees_module._real.cache_info()
    Trees(current="/nowhere", base="/nowhere", kept=()).others()
    after = trees_module._real.cache_info()
    assert after.hits > before.hits
    assert after.misses == before.misses
