"""`ddpperf init`: a first test, and a recipe for CI."""

import argparse
import os
from pathlib import Path
from typing import Any

from pytest_ddpperf.cli import console

# By service, the files of a recipe with their paths from the top of a project.
_RECIPES = Path(__file__).with_name("recipes")
# What starts a job by hand, where the machine of the call has no devices.
_COMMANDS = {
    "kubernetes": "kubectl replace --force -f perf-job.yaml",
    "slurm": "sbatch --wait perf.sbatch",
}

_TESTS = Path("tests/perf")
_FIRST_TEST = '''\
"""How long a training step takes, on real ranks: python -m pytest tests/perf

This test builds the step itself. To time a program as it is:
- a program that torchrun starts, or could start (its launcher only sets RANK and the like):
  ddp_benchmark.script("train.py", args=["--lr=0.1"])
- one whose launcher sets variables with other names: set them in a function, and call
  ddp_benchmark.loop(main)
- one that only its own launcher can start; this takes much longer to compare:
  ddp_benchmark.command(["python", "launch.py"])
The page "Programs that own their loop" of the documentation describes them.
"""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def test_train_step(ddp_benchmark):
    def setup(ctx):  # runs in every rank, in an initialized process group
        # adapt: your model, optimizer and batch
        layers = [torch.nn.Linear(256, 256) for _ in range(4)]
        model = DDP(torch.nn.Sequential(*layers).to(ctx.device))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        batch = torch.randn(32, 256, device=ctx.device)

        def step():  # what is timed
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()

        return step

    ddp_benchmark(setup, batch_size=32)  # examples per rank and step
'''


def add_parser(subparsers: Any) -> None:
    """Add `init`."""
    parser = subparsers.add_parser(
        "init",
        help="write a first test and a recipe for CI",
        description=(
            f"Write a first test to {_TESTS}, unless that has some, and the recipe of a CI service."
            " Files that exist stay as they are."
        ),
    )
    parser.add_argument(
        "--ci",
        choices=sorted(os.listdir(_RECIPES)),
        help="also write the files for this service",
    )
    parser.set_defaults(run=_init)


def _init(arguments: argparse.Namespace) -> int:
    contents: dict[Path, str] = {}
    lines = []
    if any(_TESTS.rglob("test_*.py")) or any(_TESTS.rglob("*_test.py")):
        lines.append(f"kept   {_TESTS}: it has tests")
    else:
        contents[_TESTS / "test_train_step.py"] = _FIRST_TEST
    if arguments.ci is not None:
        recipe = _RECIPES / arguments.ci
        for file in sorted(filter(Path.is_file, recipe.rglob("*"))):
            contents[file.relative_to(recipe)] = file.read_text("utf-8")
    for path, content in contents.items():
        if os.path.lexists(path):
            same = path.is_file() and path.read_bytes() == content.encode()
            but = "" if same else ", with other content"
            lines.append(f"kept   {path}: it exists{but}")
        else:
            console.write(path, content)
            lines.append(f"wrote  {path}")
    if arguments.ci is not None and not os.path.lexists(".git"):
        lines.append("note   services read this at the top of a git repository")
    command = _COMMANDS.get(arguments.ci, f"python -m pytest {_TESTS}")
    lines.append(f"next   change what is marked `adapt`, then: {command}")
    console.say(lines)
    return console.OK
