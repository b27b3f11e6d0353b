"""What the reports say, read as a user reads it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_ddpperf import text
from pytest_ddpperf.plugin import watch
from pytest_ddpperf.records import codec
from pytest_ddpperf.records.errors import LaunchError
from pytest_ddpperf.records.metric import COUNTERS
from pytest_ddpperf.records.outcome import Outcome, RunInfo, StoredSession
from pytest_ddpperf.records.plan import Limit, Plan
from pytest_ddpperf.records.reason import Reason
from pytest_ddpperf.records.samples import (
    Comparison,
    CounterChange,
    Dropped,
    Environment,
    FactChange,
    Interval,
    LaunchCost,
    LossChange,
    Measurement,
    RankError,
    Samples,
    Speeds,
    Status,
    TestId,
    Verdict,
)
from pytest_ddpperf.report import (
    causes,
    json_report,
    sentences,
    summary,
    terminal,
)
from pytest_ddpperf.wire.channels import Phase
from tests import reports


def measurement(
    level: float = 0.2,
    *,
    ranks: Sequence[float] = (1.0, 1.0),
    cpu: bool = True,
    examples: Any = None,
) -> Measurement:
    """Two launches of three steps; `ranks` scales each rank's own and CPU time."""
    steps = (level, level, level)
    own = tuple(tuple(scale * step for step in steps) for scale in ranks)
    return Measurement(
        samples=Samples(
            step_seconds=(steps, steps),
            rank_seconds=(own, own),
            cpu_seconds=(own, own) if cpu else None,
            examples=examples,
        ),
        environment=Environment(key={"backend": "gloo"}),
    )


def comparison(
    status: Status = Status.REGRESSED, metric: str = "p50", **kwargs: Any
) -> Comparison:
    slower, same = (
        Interval(estimate=0.123, low=0.081, high=0.167),
        Interval(estimate=0.01, low=-0.01, high=0.03),
    )
    return Comparison(
        **{
            "limit": Limit(metric=metric, value=0.1, unit="%"),
            "status": status,
            "reason": "beyond-limit",
            "baseline_seconds": 0.1,
            "now_seconds": 0.2,
            "change": same if status is Status.PASS else slower,
            "p_value": 0.001,
            "level": 0.025,
            "resolution": 0.08,
            "alarm_rate": 0.004,
            "settled": True,
            **kwargs,
        }
    )


def risen(
    metric: str = "rpc.bytes",
    before: int = 1000,
    now: int = 1250,
    status: Status = Status.REGRESSED,
) -> CounterChange:
    limit = Limit(metric=metric, value=0.0, unit="%")
    return CounterChange(limit=limit, status=status, baseline=before, now=now)


def verdict(
    status: Status, reason: str = "within-limit", **kwargs: Any
) -> Verdict:
    compared = (comparison(status),) if status.compared else ()
    return Verdict(
        status=status, reason=reason, **{"comparisons": compared, **kwargs}
    )


def outcome(judged: Verdict | None, **kwargs: Any) -> Outcome:
    return Outcome(
        **{
            "nodeid": "tests/test_a.py::test_step",
            "test": TestId(module="tests/test_a", name="test_step"),
            "plan": Plan(
                world_size=2, backend="gloo", device="cpu", warmup=5, steps=3
            ),
            "launches": 2,
            "batch_size": 32,
            "verdict": judged,
            "fails": judged == "REGRESSED",
            "measurement": measurement() if judged is not None else None,
            "costs": (
                (
                    LaunchCost(
                        start=0.02,
                        group=0.01,
                        setup=0.3,
                        warmup=1.0,
                        steps=0.6,
                        end=0.01,
                    ),
                )
                * 2
            ),
            "baseline_path": "baselines/cpu/tests/test_a/test_step.json",
            **kwargs,
        }
    )


def problems(*outcomes: Outcome) -> list[str]:
    return list(sentences.problems(outcomes))


FAILED = outcome(
    None,
    error="launch 1 of 2: rank 1 failed in setup: ValueError: bad",
    measurement=None,
    fails=True,
)
GREEN, NEW = outcome(verdict(Status.PASS)), outcome(verdict(Status.NO_BASELINE))


# --- figures


@pytest.mark.parametrize(
    ("time", "bandwidth"),
    [
        ((0.25, 0.0, 1.0), (-0.2, -0.5, 0.0)),
        ((3.0, -1.0, 1e300), (-0.75, -1.0, 1e9 - 1)),
    ],
    ids=["slower", "bounds beyond all use"],
)
def test_a_change_of_bandwidth_is_that_of_time_upside_down(
    time: Any, bandwidth: Any
) -> None:
    change = Interval(
        **dict(zip(("estimate", "low", "high"), time, strict=True))
    )
    slower = replace(comparison(metric="busbw", resolution=0.25), change=change)
    reported = text.changed(slower)
    assert (reported.estimate, reported.low, reported.high) == pytest.approx(
        bandwidth
    )
    assert text.resolution(slower) == pytest.approx(0.2)
    assert text.changed(replace(slower, limit=comparison().limit)) == change
    red = replace(verdict(Status.REGRESSED), comparisons=(slower,))
    assert (
        dict(summary.junit_properties(outcome(red)))["ddpperf.ratio"]
        == f"{1 + bandwidth[0]:.4f}"
    )


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (12345.6, "12346 s"),
        (12.4321, "12.4 s"),
        (0.2431, "243 ms"),
        (0.0110, "11.0 ms"),
        (0.0009996, "1.00 ms"),
        (0.00000118, "1.18 us"),
        (7.5e-07, "750 ns"),
        (0.0, "0 ns"),
    ],
)
def test_seconds_have_three_digits_and_a_unit(
    value: float, written: str
) -> None:
    assert text.seconds(value) == written


