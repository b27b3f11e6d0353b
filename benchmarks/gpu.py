"""Is the plugin right on this machine's GPUs? One command for a machine with some; about ten
minutes.

    python benchmarks/gpu.py [--parts checks shared ...] [--results gpu.jsonl]

It asks what only a device can answer, in parts:

- `checks`: is the clock right (kernels of known length, a busy host, side streams), is it up when a
  window begins, is p50 that of a bare loop with CUDA events, what do counters and phases say, and
  how do failures end: out of memory, a kernel that asserts or does not end?
- `shared`: the failures again, with two ranks over NCCL on one GPU, and a rank that never enters a
  collective.
- `all`: the same with a rank on each GPU, where there are several.
- `launches`, `stretches`: this code against itself with that `--ddp-turns`. Which one detects
  smaller changes?
- `tests`: the plugin's own GPU tests.

The checks are in _gpu.py. Each row is printed, and added to the file, as soon as its part has
ended.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _common import done, table

HERE = Path(__file__).parent
SECONDS = 400  # at most, of a pytest
ITSELF = """
from checks import training

def test_step(ddp_benchmark):
    ddp_benchmark(training)
"""
ONE_RANK = ("--ddp-world-size=1", "--ddp-backend=nccl")
# The checks are of what is measured, not of how precisely: one launch each, with a short window.
QUICK = (
    "--ddp-backend=nccl",
    "--ddp-launches=1",
    "--ddp-min-time=0.3",
    "test_gpu.py",
)


class Run:
    """The project that is measured, and the file of results."""

    def __init__(self, project: Path, rows: Path, gpus: int) -> None:
        self._project, self._rows, self._gpus = project, rows, gpus
        for name, source in {
            "checks": "_gpu",
            "test_gpu": "_gpu",
            "one_gpu": "_one_gpu",
        }.items():
            (project / f"{name}.py").write_text(
                (HERE / f"{source}.py").read_text()
            )
        (project / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
        (project / "test_itself.py").write_text(ITSELF)
        self.parts: dict[str, Callable[[], object]] = {
            "checks": lambda: self._pytest(
                "checks", "--ddp-world-size=1", *QUICK
            ),
            "shared": self._shared,
            "all": self._all,
            "launches": lambda: self._compare("launches"),
            "stretches": lambda: self._compare("stretches"),
            "tests": lambda: self._pytest(
                "tests",
                "-m",
                "gpu",
                str(HERE.parent / "tests"),
                top=HERE.parent,
            ),
        }

    def take(self, part: str) -> list[dict[str, Any]]:
        """Run a part, and return its rows."""
        before = len(done(self._rows))
        print(f"\n--- {part}", flush=True)
        self.parts[part]()
        rows = done(self._rows)[before:]
        cells = [
            [row["check"], "holds" if row["holds"] else "BROKEN", row["figure"]]
            for row in rows
        ]
        print(table([["check", "", "figure"], *cells]), flush=True)
        return rows

    def _shared(self) -> None:
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
        options = ("--ddp-world-size=2", "--ddp-preload=one_gpu", *QUICK)
        self._pytest(
            "two ranks on one GPU",
            *options,
            GPU_RANKS="2",
            CUDA_VISIBLE_DEVICES=first,
        )

    def _all(self) -> None:
        if self._gpus > 1:
            several = str(self._gpus)
            self._pytest(
                f"{several} GPUs",
                f"--ddp-world-size={several}",
                *QUICK,
                GPU_RANKS=several,
            )

    def _compare(self, turns: str) -> None:
        """Compare the code with itself, and note how small a change that would detect."""
        report = self._project / f"{turns}.json"
        itself = (
            "--ddp-against=self",
            f"--ddp-turns={turns}",
            "--ddp-max-launches=10",
            f"--ddp-json={report}",
        )
        self._pytest(
            f"against itself, {turns}", *ONE_RANK, *itself, "test_itself.py"
        )
        if not report.exists():
            return
        for measured in json.loads(report.read_text())["measurements"]:
            compared: list[dict[str, Any]] = (
                measured["verdict"]["comparisons"]
                if measured["verdict"]
                else []
            )
            detectable = {
                each["limit"]["metric"]: each["resolution"] for each in compared
            }
            figure = ", ".join(
                f"{name} {change:.1%}"
                for name, change in detectable.items()
                if change is not None
            )
            self._note(
                f"smallest detectable change, {turns}",
                bool(figure),
                f"{figure}; {measured['seconds']:.0f} s",
            )

    def _pytest(
        self,
        what: str,
        *arguments: str,
        top: Path | None = None,
        **environ: str,
    ) -> None:
        """Run pytest, and note whether it passed: a check that could not be made is broken."""
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:randomly",
            "-p",
            "no:cacheprovider",
            *arguments,
        ]
        environ = {"GPU_ROWS": str(self._rows), **environ}
        inherited = {
            name: value for name, value in os.environ.items() if name != "CI"
        }
        with subprocess.Popen(
            command,
            cwd=top or self._project,
            env=inherited | environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as running:
            try:
                said, _ = running.communicate(timeout=SECONDS)
            except subprocess.TimeoutExpired:
                running.kill()
                said, _ = running.communicate()
                said += f"\nit did not end within {SECONDS} s"
        if running.returncode:
            print(said[-6000:])
        last = (said.strip().splitlines() or ["it wrote nothing"])[-1]
        self._note(f"pytest: {what}", running.returncode == 0, last)

    def _note(self, check: str, holds: bool, figure: str) -> None:
        with self._rows.open("a") as file:
            file.write(
                json.dumps({"check": check, "holds": holds, "figure": figure})
                + "\n"
            )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--parts", nargs="+", metavar="PART", help="only these (default: all)"
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=Path("gpu.jsonl"),
        help="file to which the figures are added",
    )
    options = parser.parse_args()
    asked = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    gpus = int(
        subprocess.run(
            [sys.executable, "-c", asked],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    )
    if not gpus:
        print("this machine has no CUDA device that torch can use")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder), options.results.resolve(), gpus)
        if unknown := {*(options.parts or ())} - {*run.parts}:
            parser.error(f"no such part: {', '.join(sorted(unknown))}")
        rows = [
            row for part in options.parts or run.parts for row in run.take(part)
        ]
    broken = sum(not row["holds"] for row in rows)
    print(
        f"\n{len(rows) - broken} of {len(rows)} checks hold on {gpus} GPU{'s' * (gpus > 1)}"
    )
    return 1 if broken or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
