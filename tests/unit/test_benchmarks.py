"""The benchmarks follow the package: each can still be imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_every_benchmark_can_be_imported() -> None:
    # all but `_workload`, which runs in a rank
    names = sorted(
        path.stem
        for path in BENCHMARKS.glob("*.py")
        if path.stem != "_workload"
    )
    assert "live" in names
    code = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)"
    command = [sys.executable, "-c", code, *names]
    run = subprocess.run(
        command, cwd=BENCHMARKS, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
