"""Another version, measured next to the working tree. After each run the repository is byte for
byte as it was."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pytest_ddpperf.launch.placement import place
from pytest_ddpperf.wire.channels import readable
from tests.git import git
from tests.integration.conftest import FEW, SMALL, Run, last_line
from tests.integration.conftest import STEP as PLAIN_STEP
from tests.processes import descendants, ended, gone, until

# What is under test, in its first commit; the second makes the step twelve times as long.
PACKAGE = """
MILLISECONDS = 5
OLD = True
SIZES = (1, 2)
"""
SECOND = (
    PACKAGE.replace("5", "60")
    .replace("True", "False")
    .replace("(1, 2)", "(2, 3)")
)

STEP = PLAIN_STEP + "import signal, sys, speed\n"


class Repository:
    """A git repository whose rootdir is below its top, with blanks in its path."""

    def __init__(self, top: Path) -> None:
        self.top, self.root = top, top / "python code"
        for folder in ("src/speed", "tests"):
            (self.root / folder).mkdir(parents=True)
        git(top.parent, "init", "--quiet", "--initial-branch=main", str(top))
        self.write(
            "pytest.ini",
            "[pytest]\npythonpath = src\naddopts = -p no:cacheprovider\n",
        )
        (top / ".gitignore").write_text("__pycache__\nout\n")
        self.write("src/speed/__init__.py", PACKAGE)
        self.first = self.commit()
        # A worktree of the user's whose folder is gone: git lists it until it is pruned, which is
        # not ours to do.
        git(
            top,
            "worktree",
            "add",
            "--quiet",
            "--detach",
            str(top.parent / "gone"),
        )
        shutil.rmtree(top.parent / "gone")

    def write(self, name: str, *parts: str) -> None:
        """Write a file; `OUT` in it is a path that both sides share."""
        text = "".join(map(textwrap.dedent, parts))
        (self.root / name).write_text(
            re.sub(r"\bOUT\b", repr(str(self.root / "out")), text)
        )

    def commit(self) -> str:
        git(self.top, "add", "--all")
        git(self.top, "commit", "--quiet", "--allow-empty", "-m", "a commit")
        return git(self.top, "rev-parse", "HEAD")

    def contents(self) -> dict[str, bytes | None]:
        """All there is, .git included; less what any run of pytest leaves, which git ignores."""
        ignored = ("__pycache__", f"{os.sep}out")
        paths = [
            path
            for path in self.top.rglob("*")
            if not any(part in str(path) for part in ignored)
        ]
        return {
            str(path): path.read_bytes() if path.is_file() else None
            for path in paths
        }

    @contextmanager
    def untouched(self) -> Iterator[None]:
        before = self.contents()
        yield
        after = self.contents()
        assert after.keys() == before.keys()
        assert [path for path in before if before[path] != after[path]] == []
        assert leftovers() == []


def leftovers() -> list[str]:
    import tempfile

    return [path.name for path in Path(tempfile.gettempdir()).glob("ddpperf-*")]


@pytest.fixture
def repository(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, temporary: Path
) -> Repository:
    repository = Repository(pytester.path / "a repo")
    monkeypatch.chdir(repository.root)
    return repository


def measured(report: Any, name: str) -> Any:
    """Return the measurement of a test in a JSON report."""
    return next(m for m in report["measurements"] if m["nodeid"].endswith(name))


# Whose launches cannot be alive at the same time.
ALONE = """
        import pathlib, sqlite3

        def test_one_at_a_time(ddp_benchmark):
            def setup(ctx):
                step = lasting(ctx)
                if ctx.rank == 0:  # as of a fixed port
                    os.close(os.open(OUT + "/alone", os.O_CREAT | os.O_EXCL))
                yield step
                if ctx.rank == 0:
                    os.unlink(OUT + "/alone")

            os.makedirs(OUT, exist_ok=True)
            ddp_benchmark(setup)

        def test_locks(ddp_benchmark):
            # From its fifth step on, rank 0 holds the lock but between two steps of every four.
            def setup(ctx):
                database = sqlite3.connect(pathlib.Path(OUT).parents[2] / "database", timeout=0.1, isolation_level=None)
                step, calls = lasting(ctx, speed.MILLISECONDS), iter(range(1000))
                def locking():
                    call = next(calls) - 5
                    if ctx.rank == 0 and call >= 0 and call % 4 == 0:
                        if database.in_transaction:
                            database.execute("COMMIT")
                        database.execute("BEGIN IMMEDIATE")
                    step()
                return locking
            ddp_benchmark(setup)
