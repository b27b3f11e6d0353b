"""When a baseline is written, and when it is not; what an unreadable one does."""

from __future__ import annotations

import errno
import json
import os
import textwrap
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from pytest_ddpperf.records.samples import Distribution
from tests.git import git
from tests.integration.conftest import FEW, STEP, Run, last_line
from tests.torch_version import NEEDS_RECORDER

MANY = (
    STEP
    + """
@pytest.fixture
def breaks_later():
    yield
    raise RuntimeError("teardown")

def test_good(ddp_benchmark): ddp_benchmark(lasting)
def test_fails_after(ddp_benchmark):
    ddp_benchmark(lasting)
    assert False
def test_teardown_fails(breaks_later, ddp_benchmark): ddp_benchmark(lasting)
@pytest.mark.xfail
def test_xfail(ddp_benchmark):
    ddp_benchmark(lasting)
    assert False
@pytest.mark.flaky(reruns=1)
def test_rerun(ddp_benchmark, tmp_path_factory):
    ddp_benchmark(lasting)
    flag = tmp_path_factory.getbasetemp() / "ran"
    if not flag.exists():
        flag.touch()
        assert False
def test_rank_dies(ddp_benchmark):
    ddp_benchmark(lambda ctx: lambda: os._exit(7))
"""
)


def stored(path: Path) -> list[str]:
    return sorted(
        file.name for file in (path / "baselines").rglob("*") if file.is_file()
    )


def last_session(path: Path, test: str) -> Any:
    (file,) = (path / "baselines").rglob(f"{test}.json")
    return json.loads(file.read_text())["sessions"][-1]


def test_only_a_test_that_passed_as_a_whole_is_saved(
    pytester: pytest.Pytester, run: Run
) -> None:
    pytester.makepyfile(test_saving=MANY)
    result = run("--ddp-save-baseline", "-q", *FEW)
    result.assert_outcomes(passed=3, failed=2, errors=1, xfailed=1)
    assert stored(pytester.path) == ["test_good.json"]
    session = last_session(pytester.path, "test_good")
    assert session["commit"] == ""
    assert session["tree"] == ""
    result.stdout.fnmatch_lines(
        ["*not saved: the test did not pass, or it is a rerun"]
    )
    result.stdout.fnmatch_lines(
        ["*rank ? failed in warm-up step 1 of 2: exited with status 7*"]
    )
    assert (
        last_line(result)
        == "4 not gated, 1 failed to measure, 1 saved, 2 other failures (0 of 6 compared)"
    )


@pytest.mark.skipif(
    not hasattr(pytest, "Subtests"), reason="subtests are a fixture of pytest 9"
)
def test_subtests_are_parts_of_the_whole(
    pytester: pytest.Pytester, run: Run
) -> None:
    pytester.makepyfile(
        test_parts=STEP
        + """
def test_one_fails(ddp_benchmark, subtests):
    ddp_benchmark(lasting)
    with subtests.test():
        assert False

def test_one_skips(ddp_benchmark, subtests):
    ddp_benchmark(lasting, name="first")
    with subtests.test():
        pytest.skip("not here")
    ddp_benchmark(lasting, name="last")
"""
    )
    result = run("--ddp-save-baseline", "--ddp-json=run.json", *FEW)
    assert stored(pytester.path) == [
        "test_one_skips+first.json",
        "test_one_skips+last.json",
    ]
    result.stdout.fnmatch_lines(
        ["test_one_fails: not saved: the test did not pass, or it is a rerun"]
    )
    report = json.loads((pytester.path / "run.json").read_text())
    assert [each["test"]["label"] for each in report["measurements"]] == [
        "",
        "first",
        "last",
    ]
    assert report["summary"]["skipped"] == 0


@pytest.mark.skipif(
    not hasattr(pytest, "Subtests"), reason="subtests are a fixture of pytest 9"
)
def test_subtests_of_fixtures_are_parts_too(
    pytester: pytest.Pytester, run: Run
) -> None:
    """pytest reports them as calls."""
    pytester.makepyfile(
        test_parts=STEP
        + """
@pytest.fixture
def begins(subtests):
    with subtests.test():
        assert False

def test_one_of_a_fixture_fails(begins, ddp_benchmark):
    ddp_benchmark(lasting)

@pytest.fixture
def ends(subtests):
    yield
    with subtests.test():
        pass

def test_one_of_a_fixture_passes_after_a_failure(ends, ddp_benchmark):
    ddp_benchmark(lasting)
    assert False
"""
    )
    # pytest-rerunfailures does not expect them
    run("--ddp-save-baseline", "-p", "no:rerunfailures", *FEW)
    assert stored(pytester.path) == []


