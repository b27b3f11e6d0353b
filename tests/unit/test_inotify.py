"""Who opens a file, by each way to run or read it that Python knows nothing of."""

from __future__ import annotations

import mmap
import os
import py_compile
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_ddpperf.wire.inotify import FilesWatch

if sys.platform != "linux":
    pytest.skip("inotify is Linux's", allow_module_level=True)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A module that was compiled before."""
    source = tmp_path / "slow.py"
    source.write_text("MILLISECONDS = 5\n")
    py_compile.compile(str(source))
    return source


@pytest.fixture
def watch(source: Path) -> Iterator[FilesWatch]:
    (compiled,) = source.parent.glob("__pycache__/slow.*.pyc")
    watch = FilesWatch({source: "slow", compiled: "slow"})
    yield watch
    watch.close()


def python(source: Path, code: str, *options: str) -> None:
    command = [sys.executable, *options, "-c", code]
    environ = {**os.environ, "PYTHONPATH": str(source.parent)}
    subprocess.run(command, env=environ, check=True)


@pytest.mark.parametrize(
    "code",
    [
        "import slow",  # by what was compiled
        "import runpy; runpy.run_path({source!r})",
        (
            "from importlib.machinery import SourceFileLoader;"
            " SourceFileLoader('x', {source!r}).load_module()"
        ),
        "exec(open({source!r}).read())",
        "import os; os.system('cat slow.py > /dev/null')",
        "import ctypes; ctypes.CDLL(None).open({source!r}.encode(), 0)",
        "import os; os.link({source!r}, 'other.py'); import other",
        "import os; os.symlink({source!r}, 'more.py'); import more",
    ],
)
def test_each_way_to_run_or_read_a_file_opens_it(
    source: Path,
    watch: FilesWatch,
    code: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(source.parent)
    python(source, "import sys")
    assert not watch.used()
    code = code.format(source=str(source))
    python(source, f"import sys; sys.path.append('.'); {code}")
    assert watch.used() == {"slow"}
    assert not watch.used(), "since then"


def test_a_file_is_used_if_another_language_maps_or_changes_or_replaces_it(
    source: Path,
) -> None:
    def map_it() -> None:
        with source.open("rb") as file:
            mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ).close()

    def replace() -> None:
        shutil.copy(source, source.with_name("new"))
        os.replace(source.with_name("new"), source)

    def run_it() -> None:
        source.chmod(0o755)

    for use in (map_it, run_it, replace):
        watch = FilesWatch({source: "slow"})
        assert not watch.used()
        use()
        assert watch.used() == {"slow"}
        watch.close()


def test_the_files_that_were_used_are_named(source: Path) -> None:
    """Also where there are more events than one look reads; the same one twice in a row is one."""
    others = [source.with_name(f"other{number}.py") for number in range(2)]
    for other in others:
        other.touch()
    names = {source: "slow"} | {other: other.name for other in others}
    watch = FilesWatch(names)
    for _ in range(500):
        for other in others:
            other.read_bytes()
    assert watch.used() == {other.name for other in others}
    watch.close()


def test_events_that_were_lost_may_be_of_any_file(
    source: Path, watch: FilesWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = struct.pack("iIII", -1, 0x4000, 0, 0)
    answers = iter([lost])

    def read(file: int, size: int) -> bytes:
        for answer in answers:
            return answer
        raise BlockingIOError

    monkeypatch.setattr(os, "read", read)
    assert watch.used() == {"slow"}


def test_a_file_that_was_replaced_is_watched_anew(
    source: Path, watch: FilesWatch
) -> None:
    source.with_name("new").write_text("MILLISECONDS = 6\n")
    os.replace(source.with_name("new"), source)
    assert watch.used() == {"slow"}
    watch.add({source: "slow"})
    assert not watch.used()
    source.read_text()
    assert watch.used() == {"slow"}


def test_whoever_only_asks_for_a_file_does_not_use_it(
    source: Path, watch: FilesWatch
) -> None:
    assert source.stat().st_size
    assert "slow.py" in os.listdir(source.parent)
    assert not watch.used()


def test_a_file_that_cannot_be_watched_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="inotify_add_watch"):
        FilesWatch({tmp_path / "missing": ""})
