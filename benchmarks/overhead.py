"""What the timed loop adds to a step: an empty step, timed, beside a bare loop over the same step.

    python benchmarks/overhead.py [--rounds 10] [--steps 20000]

Both run in ranks of one group of two, interleaved.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from _common import progress, quartiles, spread, table, verdict

from pytest_ddpperf.launch import Launcher, Observer
from pytest_ddpperf.records.plan import Plan


def empty(ctx: Any) -> Any:
    return lambda: None


def bare(ctx: Any, steps: int) -> float:
    """Seconds a step of a loop that only calls."""
    step = empty(ctx)
    began = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - began) / steps


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20_000)
    options = parser.parse_args()
    launcher = Launcher(lambda: {"overhead": __file__})
    plan = Plan(world_size=2, backend="gloo", device="cpu", steps=options.steps, timing="step")
    timed: list[float] = []
    untimed: list[float] = []
    try:
        for done in range(options.rounds):
            ranks = launcher.measure(plan, empty, Observer()).rank_seconds
            timed.append(max(sum(rank) for rank in ranks) / options.steps)
            untimed.append(max(launcher.call(plan, bare, (options.steps,), Observer())))
            progress(done + 1, options.rounds, "overhead")
    finally:
        launcher.close()
    added = [with_clock - without for with_clock, without in zip(timed, untimed, strict=True)]
    print(f"median [quartiles] of {options.rounds} rounds of {options.steps} steps, the slower of two ranks\n")
    print(
        table(
            [
                ["timed loop", "bare loop", "added a step"],
                [spread(timed, "us", 1e6), spread(untimed, "us", 1e6), spread(added, "us", 1e6)],
            ]
        )
    )
    return verdict([("at most 10 microseconds an empty step", quartiles(added).median <= 10e-6)])


if __name__ == "__main__":
    sys.exit(main())