"""


def test_a_slower_version_is_named_in_every_report_also_if_launches_cannot_be_alive_together(
    repository: Repository, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slower package is found by a link from outside the repository. Launches that cannot be
    alive together are measured one after the other."""
    linked = repository.top.parent / "linked"
    linked.mkdir()
    (linked / "speed").symlink_to(repository.root / "src/speed")
    repository.write(
        "pytest.ini",
        f"[pytest]\npythonpath = '{linked}'\naddopts = -p no:cacheprovider\n",
    )
    repository.write(
        "tests/test_step.py",
        STEP,
        """
        def test_slower(ddp_benchmark):
            result = ddp_benchmark(lambda ctx: lasting(ctx, speed.MILLISECONDS), batch_size=4)
            assert result.verdict != "PASS"

        @pytest.mark.ddp(turns="launches")
        def test_whole_launches(ddp_benchmark):
            ddp_benchmark(lasting)

        def test_three(ddp_benchmark):
            ddp_benchmark(lasting, name="first")
            ddp_benchmark(lasting, name="ungated", gate=False)
            ddp_benchmark(lasting, name="last")
    """,
    )
    repository.write("tests/test_turns.py", STEP, ALONE)
    repository.write("src/speed/__init__.py", SECOND)
    second = repository.commit()
    # Uncommitted work is of the current side, tests are on both.
    repository.write("src/speed/__init__.py", SECOND + "# more\n")
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    with repository.untouched():
        reports = "--ddp-json=out/run.json", "--junitxml=out/junit.xml"
        result = run("tests", "--ddp-against", "HEAD~1", *FEW, *reports)
    assert result.ret == 1
    against = f"HEAD~1 ({repository.first[:7]})"
    result.stdout.fnmatch_lines(
        [
            f"ddpperf: against {against}",
            "REGRESSED: step time p50 * (limit 300 %)",
            "why: *changed: python code/src/speed/__init__.py",
            "  p50 * 300 %",
            (
                f"measured: 2 interleaved launches of each side; {against} and {second[:7]} with"
                " uncommitted changes"
            ),
        ]
    )
    assert (
        last_line(result)
        == f"compared with {against}: 2 regressed, 4 passed, 1 not gated (6 of 7 compared)"
    )
    result.stdout.fnmatch_lines(
        [
            "note:     measured one launch after the other: *database is locked*",
            "test_one_at_a_time: measured one launch after the other: *FileExistsError*",
        ]
    )
    # its failure has that note
    result.stdout.no_fnmatch_line(
        "test_locks: measured one launch after the other*"
    )
    text = result.stdout.str()
    assert "accept:" not in text
    title = "REGRESSED%3A tests/test_step.py%3A%3Atest_slower"
    file = "python code/src/speed/__init__.py"
    annotation = f"::error title={title},file={file},line=2::REGRESSED p50 "
    assert f"\n{annotation}" in text

    junit = (repository.root / "out/junit.xml").read_text()
    for name, value in (
        ("against", against),
        ("against_commit", repository.first),
    ):
        assert f'<property name="ddpperf.{name}" value="{value}"' in junit

    report = json.loads((repository.root / "out/run.json").read_text())
    slower = measured(report, "test_slower")
    baseline_side = slower["baseline_side"]
    assert baseline_side["version"]["commit"] == repository.first
    assert baseline_side["version"]["now"] == f"{second}-dirty"
    assert len(baseline_side["measurement"]["samples"]["step_seconds"]) == 2
    order = baseline_side["order"]
    assert [sorted(order[:2]), sorted(order[2:])] == [["b", "n"]] * 2
    steps = slower["measurement"]["samples"]["step_seconds"]
    assert [sum(pair) for pair in baseline_side["stretches"]] == list(
        map(len, steps)
    )
    by_launches = measured(report, "test_whole_launches")
    assert by_launches["baseline_side"]["stretches"] == []


