"""What the plugin adds to a pytest run without distributed tests.

    python benchmarks/startup.py [--rounds 20]

The same run with the plugin and with `-p no:ddpperf`, interleaved, the order alternating. Both have
compiled modules, as after an installation by pip.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean

from _common import progress, spread, table, verdict

CONFTEST = "import sys\ndef pytest_unconfigure(config): print('torch' in sys.modules)\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=20)
    rounds: int = parser.parse_args().rounds
    wall: dict[bool, list[float]] = {True: [], False: []}
    cpu: dict[bool, list[float]] = {True: [], False: []}
    imported = False
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "test_nothing.py").write_text("def test_nothing(): pass\n")
        Path(folder, "conftest.py").write_text(CONFTEST)
        base = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--rootdir",
            folder,
            folder,
        ]
        environ = {
            **os.environ,
            "PYTHONPYCACHEPREFIX": str(Path(folder, "compiled")),
        }
        environ.pop("PYTHONDONTWRITEBYTECODE", None)
        for done in range(-1, rounds):  # the first compiles
            for plugin in (True, False) if done % 2 else (False, True):
                command = base if plugin else [*base, "-p", "no:ddpperf"]
                before, began = _of_children(), time.perf_counter()
                ran = subprocess.run(
                    command,
                    check=True,
                    capture_output=True,
                    text=True,
                    cwd=folder,
                    env=environ,
                )
                ended, after = time.perf_counter(), _of_children()
                if done >= 0:
                    wall[plugin].append(ended - began)
                    cpu[plugin].append(after - before)
                imported |= ran.stdout.strip().endswith("True")
            progress(done + 1, rounds, "start-up")
    print(
        f"median [quartiles] of {rounds} rounds; CPU time says more where others use the cores\n"
    )
    rows = [
        ["", "plugin on", "plugin off", "added (paired)", "share of the means"]
    ]
    for name, seconds in (("wall", wall), ("CPU", cpu)):
        added = [
            on - off
            for on, off in zip(seconds[True], seconds[False], strict=True)
        ]
        figures = (
            spread(values, "ms", 1e3)
            for values in (seconds[True], seconds[False], added)
        )
        share = fmean(added) / fmean(seconds[False])
        rows.append([name, *figures, f"{share:.1%}"])
    print(table(rows))
    return verdict(
        [
            ("at most 3 % of CPU time added", share <= 0.03),
            ("torch is not imported", not imported),
        ]
    )


def _of_children() -> float:
    """Seconds of CPU time of all processes that were started here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    sys.exit(main())