def test_both_sides_have_one_unit_and_a_change_of_more_than_double_is_a_factor() -> (
    None
):
    assert text.in_one_unit([0.00979, 0.0197]) == (["9.79", "19.7"], "ms")
    assert text.seconds(0.0201, signed=True) == "+20.1 ms"
    changes = [
        Interval(estimate=e, low=low, high=h)
        for e, low, h in (
            (-0.013, -0.05, 0.026),
            (-0.0004, -0.01, 0.01),
            (0.51, -0.09, 1e9),
        )
    ]
    assert list(map(text.interval, changes)) == [
        "-1.3 % [-5.0, +2.6]",
        "+0.0 % [-1.0, +1.0]",
        "+51 % [-9, >9999]",
    ]
    assert (
        text.interval(Interval(estimate=1.36, low=1.08, high=1.68))
        == "2.36x [2.08, 2.68]"
    )
    assert (
        text.interval(Interval(estimate=0.13, low=-0.004, high=0.27))
        == "+13 % [+0, +27]"
    )
    assert text.counter_change(risen("rpc.calls", 0, 3)) == "from 0 to 3"
    assert (
        text.interval(Interval(estimate=299.0, low=249.0, high=359.0))
        == "300x [250, 360]"
    )
    beyond = Interval(estimate=6.94, low=-0.9064, high=672.9)
    assert text.interval(beyond) == "7.94x [0.0936, >101]"
    assert text.amount(20858.93) == "over 9999 %"


def test_a_path_that_is_longer_than_a_line_stays_whole() -> None:
    path = "/somewhere/" + "folder/" * 5 + "baseline.json"
    lines = text.wrapped(f"there is no baseline {path} of it", 30)
    assert lines == ["there is no baseline", f"  {path}", "  of it"]


def test_a_line_is_as_wide_as_the_terminal_and_no_amount_is_torn() -> None:
    lines = text.wrapped(
        "the smallest change that it can detect is 12 % (p10)", 44
    )
    assert lines == [
        "the smallest change that it can detect is",
        "  12 % (p10)",
    ]


# --- the terminal


def test_the_header_names_versions_and_places() -> None:
    facts = {
        "torch": "2.13.0",
        "python": "3.11.7",
        "cuda": "13.0",
        "nccl": "2.29",
        "cpu_model": "AMD EPYC",
    }
    facts |= {
        "device_count": 8,
        "device_model": "NVIDIA H200",
        "topology": "GPU0 X\n",
    }
    facts["places"] = (
        "8 ranks over nccl (auto: 8 CUDA devices), a cuda device each"
    )
    quiet = list(terminal.header(facts, verbose=False, width=1_000))
    assert quiet == [
        "ddpperf: torch 2.13.0, Python 3.11.7, CUDA 13.0, NCCL 2.29; 8 x NVIDIA H200; AMD EPYC",
        "ddpperf: 8 ranks over nccl (auto: 8 CUDA devices), a cuda device each",
    ]
    assert list(terminal.header(facts, verbose=True, width=1_000)) == [
        *quiet,
        "nvidia-smi topo -m",
        "GPU0 X",
    ]
    assert (
        list(terminal.header(facts, verbose=False, width=60))[-1]
        == "         device each"
    )


def test_a_row_has_both_sides_the_change_and_the_verdict() -> None:
    counted = verdict(
        Status.REGRESSED,
        "counter-rose",
        comparisons=(comparison(Status.PASS),),
        counters=(risen(),),
    )
    rpc = Plan(
        world_size=2,
        backend="gloo",
        device="cpu",
        parameter_servers=3,
        master=True,
    )
    assert list(
        terminal.table(
            [
                outcome(verdict(Status.REGRESSED)),
                NEW,
                FAILED,
                outcome(counted, plan=rpc),
            ]
        )
    ) == [
        "                            ranks       p50: before -> now  change [range]   verdict",
        "tests/test_a.py::test_step  2 gloo           100 -> 200 ms  +12 % [+8, +17]  REGRESSED",
        "tests/test_a.py::test_step  2 gloo                  200 ms                   NO BASELINE",
        "tests/test_a.py::test_step  2 trainers       100 -> 200 ms  rpc.bytes +25 %  REGRESSED",
    ]


def test_without_a_comparison_a_row_has_the_step_time_alone() -> None:
    assert list(terminal.table([NEW])) == [
        "                            ranks      p50  verdict",
        "tests/test_a.py::test_step  2 gloo  200 ms  NO BASELINE",
    ]


def test_a_narrow_terminal_has_the_ends_of_names() -> None:
    long = replace(GREEN, nodeid="tests/test_a.py::test_all_gather_of_tensors")
    _, row = terminal.table([long], width=40)
    assert row == "test_al...er_of_tensors  +1.0 %  PASS"


@pytest.mark.parametrize("width", [30, 40, 50, 60, 80, 100])
def test_a_narrow_terminal_has_fewer_columns(width: int) -> None:
    """The verdict stays to the last."""
    title, *rows = terminal.table(reports.of_each_kind(), width=width)
    assert all(len(row) <= width for row in (title, *rows))
    assert title.endswith("verdict")
    assert ("change" in title) == (width > 40)
    assert ("p50" in title) == (width > 60)
    assert any(row.endswith("REGRESSED") for row in rows)


