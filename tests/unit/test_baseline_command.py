"""`ddpperf baseline list`: what is stored."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pytest_ddpperf.baseline import Store
from pytest_ddpperf.cli.main import main
from pytest_ddpperf.records.samples import Baseline, Recording, TestId
from tests.unit.test_codec import MEASUREMENT

SESSION = Recording(
    measurement=MEASUREMENT,
    created="2026-01-02T03:04:05+00:00",
    commit="c0ffee" * 6 + "c0ff",
    resolution={"p10": 0.0021, "p50": 0.034},
    tree="5f2b8e0d94a7c316",
)
OTHER_KEY = {"device_type": "cpu", "world_size": 4}


def on_four(session: Recording = SESSION) -> Recording:
    environment = replace(MEASUREMENT.environment, key=OTHER_KEY)
    return replace(
        session, measurement=replace(MEASUREMENT, environment=environment)
    )


def save(
    root: Path,
    name: str = "test_train[bf16]",
    *sessions: Recording,
    module: str = "tests/perf/test_step",
) -> Path:
    test = TestId(module=module, name=name)
    return Store(root).write(
        Baseline(test=test, sessions=sessions or (SESSION,))
    )


def ddpperf(root: Path, command: str, *arguments: str | Path) -> int:
    return main(
        ["baseline", command, *map(str, arguments), "--baseline-dir", str(root)]
    )


# --- list


def test_list_shows_what_is_stored_by_environment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "baselines"
    save(
        root,
        "test_train[bf16]",
        SESSION,
        replace(
            SESSION,
            created="2026-02-03T03:04:05Z",
            commit="decade" * 7 + "-dirty",
        ),
    )
    save(
        root,
        "test_wide",
        replace(SESSION, created="", commit="", resolution={}),
    )
    save(root, "test_train[bf16]", on_four())
    assert ddpperf(root, "list") == 0
    assert capsys.readouterr().out.splitlines() == [
        "cpu-pinned-ws2",
        (
            "                                          sessions        last    commit  smallest"
            " detectable change in one run"
        ),
        (
            "  tests/perf/test_step::test_train[bf16]         2  2026-02-03  decaded*  p10 0.21 %,"
            " p50 3.4 %"
        ),
        "  tests/perf/test_step::test_wide                1     unknown         -  -",
        "",
        "cpu-ws4",
        (
            "                                          sessions        last   commit  smallest"
            " detectable change in one run"
        ),
        (
            "  tests/perf/test_step::test_train[bf16]         1  2026-01-02  c0ffeec  p10 0.21 %,"
            " p50 3.4 %"
        ),
        "",
        "3 baselines in 2 environments (*: uncommitted changes)",
    ]


def test_list_shows_why_sessions_were_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    later = "2026-02-03T03:04:05Z"
    save(
        tmp_path,
        "test_train",
        replace(SESSION, why="a bigger model"),
        replace(SESSION, created=later, why="a newer driver"),
        SESSION,
    )
    save(tmp_path, "test_wide")
    assert ddpperf(tmp_path, "list") == 0
    _, _, row, *lines = capsys.readouterr().out.splitlines()
    assert row.startswith("  tests/perf/test_step::test_train         3 ")
    assert lines[:2] == [
        "    saved 2026-01-02: a bigger model",
        "    saved 2026-02-03: a newer driver",
    ]
    assert lines[2].startswith("  tests/perf/test_step::test_wide          1 ")
    assert lines[3] == ""


@pytest.mark.parametrize("columns", [80, 60])
def test_lines_fit_into_the_terminal(
    columns: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save(tmp_path)
    save(tmp_path, "test_of_a_model_with_a_long_name")
    monkeypatch.setenv("COLUMNS", str(columns))
    assert ddpperf(tmp_path, "list") == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= columns
    assert out.count("c0ffeec") == 2


@pytest.mark.parametrize(
    ("chosen", "reported"),
    [
        (
            ["-k", "ws4 "],
            "1 baseline in 1 environment (*: uncommitted changes)",
        ),
        (
            ["-k", "wide"],
            "1 baseline in 1 environment (*: uncommitted changes)",
        ),
        (
            ["-k", "train"],
            "2 baselines in 2 environments (*: uncommitted changes)",
        ),
        (
            ["-k", "TRAIN*step"],
            "0 baselines in 0 environments (*: uncommitted changes)",
        ),
        (
            ["-k", "perf/*wide"],
            "1 baseline in 1 environment (*: uncommitted changes)",
        ),
    ],
)
def test_some_are_chosen(
    chosen: list[str],
    reported: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    save(tmp_path)
    save(tmp_path, "test_wide")
    save(tmp_path, "test_train", on_four())
    assert ddpperf(tmp_path, "list", *chosen) == 0
    assert capsys.readouterr().out.splitlines()[-1] == reported


def test_a_folder_that_cannot_be_listed_ends_with_4_and_advice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["baseline", "list", "--baseline-dir", "no-such-folder"]) == 4
    said = capsys.readouterr().err
    assert "baseline no-such-folder: cannot be read: " in said
    assert said.endswith(
        "save baselines with pytest --ddp-save-baseline, or name another folder with"
        " --ddp-baseline-dir\n"
    )
    assert main(["baseline", "list", "--ddp-baseline-dir", str(tmp_path)]) == 0


def test_what_cannot_be_read_is_named_and_the_others_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = save(tmp_path, "test_broken")
    broken.write_text("<<<<<<< HEAD")
    save(tmp_path)
    assert ddpperf(tmp_path, "list") == 4
    said = capsys.readouterr()
    assert f"baseline {broken}: is not JSON, or not all of it: " in said.err
    assert said.out.endswith(
        "1 baseline in 1 environment (*: uncommitted changes)\n"
    )
    assert broken.exists()


def test_a_baseline_whose_test_is_gone_is_marked(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    save(tmp_path, "TestClass::test_here[4]")
    save(tmp_path, "test_gone")
    module = Path("tests/perf/test_step.py")
    assert ddpperf(tmp_path, "list") == 0
    assert "?" not in capsys.readouterr().out, "it is another rootdir"
    module.parent.mkdir(parents=True)
    text = "# coding: latin-1\nclass TestC\xe4:\n    def test_here(self): ...\n"
    module.write_text(text, encoding="latin-1")
    assert ddpperf(tmp_path, "list") == 0
    _, _, *rows, _, last = capsys.readouterr().out.splitlines()
    marked = {row.split()[0].rpartition("::")[2]: "?" in row for row in rows}
    assert marked == {"test_here[4]": False, "test_gone?": True}
    assert last.endswith("(*: uncommitted changes; ?: not in its file)")
    module.unlink()
    assert ddpperf(tmp_path, "list") == 0
    assert capsys.readouterr().out.count("? ") == 2
