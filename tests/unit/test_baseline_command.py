"""`ddpperf baseline`: what is stored, what of it may go, what its code lacks."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_ddpperf.baseline import Store
from pytest_ddpperf.cli.main import main
from pytest_ddpperf.records import Baseline, Measurement, Recording, TestId
from tests.unit.test_codec import MEASUREMENT

SESSION = Recording(
    measurement=MEASUREMENT,
    created="2026-01-02T03:04:05+00:00",
    commit="c0ffee" * 6 + "c0ff",
    resolution={"p10": 0.0021, "p50": 0.034},
    tree="5f2b8e0d94a7c316",
)
OTHER_KEY = {"device_type": "cpu", "world_size": 4}


def measurement(**recorded: str) -> Measurement:
    environment = MEASUREMENT.environment
    changed = replace(environment, recorded={**environment.recorded, **recorded})
    return replace(MEASUREMENT, environment=changed, counters={"all_reduce.bytes": 102_228_128, "rpc.bytes": None})


def on_four(session: Recording = SESSION) -> Recording:
    environment = replace(MEASUREMENT.environment, key=OTHER_KEY)
    return replace(session, measurement=replace(MEASUREMENT, environment=environment))


def save(
    root: Path, name: str = "test_train[bf16]", *sessions: Recording, module: str = "tests/perf/test_step"
) -> Path:
    test = TestId(module=module, name=name)
    return Store(root).write(Baseline(test=test, sessions=sessions or (SESSION,)))


def ddpperf(root: Path, command: str, *arguments: str | Path) -> int:
    return main(["baseline", command, *map(str, arguments), "--baseline-dir", str(root)])


# --- list


def test_list_tells_what_is_stored_by_environment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "baselines"
    save(
        root,
        "test_train[bf16]",
        SESSION,
        replace(SESSION, created="2026-02-03T03:04:05Z", commit="decade" * 7 + "-dirty"),
    )
    save(root, "test_wide", replace(SESSION, created="", commit="", resolution={}))
    save(root, "test_train[bf16]", on_four())
    assert ddpperf(root, "list") == 0
    assert capsys.readouterr().out.splitlines() == [
        "cpu-pinned-ws2",
        "                                          sessions        last              commit  resolves",
        "  tests/perf/test_step::test_train[bf16]         2  2026-02-03  decadedecade-dirty  p10 0.21 %, p50 3.4 %",
        "  tests/perf/test_step::test_wide                1     unknown                   -  -",
        "",
        "cpu-ws4",
        "                                          sessions        last        commit  resolves",
        "  tests/perf/test_step::test_train[bf16]         1  2026-01-02  c0ffeec0ffee  p10 0.21 %, p50 3.4 %",
        "",
        "3 baselines in 2 environments",
    ]


@pytest.mark.parametrize(
    ("chosen", "reported"),
    [
        (["--environment", "*ws4"], "1 baseline in 1 environment"),
        (["-k", "wide"], "1 baseline in 1 environment"),
        (["-k", "train"], "2 baselines in 2 environments"),
        (["-k", "TRAIN*step"], "0 baselines in 0 environments"),
        (["-k", "perf/*wide"], "1 baseline in 1 environment"),
        (["--older-than", "1"], "3 baselines in 2 environments"),
        (["--older-than", "99999"], "0 baselines in 0 environments"),
    ],
)
def test_some_are_chosen(chosen: list[str], reported: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path)
    save(tmp_path, "test_wide")
    save(tmp_path, "test_train", on_four())
    assert ddpperf(tmp_path, "list", *chosen) == 0
    assert capsys.readouterr().out.splitlines()[-1] == reported


def test_an_environment_that_there_is_not_ends_with_4(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path)
    assert ddpperf(tmp_path, "list", "--environment", "gpu") == 4
    assert "--environment gpu: not found; there are cpu-pinned-ws2" in capsys.readouterr().err


def test_a_folder_that_is_not_there_ends_with_4(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ddpperf(tmp_path / "nowhere", "list") == 4
    assert f"baseline {tmp_path}/nowhere: cannot be read: " in capsys.readouterr().err


def test_what_cannot_be_read_is_named_and_the_others_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = save(tmp_path, "test_broken")
    broken.write_text("<<<<<<< HEAD")
    save(tmp_path)
    assert ddpperf(tmp_path, "list") == 4
    said = capsys.readouterr()
    assert f"baseline {broken}: is not JSON, or not all of it: " in said.err
    assert said.out.endswith("1 baseline in 1 environment\n")
    assert broken.exists()


@pytest.mark.parametrize("days", ["-1", "soon", "nan", "1e7"])
def test_an_invalid_age_ends_with_4(days: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["baseline", "list", "--older-than", days]) == 4
    assert f"argument --older-than: '{days}': a number of days" in capsys.readouterr().err


def test_a_hostile_name_harms_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, "test_\x1b[31m<script>\r\n\u202e" + "x" * 10_000)
    assert ddpperf(tmp_path, "list") == 0
    reported = capsys.readouterr().out
    assert all(character.isprintable() or character == "\n" for character in reported)
    assert max(map(len, reported.splitlines())) < 400
    assert "test_\\x1b[31m<s" in reported


def test_a_process_lists_without_pytest_and_torch(tmp_path: Path) -> None:
    save(tmp_path)
    code = (
        "import sys; from pytest_ddpperf.cli.main import main; "
        f"status = main(['baseline', 'list', '--baseline-dir', {str(tmp_path)!r}]); "
        "print(sorted({'torch', '_pytest', 'pytest', 'numpy'} & set(sys.modules))); sys.exit(status)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout.splitlines()[-1]) == (0, "[]"), ended.stderr