@pytest.mark.parametrize("verbosity", [-1, 0, 1])
@pytest.mark.parametrize("width", [80, 100])
def test_no_line_is_wider_than_the_terminal(width: int, verbosity: int) -> None:
    outcomes = [
        *reports.of_each_kind(),
        replace(
            GREEN, nodeid=f"tests/{'deep/' * 20}test_a.py::test_b[{'x' * 200}]"
        ),
    ]
    messages = [f"a message of {'many ' * 40}words"]
    lines = list(
        terminal.report(
            outcomes, RunInfo(), messages, verbosity=verbosity, width=width
        )
    )
    # A name or a path that is longer than a line stays whole.
    assert all(len(line) <= width or " " not in line.strip() for line in lines)
    assert "too noisy" in "\n".join(lines)


def test_a_failure_is_as_wide_as_the_terminal_but_for_the_command_to_paste() -> (
    None
):
    judged = verdict(Status.REGRESSED, facts=(reports.NEWER_TORCH,))
    long = outcome(
        judged,
        evidence=("waiting for RPC " * 9,),
        notes=("a note " * 20,),
        accept=f"pytest {'a' * 90}",
    )
    *lines, accept = sentences.gate_failure(long, 80).splitlines()
    assert max(map(len, lines)) <= 80
    assert accept == f"accept:   pytest {'a' * 90}"


# two ranks; the steps process 20, 20, 80 examples in 0.2 s
EXAMPLES = (((10, 10, 40), (10, 10, 40)),) * 2


@pytest.mark.parametrize(
    ("measured", "rate"),
    [
        # 2 ranks x 32 examples / 0.2 s
        (outcome(verdict(Status.REGRESSED)), "320/s"),
        (outcome(verdict(Status.REGRESSED), batch_size=None), "-"),
        (
            outcome(
                verdict(Status.REGRESSED),
                measurement=measurement(examples=EXAMPLES),
            ),
            "100/s",
        ),
    ],
    ids=["batch size", "no batch size", "examples"],
)
def test_details_have_percentiles_and_rates_of_the_group_and_of_each_rank(
    measured: Outcome, rate: str
) -> None:
    _, name, head, group, *ranks = terminal.details([measured])
    assert name == "tests/test_a.py::test_step"
    rates = ["ex/sec"] if rate != "-" else []  # no columns of what is not known
    assert head.split() == [
        "sec/iter",
        *[word for q in (50, 75, 90, 95) for word in (f"p{q}", *rates)],
        "CPU",
        "p50",
    ]
    assert group.split()[: 2 + len(rates)] == [
        "all",
        "0.200",
        *[rate] * len(rates),
    ]
    assert ranks[0].split()[:3] == ["rank", "0", "0.200"]
    assert ranks[1].split()[-1] == "0.200"


def test_details_have_counters_costs_and_error_rates() -> None:
    counted = replace(
        measurement(),
        counters={"rpc.bytes": 12345, "rpc.calls": None, "rpc.bytes.master": 0},
    )
    first = comparison(Status.PASS, drift=0.041)
    compared = verdict(
        Status.PASS,
        comparisons=(first, comparison(Status.PASS, "p10", alarm_rate=0.0077)),
        sessions=1,
    )
    lines = list(
        terminal.details(
            [outcome(compared, measurement=counted, seconds=12.3), NEW, GREEN]
        )
    )
    assert lines[6:9] == [
        "  smallest detectable change: 8 % (p50), 8 % (p10)",
        "  a step: rpc.bytes 12,345",
        (
            "  cost: 2 launches, 12 s; a launch (median): start 20.0 ms, group 10.0 ms, setup 300"
            " ms, warmup 1.00 s, steps 600 ms, end 10.0 ms"
        ),
    ]
    assert lines[-2:] == [
        "expected false alarms in a run like this: 0.016 (at most 1.5 % in each of 2 tests)",
        "assumed drift between sessions: 4.1 % (--ddp-extend-baseline measures it)",
    ]


@pytest.mark.parametrize(
    ("outcomes", "run", "line"),
    [
        ([], RunInfo(), "nothing measured (0 of 0 compared)"),
        (
            [NEW] * 5,
            RunInfo(),
            "5 without baseline (0 of 5 compared): record baselines with --ddp-save-baseline",
        ),
        (
            [GREEN, outcome(verdict(Status.REGRESSED)), NEW, FAILED],
            RunInfo(skipped=1),
            (
                "compared with baselines: 1 regressed, 1 passed, 1 without baseline, 1 failed to"
                " measure, 1 skipped (2 of 4 compared)"
            ),
        ),
        (
            [GREEN],
            RunInfo(other_failures=3),
            "compared with baselines: 1 passed, 3 other failures (1 of 1 compared)",
        ),
        (
            [
                outcome(verdict(Status.NOT_GATED, "saving"), saved=1),
                outcome(verdict(Status.NOT_GATED, "saving")),
            ],
            RunInfo(),
            "1 not gated, 1 saved (0 of 2 compared)",
        ),
        ([], RunInfo(never_measured=1), "1 never measured (0 of 0 compared)"),
        (
            [outcome(verdict(Status.PASS, "unreached")), GREEN],
            RunInfo(),
            "compared with baselines: 2 passed (2 of 2 compared, 1 unreached by the change)",
        ),
    ],
)
def test_the_last_line_counts(
    outcomes: list[Outcome], run: RunInfo, line: str
) -> None:
    assert summary.last_line(outcomes, run) == line


