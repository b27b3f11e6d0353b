"""What the timed loop adds to a step: an empty step, timed, beside a bare loop over the same step.
And what noting the files that ranks open adds: the step of a small DDP model, alone and with ten
files that it reads, with and without. And what the stamps of phases add to the step of a DDP model
of 150 modules.

    python benchmarks/overhead.py [--rounds 10] [--steps 20000] [--pairs 20]

Both sides run in ranks of groups of two, interleaved.
"""

from __future__ import annotations

import argparse
import gc
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from _common import progress, quartiles, spread, table, verdict
from _models import step_of

from pytest_ddpperf.compare.interleaving import interleave
from pytest_ddpperf.launch import Launcher, Observer
from pytest_ddpperf.records.plan import Plan
from pytest_ddpperf.records.quantiles import quantile
from pytest_ddpperf.records.samples import LaunchSamples
from pytest_ddpperf.verdict.stats import t_quantile
from pytest_ddpperf.wire.source_trees import Trees

FILES = 10


def empty(ctx: Any) -> Any:
    return lambda: None


def bare(ctx: Any, steps: int) -> float:
    """Seconds a step of a loop that only calls."""
    step = empty(ctx)
    began = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - began) / steps


def reading(folder: str, ctx: Any, files: int) -> Callable[[], None]:
    train = step_of("mlp")

    def step() -> None:
        for number in range(files):
            Path(folder, str(number)).read_bytes()
        train()

    return step


def training(ctx: Any, stamped: bool) -> Callable[[], None]:
    """A step of a DDP model of 150 modules, with or without stamps of its phases."""
    import torch

    from pytest_ddpperf.rank.stamps import Stamps

    if not stamped:
        Stamps.install = lambda self: None  # type: ignore[method-assign]
        Stamps.finding_modules = lambda self: nullcontext()  # type: ignore[method-assign, assignment, return-value]
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(150)))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(16, 64)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def stamps_cost() -> float:
    """Return the seconds of the stamps of a step: of eight, and of two wrapped calls among them."""
    import torch

    from pytest_ddpperf.rank.stamps import Stamps

    stamps, rounds = Stamps(torch.device("cpu")), 10_000
    hook, wrapped = stamps._hook(1), stamps._around(2)(lambda: None)
    gc.disable()  # as in a window
    began = time.perf_counter()
    for _ in range(rounds):
        hook(), hook(), hook(), hook()
        wrapped(), wrapped()
    seconds = time.perf_counter() - began
    gc.enable()
    return seconds / rounds


Row = list[str]


def noting(pairs: int) -> tuple[list[Row], bool]:
    """Return the rows of a table, and whether every 95 % interval of the difference includes 0."""
    rows, nothing = list[Row](), True
    with ExitStack() as opened:
        folder = opened.enter_context(tempfile.TemporaryDirectory())
        for number in range(FILES):
            Path(folder, str(number)).write_text("some data")
        trees = Trees(current=folder, base=folder, kept=())
        plain, other, noted = (
            opened.enter_context(
                closing(Launcher(lambda: {"overhead": __file__}, trees=each))
            )
            for each in (None, None, trees)
        )
        for files in (0, FILES):
            setup = partial(reading, folder, files=files)
            name = f"of a DDP model{f', {files} files read' if files else ''}"
            more, small = compared((plain, setup), (noted, setup), pairs, name)
            rows, nothing = rows + more, nothing and small
        sides = (
            (plain, partial(training, stamped=False)),
            (other, partial(training, stamped=True)),
        )
        more, small = compared(
            *sides, pairs, "of a DDP model of 150 modules, with stamps"
        )
    return rows + more, nothing and small


def compared(
    without: Any, within: Any, pairs: int, name: str
) -> tuple[list[Row], bool]:
    """Compare two sides, each a launcher and a set-up, in interleaved launches."""
    plan = Plan(world_size=2, backend="gloo", device="cpu", warmup=5, steps=200)
    found: tuple[list[LaunchSamples], list[LaunchSamples]] = ([], [])
    rows, nothing = list[Row](), True
    for done in range(pairs):
        with ExitStack() as alive:
            both = [
                alive.enter_context(side.pause(plan, setup, Observer()))
                for side, setup in (without, within)
            ]
            interleave((both[0], both[1]), random.Random())
            for launches, launch in zip(found, both, strict=True):
                launches.append(launch.deliver())
        progress(done + 1, pairs, name)
    for q in (10, 50):
        plain, more = (
            [quantile(launch.step_seconds, q) for launch in launches]
            for launches in found
        )
        differences = [
            math.log(after / before)
            for before, after in zip(plain, more, strict=True)
        ]
        mean, error = (
            statistics.fmean(differences),
            statistics.stdev(differences) / math.sqrt(pairs),
        )
        reach = t_quantile(0.975, pairs - 1) * error
        low, high = mean - reach, mean + reach
        nothing &= low <= 0
        figures = (spread(values, "ms", 1e3) for values in (plain, more))
        rows.append(
            [
                f"{name}: p{q}",
                *figures,
                f"{mean:+.1%}",
                f"{low:+.1%} to {high:+.1%}",
            ]
        )
    return rows, nothing


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--pairs", type=int, default=20)
    options = parser.parse_args()
    launcher = Launcher(lambda: {"overhead": __file__})
    plan = Plan(
        world_size=2,
        backend="gloo",
        device="cpu",
        steps=options.steps,
        timing="step",
    )
    timed: list[float] = []
    untimed: list[float] = []
    try:
        for done in range(options.rounds):
            ranks = launcher.measure(plan, empty, Observer()).rank_seconds
            timed.append(max(sum(rank) for rank in ranks) / options.steps)
            untimed.append(
                max(launcher.call(plan, bare, (options.steps,), Observer()))
            )
            progress(done + 1, options.rounds, "overhead")
    finally:
        launcher.close()
    added = [
        with_clock - without
        for with_clock, without in zip(timed, untimed, strict=True)
    ]
    print(
        f"median [quartiles] of {options.rounds} rounds of {options.steps} steps, the slower of two"
        " ranks\n"
    )
    print(
        table(
            [
                ["timed loop", "bare loop", "added a step"],
                [
                    spread(timed, "us", 1e6),
                    spread(untimed, "us", 1e6),
                    spread(added, "us", 1e6),
                ],
            ]
        )
    )
    rows, nothing = noting(options.pairs)
    print(f"\nmedian [quartiles] of {options.pairs} pairs of launches\n")
    print(
        table(
            [
                ["a step", "without", "with", "difference", "95 % interval"],
                *rows,
            ]
        )
    )
    stamps = stamps_cost()
    print(f"\nthe stamps of a step: {stamps * 1e6:.1f} us")
    promises = [
        (
            "at most 10 microseconds an empty step",
            quartiles(added).median <= 10e-6,
        )
    ]
    promises += [
        ("at most 10 microseconds for the stamps of a step", stamps <= 10e-6)
    ]
    return verdict(
        [*promises, ("noting files and stamps add nothing measurable", nothing)]
    )


if __name__ == "__main__":
    sys.exit(main())
