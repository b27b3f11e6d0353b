"""Many launches in a row, some with a plant: does one hang, fail, or leave anything behind?

    python benchmarks/soak.py [--launches 1000] [--ranks 2] [--rpc]

Plants, one launch in ten: a rank with a thread that never ends after it delivered, a rank whose
destructor sleeps for a minute, and, one in a hundred, a clean-up that hangs beyond the deadline.
All are green by design. With --rpc the ranks are trainers, beside two parameter servers and a
master, and the plants are the parameter servers'.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from _common import progress, spread, verdict

from pytest_ddpperf.launch import Launcher, Observer
from pytest_ddpperf.records.errors import DdpPerfError
from pytest_ddpperf.records.plan import Plan

_DEADLINE = 30.0  # no healthy launch of this takes a second
_SHORT_DEADLINE = 2.0  # of the launches whose clean-up hangs


class SlowToDie:
    def __del__(self) -> None:
        time.sleep(60)


def setup(ctx: Any) -> Any:
    """A healthy rank."""
    value = torch.ones(1)
    return lambda: torch.distributed.all_reduce(value)


def with_thread(ctx: Any) -> Any:
    threading.Thread(target=time.sleep, args=(60,)).start()
    return setup(ctx)


def with_destructor(ctx: Any) -> Any:
    kept, step = SlowToDie(), setup(ctx)
    return lambda: (step(), kept)


def with_clean_up(ctx: Any) -> Any:
    yield setup(ctx)
    time.sleep(60)


def trainer(ctx: Any, shared: Any) -> Any:
    from _workload import rpc_step

    return rpc_step


def plant(number: int) -> Any:
    """What launch `number` is given."""
    if number % 100 == 99:
        return with_clean_up
    return {4: with_thread, 9: with_destructor}.get(number % 20, setup)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--launches", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rpc", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        return soak(options.launches, options.ranks, options.rpc, Path(folder))


def soak(launches: int, ranks: int, rpc: bool, folder: Path) -> int:
    launcher = Launcher(lambda: {"soak": __file__})
    healthy: list[float] = []
    hung = failed = 0
    try:
        launch(launcher, setup, ranks, rpc)
        before = what_is_there(launcher, folder)
        for number in range(launches):
            began = time.perf_counter()
            try:
                launch(launcher, plant(number), ranks, rpc)
            except DdpPerfError as error:
                print(f"\nlaunch {number}: {error}", file=sys.stderr)
                hung += "did not end within" in str(error)
                failed += 1
            if plant(number) is setup:
                healthy.append(time.perf_counter() - began)
            progress(number + 1, launches, f"launches, {failed} failed")
        after = what_is_there(launcher, folder)
    finally:
        launcher.close()
    planted = launches - len(healthy)
    ranks_are = (
        f"{ranks} trainers, 2 parameter servers and a master"
        if rpc
        else f"{ranks} ranks"
    )
    print(
        f"{launches} launches of {ranks_are}, {planted} with a plant; a healthy one took"
        f" {spread(healthy, 's')}\n"
    )
    promises = [("none hung", hung == 0), ("none failed", failed == 0)]
    for what, count in after.items():
        promises.append(
            (
                f"{what}: {before[what]} before, {count} after",
                count <= before[what],
            )
        )
    return verdict(promises)


def launch(launcher: Launcher, planted: Any, ranks: int, rpc: bool) -> None:
    deadline = _SHORT_DEADLINE if planted is with_clean_up else _DEADLINE
    plan = Plan(
        world_size=ranks,
        backend="gloo",
        device="cpu",
        warmup=1,
        steps=3,
        timing="step",
        timeout_seconds=deadline,
    )
    if rpc:
        plan = replace(plan, parameter_servers=2, master=True)
        launcher.measure(plan, trainer, Observer(), (lambda ctx: None, planted))
    else:
        launcher.measure(plan, planted, Observer())


def what_is_there(launcher: Launcher, folder: Path) -> dict[str, int]:
    """What a launch could leave: counts of this process and its rank server."""
    server = launcher._server.pid
    assert server
    children = (
        Path(f"/proc/{server}/task/{server}/children").read_text().split()
    )
    return {
        "processes below the rank server": len(children),
        "descriptors of pytest": len(os.listdir("/proc/self/fd")),
        "descriptors of the rank server": len(os.listdir(f"/proc/{server}/fd")),
        "files in the temporary folder": sum(
            entry.name != "torchinductor_root" for entry in folder.iterdir()
        ),
        "files in /dev/shm": len(os.listdir("/dev/shm")),
    }


if __name__ == "__main__":
    sys.exit(main())
