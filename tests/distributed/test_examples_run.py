"""The examples run where a stranger runs them: from the root and from their own folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("mode", "folder", "argument"),
    [("prepend", "examples", "."), ("importlib", ".", "examples")],
)
def test_an_example_runs_under_both_kinds_of_import_mode(
    mode: str, folder: str, argument: str
) -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        argument,
        "-k",
        "gpt",
        "--import-mode",
        mode,
        "--ddp-disable",
    ]
    quiet = ["-p", "no:cacheprovider", "-p", "no:benchmark"]
    ended = subprocess.run(
        command + quiet, cwd=ROOT / folder, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "1 passed, " in ended.stdout


def test_programs_that_own_their_loop_are_timed_as_they_are() -> None:
    quick = [
        # once, not in each rank
        "--ddp-preload=lightning,transformers,accelerate",
        "--ddp-steps=4",
        "--ddp-min-time=0",
        "--ddp-launches=1",
        "--ddp-baseline-missing=warn",
        "-p",
        "no:benchmark",
    ]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "examples/programs",
        "-p",
        "no:cacheprovider",
        *quick,
    ]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "6 passed" in ended.stdout


def test_the_gate_of_a_command_reads_its_log(tmp_path: Path) -> None:
    gate = "examples/gates/test_command.py"
    assert len((ROOT / gate).read_text().splitlines()) <= 40
    report = tmp_path / "report.json"
    quick = ["--ddp-launches=2", "--ddp-baseline-missing=warn", "-v"]
    quiet = ["-p", "no:cacheprovider", "-p", "no:benchmark"]
    command = [sys.executable, "-m", "pytest", gate, *quick, *quiet]
    command.append(f"--ddp-json={report}")
    # as under a launcher of others
    environ = {**os.environ, "RANK": "7", "WORLD_SIZE": "9"}
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=environ
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (measured,) = json.loads(report.read_text())["measurements"]
    samples = measured["measurement"]["samples"]
    launches = samples["figures"]["tps"]["values"]
    # 50 steps, a line for every 10, without the first
    assert [len(rank) for ranks in launches for rank in ranks] == [4, 4]
    limits = {each["metric"]: each["value"] for each in measured["limits"]}
    assert limits == {"tps": 0.05, "wall": 0.2}


def test_the_parity_gate_compares_with_its_reference(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    quick = [
        "--ddp-preload=lightning.fabric",
        "--ddp-steps=10",
        "--ddp-min-time=0",
        "--ddp-launches=2",
        "--ddp-max-launches=4",
        # whatever this machine's times say
        "--ddp-fail-on=no-baseline,incomparable",
        f"--ddp-json={report}",
    ]
    gate = "examples/gates/test_parity.py"
    command = [sys.executable, "-m", "pytest", gate, *quick]
    quiet = ["-p", "no:cacheprovider", "-p", "no:benchmark"]
    ended = subprocess.run(
        command + quiet, cwd=ROOT, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (measured,) = json.loads(report.read_text())["measurements"]
    side = measured["baseline_side"]
    assert side["version"]["is_reference"]
    counts = [
        each["measurement"]["counters"]["all_reduce.bytes"]
        for each in (measured, side)
    ]
    assert counts == [4 * (1024 + 1) * 1024] * 2, "both synchronise it all"
    assert "runs plain -> with_fabric" in measured["verdict"]["differences"]
