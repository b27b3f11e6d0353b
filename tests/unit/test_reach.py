"""Which tests a change cannot reach: by who opens a file, and by what a test's code imports."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pytest_ddpperf.plugin import imports
from pytest_ddpperf.remote.reach import Reach
from pytest_ddpperf.wire.source_trees import Trees


@pytest.fixture
def files(tmp_path: Path) -> dict[Path, str]:
    """`net.py` and `data.py` differ."""
    files = {}
    for name in ("net.py", "data.py", "HEAD"):
        file = tmp_path / name
        file.write_text("")
        files[file] = name if name.endswith(".py") else ""
    return files


@pytest.fixture
def reach(files: dict[Path, str]) -> Iterator[Reach]:
    if sys.platform != "linux":
        pytest.skip("only Linux says who opens a file")
    reach = Reach(files)
    yield reach
    reach.close()


def test_what_nobody_opens_reaches_no_test(
    reach: Reach, files: dict[Path, str]
) -> None:
    reach.collected(())
    assert not reach.reaches(lambda: None), "whatever the test imports"
    reach.end_test(files)
    assert not reach.reaches(lambda: None)


def test_a_module_that_was_imported_before_reaches_tests_that_import_it(
    reach: Reach, tmp_path: Path
) -> None:
    (tmp_path / "net.py").read_text()
    reach.collected(["net.py", "tools.py"])
    assert reach.reaches(lambda: {"tools.py", "net.py"})
    assert reach.reaches(lambda: {"data.py"}), "which may be of this process"
    assert reach.reaches(lambda: None), "it is not known what it imports"
    assert not reach.reaches(lambda: {"tools.py"})


def test_a_file_that_is_opened_in_a_test_reaches_it_and_not_the_next_one(
    reach: Reach, files: dict[Path, str], tmp_path: Path
) -> None:
    reach.collected(())
    (tmp_path / "data.py").read_text()
    assert reach.reaches(set)
    assert reach.reaches(set), "a further measurement"
    reach.end_test(files)
    assert not reach.reaches(set)
    assert reach.reaches(lambda: {"data.py"})


def test_what_a_test_compiled_is_watched_from_its_end_on(
    reach: Reach, files: dict[Path, str], tmp_path: Path
) -> None:
    reach.collected(())
    compiled = tmp_path / "net.cpython-399.pyc"
    compiled.touch()
    reach.end_test({**files, compiled: "net.py"})
    assert not reach.reaches(set)
    compiled.read_bytes()
    assert reach.reaches(set)


def test_a_file_that_came_to_differ_in_a_test_may_reach_any_later_one(
    reach: Reach,
) -> None:
    reach.collected(())
    reach.end_test({})
    assert reach.reaches(set)


@pytest.mark.parametrize("name", ["net.py", "HEAD"])
def test_what_was_opened_before_and_is_no_module_may_reach_any_test(
    reach: Reach, files: dict[Path, str], tmp_path: Path, name: str
) -> None:
    (tmp_path / name).read_text()
    reach.collected(["data.py"])
    assert reach.reaches(set)
    reach.end_test(files)
    assert reach.reaches(set)


# --- what the code of a test imports


class Code:
    """Modules of a repository that this process has imported, and a test in one of them."""

    def __init__(self, top: Path, patch: pytest.MonkeyPatch) -> None:
        self.top, self._patch = top, patch
        self.folder = Path.cwd()  # where pytest was called
        self.plugins: list[ModuleType] = []
        self.fixtures: dict[str, list[Any]] = {}
        self.start = SimpleNamespace(
            environ=dict(os.environ), sys_path=tuple(sys.path)
        )
        patch.setattr(imports, "take_snapshot", lambda config: self.start)

    def module(self, name: str, code: str) -> ModuleType:
        file = self.top / (name.replace(".", "/") + ".py")
        file.parent.mkdir(exist_ok=True)
        file.write_text(code)
        imports.imported_names.cache_clear()
        module = ModuleType(name)
        module.__file__ = str(file)
        module.__package__ = name.rpartition(".")[0]
        self._patch.setitem(sys.modules, name, module)
        return module

    def imported_by(self, code: str) -> frozenset[str] | None:
        manager = SimpleNamespace(get_plugins=lambda: self.plugins)
        item: Any = SimpleNamespace(
            module=self.module("test_it", code),
            config=SimpleNamespace(
                pluginmanager=manager,
                invocation_params=SimpleNamespace(dir=self.folder),
            ),
            _fixtureinfo=SimpleNamespace(name2fixturedefs=self.fixtures),
        )
        trees = Trees(current=str(self.top), base=str(self.top), kept=())
        return imports.imported_files(item, trees)


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Code:
    code = Code(tmp_path, monkeypatch)
    code.module("mine_net", "import mine_tools")
    code.module("mine_tools", "import json")
    code.module("mine_other", "")
    code.module("mine.inner", "from . import near\nfrom .near import thing")
    code.module("mine.near", "")
    # as torch.classes, whose file is a name
    classes = ModuleType("torch.classes")
    classes.__file__ = "_classes.py"
    monkeypatch.setitem(sys.modules, "torch.classes", classes)
    return code


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("", set()),
        ("import mine_net", {"mine_net.py", "mine_tools.py"}),
        ("import mine_net as x, mine_other", {"mine_other.py"}),
        ("from mine_net import run", {"mine_net.py", "mine_tools.py"}),
        ("def run():\n    import mine_other", {"mine_other.py"}),
        ("import mine.inner", {"mine/inner.py", "mine/near.py"}),
        ("from mine import inner", {"mine/inner.py", "mine/near.py"}),
        ("import not_imported_yet", set()),
        ("import torch\nkinds = dataset.classes", set()),
        (
            "try:\n    from .mine_net import run\n"
            "except ImportError:\n    from mine_net import run",
            {"mine_net.py", "mine_tools.py"},
        ),
    ],
)
def test_import_statements_are_followed(
    code: Code, written: str, expected: set[str]
) -> None:
    found = code.imported_by(written)
    assert found is not None
    assert found >= expected | {"test_it.py"}
    if "other" not in written:
        assert "mine_other.py" not in found


@pytest.mark.parametrize(
    "written",
    [
        "import mine\nmine.near.run()",
        "import mine as x\ngetattr(x, 'near').run()",
        "import sys\nsys.modules['mine.near'].run()",
        "import pkgutil\npkgutil.resolve_name('mine.near:run')",
        "import monkeypatch\nmonkeypatch.setattr('mine.near.run', 1)",
        "import mine_lazy",
    ],
)
def test_what_another_module_imported_may_be_used_without_an_import(
    code: Code, written: str
) -> None:
    code.module("mine_lazy", "attach('near')")
    code.module("mine_lazy.near", "import mine.near")
    found = code.imported_by(written)
    assert found is not None
    assert "mine/near.py" in found
    assert "mine/inner.py" not in found


@pytest.mark.parametrize(
    "written",
    [
        "import importlib\nimportlib.import_module('mine_' + 'net')",
        "from importlib import import_module",
        "exec(open('mine_net.py').read())",
        "__import__('mine_net')",
        "import runpy\nrunpy.run_path('mine_net.py')",
        "import pytest\nnet = pytest.importorskip('mine_net')",
        "import subprocess\nserver = subprocess.Popen(['python', 'mine_net.py'])",
        "import os\nos.system('python mine_net.py &')",
        "def fixture(request):\n    request.getfixturevalue('net')",
        "from importlib.metadata import entry_points",
    ],
)
def test_code_that_may_use_files_in_other_ways_is_not_known(
    code: Code, written: str
) -> None:
    assert code.imported_by(written) is None
    code.module("mine_net", written)
    assert code.imported_by("import mine_net") is None
    assert code.imported_by("import mine_other") is not None


def test_a_conftest_is_part_of_every_test(code: Code) -> None:
    code.plugins = [code.module("conftest", "import mine_other")]
    found = code.imported_by("import mine_tools")
    assert found == {
        "conftest.py",
        "mine_other.py",
        "mine_tools.py",
        "test_it.py",
    }


def test_a_changed_environment_or_search_path_may_reach_any_test(
    code: Code, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "test_it")
    assert code.imported_by("") is not None
    monkeypatch.setenv("PYTEST_MINE", "1")
    assert code.imported_by("") is None
    monkeypatch.delenv("PYTEST_MINE")
    monkeypatch.syspath_prepend(code.top)
    assert code.imported_by("") is not None, "as pytest does for tests"
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert code.imported_by("") is None
    code.start.environ["OMP_NUM_THREADS"] = "7"
    assert code.imported_by("") is not None
    monkeypatch.syspath_prepend("/elsewhere")
    assert code.imported_by("") is None


def test_another_working_directory_may_reach_any_test(
    code: Code, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ranks start there, and may read other files."""
    assert code.imported_by("") is not None
    monkeypatch.chdir(tmp_path)
    assert code.imported_by("") is None


@pytest.mark.parametrize(
    ("scope", "is_known"), [("function", True), ("session", False)]
)
def test_a_fixture_that_tests_share_may_hold_what_another_test_read(
    code: Code, scope: str, is_known: bool
) -> None:
    here = {"__file__": ""}
    source = compile(
        "def fixture(): pass", str(code.top / "conftest.py"), "exec"
    )
    exec(source, here)
    own = SimpleNamespace(scope=scope, func=here["fixture"])
    of_pytest = SimpleNamespace(scope="session", func=pytest.raises)
    code.fixtures = {"data": [own], "tmp_path_factory": [of_pytest]}
    assert (code.imported_by("") is not None) == is_known