def test_what_cannot_be_measured_on_one_side_says_why(
    repository: Repository, run: Run
) -> None:
    """What the other version lacks or refuses has no baseline. What fails in the current one is
    red."""
    repository.write(
        "tests/test_step.py",
        STEP,
        """
        @pytest.mark.parametrize("size", speed.SIZES)
        def test_size(ddp_benchmark, size):
            ddp_benchmark(lasting)

        def test_refuses(ddp_benchmark):
            if speed.OLD:
                raise ValueError("too old for this")
            ddp_benchmark(lasting)

        def test_skips(ddp_benchmark):
            if speed.OLD:
                pytest.skip("not in old ones")
            ddp_benchmark(lasting)

        def test_rank_dies(ddp_benchmark):
            def setup(ctx):
                if speed.OLD and ctx.rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                return lasting(ctx)
            ddp_benchmark(setup)

        class Hurried:  # far ahead when both ranks hang
            sleep, monotonic_ns = time.sleep, time.monotonic_ns
            def monotonic(self):
                return time.monotonic() + 1e6 * all(os.path.exists(OUT + f"/{rank}") for rank in (0, 1))

        @pytest.mark.ddp(turns="launches")  # else it would be tried alone, too
        def test_rank_hangs(ddp_benchmark, monkeypatch):
            if speed.OLD:
                monkeypatch.setattr("pytest_ddpperf.launch.run.time", Hurried())
            def setup(ctx):
                if speed.OLD:
                    os.makedirs(OUT + f"/{ctx.rank}")
                    time.sleep(3600)
                return lasting(ctx)
            ddp_benchmark(setup)

        def test_fails_here(ddp_benchmark):
            def setup(ctx):
                if not speed.OLD:
                    raise ValueError("broken in the new one")
                return lasting(ctx)
            ddp_benchmark(setup)

        def test_side_dies(ddp_benchmark):
            if speed.OLD:
                os._exit(3)
            ddp_benchmark(lasting)

        def test_after_it(ddp_benchmark):
            ddp_benchmark(lasting)
    """,
    )
    repository.write(
        "tests/test_new.py",
        """
        from speed.new import setup

        def test_new(ddp_benchmark):
            ddp_benchmark(setup)
    """,
    )
    repository.write("src/speed/__init__.py", SECOND)
    repository.write(
        "src/speed/new.py", STEP, "def setup(ctx):\n    return lasting(ctx)\n"
    )
    repository.commit()
    with repository.untouched():
        result = run("tests", "--ddp-against", "HEAD~1", *FEW)
    assert result.ret == 1
    against = f"HEAD~1 ({repository.first[:7]})"
    assert "ValueError: broken in the new one" in result.stdout.str()
    result.stdout.fnmatch_lines(
        [
            f"test_new: {against} was not measured:",
            "*ModuleNotFoundError: No module named 'speed.new'*",
            f"test_size?3?: {against} was not measured:",
            "there is no such test: tests/test_step.py::test_size?3?",
            f"test_refuses: {against} was not measured:",
            "ValueError: too old for this",  # before the traceback
            f"test_skips: {against} was not measured:",
            "*not in old ones*",
            f"test_rank_dies: {against} was not measured:",
            "rank 1 failed in setup: killed by SIGKILL*",
            f"test_rank_hangs: {against} was not measured:",
            "rank ? failed in setup: did not end within 300 s (--ddp-timeout)",
            "test_fails_here: launch 1 of 2: rank * failed in setup: ValueError*",
            f"test_side_dies: {against} was not measured:",
            f"pytest of {against} died: exited with status 3*",
            f"test_after_it: {against} was not measured:",
            f"pytest of {against} died: exited with status 3",
            (
                f"compared with {against}: 1 passed, 8 without baseline, 1 failed to *"
            ),
        ]
    )


def test_a_test_that_a_conftest_renames_is_compared_and_a_comparison_that_fails_is_red_under_ci(
    repository: Repository, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository.write(
        "tests/conftest.py",
        """
        import pytest

        @pytest.hookimpl(trylast=True)
        def pytest_collection_modifyitems(items):
            for item in items:
                item.name = f"{item.name}@cpu"
    """,
    )
    repository.write(
        "tests/test_step.py",
        STEP,
        """
        @pytest.mark.parametrize("size", ["a"])
        def test_step(ddp_benchmark, size):
            ddp_benchmark(lambda ctx: lasting(ctx, speed.MILLISECONDS))

        @pytest.mark.parametrize("size", speed.SIZES[1:])
        def test_size(ddp_benchmark, size):
            ddp_benchmark(lasting)
    """,
    )
    repository.write("src/speed/__init__.py", SECOND)
    repository.commit()
    monkeypatch.setenv("CI", "1")
    result = run("tests", "--ddp-against", "HEAD~1", *FEW)
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        [
            "REGRESSED: step time p50 * (limit 300 %)",
            "NO BASELINE (step time p50 *): HEAD~1 (*) was not measured:",
            "there is no such test: tests/test_step.py::test_size?3?",
            "tests/test_step.py::test_step?a? * REGRESSED",
        ]
    )
    assert last_line(result).startswith("compared with HEAD~1")
    assert "1 regressed, 1 without baseline (1 of 2 compared)" in last_line(
        result
    )
    assert "other failure" not in last_line(result)


