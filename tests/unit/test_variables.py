"""Which variables count as read by the user's code."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import pytest

from pytest_ddpperf.launch.request import read_by
from pytest_ddpperf.wire import variables


@pytest.fixture(autouse=True)
def _watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OURS_SET", "1")
    monkeypatch.setattr(variables, "_read", {})
    monkeypatch.setattr(variables, "_bulk", set())
    variables.watch()
    yield
    os.environ.__class__ = os._Environ


def test_each_way_to_read_a_variable_is_noted_with_its_first_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert os.environ["OURS_SET"] == os.getenv("OURS_SET") == "1"
    assert os.environ.get("OURS_UNSET", "x") == "x"
    assert "OURS_ASKED" not in os.environ
    with pytest.raises(KeyError):
        os.environ["OURS_MISSING"]
    os.environ["OURS_SET"] = "2"
    assert os.environ.get("OURS_SET") == "2"
    assert variables.read_so_far() == {
        "OURS_SET": variables.digest("1"),
        "OURS_UNSET": "unset",
        "OURS_ASKED": "unset",
        "OURS_MISSING": "unset",
    }


def test_a_copy_of_all_variables_reads_none() -> None:
    copies = [
        dict(os.environ),
        os.environ.copy(),
        {**os.environ},
        dict(os.environ.items()),
    ]
    assert all(copy["OURS_SET"] == "1" for copy in copies)
    assert variables.read_so_far() == {}
    assert {
        name: os.environ[name]
        for name in os.environ
        if name.startswith("OURS_")
    } == {"OURS_SET": "1"}
    assert variables.read_so_far() == {"OURS_SET": variables.digest("1")}


def test_what_the_standard_library_reads_does_not_count() -> None:
    os.path.expanduser("~")
    tempfile.gettempdir()
    subprocess.run([sys.executable, "-c", ""], check=True)
    assert variables.read_so_far() == {}


def test_what_is_recorded_or_differs_by_process_is_left_out() -> None:
    read = {
        "OURS": "unset",
        "NCCL_ALGO": "digest 1",
        "RANK": "digest 2",
        "PYTEST_CURRENT_TEST": "digest 3",
    }
    read["CI"] = "unset"
    assert read_by([read, {"OURS": "digest 4", "THEIRS": "unset"}]) == {
        "read:OURS": "unset",
        "read:THEIRS": "unset",
    }