def test_a_session_says_whose_code_it_is(
    pytester: pytest.Pytester, run: Run
) -> None:
    folder = pytester.mkdir("perf")
    (folder / "mylib").mkdir()
    (folder / "mylib" / "helper.py").write_text(STEP)
    (folder / "mylib" / "unused.py").write_text("")
    (folder / "conftest.py").write_text("")
    (folder / "others").mkdir()
    (folder / "others" / "conftest.py").write_text("")
    (folder / "test_step.py").write_text(
        "from mylib.helper import lasting\ndef test_step(ddp_benchmark): ddp_benchmark(lasting)"
    )
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "1"]):
        git(pytester.path, *command)
    (folder / "mylib" / "helper.py").write_text(STEP + "# not committed\n")
    result = run(
        "perf",
        "perf/others",
        "--rootdir=perf",
        "--ddp-extend-baseline",
        "-q",
        *FEW,
    )
    result.assert_outcomes(passed=1)
    what = (
        "the baselines are of changes that are in no commit (mylib/helper.py): commit both "
        "together"
    )
    assert what in " ".join(map(str.strip, result.outlines))
    assert "files changed" not in result.stdout.str()
    session = last_session(folder, "test_step")
    assert session["commit"].endswith("-dirty")
    git(pytester.path, "add", "--update", "perf/mylib")
    assert session["tree"] == git(pytester.path, "write-tree").strip()
    assert session["distributions"]["torch"]["version"] == version("torch")
    assert "pytest-ddpperf" not in session["distributions"]


def test_a_folder_of_baselines_that_git_ignores_is_noted(
    pytester: pytest.Pytester, run: Run
) -> None:
    pytester.makepyfile(
        test_step=STEP
        + "\ndef test_step(ddp_benchmark): ddp_benchmark(lasting)\n"
    )
    (pytester.path / ".gitignore").write_text("baselines\n")
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "1"]):
        git(pytester.path, *command)
    result = run("--ddp-save-baseline", *FEW)
    assert last_line(result) == "1 saved (0 of 1 compared)"
    said = " ".join(map(str.strip, result.outlines))
    assert "git ignores baselines/" in said
    assert (
        "other clones have no baseline: change .gitignore, or name another folder with"
        " --ddp-baseline-dir" in said
    )
    assert "in no commit" not in said
    result = run("--ddp-save-baseline", "--ddp-baseline-dir=kept", *FEW)
    assert "git ignores" not in result.stdout.str()


def test_the_reason_for_saving_goes_where_the_baseline_goes(
    pytester: pytest.Pytester, run: Run
) -> None:
    pytester.makepyfile(
        test_step=STEP
        + "\ndef test_step(ddp_benchmark): ddp_benchmark(lasting)\n"
    )
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "1"]):
        git(pytester.path, *command)
    reports = ("--ddp-json=run.json", "--ddp-history=history", *FEW)
    whys = []
    for words in (
        ["--ddp-save-baseline", "--ddp-reason=a bigger\nmodel"],
        ["--ddp-extend-baseline", "--ddp-reason=a newer driver"],
        ["--ddp-extend-baseline"],
        [],
    ):
        run(*words, *reports).assert_outcomes(passed=1)
        (measured,) = json.loads(Path("run.json").read_text())["measurements"]
        sessions = [session["why"] for session in measured["sessions"]]
        whys.append((measured["why"], sessions))
    assert whys == [
        ("a bigger model", []),
        ("a newer driver", []),
        ("", []),
        ("", ["a bigger model", "a newer driver", ""]),
    ]
    added = [json.loads(file.read_text()) for file in Path("history").iterdir()]
    assert sorted(each["measurements"][0]["why"] for each in added) == [
        "",
        "a bigger model",
        "a bigger model; a newer driver",
        "a newer driver",
    ]


