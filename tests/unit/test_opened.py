"""What a process of a launch opens, and what the interpreters that it starts import, without
torch."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from pytest_ddpperf.records.errors import BaseSideError
from pytest_ddpperf.wire import opened as opened_files
from pytest_ddpperf.wire.opened import CHILDREN, FOLDER, Opened, for_children
from pytest_ddpperf.wire.source_trees import Trees

SOON = time.time() + 3600


@pytest.fixture
def trees(tmp_path: Path) -> Trees:
    tmp_path = Path(os.path.realpath(tmp_path))
    for side in ("current", "base"):
        folder = tmp_path / side / "pkg"
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("")
        (folder / "worker.py").write_text(f"print({side!r})\n")
        (folder / "data.txt").write_text(side)
        (folder / "same.txt").write_text("same")
    (tmp_path / "launch").mkdir()
    return Trees(
        current=str(tmp_path / "current"), base=str(tmp_path / "base"), kept=()
    )


def run(trees: Trees, *command: str, path: str = "", **more: str) -> str:
    """Run an interpreter as a rank would start it, with the current tree on its path."""
    launch = Path(trees.current).parent / "launch"
    (launch / "request.json").write_text(json.dumps({"trees": asdict(trees)}))
    path = os.pathsep.join(filter(None, (path, trees.current)))
    environ = {
        **os.environ,
        **for_children({"PYTHONPATH": path}, launch),
        "PYTHONDONTWRITEBYTECODE": "1",
        **more,
    }
    ended = subprocess.run(
        [sys.executable, *command],
        env=environ,
        cwd=launch.parent,
        capture_output=True,
        text=True,
    )
    assert ended.stderr == ""
    return ended.stdout.strip()


def opened(trees: Trees) -> Opened:
    return Opened(str(Path(trees.current).parent / "launch"))


def one(trees: Trees) -> Trees:
    return Trees(current=trees.current, base=trees.current, kept=())


def test_an_interpreter_imports_the_code_of_its_side(trees: Trees) -> None:
    assert run(trees, "-m", "pkg.worker") == "base"
    assert run(one(trees), "-m", "pkg.worker") == "current"
    assert {within for within, _ in opened(trees).files(trees)} == {
        "pkg/__init__.py",
        "pkg/worker.py",
    }


def test_a_module_that_is_cached_outside_of_the_trees_is_listed(
    trees: Trees, tmp_path: Path
) -> None:
    cache = {
        "PYTHONPYCACHEPREFIX": str(tmp_path / "cache"),
        "PYTHONDONTWRITEBYTECODE": "",
    }
    for _ in ("compiled", "read from the cache"):
        Path(trees.current).parent.joinpath("launch/opened").unlink(
            missing_ok=True
        )
        assert run(trees, "-m", "pkg.worker", **cache) == "base"
        found = {within for within, _ in opened(trees).files(trees)}
        assert "pkg/__init__.py" in found


SPAWNS = """
import multiprocessing, sys

def work():
    import pkg.worker

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    process = context.Process(target=work)
    process.start()
    process.join()
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_its_children_do_so_too(trees: Trees, method: str) -> None:
    script = Path(trees.current).parent / "script.py"
    script.write_text(SPAWNS)
    assert run(trees, str(script), method) == "base"
    assert ("pkg/worker.py", trees.own("pkg/worker.py")) in opened(trees).files(
        trees
    )


