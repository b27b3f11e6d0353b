"""What would the gate see on a GPU? Whole runs on a pretended one, with noise like an H100's.

    python benchmarks/pretended_gpu.py [--runs 10] [--results pretended.jsonl]

Needs no GPU, and shows nothing of one: gpu.py does. Ranks believe in a CUDA device, whose queue and
clock are pretended (tests/integration/pretended.py). A step queues 50 kernels, which take 18 ms,
and keeps the host busy for 25 ms. Each process draws its speed: the device's differs by 0.2 %, the
host's by 12 %, as those of seven processes on an H100 did.

"unchanged" and "2 % more kernels" are compared with the unchanged step by --ddp-against-env, at
device:1%, in turns. Unchanged code must not be REGRESSED, its `device` must be within 1 %, and 2 %
more must be found. Then causes are planted, once each, and the first one of a red test must name
them. Each run is a line of the results file, and a run goes on where the last one ended.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _common import done, progress, quartiles, table, verdict

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.integration.pretended import PRETENDED

STEP = """
import os
import random

import torch
from torch.nn.parallel import DistributedDataParallel

class OnDevice(torch.Tensor):
    device = property(lambda self: torch.device("cuda", 0))


CAUSE = os.environ.get("CAUSE", "none")
KERNELS, KERNEL_MS, HOST_MS = 50, 0.36, 0.5


def setup(ctx):
    from pretended import device

    drawn = random.SystemRandom()
    device_speed = drawn.gauss(1, 0.002)
    host_speed = drawn.lognormvariate(0, 0.12)
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    inputs = torch.randn(8, 8)
    loss = torch.zeros(()).as_subclass(OnDevice)

    def reduce(_, bucket):
        device.work(0.2, "flatten")
        # Else it takes place at the same time as kernels.
        if CAUSE == "overlap is lost":
            device.work(5.0, "ncclDevKernel_AllReduce_Sum_f32_RING_LL")
            device.synchronize()
        return torch.distributed.all_reduce(bucket.buffer(), async_op=True).get_future().then(
            lambda reduced: reduced.value()[0]
        )

    model.register_comm_hook(None, reduce)

    def kernel(name="gemm_2048x2048_bf16", times=1.0):
        host_ms = HOST_MS * host_speed * drawn.lognormvariate(0, 0.2)
        device.now += int(host_ms * 1e6)
        device.work(KERNEL_MS * times * device_speed * drawn.gauss(1, 0.005), name)

    def step():
        for _ in range(KERNELS):
            if CAUSE == "slower kernels":
                kernel("gemm_2048x2048_fp32", times=2.0)
            else:
                kernel()
            if CAUSE == ".item()":
                device.synchronize()
                loss.item()
        more = {"2 % more kernels": 1, "more kernels": 10}.get(CAUSE, 0)
        if CAUSE == "a rank with more kernels" and ctx.rank == 1:
            more = 10
        for _ in range(more):
            kernel()
        if CAUSE == "more operators":
            for _ in range(2000):
                inputs.add_(0)
            device.now += 20_000_000
        model(inputs).sum().backward()

    return step


def test_step(ddp_benchmark):
    ddp_benchmark(setup)