def test_files_that_a_step_leaves_in_the_repository_are_noted_once(
    pytester: pytest.Pytester, run: Run
) -> None:
    """Reports, baselines and traces are the plugin's own; pytest-cov's files are known."""
    leaves = """
def leaving(ctx):
    for number in range(4):
        open(f"baselines{number}.pt", "w").close()
    open(".coverage", "w").close()
    return lasting(ctx)

def test_step(ddp_benchmark): ddp_benchmark(leaving)
def test_again(ddp_benchmark): ddp_benchmark(leaving)
"""
    pytester.makepyfile(test_step=STEP + leaves)
    (pytester.path / "notes.txt").write_text("there before")
    (pytester.path / ".gitignore").write_text("*.ini\n")
    git(pytester.path, "init", "-q")
    git(pytester.path, "add", "test_step.py", ".gitignore")
    git(pytester.path, "commit", "-qm", "1")
    reports = (
        "--ddp-json=run.json",
        "--junitxml=junit.xml",
        "--ddp-trace=traces",
    )
    said = " ".join(
        map(str.strip, run("--ddp-save-baseline", *reports, *FEW).outlines)
    )
    files = "baselines0.pt, baselines1.pt, baselines2.pt, ..."
    resumes = "a program that resumes from its files does something else in its next launch"
    assert said.count(f"files changed while tests ran: {files}: {resumes}") == 1
    assert "in no commit (notes.txt): " in said
    assert (
        "files changed" not in run(*FEW).stdout.str()
    )  # they are there already


def test_a_slower_session_of_the_same_code_is_added(
    pytester: pytest.Pytester, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine is slower on that day, which is what sessions are for. Another torch is none of
    the day's."""
    pytester.makepyfile(
        test_step=STEP
        + "\ndef test_step(ddp_benchmark): ddp_benchmark(lasting)\n"
    )
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "1"]):
        git(pytester.path, *command)
    run("--ddp-save-baseline", *FEW).assert_outcomes(passed=1)
    monkeypatch.setenv("LASTS", "60")
    run("--ddp-extend-baseline", *FEW).assert_outcomes(passed=1)
    monkeypatch.setenv("LASTS", "600")
    refused = "*: the session was not added, because it is worse: *"
    with monkeypatch.context() as patch:
        patch.setattr(
            "pytest_ddpperf.plugin.session.distributions",
            lambda launches: {"torch": Distribution(version="9.0", digest="0")},
        )
        result = run("--ddp-extend-baseline", *FEW)
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines([refused])
    (pytester.path / "test_step.py").write_text(
        (pytester.path / "test_step.py").read_text() + "# changed\n"
    )
    result = run("--ddp-extend-baseline", *FEW)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([refused])
    (file,) = (pytester.path / "baselines").rglob("test_step.json")
    assert len(json.loads(file.read_text())["sessions"]) == 2


def test_a_session_that_cannot_be_compared_is_not_added(
    pytester: pytest.Pytester, run: Run
) -> None:
    """Else the next runs would be compared with it."""
    test = """
        def test_step(ddp_benchmark):
            def setup(ctx):
                step = lasting(ctx)
                def measured():
                    step()
                    ctx.record("tps", 1 + ctx.rank, better="higher")
                return measured
            ddp_benchmark(setup)
    """
    source = STEP + textwrap.dedent(test)
    varied = source.replace("1 + ctx.rank", "time.perf_counter()")
    pytester.makepyfile(test_step=varied)
    run("--ddp-save-baseline", *FEW).assert_outcomes(passed=1)
    pytester.makepyfile(test_step=varied.replace("higher", "lower"))
    result = run("--ddp-extend-baseline", *FEW)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*: the session was not added, because it is INCOMPARABLE: tps higher is better ->"
            " lower is better"
        ]
    )
    (file,) = (pytester.path / "baselines").rglob("test_step.json")
    assert len(json.loads(file.read_text())["sessions"]) == 1


