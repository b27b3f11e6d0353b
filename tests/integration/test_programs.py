"""Programs that own their loop, in whole runs: as scripts and functions, next to another version,
by the command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.git import git
from tests.integration.conftest import FEW, Run, report_of
from tests.own_clock import OWN_CLOCK
from tests.processes import descendants, ended, gone, until

# A step lasts SECONDS on a clock of its own.
TRAIN = (
    OWN_CLOCK
    + """
import argparse
import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--milliseconds", type=int, default=SECONDS)
milliseconds = parser.parse_args().milliseconds

dist.init_process_group("gloo")
weight = torch.ones(3, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
while True:
    weight.sum().backward()
    dist.all_reduce(weight.grad)
    clock.time.now += milliseconds * 1_000_000
    optimizer.step()
"""
)
TEST = """
def test_train(ddp_benchmark):
    result = ddp_benchmark.script("train.py", args=[{}], batch_size=8)
    assert result.counters["all_reduce.count"] == 1
"""


@pytest.fixture
def folder(pytester: pytest.Pytester) -> Path:
    """A repository with a training script, and its test in a folder of tests."""
    folder = pytester.path
    (folder / "tests").mkdir()
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / ".gitignore").write_text("__pycache__\nbaselines\n*.json\n")
    (folder / "train.py").write_text(TRAIN.replace("SECONDS", "5"))
    (folder / "tests/test_train.py").write_text(TEST.format(""))
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "-m", "a commit")
    return folder


def test_a_script_is_compared_with_its_baseline_and_its_arguments_have_to_match(
    run: Run, folder: Path
) -> None:
    run("--ddp-save-baseline").assert_outcomes(passed=1)
    result = run("--ddp-json=all.json")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*test_train.py::test_train *2 gloo * PASS"])
    (measured,) = json.loads((folder / "all.json").read_text())["measurements"]
    assert (
        measured["measurement"]["environment"]["must_match"]["program"]
        == "train.py"
    )
    assert measured["batch_size"] == 8
    (folder / "tests/test_train.py").write_text(
        TEST.format('"--milliseconds=5"')
    )
    run("-v").stdout.fnmatch_lines(
        ["*program train.py -> train.py --milliseconds=5*"]
    )


def test_a_program_has_its_variables_when_its_libraries_are_imported(
    run: Run, folder: Path
) -> None:
    train = TRAIN.replace("SECONDS", "5").replace(
        "while True:", "assert torch.get_num_threads() == 1\nwhile True:"
    )
    (folder / "train.py").write_text(train)
    test = TEST.format("").replace(
        "args=[]", 'args=[], env={"OMP_NUM_THREADS": "1"}'
    )
    (folder / "tests/test_train.py").write_text(test)
    run().assert_outcomes(passed=1)
    assert "OMP_NUM_THREADS" not in os.environ


def test_a_slower_script_is_found_next_to_its_last_commit(
    run: Run, folder: Path
) -> None:
    (folder / "train.py").write_text(TRAIN.replace("SECONDS", "60"))
    result = run(*FEW, "--ddp-against=HEAD")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["REGRESSED: step time p50 5.00 -> 60.0 ms*", "why: *changed: train.py"]
    )


def test_a_script_that_both_sides_would_have_from_the_working_tree_is_refused(
    run: Run, folder: Path
) -> None:
    (folder / "tests/train.py").write_text(TRAIN.replace("SECONDS", "60"))
    (folder / "tests/test_train.py").write_text(
        TEST.format("").replace("train.py", "tests/train.py")
    )
    (folder / "train.py").unlink()
    result = run("--ddp-against=HEAD")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*tests/train.py is in a folder of tests, which both sides have from the working*"
        ]
    )


# Calls with a mistake, and what is said of each.
MISTAKES = [
    (
        'script("gone.py")',
        "*there is no file *gone.py: paths begin at cwd= or rootdir",
    ),
    (
        'script("-m", "torch.distributed.run", args=["a.py"])',
        "*torch.distributed.run starts ranks itself: give *",
    ),
    (
        'script("-m", "torch.distributed.launch", args=["a.py"])',
        "*torch.distributed.launch starts ranks itself*",
    ),
    (
        'script("-m", "accelerate.commands.launch", args=["a.py"])',
        "*accelerate.commands.launch starts ranks *",
    ),
    (
        f"script({str(Path(sys.executable).with_name('torchrun'))!r}, args=['a.py'])",
        "*torchrun starts ranks itself: *",
    ),
    (
        'script("train.py", args="--typo")',
        "*args='--typo'*: give a list, each argument for itself",
    ),
    (
        'script("train.py", args=["--lr", None])',
        "*args=*None*: give a list, each argument for itself",
    ),
    (
        'script("train.py", args={"--lr": 1})',
        "*args={'--lr': 1}): give a list, each argument for itself",
    ),
    (
        'script("train.py", args=None)',
        "*args=None): give a list, each argument for itself",
    ),
    (
        'script("train.py", cwd=3)',
        "*cwd=3): give the path of a folder, from rootdir",
    ),
    (
        'script("train.py", cwd="gone")',
        "*cwd='gone'): give the path of a folder, from rootdir",
    ),
    ('script("train.py", env=["A=1"])', "*env=...): give a dict of texts"),
    ('script("train.py", env={"A": 1})', "*env=...): give a dict of texts"),
    ('script("-m")', '*give a path, or "-m" and the name of a module; *'),
    (
        'script("-m", pytest)',
        '*give a path, or "-m" and the name of a module; *',
    ),
    (
        'script(["train.py"])',
        '*give a path, or "-m" and the name of a module; *',
    ),
    ('script("train.py", "--typo")', "*its arguments are args=[[]...]"),
    (
        "loop(lambda ctx: 3, boundary=None)",
        '*boundary=None: must be "update", "mark" or "module:function"',
    ),
    (
        'script("train.py", boundary="epoch")',
        '*boundary=*epoch*: must be "update", "mark" or "module:function"',
    ),
    (
        'script("train.py", boundary="__main__:step")',
        '*boundary=*__main__:step*: must be "update", "mark" or "module:function"',
    ),
    (
        'script("train.py", boundary="os:nope")',
        '*: boundary="os:nope" does not exist: nope',
    ),
    (
        'script("train.py", boundary="nowhere:step")',
        """*ModuleNotFoundError: No module named 'nowhere'""",
    ),
    (
        """loop(lambda ctx: 3, boundary="nowhere:step")""",
        """*ModuleNotFoundError: No module named 'nowhere'""",
    ),
    (
        "loop(3)",
        "*main must be a function, not int: main(ctx) trains in a loop of its own",
    ),
    (
        "loop(lambda: 3)",
        "*ddp_benchmark.loop(<lambda>): main is called with ctx, which <lambda> does not take*",
    ),
    (
        "loop(lambda ctx: (yield))",
        "*main returned a value of type generator, which did not run: write it without yield*",
    ),
    (
        'script("train.py", args=["--typo"])',
        "*the program called sys.exit(2) in *: *unrecognized arguments: --typo*",
    ),
]


def test_each_mistake_fails_its_test_with_its_reason(
    run: Run, folder: Path
) -> None:
    tests = [
        f"def test_{number}(ddp_benchmark):\n    ddp_benchmark.{call}\n"
        for number, (call, _) in enumerate(MISTAKES)
    ]
    (folder / "tests/test_train.py").write_text(
        "\n".join(["import pytest", *tests])
    )
    result = run()
    result.assert_outcomes(failed=len(MISTAKES))
    for number, (_, said) in enumerate(MISTAKES):
        report_of(result, f"test_{number}").fnmatch_lines([said])


@pytest.mark.parametrize(
    "command",
    [
        ("run", "train.py"),
        ("bisect", "tests/test_train.py::test_train", "--good=HEAD~1"),
    ],
)
def test_the_end_of_a_command_is_the_end_of_what_it_started(
    folder: Path, temporary: Path, command: list[str]
) -> None:
    (folder / "train.py").write_text(
        "import os, time\nopen('rank' + os.environ['RANK'], 'w')\ntime.sleep(3600)\n"
    )
    git(folder, "commit", "--all", "--quiet", "-m", "another commit")
    environ = {**os.environ, "XDG_CACHE_HOME": str(folder.parent / "cache")}
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest_ddpperf", *command],
        cwd=folder,
        env=environ,
    )
    with ended(process):
        until(
            lambda: (
                process.poll() is not None
                or len(list(folder.glob("rank?"))) == 2
            )
        )
        started = descendants(process.pid)
        assert len(started) >= 5, "pytest, a template, a rank server, two ranks"
        process.kill()
        process.wait(600)
    until(lambda: gone(started))
    # Torch keeps a folder of its own, and locks stay for the next run.
    stays = ("torch", "pytest-ddpperf-locks")
    until(
        lambda: (
            not [
                path
                for path in temporary.iterdir()
                if not path.name.startswith(stays)
            ]
        )
    )


def test_the_command_shows_a_program_and_the_test_that_does_the_same(
    folder: Path, temporary: Path
) -> None:
    environ = {
        name: value for name, value in os.environ.items() if name != "CI"
    }
    command = [
        sys.executable,
        "-m",
        "pytest_ddpperf",
        "run",
        "--world-size=2",
        "train.py",
    ]
    ended = subprocess.run(
        [*command, "--milliseconds=7"],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "0.007" in ended.stdout
    assert ended.stdout.startswith("train.py --milliseconds=7\n")
    timing = "timing train.py --milliseconds=7: it runs several times\n"
    assert ended.stderr == timing
    assert "all_reduce.count 1," in ended.stdout
    assert "there is no baseline" not in ended.stdout
    assert (
        '    ddp_benchmark.script("train.py", args=["--milliseconds=7"])'
        in ended.stdout
    )
    assert not (folder / "baselines").exists()
    ended = subprocess.run(
        [*command[:-2], "--world-size=two", "train.py"],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 4, "an invalid command"
    assert "--ddp-world-size: 'two'" in ended.stdout
    ended = subprocess.run(
        [*command[:-1], "tarin.py"],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
    )
    assert (
        ended.returncode,
        "tarin.py: there is no such file" in ended.stderr,
    ) == (
        4,
        True,
    )
    command[-1:] = ["--", "-m", "train"]
    ended = subprocess.run(
        [*command, "--typo"],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 1
    assert "unrecognized arguments: --typo" in ended.stdout
