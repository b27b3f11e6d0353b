"""Error rates of the gate, live: real launches of the same code against itself, many times.

    python benchmarks/false_alarms.py [--pairs 60] [--results false_alarms.jsonl]
    python benchmarks/false_alarms.py --paired [--pairs 60] [--results false_alarms_paired.jsonl]

A pair is a baseline and, next in the same pytest run, a measurement against it, each with the default options: looks,
limits and all. The code is one of three small DDP models on two Gloo ranks. In a pair of the first kind nothing
changes: a REGRESSED is a false alarm. In one of the second kind rank 1 waits after each step for a fifth of the step
time that the baseline had: anything but REGRESSED is a miss. Kinds and models take turns. Each finished pair is a line
of the results file; a run goes on where the last one ended, and tells all of it.

With --paired a pair is a measurement under --ddp-against: two sides in turns, limits of 5 %, each pair with the error
rate of a run of its own. In one of the second kind rank 1 of the side at hand waits for a tenth of the step time that
it had just before, in the same launch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SLOWDOWN = 0.2
PAIRED_SLOWDOWN = 0.1
# Short launches, 16 a side at most, for a quarter of a minute: more launches are worth more than longer ones.
PAIRED = ("--ddp-against-env=DDPPERF_BASE=1", "--ddp-threshold=p10:5%,p50:5%")
PAIRED += ("--ddp-steps=15", "--ddp-warmup=3", "--ddp-launches=4", "--ddp-max-launches=16")
CALIBRATION = 8  # steps, the first quarter of them to warm up
KINDS = ("identical", "slower")
MODELS = ("mlp", "conv", "transformer")


def main() -> int:
    from neighbour import add_option, neighbour

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=60, help="of each kind")
    parser.add_argument("--results", type=Path, help="file to go on with")
    parser.add_argument("--paired", action="store_true", help="two sides in turns, as --ddp-against has them")
    add_option(parser)
    options = parser.parse_args()
    results = options.results or Path("false_alarms_paired.jsonl" if options.paired else "false_alarms.jsonl")
    script = Path(sys.executable).with_name("pytest")
    with tempfile.TemporaryDirectory() as folder:
        command = [str(script), "-q", "-s", "-p", "no:randomly", "-p", "no:cacheprovider", "-p", "no:benchmark"]
        command += [f"--rootdir={folder}", f"--ddp-baseline-dir={folder}/baselines"]
        command += ["--ddp-min-time=0"]  # so many steps, however short they are
        if options.paired:
            command += PAIRED
        command += [f"{Path(__file__)}::{'test_pairs_in_turns' if options.paired else 'test_pairs'}"]
        asked = {"DDPPERF_PAIRS": str(options.pairs), "DDPPERF_RESULTS": str(results.absolute())}
        asked["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
        with neighbour(options.neighbour):
            status = subprocess.run(command, env={**os.environ, **asked}, cwd=HERE).returncode
    if status == 0:
        report(done(results))
    return status


def done(results: Path) -> list[dict[str, Any]]:
    """The pairs so far; a last line that an interrupt cut short is dropped, from the file too."""
    lines = results.read_text().splitlines(keepends=True) if results.exists() else []
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
        results.write_text("".join(lines))
    return [json.loads(line) for line in lines]


def test_pairs(ddp_benchmark: Any, request: Any) -> None:  # asked for, so that this is a distributed test
    for number, kind, model in pairs_to_do():
        began = time.monotonic()
        base = measured(request, training(model, 0.0), record=True)
        wait = SLOWDOWN * base.result.p50 if kind == "slower" else 0.0
        now = measured(request, training(model, wait), record=False)
        write(number, kind, model, now.result, len(base.result.step_seconds), began)


def test_pairs_in_turns(ddp_benchmark: Any) -> None:
    """Runs on both sides, in step: each finished pair is written by the one that leads."""
    from pytest_ddpperf.plugin.gate import GateFailed
    from pytest_ddpperf.verdict import RUN_LEVEL

    leads = "DDPPERF_BASE" not in os.environ
    ddp_benchmark._level = lambda gate: RUN_LEVEL  # not a share of it
    for number, kind, model in pairs_to_do():
        began = time.monotonic()
        slowdown = PAIRED_SLOWDOWN if leads and kind == "slower" else 0.0
        try:
            result = ddp_benchmark(training(model, 0.0, slowdown), name=f"pair {number}")
        except GateFailed as failure:
            result = failure.result
        if leads:
            write(number, kind, model, result, len(result.step_seconds), began)


def pairs_to_do() -> Iterator[tuple[int, str, str]]:
    first, wanted = len(done(Path(os.environ["DDPPERF_RESULTS"]))), int(os.environ["DDPPERF_PAIRS"]) * len(KINDS)
    for number in range(first, wanted):
        yield number, KINDS[number % len(KINDS)], MODELS[number // len(KINDS) % len(MODELS)]


def write(number: int, kind: str, model: str, result: Any, base_launches: int, began: float) -> None:
    from _common import progress

    verdict = result.verdict
    row = {
        "kind": kind,
        "model": model,
        "verdict": str(verdict),
        "reason": verdict.reason,
        "launches": [base_launches, len(result.step_seconds)],
        "change": {c.limit.metric: round(c.change.estimate, 4) for c in verdict.comparisons},
        "resolution": {c.limit.metric: round(c.resolution, 4) for c in verdict.comparisons},
        "seconds": round(time.monotonic() - began, 1),
    }
    with Path(os.environ["DDPPERF_RESULTS"]).open("a") as file:
        file.write(json.dumps(row) + "\n")
    progress(number + 1, int(os.environ["DDPPERF_PAIRS"]) * len(KINDS), "pairs")


def measured(request: Any, setup: Any, *, record: bool) -> Any:
    """What the fixture does with `setup` under the options of this run; recorded, it is the next one's baseline."""
    from pytest_ddpperf import options
    from pytest_ddpperf.baseline import Store
    from pytest_ddpperf.launch.observer import Nobody
    from pytest_ddpperf.measuring.benchmark import Job
    from pytest_ddpperf.plugin import state
    from pytest_ddpperf.records import TestId
    from pytest_ddpperf.verdict import RUN_LEVEL

    class Silent(Nobody):
        def begin(self, launch: int, launches: int) -> None:
            pass

        def launched(self, samples: object) -> None:
            pass

    session = request.config.stash[state.RUN].session
    settings = replace(state.settings_of(request.node), save_baseline=record)
    place = session.place(settings, 2)
    job = Job(
        test=TestId(module="false_alarms", name="test_pairs"),
        nodeid=request.node.nodeid,
        setup=setup,
        settings=settings,
        plan=options.plan(settings, world_size=2, backend=place.backend, device=place.device),
        launches=options.launches(settings),
        level=RUN_LEVEL,
        batch_size=None,
        gate=True,
        facts={},
    )
    result = session.carry_out(job, Silent())
    if record:
        Store(settings.baseline_dir).write(result.candidate)
    return result