def test_the_last_line_says_how_long_the_run_waited_for_others() -> None:
    waited = [
        replace(FAILED, seconds=100.0, waited_seconds=90.0),
        replace(GREEN, seconds=75.0, waited_seconds=47.2),
    ]
    line = "compared with baselines: 1 passed, 1 failed to measure (1 of 2 compared) in 175 s"
    assert (
        summary.last_line(waited, RunInfo(), with_cost=True)
        == f"{line} (137 s of it waiting for other runs)"
    )
    alone = [replace(each, waited_seconds=0.0) for each in waited]
    assert summary.last_line(alone, RunInfo(), with_cost=True) == line


def coarse(
    nodeid: str = "tests/test_a.py::test_step",
    sessions: int = 2,
    **needed: int | None,
) -> Outcome:
    """By metric how many launches it needs; the smallest detectable change has as many percent as
    its metric says."""
    comparisons = tuple(
        comparison(
            Status.PASS,
            metric,
            resolution=int(metric[1:]) / 100,
            launches_needed=launches,
        )
        for metric, launches in needed.items()
    )
    return outcome(
        verdict(Status.PASS, comparisons=comparisons, sessions=sessions),
        nodeid=nodeid,
    )


def diverged(
    status: Status, before: float | None, now: float | None
) -> Outcome:
    return outcome(verdict(status, diverged=LossChange(before=before, now=now)))


def unknown(counter: str) -> Dropped:
    limit = Limit(metric=counter, value=0.0, unit="%", default=True)
    return Dropped(limit=limit, why="unknown now")


def of_two_speeds(status: Status) -> Verdict:
    speeds = Speeds(
        fast_seconds=0.025,
        slow_seconds=0.031,
        slow=4,
        launches=10,
        slow_before=0,
        launches_before=10,
        p_value=0.03,
        least_p_value=0.03,
    )
    compared = comparison(status, "p10", reason="two-speeds", speeds=speeds)
    return verdict(status, "two-speeds", comparisons=(compared,))


FOUR_SLOW = (
    "4 of 10 launches are slow (31.0 ms instead of 25.0), 0 of 10 before"
)


def test_a_failure_counts_the_slow_launches() -> None:
    failed = outcome(of_two_speeds(Status.REGRESSED))
    said = sentences.gate_failure(failed).splitlines()
    assert said[0].startswith("REGRESSED: step time p10 ")
    assert said[1] == f"why: {FOUR_SLOW}"
    assert sentences.headline(failed) == (
        f"REGRESSED p10 +12 % (limit 10 %): {FOUR_SLOW}"
    )


def test_slow_launches_that_did_not_decide_are_no_cause() -> None:
    (suspected,) = of_two_speeds(Status.INCONCLUSIVE).comparisons
    risen = verdict(Status.REGRESSED, "counter-rose", comparisons=(suspected,))
    assert sentences.why(outcome(risen)) == ""


NOISY = "too noisy for a 10 % limit: the smallest change it can detect is"
QUIETER = ", or make the machine quieter (ddpperf doctor)"
SLOWER = comparison(
    Status.PASS, change=Interval(estimate=0.097, low=0.05, high=0.15)
)