def test_nothing_is_measured_and_all_is_green_if_only_documentation_and_tests_differ(
    repository: Repository, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository.write(
        "tests/test_step.py",
        STEP,
        """
        def test_step(ddp_benchmark):
            ddp_benchmark(lasting)

        def test_call(ddp_run):
            assert ddp_run(lambda ctx: ctx.rank) == [0, 1]

        def test_plain():
            pass
    """,
    )
    (repository.top / "README.md").write_text("Other files may differ.")
    monkeypatch.setenv("CI", "1")
    said = (
        f"nothing differs from HEAD ({repository.first[:7]}) but README.md, python"
        " code/tests/test_step.py: nothing to compare"
    )
    with repository.untouched():
        for quiet in ((), ("-q",)):
            result = run(
                "--ddp-against", "HEAD", *quiet, "--ddp-json=out/run.json"
            )
            assert result.ret == 0
            result.assert_outcomes(passed=2, skipped=1)
            result.stdout.fnmatch_lines([said, "1 skipped (0 of 0 compared)"])
        report = json.loads((repository.root / "out/run.json").read_text())
        assert report["messages"] == [said]
        (repository.root / "out/run.json").unlink()

        result = run("--ddp-against-env", "CI=1")
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        result.stderr.fnmatch_lines(
            [
                "ERROR: --ddp-against-env: nothing differs from CI=1: interpreter, environment and"
                " all files that Python imports are the same",
                "--ddp-against self measures how far the same code differs from itself",
            ]
        )

        result = run("--ddp-against", "self", *FEW)
        assert result.ret == 0
        result.stdout.fnmatch_lines(
            [
                "ddpperf: against the same code",
            ]
        )
        assert (
            last_line(result)
            == "compared with the same code: 1 passed (1 of 1 compared)"
        )

    # the reference has the test now, and its body differs
    git(repository.top, "add", "--all")
    git(repository.top, "commit", "--quiet", "-m", "A test")
    repository.write(
        "tests/test_step.py",
        STEP,
        """
        def test_step(ddp_benchmark):
            setup = lasting
            ddp_benchmark(setup)
    """,
    )
    result = run("--ddp-against", "HEAD", "--ddp-fail-on=loosened")
    assert result.ret == 0
    result.assert_outcomes(skipped=1)
    result.stdout.no_fnmatch_line("guard: 1 test that HEAD compared*")


REACHES = """
    import pathlib

    def executing(ctx):
        source = pathlib.Path(OUT).with_name("src") / "speed/slower.py"
        found = {}
        exec(source.read_text(), found)
        return lasting(ctx, found["MILLISECONDS"])

    def test_not(ddp_benchmark):
        ddp_benchmark(lasting)

    def test_later(ddp_benchmark):
        ddp_benchmark(lasting, name="first")
        ddp_benchmark(executing, name="second")

    def test_after(ddp_benchmark):
        ddp_benchmark(lasting)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says so")
def test_what_cannot_reach_a_file_that_differs_passes_after_one_launch(
    repository: Repository, run: Run
) -> None:
    repository.write("src/speed/slower.py", "MILLISECONDS = 5\n")
    repository.write("tests/test_step.py", STEP, REACHES)
    first = repository.commit()
    repository.write("src/speed/slower.py", "MILLISECONDS = 60\n")
    repository.commit()
    with repository.untouched():
        result = run("--ddp-against=HEAD~1", *FEW, "--ddp-json=out/run.json")
    report = json.loads((repository.root / "out/run.json").read_text())
    found = [
        (
            each["test"]["label"],
            each["verdict"]["reason"],
            len(each["measurement"]["samples"]["step_seconds"]),
        )
        for each in report["measurements"]
    ]
    assert found[:2] == [("", "unreached", 1), ("first", "unreached", 1)]
    # By the path of the working tree: the other side reads the same file, which is refused.
    assert found[2][0] == "second"
    assert found[2][1] == "no-baseline"
    # Its module may have other ways to the file than to import it.
    assert found[3][1] == "within-limit"
    side = report["measurements"][0]["baseline_side"]
    assert side["read"] == ["python code/src/speed/__init__.py"]
    against = f"HEAD~1 ({first[:7]})"
    result.stdout.fnmatch_lines(
        [
            "test_step.py::test_not * PASS",
            "2 tests (test_not, test_later (first)): none of the files that it reads (1) differs"
            f" from {against}",
        ]
    )


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says so")
def test_a_test_that_imports_another_file_than_the_one_that_differs_passes_after_one_launch(
    repository: Repository, run: Run
) -> None:
    """Both modules are imported when the tests are collected, before any of them runs."""
    repository.write("src/speed/one.py", "MILLISECONDS = 5\n")
    repository.write("src/speed/other.py", "MILLISECONDS = 5\n")
    for name in ("one", "other"):
        repository.write(
            f"tests/test_{name}.py",
            STEP,
            f"""
            from speed import {name}

            def stepping(ctx):
                return lasting(ctx, {name}.MILLISECONDS)

            def test_{name}(ddp_benchmark):
                ddp_benchmark(stepping)
            """,
        )
    repository.commit()
    repository.write("src/speed/one.py", "MILLISECONDS = 60\n")
    repository.commit()
    with repository.untouched():
        run("--ddp-against=HEAD~1", *FEW, "--ddp-json=out/run.json")
    report = json.loads((repository.root / "out/run.json").read_text())
    found = {
        each["test"]["name"]: each["verdict"]["reason"]
        for each in report["measurements"]
    }
    assert found == {"test_one": "beyond-limit", "test_other": "unreached"}


def test_of_several_files_that_changed_the_one_whose_functions_take_longer_comes_first(
    repository: Repository, run: Run
) -> None:
    """In real time, by the stacks of one more launch of each side. What the same function does
    more often is its caller's."""
    net = """
        from speed.loss import loss

        def forward():
            for _ in range({}):
                loss()
        """
    loss = "import time\n\ndef loss():\n    time.sleep(0.002)\n"
    repository.write("src/speed/net.py", net.format(1))
    repository.write("src/speed/loss.py", loss)
    repository.write(
        "tests/test_step.py",
        PLAIN_STEP,
        """
        from speed import net

        def test_slower(ddp_benchmark):
            def step():
                net.forward()
                all_reduce()
            ddp_benchmark(lambda ctx: step)
        """,
    )
    repository.commit()
    repository.write("src/speed/net.py", net.format(20))
    repository.write("src/speed/loss.py", f"# a comment\n{loss}")
    with repository.untouched():
        result = run(*SMALL, "--ddp-against=HEAD", "--ddp-json=../../all.json")
    folder = "python code/src/speed"
    lines = " ".join(" ".join(result.outlines).split())
    assert re.search(
        rf"changed: {folder}/net\.py \(forward \+\d+(\.\d+)? ms\), {folder}/loss\.py",
        lines,
    )
    (measured,) = json.loads((repository.top.parent / "all.json").read_text())[
        "measurements"
    ]
    found = measured["findings"][-1]
    assert (found["file"], found["function"], found["phases"]) == (
        f"{folder}/net.py",
        "forward",
        [],
    )
    assert 0.5 < found["share"] < 1.5
    assert {
        len(launch)
        for launch in measured["measurement"]["samples"]["step_seconds"]
    } == {10}, "it is not compared"


def test_variables_options_an_interpreter_and_what_must_be_built_may_be_all_that_differs(
    repository: Repository,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    repository.write(
        "tests/conftest.py",
        """
        def pytest_addoption(parser):
            parser.addoption("--my-milliseconds", type=int, default=60)
        """,
    )
    repository.write(
        "tests/test_step.py",
        STEP,
        """
        from speed.built import MILLISECONDS

        @pytest.mark.ddp(min_time=1000, max_launches=250)  # and 2 ranks: room for 12 steps
        def test_variable(ddp_benchmark):
            ddp_benchmark(lasting)

        def test_option(ddp_benchmark, request):
            milliseconds = request.config.getoption("--my-milliseconds")
            ddp_benchmark(lambda ctx: lasting(ctx, milliseconds))

        @pytest.mark.ddp(turns="launches")
        def test_built(ddp_benchmark):
            ddp_benchmark(lambda ctx: lasting(ctx, MILLISECONDS))

        def test_interpreter(ddp_benchmark):
            ddp_benchmark(lambda ctx: lasting(ctx, 60 if sys.prefix == HERE else 5))
        """.replace("HERE", repr(sys.prefix)),
    )
    (repository.top / ".gitignore").write_text("__pycache__\nout\nbuilt.py\n")
    repository.write("src/speed/built.py", "MILLISECONDS = 60\n")
    monkeypatch.setenv("LASTS", "60")
    placed = place(2, {})
    first, cores, pinned = (
        repository.first[:7],
        placed.cores,
        "pinned False -> True*" * placed.pinned,
    )
    # so that ranks are not pinned there
    threads = f"OMP_NUM_THREADS={cores + 1}"
    options = ["--ddp-against-env", "LASTS=5", "--ddp-against-env", threads]
    options += ["--ddp-against-option", "--my-milliseconds 5"]
    options.append(
        "--ddp-against-setup=echo 'MILLISECONDS = 5' > 'python code/src/speed/built.py'"
    )
    venv.create(tmp_path / "other env")
    python = tmp_path / "other env/bin/python"
    (packages,) = (tmp_path / "other env").glob("lib/python*/site-packages")
    with repository.untouched():
        result = run(f"--ddp-against-python={python}")
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        result.stderr.fnmatch_lines(
            [
                f"ERROR: --ddp-against-python: pytest of {python} died: *",
                "pytest-ddpperf * must be installed for that *",
            ]
        )
        shared = [path for path in sys.path if path.endswith("site-packages")]
        (packages / "shared.pth").write_text(
            "".join(
                f"import site; site.addsitedir({path!r})\n" for path in shared
            )
        )
        # a wrapper may stay the parent of what it starts
        wrapped = f'"{python}" "$@"\n'
        python = tmp_path / "python"
        python.write_text(f"#!/bin/sh\n{wrapped}")
        python.chmod(0o755)
        options += [
            f"--ddp-against-python={python}",
            "-o",
            "addopts=-q",
            f"--ddp-json={tmp_path / 'report.json'}",
        ]
        result = run("--ddp-against", "HEAD", *FEW, *options)
    assert result.ret == 1
    measured = json.loads((tmp_path / "report.json").read_text())[
        "measurements"
    ]
    windows = [
        {
            len(launch)
            for side in (both, both["baseline_side"])
            for launch in side["measurement"]["samples"]["step_seconds"]
        }
        for both in measured
    ]
    assert windows == [{12}, {10}, {10}, {10}]
    levels = [
        max(each["level"] for each in both["verdict"]["comparisons"])
        for both in measured
    ]
    assert all(0.014 < level <= 0.015 for level in levels), levels
    result.stdout.fnmatch_lines(
        [
            "ddpperf: 2 ranks over gloo (*",
            (
                f"ddpperf: HEAD (*), {python}, LASTS=5, {threads}, *: 2 ranks over gloo (*): "
                f"2 x {cores + 1} threads (OMP_NUM_THREADS) share {cores} core*, expect noise"
            ),
            "REGRESSED: step time p50 *",
            (
                f"why: *changed: python code/src/speed/built.py; *{pinned}OMP_NUM_THREADS"
                f" {cores + 1} -> unset*"
            ),
            f"measured: 2 interleaved * HEAD ({first}), {python}, LASTS=5, {threads}, *",
        ]
    )
    assert "4 regressed" in result.stdout.str()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            [
                "--ddp-against=first",
                "--ddp-against-setup=echo no compiler; exit 7",
            ],
            "*exited with status 7*",
        ),
        (
            ["--ddp-against=first", "-n2"],
            "--ddp-against is not supported under xdist: add -n 0",
        ),
    ],
    ids=["setup", "xdist"],
)
def test_what_cannot_be_is_a_usage_error(
    repository: Repository, run: Run, arguments: list[str], message: str
) -> None:
    git(repository.top, "tag", "first")
    repository.write("src/speed/__init__.py", SECOND)
    repository.write(
        "tests/test_step.py", "def test_step(ddp_benchmark):\n    pass\n"
    )
    with repository.untouched():
        result = run(*arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {message}"])
    if "7" in message:
        result.stderr.fnmatch_lines(["no compiler"])


def test_the_other_version_has_all_tests_of_a_call_that_is_one_of_several(
    repository: Repository, run: Run
) -> None:
    """It has fewer of them, so the same test is in another part of them. A test that another part
    has is not removed."""
    repository.write(
        "tests/conftest.py",
        """
        def pytest_addoption(parser):  # as pytest-split has them
            parser.addoption("--splits", type=int)
            parser.addoption("--group", type=int)

        def pytest_configure(config):
            config.pluginmanager.register(object(), "pytest-split")

        def pytest_collection_modifyitems(config, items):
            if splits := config.getoption("splits"):
                items[:] = items[config.getoption("group") - 1 :: splits]
        """,
    )
    repository.write(
        "tests/test_step.py",
        STEP,
        """
        @pytest.mark.parametrize("number", range(1 if speed.OLD else 2))
        def test_other(number):
            pass

        def test_step(ddp_benchmark):
            ddp_benchmark(lambda ctx: lasting(ctx, speed.MILLISECONDS))
        """,
    )
    git(repository.top, "add", "--all")
    git(repository.top, "commit", "--quiet", "--message=Add tests")
    repository.write("src/speed/__init__.py", SECOND)
    call = ("--ddp-against=HEAD", "--splits=2", *FEW)
    result = run(*call, "--group=1")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["compared with *: 1 regressed (1 of 1 *"])
    result = run(*call, "--group=2")
    assert result.ret == 0
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("guard: *")


