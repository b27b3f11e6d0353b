"""Figures of the user's own: what they are, how they are read from what a program writes, and how
they are judged."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_ddpperf import Figure, text
from pytest_ddpperf.baseline.content import nonsense
from pytest_ddpperf.cli.diff import compare
from pytest_ddpperf.compare.own_figures import check_launch, check_measurement
from pytest_ddpperf.compare.rounds import combine
from pytest_ddpperf.options import parse
from pytest_ddpperf.plugin import arguments
from pytest_ddpperf.plugin.results import RunResults
from pytest_ddpperf.rank.context import Context
from pytest_ddpperf.records import codec
from pytest_ddpperf.records.errors import (
    DdpPerfError,
    LaunchError,
    MissingExtraError,
)
from pytest_ddpperf.records.figure import Better, FigureValues
from pytest_ddpperf.records.metric import metric_of
from pytest_ddpperf.records.plan import Limit, Plan, limits_for
from pytest_ddpperf.records.samples import (
    Environment,
    Measurement,
    RankOutput,
    Samples,
    Verdict,
)
from pytest_ddpperf.report import causes, sentences, terminal
from pytest_ddpperf.verdict.decision import judge
from pytest_ddpperf.verdict.guard import raised_limits
from pytest_ddpperf.wire import figures as figures_module
from pytest_ddpperf.wire.figures import FigureReader
from tests.reports import RUN, Drawn, outcome, report
from tests.reports import measurement as drawn

PLAN = Plan(world_size=2, backend="gloo", device="cpu")
FASTER = Figure(better="higher")
SAME = FigureValues(figure=FASTER, values=((((5.0,) * 3),),) * 2)
SMALLER = Figure(better="lower")
STEADY = (1000.0, 1010.0, 990.0, 1000.0, 1000.0)
LIMITS = tuple(limits_for(PLAN, parse.limits("tps:5%"), {"tps": FASTER}))


def values(figure: Figure, levels: Sequence[float]) -> FigureValues:
    """A launch a level; rank 1 does not have the figure."""
    launches = [((level * 0.99, level * 1.01), ()) for level in levels]
    return FigureValues(figure=figure, values=tuple(launches))


def measured(**own: FigureValues) -> Measurement:
    """Steps of a second, with these figures."""
    launches = max((len(each.values) for each in own.values()), default=5)
    steps = tuple((1.0, 1.001) for _ in range(launches))
    return Measurement(
        samples=Samples(
            step_seconds=steps,
            rank_seconds=tuple((each, each) for each in steps),
            figures=own,
        ),
        environment=Environment(),
    )


def on_tps(
    now: Sequence[float], before: Sequence[float], better: Better
) -> Verdict:
    figure = Figure(better=better)
    limits = limits_for(PLAN, parse.limits("tps:5%"), {"tps": figure})
    sides = [measured(tps=values(figure, each)) for each in (now, before)]
    return judge(sides[0], sides[1:], limits, interleaved=True)


# --- what a figure is


@pytest.mark.parametrize("better", ["", None, "faster", True])
def test_a_direction_is_required(better: Any) -> None:
    with pytest.raises(TypeError, match='better="higher" or better="lower"'):
        Figure(pattern="tps: (.+)", better=better)
    with pytest.raises(TypeError, match='better="higher" or better="lower"'):
        Figure(pattern="tps: (.+)")


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"pattern": "tps: .+"}, "put the number, and nothing else, into a"),
        ({"pattern": "(a)(b)"}, "put the number, and nothing else, into a"),
        ({"pattern": "(a"}, "unterminated subpattern"),
        ({"pattern": 3}, "Figure(pattern=3): must be a str"),
        ({"pattern": b"(a)"}, "Figure(pattern=b'(a)'): must be a str"),
        ({"file": 3}, "Figure(file=3): must be a str"),
        ({"key": 3}, "Figure(key=3): must be a str"),
        ({"skip": -1}, "Figure(skip=-1): a whole number from 0"),
        ({"skip": True}, "Figure(skip=True): a whole number from 0"),
    ],
)
def test_what_no_figure_can_be_is_an_error(
    fields: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValueError) as caught:
        Figure(better="higher", **fields)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("given", "kind", "problem"),
    [
        (["tps"], TypeError, "give a dict of Figure by name"),
        ({"tps": "tps: (.+)"}, TypeError, "must be a Figure of pytest_ddpperf"),
        ({"tps": FASTER}, ValueError, "give Figure(pattern=...)"),
        (
            {"tps": Figure(better="lower", key="tps")},
            ValueError,
            "give Figure(pattern=...)",
        ),
        (
            {"tps": Figure(better="lower", file="a", key="b", pattern="(c)")},
            ValueError,
            "give Figure(pattern=...)",
        ),
        *(
            ({name: Figure(better="lower", pattern="(c)")}, ValueError, problem)
            for name, problem in {
                "p50": "a metric has that name: choose another",
                "p5O": "a metric has that name: choose another",
                "rpc.bytes": "a metric has that name: choose another",
                "tps_p90": "percentiles of figures",
                "tokens per second": "letters, digits",
                "a:b": "letters, digits",
                "": "letters, digits",
                3: "letters, digits",
            }.items()
        ),
    ],
)
def test_what_cannot_be_judged_is_refused_before_a_launch(
    given: Any, kind: type[Exception], problem: str
) -> None:
    with pytest.raises(kind) as caught:
        arguments.check_figures("ddp_benchmark.script", given)
    assert str(caught.value).startswith("ddp_benchmark.script(figures=")
    assert problem in str(caught.value)


def test_figures_are_taken_by_name() -> None:
    given = {"tps": Figure(better="higher", pattern="tps (.+)")}
    assert arguments.check_figures("x", given) == given
    assert arguments.check_figures("x", None) == {}


# --- the metric


LAUNCHES = FigureValues(
    figure=FASTER,
    values=(((1.0, 3.0), (4.0, 4.0, 4.0)), ((8.0,), ())),
)


@pytest.mark.parametrize(
    ("name", "better", "found"),
    [
        # the mean of a rank, then over ranks that have it
        ("tps", "lower", (3.0, 8.0)),
        ("tps", "higher", (1 / 3.0, 1 / 8.0)),
        ("tps_p50", "lower", (3.0, 8.0)),
        ("tps_p25", "lower", (2.75, 8.0)),
        ("gone", "lower", ()),
    ],
)
def test_each_launch_has_a_figure(
    name: str, better: str, found: tuple[float, ...]
) -> None:
    kind = metric_of(name, better)
    assert kind.figures(measured(tps=LAUNCHES)) == pytest.approx(found)
    for each, own in zip(found, LAUNCHES.by_launch(), strict=False):
        if name == "tps":
            assert kind.shown(each, None) == pytest.approx(own)


def test_the_mean_is_over_launches() -> None:
    assert LAUNCHES.mean == pytest.approx((3.0 * 8.0) ** 0.5)
    lacking = replace(LAUNCHES, values=(*LAUNCHES.values, ()))
    assert lacking.by_launch() == ()
    with pytest.raises(ValueError, match="non-empty"):
        _ = lacking.mean


# --- limits


@pytest.mark.parametrize(
    ("asked", "own"),
    [
        ("", "p10:10% p50:10% mean:25% rss:10% tps:10%"),
        ("tps:5%", "tps:5% rss:10%"),
        # names that contain those of metrics
        ("tflops:5%,forward_ms:5%", "p10:10% p50:10% mean:25% rss:10% tps:10%"),
        ("p50:3%,tps_p50:5%", "p50:3% tps_p50:5% rss:10%"),
        # of another test
        ("busy:5%", "p10:10% p50:10% mean:25% rss:10% tps:10%"),
        ("busy:5%,p50:1%", "p50:1% rss:10% tps:10%"),
    ],
)
def test_each_figure_has_a_limit_in_its_direction(asked: str, own: str) -> None:
    known = {"rss": SMALLER, "tps": FASTER}
    given = parse.limits(asked or "p10:10%,p50:10%,mean:25%")
    found = [
        each
        for each in limits_for(PLAN, given, known)
        if not each.kind.is_exact
    ]
    assert " ".join(map(str, found)) == own
    directions = {each.metric[:3]: each.better for each in found}
    assert (directions["tps"], directions["rss"]) == ("higher", "lower")
    assert all(each.default for each in found if each.metric == "rss")


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ("tps:5ms", "a limit on tps is a share below 100 %"),
        ("tps:100%", "a limit on tps is a share below 100 %"),
        ("tps_p0:5%", "tps_p0: percentiles are p1 to p99"),
        ("tps_p100:5%", "tps_p100: percentiles are p1 to p99"),
        ("tokens per second:5%", "unknown metric tokens per second"),
        ("foward:5%", "unknown metric foward; did you mean forward?"),
        ("p5O:5%", "unknown metric p5O; did you mean p50?"),
        ("median:5%", "unknown metric median; did you mean p50?"),
        ("meann:5%", "unknown metric meann; did you mean mean?"),
        ("forwards:5%", "unknown metric forwards; did you mean forward?"),
    ],
)
def test_what_no_limit_can_be_on_is_refused(asked: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem.replace("?", r"\?")):
        parse.limits(asked)


# --- verdicts


@pytest.mark.parametrize(
    ("better", "factor", "status"),
    [
        ("higher", 1 / 2.5, "REGRESSED"),
        ("higher", 2.5, "IMPROVED"),
        ("lower", 2.5, "REGRESSED"),
        ("lower", 1 / 2.5, "IMPROVED"),
        ("higher", 0.93, "REGRESSED"),
        ("higher", 0.97, "PASS"),
        ("lower", 1.04, "PASS"),
    ],
)
def test_the_direction_decides_what_is_worse(
    better: Better, factor: float, status: str
) -> None:
    now = [factor * level * (1 + 0.001 * k) for k, level in enumerate(STEADY)]
    verdict = on_tps(now, STEADY, better)
    assert verdict == status
    (found,) = verdict.comparisons
    change = text.changed(found).estimate
    assert change == pytest.approx(factor * 1.002 - 1, abs=1e-3)
    before, after = text.both_sides(found, None)
    assert (before, after) == ("1,000", text.number(1002 * factor))


def test_speeds_of_launches_are_not_looked_for_in_a_figure_that_is_no_time() -> (
    None
):
    before = [1000.0 + k for k in range(20)]
    now = [*before[:14], *[800.0 + k for k in range(6)]]
    (found,) = on_tps(now, before, "higher").comparisons
    assert found.speeds is None


def test_a_row_shows_both_sides_of_the_figure_whose_change_it_shows() -> None:
    worse = [0.8 * level for level in STEADY]
    verdict = on_tps(worse, STEADY, "higher")
    now = measured(tps=values(FASTER, worse))
    found = outcome("test_a", Drawn(), verdict, now)
    _, row = terminal.table([found])
    assert "  tps 1,000 -> 800  tps -20 % [" in row


def test_a_figure_that_changed_its_direction_is_not_compared() -> None:
    sides = [
        measured(tps=values(figure, STEADY)) for figure in (SMALLER, FASTER)
    ]
    verdict = judge(sides[0], sides[1:], LIMITS)
    assert (verdict, verdict.reason) == ("INCOMPARABLE", "must-match")
    assert verdict.differences == ("tps higher is better -> lower is better",)


def test_a_figure_that_is_read_otherwise_is_not_compared() -> None:
    sides = [
        measured(tps=values(Figure(better="higher", pattern=pattern), STEADY))
        for pattern in ("tps: (.+)", "best tps: (.+)")
    ]
    verdict = judge(sides[0], sides[1:], LIMITS, interleaved=True)
    assert (verdict, verdict.reason) == ("INCOMPARABLE", "must-match")
    assert "pattern best tps: (.+), higher is better" in str(
        verdict.differences
    )


def test_a_figure_that_may_be_constant_now_is_still_compared() -> None:
    sides = [
        measured(tps=values(replace(FASTER, constant=constant), STEADY))
        for constant in (True, False)
    ]
    assert judge(sides[0], sides[1:], LIMITS) == "PASS"


@pytest.mark.parametrize("asked", ["tps:5%", "p50:5%"])
def test_a_figure_that_got_lost_is_not_compared_also_by_a_default_limit(
    asked: str,
) -> None:
    before = measured(tps=values(FASTER, STEADY))
    limits = limits_for(PLAN, parse.limits(asked), {"tps": FASTER})
    verdict = judge(measured(), [before], limits)
    assert (verdict, verdict.reason) == ("INCOMPARABLE", "unknown-metric-now")
    found = outcome("test_a", Drawn(), verdict, measured(), limits=limits)
    assert (
        sentences.why_not_compared(found)
        == "tps is unknown now, or 0, or differs between launches: see the notes, if any, or remove its limit"
    )


def test_a_new_figure_is_not_compared_and_the_default_limit_is_dropped() -> (
    None
):
    now = measured(tps=values(FASTER, STEADY))
    limits = limits_for(PLAN, parse.limits("p50:5%"), {"tps": FASTER})
    verdict = judge(now, [measured()], limits)
    assert verdict == "PASS"
    assert verdict.dropped == ("tps:10%: the baseline does not know it",)
    verdict = judge(now, [measured()], LIMITS)
    assert (verdict, verdict.reason) == ("INCOMPARABLE", "unknown-metric")
    assert verdict.differences == ("tps is unknown in the baseline",)


@pytest.mark.parametrize("asked", ["tps:5%", "p50:5%"])
def test_a_figure_that_one_launch_of_the_baseline_lacks_is_not_compared(
    asked: str,
) -> None:
    known = values(FASTER, STEADY)
    lacks_one = replace(known, values=(((), ()), *known.values[1:]))
    now = measured(tps=values(FASTER, [each / 2 for each in STEADY]))
    limits = limits_for(PLAN, parse.limits(asked), {"tps": FASTER})
    verdict = judge(now, [measured(tps=lacks_one)], limits, interleaved=True)
    assert (verdict, verdict.reason) == ("INCOMPARABLE", "unknown-metric")


def test_worse_within_the_limit_is_not_called_slower() -> None:
    rss = [1.07 * level for level in STEADY]
    sides = [measured(rss=values(SMALLER, each)) for each in (rss, STEADY)]
    limits = limits_for(PLAN, parse.limits("rss:10%"), {"rss": SMALLER})
    verdict = judge(sides[0], sides[1:], limits, interleaved=True)
    found = outcome("test_a", Drawn(), verdict, sides[0], limits=limits)
    assert sentences.reason(found).startswith(
        "rss +7.0 %: worse, within the limit of 10 %"
    )


def test_a_fall_is_compared_with_a_limit_on_falls() -> None:
    tps = [0.65 * level for level in STEADY]
    sides = [measured(tps=values(FASTER, each)) for each in (tps, STEADY)]
    limits = limits_for(PLAN, parse.limits("tps:50%"), {"tps": FASTER})
    verdict = judge(sides[0], sides[1:], limits, interleaved=True)
    found = outcome("test_a", Drawn(), verdict, sides[0], limits=limits)
    assert sentences.reason(found).startswith(
        "tps -35 %: worse, within the limit of 50 %"
    )


def test_a_limit_that_is_gone_since_the_baseline_is_named() -> None:
    (limit, *_) = LIMITS
    other = Limit(metric="p50", value=0.1, unit="%")
    assert [*raised_limits([limit], [other])] == [("tps", "5 %", "none")]


def test_the_mean_is_shown_with_v() -> None:
    now = measured(
        tps=values(FASTER, (12000.0, 14000.0)), gone=replace(SAME, values=((),))
    )
    verdict = on_tps(STEADY, STEADY, "higher")
    found = outcome("test_a", Drawn(), verdict, now, limits=LIMITS)
    assert "  figures: tps 12,961" in [*terminal.details([found])]


def test_causes_are_not_looked_for_in_a_figure_that_is_no_time() -> None:
    verdict = on_tps([level / 2 for level in STEADY], STEADY, "higher")
    one = measured(tps=values(FASTER, STEADY))
    cpu = one.samples.rank_seconds
    side = replace(one, samples=replace(one.samples, cpu_seconds=cpu))
    assert verdict == "REGRESSED"
    assert causes.find_causes(verdict, PLAN, side, [side]) == ()


# --- what is red


def job(
    limits: str = "p50:5%",
    source: str = "default",
    gate: bool = True,
    **more: Any,
) -> Any:
    settings = {"limits": parse.limits(limits), "disable": False, **more}
    return SimpleNamespace(
        gate=gate,
        reference=None,
        plan=replace(PLAN, boundary="update"),
        settings=SimpleNamespace(**settings, sources={"limits": source}),
    )


def launched(*ranks: tuple[float, ...], figure: Figure = FASTER) -> Any:
    found = FigureValues(figure=figure, values=(ranks,))
    output = RankOutput(rank=0, name="rank 0", stdout="step: 1", stderr="")
    return SimpleNamespace(figures={"tps": found}, output=(output,))


@pytest.mark.parametrize(
    ("launch", "problem"),
    [
        (launched((), ()), "tps has no value: no timed step recorded it"),
        (
            launched((), figure=Figure(better="lower", pattern="tps (.+)")),
            'tps has no value: pattern "tps (.+)" matches nothing in the output of'
            " timed steps; if it comes less often, raise --ddp-min-time",
        ),
        (
            launched((), figure=Figure(better="lower", file="a", key="b")),
            'tps has no value: a has no new "b": the program has to write'
            " and flush it",
        ),
        (
            launched((0.0, 0.0)),
            "tps is 0: a figure must be above 0, since changes are shares of it",
        ),
        (
            launched((1.0, -3.0)),
            "tps is -1: a figure must be above 0, since changes are shares of it",
        ),
    ],
)
def test_a_launch_without_a_figure_is_red(launch: Any, problem: str) -> None:
    with pytest.raises(LaunchError) as caught:
        check_launch(job(), launch)
    assert str(caught.value) == f"rank 0 failed: {problem}"
    assert caught.value.output == launch.output
    check_launch(job(disable=True), launch)


def test_a_command_without_its_figure_is_red_if_disabled_for_it_runs_to_its_end() -> (
    None
):
    disabled = job(disable=True)
    disabled.plan = replace(PLAN, command=True)
    figure = Figure(better="higher", pattern="tok/s (.+)")
    with pytest.raises(LaunchError, match="matches nothing in the"):
        check_launch(disabled, launched((), figure=figure))
    check_launch(disabled, launched((2.0,), figure=figure))


def test_a_launch_with_its_figures_is_not() -> None:
    check_launch(job(), launched((0.0, 2.0), ()))


def test_a_figure_that_is_the_same_everywhere_is_red_unless_it_may_be() -> None:
    with pytest.raises(DdpPerfError) as caught:
        check_measurement(job(), measured(tps=SAME))
    assert str(caught.value) == (
        "tps is 5 in all launches, so it is probably not measured: if it is"
        " constant, say constant=True"
    )
    may_be = replace(SAME, figure=replace(FASTER, constant=True))
    check_measurement(job(), measured(tps=may_be))
    check_measurement(job(disable=True), measured(tps=SAME))
    varies = replace(SAME, values=(*SAME.values, ((5.1,),)))
    check_measurement(job(), measured(tps=varies))
    few = replace(SAME, values=(((5.0,),),) * 4)
    check_measurement(job(), measured(tps=few))


def test_a_figure_that_some_launches_lack_is_red() -> None:
    lacking = replace(SAME, values=(*SAME.values, ()))
    with pytest.raises(DdpPerfError) as caught:
        check_measurement(job(), measured(tps=lacking))
    assert (
        str(caught.value)
        == "tps is not in all launches, or not the same figure in all"
    )


@pytest.mark.parametrize("interleaved", [True, False])
def test_counts_that_may_be_constant_are_compared_exactly(
    interleaved: bool,
) -> None:
    figure = replace(SMALLER, constant=True)
    limits = limits_for(PLAN, parse.limits("rss:1%"), {"rss": figure})
    for now, status in ((5.0, "PASS"), (5.1, "REGRESSED"), (4.9, "IMPROVED")):
        sides = [
            measured(rss=replace(SAME, figure=figure, values=(((each,),),) * 5))
            for each in (now, 5.0)
        ]
        found = judge(sides[0], sides[1:], limits, interleaved=interleaved)
        assert found == status


def test_a_count_that_varied_between_sessions_drifts_also_if_it_may_be_constant() -> (
    None
):
    figure = replace(SMALLER, constant=True)
    limits = limits_for(PLAN, parse.limits("rss:1%"), {"rss": figure})
    now, *sessions = [
        measured(rss=replace(SAME, figure=figure, values=(((each,),),) * 5))
        for each in (5.1, 5.0, 5.05)
    ]
    assert judge(now, sessions, limits) == "INCONCLUSIVE"


def test_a_markers_limit_on_a_figure_that_the_test_does_not_have_is_red() -> (
    None
):
    now = measured(tps=values(FASTER, STEADY))
    check_measurement(job("tsp:5%", "command line"), now)
    check_measurement(job("tsp:5%", "marker", gate=False), now)
    with pytest.raises(DdpPerfError) as caught:
        check_measurement(job("tsp:5%", "marker"), now)
    assert str(caught.value) == (
        "limit tsp:5%: this measurement has no figure tsp: it has tps"
    )


def test_a_percentile_needs_values() -> None:
    check_measurement(job("tps_p50:5%"), measured(tps=values(FASTER, STEADY)))
    with pytest.raises(DdpPerfError) as caught:
        check_measurement(
            job("tps_p95:5%", "command line"),
            measured(tps=values(FASTER, STEADY)),
        )
    assert str(caught.value) == (
        "--ddp-threshold: tps_p95:5%: needs 59 values of tps in all launches,"
        " there are 10"
    )


def test_a_limit_of_the_run_that_no_test_has_a_figure_for_is_named() -> None:
    results = RunResults(RUN)
    now = outcome(
        "test_a", Drawn(), on_tps(STEADY, STEADY, "higher"), drawn(Drawn())
    )
    now = replace(now, limits=LIMITS)
    results.take(codec.encode({"outcomes": [now]}))
    results.note_unused(parse.limits("tps:5%,p90:5%"))
    assert results.messages == []
    results.note_unused(parse.limits("tps:5%,tsp:5%"))
    (message,) = results.messages
    assert message == (
        "there is a limit on tsp, and no test has such a figure: check the name"
    )
    assert message in [*results.lines(-1, 100)], "with -q, too"


# --- launches together, and what is stored


def test_a_launch_that_lacks_a_figure_or_has_another_makes_it_unknown() -> None:
    base = drawn(Drawn())
    one = SimpleNamespace(
        **dict.fromkeys(Samples.__slots__),
        counters={},
        phases=None,
        kernels=(),
    )
    one.step_seconds, one.rank_seconds = (1.0,), ((1.0,),)

    def having(**own: FigureValues) -> Any:
        return SimpleNamespace(**{**vars(one), "figures": own})

    known = FigureValues(figure=FASTER, values=(((5.0,),),))
    other = replace(known, figure=SMALLER)
    both = combine((having(tps=known), having(tps=known)), base.environment)
    assert both.samples.figures["tps"].by_launch() == (5.0, 5.0)
    for second in (having(), having(tps=other)):
        found = combine((having(tps=known), second), base.environment)
        assert found.samples.figures["tps"].by_launch() == ()


def test_a_baseline_keeps_the_values() -> None:
    samples = measured(tps=LAUNCHES).samples
    assert codec.decode(Samples, codec.encode(samples)) == samples
    assert samples.first(1).figures == samples.figures
    assert nonsense(samples) == ""
    short = replace(LAUNCHES, values=LAUNCHES.values[:1])
    wrong = replace(samples, figures={"tps": short})
    assert nonsense(wrong) == "figures.tps: 1 launches, not 2"


def test_two_reports_are_compared_by_their_figures() -> None:
    source = random.Random(1)

    def of_run(level: float) -> Any:
        own = [level * source.uniform(0.99, 1.01) for _ in range(5)]
        base = drawn(Drawn(launches=5))
        samples = replace(base.samples, figures={"tps": values(FASTER, own)})
        verdict = on_tps(STEADY, STEADY, "higher")
        now = replace(base, samples=samples)
        found = outcome("test_a", Drawn(), verdict, now)
        return report([replace(found, limits=LIMITS)])

    compared = compare(of_run(1000), of_run(500), None, frozenset())
    (found,) = compared.outcomes
    assert found.verdict == "REGRESSED"
    assert sentences.headline(found).startswith("REGRESSED tps -5"), (
        sentences.headline(found)
    )


# --- what steps record


@pytest.fixture
def ctx() -> Context:
    return Context(
        rank=0,
        local_rank=0,
        world_size=1,
        local_world_size=1,
        node_rank=0,
        device=None,  # type: ignore[arg-type]
        backend="gloo",
        seed=0,
    )


@pytest.mark.parametrize(
    ("call", "kind", "problem"),
    [
        (
            lambda ctx: ctx.record("tps", 1.0),
            TypeError,
            'ctx.record(\'tps\', ...): say better="higher" or better="lower"; with'
            " better=None the figure is kept, and not judged",
        ),
        (
            lambda ctx: ctx.record("tps", 1.0, better="up"),
            TypeError,
            "ctx.record('tps', ...): say better=\"higher\"",
        ),
        (
            lambda ctx: ctx.record("tps", True, better="higher"),
            TypeError,
            "ctx.record('tps', True): the figure must be a number",
        ),
        (
            lambda ctx: ctx.record("p50", 1.0, better="higher"),
            ValueError,
            "ctx.record('p50', ...): a metric has that name: choose another",
        ),
        (
            lambda ctx: ctx.record("tokens per s", 1.0, better="higher"),
            ValueError,
            "ctx.record('tokens per s', ...): the name of a figure has letters",
        ),
        *(
            (
                lambda ctx, other=other: (
                    ctx.record("tps", 1.0, better="higher"),
                    ctx.record("tps", 1.0, better=other),
                ),
                ValueError,
                f"ctx.record('tps', ...): better={other!r}, and 'higher' before: a"
                " figure has one direction",
            )
            for other in ("lower", None)
        ),
    ],
)
def test_what_cannot_be_recorded_is_an_error_where_it_stands(
    ctx: Context,
    call: Callable[[Context], object],
    kind: type[Exception],
    problem: str,
) -> None:
    with pytest.raises(kind) as caught:
        call(ctx)
    assert str(caught.value).startswith(problem)


def test_a_figure_that_is_kept_may_have_any_name_and_be_true(
    ctx: Context,
) -> None:
    ctx.record("overflow so far", True, better=None)
    assert ctx.figures == {"overflow so far": 1.0}
    assert ctx.judged == {"overflow so far": None}


# --- what a program writes


class Written:
    """A program's output and its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "rank0.out"
        self.log.write_text("tps: 7\n")

    def write(self, words: str, file: str = "rank0.out") -> None:
        with (self.folder / file).open("a") as log:
            log.write(words)

    def reading(
        self, figure: Figure, *, has_ended: bool = False
    ) -> Callable[[], tuple[float, ...]]:
        """Begin to read a figure."""
        gone = str(self.folder / "gone.err")
        reader = FigureReader(
            {"tps": figure},
            str(self.folder),
            [str(self.log), gone],
            _has_ended=has_ended,
        )
        reader.begin()
        return lambda: reader.read()["tps"].values[0][0]


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return Written(tmp_path)