def training(model: str, wait_seconds: float, slowdown: float = 0.0) -> Any:
    """The set-up of a small model's training step; rank 1 waits busily at the end of each step, for so many seconds
    and for a share of the median step so far."""

    def setup(ctx: Any) -> Any:
        import torch
        from torch import nn
        from torch.nn.parallel import DistributedDataParallel

        torch.manual_seed(0)
        net: nn.Module
        if model == "mlp":
            net, inputs = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10)), torch.randn(64, 256)
        elif model == "conv":
            layers = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
            net, inputs = nn.Sequential(*layers, nn.Linear(16, 10)), torch.randn(16, 3, 24, 24)
        else:
            layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
            net, inputs = nn.Sequential(layer, nn.Flatten(), nn.Linear(64 * 16, 10)), torch.randn(8, 16, 64)
        ddp = DistributedDataParallel(net)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
        targets = torch.randint(10, (len(inputs),))

        def train() -> None:
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(inputs), targets).backward()
            optimizer.step()

        marks = [time.perf_counter()]
        for _ in range(CALIBRATION):  # on both sides of a pair
            train()
            marks.append(time.perf_counter())
        seconds = [after - before for before, after in pairwise(marks)][CALIBRATION // 4 :]
        wait = wait_seconds + slowdown * statistics.median(seconds)

        def step() -> None:
            train()
            if wait and ctx.rank == 1:
                until = time.perf_counter() + wait
                while time.perf_counter() < until:
                    pass

        return step

    return setup


def report(rows: list[dict[str, Any]]) -> None:
    from _common import quartiles, table

    from pytest_ddpperf.verdict.stats import binomial_interval

    lines = [
        [
            "kind",
            "model",
            "pairs",
            "REGRESSED",
            "95 % interval",
            "INCONCLUSIVE",
            "launches",
            "resolves at p10",
            "seconds",
        ]
    ]
    for kind in KINDS:
        for model in ("all", *MODELS):
            chosen = [row for row in rows if row["kind"] == kind and model in ("all", row["model"])]
            if not chosen:
                continue
            red = sum(row["verdict"] == "REGRESSED" for row in chosen)
            low, high = binomial_interval(red, len(chosen))
            open_ = sum(row["verdict"] == "INCONCLUSIVE" for row in chosen)
            launches = quartiles([row["launches"][1] for row in chosen])
            seconds = quartiles([row["seconds"] for row in chosen])
            resolution = quartiles([row["resolution"]["p10"] for row in chosen])
            lines.append(
                [
                    kind if model == "all" else "",
                    model,
                    str(len(chosen)),
                    f"{red / len(chosen):.1%}",
                    f"{low:.1%} to {high:.1%}",
                    f"{open_ / len(chosen):.1%}",
                    f"{launches.median:g} [{launches.first:g}, {launches.third:g}]",
                    f"{resolution.median:.0%} [{resolution.first:.0%}, {resolution.third:.0%}]",
                    f"{seconds.median:g} [{seconds.first:g}, {seconds.third:g}]",
                ]
            )
    print("\nfalse alarms are REGRESSED among identical pairs, detections among slower ones; median [quartiles]\n")
    print(table(lines))


if __name__ == "__main__":
    sys.exit(main())
