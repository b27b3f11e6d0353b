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
- `device`: how much do the figures of a step differ between launches, next to 4 % more kernels?
  And does the first cause of a red test name what was planted?
- `rates`: of comparisons at `device:1%`, how many of unchanged code are red, and how many with 2 %
  more kernels? Five minutes at most; rows of several runs add up, to 20 of each.
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
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median, stdev
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
TWO_RANKS = ("--ddp-world-size=2", "--ddp-preload=one_gpu")
# The checks are of what is measured, not of how precisely: one launch each, with a short window.
# What is planted: the environment, and what the first cause says.
CAUSES = {
    "more kernels": ({"CAUSE": "kernels", "MORE": "10"}, "device +"),
    "slower kernels, fp32 for bf16": ({"CAUSE": "fp32"}, "device +"),
    "a rank with more kernels": ({"CAUSE": "rank", "MORE": "10"}, "rank "),
    ".item()": ({"CAUSE": "item"}, "host_syncs"),
    "no foreach": ({"CAUSE": "no foreach"}, "operators.count"),
    "overlap is lost": ({"CAUSE": "overlap"}, "exposed communication"),
}
SEVERAL_RANKS = ("rank", "overlap")  # causes that one rank alone cannot have
UNCHANGED = {"CAUSE": "none", "MORE": "0"}
RATES = {"unchanged": ("0", "PASS"), "2 % more kernels": ("1", "REGRESSED")}
PAIRS, RATE_SECONDS = 20, 280
QUICK = (
    "--ddp-backend=nccl",
    "--ddp-launches=1",
    "--ddp-min-time=0.3",
    "test_gpu.py",
)


def one_gpu() -> dict[str, Any]:
    """Return the environment of two ranks on the first device."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    return {"GPU_RANKS": "2", "CUDA_VISIBLE_DEVICES": first}


class Run:
    """The project that is measured, and the file of results."""

    def __init__(self, project: Path, rows: Path, gpus: int) -> None:
        self._project, self._rows, self._gpus = project, rows, gpus
        for name, source in {
            "checks": "_gpu",
            "test_gpu": "_gpu",
            "one_gpu": "_one_gpu",
            "test_device_time": "_device_time",
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
            "device": self._device,
            "rates": self._rates,
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
        self._pytest("two ranks on one GPU", *TWO_RANKS, *QUICK, **one_gpu())

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

    def _measure(
        self, what: str, *options: str, **environ: Any
    ) -> dict[str, Any]:
        """Return the measurement of the step of known work; {} if there is none."""
        report = self._project / "device.json"
        report.unlink(missing_ok=True)
        self._pytest(
            what,
            *options,
            f"--ddp-json={report}",
            "test_device_time.py",
            may_be_red=True,
            **environ,
        )
        if not report.exists():
            return {}
        found: list[dict[str, Any]] = json.loads(report.read_text())[
            "measurements"
        ]
        return found[0] if found and found[0]["measurement"] else {}

    def _device(self) -> None:
        for name, more in (("unchanged", "0"), ("4 % more kernels", "2")):
            alone = (*ONE_RANK, "--ddp-launches=7", "--ddp-max-launches=7")
            found = self._measure(name, *alone, CAUSE="none", MORE=more)
            for figure, launches in _figures(found).items():
                spread = stdev(launches) / fmean(launches)
                mean = f"{fmean(launches):.4g}, CV {spread:.2%}"
                self._note(f"{figure}, {name}", True, mean)
        for name, (cause, said) in CAUSES.items():
            environ: dict[str, Any] = {**cause}
            ranks: tuple[str, ...] = ONE_RANK
            if cause["CAUSE"] in SEVERAL_RANKS and self._gpus > 1:
                ranks = (f"--ddp-world-size={self._gpus}", "--ddp-backend=nccl")
            elif cause["CAUSE"] in SEVERAL_RANKS:
                ranks = (*TWO_RANKS, "--ddp-backend=nccl")
                environ |= one_gpu()
            elsewhere = [
                f"--ddp-against-env={variable}={value}"
                for variable, value in UNCHANGED.items()
            ]
            found = self._measure(name, *ranks, *elsewhere, **environ)
            first = _first_cause(found)
            self._note(f"planted: {name}", said in first, first)

    def _rates(self) -> None:
        until = time.monotonic() + RATE_SECONDS
        for name, (more, expected) in RATES.items():
            check = f"rate: {name}"
            taken = [row for row in done(self._rows) if row["check"] == check]
            for _ in range(len(taken), PAIRS):
                if time.monotonic() > until:
                    return
                options = (
                    *ONE_RANK,
                    "--ddp-threshold=device:1%",
                    "--ddp-against-env=MORE=0",
                    f"--ddp-against-env=PAIR={more}",
                )
                found = self._measure(name, *options, CAUSE="none", MORE=more)
                verdict = found.get("verdict") or {"status": "none"}
                status = verdict["status"]
                self._note(check, status == expected, status)

    def _pytest(
        self,
        what: str,
        *arguments: str,
        top: Path | None = None,
        may_be_red: bool = False,
        **environ: str,
    ) -> None:
        """Run pytest, and note whether it passed: a check that could not be made is broken. A run
        that `may_be_red` is noted if it could not be made."""
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
        if may_be_red and running.returncode in (0, 1):
            return
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


def _figures(found: dict[str, Any]) -> dict[str, list[float]]:
    """Return figures of a step by launch, in milliseconds."""
    if not found:
        return {}
    samples = found["measurement"]["samples"]
    figures = {
        "p50": [1e3 * median(launch) for launch in samples["step_seconds"]]
    }
    for name in ("device_seconds", "busy_seconds"):
        launches = samples[name] or ()
        if launches:
            figures[name] = [1e3 * max(ranks) for ranks in launches]
    return figures


def _first_cause(found: dict[str, Any]) -> str:
    """Return what a measurement names first: counters that rose, and its first cause in words."""
    verdict = found.get("verdict") or {"counters": []}
    rose = [
        each["limit"]["metric"]
        for each in verdict["counters"]
        if each["status"] == "REGRESSED"
    ]
    return "; ".join((*rose, *found.get("evidence", ())[:1])) or "nothing"


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
