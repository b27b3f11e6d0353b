"""Record what the documentation shows of runs: a report and pictures of it, and a history.

    .venv/bin/python docs/record.py             # measure one run, a minute on two cores, and draw
    .venv/bin/python docs/record.py history     # measure commit after commit: some minutes
    .venv/bin/python docs/record.py pictures    # draw what was measured before

A small project of its own is measured against its main branch, on which its last commit made
training slower. What pytest printed and reported is kept in docs/sample/; docs/pictures/ is drawn
from that. Of the same project's commits, one of which makes training slower, a history is kept
there, too. The extra `docs` is needed, and Chromium for the picture of the page.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image
from rich.console import Console
from rich.text import Text

from pytest_ddpperf import suite
from pytest_ddpperf.git import git, outside_of_hooks

DOCS = Path(__file__).resolve().parent
REPORT = DOCS / "sample" / "run.json"
OUTPUT = DOCS / "sample" / "output.txt"  # with its colours
HISTORY = DOCS / "sample" / "history"
# measured, a day apart; the first that trains slower
COMMITS, SLOWER_FROM = 20, 14
RED_GATE = DOCS / "pictures" / "red-gate.svg"
PAGE = DOCS / "pictures" / "page.png"
COLUMNS = 100
BROWSERS = ("chromium", "chromium-browser", "google-chrome")

# --- the project

# Few steps and launches, for the report is kept in the repository.
PYTEST_INI = """\
[pytest]
pythonpath = .
addopts = -p no:benchmark -p no:cacheprovider -p no:randomly
ddp_backend = gloo
ddp_device = cpu
ddp_steps = 20
ddp_min_time = 0.3
ddp_launches = 5
ddp_max_launches = 10
"""

TRAIN = '''\
"""How the small GPT is trained."""

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from smallgpt.models import GPT, GPTConfig

CONFIG = GPTConfig(vocabulary=512, context=32, layers=3, width=64)
BATCH_SIZE = 8  # sequences a rank
# DDP gathers gradients in buckets of this size, and sends each with one all-reduce
BUCKET_CAP_MB = 25


def forward(model, device):
    """A function that does one forward pass."""
    text = torch.randint(CONFIG.vocabulary, (BATCH_SIZE, CONFIG.context + 1), device=device)
    tokens, targets = text[:, :-1], text[:, 1:].flatten()  # every token's target is the next one
    return lambda: F.cross_entropy(model(tokens).flatten(0, 1), targets)


def training_step(device):
    """A function that does one step; needs a process group."""
    model = DDP(GPT(CONFIG).to(device), bucket_cap_mb=BUCKET_CAP_MB)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loss = forward(model, device)

    def step():
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return step
'''

TESTS = """\
import torch
from smallgpt.models import GPT
from smallgpt.train import BATCH_SIZE, CONFIG, forward, training_step


def test_train_step(ddp_benchmark):
    def setup(ctx):  # in every rank
        torch.manual_seed(ctx.seed + ctx.rank)
        return training_step(ctx.device)

    ddp_benchmark(setup, batch_size=BATCH_SIZE)


def test_forward(ddp_benchmark):
    def setup(ctx):
        return forward(GPT(CONFIG).to(ctx.device), ctx.device)

    ddp_benchmark(setup, batch_size=BATCH_SIZE)