TPS = Figure(better="higher", pattern=r"tps: ([\d,.]+|\w+)")


def test_the_last_line_of_a_file_may_not_be_whole_yet(written: Written) -> None:
    figure = replace(TPS, file="train.log")
    read = written.reading(figure)
    written.write("tps: 1234.5\ntps: 12", "train.log")
    assert read() == (1234.5,)
    # what a command has written is whole when it has ended
    read = written.reading(figure, has_ended=True)
    written.write("\ntps: 56.7", "train.log")
    assert read() == (56.7,)
    # the output of ranks is whole
    read = written.reading(TPS)
    written.write("tps: 12")
    assert read() == (12,)


def test_a_pattern_may_be_of_a_whole_line(written: Written) -> None:
    read = written.reading(replace(TPS, pattern=r"^tps: (\d+)$"))
    written.write("tps: 1\nmean tps: 2\ntps: 3\ntps: 4 or so\n")
    assert read() == (1, 3)


def test_what_was_written_before_does_not_count(written: Written) -> None:
    read = written.reading(TPS)
    assert read() == ()
    written.write("step: 1  \x1b[32mtps: \x1b[39m1,234.5  mfu: 3\ntps: 12.\n")
    assert read() == (1234.5, 12.0)


def test_what_is_added_counts_however_coarse_the_times_of_files_are(
    written: Written,
) -> None:
    """A window of short steps may be over before the clock of the file system moves on."""
    read = written.reading(TPS)
    before = written.log.stat()
    written.write("tps: 3\n")
    os.utime(written.log, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert read() == (3.0,)


def test_the_first_values_are_left_out_on_demand(written: Written) -> None:
    read = written.reading(replace(TPS, skip=1))
    written.write("tps: 1\n")
    assert read() == ()
    written.write("tps: 2\ntps: 3\n")
    assert read() == (2.0, 3.0)


@pytest.mark.parametrize("value", ["nan", "inf", "fast", "1.2.3"])
def test_what_is_no_number_is_an_error(written: Written, value: str) -> None:
    read = written.reading(TPS)
    written.write(f"tps: {value}\n")
    with pytest.raises(DdpPerfError) as caught:
        read()
    assert str(caught.value) == f"tps is '{value}', not a finite number"


def test_a_file_may_be_text_and_be_written_anew(written: Written) -> None:
    read = written.reading(replace(TPS, file="logs/**/*.txt"))
    (written.folder / "logs/now").mkdir(parents=True)
    written.write("tps: 5\n", "logs/now/a.txt")
    written.write("tps: 6\n")
    assert read() == (5.0,)
    read = written.reading(replace(TPS, file="logs/now/a.txt"))
    written.write("tps: 8\n", "logs/now/a.txt")
    assert read() == (8.0,)
    (written.folder / "logs/now/a.txt").write_text("tps: 9\n")
    assert read() == (9.0,), "shorter than before: all of it is new"


def test_a_file_that_is_written_anew_with_the_same_has_its_value(
    written: Written,
) -> None:
    file = written.folder / "peak.jsonl"
    file.write_text('{"tps": 5}\n')
    os.utime(file, (1e9, 1e9))  # by an earlier run
    read = written.reading(replace(LINES, file="peak.jsonl"))
    assert read() == ()
    file.write_text('{"tps": 5}\n')
    assert read() == (5.0,)


LINES = Figure(better="higher", file="log.jsonl", key="tps")


def test_json_lines_are_read_by_key(written: Written) -> None:
    written.write('{"tps": 1}\n', "log.jsonl")
    read = written.reading(LINES)
    written.write('{"tps": 2.5}\n\n{"loss": 3}\n[4]\n', "log.jsonl")
    written.write('{"tps": 1e3}\n{"tps": 4', "log.jsonl")
    assert read() == (2.5, 1000.0)
    written.write("2}", "log.jsonl")
    assert read() == (2.5, 1000.0, 42.0), "json.dump ends no line"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (
            "tps 5",
            "log.jsonl: a line is not JSON (the program has to write and flush whole lines): 'tps 5'",
        ),
        ('{"tps": NaN}', "tps is nan, not a finite number"),
        ('{"tps": true}', "tps is True, not a finite number"),
        ('{"tps": null}', "tps is None, not a finite number"),
        ('{"tps": {}}', "tps is {}, not a finite number"),
    ],
)
def test_a_line_without_a_number_is_an_error(
    written: Written, line: str, problem: str
) -> None:
    read = written.reading(LINES)
    written.write(line + "\n", "log.jsonl")
    with pytest.raises(DdpPerfError) as caught:
        read()
    assert str(caught.value).endswith(problem)


