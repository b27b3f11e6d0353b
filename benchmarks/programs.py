"""Are programs that own their loop timed as well as a step is? Whole runs of pytest on the recipes of the docs.

    python benchmarks/programs.py [--runs 3] [--slower 0.15] [--results programs.jsonl]

"same": one training step, timed as a step, as a loop and as a script, in turns; the ratio of p50 of each to that of the
step, as the median over runs with its quartiles. "slower": examples/programs (a script, transformers, Lightning,
Accelerate), each next to its last commit (--ddp-against HEAD), where each update takes longer by a share of p50, and
where nothing has changed but a comment. Each measurement is a line of the results file, and a run goes on where the
last one ended.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from _common import done, progress, quartiles, table

EXAMPLES = Path(__file__).parents[1] / "examples/programs"
OPTIONS = ("-q", "-p", "no:randomly", "-p", "no:cacheprovider", "-p", "no:benchmark", "--ddp-backend=gloo")
TRAIN = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def make_step():
    torch.manual_seed(0)
    model = DDP(torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8))))
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.01), torch.randn(64, 256)

    def step():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def train():
    dist.init_process_group("gloo")
    step = make_step()
    while True:
        step()


if __name__ == "__main__":
    train()
"""
TEST = """
from train import make_step, train


def test_step(ddp_benchmark):
    ddp_benchmark(lambda ctx: make_step())


def test_loop(ddp_benchmark):
    ddp_benchmark.loop(lambda ctx: train())


def test_script(ddp_benchmark):
    ddp_benchmark.script("train.py")
"""
# Of every optimizer's update.
SLOWER = """
import time

from torch.optim.optimizer import register_optimizer_step_pre_hook

SECONDS = {seconds}


def busy(*_):
    until = time.perf_counter() + SECONDS
    while time.perf_counter() < until:
        pass


register_optimizer_step_pre_hook(busy)
"""
Row = dict[str, Any]  # of the results file


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--slower", type=float, default=0.15)
    parser.add_argument("--results", type=Path, default=Path("programs.jsonl"), help="file to go on with")
    options = parser.parse_args()
    rows = done(options.results)
    with tempfile.TemporaryDirectory() as folder, options.results.open("a") as file:
        for row in measurements(Path(folder), rows, options.runs, options.slower):
            rows.append(row)
            file.write(json.dumps(row) + "\n")
            file.flush()
            progress(len(rows), options.runs * (3 + 2 * len(TESTS)), "measurements")
    print(table([["same step", "p50 / the step's", "quartiles"], *same(rows)]))
    print(table([["program", "slower by", "runs", "REGRESSED", "PASS", "INCONCLUSIVE", "detectable"], *slower(rows)]))
    return 0


def measurements(folder: Path, rows: Sequence[Row], runs: int, share: float) -> Iterator[Row]:
    """Yield those that are missing."""
    plain = folder / "plain"
    plain.mkdir()
    (plain / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    (plain / "train.py").write_text(TRAIN)
    (plain / "test_train.py").write_text(TEST)
    for _ in range(sum(row["part"] == "same" for row in rows) // 3, runs):
        for measured in pytest(plain, "--ddp-baseline-missing=warn"):
            yield {"part": "same", "test": name_of(measured), "p50": p50(measured["measurement"])}
    project = folder / "project"
    make(project)
    for test in TESTS:
        have = [row for row in rows if row["part"] == "slower" and row["test"] == test]
        if len(have) >= 2 * runs:
            continue
        plant(project, 0.0)
        usual = p50(pytest(project, "--ddp-baseline-missing=warn", test=test)[0]["measurement"])
        for _ in range(len(have) // 2, runs):
            for change in (0.0, share):
                plant(project, change * usual)
                (measured,) = pytest(project, "--ddp-against=HEAD", test=test)
                status = measured["verdict"]["status"] if measured["verdict"] else measured["error"]
                comparisons = measured["verdict"]["comparisons"] if measured["verdict"] else []
                found = {c["limit"]["metric"]: c["resolution"] for c in comparisons}
                yield {"part": "slower", "test": test, "change": change, "status": status, "resolution": found}


TESTS = (
    *("test_script", "test_transformers[1]", "test_transformers[4]", "test_lightning[True]", "test_lightning[False]"),
    "test_accelerate",
)


def make(project: Path) -> None:
    """A repository with the recipes, which import `slower` before they train."""
    shutil.copytree(EXAMPLES, project)
    (project / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    (project / ".gitignore").write_text("__pycache__/\n")
    train, tests = project / "train.py", project / "tests/test_programs.py"
    train.write_text(train.read_text().replace("import argparse\n", "import argparse\nimport slower\n"))
    main_of_test = "def main(ctx: Any) -> None:\n"
    tests.write_text(tests.read_text().replace(main_of_test, f"{main_of_test}        import slower\n"))
    plant(project, 0.0)
    identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    for command in (("init", "--quiet"), ("add", "--all"), (*identity, "commit", "--quiet", "-m", "A commit")):
        subprocess.run(["git", "-C", project, *command], check=True, capture_output=True)


def plant(project: Path, seconds: float) -> None:
    # --ddp-against refuses to compare two trees that are the same.
    (project / "slower.py").write_text(f"{SLOWER.format(seconds=seconds)}\n# {time.time()}\n")


def pytest(project: Path, *arguments: str, test: str = "") -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        tests = [f"tests/test_programs.py::{test}"] if test else []
        command = [Path(sys.executable).with_name("pytest"), *OPTIONS, f"--ddp-json={report}", *arguments, *tests]
        environ = {name: value for name, value in os.environ.items() if name != "CI"}
        ended = subprocess.run(command, cwd=project, env=environ, capture_output=True, text=True)
        measured = list(json.loads(report.read_text())["measurements"]) if report.exists() else []
        if not measured or any(each["measurement"] is None for each in measured):
            raise SystemExit(ended.stdout + ended.stderr)
        return measured


def name_of(measured: Row) -> str:
    return str(measured["test"]["name"])


def p50(measurement: Row) -> float:
    launches = measurement["samples"]["step_seconds"]
    return quartiles([quartiles(launch).median for launch in launches]).median


def same(rows: Sequence[Row]) -> Iterator[list[str]]:
    taken = {
        test: [row["p50"] for row in rows if row["part"] == "same" and row["test"] == test]
        for test in ("test_step", "test_loop", "test_script")
    }
    for test in ("test_loop", "test_script"):
        ratios = [other / step for other, step in zip(taken[test], taken["test_step"], strict=False)]
        if ratios:
            first, median, third = quartiles(ratios)
            yield [test, f"{median:.3f}", f"{first:.3f} to {third:.3f}"]


def slower(rows: Sequence[Row]) -> Iterator[list[str]]:
    for test in TESTS:
        for change in sorted({row["change"] for row in rows if row["part"] == "slower"}):
            chosen = [row for row in rows if row["part"] == "slower" and (row["test"], row["change"]) == (test, change)]
            if chosen:
                counts = [
                    str(sum(row["status"] == status for row in chosen))
                    for status in ("REGRESSED", "PASS", "INCONCLUSIVE")
                ]
                found = [row["resolution"]["p10"] for row in chosen if row["resolution"].get("p10") is not None]
                detectable = f"{quartiles(found).median:.1%}" if found else "-"
                yield [test, f"{change:.0%}", str(len(chosen)), *counts, detectable]


if __name__ == "__main__":
    sys.exit(main())
