"""Outcomes as a run has them, judged by the real judge from samples that are drawn: for the tests
of what reports show, and for the benchmarks of what that takes."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pytest_ddpperf.records.outcome import (
    BaselineSide,
    Outcome,
    RunInfo,
    Version,
)
from pytest_ddpperf.records.plan import Limit, Plan
from pytest_ddpperf.records.samples import (
    Counters,
    Environment,
    FactChange,
    LaunchCost,
    Measurement,
    Recording,
    Samples,
    Scalar,
    TestId,
    Verdict,
)
from pytest_ddpperf.report import causes
from pytest_ddpperf.report.json_report import Entry, StoredReport
from pytest_ddpperf.verdict.decision import fails, judge
from pytest_ddpperf.verdict.observed import in_percentiles

LIMITS = (
    Limit(metric="p10", value=0.1, unit="%"),
    Limit(metric="p50", value=0.1, unit="%"),
)
NEWER_TORCH = FactChange(name="torch", before="2.12", now="2.13")
FACTS: Mapping[str, Scalar] = {
    "torch": "2.13.0",
    "python": "3.11.7",
    "cpu_model": "AMD EPYC 9654",
    "places": "",
}
RUN = RunInfo(
    id="3f2b8c1d",
    created="2026-03-04T05:06:07+00:00",
    version="0.1",
    commit="9a825c73dcb873626cd628f2e15fdef61a4a953b",
    committed="2026-03-04T04:00:00+00:00",
    facts=FACTS,
)
_VERSION = Version(
    ref="origin/main",
    commit="1a2b3c4d5e6f7a8b9c0d",
    now="9a825c73dcb873626cd628f2e15fdef61a4a953b",
)


def report(
    outcomes: Sequence[Outcome], *runs: RunInfo, messages: Sequence[str] = ()
) -> StoredReport:
    """Return a report of some runs, as if it had been read from files."""
    runs = runs or (RUN,)
    entries = tuple(Entry(outcome=outcome, run=runs[0]) for outcome in outcomes)
    return StoredReport(
        paths=(Path("run.json"),) * len(runs),
        runs=runs,
        entries=entries,
        messages=tuple(messages),
    )


_ACCEPT = "pytest --ddp-save-baseline"


def explained(
    outcome: Outcome, baseline: Sequence[Measurement], accept: str = ""
) -> Outcome:
    """Return the outcome with its causes, as a run has it."""
    assert outcome.verdict is not None
    assert outcome.measurement is not None
    words = causes.find_causes(
        outcome.verdict, outcome.plan, outcome.measurement, baseline
    )
    return replace(
        outcome,
        evidence=words if outcome.verdict != "PASS" else (),
        accept=accept,
    )


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """How samples are drawn."""

    seed: int = 0
    step: float = 0.02  # seconds
    launches: int = 5
    steps: int = 60
    ranks: int = 2
    noise: float = 0.02  # of a step; launches differ by half of it
    slow_rank: int | None = None  # works half a step more than the others
    blocked: bool = False  # trainers wait for RPC
    counters: Counters | None = None
    recorded: Mapping[str, Scalar] | None = None


def measurement(drawn: Drawn) -> Measurement:
    source = random.Random(drawn.seed)
    group, own, cpu, blocked = [], [], [], []
    for _ in range(drawn.launches):
        level = drawn.step * source.lognormvariate(0, drawn.noise / 2)
        steps = [
            level * source.lognormvariate(0, drawn.noise)
            for _ in range(drawn.steps)
        ]
        for late in source.sample(range(drawn.steps), drawn.steps // 20):
            steps[late] *= 1.4
        group.append(tuple(steps))
        own.append(
            tuple(
                tuple(s * source.uniform(0.97, 1.0) for s in steps)
                for _ in range(drawn.ranks)
            )
        )
        work = [
            0.9 if rank == drawn.slow_rank else 0.6
            for rank in range(drawn.ranks)
        ]
        cpu.append(
            tuple(
                tuple(s * share * source.uniform(0.97, 1.03) for s in steps)
                for share in work
            )
        )
        blocked.append(
            tuple(
                tuple(s * source.uniform(0.2, 0.3) for s in steps)
                for _ in range(drawn.ranks)
            )
        )
    return Measurement(
        samples=Samples(
            step_seconds=tuple(group),
            rank_seconds=tuple(own),
            cpu_seconds=tuple(cpu),
            blocked_seconds=tuple(blocked) if drawn.blocked else None,
        ),
        environment=Environment(
            key={
                "backend": "gloo",
                "world_size": drawn.ranks,
                "cpu_model": "AMD EPYC 9654",
            },
            must_match={"timing": "step", "warmup": 5},
            recorded={
                "host": "runner-7",
                "torch": "2.13.0",
                "env:OMP_NUM_THREADS": "2",
                **(drawn.recorded or {}),
            },
        ),
        counters=drawn.counters
        or {
            "all_reduce.count": 5,
            "all_reduce.bytes": 102228128,
            "rpc.bytes": None,
        },
    )


def outcome(
    name: str,
    drawn: Drawn,
    verdict: Verdict,
    measured: Measurement,
    **kwargs: Any,
) -> Outcome:
    cost = LaunchCost(
        start=0.05,
        group=0.02,
        setup=0.31,
        warmup=0.4,
        steps=drawn.steps * drawn.step,
        end=0.04,
    )
    return Outcome(
        **{
            "nodeid": f"tests/perf/test_step.py::{name}",
            "test": TestId(module="tests/perf/test_step", name=name),
            "plan": Plan(
                world_size=drawn.ranks,
                backend="gloo",
                device="cpu",
                warmup=5,
                steps=30,
            ),
            "launches": 5,
            "batch_size": 32,
            "verdict": verdict,
            "fails": fails(verdict, fail_on=None, baseline_missing="warn"),
            "measurement": measured,
            "costs": (cost,) * drawn.launches,
            "file": "tests/perf/test_step.py",
            "line": 42,
            **kwargs,
        }
    )


def against_baseline(
    name: str,
    now: Drawn,
    base: Drawn,
    *,
    sessions: int = 3,
    limits: Sequence[Limit] = LIMITS,
    **kwargs: Any,
) -> Outcome:
    """Compared with a stored baseline whose sessions drift by as much as launches do."""
    found = [
        measurement(
            replace(
                base,
                seed=base.seed + k,
                step=base.step * (1 + (k % 3 - 1) * base.noise / 2),
            )
        )
        for k in range(sessions)
    ]
    recordings = tuple(
        Recording(
            measurement=session,
            created=f"2026-02-{k:02d}T03:04:05+00:00",
            commit="5d6e7f8a9b0c1d2e",
        )
        for k, session in enumerate(found, 1)
    )
    measured = measurement(now)
    reported = outcome(
        name,
        now,
        judge(measured, found, tuple(limits)),
        measured,
        baseline_path=f"baselines/cpu/tests/perf/test_step/{name}.json",
        sessions=tuple(
            in_percentiles(session, min(now.steps, base.steps))
            for session in recordings
        ),
        limits=tuple(limits),
        **kwargs,
    )
    return explained(
        reported,
        found,
        f"pytest tests/perf/test_step.py::{name} --ddp-save-baseline",
    )


def in_turns(
    name: str, now: Drawn, base: Drawn, *, stretches: bool = True, **kwargs: Any
) -> Outcome:
    """Interleaved with another version."""
    source = random.Random(now.seed)
    measured, other = measurement(now), measurement(base)
    lengths = ((now.steps // 5,) * 5,) * now.launches if stretches else ()
    verdict = judge(
        measured, [other], LIMITS, interleaved=True, stretches=lengths
    )
    side = BaselineSide(
        version=_VERSION,
        order="".join(
            "".join(source.sample("bn", 2)) for _ in range(now.launches)
        ),
        stretches=lengths,
        measurement=other,
        imported=12,
        differing=("src/net.py",),
    )
    return explained(
        outcome(name, now, verdict, measured, baseline_side=side, **kwargs),
        [other],
    )


def without_baseline(name: str, now: Drawn) -> Outcome:
    measured = measurement(now)
    path = f"baselines/cpu/{name}.json"
    return outcome(
        name,
        now,
        judge(measured, [], LIMITS),
        measured,
        baseline_path=path,
        accept=_ACCEPT,
    )


def failed(name: str) -> Outcome:
    plan = Plan(world_size=2, backend="gloo", device="cpu")
    test = TestId(module="tests/perf/test_step", name=name)
    error = "launch 2 of 5: rank 1 failed in setup: ValueError: bad shape"
    return Outcome(
        nodeid=f"tests/perf/test_step.py::{name}",
        test=test,
        plan=plan,
        launches=5,
        batch_size=32,
        verdict=None,
        fails=True,
        error=error,
    )


def of_each_kind() -> list[Outcome]:
    """One of each verdict and of each way to measure."""
    usual = Drawn()
    noisy = Drawn(noise=0.2)
    rpc = Plan(
        world_size=2,
        backend="gloo",
        device="cpu",
        parameter_servers=2,
        master=True,
    )
    fell = {"rpc.bytes": 4096, "rpc.calls": 4}
    rose = {"rpc.bytes": 5120, "rpc.calls": 5}
    on_bytes = (*LIMITS, Limit(metric="rpc.bytes", value=0.0, unit="%"))
    calls = replace(usual, blocked=True)
    return [
        against_baseline(
            "test_same", replace(usual, seed=1), replace(usual, seed=100)
        ),
        against_baseline(
            "test_slower",
            replace(
                usual,
                seed=2,
                step=0.027,
                slow_rank=1,
                recorded={"torch": "2.13.1"},
            ),
            replace(usual, seed=200),
        ),
        against_baseline(
            "test_noisy",
            replace(noisy, seed=3, step=0.0235),
            replace(noisy, seed=300),
            sessions=1,
        ),
        against_baseline(
            "test_faster",
            replace(usual, seed=4, step=0.012),
            replace(usual, seed=400),
        ),
        in_turns(
            "test_pull_request",
            replace(usual, seed=5, step=0.023, ranks=4),
            replace(usual, seed=500, ranks=4),
        ),
        in_turns(
            "test_pull_request_same",
            replace(usual, seed=6),
            replace(usual, seed=600),
            stretches=False,
        ),
        against_baseline(
            "test_parameter_server",
            replace(calls, seed=7, counters=rose),
            replace(calls, seed=700, counters=fell),
            limits=on_bytes,
            plan=rpc,
        ),
        without_baseline("test_new", replace(usual, seed=8, ranks=16)),
        failed("test_broken"),
        outcome(
            "test_saved",
            usual,
            judge(measurement(usual), [], LIMITS, not_gated="gate-off"),
            measurement(usual),
        ),
    ]