def test_an_unreadable_baseline_is_red_and_stays_as_it_is(
    pytester: pytest.Pytester, run: Run
) -> None:
    names = [
        "empty",
        "truncated",
        "newer",
        "nonsense",
        "other",
        "folder",
        "good",
    ]
    pytester.makepyfile(
        test_bad=STEP
        + "".join(
            f"\ndef test_{name}(ddp_benchmark): ddp_benchmark(lasting)\n"
            for name in names
        )
    )
    run("--ddp-save-baseline", "-k", "good", *FEW).assert_outcomes(
        passed=1, deselected=len(names) - 1
    )
    (saved,) = (pytester.path / "baselines").rglob("test_good.json")
    files = {name: saved.with_name(f"test_{name}.json") for name in names}
    good = saved.read_text()
    files["empty"].write_text("")
    files["truncated"].write_text(good[: len(good) // 2])
    files["newer"].write_text(
        json.dumps(
            {
                **json.loads(good.replace("test_good", "test_newer")),
                "schema": 999,
            }
        )
    )
    broken = json.loads(good.replace("test_good", "test_nonsense"))
    broken["sessions"][0]["measurement"]["samples"]["step_seconds"][0][0] = -1
    files["nonsense"].write_text(json.dumps(broken))
    files["other"].write_text(good)
    files["folder"].mkdir()
    before = {
        name: file.read_text() for name, file in files.items() if file.is_file()
    }
    result = run(*FEW)
    result.assert_outcomes(passed=1, failed=6)
    for name in names[:-1]:
        result.stdout.fnmatch_lines([f"baseline *test_{name}.json: *"])
    assert "Traceback" not in result.stdout.str()
    assert {
        name: file.read_text() for name, file in files.items() if file.is_file()
    } == before


def test_a_store_that_cannot_be_written_is_red_and_named(
    pytester: pytest.Pytester, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(
        test_store=STEP + "def test_a(ddp_benchmark): ddp_benchmark(lasting)"
    )
    (pytester.path / "a_file").write_text("")
    result = run(
        "--ddp-save-baseline",
        "--reruns=1",
        "--ddp-baseline-dir=a_file/below",
        "--ddp-json=run.json",
        *FEW,
    )
    assert result.ret == 1
    assert result.parseoutcomes().get("errors") == 1
    result.stdout.fnmatch_lines(["baseline *a_file*: *"])
    (measured,) = json.loads((pytester.path / "run.json").read_text())[
        "measurements"
    ]
    assert measured["fails"]
    assert "a_file" in measured["error"]

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    result = run("--ddp-save-baseline", *FEW)
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["baseline *test_a.json: *space*"])
    assert stored(pytester.path) == []


EFFECTS = (
    STEP
    + """
def test_step(ddp_benchmark):
    facts = {"bucket_mb": int(os.environ.get("BUCKET_MB", "25")), "fused": True}
    ddp_benchmark(lasting, batch_size=int(os.environ.get("BATCH", "4")), facts=facts)
"""
)


@NEEDS_RECORDER
def test_counters_are_compared_with_the_baseline_of_another_machine(
    pytester: pytest.Pytester, run: Run
) -> None:
    pytester.makepyfile(
        test_other=STEP + "def test_step(ddp_benchmark): ddp_benchmark(lasting)"
    )
    assert run("--ddp-save-baseline", *FEW, "--ddp-warmup=3").ret == 0
    (file,) = (pytester.path / "baselines").rglob("test_step.json")
    file.parents[1].rename(file.parents[2] / "another")
    result = run(*FEW, "--ddp-warmup=3")
    result.stdout.fnmatch_lines(
        [
            "test_step: only counters were compared, with the baseline of another",
            "1 without*",
        ]
    )
    file = file.parents[2] / "another" / file.relative_to(file.parents[1])
    data = json.loads(file.read_text())
    data["sessions"][-1]["measurement"]["counters"]["all_reduce.bytes"] = 2
    del data["checksum"]
    file.write_text(json.dumps(data))
    result = run(*FEW, "--ddp-warmup=3")
    result.stdout.fnmatch_lines(
        [
            "REGRESSED: all_reduce.bytes 2 -> 4, 2.00x (limit 0 %)",
            "note: *of another",
        ]
    )
    assert (
        last_line(result)
        == "compared with baselines: 1 regressed (1 of 1 compared)"
    )


def test_a_baseline_that_another_rootdir_hides_is_named_with_what_to_write(
    pytester: pytest.Pytester, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a folder that exists, pytest takes the name for a path of tests, as it does not know the
    option yet."""
    tests = pytester.mkdir("project") / "tests"
    tests.mkdir()
    (tests / "test_here.py").write_text(
        STEP + "def test_step(ddp_benchmark): ddp_benchmark(lasting)"
    )
    monkeypatch.chdir(tests.parent)
    options = "--ddp-baseline-dir", "../base"
    assert run("--ddp-save-baseline", *options, *FEW).ret == 0
    for more in ([], ["-q"]):
        result = run(*options, *more, *FEW)
        result.stdout.fnmatch_lines(
            [
                (
                    "test_step: pytest takes ../base for a path of tests, and its rootdir is"
                    f" {pytester.path}: write --ddp-baseline-dir=../base, or set it in an ini file"
                ),
                "test_step: there is no baseline base/*/project/tests/test_here/test_step.json",
                (
                    "test_step: there is one for another path or rootdir:"
                    " base/*/tests/test_here/test_step.json (an ini file at the top keeps the"
                    " rootdir)"
                ),
            ]
        )
        assert last_line(result).startswith(
            "1 without baseline (0 of 1 compared)"
        )
    assert last_line(run("=".join(options), *FEW)).startswith(
        "compared with baselines: 1 passed"
    )


def test_what_verdicts_without_figures_do(
    pytester: pytest.Pytester, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(test_effects=EFFECTS)
    result = run("-q", *FEW)
    assert result.ret == 0
    assert last_line(result) == "1 without baseline (0 of 1 compared)"
    assert any(text.endswith("  NO BASELINE") for text in result.outlines)
    monkeypatch.setenv("CI", "true")
    result = run(*FEW)
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        [
            "NO BASELINE (step time p50 * ms): record one with --ddp-*",
            "record: *pytest *",
        ]
    )
    assert (
        run("--ddp-baseline-missing=warn", "--ddp-save-baseline", *FEW).ret == 0
    )
    monkeypatch.setenv("BATCH", "8")
    result = run(*FEW)
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        [
            "INCOMPARABLE (step time p50 * ms): batch_size 4 -> 8: measure as before*"
        ]
    )
    monkeypatch.delenv("CI")
    assert last_line(run(*FEW)) == "1 incomparable (0 of 1 compared)"
    run("--ddp-world-size=1", *FEW).stdout.fnmatch_lines(
        ["test_step: a baseline exists for *-ws2-*, not for *-ws1-*"]
    )
    monkeypatch.setenv("BATCH", "4")
    monkeypatch.setenv("BUCKET_MB", "1")
    result = run(*FEW)
    assert last_line(result) == "1 incomparable (0 of 1 compared)"
    result.stdout.fnmatch_lines(
        ["test_step: bucket_mb 25 -> 1: measure as before*"]
    )
    monkeypatch.delenv("BUCKET_MB")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    result = run("--ddp-baseline-missing=fail", *FEW)
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        ["NOT GATED (step time p50 * ms): a debugging variable*"]
    )
    before = stored(pytester.path)
    assert run("--ddp-save-baseline", *FEW).ret == 0
    assert stored(pytester.path) == before


HALVED = """
import os
import torch

def test_step(ddp_benchmark):
    def setup(ctx):
        examples = int(os.environ.get("EXAMPLES", "8"))
        values = torch.ones(examples, 200)
        def step():
            values @ values.T
            return examples
        return step
    ddp_benchmark(setup)
"""


def test_a_step_with_half_the_examples_is_not_called_faster(
    pytester: pytest.Pytester, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it takes; and the operations that it lacks are told, also with -q."""
    pytester.makepyfile(test_halved=HALVED)
    warm = ("--ddp-warmup=3", *FEW)
    assert run(*warm, "--ddp-save-baseline").ret == 0
    monkeypatch.setenv("EXAMPLES", "4")
    result = run(*warm, "--ddp-baseline-missing=warn", "-q")
    assert last_line(result) == "1 incomparable (0 of 1 compared)"
    said = " ".join(result.stdout.str().split())
    assert "test_step: examples a step 16 -> 8" in said
    # a product of 8 x 200 x 8, and of 4 x 200 x 4
    assert "test_step: a step does 0.25x the operations of before" in said
    assert "test_step: a step takes 0.50x the examples of before" in said
