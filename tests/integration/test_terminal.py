"""What a user sees: the header, the table, the ranks' output, progress; and what pytest does not
import."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.integration.conftest import SMALL, STEP, Run, line
from tests.processes import descendants, ended, gone, on_terminal, until

TALKING = (
    STEP
    + """
def test_talks(ddp_benchmark):
    def setup(ctx):
        for _ in range(int(os.environ.get("LINES_WRITTEN", "1"))):
            print("hello from", ctx.rank)
        return lasting(ctx)
    ddp_benchmark(setup, batch_size=4)
    if "FAIL" in os.environ:
        assert False
"""
)


def test_header_table_and_details(pytester: pytest.Pytester, run: Run) -> None:
    pytester.makepyfile(test_talks=TALKING)
    result = run("-v")
    result.stdout.fnmatch_lines(
        [
            "ddpperf: torch *, Python *; *",
            "ddpperf: 2 ranks over gloo (auto: *",
            "* ranks * p50 * verdict",
            "test_talks.py::test_talks * 2 gloo * ms *NO BASELINE",
            "  sec/iter * p50 * ex/sec * p75 * ex/sec * p90 * ex/sec * p95 * ex/sec * CPU p50",
            "  all *",
            "  rank 0 *",
            "  rank 1 *",
            (
                "  cost: 3 launches, * s; a launch (median): start *, group *, setup *, warmup *,"
                " steps *"
            ),
        ]
    )
    # no progress where nobody watches
    assert "\x1b7" not in result.stdout.str()
    assert "hello" not in result.stdout.str()


def test_output_of_ranks(
    pytester: pytest.Pytester, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(test_talks=TALKING)
    result = run("-s")
    assert sorted(
        re.findall(r"\[rank \d\] hello from \d", result.stdout.str())
    ) == sorted(
        f"[rank {rank}] hello from {rank}" for rank in (0, 1) for _ in range(3)
    )
    monkeypatch.setenv("FAIL", "1")
    result = run("-v")
    result.stdout.fnmatch_lines(
        [
            "*Captured stdout rank 0 call*",
            "hello from 0",
            "*Captured stdout rank 1 call*",
        ],
        consecutive=True,
    )
    assert "hello from 0" not in run("--show-capture=no").stdout.str()
    monkeypatch.setenv("LINES_WRITTEN", "1000")
    result = run()
    result.stdout.fnmatch_lines(
        [
            "*Captured stdout rank 1 call*",
            "(of the last launch, at most 25 lines: -v shows more)",
            "hello from 1",
        ],
        consecutive=True,
    )
    assert result.outlines.count("hello from 1") == 25
    assert run("-v").outlines.count("hello from 1") == 1000


IMPORTED = """
import sys
def pytest_unconfigure(config):
    print("torch imported:", "torch" in sys.modules, "launch imported:", "pytest_ddpperf.launch" in sys.modules)
"""


def test_pytest_without_distributed_tests_does_not_import_what_launches(
    pytester: pytest.Pytester, run: Run
) -> None:
    pytester.makeconftest(IMPORTED)
    pytester.makepyfile("def test_b(): pass")
    assert (
        line(run(own=True), "torch imported:")
        == "torch imported: False launch imported: False"
    )


def test_progress_on_a_terminal_of_a_pytest_that_warns_of_nothing_and_never_imports_torch(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CI", raising=False)
    pytester.makeconftest(IMPORTED)
    pytester.makepyfile(
        test_slow="""
import time
import pytest
@pytest.mark.parametrize("number", [1, 2])
def test_slow(ddp_benchmark, number): ddp_benchmark(lambda ctx: lambda: time.sleep(0.03))
"""
    )
    # More seconds than there is room for: 6,000 steps of 2 ranks in 80 launches.
    asked = (
        "-Werror",
        "--ddp-launches=2",
        "--ddp-min-time=1000",
        "--ddp-max-launches=80",
    )
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    status, reported = on_terminal(
        "-p", "no:randomly", "-p", "no:benchmark", *asked
    )
    assert status == 0
    assert re.search(
        r"test 1/2, launch 2/2, step \d+/37, p50 so far \S+ ms", reported
    )
    assert re.search(r"test 2/2, launch 1/2, step \d+/37", reported)
    assert re.search(
        r"test 2/2, launch 2/2, step \d+/37, p50 so far \S+ ms", reported
    )
    assert "torch imported: False launch imported: True" in reported


HANGING = (
    STEP
    + """
def test_first(ddp_benchmark):
    ddp_benchmark(lasting)
def test_hangs(ddp_run):
    def function(ctx):
        open(f"rank{ctx.rank}", "w").close()
        time.sleep(3600)
    ddp_run(function)
"""
)


def test_the_end_of_pytest_is_the_end_of_its_ranks(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it is killed. test_against.py has the other signals."""
    monkeypatch.delenv("CI", raising=False)
    pytester.makepyfile(test_hanging=HANGING)
    tmp = pytester.mkdir("tmp")
    pytest_itself = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:randomly",
            "-p",
            "no:benchmark",
            *SMALL,
        ],
        env={**os.environ, "TMPDIR": str(tmp)},
        stdout=subprocess.DEVNULL,
        cwd=pytester.path,
    )
    with ended(pytest_itself) as process:
        until(
            lambda: (
                process.poll() is not None
                or len(list(pytester.path.glob("rank?"))) == 2
            )
        )
        assert process.poll() is None
        started = descendants(process.pid)
        assert len(started) == 4, "a template, a rank server, two ranks"
        process.kill()
        process.wait(600)
    until(lambda: gone(started))
    assert list(tmp.glob("ddpperf-*")) == []