def test_a_run_that_pytest_gives_up_checks_nothing_out(
    repository: Repository, run: Run
) -> None:
    git(repository.top, "tag", "first")
    repository.write(
        "tests/test_step.py", "def test_step(ddp_benchmark):\n    pass\n"
    )
    repository.write("tests/test_other.py", "import nonesuch\n")
    setup = ("--ddp-against=first", "--ddp-against-setup=exit 7")
    result = run(*setup)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["*1 error during collection*"])
    result = run(*setup, "--continue-on-collection-errors")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    # as Ctrl-C does
    repository.write("tests/test_other.py", "")
    repository.write(
        "tests/conftest.py",
        """
        import pytest

        def pytest_collection_modifyitems():
            pytest.exit("enough", 3)
        """,
    )
    assert run(*setup).ret == 3


def test_without_git_or_a_repository_a_ref_is_a_usage_error(
    pytester: pytest.Pytester, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile("def test_step(ddp_benchmark):\n    pass\n")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(pytester.path.parent))
    result = run("--ddp-against=main")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        [
            f"ERROR: --ddp-against: main is a git ref, and git cannot read the repository of {pytester.path}: *"
        ]
    )
    monkeypatch.setenv("PATH", str(pytester.path))
    result = run("--ddp-against=main")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["ERROR: *git is not installed, or not on PATH"]
    )


