"""`make demo`: a small project of its own, whose performance test catches a commit that makes
training slower.

Runs pytest there as a user would, and believes only what pytest's exit status and the report of
`--ddp-json` say. Writes into `.demo` only. Exits 0 only if all acts went as expected.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from textwrap import dedent
from types import FrameType
from typing import Any, NoReturn

from pytest_ddpperf import suite
from pytest_ddpperf.git import GitError, git, outside_of_hooks

DEMO = Path(__file__).resolve().parents[1] / ".demo"
# where pytest draws none, for output goes to a file or a pipe
PROGRESS_SECONDS = 5.0

# --- the project

# Short windows, so that the planted commit, whose steps take many times as long, does not take
# minutes. All else, the limits included, is as by default.
PYTEST_INI = """\
[pytest]
pythonpath = .
addopts = -p no:benchmark -p no:cacheprovider -p no:randomly
ddp_world_size = 2
ddp_backend = gloo
ddp_device = cpu
ddp_min_time = 0.3
"""

TRAIN = '''\
"""How the small GPT is trained."""

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from smallgpt.models import GPT, GPTConfig

CONFIG = GPTConfig(vocabulary=256, context=32, layers=2, width=32)
BATCH_SIZE = 1  # sequences a rank
# DDP gathers gradients in buckets of this size, and sends each with one all-reduce
BUCKET_CAP_MB = 25


def training_step(device):
    """A function that does one step; needs a process group."""
    text = torch.randint(CONFIG.vocabulary, (BATCH_SIZE, CONFIG.context + 1), device=device)
    tokens, targets = text[:, :-1], text[:, 1:].flatten()  # every token's target is the next one
    model = DDP(GPT(CONFIG).to(device), bucket_cap_mb=BUCKET_CAP_MB)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step():
        optimizer.zero_grad()
        F.cross_entropy(model(tokens).flatten(0, 1), targets).backward()
        optimizer.step()

    return step
'''

TEST = """\
import torch
from smallgpt.train import BATCH_SIZE, training_step


def test_train_step(ddp_benchmark):
    def setup(ctx):  # in every rank
        torch.manual_seed(ctx.seed + ctx.rank)
        return training_step(ctx.device)

    ddp_benchmark(setup, batch_size=BATCH_SIZE)