EVENTS = Figure(better="higher", file="runs/*tfevents*", key="tps")


def test_event_files_need_the_extra(
    written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        sys.modules, "tensorboard.backend.event_processing", None
    )
    (written.folder / "runs").mkdir()
    read = written.reading(EVENTS)
    written.write("x", "runs/events.out.tfevents.1")
    with pytest.raises(
        MissingExtraError,
        match=r"needs tensorboard: pip install 'pytest-ddpperf\[tensorboard\]'",
    ):
        read()


def test_event_files_are_read_by_tag(
    written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(written.folder / "runs")) as writer:
        # a program makes its writer long before its steps are timed
        writer.add_scalar("tps", 8.0, 0)
        read = written.reading(replace(EVENTS, skip=1))
        for step, value in enumerate((1.0, 2.0, 4.0), 1):
            writer.add_scalar("tps", value, step)
            writer.add_scalar("loss", -value, step)
    assert read() == (2.0, 4.0)
    read = written.reading(EVENTS)
    monkeypatch.setattr(
        figures_module, "_of_events", lambda *_: pytest.fail("nothing is new")
    )
    assert read() == (), "it was there before"


def test_the_folder_of_a_program_is_no_pattern(tmp_path: Path) -> None:
    folder = tmp_path / "job[1]*"
    folder.mkdir()
    written = Written(folder)
    read = written.reading(replace(TPS, file="train.*"))
    written.write("tps: 5\n", "train.log")
    assert read() == (5.0,)