def test_both_sides_have_the_same_hash_seed_layout_cores_folder_and_variables(
    repository: Repository, run: Run
) -> None:
    """Also where one test of a file is run, of which the other side collects all, and conftests set
    a folder."""
    repository.write(
        "src/speed/__init__.py", PACKAGE + "# no step reads this line\n"
    )
    repository.write(
        "conftest.py",
        'import os; os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"/nowhere/{os.getpid()}"',
    )
    repository.write(
        "tests/test_step.py",
        """
        import json, os, pathlib, sys, speed

        def setup(ctx):
            maps = [line.split() for line in pathlib.Path("/proc/self/maps").read_text().splitlines()]
            drawn = {
                "hash": hash("layer1"),
                "libraries": [words[0] for words in maps if ".so" in words[-1] and words[1] == "r-xp"],
                "cores": sorted(os.sched_getaffinity(0)),
                "folder": os.path.relpath(os.getcwd(), pathlib.Path(speed.__file__).parents[2]),
                "variables": dict(os.environ),
                "modules": sorted(sys.modules),
            }
            pathlib.Path(OUT, f"{os.getppid()}-{ctx.rank}-{os.getpid()}").write_text(json.dumps(drawn))
            return lambda: None

        def test_step(ddp_benchmark):
            ddp_benchmark(setup)

        def test_call(rpc_benchmark):
            rpc_benchmark(setup)
        """,
    )
    (repository.root / "out").mkdir()
    run(
        "tests/test_step.py::test_step", "--ddp-against", "HEAD", *FEW, own=True
    ).assert_outcomes(passed=1)
    sides: dict[str, dict[str, list[Any]]] = {}
    for path in (repository.root / "out").iterdir():
        server, rank, _ = path.name.split("-")
        sides.setdefault(server, {}).setdefault(rank, []).append(
            json.loads(path.read_text())
        )
    assert len(sides) == 2
    one, other = ([side[rank][0] for rank in "01"] for side in sides.values())
    for ours, theirs in zip(one, other, strict=True):
        differ = {
            name
            for name in {*ours["variables"], *theirs["variables"]}
            if ours["variables"].get(name) != theirs["variables"].get(name)
        }
        folders = {
            "NUMBA_CACHE_DIR",
            "PYTHONPATH",
            "PYTEST_DDPPERF_LAUNCH",
            "TMPDIR",
            "TORCHINDUCTOR_CACHE_DIR",
        }
        assert differ <= {*folders, "UV_NO_SYNC"}
        sides_have = {
            variables.get("UV_NO_SYNC")
            for variables in (ours["variables"], theirs["variables"])
        }
        assert "1" in sides_have
        assert len(ours["variables"]["TMPDIR"]) == len(
            theirs["variables"]["TMPDIR"]
        )
        assert ours["libraries"]
        assert {**ours, "variables": ()} == {**theirs, "variables": ()}


