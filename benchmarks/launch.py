"""How long a fresh process group takes, from the request through three DDP steps to the end of
every rank; and an RPC world of two trainers, two parameter servers and a master, through three
steps of look-ups and an all-reduce.

    python benchmarks/launch.py [--ranks 2,4,8] [--rounds 10]

Ours beside `torch.multiprocessing.spawn` and `torchrun`, interleaved: each round launches each
once. Everything runs inside the `pytest` console script, since from there every spawned rank runs
that script again. The rank server's own start, which imports torch once a session, is shown by
itself.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", default="2,4,8")
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    script = Path(sys.executable).with_name("pytest")
    command = [
        str(script),
        "-q",
        "-s",
        "-p",
        "no:benchmark",
        "-p",
        "no:randomly",
        "-p",
        "no:cacheprovider",
    ]
    asked = {
        "DDPPERF_RANKS": options.ranks,
        "DDPPERF_ROUNDS": str(options.rounds),
        "PYTHONPATH": str(HERE),
    }
    return subprocess.run(
        [*command, str(Path(__file__))], env={**os.environ, **asked}, cwd=HERE
    ).returncode


def test_launch(ddp_run: Any) -> None:
    from _common import progress, quartiles, spread, table, verdict

    sizes = [int(size) for size in os.environ["DDPPERF_RANKS"].split(",")]
    rounds = int(os.environ["DDPPERF_ROUNDS"])
    session = ddp_run._run.session
    began = time.perf_counter()
    session.launcher._server.ensure(
        {**os.environ, "MKL_DUMMY": "a server of its own"}, ()
    )
    server_seconds = time.perf_counter() - began

    def ours(world_size: int) -> None:
        ddp_run._world_size = world_size
        assert len(ddp_run(in_rank)) == world_size

    launchers: dict[str, Callable[[int], None]] = {
        "ddpperf": ours,
        "mp.spawn": by_spawn,
        "torchrun": by_torchrun,
    }
    seconds: dict[tuple[str, int], list[float]] = {}
    # launches of the others: ours failing ends the benchmark
    failed: list[str] = []
    for world_size in sizes:
        # so that all launchers find the files of torch in memory
        ours(world_size)
        for done in range(rounds):
            for name, launch in launchers.items():
                began = time.perf_counter()
                try:
                    launch(world_size)
                except Exception as error:
                    if name == "ddpperf":
                        raise
                    failed.append(
                        f"{name} of {world_size} ranks: {str(error).strip().splitlines()[-1]}"
                    )
                    continue
                seconds.setdefault((name, world_size), []).append(
                    time.perf_counter() - began
                )
            progress(done + 1, rounds, f"{world_size} ranks")
    rows = [["ranks", *launchers, "spawn / ddpperf", "torchrun / ddpperf"]]
    faster: dict[int, float] = {}
    for world_size in sizes:
        least = quartiles(seconds["ddpperf", world_size]).median
        times_ours = {
            name: [s / least for s in seconds[name, world_size]]
            for name in ("mp.spawn", "torchrun")
        }
        faster[world_size] = quartiles(times_ours["mp.spawn"]).median
        rows.append(
            [
                str(world_size),
                *(spread(seconds[name, world_size], "s") for name in launchers),
            ]
            + [spread(ratio, "x") for ratio in times_ours.values()]
        )
    mine, others = rpc_seconds(session.launcher, rounds)
    ratios = [seconds / quartiles(mine).median for seconds in others]
    rpc_faster = quartiles(ratios).median
    rows.append(
        [
            "RPC",
            spread(mine, "s"),
            spread(others, "s"),
            "-",
            spread(ratios, "x"),
            "-",
        ]
    )
    print(
        f"\nmedian [quartiles] of {rounds} rounds; the rank server itself started in"
        f" {server_seconds:.2f} s\n"
    )
    print(table(rows))
    for launch_failed in failed:
        print(f"\nnot counted, it failed: {launch_failed}")
    promises = [
        (f"{n} ranks: at least 20 times faster than spawn", faster[n] >= 20)
        for n in sizes
        if n in (2, 8)
    ]
    if 2 in sizes:
        promises.append(
            (
                "2 ranks: at most 0.10 s",
                quartiles(seconds["ddpperf", 2]).median <= 0.10,
            )
        )
    promises.append(
        ("RPC: at least 5 times faster than spawn", rpc_faster >= 5)
    )
    assert verdict(promises) == 0


def rpc_seconds(launcher: Any, rounds: int) -> tuple[list[float], list[float]]:
    """What an RPC world takes, ours and by mp.spawn, interleaved."""
    from _common import progress
    from _workload import RPC_NAMES, spawned_rpc
    from torch.multiprocessing.spawn import spawn

    from pytest_ddpperf.launch import Observer
    from pytest_ddpperf.records.plan import Plan

    plan = Plan(
        world_size=2,
        backend="gloo",
        device="cpu",
        steps=3,
        parameter_servers=2,
        master=True,
    )
    ours: list[float] = []
    theirs: list[float] = []
    # the first, in which the rank server learns of RPC, does not count
    for done in range(-1, rounds):
        began = time.perf_counter()
        launcher.measure(plan, rpc_trainer, Observer(), (rpc_master, None))
        ended = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            spawn(spawned_rpc, args=(folder,), nprocs=len(RPC_NAMES))
        if done >= 0:
            ours.append(ended - began)
            theirs.append(time.perf_counter() - ended)
        progress(done + 1, rounds, "RPC")
    return ours, theirs


def rpc_master(ctx: Any) -> None:
    """There is one, and it shares nothing."""


def rpc_trainer(ctx: Any, shared: None) -> Callable[[], None]:
    from _workload import rpc_step

    return rpc_step


def in_rank(ctx: Any) -> float:
    from _workload import train

    return train()


def by_spawn(world_size: int) -> None:
    from _workload import spawned
    from torch.multiprocessing.spawn import spawn

    with tempfile.TemporaryDirectory() as folder:
        spawn(spawned, args=(world_size, f"{folder}/store"), nprocs=world_size)


def by_torchrun(world_size: int) -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={world_size}",
    ]
    subprocess.run(
        [*command, str(HERE / "_workload.py")], check=True, capture_output=True
    )


if __name__ == "__main__":
    sys.exit(main())