def test_the_first_file_of_a_folder_costs_the_same_however_deep_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And behind a link, as what git ignores is in a worktree."""
    calls: list[str] = []

    def noting(call: Callable[..., Any]) -> Callable[..., Any]:
        def note(path: Any, *more: Any, **options: Any) -> Any:
            calls.append(call.__name__)
            return call(path, *more, **options)

        return note

    data = Path(os.path.realpath(tmp_path)) / "data"
    deep = tmp_path / "a/b/c/d"
    deep.mkdir(parents=True)
    for sample in ("0", "1", "2"):
        (data / sample).mkdir(parents=True)
        (data / sample / "x").touch()
    (deep / "data").symlink_to(data)
    for folder in (data, deep / "data"):
        opened_files._real_file(str(folder / "0/x"))
    for name in ("lstat", "readlink", "stat"):
        monkeypatch.setattr(os, name, noting(getattr(os, name)))
    for folder, sample in ((data, "1"), (deep / "data", "2")):
        real = opened_files._real_file(str(folder / sample / "x"))
        assert real == str(data / sample / "x")
    monkeypatch.undo()
    assert calls == ["readlink", "readlink"] * 2


def test_a_path_is_resolved_as_the_system_does(tmp_path: Path) -> None:
    top = Path(os.path.realpath(tmp_path))
    (top / "real/inner").mkdir(parents=True)
    (top / "real/file").touch()
    (top / "real/other").symlink_to("./file")
    (top / "link").symlink_to("real/inner")
    (top / "above").symlink_to("link/..")
    (top / "file").symlink_to("link/../other")
    (top / "loop").symlink_to("loop")
    for path in ("above/file", "file", "link", "above/inner/../file", "gone/x"):
        name = str(top / path)
        assert opened_files._real_file(name) == os.path.realpath(name)
    assert opened_files._real_file("/") == "/"
    assert opened_files._real_file(str(top / "loop")) == str(top / "loop")


def test_files_that_are_read_are_listed_and_those_that_the_run_wrote_are_no_inputs(
    trees: Trees,
) -> None:
    top = Path(trees.current)
    began = time.time() + 1
    reads = "import sqlite3; open('pkg/data.txt').read(); open(b'pkg/same.txt').read()"
    writes = (
        "open('new.txt', 'w').write('1'); open('gone.txt', 'w'); "
        "sqlite3.connect('pkg/data.db')"
    )
    (top / "pkg/data.db").touch()
    run(
        one(trees),
        "-c",
        f"import os; os.chdir({trees.current!r}); {reads}; {writes};"
        f" open({str(top.parent / 'x')!r}, 'w')",
    )
    assert list(opened(trees).digests(one(trees), began)) == [
        "pkg/data.db",
        "pkg/data.txt",
        "pkg/same.txt",
    ]
    os.utime(top / "pkg/data.txt", (SOON, SOON))
    found = opened(trees).digests(one(trees), began)
    assert [name for name, digest in found.items() if digest] == [
        "pkg/data.db",
        "pkg/same.txt",
    ]


def test_a_mapped_file_may_have_any_name(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/d\xe4ta.bin"
    with open(path, "wb+") as file:
        file.write(b"1")
        file.flush()
        with mmap.mmap(file.fileno(), 1):
            opened_files.note_open_files()


def test_a_file_of_the_other_tree_is_refused_unless_it_is_the_same(
    trees: Trees,
) -> None:
    run(trees, "-c", f"open({trees.current + '/pkg/same.txt'!r}).read()")
    opened(trees).refuse_strays(trees)
    run(trees, "-c", f"open({trees.current + '/pkg/data.txt'!r}).read()")
    with pytest.raises(
        BaseSideError,
        match=r"read from the working tree, not from the version .*: pkg/data.txt$",
    ):
        opened(trees).refuse_strays(trees)
    opened(trees).refuse_strays(one(trees))


def test_data_that_only_the_working_tree_has_is_shared_and_code_is_not(
    trees: Trees,
) -> None:
    for name in ("shared.bin", "tool.py"):
        Path(trees.current, name).write_text("")
    run(trees, "-c", f"open({trees.current + '/shared.bin'!r}).read()")
    opened(trees).refuse_strays(trees)
    run(
        trees,
        "-c",
        f"import runpy; runpy.run_path({trees.current + '/tool.py'!r})",
    )
    with pytest.raises(BaseSideError, match=r"tool\.py"):
        opened(trees).refuse_strays(trees)


@pytest.mark.parametrize(
    "started",
    [
        "subprocess.run([sys.executable, '-I', '-c', ''])",
        "subprocess.run([sys.executable, '-B', '-BI', '-c', ''])",
        "subprocess.run([sys.executable, '-c', ''], env={})",
        "subprocess.run(f'{sys.executable!r} -E -c 1', shell=True)",
        "subprocess.run([sys.executable, '-X', 'dev', '-W', 'ignore', '-E', '-c', ''])",
        "subprocess.run([sys.executable, '-c', ''], env={**os.environ, 'PYTHONPATH': 'scripts'})",
        "os.system(f'{sys.executable!r} -S -c 1')",
        (
            "subprocess.run(['bash', '-lc', f'true; echo \"it\\'s\"; true && {sys.executable} -BI"
            " -c 1'])"
        ),
    ],
)
def test_an_interpreter_that_does_not_read_its_variables_is_not_proved(
    trees: Trees, started: str
) -> None:
    run(trees, "-c", f"import os, subprocess, sys; {started}")
    with pytest.raises(
        BaseSideError, match="may have run code of the working tree"
    ):
        opened(trees).refuse_strays(trees)


@pytest.mark.parametrize(
    "command",
    [
        "[sys.executable, '-B', '-c', 'pass', '-E']",
        "[sys.executable, '-Wignore::ImportWarning', '-m', 'this', '-I']",
        "['true', '-I/usr/include/python3.11', '-I/usr/include/torch', '-shared']",
        "['sh', '-c', 'true -I/usr/include/python3.11 -I/usr/include/torch']",
    ],
)
def test_an_interpreter_with_its_variables_and_other_commands_are_proved(
    trees: Trees, command: str
) -> None:
    run(
        trees,
        "-c",
        f"import subprocess, sys; subprocess.run({command}, stdout=subprocess.DEVNULL)",
    )
    opened(trees).refuse_strays(trees)


def test_an_interpreter_without_this_plugin_is_not_proved(trees: Trees) -> None:
    lacks = "sys.modules.update({'pytest_ddpperf': None, 'pytest_ddpperf.wire': None})"
    again = "sys.modules.pop('sitecustomize'); import sitecustomize"
    run(
        trees,
        "-c",
        f"import sys; sys.path.insert(0, {CHILDREN!r}); {lacks}; {again}",
    )
    with pytest.raises(
        BaseSideError, match="may have run code of the working tree"
    ):
        opened(trees).refuse_strays(trees)


def test_a_library_in_a_folder_that_is_linked_is_refused(trees: Trees) -> None:
    for name in ("libops.so.1", "data.bin"):
        Path(trees.current, "build", name).parent.mkdir(exist_ok=True)
        Path(trees.current, "build", name).write_text("built")
    Path(trees.base, "build").symlink_to(Path(trees.current, "build"))
    run(trees, "-c", f"open({trees.base + '/build/data.bin'!r}).read()")
    opened(trees).refuse_strays(trees)
    run(trees, "-c", f"open({trees.base + '/build/libops.so.1'!r}).read()")
    with pytest.raises(BaseSideError, match=r"build/libops\.so\.1"):
        opened(trees).refuse_strays(trees)


def test_the_sitecustomize_of_the_environment_runs_too(
    trees: Trees, tmp_path: Path
) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text("print('own')\n")
    told = run(
        trees,
        "-c",
        "import sitecustomize; print(sitecustomize.__file__)",
        path=str(folder),
    )
    assert told.splitlines() == ["own", str(folder / "sitecustomize.py")]
    # an environment may have one
    assert run(trees, "-c", "pass") in ("", "own")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says so")
def test_files_that_native_code_has_open_or_maps_are_listed(
    trees: Trees,
) -> None:
    top = Path(trees.base, "pkg")
    native = f"""