"""

CONFIGURED = "smallgpt/train.py"
PROJECT = {
    ".gitignore": "__pycache__/\n/act*.json\n",
    "pytest.ini": PYTEST_INI,
    "smallgpt/__init__.py": "",
    "smallgpt/models.py": Path(suite.__file__)
    .with_name("models.py")
    .read_text(),
    CONFIGURED: TRAIN,
    "tests/perf/test_train_step.py": TEST,
}
# 30 kB hold a part of the gradients: one all-reduce becomes several.
PLANTED = {
    CONFIGURED: TRAIN.replace("BUCKET_CAP_MB = 25\n", "BUCKET_CAP_MB = 0.03\n")
}

# A user's own settings shall not decide who commits, how, and which files.
GIT_SETTINGS = (
    *(
        "user.name=A Colleague",
        "user.email=colleague@example.invalid",
        "commit.gpgSign=false",
    ),
    *("init.defaultBranch=main", f"core.excludesFile={os.devnull}"),
)

Measurement = dict[str, Any]  # as in the JSON report: docs/json.md


class Surprise(Exception):
    """An act that did not go as expected."""


def in_git(*arguments: str) -> None:
    git(
        DEMO,
        *(part for setting in GIT_SETTINGS for part in ("-c", setting)),
        *arguments,
    )


def commit(message: str, files: dict[str, str] | None = None) -> None:
    """Commit the working tree with these files written into it; raises GitError."""
    for name, text in (files or {}).items():
        path = DEMO / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    in_git("add", "--all")
    in_git("commit", "--quiet", f"--message={message}")
    say(f"$ git commit --message={shlex.quote(message)}")


def make_project() -> None:
    """A repository with one commit, in place of what an earlier demo left; raises GitError."""
    if DEMO.exists():
        shutil.rmtree(DEMO)
    DEMO.mkdir()
    in_git("init", "--quiet", "--template=")
    commit(
        "A small GPT under DDP, and a test that times its training step",
        PROJECT,
    )


# --- pytest


def say(text: str) -> None:
    # before what pytest prints, which shares our standard output
    print(text, flush=True)


def explain(text: str) -> None:
    say(dedent(text).strip())


def headline(text: str) -> None:
    say(
        f"\n\033[1m=== {text}\033[0m\n"
        if sys.stdout.isatty()
        else f"\n=== {text}\n"
    )


def run(command: list[str]) -> int:
    """The exit status of a command in the project; whatever ends us ends it, too."""
    # What pytest is to do is said here, not in the user's environment.
    environment = {
        name: value
        for name, value in outside_of_hooks().items()
        if name != "PYTEST_ADDOPTS"
    }
    began = time.monotonic()
    process = subprocess.Popen(command, cwd=DEMO, env=environment)
    try:
        while True:
            try:
                return process.wait(PROGRESS_SECONDS)
            except subprocess.TimeoutExpired:
                if not sys.stdout.isatty():
                    say(f"  ... {time.monotonic() - began:.0f} s")
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()


def measure(act: int, *options: str) -> tuple[Measurement, int]:
    """Run the project's test, shown to the reader; returns what it measured, and pytest's exit
    status.

    Raises Surprise if pytest ends otherwise than green or red, or if the test was not measured.
    """
    command = ["pytest", *options, f"--ddp-json=act{act}.json"]
    say(f"$ {' '.join(command)}\n")
    status = run([sys.executable, "-u", "-m", *command])
    say("")
    if status not in (0, 1):
        raise Surprise(f"pytest ended with exit status {status} in act {act}")
    try:
        measurements: list[Measurement] = json.loads(
            (DEMO / command[-1].partition("=")[2]).read_text()
        )["measurements"]
    except FileNotFoundError:
        raise Surprise(f"pytest wrote no report in act {act}") from None
    if len(measurements) != 1 or measurements[0]["verdict"] is None:
        raise Surprise(f"the test was not measured in act {act}")
    return measurements[0], status


def expect(measurement: Measurement, status: int, *allowed: str) -> str:
    """The verdict, if it is one of these and pytest's exit status fits it; raises Surprise
    otherwise."""
    verdict, reason = (
        measurement["verdict"]["status"],
        measurement["verdict"]["reason"],
    )
    if verdict not in allowed:
        raise Surprise(
            f"the verdict was to be {' or '.join(allowed)}, but is {verdict} ({reason})"
        )
    if status != (verdict == "REGRESSED"):
        raise Surprise(
            f"pytest ended with exit status {status}, though the verdict is {verdict} ({reason})"
        )
    return str(verdict)


# --- the acts

LET_PASS = {
    "PASS": "the step is not slower than the limits allow",
    "IMPROVED": "the step is faster: the machine is",
    "INCONCLUSIVE": "it looks slower, but this machine is too noisy to say so, or slower itself",
}


def save() -> None:
    headline("Act 1 of 4: save a baseline")
    explain("""
        A measurement has several launches. Each starts two fresh ranks, warms up and times the
        training step. A file below baselines/ keeps the figures for this kind of machine. It is
        committed like code.
    """)
    measurement, status = measure(1, "--ddp-save-baseline")
    expect(measurement, status, "NOT GATED")
    if not measurement["saved"]:
        raise Surprise("no baseline was saved")
    commit("Record a baseline")


def same_code() -> None:
    headline("Act 2 of 4: the same code again must pass")
    measurement, status = measure(2)
    verdict = expect(measurement, status, *LET_PASS)
    say(f"Green, {verdict}: {LET_PASS[verdict]}.")


def planted() -> None:
    headline(
        "Act 3 of 4: a colleague's commit makes training slower, and the test must fail"
    )
    explain("""
        Buckets of 25 MB take memory, so they are made smaller: 0.03 MB, by mistake. One all-reduce
        becomes several. --ddp-against compares with the commit before: launches of both are alive
        at once, and a few steps of each are interleaved.
    """)
    commit("Use smaller gradient buckets to lower memory", PLANTED)
    measurement, status = measure(3, "--ddp-against=HEAD~1")
    expect(measurement, status, "REGRESSED")
    differing = measurement["baseline_side"]["differing"]
    if differing != [CONFIGURED]:
        raise Surprise(
            f"the report was to name {CONFIGURED} as what differs, but names {', '.join(differing)}"
        )
    say(
        "Red, REGRESSED. The line 'why' names the all-reduces and the file that differs,"
        f" {CONFIGURED}."
    )


def stored() -> None:
    headline("Act 4 of 4: the same commit against the stored baseline")
    explain("""
        A stored baseline cannot tell slower code from a slower machine. So a test that looks slower
        is measured again, next to the code of its baseline.
    """)
    measurement, status = measure(4)
    verdict = expect(measurement, status, "REGRESSED", *LET_PASS)
    if verdict != "REGRESSED":
        say(
            f"Not red here, {verdict}: with a baseline of one session, this machine is too noisy."
        )
    elif measurement["stored_verdict"] is not None:
        say(
            "Red, REGRESSED: slower than the baseline's own code, measured just now."
        )
    else:
        say("Red, REGRESSED: slower than the stored baseline.")


def play() -> None:
    """Play all acts. Raises Surprise if one does not go as expected, and GitError if git fails."""
    say(
        "A project of its own in .demo: a small GPT under DDP on two CPU ranks. To repeat a"
        " command, cd there."
    )
    make_project()
    for act in (save, same_code, planted, stored):
        act()


def end(signum: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + signum)


def end_by_signals() -> None:
    """Let Ctrl-C and the like end what was started, too; not those that are ignored, SIGHUP under
    nohup say."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, end)


def main() -> int:
    began = time.monotonic()
    try:
        play()
    except GitError as error:
        say(f"The demo needs git: {error}.")
        return 1
    except Surprise as surprise:
        say(f"\nThe demo did NOT go as expected: {surprise}.")
        say(
            "pytest's output above says more, and so do the reports: .demo/act1.json and so on."
        )
        return 1
    seconds = time.monotonic() - began
    say(
        f"\nAll four acts went as expected, in {seconds:.0f} s. The project and the reports are in"
        " .demo."
    )
    return 0


if __name__ == "__main__":
    end_by_signals()
    sys.exit(main())