@pytest.mark.parametrize(
    ("reported", "line"),
    [
        (
            outcome(verdict(Status.INCONCLUSIVE, "not-significant")),
            "launches of the same code differ by as much: more of them may decide it",
        ),
        (
            outcome(verdict(Status.INCONCLUSIVE, "recompiled")),
            "steps of most launches are not alike: see the notes",
        ),
        (
            outcome(verdict(Status.INCONCLUSIVE, "two-speeds")),
            (
                "its launches have two speeds: in some, the allocator gives memory back in each"
                " step (see page faults in docs/measurement.md)"
            ),
        ),
        (
            replace(
                outcome(of_two_speeds(Status.INCONCLUSIVE)),
                costs=(LaunchCost(),) * 10,
            ),
            f"{FOUR_SLOW}: raise --ddp-max-launches to 20",
        ),
        (
            outcome(verdict(Status.INCONCLUSIVE, "machine-slower")),
            (
                "the machine is slower: the baseline's own code is as slow today (not checked: data"
                " outside the repository, and what fixtures, native libraries or other programs"
                " read)"
            ),
        ),
        (
            coarse(p11=40, p50=80),
            f"{NOISY} 11 % (p11), 50 % (p50); raise --ddp-launches to 80{QUIETER}",
        ),
        (
            coarse(p11=40, p50=None),
            f"{NOISY} 11 % (p11), 50 % (p50); add sessions with --ddp-extend-baseline",
        ),
        (
            coarse(p11=None, sessions=10),
            f"{NOISY} 11 % (p11); compare with --ddp-against",
        ),
        (
            coarse(p50=650),
            f"{NOISY} 50 % (p50); compare with --ddp-against, or raise the limit",
        ),
        (
            replace(coarse(p50=300), costs=(LaunchCost(),) * 80),
            f"{NOISY} 50 % (p50); raise --ddp-launches to 300{QUIETER}",
        ),
        (
            replace(coarse(p50=300), costs=(LaunchCost(),) * 80, seconds=240.0),
            f"{NOISY} 50 % (p50); raise --ddp-launches to 300 (about 15 min){QUIETER}",
        ),
        (replace(coarse(p50=300), baseline_path=""), f"{NOISY} 50 % (p50)"),
        (
            outcome(verdict(Status.PASS, comparisons=(SLOWER,))),
            "p50 +9.7 %: slower, within the limit of 10 %",
        ),
        (
            outcome(verdict(Status.IMPROVED)),
            "accept it with --ddp-save-baseline",
        ),
        (
            diverged(Status.IMPROVED, 2.31, 2.58),
            "computes something else: loss 2.31 -> 2.58",
        ),
        (
            diverged(Status.PASS, 2.3125, 2.3125125),
            "computes something else: loss 2.3125 -> 2.3125125",
        ),
        (
            diverged(Status.PASS, None, 0.0),
            "computes something else: loss nan -> 0",
        ),
        (
            outcome(
                verdict(
                    Status.INCOMPARABLE,
                    "must-match",
                    facts=(
                        FactChange(name="batch_size", before="32", now="64"),
                    ),
                )
            ),
            "batch_size 32 -> 64: measure as before, or save a new baseline",
        ),
        (
            outcome(
                verdict(
                    Status.INCOMPARABLE,
                    "unknown-metric-now",
                    details=("rpc.bytes is unknown now",),
                    facts=(
                        FactChange(name="torch", before="2.12", now="2.13"),
                    ),
                ),
                measurement=replace(
                    measurement(),
                    environment=Environment(recorded={"torch": "2.13"}),
                ),
            ),
            (
                "rpc.bytes is unknown now, or 0, or differs between launches: see the notes, if any, or"
                " remove its limit"
            ),
        ),
        (
            outcome(
                verdict(
                    Status.INCOMPARABLE,
                    "unknown-metric",
                    details=("cpu_p50 is unknown in the baseline",),
                )
            ),
            "cpu_p50 is unknown in the baseline: measure as before, or save a new baseline",
        ),
        (
            outcome(verdict(Status.NOT_GATED, "no-supported-limit")),
            "its limits need more --ddp-steps or --ddp-launches",
        ),
        (
            outcome(verdict(Status.NOT_GATED, "debugging-variable")),
            (
                "a debugging variable is set (CUDA_LAUNCH_BLOCKING, TORCH_DISTRIBUTED_DEBUG=DETAIL"
                " or NCCL_DEBUG=TRACE): unset it"
            ),
        ),
        (
            outcome(verdict(Status.NOT_GATED, "saving")),
            "not saved: the test did not pass, or it is a rerun",
        ),
        (
            outcome(
                verdict(
                    Status.PASS,
                    comparisons=(),
                    dropped_limits=tuple(
                        Dropped(limit=each, why="it needs 2")
                        for each in reports.LIMITS
                    ),
                )
            ),
            "dropped the default limits p10:10%, p50:10%: it needs 2",
        ),
        (
            replace(GREEN, notes=("rank 0's clean-up did not end",)),
            "rank 0's clean-up did not end",
        ),
        (FAILED, "launch 1 of 2: rank 1 failed in setup: ValueError: bad"),
    ],
)
def test_a_problem_is_one_line(reported: Outcome, line: str) -> None:
    assert problems(reported) == [f"test_step: {line}"]


COARSE = comparison(Status.PASS, resolution=0.45, launches_needed=99)
ZERO = (
    risen("all_reduce.count", 1, 0, Status.PASS),
    risen("collectives.count", 1, 0, Status.PASS),
)
ANOTHER_WARMUP = {
    "reason": Reason.MUST_MATCH,
    "facts": (FactChange(name="warmup", before="5", now="2"),),
}


@pytest.mark.parametrize(
    ("reported", "lines"),
    [
        (
            outcome(
                verdict(
                    Status.INCONCLUSIVE,
                    "too-noisy",
                    comparisons=(
                        comparison(Status.INCONCLUSIVE, resolution=0.5),
                    ),
                )
            ),
            [
                "too noisy for a 10 % limit: the smallest change it can detect"
                " is 50 % (p50); add sessions with --ddp-extend-baseline"
            ],
        ),
        (
            outcome(
                verdict(Status.INCONCLUSIVE, "machine-slower"),
                stored_verdict=verdict(Status.REGRESSED),
            ),
            [
                "p50 +12 % against the baseline: the machine is slower: the baseline's own code is"
                " as slow today (not checked: data outside the repository, and what fixtures,"
                " native libraries or other programs read)"
            ],
        ),
        (
            replace(NEW, notes=("there is no baseline",)),
            ["there is no baseline"],
        ),
        (
            outcome(verdict(Status.INCOMPARABLE, **ANOTHER_WARMUP)),
            ["warmup 5 -> 2: measure as before, or save a new baseline"],
        ),
        (
            outcome(
                verdict(Status.PASS, comparisons=(COARSE,)),
                notes=("only with more words",),
            ),
            [
                "too noisy for a 10 % limit: the smallest change it can detect is 45 % (p50);"
                " compare with --ddp-against, or raise the limit"
            ],
        ),
        (
            outcome(verdict(Status.PASS, counters=ZERO)),
            ["fell to 0: all_reduce.count 1 -> 0"],
        ),
        (
            outcome(
                verdict(
                    Status.IMPROVED, dropped_limits=(unknown("gradient_bytes"),)
                )
            ),
            ["dropped the default limit gradient_bytes:0%: unknown now"],
        ),
        (replace(GREEN, notes=("rank 0's clean-up did not end",)), []),
        (outcome(verdict(Status.IMPROVED)), []),
        (FAILED, []),
    ],
)
def test_what_leaves_a_verdict_in_doubt_is_shown_with_q_too(
    reported: Outcome, lines: list[str]
) -> None:
    shown = list(
        terminal.report([reported], RunInfo(), (), verbosity=-1, width=1_000)
    )
    assert [
        line.removeprefix("test_step: ")
        for line in shown
        if line.startswith("test_step: ")
    ] == lines


