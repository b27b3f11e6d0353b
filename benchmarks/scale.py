"""Does the first node keep up with many ranks? What two ranks measured here is drawn anew for each
of many, on nodes of eight ranks whose clocks are 1,000 s apart, and goes the way of a comparison:
from the bytes of the ranks to the verdict and the reports.

    python benchmarks/scale.py [--ranks 128,256,512,1024] [--steps 100] [--launches 5]

No rank of the many runs: no process group, and no network. Each number of ranks has a process of
its own. All takes one core and waits for nothing, so CPU time is what it takes on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from _common import progress, table, verdict

from pytest_ddpperf.compare.rounds import combine
from pytest_ddpperf.launch import Launcher, Observer
from pytest_ddpperf.launch.run import Delivery
from pytest_ddpperf.records import codec
from pytest_ddpperf.records.outcome import (
    BaselineSide,
    Outcome,
    RunInfo,
    Version,
)
from pytest_ddpperf.records.plan import Limit, Plan
from pytest_ddpperf.records.samples import (
    Environment,
    LaunchCost,
    LaunchSamples,
    Measurement,
    Status,
    TestId,
    Window,
)
from pytest_ddpperf.report import causes, json_report, markdown, page, terminal
from pytest_ddpperf.verdict.decision import judge
from pytest_ddpperf.verdict.times import TEST_LEVEL
from pytest_ddpperf.wire.opened import Opened

_RANKS_PER_NODE = 8
_AHEAD_NS = (
    1000 * 10**9
)  # of a node's clock, compared with that of the node before
_SLOWER = 1.1  # the current side
_NOISE = 0.02
_LIMITS = (Limit(metric="p50", value=0.05, unit="%"),)
# Of the largest compared with the smallest number of ranks, for each rank.
_MOST_GROWTH = 1.5
_MOST_REPORT_SECONDS = 1.0
_MOST_RESULT_BYTES = 100_000


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", default="128,256,512,1024")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--launches", type=int, default=5)
    parser.add_argument("--of", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.of:
        print(json.dumps(_follow(Path(asked.of), asked)))
        return 0
    sizes = [int(size) for size in asked.ranks.split(",")]
    with tempfile.TemporaryDirectory() as name:
        recorded = Path(name, "windows.json")
        recorded.write_text(json.dumps(_record(asked.steps)))
        found = []
        for number, ranks in enumerate(sizes, 1):
            command = [
                *(sys.executable, __file__, "--of", str(recorded)),
                *("--ranks", str(ranks), "--launches", str(asked.launches)),
            ]
            ended = subprocess.run(
                command, capture_output=True, text=True, check=False
            )
            if ended.returncode:
                sys.exit(ended.stderr)
            found.append(json.loads(ended.stdout))
            progress(number, len(sizes), "numbers of ranks")
    return _report(sizes, found)


def _report(sizes: Sequence[int], found: Sequence[dict[str, Any]]) -> int:
    rows = [
        (
            "ranks",
            "nodes",
            "bytes of a rank",
            "a launch",
            "verdict, causes",
            "terminal, Markdown",
            "JSON",
            "page",
            "peak memory",
        )
    ]
    for ranks, each in zip(sizes, found, strict=True):
        rows.append(
            (
                str(ranks),
                str(ranks // _RANKS_PER_NODE),
                f"{each['bytes']:,}",
                f"{each['launch']:.2f} s",
                f"{each['judge']:.2f} s",
                f"{each['text']:.2f} s",
                f"{each['json']:.2f} s, {each['json_bytes'] / 1e6:.1f} MB",
                f"{each['page']:.2f} s, {each['page_bytes'] / 1e6:.2f} MB",
                f"{each['memory'] / 1e6:.0f} MB",
            )
        )
    print(table(rows))
    first, last = found[0], found[-1]
    times = sizes[-1] / sizes[0]
    promises = [
        (
            f"{what}: at most {_MOST_GROWTH} times as much for each rank of {sizes[-1]} as of"
            f" {sizes[0]}",
            last[name] <= _MOST_GROWTH * times * first[name],
        )
        for name, what in (
            ("launch", "CPU time of a launch"),
            ("judge", "CPU time of the verdict"),
            ("memory", "memory"),
        )
    ]
    promises += [
        (
            f"terminal and Markdown of {sizes[-1]} ranks: at most {_MOST_REPORT_SECONDS:g} s",
            last["text"] <= _MOST_REPORT_SECONDS,
        ),
        (
            f"what a rank sends: at most {_MOST_RESULT_BYTES:,} bytes",
            last["bytes"] <= _MOST_RESULT_BYTES,
        ),
        (
            "the slower side is REGRESSED",
            all(each["status"] == Status.REGRESSED.value for each in found),
        ),
    ]
    return verdict(promises)


def _record(steps: int) -> list[str]:
    """Return what two ranks send after a launch, as JSON, by rank."""
    kept: list[Delivery] = []

    class Keeping(Launcher):
        def _launch(
            self, plan: Plan, task: bytes, observer: Observer
        ) -> Delivery:
            kept.append(super()._launch(plan, task, observer))
            return kept[-1]

    plan = Plan(
        world_size=2, backend="gloo", device="cpu", warmup=5, steps=steps
    )
    launcher = Keeping(dict)
    try:
        launcher.measure(plan, _setup, Observer())
    finally:
        launcher.close()
    return [result.decode() for result in kept[-1].results]


def _setup(ctx: Any) -> Callable[[], None]:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    layers = [torch.nn.Linear(256, 256) for _ in range(4)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randn(32, 256)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return step


def _follow(recorded: Path, asked: argparse.Namespace) -> dict[str, Any]:
    """Return what a comparison of so many ranks took, by its parts."""
    ranks = int(asked.ranks)
    texts = json.loads(recorded.read_text())
    windows = [codec.from_json(Window, text.encode()) for text in texts]
    plan = Plan(
        world_size=ranks,
        nodes=ranks // _RANKS_PER_NODE,
        backend="gloo",
        device="cpu",
        warmup=5,
        steps=len(windows[0].blocked_ns),
    )
    launcher = Launcher(dict, nodes=_no_nodes())
    source = random.Random(0)
    taken: dict[str, Any] = {"launch": 0.0}
    sides: list[Measurement] = []
    before = _memory()
    for slower in (1.0, _SLOWER):
        launches: list[LaunchSamples] = []
        for _ in range(asked.launches):
            level = slower * source.lognormvariate(0, _NOISE / 2)
            delivery = _delivery(windows, ranks, level, source)
            taken["bytes"] = max(map(len, delivery.results))
            began = time.process_time()
            launches.append(launcher._samples(plan, delivery))
            taken["launch"] += time.process_time() - began
            del delivery
        sides.append(
            combine(tuple(launches), Environment(key={"backend": "gloo"}))
        )
    taken["launch"] /= 2 * asked.launches
    base, now = sides
    began = time.process_time()
    judged = judge(now, [base], _LIMITS, interleaved=True)
    side = BaselineSide(
        version=Version(ref="main", commit="0", now="1"), order="bn"
    )
    found, words = causes.explain(judged, plan, now, [base], TEST_LEVEL, side)
    taken["judge"] = time.process_time() - began
    taken["status"] = judged.status.value
    outcome = Outcome(
        nodeid="tests/perf/test_step.py::test_step",
        test=TestId(module="tests/perf/test_step", name="test_step"),
        plan=plan,
        launches=asked.launches,
        batch_size=32,
        verdict=judged,
        fails=True,
        measurement=now,
        costs=(LaunchCost(),) * asked.launches,
        evidence=words,
        findings=found,
    )
    run = RunInfo(created="2026-11-28T12:00:00+00:00", version="0")
    taken |= _reports(outcome, run)
    taken["memory"] = _memory() - before
    return taken


def _reports(outcome: Outcome, run: RunInfo) -> dict[str, float]:
    began = time.process_time()
    content = json_report.report([outcome], run)
    text = codec.dumps(content)
    taken = {"json": time.process_time() - began, "json_bytes": len(text)}
    stored = json_report.report_of(Path("run.json"), json.loads(text))
    began = time.process_time()
    list(terminal.report([outcome], run, [], verbosity=1, width=100))
    markdown.report(stored)
    taken["text"] = time.process_time() - began
    page.html(stored)  # imports matplotlib
    began = time.process_time()
    written = page.html(stored)
    taken["page"] = time.process_time() - began
    taken["page_bytes"] = len(written)
    return taken


def _no_nodes() -> Any:
    """What a launcher asks the other nodes for."""
    return SimpleNamespace(facts={})


def _memory() -> int:
    """Return the most bytes that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _delivery(
    windows: Sequence[Window], ranks: int, level: float, source: random.Random
) -> Delivery:
    """Return what so many ranks send. One of them, which is another one in each launch, is later
    than the others."""
    late = source.randrange(ranks)
    results = []
    ahead: dict[int, float] = {}
    for rank in range(ranks):
        node = rank // _RANKS_PER_NODE
        if node:
            ahead[rank] = float(node * _AHEAD_NS)
        scale = level * source.uniform(0.97, 1.0)
        if rank == late:
            scale = level
        window = windows[rank % len(windows)]
        drawn = _drawn(window, scale, round(ahead.get(rank, 0.0)), source)
        results.append(codec.to_json(drawn))
    return Delivery(
        results=tuple(results),
        cost=LaunchCost(),
        output=(),
        notes=(),
        opened=Opened(""),  # nothing
        files={},
        clocks_ahead_ns=ahead,
    )


