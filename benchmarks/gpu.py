"""Is the plugin right on this machine's GPU? One command for a machine with one; about ten minutes.

    python benchmarks/gpu.py [--results gpu.jsonl]

It asks what only a device can answer: whether the clock is right (kernels of known length, a busy host, side streams),
whether clocks are up when a window begins, whether p50 is that of a bare loop with CUDA events, what counters and
phases say, and how failures end: out of memory, a kernel that asserts or does not end, a rank that never enters a
collective (with two ranks over NCCL on one GPU). Then it compares this code with itself in both ways of
`--ddp-turns`: which one detects smaller changes? The checks are in _gpu.py; the plugin's own GPU tests run as well.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _common import done, table

HERE = Path(__file__).parent
SECONDS = 240  # at most, of a pytest
ITSELF = """
from checks import training

def test_step(ddp_benchmark):
    ddp_benchmark(training)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("gpu.jsonl"), help="file for the figures")
    options = parser.parse_args()
    if not _has_gpu():
        print("this machine has no CUDA device that torch can use")
        return 1
    options.results.unlink(missing_ok=True)
    rows = options.results.resolve()
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder)
        for name, source in {"checks": "_gpu", "test_gpu": "_gpu", "one_gpu": "_one_gpu"}.items():
            (project / f"{name}.py").write_text((HERE / f"{source}.py").read_text())
        (project / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
        (project / "test_itself.py").write_text(ITSELF)
        plain = ("--ddp-world-size=1", "--ddp-backend=nccl")
        _pytest(project, rows, "checks", *plain, "test_gpu.py")
        shared = ("--ddp-world-size=2", "--ddp-backend=nccl", "--ddp-preload=one_gpu")
        _pytest(project, rows, "two ranks on one GPU", *shared, "test_gpu.py", ONE_GPU_RANKS="2")
        for turns in ("launches", "stretches"):
            _compare(project, rows, turns, plain)
        _pytest(HERE.parent, rows, "GPU tests", "-m", "gpu", "tests")
    found = done(rows)
    print(table([["check", "", "figure"], *([row["check"], _word(row["holds"]), row["figure"]] for row in found)]))
    return 0 if all(row["holds"] for row in found) else 1


def _word(holds: bool) -> str:
    return "holds" if holds else "BROKEN"


def _has_gpu() -> bool:
    asked = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", asked]).returncode == 0


def _pytest(top: Path, rows: Path, what: str, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run pytest, and note whether it passed: a check that could not be made is broken."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", "-p", "no:cacheprovider", *arguments]
    environ = {"GPU_ROWS": str(rows), **environ}
    inherited = {name: value for name, value in os.environ.items() if name != "CI"}
    try:
        ended = subprocess.run(
            command, cwd=top, env=inherited | environ, capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired as error:
        ended = subprocess.CompletedProcess(command, 1, str(error.stdout), str(error.stderr))
    if ended.returncode:
        print(ended.stdout[-6000:], ended.stderr[-2000:], sep="\n")
    last = (ended.stdout.strip().splitlines() or ["it wrote nothing"])[-1]
    _note(rows, f"pytest: {what}", ended.returncode == 0, last)
    return ended


def _note(rows: Path, check: str, holds: bool, figure: str) -> None:
    with rows.open("a") as file:
        file.write(json.dumps({"check": check, "holds": holds, "figure": figure}) + "\n")


def _compare(project: Path, rows: Path, turns: str, options: tuple[str, ...]) -> None:
    """Compare the code with itself, and note how small a change that would detect."""
    report = project / f"{turns}.json"
    itself = ("--ddp-against=self", f"--ddp-turns={turns}", f"--ddp-json={report}")
    _pytest(project, rows, f"against itself, {turns}", *options, *itself, "test_itself.py")
    if not report.exists():
        return
    (measured,) = json.loads(report.read_text())["measurements"]
    compared: list[dict[str, Any]] = measured["verdict"]["comparisons"] if measured["verdict"] else []
    detectable = {each["limit"]["metric"]: each["resolution"] for each in compared}
    figure = ", ".join(f"{name} {change:.1%}" for name, change in detectable.items() if change is not None)
    _note(rows, f"smallest detectable change, {turns}", bool(figure), f"{figure}; {measured['seconds']:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