def test_what_holds_for_several_tests_is_said_once_and_what_is_counted_is_not_said() -> (
    None
):
    noted = [
        replace(NEW, nodeid=f"a.py::test_{name}", notes=("there is one for x",))
        for name in "abcd"
    ]
    assert problems(*noted) == [
        "4 tests (test_a, test_b, test_c, ...): there is one for x"
    ]
    gates_off = (
        outcome(verdict(Status.NOT_GATED, reason))
        for reason in ("gate-off", "disabled")
    )
    assert (
        problems(
            *gates_off, outcome(verdict(Status.NOT_GATED, "saving"), saved=1)
        )
        == []
    )
    named = replace(
        noted[0], test=TestId(module="m", name="t", label="forward")
    )
    assert problems(named) == ["test_a (forward): there is one for x"]
    modules = [replace(noted[0], nodeid=f"{name}.py::test_a") for name in "bc"]
    assert problems(*modules) == [
        "2 tests (test_a, test_a): there is one for x"
    ]
    operators = [
        replace(noted[0], nodeid=f"a.py::TestA::test_op[{name}::mm]")
        for name in ("aten", "prim")
    ]
    assert problems(*operators) == [
        "2 tests (test_op[aten::mm], test_op[prim::mm]): there is one for x"
    ]


# --- failures


def test_the_cause_of_a_slowdown_comes_before_another_loss() -> None:
    red = replace(
        diverged(Status.REGRESSED, 2.31, 2.58),
        fails=True,
        evidence=("data +2.00 ms (the step: +2.10 ms)",),
    )
    why = "\nwhy: data +2.00 ms (the step: +2.10 ms); computes something else: loss 2.31 -> 2.58\n"
    assert why in sentences.gate_failure(red)


def test_a_faster_test_that_computes_something_else_is_not_to_be_accepted() -> (
    None
):
    red = replace(
        diverged(Status.IMPROVED, 2.31, 2.58),
        fails=True,
        traces="out/test_step",
    )
    assert (
        "\nwhy: computes something else: loss 2.31 -> 2.58\n"
        in sentences.gate_failure(red)
    )
    assert "\ntraces:   out/test_step" in sentences.gate_failure(red)
    assert (
        sentences.headline(red)
        == "DIVERGED: computes something else: loss 2.31 -> 2.58"
    )
    assert summary.last_line([red]).startswith(
        "compared with baselines: 1 diverged (1 of 1"
    )
    assert summary.count([red])["diverged"] == 1
    assert (
        replace(red, error="the baseline could not be saved").shown_status
        == "IMPROVED"
    )
    quiet = diverged(Status.PASS, 2.31, 2.58)
    assert summary.concern(quiet) is summary.Concern.DOUBTFUL


def test_a_failed_gate_reads_from_the_result_to_the_command_that_accepts() -> (
    None
):
    session = StoredSession(
        created="2026-03-04T05:06:07+00:00",
        commit="9a825c73dcb8",
        host="h",
        steps=3,
        launch_seconds={"p50": (0.1, 0.1)},
    )
    judged = verdict(
        Status.REGRESSED,
        facts=(reports.NEWER_TORCH,),
        counters=(risen(status=Status.PASS),),
    )
    red = reports.explained(
        outcome(judged, sessions=(session,) * 3),
        [measurement(0.1)],
        "pytest x --ddp-save-baseline",
    )
    assert sentences.gate_failure(
        codec.decode(Outcome, codec.encode(red))
    ).splitlines() == [
        "REGRESSED: step time p50 100 -> 200 ms, +12 % [+8, +17] (limit 10 %)",
        "why: every rank computes longer: CPU time +100 ms (the step: +100 ms); torch 2.12 -> 2.13",
        "",
        "  metric     before     now  change [range]   limit",
        "  p50           100  200 ms  +12 % [+8, +17]  10 %",
        "  rpc.bytes   1,000   1,250  +25 %            0 %",
        "",
        "measured: 2 launches now, 6 in the baseline's 3 sessions (2026-03-04, 9a825c7)",
        "accept:   pytest x --ddp-save-baseline",
    ]
    why = "every rank computes longer: CPU time +100 ms (the step: +100 ms); torch 2.12 -> 2.13"
    assert sentences.headline(red) == f"REGRESSED p50 +12 % (limit 10 %): {why}"


def test_no_line_of_a_failed_gate_is_wider_than_the_terminal() -> None:
    command = (
        f"pytest {'a' * 40} -c pytest.ini --rootdir .. --ddp-save-baseline"
    )
    judged = verdict(Status.REGRESSED, facts=(reports.NEWER_TORCH,))
    compared = replace(
        outcome(judged), accept=command, notes=("many words " * 20,)
    )
    missing = replace(
        outcome(verdict(Status.NO_BASELINE)), accept=command, baseline_path="b"
    )
    for width, red in ((60, compared), (80, compared), (60, missing)):
        failure = sentences.gate_failure(red, width)
        assert max(map(len, failure.splitlines())) <= width
        shell = failure[failure.rindex("pytest aaa") :].replace("\\\n", "")
        assert shlex.split(shell) == shlex.split(command)


def test_a_command_is_not_divided_within_quotes() -> None:
    words = ["pytest", "a.py::b[lr -1 -2]", "--rootdir", "it's -a 'b' -c", "-n"]
    red = replace(outcome(verdict(Status.REGRESSED)), accept=shlex.join(words))
    _, _, command = sentences.gate_failure(red, 30).partition("accept:   ")
    assert command.count("\\\n") == 2
    assert shlex.split(command.replace("\\\n", "")) == words


