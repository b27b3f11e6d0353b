"""What the reports say, read as a user reads it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from pytest_ddpperf.plugin import watch
from pytest_ddpperf.records import (
    Baseline,
    Comparison,
    CounterChange,
    Environment,
    Interval,
    Limit,
    Measurement,
    Outcome,
    Phases,
    Plan,
    RankError,
    Recording,
    RunInfo,
    Samples,
    Status,
    TestId,
    Verdict,
    codec,
)
from pytest_ddpperf.records.errors import LaunchError
from pytest_ddpperf.report import ci, failure, json_report, terminal, text


def measurement(
    level: float = 0.2, *, ranks: Sequence[float] = (1.0, 1.0), cpu: bool = True, examples: Any = None
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


def stored(base: Measurement, sessions: int = 1) -> Baseline:
    return Baseline(test=TestId(module="m", name="t"), sessions=(Recording(measurement=base),) * sessions)


def gate_failure(outcome: Outcome, *, baseline: Baseline | None, accept_command: str) -> str:
    """Of an outcome that knows no more of the baseline than a report does."""
    reported = failure.explained(outcome, baseline=baseline, accept_command=accept_command)
    return failure.gate_failure(codec.decode(Outcome, codec.encode(reported)))


def comparison(status: Status = Status.REGRESSED, metric: str = "p50", **kwargs: Any) -> Comparison:
    return Comparison(
        limit=Limit(metric=metric, value=0.1, unit="%"),
        status=status,
        reason="beyond-limit",
        baseline_seconds=0.1,
        now_seconds=0.2,
        change=Interval(estimate=0.123, low=0.081, high=0.167),
        **{"p_value": 0.001, "level": 0.025, "resolution": 0.08, "alarm_rate": 0.004, "settled": True, **kwargs},
    )


def risen(
    metric: str = "rpc.bytes", before: int = 1000, now: int = 1250, status: Status = Status.REGRESSED
) -> CounterChange:
    limit = Limit(metric=metric, value=0.0, unit="%")
    return CounterChange(limit=limit, status=status, baseline=before, now=now)


def verdict(status: Status, reason: str = "x", **kwargs: Any) -> Verdict:
    compared = (comparison(status),) if status.compared else ()
    return Verdict(status=status, reason=reason, **{"comparisons": compared, **kwargs})


def outcome(judged: Verdict | None, **kwargs: Any) -> Outcome:
    return Outcome(
        **{
            "nodeid": "tests/test_a.py::test_step",
            "test": TestId(module="tests/test_a", name="test_step"),
            "plan": Plan(world_size=2, backend="gloo", device="cpu", warmup=5, steps=3),
            "launches": 2,
            "batch_size": 32,
            "verdict": judged,
            "fails": judged == "REGRESSED",
            "measurement": measurement() if judged is not None else None,
            "phases": (Phases(start=0.02, group=0.01, setup=0.3, warmup=1.0, steps=0.6, end=0.01),) * 2,
            "baseline_path": "baselines/cpu/tests/test_a/test_step.json",
            **kwargs,
        }
    )


FAILED = outcome(None, error="launch 1 of 2: rank 1 failed in setup: ValueError: bad", measurement=None, fails=True)


# --- figures


@pytest.mark.parametrize(
    ("time", "bandwidth"),
    [((0.25, 0.0, 1.0), (-0.2, -0.5, 0.0)), ((3.0, -1.0, 1e300), (-0.75, -1.0, 1e9 - 1))],
    ids=["slower", "bounds beyond all use"],
)
def test_a_change_of_bandwidth_is_that_of_time_upside_down(time: Any, bandwidth: Any) -> None:
    change = Interval(**dict(zip(("estimate", "low", "high"), time, strict=True)))
    slower = replace(comparison(metric="busbw", resolution=0.25), change=change)
    reported = text.changed(slower)
    assert (reported.estimate, reported.low, reported.high) == pytest.approx(bandwidth)
    assert text.resolution(slower) == pytest.approx(0.2)
    assert text.changed(replace(slower, limit=comparison().limit)) == change
    red = replace(verdict(Status.REGRESSED), comparisons=(slower,))
    assert dict(ci.junit_properties(outcome(red)))["ddpperf.ratio"] == f"{1 + bandwidth[0]:.4f}"


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (12345.6, "12346s"),
        (12.4321, "12.4s"),
        (0.2431, "0.243s"),
        (0.097, "0.0970s"),
        (0.01, "0.0100s"),
        (0.009996, "0.0100s"),
        (0.00341, "3.41ms"),
        (0.000341, "341us"),
        (0.00000118, "1.18us"),
        (7.5e-07, "750ns"),
        (0.0, "0s"),
    ],
)
def test_seconds_have_three_digits_and_a_unit_that_is_read(value: float, written: str) -> None:
    assert text.seconds(value) == written


def test_differences_have_a_sign_and_large_changes_are_factors() -> None:
    assert [text.more(seconds) for seconds in (1.5, 0.0201, -0.00034, 0.0)] == ["+1.50s", "+20.1ms", "-340us", "+0s"]
    assert [text.share(change) for change in (0.123, -0.5, 11.9)] == ["+12.3 %", "-50.0 %", "x 12.9"]
    assert text.counted(risen("rpc.calls", 0, 3)) == "rpc.calls was 0"


# --- header


def test_the_header_names_versions_and_places() -> None:
    facts = {"torch": "2.13.0", "python": "3.11.7", "cuda": "13.0", "nccl": "2.29", "cpu_model": "AMD EPYC"}
    facts |= {"device_count": 8, "device_model": "NVIDIA H200", "topology": "GPU0 X\n"}
    facts["places"] = "8 ranks over nccl (auto: 8 CUDA devices), a cuda device each"
    quiet = list(terminal.header(facts, verbose=False))
    assert quiet == [
        "ddpperf: torch 2.13.0, Python 3.11.7, CUDA 13.0, NCCL 2.29; 8 x NVIDIA H200; AMD EPYC",
        "ddpperf: 8 ranks over nccl (auto: 8 CUDA devices), a cuda device each",
    ]
    assert list(terminal.header(facts, verbose=True)) == [*quiet, "nvidia-smi topo -m", "GPU0 X"]


# --- table


EXAMPLES = (((10, 10, 40), (10, 10, 40)),) * 2  # two ranks; the steps process 20, 20, 80 examples in 0.2 s


@pytest.mark.parametrize(
    ("measured", "p50"),
    [
        (outcome(verdict(Status.REGRESSED)), ["0.200s", "320/s"]),  # 2 ranks x 32 examples / 0.2 s
        (outcome(verdict(Status.REGRESSED), batch_size=None), ["0.200s", "-"]),
        (outcome(verdict(Status.REGRESSED), measurement=measurement(examples=EXAMPLES)), ["0.200s", "100/s"]),
    ],
    ids=["batch size", "no batch size", "examples"],
)
def test_a_row_has_times_rates_change_and_verdict(measured: Outcome, p50: list[str]) -> None:
    head, row = terminal.table([measured, FAILED], verbosity=0)
    assert head.split() == [
        "ranks", *[word for q in (50, 75, 90, 95) for word in (f"p{q}", "sec/iter", "ex/sec")], "change", "verdict"
    ]  # fmt: skip
    assert row.split()[:5] == ["tests/test_a.py::test_step", "2", "gloo", *p50]
    assert row.endswith("  p50 +12.3 % [+8.1 %, +16.7 %]  REGRESSED")


def test_ranks_and_costs_are_shown_when_asked() -> None:
    counted = replace(measurement(), counters={"rpc.bytes": 12345, "rpc.calls": None, "rpc.bytes.master": 0})
    lines = list(terminal.table([outcome(verdict(Status.PASS), measurement=counted)], verbosity=1))
    assert lines[2].strip().startswith("rank 0:  p50: 0.200s")
    assert "CPU p50: 0.200s" in lines[3]
    assert lines[4].strip() == "resolves p50 8 %"
    assert lines[5] == "  a step: rpc.bytes 12,345"
    assert lines[6].strip() == (
        "a launch (median of 2): start 0.0200s, group 0.0100s, setup 0.300s, warmup 1.00s, steps 0.600s, "
        "end 0.0100s; all launches 3.88s"
    )


def test_an_rpc_launch_has_a_row_a_trainer_and_one_for_all() -> None:
    reported = (((10, 20, 30), (20, 40, 60)),) * 2  # examples of two trainers
    roles = Plan(world_size=2, backend="gloo", device="cpu", parameter_servers=3, master=True)
    measured = measurement(ranks=(0.5, 1.0), examples=reported)
    _, row, *trainers, everybody = terminal.table(
        [outcome(verdict(Status.PASS), measurement=measured, plan=roles)], verbosity=0
    )
    assert "2 trainers 3 ps master" in row
    assert [line.split()[:3] for line in trainers] == [
        ["trainer0:", "p50:", "0.100s"],
        ["trainer1:", "p50:", "0.200s"],
    ]
    assert [line.split()[3] for line in trainers] == ["200/s", "200/s"]  # its own examples over its own steps
    assert everybody.split() == [
        "All:", "p50:", "0.200s", "300/s", "p75:", "0.200s", "225/s",
        "p90:", "0.200s", "180/s", "p95:", "0.200s", "165/s",
    ]  # fmt: skip


# --- summary


GREEN, NEW = outcome(verdict(Status.PASS)), outcome(verdict(Status.NO_BASELINE))


@pytest.mark.parametrize(
    ("outcomes", "runs", "line"),
    [
        ([], [RunInfo()], "0 of 0 compared"),
        ([NEW] * 5, [], "0 of 5 compared: 5 without baseline"),
        (
            [GREEN, outcome(verdict(Status.REGRESSED)), NEW, FAILED],
            [RunInfo(skipped=1)],
            "2 of 4 compared: 1 passed, 1 regressed; 1 without baseline, 1 failed to measure; 1 skipped",
        ),
        ([GREEN], [RunInfo(other_failures=1, skipped=2)], "1 of 1 compared: 1 passed; 1 other failure; 2 skipped"),
        ([GREEN], [RunInfo(other_failures=n) for n in (1, 2)], "1 of 1 compared: 1 passed; 3 other failures"),
    ],
)
def test_the_last_line_counts(outcomes: list[Outcome], runs: list[RunInfo], line: str) -> None:
    assert list(terminal.summary(outcomes, *runs))[-1] == f"ddpperf: {line}"


def test_a_test_that_never_measured_is_named_and_counted() -> None:
    first, last = terminal.summary([], RunInfo(never_measured=1), never_measured=["test_a.py::test_b"])
    assert first == "test_a.py::test_b: never measured: it does not call the fixture that it asks for"
    assert last == "ddpperf: 0 of 0 compared: 1 never measured"


def test_several_tests_have_an_expected_number_of_false_alarms() -> None:
    comparisons = (comparison(Status.PASS), comparison(Status.PASS, "p10", alarm_rate=0.0077))
    compared = outcome(verdict(Status.PASS, comparisons=comparisons))
    assert list(terminal.expected_false_alarms([compared, NEW, compared])) == [
        "expected false alarms in a run like this: 0.023 (at most 1.5 % in each of 2 tests)"
    ]
    assert list(terminal.expected_false_alarms([compared, NEW, FAILED])) == []


def coarse(nodeid: str = "tests/test_a.py::test_step", **needed: int | None) -> Outcome:
    """By metric how many launches it needs; each resolves as many percent as its metric says."""
    comparisons = tuple(
        comparison(Status.PASS, metric, resolution=int(metric[1:]) / 100, launches_needed=launches)
        for metric, launches in needed.items()
    )
    return outcome(verdict(Status.PASS, comparisons=comparisons, sessions=2), nodeid=nodeid)


@pytest.mark.parametrize(
    ("reported", "words"),
    [
        (
            outcome(verdict(Status.INCONCLUSIVE, "not-significant")),
            "INCONCLUSIVE: p50 +12.3 % [+8.1 %, +16.7 %] (limit p50:10%): beyond the limit, but launches and sessions",
        ),
        (
            outcome(verdict(Status.INCONCLUSIVE, "not-confirmed")),
            "beyond the limit, but further launches did not confirm it",
        ),
        (
            outcome(verdict(Status.PASS, comparisons=(comparison(Status.PASS, resolution=0.18, launches_needed=40),))),
            "p50:10% was asked, but this measurement resolves 18 %: raise --ddp-launches to about 40",
        ),
        (
            outcome(verdict(Status.PASS, comparisons=(comparison(Status.PASS, resolution=1.18),), sessions=2)),
            "p50:10% was asked, but this measurement resolves 118 %: the baseline allows no finer one: "
            "let --ddp-extend-baseline add sessions to it",
        ),
        (
            outcome(verdict(Status.PASS, comparisons=(comparison(Status.PASS, resolution=0.18),), sessions=10)),
            "the baseline's sessions drift too far apart: raise the limit, or compare with --ddp-against",
        ),
        (
            outcome(
                verdict(
                    Status.INCONCLUSIVE,
                    "of-tomorrow",
                    comparisons=(
                        replace(comparison(Status.INCONCLUSIVE), limit=Limit(metric="p50", value=0.0, unit="%")),
                    ),
                )
            ),
            "beyond the limit, but of-tomorrow",  # and no advice: nothing makes a measurement as fine as 0 %
        ),
        (
            replace(coarse(p50=300), phases=(Phases(),) * 80),
            "this measurement resolves 50 %: raise --ddp-launches to about 300",
        ),
        (outcome(verdict(Status.IMPROVED)), "--ddp-save-baseline makes it the new baseline"),
        (outcome(verdict(Status.NO_BASELINE)), "NO BASELINE at baselines/cpu/tests/test_a/test_step.json: record one"),
        (
            outcome(verdict(Status.INCOMPARABLE, "must-match", differences=("batch_size 32 -> 64",))),
            "INCOMPARABLE: batch_size 32 -> 64; record a new baseline with --ddp-save-baseline",
        ),
        (
            outcome(
                verdict(
                    Status.IMPROVED, "counter-fell", comparisons=(), counters=(risen(now=500, status=Status.IMPROVED),)
                )
            ),
            "IMPROVED: rpc.bytes -50.0 % (limit rpc.bytes:0%)",
        ),
        (
            outcome(verdict(Status.INCOMPARABLE, "unknown-counter-now", differences=("rpc.bytes is unknown now",))),
            "is unknown now: launches differ, or do not report it, so",
        ),
        (
            outcome(verdict(Status.INCOMPARABLE, "unknown-counter", differences=("x is unknown in the baseline",))),
            "x is unknown in the baseline; record a new baseline",
        ),
        (outcome(verdict(Status.INCOMPARABLE, "no-cpu-time")), "CPU time is limited, and the baseline has none"),
        (outcome(verdict(Status.NOT_GATED, "gate-off")), "NOT GATED: gate=False"),
        (outcome(verdict(Status.NOT_GATED, "disabled")), "NOT GATED: --ddp-disable"),
        (outcome(verdict(Status.NOT_GATED, "debugging-variable")), "CUDA_LAUNCH_BLOCKING"),
        (
            outcome(verdict(Status.NOT_GATED, "saving"), saved=1),
            "saved baselines/cpu/tests/test_a/test_step.json, 2 launches",
        ),
        (outcome(verdict(Status.NOT_GATED, "saving"), saved=3), "2 launches, in addition to 2 earlier sessions"),
        (outcome(verdict(Status.NOT_GATED, "saving")), "not saved: the test did not pass as a whole"),
        (outcome(verdict(Status.PASS, dropped=("p99:10%: needs 299",))), "dropped the default limit p99:10%: needs"),
        (
            outcome(verdict(Status.PASS, dropped=("p10:10%: it needs 2", "p50:10%: it needs 2"))),
            "dropped the default limits p10:10%, p50:10%: it needs 2",
        ),
        (outcome(verdict(Status.PASS), notes=("rank 0's clean-up did not end",)), "rank 0's clean-up did not end"),
        (FAILED, "not measured: launch 1 of 2: rank 1 failed in setup: ValueError: bad"),
    ],
)
def test_the_summary_has_a_line_with_the_reason(reported: Outcome, words: str) -> None:
    lines = list(terminal.summary([reported]))[:-1]
    assert len(lines) == 1
    assert lines[0].startswith("tests/test_a.py::test_step: ")
    assert words in lines[0]


def drifting(drift: float, sessions: int = 1) -> Outcome:
    return outcome(verdict(Status.PASS, comparisons=(comparison(Status.PASS, drift=drift),), sessions=sessions))


DRIFT = "which cannot tell how far sessions drift apart"
ADDS = "--ddp-extend-baseline on another occasion adds one"
MORE = "raise --ddp-launches to about"
EXTEND = "the baseline allows no finer one: let --ddp-extend-baseline add sessions to it"
QUIETER = "no sensible number of launches would do here: measure on a quieter machine"


@pytest.mark.parametrize(
    ("outcomes", "lines"),
    [
        (
            [coarse("a", p11=40, p50=80)],
            [f"a: p11:10%, p50:10% were asked, but this measurement resolves 11 %, 50 %: {MORE} 80"],
        ),
        (
            [coarse("a", p11=40, p50=None)],
            [f"a: p11:10%, p50:10% were asked, but this measurement resolves 11 %, 50 %: {EXTEND}"],
        ),
        (
            [coarse("a", p11=40, p50=650)],
            [
                "a: p11:10%, p50:10% were asked, but this measurement resolves 11 %, 50 %: "
                f"{QUIETER}, compare with --ddp-against or raise the limit"
            ],
        ),
        (
            [coarse("a", p50=30), coarse("b", p11=20, p50=60), coarse("c", p5=None), coarse("d", p11=None)],
            [
                f"p50:10%, p11:10% were asked, but 2 measurements resolve 50 %, 11 %: {MORE} 60",
                f"d: p11:10% was asked, but this measurement resolves 11 %: {EXTEND}",
            ],
        ),
        (
            [drifting(0.041), drifting(0.057), drifting(0.2, sessions=2)],
            [f"2 baselines have one session, {DRIFT}: 4.1 % to 5.7 % was assumed; {ADDS}"],
        ),
        ([drifting(0.041)], [f"1 baseline has one session, {DRIFT}: 4.1 % was assumed; {ADDS}"]),
    ],
    ids=["both metrics", "sessions are missing", "too many launches", "several tests", "drift", "drift of one"],
)
def test_advice_for_several_measurements_is_given_once(outcomes: list[Outcome], lines: list[str]) -> None:
    assert list(terminal.summary(outcomes))[:-1] == lines


# --- counters


def test_a_counter_that_rose_is_the_change_in_the_table_and_in_the_failure() -> None:
    red = verdict(Status.REGRESSED, "counter-rose", comparisons=(comparison(Status.PASS),), counters=(risen(),))
    _, row = terminal.table([outcome(red)], verbosity=0)
    assert row.endswith("rpc.bytes +25.0 %  REGRESSED")
    reported = gate_failure(outcome(red), baseline=stored(measurement()), accept_command="c").splitlines()
    assert reported[2:4] == [
        "  metric     baseline    now   change [bounds]  limit  resolves",
        "  rpc.bytes     1,000  1,250  +25.0 %, counted     0%  all",
    ]
    assert dict(ci.junit_properties(outcome(red)))["ddpperf.metric"] == "rpc.bytes"
    assert dict(ci.junit_properties(outcome(red)))["ddpperf.ratio"] == "1.2500"


def test_a_failure_says_what_trainers_waited_for_rpc() -> None:
    def waiting(level: float, waited: tuple[float, float]) -> Measurement:
        plain = measurement(level)
        blocked = tuple(tuple((seconds,) * 3 for seconds in waited) for _ in range(2))
        return replace(plain, samples=replace(plain.samples, blocked_seconds=blocked))

    roles = Plan(world_size=2, backend="gloo", device="cpu", parameter_servers=1)
    red = outcome(verdict(Status.REGRESSED), measurement=waiting(0.2, (0.15, 0.0)), plan=roles)
    reported = gate_failure(red, baseline=stored(waiting(0.1, (0.05, 0.0))), accept_command="c")
    assert "on 2 trainers 1 ps" in reported
    assert reported.partition("blocked in RPC, at p50:\n")[2].splitlines()[:2] == [
        "  trainer0  0.0500s -> 0.150s  +100ms of the step's +100ms",
        "  trainer1  0s -> 0s  +0s of the step's +100ms",
    ]


# --- failures


def test_a_failed_gate_reads_from_metric_to_the_command_that_accepts() -> None:
    judged = verdict(Status.REGRESSED, differences=("torch 2.12 -> 2.13",), comparisons=(comparison(drift=0.061),))
    red = outcome(replace(judged, sessions=3))
    lines = gate_failure(
        red, baseline=stored(measurement(0.1), sessions=3), accept_command="pytest x --ddp-save-baseline"
    )
    assert lines.splitlines() == [
        "REGRESSED: tests/test_a::test_step on 2 gloo ranks",
        "",
        "  metric  baseline     now            change [bounds]  limit  resolves",
        "  p50       0.100s  0.200s  +12.3 % [+8.1 %, +16.7 %]    10%  8 %",
        "",
        "evidence: 2 launches now, 6 in the baseline's 3 sessions; sessions drift by 6.1 % (seen and assumed)",
        "slowest rank: none; every rank's CPU time rose, +100ms of +100ms at p50",
        "differs from the baseline's environment: torch 2.12 -> 2.13",
        "baseline: baselines/cpu/tests/test_a/test_step.json",
        "accept:   pytest x --ddp-save-baseline",
    ]


@pytest.mark.parametrize(
    ("judged", "first"),
    [
        (
            verdict(Status.NO_BASELINE),
            "NO BASELINE: there is no baseline at baselines/cpu/tests/test_a/test_step.json",
        ),
        (
            verdict(Status.INCOMPARABLE, "must-match", differences=("warmup 5 -> 2",)),
            "INCOMPARABLE: warmup 5 -> 2; record a new baseline with --ddp-save-baseline, "
            "or measure as it was recorded",
        ),
        (verdict(Status.NOT_GATED, "gate-off"), "NOT GATED: gate=False"),
    ],
)
def test_a_gate_that_fails_without_figures_says_why_and_what_records_them(judged: Verdict, first: str) -> None:
    reported = gate_failure(outcome(judged, notes=("there is a baseline for x",)), baseline=None, accept_command="c")
    record = [] if judged == "NOT GATED" else ["record: c"]
    assert reported.splitlines() == [first, "there is a baseline for x", *record]


def test_a_failed_launch_shows_the_first_cause_then_the_others() -> None:
    cause = RankError(rank=1, when=1.0, phase="step 7 of 30", summary="ValueError: bad", traceback="Traceback A\n")
    same = replace(cause, rank=2)
    lost = RankError(rank=0, when=0.9, phase="step 7 of 30", summary="reset", traceback="B", lost_connection=True)
    reported = failure.launch_failure(LaunchError(cause, (lost, same), ()), 2, 5)
    assert reported.splitlines() == [
        "launch 2 of 5: rank 1 failed in step 7 of 30: ValueError: bad",
        "",
        "Traceback A",
        "",
        "other ranks:",
        "  rank 0 in step 7 of 30: reset",
        "  rank 2 in step 7 of 30: the same",
    ]


# --- files


def test_junit_has_the_verdict_in_strings_and_no_samples() -> None:
    assert dict(ci.junit_properties(outcome(verdict(Status.REGRESSED, "beyond-limit")))) == {
        "ddpperf.verdict": "REGRESSED",
        "ddpperf.reason": "beyond-limit",
        "ddpperf.metric": "p50",
        "ddpperf.ratio": "1.1230",
        "ddpperf.interval": "1.0810..1.1670",
        "ddpperf.resolution": "0.0800",
        "ddpperf.p50": "0.200000000",
    }

    named = outcome(verdict(Status.NO_BASELINE), test=TestId(module="m", name="t", label="forward"))
    assert ("ddpperf.forward.verdict", "NO BASELINE") in ci.junit_properties(named)
    assert next(terminal.summary([named])).startswith("tests/test_a.py::test_step (forward): ")


def test_the_json_has_everything_and_the_same_counts() -> None:
    outcomes = [outcome(verdict(Status.REGRESSED)), FAILED]
    run = RunInfo(id="7e1", created="now", commit="c0ffee", committed="then", facts={"torch": "2.13.0"}, skipped=1)
    data = json_report.report(outcomes, run)
    again = json.loads(codec.dumps(data))
    assert again["schema"] == 1
    assert [again[name] for name in ("run_id", "created", "commit", "committed")] == ["7e1", "now", "c0ffee", "then"]
    assert again["machine"] == {"torch": "2.13.0"}
    assert again["summary"]["regressed"] == again["summary"]["failed"] == again["summary"]["skipped"] == 1
    first, second = again["measurements"]
    assert first["percentile_seconds"] == {f"p{q}": 0.2 for q in (10, 50, 75, 90, 95)}
    assert first["measurement"]["samples"]["step_seconds"] == [[0.2, 0.2, 0.2]] * 2
    assert first["verdict"]["comparisons"][0]["change"] == {"estimate": 0.123, "low": 0.081, "high": 0.167}
    assert second["verdict"] is None
    assert second["error"].endswith("ValueError: bad")


# --- progress


USUAL: dict[str, Any] = {"launch": 2, "launches": 5, "phase": "steps", "step": 30, "steps": 50, "p50_seconds": None}


@pytest.mark.parametrize(
    ("facts", "line"),
    [
        ({"p50_seconds": 0.2431}, "launch 2/5, step 30/50, p50 so far 0.243s"),
        ({"phase": "warmup", "step": 3, "steps": 5}, "launch 2/5, warm-up 3/5"),
        ({"launches": 0, "phase": "setup"}, "setup"),
        ({"launches": 0, "steps": 0}, "the function"),
        ({"left_seconds": 60.0}, "launch 2/5, step 30/50"),
        ({"test": 3, "tests": 12}, "test 3/12, launch 2/5, step 30/50"),
        *(
            ({"test": 3, "tests": 12, "left_seconds": seconds}, f"test 3/12 ({left} left), launch 2/5, step 30/50")
            for seconds, left in (
                (3.0, "10 s"),
                (48.0, "50 s"),
                (58.0, "1 min"),
                (5_900.0, "98 min"),
                (7_830.0, "2 h 10 min"),
                (7_140.0, "2 h 0 min"),
            )
        ),
    ],
)
def test_progress_has_its_place_and_what_is_left(facts: dict[str, Any], line: str) -> None:
    assert watch.progress_line(**{**USUAL, **facts}) == line


def test_waiting_names_what_is_waited_for() -> None:
    assert watch.waiting_line("cpu0", 4321, 10.2) == "waiting for cpu0, in use by pid 4321, 10 s"
    assert watch.waiting_line("", None, 80.0) == "waiting for the host, in use by another process, 80 s"
