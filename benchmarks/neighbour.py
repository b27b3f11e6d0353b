"""A neighbour: burns one core in bursts of about a second, as others on a shared machine do.

    python benchmarks/neighbour.py [--seed 0] [--seconds 600]     # by itself, or until Ctrl-C
    python benchmarks/neighbour.py [--seed 0] -- make test        # next to a command

With a command, the exit status is the command's.

The same seed gives the same bursts. live.py, turns.py, confirming.py and expect.py measure next to
it and without.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from pytest_ddpperf.wire.boot import die_with_parent

# Bursts and the pauses between them, in seconds: as long as the mean of both is one second, half of
# the time is theirs.
_SHORTEST, _LONGEST = 0.3, 1.7


def burn(seed: int, seconds: float) -> None:
    """Burn one core in bursts, for so long."""
    source, until = random.Random(seed), time.monotonic() + seconds
    while time.monotonic() < until:
        burst = time.monotonic() + source.uniform(_SHORTEST, _LONGEST)
        while time.monotonic() < min(burst, until):
            sum(range(10_000))
        time.sleep(source.uniform(_SHORTEST, _LONGEST))


@contextmanager
def neighbour(seed: int | None) -> Iterator[None]:
    """One in a process of its own, while this lasts; none where `seed` is None."""
    if seed is None:
        yield
        return
    command = [
        sys.executable,
        __file__,
        "--seed",
        str(seed),
        "--parent",
        str(os.getpid()),
    ]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    parser.add_argument("command", nargs="*", help="to run beside it")
    options = parser.parse_args()
    if options.command:
        with neighbour(options.seed):
            return subprocess.run(options.command).returncode
    if options.parent is not None:
        die_with_parent(options.parent, signal.SIGKILL)
    with suppress(KeyboardInterrupt):
        burn(options.seed, options.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
