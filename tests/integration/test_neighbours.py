"""Living with other plugins: pytest-benchmark, xdist, timeouts, reruns, import modes."""

from __future__ import annotations

import json
import os
import re
import sys
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import pytest

from pytest_ddpperf.launch import placement
from tests.integration.conftest import SMALL, STEP, Run, last_line
from tests.processes import gone

ONE = (
    STEP
    + """
def test_step(ddp_benchmark):
    ddp_benchmark(lasting)
"""
)


def test_a_test_that_is_interrupted_makes_pytest_benchmark_say_nothing(
    pytester: pytest.Pytester, run: Run
) -> None:
    pytester.makepyfile(
        "def test_interrupted(ddp_benchmark): raise KeyboardInterrupt"
    )
    result = run(benchmark=True, own=True)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert "Warning" not in result.stdout.str() + result.stderr.str()


@pytest.mark.parametrize("quiet", [(), ("-q",)])
def test_of_a_test_that_is_interrupted_it_is_said_what_it_was_doing(
    pytester: pytest.Pytester, run: Run, quiet: tuple[str, ...]
) -> None:
    test = """
        import os, signal, time

        def setup(ctx):
            def step():
                if ctx.rank == 0:
                    os.kill(PID, signal.SIGINT)
                time.sleep(3600)
            return step

        def test_step(ddp_benchmark): ddp_benchmark(setup)
    """
    pytester.makepyfile(test.replace("PID", str(os.getpid())))
    result = run(
        "--ddp-launches=3", "--ddp-json=run.json", *quiet, is_interrupted=True
    )
    assert result.ret == pytest.ExitCode.INTERRUPTED
    said = r"::test_step: interrupted: launch\s+1/3, "
    assert re.search(said, result.stdout.str())
    report = json.loads((pytester.path / "run.json").read_text())
    assert re.search(said, "\n".join(report["messages"]))


TOO_LATE = """
import os, signal, time, pytest
THIS = os.getpid()

@pytest.fixture(autouse=True)
def limit():
    before = signal.signal(signal.SIGUSR1, lambda *_: pytest.fail("Timeout (>1.0s)"))
    yield
    signal.signal(signal.SIGUSR1, before)

def hangs(ctx):
    if ctx.rank == 0:
        os.kill(PID, signal.SIGUSR1)
    time.sleep(3600)

def test_measures(ddp_benchmark): ddp_benchmark(hangs)
def test_calls(ddp_run): ddp_run(hangs)
"""


def test_what_ends_a_test_from_outside_shows_no_frame_of_ours(
    pytester: pytest.Pytester, run: Run
) -> None:
    pytester.makepyfile(test_late=TOO_LATE.replace("PID", str(os.getpid())))
    result = run()
    result.assert_outcomes(failed=2)
    assert (
        re.findall("^E +(.*)", result.stdout.str(), re.MULTILINE)
        == ["Failed: Timeout (>1.0s)"] * 2
    )
    assert "pytest_ddpperf/" not in result.stdout.str()


NEXT_TO_BENCHMARK = (
    ONE
    + """
def test_theirs(benchmark):
    benchmark(lambda: None)
def test_both(benchmark, ddp_benchmark):
    ddp_benchmark(lasting)
    assert benchmark(lambda: 5) == 5
def test_rank_dies(ddp_benchmark):
    ddp_benchmark(lambda ctx: lambda: os._exit(7))
def test_plain():
    pass
"""
)


def rows_of_benchmarks(shown: str) -> list[str]:
    """Return the tests that pytest-benchmark's table has."""
    return re.findall(
        r"^(test_step|test_theirs|test_both) ", shown, re.MULTILINE
    )