def test_both_sides_stay_in_step_whatever_a_test_does(
    repository: Repository, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reruns, failures that are caught, what is expected to fail, other fixtures between, tests in
    the package, code of the wrong tree: none of them hangs. A side that hangs is given up, with its
    stacks; the file that it writes then stands for the end of its time."""

    def in_vain(
        channels: list[socket.socket], seconds: float
    ) -> list[socket.socket]:
        while (
            not (ready := readable(channels, 0.1))
            and not (repository.root / "out").exists()
        ):
            pass
        return ready

    monkeypatch.setattr("pytest_ddpperf.remote.process.readable", in_vain)
    repository.write("src/speed/__init__.py", SECOND)
    repository.write(
        "tests/test_step.py",
        STEP,
        """
        import pathlib
        attempts = []

        @pytest.fixture(scope="module")
        def wide():
            yield
            assert not speed.OLD, "torn down badly there"

        def test_rerun(ddp_benchmark, wide):
            attempts.append(1)
            def setup(ctx, attempt=len(attempts)):
                if not speed.OLD and attempt == 1:
                    raise ValueError("at first")
                return lasting(ctx)
            ddp_benchmark(setup, name="once more")

        def test_caught(ddp_benchmark):
            def setup(ctx):
                if not speed.OLD:
                    raise ValueError("caught")
                return lasting(ctx)
            with pytest.raises(pytest.fail.Exception, match="caught"):
                ddp_benchmark(setup, name="fails")
            if speed.OLD:
                pytest.fail("was not caught there")

        @pytest.mark.xfail(reason="not yet", strict=False)
        def test_expected(ddp_benchmark):
            if speed.OLD:
                raise ValueError("expected there")
            ddp_benchmark(lasting)

        def test_other_names(ddp_benchmark):
            ddp_benchmark(lasting, name="old" if speed.OLD else "new")
            ddp_benchmark(lasting, name="more")

        def test_beside_ddp_run(ddp_run, ddp_benchmark):
            assert ddp_run(lambda ctx: ctx.rank) == [0, 1]
            ddp_benchmark(lasting)

        def import_from_hand():
            from importlib.util import module_from_spec, spec_from_file_location
            file = pathlib.Path(OUT).with_name("src") / "speed/__init__.py"
            sys.modules["by_file"] = module_from_spec(spec_from_file_location("by_file", file))

        def test_wrong_in_ranks(ddp_benchmark):
            def setup(ctx):
                import_from_hand()
                return lasting(ctx)
            ddp_benchmark(setup)

        def test_wrong_in_pytest(ddp_benchmark):
            import_from_hand()
            ddp_benchmark(lasting)

        @pytest.fixture
        def waiting():
            if speed.OLD:
                open(OUT, "w").close()
                time.sleep(3600)

        def test_hangs(ddp_benchmark, waiting):
            ddp_benchmark(lasting)
        """,
    )
    repository.write(
        "src/speed/test_inside.py",
        STEP,
        """
        def test_inside(ddp_benchmark):
            ddp_benchmark(lasting, name="old inside" if speed.OLD else "new inside")
        """,
    )
    repository.write(
        "tests/test_rpc.py",
        PLAIN_STEP,
        """
        def test_rpc(rpc_benchmark):
            rpc_benchmark(lasting)
        """,
    )
    with repository.untouched():
        options = (
            "--import-mode=importlib",
            "--reruns=1",
            "--ddp-trainers=1",
            "--ddp-parameter-servers=1",
        )
        result = run("--ddp-against=main", *FEW, *options)
    assert result.ret == 0
    against = f"main ({repository.first[:7]})"
    result.stdout.fnmatch_lines_random(
        [
            "test_caught (fails): launch 1 of 2: rank * in setup: ValueError: caught",
            f"test_expected: {against} was not measured:",
            "*ValueError: expected there",
            "there the test measured 'old' where it measures 'new' here",
            f"test_other_names (more): {against} was not measured:",
            "there the test measured 'old inside' where it measures 'new inside' here",
            f"test_wrong_in_ranks: {against} was not measured:",
            (
                "rank ? failed in the delivery of its result: imported from the working tree, not"
                " from the version to compare with: python code/src/speed/__init__.py"
            ),
            f"test_wrong_in_pytest: {against} was not measured:",
            "*imported from the working tree, not from the version to compare with: python",
            f"pytest of {against} did not answer for 310 s",
            "*test_step.py*in waiting",
            (
                f"compared with {against}: 3 passed, 7 without baseline, 1 failed to measure (3 of"
                " 11 compared)*"
            ),
        ]
    )


def test_fixtures_of_both_sides_are_torn_down_where_their_files_are(
    repository: Repository, run: Run
) -> None:
    """Also a fixture kept for a test that does not run."""
    repository.write(
        "tests/conftest.py",
        """
        import os, pytest

        @pytest.fixture(scope="session", autouse=True)
        def service():
            yield
            with open(os.environ["TORN_DOWN"], "a") as log:
                print(os.path.exists(__file__), file=log)
        """,
    )
    repository.write(
        "tests/test_step.py",
        STEP,
        """
        def test_fails(ddp_benchmark):
            ddp_benchmark(lambda ctx: lasting(ctx, speed.MILLISECONDS))
            assert False

        def test_never_runs(ddp_benchmark):
            ddp_benchmark(lasting)
        """,
    )
    repository.write("src/speed/__init__.py", SECOND)
    repository.commit()
    log = repository.top.parent / "torn_down"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORN_DOWN", str(log))
        run("tests", "-x", "--ddp-against=HEAD~1", *FEW, own=True)
    assert log.read_text().split() == ["True", "True"]


def test_nothing_is_left_of_a_run_that_is_stopped(
    repository: Repository,
) -> None:
    """One side is paused then. Git forgets the worktree of a run that was killed, for the next run
    may never come."""
    repository.write("src/speed/__init__.py", SECOND)
    repository.write(
        "tests/test_step.py",
        STEP,
        """
        def test_step(ddp_benchmark):
            def setup(ctx):
                step, calls = lasting(ctx), iter(range(1000))
                def hanging():
                    step()
                    if next(calls) == 6 and speed.OLD and ctx.rank == 1:
                        open(OUT, "w").close()
                        time.sleep(3600)
                return hanging
            ddp_benchmark(setup)
        """,
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:randomly",
        "-p",
        "no:benchmark",
        *SMALL,
        "--ddp-against=main",
    ]
    with repository.untouched():
        for signum in (signal.SIGTERM, signal.SIGKILL, signal.SIGINT):
            started = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            with ended(started) as process:
                until((repository.root / "out").exists)
                (repository.root / "out").unlink()
                below = descendants(process.pid)
                assert below
                assert "ddpperf-against" in git(
                    repository.top, "worktree", "list"
                )
                process.send_signal(signum)
                process.wait(600)
            until(lambda pids=below: gone(pids))
            assert leftovers() == []
            assert "ddpperf-against" not in git(
                repository.top, "worktree", "list"
            )
            assert [
                path.name
                for path in (repository.top / ".git/worktrees").iterdir()
            ] == ["gone"]