def test_a_traceback_stays_as_it_is_in_a_narrow_terminal() -> None:
    place, code = f'  File "{"a" * 30}.py", line 3, in f', "    " + "b = c " * 6
    lines = [
        *text.wrap_text(f"rank 0 failed in setup: it did\n{place}\n{code}", 20)
    ]
    assert lines == ["rank 0 failed in", "  setup: it did", place, code]


def test_a_failure_says_how_long_trainers_waited_for_rpc() -> None:
    def waiting(level: float, waited: tuple[float, float]) -> Measurement:
        plain = measurement(level, cpu=False)
        blocked = tuple(
            tuple((seconds,) * 3 for seconds in waited) for _ in range(2)
        )
        return replace(
            plain, samples=replace(plain.samples, blocked_seconds=blocked)
        )

    roles = Plan(
        world_size=2, backend="gloo", device="cpu", parameter_servers=1
    )
    before = [waiting(0.1, (0.05, 0.0))]
    found, words = causes.explain(
        verdict(Status.REGRESSED),
        roles,
        waiting(0.2, (0.15, 0.0)),
        before,
        0.015,
    )
    assert words == ("waiting for RPC +100 ms (the step: +100 ms)",)
    assert [(each.phases, each.rank) for each in found] == [
        (("waiting_for_RPC",), None)
    ]


def test_of_default_limits_on_counters_only_those_that_changed_are_shown() -> (
    None
):
    limit = Limit(metric="buckets", value=0.0, unit="%", default=True)
    same, more = (
        CounterChange(limit=limit, status=Status.PASS, baseline=4, now=now)
        for now in (4, 5)
    )
    rows = sentences.metrics(
        verdict(Status.PASS, counters=(same, more)), GREEN.plan
    )
    assert rows[2:] == [("buckets", "4", "5", "+25 %", "0 %")]
    dropped = verdict(
        Status.PASS, dropped_limits=tuple(map(unknown, COUNTERS[:5]))
    )
    (note,) = sentences.left_out(dropped)
    assert (
        note
        == "dropped the default limits rpc.calls:0%, rpc.bytes:0%, all_reduce.count:0%, ...:"
        " unknown now"
    )


def test_a_counter_that_rose_is_the_result() -> None:
    red = verdict(
        Status.REGRESSED,
        "counter-rose",
        comparisons=(comparison(Status.PASS),),
        counters=(risen(),),
    )
    first = sentences.gate_failure(outcome(red)).splitlines()[0]
    assert first == "REGRESSED: rpc.bytes 1,000 -> 1,250, +25 % (limit 0 %)"
    assert (
        dict(summary.junit_properties(outcome(red)))["ddpperf.metric"]
        == "rpc.bytes"
    )
    assert (
        dict(summary.junit_properties(outcome(red)))["ddpperf.ratio"]
        == "1.2500"
    )


@pytest.mark.parametrize(
    ("judged", "first"),
    [
        (
            verdict(Status.NO_BASELINE),
            "NO BASELINE (step time p50 200 ms): record one with --ddp-save-baseline",
        ),
        (
            verdict(Status.INCOMPARABLE, **ANOTHER_WARMUP),
            (
                "INCOMPARABLE (step time p50 200 ms): warmup 5 -> 2: measure as before, or save a"
                " new baseline"
            ),
        ),
        (
            verdict(Status.NOT_GATED, "gate-off"),
            "NOT GATED (step time p50 200 ms): gate=False",
        ),
    ],
)
def test_a_gate_that_fails_without_a_comparison_says_why_and_what_records(
    judged: Verdict, first: str
) -> None:
    reported = sentences.gate_failure(
        outcome(judged, notes=("there is a baseline for x",), accept="c")
    )
    assert reported.splitlines() == [
        first,
        "note:     there is a baseline for x",
        "record:   c",
    ]


def test_steps_that_send_nothing_any_more_are_no_improvement_in_any_report() -> (
    None
):
    lost = ("gradients are no longer synchronised: all_reduce.count 1 -> 0",)
    faster = comparison(
        Status.IMPROVED,
        change=Interval(estimate=-0.8, low=-0.82, high=-0.78),
        now_seconds=0.02,
    )
    judged = verdict(
        Status.INCOMPARABLE,
        "not-synchronised",
        details=lost,
        comparisons=(faster,),
        counters=ZERO,
    )
    quiet = outcome(replace(judged, diverged=LossChange(before=2.31, now=2.58)))
    why = (
        f"{lost[0]}: if that is meant, name its limit with --ddp-threshold, or save a new "
        "baseline"
    )
    losses = "computes something else: loss 2.31 -> 2.58"
    assert problems(quiet) == [
        f"test_step: {why}; {losses}",
        "test_step: fell to 0: all_reduce.count 1 -> 0",
    ]
    red = replace(quiet, fails=True)
    assert (
        sentences.headline(red)
        == f"INCOMPARABLE p50 -80 % (limit 10 %): {why}; {losses}"
    )
    assert sentences.gate_failure(red, 1_000).splitlines()[:2] == [
        "INCOMPARABLE: step time p50 100 -> 20.0 ms, -80 % [-82, -78] (limit 10 %)",
        f"why: {why}; {losses}",
    ]
    assert summary.last_line([red]).startswith(
        "1 incomparable (0 of 1 compared)"
    )
    live = outcome(judged, baseline_path="")
    assert (
        problems(live)[0]
        == f"test_step: {why.removesuffix(', or save a new baseline')}"
    )