"""
RATES = {"unchanged": "none", "2 % more kernels": "2 % more kernels"}
# What is planted, in how many ranks, and what the first cause says.
PLANTED = {
    "more kernels": (1, "device +"),
    "slower kernels": (1, "gemm_2048x2048_fp32"),
    "a rank with more kernels": (2, "rank 1: device +"),
    "more operators": (1, "operators.count"),
    ".item()": (1, "host_syncs"),
    "overlap is lost": (2, "exposed communication"),
}
SECONDS = 300  # at most, of a run


def run(project: Path, cause: str, ranks: int) -> dict[str, Any]:
    """Compare a step with the unchanged one; return its measurement."""
    report = project / "run.json"
    report.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:randomly",
        f"--ddp-world-size={ranks}",
        "--ddp-backend=nccl",
        "--ddp-preload=pretended",
        "--ddp-threshold=p50:10%,device:1%",
        "--ddp-against-env=CAUSE=none",
        "--ddp-against-env=PAIR=other",
        f"--ddp-json={report}",
    ]
    environ = {
        name: value for name, value in os.environ.items() if name != "CI"
    }
    ran = subprocess.run(
        command,
        cwd=project,
        env={**environ, "CAUSE": cause, "PAIR": "this"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    if ran.returncode not in (0, 1) or not report.exists():
        raise SystemExit(
            f"a run ended otherwise than expected:\n{ran.stdout[-4000:]}"
        )
    measured: dict[str, Any] = json.loads(report.read_text())["measurements"][0]
    return measured


def row_of(kind: str, measured: dict[str, Any]) -> dict[str, Any]:
    found = measured["verdict"]
    changes = {
        each["limit"]["metric"]: [
            each["change"]["estimate"],
            each["resolution"],
        ]
        for each in found["comparisons"]
    }
    launches = len(measured["measurement"]["samples"]["step_seconds"])
    rose = [
        f"{each['limit']['metric']} {each['baseline']} -> {each['now']}"
        for each in found["counters"]
        if each["status"] == "REGRESSED"
    ]
    first = [*rose, *measured["evidence"]][:1]
    return {
        "kind": kind,
        "status": found["status"],
        "changes": changes,
        "launches": launches,
        "seconds": measured["seconds"],
        "first": first[0] if first else "",
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--runs", type=int, default=10, help="of each rate")
    parser.add_argument(
        "--results",
        type=Path,
        default=Path("pretended.jsonl"),
        help="file of the rows",
    )
    options = parser.parse_args()
    kinds = [*RATES] * options.runs + [*PLANTED]
    rows = done(options.results)
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder)
        (project / "pretended.py").write_text(PRETENDED)
        (project / "test_step.py").write_text(STEP)
        (project / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
        for number, kind in enumerate(kinds):
            taken = sum(row["kind"] == kind for row in rows)
            if taken > kinds[:number].count(kind):
                continue
            ranks, _ = PLANTED.get(kind, (1, ""))
            row = row_of(kind, run(project, RATES.get(kind, kind), ranks))
            rows.append(row)
            with options.results.open("a") as file:
                file.write(json.dumps(row) + "\n")
            progress(number + 1, len(kinds), kind)
    return summary(rows)


def summary(rows: list[dict[str, Any]]) -> int:
    cells = [["", "runs", "verdicts", "device", "step (p50)", "launches"]]
    promises = []
    for kind in (*RATES, *PLANTED):
        of_kind = [row for row in rows if row["kind"] == kind]
        if not of_kind:
            continue
        statuses = [row["status"] for row in of_kind]
        counts = ", ".join(
            f"{statuses.count(each)} {each}" for each in sorted({*statuses})
        )
        changes = {
            metric: [row["changes"][metric] for row in of_kind]
            for metric in ("device", "p50")
        }
        launches = quartiles([row["launches"] for row in of_kind]).median
        cells.append(
            [
                kind,
                str(len(of_kind)),
                counts,
                *map(span, changes.values()),
                f"{launches:g}",
            ]
        )
        if kind == "unchanged":
            worst = max(abs(change) for change, _ in changes["device"])
            promises.append(("unchanged: device within 1 %", worst < 0.01))
            promises.append(
                ("unchanged: none is REGRESSED", "REGRESSED" not in statuses)
            )
        else:
            promises.append(
                (f"{kind}: all are REGRESSED", {*statuses} == {"REGRESSED"})
            )
        if kind in PLANTED:
            said = PLANTED[kind][1]
            first = of_kind[-1]["first"]
            promises.append(
                (f"{kind}: the first cause is {first!r}", said in first)
            )
    print(table(cells))
    return verdict(promises)


def span(changes: list[list[float]]) -> str:
    """Smallest and largest change, and the median of the smallest detectable ones."""
    low, high = (
        f"{pick(change for change, _ in changes):+.1%}" for pick in (min, max)
    )
    detectable = quartiles([each for _, each in changes]).median
    return f"{low} to {high} (detectable {detectable:.1%})"


if __name__ == "__main__":
    sys.exit(main())
