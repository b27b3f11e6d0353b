"""The examples run where a stranger runs them: from the root and from their own folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("mode", "folder", "argument"),
    [("prepend", "examples", "."), ("append", ".", "examples"), ("importlib", ".", "examples")],
)
def test_a_ddp_and_an_rpc_example_run_under_every_import_mode(mode: str, folder: str, argument: str) -> None:
    command = [sys.executable, "-m", "pytest", argument, "-k", "gpt or push", "--import-mode", mode, "--ddp-disable"]
    quiet = ["-p", "no:cacheprovider", "-p", "no:benchmark"]
    ended = subprocess.run(command + quiet, cwd=ROOT / folder, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "2 passed, 4 deselected" in ended.stdout
