"""Are step times over two nodes what they are, however far the clocks of the nodes are apart?

    python benchmarks/clocks.py [--rounds 8]

Needs Linux and root: it makes network and time namespaces.

Two nodes on one machine, joined by a bridge, with a core each. In every round the same test
runs over both twice, in random order: with the monotonic clock of the second node 1,000 s ahead,
and with the same clock on both. Shown are the step's p50 of both and their ratio with its 95 %
interval over rounds.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import tempfile
from pathlib import Path

from _common import progress, spread, verdict
from _nodes import AHEAD_SECONDS, missing, nodes

from pytest_ddpperf.verdict.stats import t_quantile

TEST = """
def training(ctx):
    import torch
    from torch.nn.parallel import DistributedDataParallel
    model = DistributedDataParallel(torch.nn.Linear(256, 256))
    data = torch.randn(64, 256)
    def step():
        model(data).sum().backward()
    return step

def test_step(ddp_benchmark):
    ddp_benchmark(training)
"""
OPTIONS = (
    "--ddp-steps=10",
    "--ddp-min-time=1",
    "--ddp-launches=5",
    "--ddp-max-launches=10",
    "--ddp-warmup=2",
    "--ddp-json=all.json",
)


def measured(ahead_seconds: int) -> float:
    """The logarithm of p50, mean over launches."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "test_step.py").write_text(TEST)
        (folder / "pytest.ini").write_text("[pytest]\n")
        with nodes(folder, 2, ahead_seconds) as both:
            ended = both.pytest(*OPTIONS, "test_step.py", cwd=folder)
        for node in ended:
            assert node.status == 0, node.output
        (outcome,) = json.loads((folder / "all.json").read_text())[
            "measurements"
        ]
        samples = outcome["measurement"]["samples"]
        p50 = [
            math.log(statistics.median(launch))
            for launch in samples["step_seconds"]
        ]
        return statistics.fmean(p50)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=8)
    asked = parser.parse_args()
    if why := missing():
        sys.exit(why)
    source = random.Random(1)
    logs: dict[int, list[float]] = {0: [], AHEAD_SECONDS: []}
    for done in range(asked.rounds):
        for ahead in source.sample(list(logs), 2):
            logs[ahead].append(measured(ahead))
        progress(done + 1, asked.rounds, "rounds")
    for ahead, found in logs.items():
        print(
            f"clocks {ahead:5d} s apart: p50 {spread([math.exp(log) for log in found], 'ms', 1e3)}"
        )
    differences = [
        far - same
        for far, same in zip(logs[AHEAD_SECONDS], logs[0], strict=True)
    ]
    mean, error = (
        statistics.fmean(differences),
        statistics.stdev(differences) / math.sqrt(len(differences)),
    )
    reach = t_quantile(0.975, len(differences) - 1) * error
    low, high = (math.expm1(mean + sign * reach) for sign in (-1, 1))
    print(
        f"apart against together: {math.expm1(mean):+.1%} [{low:+.1%}, {high:+.1%}]"
    )
    agree = low <= 0 <= high
    sys.exit(verdict([("step times agree within their resolution", agree)]))


if __name__ == "__main__":
    main()