"""

TRAINED = "smallgpt/train.py"
PROJECT = {
    ".gitignore": "__pycache__/\n",
    "pytest.ini": PYTEST_INI,
    "smallgpt/__init__.py": "",
    "smallgpt/models.py": Path(suite.__file__)
    .with_name("models.py")
    .read_text(),
    TRAINED: TRAIN,
    "tests/perf/test_gpt.py": TESTS,
}
# Less memory, and the forward pass of a block is computed twice.
CHECKPOINTS = {
    TRAINED: (
        TRAIN.replace(
            "import DistributedDataParallel as DDP\n",
            "import DistributedDataParallel as DDP\nfrom torch.utils.checkpoint import"
            " checkpoint\n",
        )
        .replace(
            "    model = DDP(GPT(CONFIG).to(device), ",
            """    gpt = GPT(CONFIG).to(device)
    first = gpt.blocks[0]
    first.forward = partial(checkpoint, first.forward, use_reentrant=False)
    model = DDP(gpt, """,
        )
        .replace(
            "\nimport torch\n",
            "\nfrom functools import partial\n\nimport torch\n",
        )
    )
}
# 50 kB hold few gradients: one all-reduce becomes many.
SMALL_BUCKETS = {
    TRAINED: TRAIN.replace("BUCKET_CAP_MB = 25\n", "BUCKET_CAP_MB = 0.05\n")
}

_SETTINGS = (
    *(
        "user.name=A Colleague",
        "user.email=colleague@example.invalid",
        "commit.gpgSign=false",
    ),
    *("init.defaultBranch=main", f"core.excludesFile={os.devnull}"),
)


def commit(project: Path, message: str, files: dict[str, str]) -> None:
    """Raises GitError."""
    for name, text in files.items():
        path = project / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    in_git(project, "add", "--all")
    in_git(project, "commit", "--quiet", f"--message={message}")


def in_git(project: Path, *arguments: str) -> None:
    git(
        project,
        *(part for setting in _SETTINGS for part in ("-c", setting)),
        *arguments,
    )


def measure() -> None:
    """Keep what pytest prints and reports of the project; a run that is not red is refused."""
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder, "smallgpt")
        project.mkdir()
        in_git(project, "init", "--quiet", "--template=")
        commit(
            project, "A small GPT under DDP, and tests that time it", PROJECT
        )
        in_git(project, "checkout", "--quiet", "-b", "checkpoints")
        commit(
            project, "Checkpoint the first block to lower memory", CHECKPOINTS
        )
        arguments = ["tests/perf", "--ddp-against", "main"]
        environment: dict[str, Any] = {
            **outside_of_hooks(),
            "COLUMNS": str(COLUMNS),
        }
        result = subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                *arguments,
                "--color=yes",
                f"--ddp-json={project / 'run.json'}",
            ],
            cwd=project,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
        )
        print(result.stdout)
        if result.returncode != 1:
            sys.exit(
                f"pytest was to end with status 1, but ended with {result.returncode}"
            )
        printed = result.stdout.replace(str(project), "~/smallgpt")
        REPORT.write_text((project / "run.json").read_text())
        OUTPUT.write_text(f"$ pytest {' '.join(arguments)}\n{printed}")


def measure_history() -> None:
    """Keep what runs of one commit after the other add to a history."""
    shutil.rmtree(HISTORY, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder, "smallgpt")
        project.mkdir()
        in_git(project, "init", "--quiet", "--template=")
        for number in range(COMMITS):
            os.environ["GIT_COMMITTER_DATE"] = (
                f"2026-11-{number + 1:02}T12:00:00+00:00"
            )
            files = (
                PROJECT
                if number == 0
                else {
                    **(SMALL_BUCKETS if number == SLOWER_FROM else {}),
                    "day.txt": f"{number}\n",
                }
            )
            commit(project, f"Commit {number + 1} of {COMMITS}", files)
            tests = [
                "tests/perf/test_gpt.py::test_train_step",
                "tests/perf/test_gpt.py::test_forward",
            ]
            options = [
                "--ddp-baseline-missing=warn",
                f"--ddp-history={HISTORY}",
            ]
            command = [sys.executable, "-m", "pytest", "-q", *tests, *options]
            subprocess.run(
                command, cwd=project, env=outside_of_hooks(), check=True
            )


# --- pictures

# Rich's, without the font that it would fetch.
_SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">
<style>
{styles}
.{unique_id}-matrix {{
  font: {char_height}px "SFMono-Regular", Consolas, "Liberation Mono", Menlo, monospace;
}}
</style>
<defs>{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})">
{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g>
</g>
</svg>
"""


def excerpt(output: str) -> str:
    """Without what every pytest prints first: what is left out is marked."""
    command, rest = output.split("\n", 1)
    _, ours, reported = rest.partition("ddpperf: torch")
    return f"{command}\n...\n{ours}{reported}"


def draw_terminal() -> None:
    console = Console(
        record=True, file=io.StringIO(), width=COLUMNS, force_terminal=True
    )
    console.print(Text.from_ansi(excerpt(OUTPUT.read_text()).rstrip()))
    RED_GATE.write_text(
        console.export_svg(title="", code_format=_SVG, unique_id="t")
    )


def draw_page() -> None:
    """The top of the page of the report, as a browser shows it."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit(
            f"{PAGE.name} was not drawn: none of {', '.join(BROWSERS)} is on PATH"
        )
    with tempfile.TemporaryDirectory() as folder:
        page, shot = Path(folder, "page.html"), Path(folder, "page.png")
        subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest_ddpperf",
                "html",
                str(REPORT),
                "-o",
                str(page),
            ],
            check=True,
        )
        # --no-sandbox: in a container there is no other way.
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--window-size=1000,1255",
        ]
        command = [
            browser,
            *options,
            f"--user-data-dir={folder}/profile",
            f"--screenshot={shot}",
            page.as_uri(),
        ]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        # It has few colours: a palette is a third of the bytes.
        Image.open(shot).convert("RGB").quantize(
            64, dither=Image.Dither.NONE
        ).save(PAGE, optimize=True)


def main() -> None:
    for folder in (REPORT.parent, PAGE.parent):
        folder.mkdir(exist_ok=True)
    if sys.argv[1:] == ["history"]:
        measure_history()
        return
    if sys.argv[1:] != ["pictures"]:
        measure()
    draw_terminal()
    draw_page()


if __name__ == "__main__":
    main()