def test_pytest_benchmark_reports_the_same_samples_and_what_else_a_test_measures(
    pytester: pytest.Pytester, run: Run
) -> None:
    pytester.makepyfile(test_one=NEXT_TO_BENCHMARK)
    reports = "--benchmark-json=theirs.json", "--ddp-json=ours.json"
    result = run(*reports, "-W", "error", benchmark=True, own=True)
    result.assert_outcomes(passed=4, failed=1)
    assert rows_of_benchmarks(result.stdout.str()).count("test_step") == 1
    theirs = json.loads((pytester.path / "theirs.json").read_text())[
        "benchmarks"
    ]
    ours = json.loads((pytester.path / "ours.json").read_text())["measurements"]
    (step,) = (entry for entry in theirs if entry["name"] == "test_step")
    launches = ours[0]["measurement"]["samples"]["step_seconds"]
    samples = [seconds for launch in launches for seconds in launch]
    assert step["stats"]["data"] == pytest.approx(samples, abs=1e-9)
    assert len(samples) == 30
    assert step["extra_info"]["ddpperf"]["verdict"] == "NO BASELINE"
    assert step["extra_info"]["ddpperf"]["p50"] == pytest.approx(
        ours[0]["percentile_seconds"]["p50"], abs=1e-9
    )


def test_the_options_of_pytest_benchmark_are_obeyed(
    pytester: pytest.Pytester, run: Run
) -> None:
    pytester.makepyfile(test_one=NEXT_TO_BENCHMARK)
    run(
        "--benchmark-only", "-k", "step or plain", benchmark=True
    ).assert_outcomes(passed=1, skipped=1, deselected=3)
    run(
        "--benchmark-skip", "-k", "step or plain", benchmark=True
    ).assert_outcomes(passed=1, skipped=1, deselected=3)
    run(
        "--benchmark-cprofile=cumtime", "-k", "step", benchmark=True
    ).assert_outcomes(passed=1, deselected=4)
    shown = run("-k", "step or theirs", benchmark=True).stdout.str()
    assert rows_of_benchmarks(shown) == ["test_theirs"]
    result = run("--benchmark-disable", "-k", "step", benchmark=True)
    result.assert_outcomes(passed=1, deselected=4)
    assert last_line(result) == "1 without baseline (0 of 1 compared)"


TIMED = (
    STEP
    + """
def noting(ctx):
    here = os.environ["NOTES"]
    def step():
        all_reduce()
        time.sleep(0.05)
        ctx.record("rank", ctx.rank, better=None)
        with open(f"{here}/{ctx.rank}-{os.getpid()}", "a") as file:
            print(time.monotonic(), file=file)
    return step
def measure(ddp_benchmark):
    result = ddp_benchmark(noting)
    assert result.environment.recorded["xdist_workers"] == 2
    assert result.recorded == {"rank": (((0.0,) * 10, (1.0,) * 10),) * 3}
# xdist gives each worker two tests that follow one another: both workers have to measure.
def test_first_worker(ddp_benchmark):
    measure(ddp_benchmark)
def test_forgets(ddp_benchmark):
    pass
def test_second_worker(ddp_benchmark):
    measure(ddp_benchmark)
def test_rpc(rpc_benchmark):
    rpc_benchmark(lambda ctx: lambda: None)
def talking(ctx):
    print("hello from", ctx.rank)
    assert False
def test_talks(ddp_run):
    ddp_run(talking)
"""
)


