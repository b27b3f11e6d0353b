"""`ddpperf baseline`: what is stored, what of it may go, what its code lacks."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from pytest_ddpperf.against import origin
from pytest_ddpperf.baseline import Store
from pytest_ddpperf.cli.main import main
from pytest_ddpperf.records import Baseline, Measurement, Recording, TestId
from pytest_ddpperf.wire.trees import digests
from tests.git import git
from tests.unit.test_codec import MEASUREMENT

SESSION = Recording(
    measurement=MEASUREMENT,
    created="2026-01-02T03:04:05+00:00",
    commit="c0ffee" * 6 + "c0ff",
    resolution={"p10": 0.0021, "p50": 0.034},
    files={"mypackage/net.py": "b1946ac92492d234"},
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
    ("chosen", "told"),
    [
        (["--environment", "*ws4"], "1 baseline in 1 environment"),
        (["-k", "wide"], "1 baseline in 1 environment"),
        (["-k", "train"], "2 baselines in 2 environments"),
        (["-k", "nothing"], "0 baselines in 0 environments"),
    ],
)
def test_some_are_chosen(chosen: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path)
    save(tmp_path, "test_wide")
    save(tmp_path, "test_train", on_four())
    assert ddpperf(tmp_path, "list", *chosen) == 0
    assert capsys.readouterr().out.splitlines()[-1] == told


def test_an_environment_that_there_is_not_ends_with_4(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path)
    assert ddpperf(tmp_path, "list", "--environment", "gpu") == 4
    assert "--environment gpu: there is no such one; there are cpu-pinned-ws2" in capsys.readouterr().err


def test_a_folder_that_is_not_there_ends_with_4(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ddpperf(tmp_path / "nowhere", "list") == 4
    assert f"baseline {tmp_path}/nowhere: cannot be read: " in capsys.readouterr().err


def test_what_cannot_be_read_is_named_and_the_others_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = save(tmp_path, "test_broken")
    broken.write_text("<<<<<<< HEAD")
    save(tmp_path)
    for command in ("list", "prune", "commits"):
        assert ddpperf(tmp_path, command, *["--older-than", "0"] * (command == "prune")) == 4
        assert f"baseline {broken}: is not JSON, or not all of it: " in capsys.readouterr().err
    assert broken.exists()


# --- show


def test_show_says_a_baseline_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = replace(SESSION, measurement=measurement(host="runner-1"))
    second = replace(SESSION, created="2026-02-03T03:04:05Z", measurement=measurement(torch="2.14.0", host="runner-1"))
    path = save(tmp_path, "test_train[bf16]", first, second)
    assert main(["baseline", "show", str(path)]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told == [
        "tests/perf/test_step::test_train[bf16]",
        f"  file        {path}",
        "  key         device_type cpu, pinned True, world_size 2",
        "  must match  clock_lock None, power_limit_watts 700.5, warmup 5",
        "  session 1 of 2",
        "    2026-01-02T03:04:05+00:00, commit c0ffeec0ffeec0ffeec0ffeec0ffeec0ffeec0ff, host runner-1, torch 2.13.0",
        "    2 launches of 2 steps: p10 0.242s, p50 0.459s, p90 0.658s, p95 0.683s",
        "    resolves p10 0.21 %, p50 3.4 %",
        "    a step: all_reduce.bytes 102,228,128",
        "    code: 1 files of the repository, 0 distributions",
        "  session 2 of 2",
        *(
            line.replace("2026-01-02T03:04:05+00:00", "2026-02-03T03:04:05Z").replace("2.13", "2.14")
            for line in told[5:10]
        ),
        "  2026-01-02 -> 2026-02-03: torch 2.13.0 -> 2.14.0",
        "  p50 of its sessions: 0.459s, 0 % apart",
    ]


def test_show_says_that_one_session_tells_no_drift(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["baseline", "show", str(save(tmp_path))]) == 0
    assert "one session cannot tell how far sessions drift apart: --ddp-extend" in capsys.readouterr().out


def test_show_of_no_baseline_ends_with_4(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["baseline", "show", str(tmp_path / "a.json")]) == 4
    assert f"baseline {tmp_path}/a.json: cannot be read: " in capsys.readouterr().err


# --- prune


def test_prune_tells_what_is_gone_and_removes_it_when_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root, tests = tmp_path / "baselines", tmp_path / "tests" / "perf"
    tests.mkdir(parents=True)
    (tests / "test_step.py").write_text("def test_train(ddp_benchmark): ...\nclass TestWide(Base): ...\n")
    (tests / "test_star.py").write_text("from shared import *\n")
    kept = [
        save(root),
        save(root, "TestWide::test_inherited"),
        save(root, "test_anything", module="tests/perf/test_star"),
        save(root, "test_there", module="test_of_an_installed_package"),
        save(root, "test_there", module="mypackage.suite.test_of_an_installed_package"),
    ]
    gone = [save(root, "test_gone"), save(root, "TestGone::test_train"), save(root, module="tests/perf/test_moved")]
    assert ddpperf(root, "prune") == 0
    told = capsys.readouterr().out.splitlines()
    assert sorted(told[:-1]) == sorted(
        [
            f"would remove {gone[0]}: tests/perf/test_step.py has no test_gone",
            f"would remove {gone[1]}: tests/perf/test_step.py has no TestGone",
            f"would remove {gone[2]}: there is no tests/perf/test_moved.py",
        ]
    )
    assert told[-1] == "3 of 8 baselines would be removed: --yes removes them"
    assert all(path.exists() for path in (*kept, *gone))

    assert ddpperf(root, "prune", "--yes") == 0
    told = capsys.readouterr().out.splitlines()
    assert told[-1] == "3 of 8 baselines removed"
    assert f"removed {gone[2]}: there is no tests/perf/test_moved.py" in told
    assert [path.exists() for path in (*kept, *gone)] == [True] * 5 + [False] * 3
    assert not gone[2].parent.exists(), "a folder that held nothing else"
    assert ddpperf(root, "prune") == 0
    assert capsys.readouterr().out == "0 of 5 baselines removed\n"


@pytest.mark.parametrize(
    ("code", "kept"),
    [
        ("for size in SIZES:\n    globals()[f'test_{size}'] = made(size)\n", True),
        ("vars ()['test_' + name] = made\n", True),
        ("setattr(sys.modules[__name__], 'test_' + name, made)\n", True),
        ("exec(source)\n", True),
        ("sys.modules[__name__].__dict__.update(made)\n", True),
        ("class TestStep(TestCase): ...\ninstantiate_device_type_tests(TestStep, globals())\n", True),
        ("def test_a(monkeypatch):\n    monkeypatch.setattr(a, 'b', 1)\n    model.eval()\n    retrieval()\n", False),
    ],
)
def test_prune_keeps_what_a_file_may_make_when_it_is_imported(tmp_path: Path, code: str, kept: bool) -> None:
    root = tmp_path / "baselines"
    path = save(root, "TestStepCPU::test_train")
    (tmp_path / "tests/perf").mkdir(parents=True)
    (tmp_path / "tests/perf/test_step.py").write_text(code)
    assert ddpperf(root, "prune", "--yes") == 0
    assert path.exists() == kept


def test_prune_does_not_take_a_wrong_rootdir_for_tests_that_are_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "ci" / "baselines"
    path = save(root)
    assert ddpperf(root, "prune", "--yes") == 4
    told = f"no test file of these baselines is below {tmp_path}/ci: name pytest's rootdir with --rootdir"
    assert told in capsys.readouterr().err
    (tmp_path / "tests/perf").mkdir(parents=True)
    (tmp_path / "tests/perf/test_step.py").write_text("def test_train(): ...")
    assert ddpperf(root, "prune", "--yes", "--rootdir", tmp_path) == 0
    assert path.exists()


def test_of_those_that_were_chosen_all_tests_may_be_gone(tmp_path: Path) -> None:
    root = tmp_path / "baselines"
    kept, gone = save(root), save(root, module="tests/perf/test_old")
    (tmp_path / "tests/perf").mkdir(parents=True)
    (tmp_path / "tests/perf/test_step.py").write_text("def test_train(): ...")
    assert ddpperf(root, "prune", "--yes", "-k", "test_old") == 0
    assert (kept.exists(), gone.exists()) == (True, False)


def test_prune_by_age_and_environment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    now = datetime.now(timezone.utc)
    recent, old = (replace(SESSION, created=(now - timedelta(days=days)).isoformat()) for days in (9, 11))
    paths = [
        save(tmp_path, "test_old", old),
        save(tmp_path, "test_recent", old, recent),
        save(tmp_path, "test_old", on_four(old)),
        save(tmp_path, "test_unknown", replace(SESSION, created="")),
    ]

    def would_be_removed(*options: str) -> list[Path]:
        assert ddpperf(tmp_path, "prune", *options) == 0
        told = capsys.readouterr().out
        return [path for path in paths if f"would remove {path}: " in told]

    assert would_be_removed("--older-than", "10") == [paths[0], paths[2]]
    assert would_be_removed("--older-than", "10", "--environment", "cpu-ws4") == [paths[2]]
    assert would_be_removed("--environment", "cpu-pinned-ws2", "-k", "recent") == [paths[1]]
    assert ddpperf(tmp_path, "prune", "--older-than", "10", "--yes") == 0
    assert [path.exists() for path in paths] == [False, True, False, True]


@pytest.mark.parametrize("days", ["-1", "nan", "many"])
def test_an_age_that_cannot_be_ends_with_4(days: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["baseline", "prune", "--older-than", days]) == 4
    assert f"argument --older-than: '{days}': a number of days" in capsys.readouterr().err


def test_a_hostile_name_harms_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save(tmp_path, "test_\x1b[31m<script>\r\n\u202e" + "x" * 10_000)
    assert ddpperf(tmp_path, "list") == 0
    assert main(["baseline", "show", str(path)]) == 0
    assert ddpperf(tmp_path, "prune", "--environment", "*") == 0
    told = capsys.readouterr().out
    assert all(character.isprintable() or character == "\n" for character in told)
    assert max(map(len, told.splitlines())) < 400
    assert "test_\\x1b[31m<s" in told


# --- commits


def repository(folder: Path) -> tuple[Path, str]:
    """A clone with one commit, of a repository in which baselines are of the one before; that commit."""
    origin = folder / "origin"
    origin.mkdir()
    git(origin, "init", "--quiet", "--initial-branch=main")
    git(origin, "config", "uploadpack.allowAnySHA1InWant", "true")
    (origin / "net.py").write_text("first\n")
    git(origin, "add", "--all")
    git(origin, "commit", "--quiet", "-m", "code")
    recorded = git(origin, "rev-parse", "HEAD")
    files = digests(str(origin), ["net.py"])
    save(origin / "baselines", "test_clean", replace(SESSION, commit=recorded, files=files))
    save(origin / "baselines", "test_dirty", replace(SESSION, commit=f"{recorded}-dirty", files=files))
    save(origin / "baselines", "test_nobody", replace(SESSION, commit=recorded, files={}))
    (origin / "net.py").write_text("second\n")
    git(origin, "add", "--all")
    git(origin, "commit", "--quiet", "-m", "later")
    clone = folder / "clone"
    git(folder, "clone", "--quiet", "--depth=1", f"file://{origin}", str(clone))
    return clone, recorded


def test_commits_are_those_that_a_shallow_clone_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clone, recorded = repository(tmp_path)
    assert ddpperf(clone / "baselines", "commits") == 0
    said = capsys.readouterr()
    assert said.out == f"{recorded}\n"
    lacks = f"commit {recorded[:12]} of the baseline is not in this clone, which is shallow"
    assert said.err.splitlines() == [
        f"ddpperf: 1 baseline: {lacks}: git fetch --unshallow brings it",
        "ddpperf: 1 baseline: the baseline does not say whose code it is: "
        "ranks imported nothing of the repository then",
    ]
    git(clone, "fetch", "--quiet", "--depth=1", "origin", recorded)
    assert ddpperf(clone / "baselines", "commits", "-k", "clean") == 0
    assert capsys.readouterr() == ("", "")


def test_a_commit_whose_files_alone_are_lacking_is_not_to_be_fetched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a partial clone, which git fills in by other commands."""
    save(tmp_path)
    fetch = "git diff --stat HEAD c0ffee"
    monkeypatch.setattr(origin, "origin_of", lambda *args: origin.Origin(why="files are not here", fetch=fetch))
    assert ddpperf(tmp_path, "commits") == 0
    assert capsys.readouterr() == ("", f"ddpperf: 1 baseline: files are not here: {fetch} brings it\n")


def test_commits_outside_git_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path)
    assert ddpperf(tmp_path, "commits") == 0
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("ddpperf: 1 baseline: git has no code of another time: ")


def test_a_process_lists_without_pytest_and_torch(tmp_path: Path) -> None:
    save(tmp_path)
    for command in ("list", "commits"):
        code = (
            "import sys; from pytest_ddpperf.cli.main import main; "
            f"status = main(['baseline', {command!r}, '--baseline-dir', {str(tmp_path)!r}]); "
            "print(sorted({'torch', '_pytest', 'pytest', 'numpy'} & set(sys.modules))); sys.exit(status)"
        )
        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert (ended.returncode, ended.stdout.splitlines()[-1]) == (0, "[]"), ended.stderr
