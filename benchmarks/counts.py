"""Are counters the same in each of many launches, and as many as can be derived by hand?

    python benchmarks/counts.py [--launches 100]

One run of pytest with three steps: DDP, FSDP2, and an all-reduce for each parameter. A counter on
which two launches differ is unknown, which fails here. Exits with 1 if any is not as derived.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from _causes import DEPTH, WIDTH
from _common import table

TEST = """
import torch
import torch.distributed as dist
from causes import layers, training
from torch.distributed.fsdp import fully_shard


def test_ddp(ddp_benchmark):
    ddp_benchmark(lambda ctx: training(layers()))


def test_fsdp2(ddp_benchmark):
    def setup(ctx):
        model = layers()
        for layer in model:
            fully_shard(layer)
        return training(None, wrapped=fully_shard(model))

    ddp_benchmark(setup)


def test_naive(ddp_benchmark):
    def setup(ctx):
        model = layers()
        x = torch.randn(64, 256)

        def step():
            model.zero_grad()
            model(x).square().mean().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)

        return step

    ddp_benchmark(setup)
"""
OPTIONS = (
    "-q",
    "-p",
    "no:randomly",
    "-p",
    "no:cacheprovider",
    "--ddp-backend=gloo",
    "--ddp-baseline-missing=warn",
)
# bytes in fp32; two ranks share each tensor evenly, without padding
PARAMETERS = 4 * DEPTH * (WIDTH * WIDTH + WIDTH)
EXPECTED = {
    "test_ddp": {
        "gradient_bytes": PARAMETERS,
        "all_reduce.bytes": PARAMETERS,
        "parameters.bytes": PARAMETERS,
    },
    "test_fsdp2": {
        "reduce_scatter.count": DEPTH,
        "reduce_scatter.bytes": PARAMETERS,
        "all_gather.count": 2 * DEPTH,  # again for the backward pass
        "all_gather.bytes": 2 * PARAMETERS,
    },
    "test_naive": {
        "all_reduce.count": 2 * DEPTH,
        "all_reduce.bytes": PARAMETERS,
        "collectives.count": 2 * DEPTH,
    },
}
OF_DDP = ("gradient_bytes", "buckets", "buckets.largest_bytes")
ELSEWHERE = (
    "rpc.calls",
    "rpc.bytes",
    "host_syncs",
    "kernels.count",
    "h2d.bytes",
    "d2h.bytes",
    "peak_memory.bytes",
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--launches", type=int, default=100)
    launches = parser.parse_args().launches
    with tempfile.TemporaryDirectory() as folder:
        top, report = Path(folder), Path(folder) / "report.json"
        (top / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
        (top / "causes.py").write_text(
            Path(__file__).with_name("_causes.py").read_text()
        )
        (top / "test_counts.py").write_text(TEST)
        often = (
            f"--ddp-launches={launches}",
            f"--ddp-max-launches={2 * launches}",
            "--ddp-steps=3",
        )
        command = [
            str(Path(sys.executable).with_name("pytest")),
            *OPTIONS,
            *often,
            f"--ddp-json={report}",
        ]
        environ = {
            name: value for name, value in os.environ.items() if name != "CI"
        }
        ended = subprocess.run(
            command, cwd=top, env=environ, capture_output=True, text=True
        )
        if not report.exists():
            raise SystemExit(ended.stdout + ended.stderr)
        measured = {
            each["test"]["name"]: each["measurement"]
            for each in json.loads(report.read_text())["measurements"]
        }
    rows, all_right = (
        [["step", "launches", "counter", "counted", "by hand"]],
        True,
    )
    for name, expected in EXPECTED.items():
        launches_taken, counted = (
            len(measured[name]["samples"]["step_seconds"]),
            measured[name]["counters"],
        )
        for counter, derived in expected.items():
            rows.append(
                [
                    name,
                    str(launches_taken),
                    counter,
                    str(counted[counter]),
                    str(derived),
                ]
            )
        unknown = {
            counter for counter, count in counted.items() if count is None
        } - {*ELSEWHERE}
        rows.append(
            [
                name,
                str(launches_taken),
                "unknown",
                ", ".join(sorted(unknown)) or "none",
                "",
            ]
        )
        all_right &= launches_taken == launches and unknown <= (
            {*OF_DDP} if name != "test_ddp" else set()
        )
        all_right &= all(
            counted[counter] == derived for counter, derived in expected.items()
        )
    print(table(rows))
    return 0 if all_right else 1


if __name__ == "__main__":
    sys.exit(main())