def test_a_failed_launch_shows_the_first_cause_then_the_others() -> None:
    cause = RankError(
        rank=1,
        when=1.0,
        phase="step 7 of 30",
        summary="ValueError: bad",
        traceback="Traceback A\n",
    )
    same = replace(cause, rank=2)
    lost = RankError(
        rank=0,
        when=0.9,
        phase="step 7 of 30",
        summary="reset",
        traceback="B",
        lost_connection=True,
    )
    assert str(LaunchError(cause, (lost, same), ())).splitlines() == [
        "rank 1 failed in step 7 of 30: ValueError: bad",
        "",
        "Traceback A",
        "",
        "other ranks:",
        "  rank 0 in step 7 of 30: reset",
        "  rank 2 in step 7 of 30: the same",
    ]


# --- files


def test_junit_has_the_verdict_in_strings_and_no_samples() -> None:
    assert dict(
        summary.junit_properties(
            outcome(verdict(Status.REGRESSED, "beyond-limit"))
        )
    ) == {
        "ddpperf.verdict": "REGRESSED",
        "ddpperf.reason": "beyond-limit",
        "ddpperf.metric": "p50",
        "ddpperf.ratio": "1.1230",
        "ddpperf.interval": "1.0810..1.1670",
        "ddpperf.resolution": "0.0800",
        "ddpperf.p50": "0.200000000",
    }
    named = outcome(
        verdict(Status.NO_BASELINE),
        test=TestId(module="m", name="t", label="forward"),
    )
    assert (
        "ddpperf.forward.verdict",
        "NO BASELINE",
    ) in summary.junit_properties(named)


def test_all_reports_show_the_same_change_of_several() -> None:
    most = comparison(
        metric="p10", change=Interval(estimate=0.5, low=0.4, high=0.6)
    )
    red = outcome(verdict(Status.REGRESSED, comparisons=(most, comparison())))
    assert sentences.gate_failure(red).startswith(
        "REGRESSED: step time p50 100 -> 200 ms, +12 % [+8, +17]"
    )
    assert sentences.headline(red).startswith("REGRESSED p50 +12 %")
    properties = dict(summary.junit_properties(red))
    assert (properties["ddpperf.metric"], properties["ddpperf.ratio"]) == (
        "p50",
        "1.1230",
    )
    assert properties["ddpperf.interval"] == "1.0810..1.1670"


def test_the_json_has_everything_and_the_same_counts() -> None:
    outcomes = [outcome(verdict(Status.REGRESSED)), FAILED]
    run = RunInfo(
        id="7e1",
        created="now",
        commit="c0ffee",
        committed="then",
        facts={"torch": "2.13.0"},
        skipped=1,
    )
    data = json_report.report(outcomes, run)
    again = json.loads(codec.dumps(data))
    assert again["schema"] == 1
    assert [
        again[name] for name in ("run_id", "created", "commit", "committed")
    ] == [
        "7e1",
        "now",
        "c0ffee",
        "then",
    ]
    assert again["machine"] == {"torch": "2.13.0"}
    assert (
        again["summary"]["regressed"]
        == again["summary"]["failed"]
        == again["summary"]["skipped"]
        == 1
    )
    first, second = again["measurements"]
    assert first["percentile_seconds"] == {
        f"p{q}": 0.2 for q in (10, 50, 75, 90, 95)
    }
    assert (
        first["measurement"]["samples"]["step_seconds"] == [[0.2, 0.2, 0.2]] * 2
    )
    assert first["verdict"]["comparisons"][0]["change"] == {
        "estimate": 0.123,
        "low": 0.081,
        "high": 0.167,
    }
    assert second["verdict"] is None
    assert second["error"].endswith("ValueError: bad")


# --- progress

Pair = tuple[int, int]


@pytest.mark.parametrize(
    ("phase", "step", "launch", "test", "p50_seconds", "line"),
    [
        (
            Phase.STEPS,
            (30, 50),
            (2, 5),
            (1, 1),
            0.2431,
            "launch 2/5, step 30/50, p50 so far 243 ms",
        ),
        (Phase.WARMUP, (3, 5), (2, 5), (1, 1), None, "launch 2/5, warm-up 3/5"),
        (Phase.SETUP, (0, 0), (0, 0), (1, 1), None, "setup"),
        (Phase.STEPS, (0, 0), (0, 0), (1, 1), None, "running"),
        (
            Phase.DELIVERY,
            (50, 50),
            (2, 5),
            (3, 12),
            None,
            "test 3/12, launch 2/5, collecting",
        ),
    ],
)
def test_progress_has_its_place(
    phase: Phase,
    step: Pair,
    launch: Pair,
    test: Pair,
    p50_seconds: float | None,
    line: str,
) -> None:
    assert (
        watch.progress_line(
            phase, step, launch=launch, test=test, p50_seconds=p50_seconds
        )
        == line
    )


def test_waiting_names_what_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    holders = {"cpu0": 4321, "0000:17:00.0": 4321}
    monkeypatch.setattr(
        watch.placement, "holder", lambda resource: holders.get(resource.name)
    )
    wait = "waiting for another timed run"
    assert (
        watch.waiting_line(Path("/cpu0"), 10.2)
        == f"{wait} (pid 4321) to release its cores, 10 s"
    )
    assert (
        watch.waiting_line(Path("/0000:17:00.0"), 20.0)
        == f"{wait} (pid 4321) to release its devices, 20 s"
    )
    assert (
        watch.waiting_line(Path("/"), 80.0)
        == f"{wait} to release its cores, 80 s"
    )
    assert (
        watch.waiting_line(Path("node 1 (b)/cpu3"), 9.0)
        == f"{wait} on node 1 (b) to release its cores, 9 s"
    )
