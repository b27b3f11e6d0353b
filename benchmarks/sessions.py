"""Record one session of step times, as benchmarks/detection.py and noise.py read them.

    python benchmarks/sessions.py FOLDER

Three small DDP models on two Gloo ranks, and one on four, as fast as they are and slower by 5, 10
and 20 % on every rank: 20 launches of each, which take turns, of 30 steps after 10 of warm-up. The
wall time and the CPU time of each step go to FOLDER/<time>.jsonl.gz, one line for each launch.
Sessions that are compared should be hours apart: call it from time to time.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import time
from itertools import product
from pathlib import Path

from _common import launchers_of_both_sides, progress
from _models import training

from pytest_ddpperf.launch import Observer
from pytest_ddpperf.options.settings import make_plan
from pytest_ddpperf.records.quantiles import RankSteps

WORKLOADS = (("mlp", 2), ("conv", 2), ("transformer", 2), ("mlp", 4))
SLOWDOWNS = (0.0, 0.05, 0.1, 0.2)
LAUNCHES = 20
STEPS = 30


def main() -> int:
    from live import read_defaults

    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    settings = read_defaults(Path.cwd())
    cells = list(product(range(LAUNCHES), WORKLOADS, SLOWDOWNS))
    modules = {"_models": str(Path(__file__).with_name("_models.py"))}
    name = time.strftime("%Y%m%d-%H%M.jsonl.gz", time.gmtime())
    unfinished = folder / f"{name}.part"
    with (
        launchers_of_both_sides(modules) as (launcher, _),
        gzip.open(unfinished, "wt") as file,
    ):
        for number, (launch, (model, ranks), slowdown) in enumerate(cells):
            plan = make_plan(
                settings, world_size=ranks, backend="gloo", device="cpu"
            )
            samples = launcher.measure(
                plan.exactly(STEPS), training(model, slowdown), Observer()
            )
            row = {
                "recording": "pinned",
                "session": 0,
                "recorded_at": round(time.time()),
                "load": os.getloadavg()[0],
                "workload": model,
                "world_size": ranks,
                "injected_slowdown": slowdown,
                "launch": launch,
                "step_microseconds": microseconds(samples.rank_seconds),
                "cpu_microseconds": microseconds(samples.cpu_seconds),
            }
            file.write(json.dumps(row, separators=(",", ":")) + "\n")
            progress(number + 1, len(cells), "launches")
    unfinished.rename(folder / name)
    return 0


def microseconds(ranks: RankSteps | None) -> list[list[int]] | None:
    """Of each rank and step."""
    if ranks is None:
        return None
    return [[round(step * 1e6) for step in rank] for rank in ranks]


if __name__ == "__main__":
    raise SystemExit(main())