def test_xdist_has_one_table_one_file_and_no_two_launches_at_once(
    pytester: pytest.Pytester, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a worker has no terminal, so it captures what ranks write, whatever -s says."""
    # tests/conftest.py switches locks off
    monkeypatch.delenv(placement.SWITCH)
    notes = pytester.mkdir("notes")
    monkeypatch.setenv("NOTES", str(notes))
    pytester.makepyfile(test_timed=TIMED)
    result = run(
        "-n",
        "2",
        "-s",
        "--ddp-json=report.json",
        "--ddp-html=page.html",
        benchmark=True,
    )
    result.assert_outcomes(passed=4, failed=1)
    result.stdout.fnmatch_lines(
        ["*Captured stdout rank 0 call*", "hello from 0"]
    )
    assert (
        "<h1>3 without baseline, 1 never measured, 1 other failure (0 of 3 compared)"
        in Path("page.html").read_text()
    )
    result.stdout.fnmatch_lines(
        [
            "3 without baseline, 1 never measured, 1 other failure (0 of 3 compared) in *: record*"
        ]
    )
    assert sum(text.endswith("  verdict") for text in result.outlines) == 1
    report = json.loads((pytester.path / "report.json").read_text())
    assert (
        len(report["measurements"]),
        report["summary"]["never_measured"],
    ) == (3, 1)
    recorded = [measured["recorded"] for measured in report["measurements"]]
    assert sorted(recorded, key=bool) == [
        {},
        *[{"rank": [[[0.0] * 10, [1.0] * 10]] * 3}] * 2,
    ]
    windows = []
    for file in notes.glob("0-*"):
        times = [float(text) for text in file.read_text().split()]
        windows.append((min(times), max(times)))
    windows.sort()
    assert len(windows) == 6
    assert all(end < begin for (_, end), (begin, _) in pairwise(windows))


RED = (
    STEP
    + """
def test_step(ddp_benchmark):
    with open("calls", "a") as calls:
        calls.write("x")
    def setup(ctx):
        if ctx.rank == 0:
            with open("launches", "a") as launches:
                launches.write("x")
        return lasting(ctx)
    ddp_benchmark(setup)
"""
)


def test_a_rerun_does_not_turn_red_into_green(
    pytester: pytest.Pytester, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(test_red=RED)
    run("--ddp-save-baseline").assert_outcomes(passed=1)
    (pytester.path / "launches").unlink()
    (pytester.path / "calls").unlink()
    monkeypatch.setenv("LASTS", "60")
    result = run("--reruns=2")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["A rerun does not measure again: *"])
    assert (
        last_line(result)
        == "compared with baselines: 1 regressed (1 of 1 compared)"
    )
    assert len((pytester.path / "calls").read_text()) == 3
    # of one measurement, confirmed
    assert len((pytester.path / "launches").read_text()) == 6


HANGING = """
import os, signal, time
def test_hangs(ddp_run):
    pid = os.getpid()
    def function(ctx):
        import torch.distributed
        with open(f"rank{ctx.rank}", "w") as file:
            print(os.getpid(), os.getppid(), file=file)
        torch.distributed.barrier()
        if ctx.rank == 0:
            SOON
        time.sleep(3600)
    ddp_run(function)
def test_next():
    pass
"""


def test_the_signal_of_pytest_timeout_leaves_no_rank(
    pytester: pytest.Pytester, run: Run
) -> None:
    """A rank sends the signal when the ranks hang, however slow they are."""
    pytester.makepyfile(HANGING.replace("SOON", "os.kill(pid, signal.SIGALRM)"))
    result = run("--timeout=3600", "--timeout-method=signal", small=False)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["E * Failed: Timeout * from pytest-timeout."])
    assert gone(
        [
            int((pytester.path / f"rank{rank}").read_text().split()[0])
            for rank in (0, 1)
        ]
    )


PACKAGE = {
    "perf/__init__.py": "",
    "perf/helper.py": "def triple(n): return 3 * n",
    "perf/test_by_name.py": (
        """
import threading, pytest, torch
from perf.helper import triple
GUARD = threading.Lock()
class Net(torch.nn.Linear):
    pass
def module_level(ctx, net):
    with GUARD:
        assert isinstance(net, Net)
        return triple(ctx.rank), __name__
def test_by_name(ddp_run):
    assert ddp_run(module_level, Net(2, 2)) == [(0, __name__), (3, __name__)]
def test_closure(ddp_run, value, tmp_path, monkeypatch):
    monkeypatch.setenv("SEEN", "yes")
    def function(ctx):
        import os
        with GUARD:
            (tmp_path / str(ctx.rank)).touch()
            return value.number, os.environ["SEEN"], Net(1, 1).bias is not None
    assert ddp_run(function) == [(5, "yes", True)] * 2
    assert len(list(tmp_path.iterdir())) == 2
def test_assert_shows_values(ddp_run):
    def function(ctx):
        found = [1, ctx.rank]
        assert found == [1, 2]
    ddp_run(function)
@pytest.mark.parametrize("factor", [2, 3])
def test_parametrised(ddp_run, factor):
    assert ddp_run(lambda ctx: factor * ctx.rank) == [0, factor]
def test_fails_after_its_ranks(ddp_run):
    assert ddp_run(lambda ctx: print(f"{ctx.rank} is here")) == []
"""
    ),
    "conftest.py": (
        """
import pytest
class Value:
    number = 5
@pytest.fixture
def value():
    return Value()
"""
    ),
}


@pytest.mark.parametrize("mode", ["prepend", "importlib"])
def test_code_travels_under_every_import_mode(
    pytester: pytest.Pytester, run: Run, mode: str
) -> None:
    for name, text in PACKAGE.items():
        file = Path(pytester.path, name)
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    result = run(f"--import-mode={mode}")
    result.assert_outcomes(passed=4, failed=2)
    result.stdout.fnmatch_lines(
        [
            "rank ? failed in the function: AssertionError: assert ?1, ?? == ?1, 2?",
            "*Captured stdout rank 0 call*",
            "0 is here",
            "*Captured stdout rank 1 call*",
            "1 is here",
        ]
    )


@pytest.mark.parametrize("folder", [".", "perf", "tests/perf"])
def test_relative_imports_work_without_the_folder_on_the_path(
    pytester: pytest.Pytester, run: Run, folder: str
) -> None:
    path = pytester.path / folder / "steps"
    path.mkdir(parents=True)
    (path / "__init__.py").write_text("NUMBER = 3\n")
    (path / "helper.py").write_text(
        "from . import NUMBER\ndef number(ctx): return NUMBER\n"
    )
    (path / "test_steps.py").write_text(
        "from .helper import number\ndef test_by_name(ddp_run): assert ddp_run(number) == [3, 3]\n"
        "def test_closure(ddp_run): assert ddp_run(lambda ctx: number(ctx)) == [3, 3]\n"
    )
    run("--import-mode=importlib").assert_outcomes(passed=2)


def test_a_disabled_run_takes_no_locks(
    pytester: pytest.Pytester, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Path] = []
    monkeypatch.delenv(placement.SWITCH)
    monkeypatch.setattr(
        placement,
        "_locked",
        lambda path, waiting: nullcontext(taken.append(path)),
    )
    pytester.makepyfile(test_one=ONE)
    run("--ddp-disable").assert_outcomes(passed=1)
    assert taken == []
    run().assert_outcomes(passed=1)
    assert taken


DEBUGGED = """
def test_gate(ddp_benchmark):
    ddp_benchmark(lambda ctx: lambda: None)

def test_gate_of_a_collective(collective_benchmark):
    collective_benchmark("all_reduce", [64])

def test_launch(ddp_benchmark):
    ddp_benchmark(lambda ctx: 1 / 0)

def test_launch_of_a_collective(collective_benchmark):
    collective_benchmark("all_reduce", [64], dtype="float7_is_none_of_8_bits")

def test_call(ddp_run):
    ddp_run(lambda ctx: 1 / 0)

def test_backend(ddp_run):
    ddp_run(print)
test_backend.pytestmark = [__import__("pytest").mark.ddp(backend="glo")]
"""


def test_a_debugger_opens_in_the_frame_of_the_test(
    pytester: pytest.Pytester, run: Run
) -> None:
    pytester.makepyfile(test_debugged=DEBUGGED)
    command = [
        sys.executable,
        "-m",
        "pytest",
        *SMALL,
        "-p",
        "no:randomly",
        "-p",
        "no:cacheprovider",
        "--pdb",
    ]
    result = pytester.run(
        *command, "--ddp-fail-on=no-baseline", timeout=600, stdin=b"w\nc\n" * 6
    )
    result.assert_outcomes(failed=6)
    frames = re.findall(
        r"^> (.*)\(\d+\)(\w+)\(\)", result.stdout.str(), re.MULTILINE
    )
    tests = re.findall(r"def (test_\w+)", DEBUGGED)
    assert [name for _, name in frames] == [
        name for name in tests for _ in (1, 2)
    ]


def test_tests_may_be_collected_twice(
    pytester: pytest.Pytester, run: Run
) -> None:
    """As xdist's --looponfail does it, where a red test is gone."""
    pytester.makeconftest(
        """
        import pytest

        @pytest.hookimpl(tryfirst=True)
        def pytest_collection(session):
            try:
                raise pytest.UsageError("a red test is gone")
            except pytest.UsageError:
                session.perform_collect()
            session.config.hook.pytest_collection_finish(session=session)
            return True
        """
    )
    pytester.makepyfile(
        """
        def test_ranks(ddp_run):
            assert ddp_run(lambda ctx: ctx.rank) == [0, 1]
        """
    )
    result = run("--ddp-threshold=p99:10%")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["ddpperf: 2 ranks over gloo *"])
    result = run("--ddp-world-size=2", "--ddp-backend=nonesuch")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
