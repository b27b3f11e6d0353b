"""What the plugin adds to a pytest run without distributed tests.

    python benchmarks/startup.py [--rounds 20]

The same run with the plugin and with `-p no:ddpperf`, interleaved, the order alternating.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _common import progress, quartiles, spread, table, verdict

CONFTEST = "import sys\ndef pytest_unconfigure(config): print('torch' in sys.modules)\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    rounds: int = parser.parse_args().rounds
    seconds: dict[bool, list[float]] = {True: [], False: []}
    imported = False
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "test_nothing.py").write_text("def test_nothing(): pass\n")
        Path(folder, "conftest.py").write_text(CONFTEST)
        base = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", folder, folder]
        for done in range(-1, rounds):  # the first fills the caches of bytecode
            for plugin in (True, False) if done % 2 else (False, True):
                command = base if plugin else [*base, "-p", "no:ddpperf"]
                began = time.perf_counter()
                output = subprocess.run(command, check=True, capture_output=True, text=True, cwd=folder).stdout
                if done >= 0:
                    seconds[plugin].append(time.perf_counter() - began)
                imported |= output.strip().endswith("True")
            progress(done + 1, rounds, "start-up")
    added = [on - off for on, off in zip(seconds[True], seconds[False], strict=True)]
    print(f"median [quartiles] of {rounds} rounds\n")
    print(
        table(
            [
                ["plugin on", "plugin off", "added (paired)"],
                [spread(seconds[True], "ms", 1e3), spread(seconds[False], "ms", 1e3), spread(added, "ms", 1e3)],
            ]
        )
    )
    promises = [("at most 20 ms added", quartiles(added).median <= 0.020), ("torch is not imported", not imported)]
    return verdict(promises)


if __name__ == "__main__":
    sys.exit(main())