def _drawn(
    window: Window, scale: float, ahead: int, source: random.Random
) -> Window:
    """Return a window with other step times, by another clock."""
    marks: list[tuple[int, ...]] = []
    moved: dict[int, int] = {}
    for stretch in window.marks_ns:
        now = stretch[0] + ahead
        drawn = [now]
        moved[stretch[0]] = now
        for before, after in pairwise(stretch):
            now += round(
                (after - before) * scale * source.lognormvariate(0, _NOISE)
            )
            drawn.append(now)
            moved[after] = now
        marks.append(tuple(drawn))
    phases = window.phases
    if phases is not None:
        # as far behind the end of its step as before
        steps = tuple(_moved_ends(step, moved, ahead) for step in phases.steps)
        arrivals = phases.arrivals
        if arrivals is not None:
            arrivals = tuple((ns + ahead, name) for ns, name in arrivals)
        phases = replace(phases, steps=steps, arrivals=arrivals)
    return replace(window, marks_ns=tuple(marks), phases=phases)


def _moved_ends(
    step: Sequence[tuple[int, int]], moved: Mapping[int, int], ahead: int
) -> tuple[tuple[int, int], ...]:
    return tuple((index, moved.get(end, end + ahead)) for index, end in step)


if __name__ == "__main__":
    sys.exit(main())
