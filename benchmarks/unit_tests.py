"""What small unit tests of distributed code take, with `ddp_run` and with torch's own test cases.

    python benchmarks/unit_tests.py [--tests 50] [--rounds 3]

The same checks on two Gloo ranks, as whole runs of pytest: `ddp_run` and MultiProcessTestCase start
fresh ranks for each test, MultiProcContinuousTest starts two ranks for all of them. Each round runs
each once, in another order. CPU time is that of all processes of a run: it says more where others
use the cores. Torch's classes need expecttest and numpy.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _common import progress, quartiles, spread, table, verdict

CHECK = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def check(rank, number):
    torch.manual_seed(number)
    model = DistributedDataParallel(torch.nn.Linear(4, 1, bias=False))
    model(torch.full((1, 4), rank + 1.0)).sum().backward()
    assert (model.module.weight.grad == 1.5).all()
    total = torch.full((number + 1,), float(rank))
    dist.all_reduce(total)
    assert (total == 1).all()
"""

DDP_RUN = """
import pytest
from check import check


def in_rank(ctx, number):
    check(ctx.rank, number)


@pytest.mark.parametrize("number", range(TESTS))
def test_check(ddp_run, number):
    ddp_run(in_rank, number)
"""

FRESH = """
import torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcessTestCase
from check import check


class TestCheck(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def check(self, number):
        store = dist.FileStore(self.file_name, 2)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=2)
        check(self.rank, number)
"""

CONTINUOUS = """
from torch.testing._internal.common_distributed import MultiProcContinuousTest
from check import check


class TestCheck(MultiProcContinuousTest):
    world_size = 2

    @classmethod
    def backend_str(cls):
        return "gloo"

    @classmethod
    def device_type(cls):
        return "cpu"

    def check(self, number):
        check(self.rank, number)
"""

METHOD = """
    def test_check_{number}(self):
        self.check({number})
"""

KINDS = ("ddp_run", "MultiProcessTestCase", "MultiProcContinuousTest")
PR_SET_CHILD_SUBREAPER = 36  # of linux/prctl.h


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tests", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    # who lost its parent is waited for here, so that its CPU time is counted
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    wall: dict[str, list[float]] = {kind: [] for kind in KINDS}
    cpu: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        write_tests(Path(folder), options.tests)
        for done in range(options.rounds):
            turn = done % len(KINDS)
            for kind in (*KINDS[turn:], *KINDS[:turn]):
                seconds, of_cpu = run(folder, kind, options.tests)
                wall[kind].append(seconds)
                cpu[kind].append(of_cpu)
                latest = f"{kind}: {seconds:.1f} s, {of_cpu:.1f} s of CPU time"
                print(latest, file=sys.stderr, flush=True)
            progress(done + 1, options.rounds, "rounds")
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(
        f"\n{options.tests} tests on two ranks over gloo: median [quartiles] of"
        f" {options.rounds} runs of pytest; load averages at the end: {load}\n"
    )
    rows = [["", "wall", "/ ddp_run", "CPU", "/ ddp_run"]]
    for kind in KINDS:
        rows.append([kind])
        for measured in (wall, cpu):
            rows[-1] += [
                spread(measured[kind], "s"),
                f"{ratio(measured, kind):.2g}x",
            ]
    print(table(rows))
    promise = f"at least 5 times less CPU time than {KINDS[1]}"
    return verdict([(promise, ratio(cpu, KINDS[1]) >= 5)])


def ratio(measured: dict[str, list[float]], kind: str) -> float:
    """Return the median of a kind over that of `ddp_run`."""
    return (
        quartiles(measured[kind]).median / quartiles(measured[KINDS[0]]).median
    )


def write_tests(folder: Path, tests: int) -> None:
    """Write the check, and a module of each kind that runs it in so many tests."""
    methods = "".join(METHOD.format(number=number) for number in range(tests))
    texts = {
        "check": CHECK,
        f"test_{KINDS[0]}": DDP_RUN.replace("TESTS", str(tests)),
        f"test_{KINDS[1]}": FRESH + methods,
        f"test_{KINDS[2]}": CONTINUOUS + methods,
    }
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text)


def run(folder: str, kind: str, tests: int) -> tuple[float, float]:
    """Return the seconds of a run of pytest, and its CPU time; raises if not all tests pass."""
    module = f"test_{kind}.py"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        module,
    ]
    # so that a rank of torch's, a new interpreter, finds the modules
    path = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
    environ = {**os.environ, "PYTHONPATH": path}
    before, began = cpu_of_children(), time.perf_counter()
    ran = subprocess.run(
        command,
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
    )
    took = time.perf_counter() - began
    if ran.returncode or f"{tests} passed" not in ran.stdout:
        raise SystemExit(f"{kind}:\n{ran.stdout}\n{ran.stderr}")
    return took, cpu_of_children() - before


def cpu_of_children() -> float:
    """Wait for all processes that were started here; return the seconds of their CPU time."""
    try:
        while True:
            os.wait()
    except ChildProcessError:
        pass
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    sys.exit(main())
