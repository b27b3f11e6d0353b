"""What does the page of a run take: seconds and bytes, by how much was measured?

Each run is a page of `--measurements` measurements, in a process of its own, which imports matplotlib as `ddpperf html`
does. Samples are drawn, not measured; verdicts are the judge's.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from _common import progress, spread, table, verdict

ROOT = Path(__file__).parents[1]
MOST_SECONDS, MOST_BYTES = 10.0, 3e6

# In another process, which must not pay for the drawing of samples: what is timed is what the command does.
COMMAND = """
import sys, time
began = time.perf_counter()
from pytest_ddpperf.cli import main
status = main.main(["html", sys.argv[1], "-o", sys.argv[2]])
print(time.perf_counter() - began)
sys.exit(status)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measurements", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    rows = [("a run of", "JSON", "seconds", "page", "a measurement")]
    promises = []
    with tempfile.TemporaryDirectory() as folder:
        for name, size in SIZES.items():
            report, page = Path(folder, "report.json"), Path(folder, "page.html")
            report.write_text(_report(asked.measurements, size))
            seconds = []
            for number in range(asked.rounds):
                progress(number, asked.rounds, name)
                command = [sys.executable, "-c", COMMAND, str(report), str(page)]
                told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                seconds.append(float(told))
            took, held = spread(seconds, "s"), page.stat().st_size
            rows.append(
                (
                    name,
                    f"{report.stat().st_size / 1e6:.1f} MB",
                    took,
                    f"{held / 1e6:.2f} MB",
                    f"{held / 1e3 / asked.measurements:.0f} kB",
                )
            )
            promises.append((f"{name}: at most {MOST_SECONDS:g} s", sorted(seconds)[len(seconds) // 2] <= MOST_SECONDS))
            promises.append((f"{name}: at most {MOST_BYTES / 1e6:g} MB", held <= MOST_BYTES))
    print(table(rows))
    return verdict(promises)


def _report(measurements: int, size: reports.Drawn) -> str:
    """Every third is red or open; half are held against a baseline of five sessions, half in turns."""
    found = []
    for number in range(measurements):
        step = size.step * (1.2 if number % 3 == 0 else 1.0)
        now, base = replace(size, seed=number, step=step), replace(size, seed=1000 + 10 * number)
        name = f"test_train[{number}]"
        if number % 2:
            found.append(reports.in_turns(name, now, base))
        else:
            found.append(reports.against_baseline(name, now, base, sessions=5))
    return codec.dumps(json_report.report(found, reports.RUN))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    from pytest_ddpperf.records import codec
    from pytest_ddpperf.report import json_report
    from tests import reports

    SIZES = {
        "2 ranks, 5 launches of 60 steps": reports.Drawn(),
        "8 ranks, 20 launches of 100 steps": reports.Drawn(ranks=8, launches=20, steps=100),
    }
    sys.exit(main())
