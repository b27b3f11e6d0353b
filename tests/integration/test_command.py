"""Commands that bring their own launcher, in whole runs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.git import git
from tests.integration.conftest import FEW, Run, last_line, report_of
from tests.processes import descendants, ended, gone, until

# Writes a rate of RATE tokens a second, with a little noise, after SECONDS.
TRAIN = """
import random, time
time.sleep(SECONDS)
rate = RATE * random.uniform(0.999, 1.001)
print(f"step: 10  loss: 2.31  tps: {rate:,.0f}")
"""
# A launcher: it starts the program in a process of its own.
LAUNCH = 'exec python "$@"\n'
TEST = """
import pytest
from pytest_ddpperf import Figure

TPS = Figure(pattern=r"tps: ([\\d,.]+)", better="higher")

MARK
def test_train(ddp_benchmark):
    CALL
"""
CALL = 'ddp_benchmark.command(["sh", "launch.sh", "train.py"], figures={"tps": TPS})'
# Wall times are real ones: a limit that nothing exceeds.
WIDE = ("--ddp-threshold=wall:9900%,tps:10%", *FEW)


def write_test(folder: Path, call: str = CALL, mark: str = "") -> None:
    text = TEST.replace("CALL", call).replace("MARK", mark)
    (folder / "tests/test_train.py").write_text(text)


def write_program(
    folder: Path, seconds: float = 0.01, rate: float = 10_000
) -> None:
    text = TRAIN.replace("SECONDS", str(seconds)).replace("RATE", str(rate))
    (folder / "train.py").write_text(text)


@pytest.fixture
def folder(pytester: pytest.Pytester) -> Path:
    """A repository with a program, its launcher, and its test in a folder of tests."""
    folder = pytester.path
    (folder / "tests").mkdir()
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / ".gitignore").write_text("__pycache__\nbaselines\n*.json\n")
    (folder / "launch.sh").write_text(LAUNCH)
    write_program(folder)
    write_test(folder)
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "-m", "a commit")
    return folder


def test_a_command_is_judged_by_its_figures_against_a_stored_baseline(
    run: Run, folder: Path
) -> None:
    run("--ddp-save-baseline", *WIDE).assert_outcomes(passed=1)
    (path,) = (folder / "baselines").rglob("*.json")
    (session,) = json.loads(path.read_text())["sessions"]
    environment = session["measurement"]["environment"]
    names = {"world_size", "backend", "cores_per_rank", "nodes", "pinned"}
    assert not names & environment["key"].keys()
    assert "-ws" not in path.parts[-4]
    assert environment["must_match"]["program"] == "sh launch.sh train.py"
    samples = session["measurement"]["samples"]
    assert set(map(len, samples["step_seconds"])) == {1}
    assert not any(samples["rank_seconds"])
    assert samples["page_faults"] is None

    result = run("--ddp-json=all.json", "-v", *WIDE)
    assert last_line(result) == (
        "compared with baselines: 1 passed (1 of 1 compared)"
    )
    result.stdout.fnmatch_lines(
        [
            "*test_train.py::test_train *command * PASS",
            "*  wall: * by launch",
            "*test_train: a command is timed as a whole: steps, phases, counters and device time"
            " are unknown (*)",
        ]
    )
    (measured,) = json.loads((folder / "all.json").read_text())["measurements"]
    assert {limit["metric"] for limit in measured["limits"]} == {"wall", "tps"}
    assert measured["percentile_seconds"] == {}
    assert measured["plan"]["command"] is True

    write_program(folder, rate=5_000)
    result = run("--ddp-html=page.html", *WIDE)
    result.assert_outcomes(failed=1)
    page = (folder / "page.html").read_text()
    assert "Launches in the order they were taken, wall" in page
    assert "Ranks&#39; own steps" not in page
    assert "Step times" not in page
    result.stdout.re_match_lines([r"REGRESSED: tps [\d,]+ -> .*\(limit 10 %\)"])


def test_a_slower_command_is_found_next_to_its_last_commit(
    run: Run, folder: Path
) -> None:
    # far longer than the start of the program, also on a busy machine
    write_program(folder, seconds=6)
    result = run("--ddp-against=HEAD", "--ddp-threshold=wall:100%", *FEW)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "REGRESSED: wall * (limit 100 %)",
            "why: *changed: train.py",
            "measured: ? interleaved launches of each side*",
        ]
    )


def test_both_sides_run_in_their_own_trees_one_after_the_other(
    run: Run, folder: Path, tmp_path: Path
) -> None:
    (folder / "package.py").write_text("SIDE = 'before'\n")
    # It would fail if another launch were alive.
    (folder / "train.py").write_text(
        "import os, sys, time\n"
        # as an editable install does
        f"sys.path.insert(0, {str(folder)!r})\n"
        "import package\n"
        f"os.mkdir({str(tmp_path / 'alive')!r})\n"
        "time.sleep(0.1)\n"
        f"with open({str(tmp_path / 'log')!r}, 'a') as log:\n"
        "    print(package.SIDE, os.environ['OWN'], 'RANK' in os.environ, file=log)\n"
        f"os.rmdir({str(tmp_path / 'alive')!r})\n"
    )
    write_test(
        folder,
        'ddp_benchmark.command(["python", "train.py"], env={"OWN": "mine", "PYTHONPATH": "own"})',
    )
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "-m", "another commit")
    (folder / "package.py").write_text("SIDE = 'now'\n")
    result = run("--ddp-against=HEAD", *WIDE)
    result.assert_outcomes(passed=1)
    lines = (tmp_path / "log").read_text().splitlines()
    assert sorted(set(lines)) == ["before mine False", "now mine False"]
    assert (
        lines.count("now mine False") == lines.count("before mine False") >= 2
    )


def test_a_file_that_both_sides_would_have_from_the_working_tree_is_refused(
    run: Run, folder: Path
) -> None:
    (folder / "train.py").rename(folder / "tests/train.py")
    write_test(folder, 'ddp_benchmark.command(["python", "tests/train.py"])')
    result = run("--ddp-against=HEAD")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*tests/train.py is in a folder of tests, which both sides have from*"]
    )


# Programs that fail: what is said of each, and its output.
FAILING = [
    (
        "import sys; print('out of', 'memory'); sys.exit(3)",
        "launch 1 of 2: command failed: exited with status 3",
        "out of memory",
    ),
    (
        "import os; os.write(2, b'the end'); os.kill(os.getpid(), 11)",
        "launch 1 of 2: command failed: was killed by SIGSEGV",
        "the end",
    ),
    (
        "print('no', 'figure')",
        "launch 1 of 2: command failed: tps has no value: pattern * matches nothing in the"
        " output",
        "no figure",
    ),
    (
        "import time; print('it', 'hangs', flush=True); time.sleep(3600)",
        "launch 1 of 2: command failed: did not end within 3 s (@pytest.mark.ddp(timeout=*))",
        "it hangs",
    ),
]


def test_each_command_that_fails_is_red_with_the_end_of_its_output(
    run: Run, folder: Path
) -> None:
    tests = []
    for number, (program, _, _) in enumerate(FAILING):
        (folder / f"fails_{number}.py").write_text(program)
        seconds = 3 if "hangs" in program else 300
        mark = f"@pytest.mark.ddp(timeout={seconds})"
        call = CALL.replace("train.py", f"fails_{number}.py")
        test = TEST.replace("CALL", call).replace("MARK", mark)
        tests.append(test.replace("test_train", f"test_{number}"))
    (folder / "tests/test_train.py").write_text("".join(tests))
    result = run(*WIDE)
    result.assert_outcomes(failed=len(FAILING))
    for number, (_, said, output) in enumerate(FAILING):
        lines = report_of(result, f"test_{number}")
        lines.fnmatch_lines([said, f"*{output}*"])
    result.stdout.no_fnmatch_line("*subprocess.py*")


# Calls with a mistake, their marks, and what is said of each.
MISTAKES = [
    (
        'command(["gone", "train.py"])',
        "",
        "*gone cannot be started: No such*",
    ),
    (
        'command("sh launch.sh")',
        "",
        "*command('sh launch.sh'): give a list, each word for itself: *",
    ),
    ("command([])", "", "*give a list, each word for itself: *"),
    (
        'command(["sh"], cwd="gone")',
        "",
        "*command(cwd='gone'): give the path of a folder, from rootdir",
    ),
    (
        'command(["sh"], env=["A"])',
        "",
        "*command(env=...): give a dict of texts",
    ),
    (
        'command(["sh", "-c", "true"])',
        "@pytest.mark.ddp(threshold='p10:5%')",
        "*threshold=...): p10:5%: a launch of a command has one wall time, and its steps*",
    ),
]


def test_each_mistake_fails_its_test_with_its_reason(
    run: Run, folder: Path
) -> None:
    tests = []
    for number, (call, mark, _) in enumerate(MISTAKES):
        test = TEST.replace("CALL", f"ddp_benchmark.{call}")
        test = test.replace("MARK", mark)
        tests.append(test.replace("test_train", f"test_{number}"))
    (folder / "tests/test_train.py").write_text("".join(tests))
    result = run()
    result.assert_outcomes(failed=len(MISTAKES))
    for number, (_, _, said) in enumerate(MISTAKES):
        report_of(result, f"test_{number}").fnmatch_lines([said])


def test_a_command_runs_once_if_disabled_and_with_one_of_several_world_sizes(
    run: Run, folder: Path
) -> None:
    with (folder / "train.py").open("a") as program:
        program.write("open('runs', 'a').write('.')\n")
    result = run("--ddp-disable", "--ddp-world-size=1,2", "-rs")
    result.assert_outcomes(passed=1, skipped=1)
    result.stdout.fnmatch_lines(
        ["*a command starts its own ranks: measured as ws1 only"]
    )
    assert (folder / "runs").read_text() == "."


# Its grandchild leaves the session, and closes its output.
LEAVES = '''
import os, subprocess, sys, time
child = """
import os, time
with open("new", "w") as file:
    print(os.getpid(), file=file)
os.rename("new", "child")
time.sleep(3600)
"""
daemon = [sys.executable, "-c", child]
subprocess.Popen(daemon, start_new_session=True, stdout=-3, stderr=-3)
while not os.path.exists("child"):
    time.sleep(0.01)
'''


def test_what_a_command_leaves_behind_ends_with_its_launch(
    run: Run, folder: Path
) -> None:
    (folder / "train.py").write_text(f"{LEAVES}\nprint('tps: 3')\n")
    result = run("--ddp-disable")
    result.assert_outcomes(passed=1)
    assert gone([int((folder / "child").read_text())])


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_the_end_of_pytest_is_the_end_of_what_a_command_started(
    folder: Path, temporary: Path, signum: signal.Signals
) -> None:
    (folder / "train.py").write_text(f"{LEAVES}\ntime.sleep(3600)\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"],
        cwd=folder,
        # who starts tests in the background may ignore it
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.default_int_handler
        ),
    )
    with ended(process):
        until(lambda: process.poll() is not None or (folder / "child").exists())
        started = descendants(process.pid)
        assert len(started) >= 5, "template, server, rank, command, its child"
        process.send_signal(signum)
        process.wait(600)
    until(lambda: gone(started))