import ctypes, mmap, os, sys
c = ctypes.CDLL(None)
c.mmap.restype = ctypes.c_void_p
top = {str(top)!r}.encode()
read, mapped = c.open(top + b"/data.txt", os.O_RDONLY), c.open(top + b"/same.txt", os.O_RDONLY)
c.mmap(None, ctypes.c_size_t(4), mmap.PROT_READ, mmap.MAP_PRIVATE, mapped, ctypes.c_size_t(0))
c.close(mapped)
c.open(top + b"/log.txt", os.O_WRONLY | os.O_CREAT, 0o600)
assert min(read, mapped) > 2
from pytest_ddpperf.wire import opened
opened.note_open_files()
"""
    run(trees, "-c", native)
    found = {within for within, _ in opened(trees).files(trees)}
    assert found == {"pkg/data.txt", "pkg/same.txt"}


def test_a_list_that_cannot_be_written_is_an_error(trees: Trees) -> None:
    reads = f"open({trees.own('pkg/data.txt')!r})"
    refused = f"""
import os, shutil
shutil.rmtree(os.environ[{FOLDER!r}])
try:
    {reads}
except FileNotFoundError:
    print("refused")
"""
    assert run(trees, "-c", refused) == "refused"


def test_an_interpreter_outside_of_a_launch_is_as_ever(trees: Trees) -> None:
    # of the user's own, where it stands
    for name in ("request.json", "opened"):
        (Path(trees.current).parent / name).write_text("{}")
    assert run(trees, "-m", "pkg.worker", **{FOLDER: ""}) == "current"
    assert (Path(trees.current).parent / "opened").read_text() == "{}"


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_library_from_elsewhere_is_listed_by_its_name(
    trees: Trees, tmp_path: Path
) -> None:
    library = tmp_path / "elsewhere" / "libfast.so"
    library.parent.mkdir()
    subprocess.run(
        ["cc", "-shared", "-x", "c", "/dev/null", "-o", str(library)],
        check=True,
    )
    run(
        trees,
        "-c",
        "import ctypes; ctypes.CDLL(None); ctypes.CDLL('libc.so.6');"
        f" ctypes.CDLL({str(library)!r})",
    )
    assert list(opened(trees).libraries) == ["libfast.so"]
