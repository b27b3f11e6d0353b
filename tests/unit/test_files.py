"""Files that are written whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from pytest_ddpperf import files


def test_a_file_is_replaced_and_nothing_lies_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "a.txt"
    files.write(path, "one\n")
    files.write(path, "ü\n")
    assert path.read_bytes() == b"\xc3\xbc\n"
    assert os.listdir(path.parent) == ["a.txt"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_what_cannot_be_written_leaves_the_file_as_it_was(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "a.txt"
    path.write_text("one\n")
    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match="No space left"):
        files.write(path, "two\n")
    assert path.read_text() == "one\n"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_text_that_has_no_bytes_leaves_the_file_as_it_was(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one\n")
    with pytest.raises(UnicodeEncodeError):
        files.write(path, "\ud800")
    assert path.read_text() == "one\n"


def test_a_link_stays_one(tmp_path: Path) -> None:
    link, target = tmp_path / "link", tmp_path / "there" / "a.txt"
    target.parent.mkdir()
    link.symlink_to(target)
    files.write(link, "one\n")
    assert link.is_symlink()
    assert target.read_text() == "one\n"
