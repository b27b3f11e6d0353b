"""What a run shows on the terminal: a row per measurement, a line per problem, a last line; and
more with -v."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import fields
from statistics import fmean, median

from pytest_ddpperf import text
from pytest_ddpperf.records import quantiles
from pytest_ddpperf.records.metric import WALL, OwnFigure, metric_of
from pytest_ddpperf.records.outcome import Outcome, Outcomes, RunInfo
from pytest_ddpperf.records.samples import (
    Baseline,
    Facts,
    LaunchCost,
    LaunchSteps,
    Measurement,
    Status,
    TestId,
    Verdict,
)
from pytest_ddpperf.report import sentences
from pytest_ddpperf.report.summary import last_line
from pytest_ddpperf.text import Lines
from pytest_ddpperf.verdict.times import TEST_LEVEL

_PERCENTILES = (50, 75, 90, 95)


def about(facts: Facts) -> Lines:
    """Yield what runs the ranks, from the facts of a probe rank, and where each world size runs;
    nothing without facts."""
    if not facts:
        return
    versions = [f"torch {facts.get('torch')}", f"Python {facts.get('python')}"]
    for key, name in (("cuda", "CUDA"), ("nccl", "NCCL")):
        if facts.get(key):
            versions.append(f"{name} {facts[key]}")
    parts = [", ".join(versions)]
    if facts.get("device_count"):
        parts.append(f"{facts['device_count']} x {facts.get('device_model')}")
    parts.append(str(facts.get("cpu_model")))
    yield "; ".join(parts)
    if facts.get("machines"):
        yield str(facts["machines"])
    yield from filter(None, str(facts.get("places") or "").splitlines())
    if facts.get("against"):
        yield f"against {facts['against']}"


def header(facts: Facts, *, verbose: bool, width: int) -> Lines:
    """Yield the lines about a run at its begin."""
    for line in about(facts):
        yield from text.wrapped(f"ddpperf: {line}", width, " " * 9)
    if verbose and facts.get("topology"):
        yield "nvidia-smi topo -m"
        yield from str(facts["topology"]).rstrip().splitlines()


def report(
    outcomes: Outcomes,
    run: RunInfo,
    messages: Sequence[str],
    *,
    verbosity: int,
    width: int,
) -> Lines:
    """Yield the table, a line for each problem, the `messages` and the counts. At -q only those
    problems are shown that leave a verdict in doubt, at -v details are. No line is wider than
    `width`."""
    yield from table(outcomes, width=width)
    lines = [*details(outcomes, width)] if verbosity > 0 else []
    # a failure shows its notes
    others = [
        outcome for outcome in outcomes if outcome.error or not outcome.fails
    ]
    lines += sentences.problems(others, quiet=verbosity < 0)
    every = "\n".join(
        (*lines, *messages, last_line(outcomes, run, with_cost=True))
    )
    yield from text.wrap_text(text.printable(every), width)


_GAP = 2  # between columns
# characters of a name: if there is less room, the ranges of changes are left out, then columns
_LEAST_NAME = 15


def table(outcomes: Outcomes, *, width: int = text.WIDTH) -> Lines:
    """Yield a row per measurement: who, step time at p50 before and now, change, verdict."""
    outcomes = [outcome for outcome in outcomes if outcome.measurement]
    if not outcomes:
        return
    column = sentences.column(outcomes)
    rows = [
        ("ranks", column, "change [range]", "verdict"),
        *(tuple(_cells(outcome)) for outcome in outcomes),
    ]
    compared = any(change for _, _, change, _ in rows[1:])
    if not compared:
        rows = [
            ("ranks", column.partition(":")[0], "verdict"),
            *((ranks, now, verdict) for ranks, now, _, verdict in rows[1:]),
        ]
    elif _room(rows, width) < _LEAST_NAME:
        rows = [tuple(cell.partition(" [")[0] for cell in row) for row in rows]
    # the verdict is what matters most, then the change
    while _room(rows, width) < _LEAST_NAME and len(rows[0]) > 1:
        rows = [row[1:] for row in rows]
    names = text.names_within(outcomes, max(_room(rows, width), _LEAST_NAME))
    yield from text.aligned(
        [(name, *row) for name, row in zip(("", *names), rows, strict=True)],
        left=(len(rows[0]) - 3, len(rows[0]) - 1) if compared else (1,),
    )


def _room(rows: Sequence[Sequence[str]], width: int) -> int:
    """Return the number of columns that are left for names."""
    return width - sum(
        max(map(len, column)) + _GAP for column in zip(*rows, strict=True)
    )


def _cells(outcome: Outcome) -> Iterator[str]:
    before, now = both_sides(outcome)
    if outcome.plan.rpc:
        yield text.several(outcome.plan.world_size, "trainer")
    else:
        yield text.ranks(outcome.plan)
    yield f"{before:>6} -> {now}" if before else now
    yield change(outcome)
    yield outcome.shown_status


def both_sides(outcome: Outcome) -> tuple[str, str]:
    """Return the step time at p50 on the baseline side, "" if there is none, and now, with the unit
    of both; a figure of the user's own, with its name, if its change is shown."""
    shown = outcome.shown
    if shown and isinstance(shown.limit.kind, OwnFigure):
        before, now = text.both_sides(shown, None)
        return f"{shown.limit.metric} {before}", now
    for compared in outcome.comparisons:
        if compared.limit.metric in ("p50", WALL):
            return text.both_sides(compared, None)
    return "", sentences.p50(outcome)


def change(outcome: Outcome) -> str:
    """Return the change that decided, with its metric if that is not p50; "" if nothing was
    compared."""
    shown = outcome.shown
    # Of a reference it is known without a gate, too.
    if shown is None or outcome.verdict == Status.INCOMPARABLE:
        return ""
    metric = "" if shown.limit.metric == "p50" else f"{shown.limit.metric} "
    return metric + sentences.change_of(shown)


def details(outcomes: Outcomes, width: int = text.WIDTH) -> Lines:
    """Yield the percentiles and rates of each measurement, of the group and by rank; counters;
    costs; error rates."""
    for outcome in outcomes:
        if outcome.measurement:
            yield from ("", text.name(outcome))
            table = list(_percentiles(outcome))
            if max(map(len, table)) > width - _GAP:
                table = list(_percentiles(outcome, (50, 95)))
            yield from (f"  {line}" for line in (*table, *_details(outcome)))
    yield from collective_table(outcomes)
    yield ""
    yield from _error_rates(
        [
            each.verdict
            for each in outcomes
            if each.verdict
            and each.verdict.comparisons
            and each.verdict.status.compared
        ]
    )


def _error_rates(verdicts: Sequence[Verdict]) -> Lines:
    """Yield how many false alarms a run of several tests has on average, by its noise and limits,
    and what was assumed of the drift between sessions."""
    if len(verdicts) > 1:
        expected = sum(
            c.alarm_rate for each in verdicts for c in each.comparisons
        )
        most = f"at most {text.amount(TEST_LEVEL)} in each of {len(verdicts)} tests"
        yield f"expected false alarms in a run like this: {expected:.2g} ({most})"
    drifts = text.drifts(each for each in verdicts if each.sessions == 1)
    if drifts:
        yield (
            f"assumed drift between sessions: {text.span(drifts)} (--ddp-extend-baseline"
            " measures it)"
        )


def _rate(
    outcome: Outcome, durations: LaunchSteps, q: float, rank: int | None
) -> str:
    """Return examples per second at a percentile of the `durations` of steps, those of the whole
    group or of a rank."""
    samples = outcome.measured.samples
    if samples.examples is None:
        seconds = quantiles.percentile(durations, q)
        if outcome.batch_size is None or not seconds:
            return "-"
        ranks = outcome.plan.world_size if rank is None else 1
        return f"{text.number(outcome.batch_size * ranks / seconds)}/s"
    # From the examples really processed in each step; the slow end of time is the low end of the
    # rate.
    rates = []
    for examples, launch in zip(samples.examples, durations, strict=True):
        if rank is None:
            processed = [sum(step) for step in zip(*examples, strict=True)]
        else:
            processed = [*examples[rank]]
        in_steps = [
            number / seconds if seconds else 0.0
            for number, seconds in zip(processed, launch, strict=True)
        ]
        rates.append(quantiles.quantile(in_steps, 100 - q))
    return f"{text.number(quantiles.geometric_mean(rates))}/s"


def _details(outcome: Outcome) -> Lines:
    samples = outcome.measured.samples
    if outcome.comparisons:
        yield f"smallest detectable change: {text.resolutions(outcome.comparisons)}"
    counters = outcome.measured.counters.items()
    known = [f"{name} {count:,}" for name, count in counters if count]
    if known:
        yield f"a step: {', '.join(known)}"
    own = [
        f"{name} {text.number(found.mean)}"
        for name, found in samples.figures.items()
        if min(found.by_launch(), default=0.0) > 0
    ]
    if own:
        yield f"figures: {', '.join(own)}"
    yield from device(outcome.measured)
    faults = samples.most_page_faults
    if any(faults):
        yield f"page faults a step: {text.span(faults, '{:,.0f}'.format)}, by launch"
    phases = outcome.measured.mean_phases
    if phases:
        yield f"phases: {text.phases(phases)}"
    if outcome.costs:
        costs = []
        for field in fields(LaunchCost):
            usual = median(getattr(cost, field.name) for cost in outcome.costs)
            if usual:  # a command's phases are not known
                costs.append(f"{field.name} {text.seconds(usual)}")
        yield (
            f"cost: {text.several(len(outcome.costs), 'launch')}, {outcome.seconds:.0f} s;"
            f" a launch (median): {', '.join(costs)}"
        )


def device(measured: Measurement) -> Lines:
    """Yield the device time of a step and for which share of it the device is busy, if they are
    known."""
    of_ranks, busy = measured.samples.device_seconds, measured.busy_share
    if of_ranks is not None and busy is not None:
        taken = text.seconds(fmean(map(max, of_ranks)))
        yield f"device: {taken} a step, busy for {text.amount(busy)} of it"


def _percentiles(
    outcome: Outcome, percentiles: Sequence[int] = _PERCENTILES
) -> Lines:
    """Yield step times and rates at percentiles as PyTorch's DDP benchmark has them: of the group,
    then of each rank's own steps, with their CPU time. In an RPC launch the ranks are the trainers.
    """
    samples = outcome.measured.samples
    if outcome.plan.command:
        walls = [launch[0] for launch in samples.step_seconds]
        yield f"wall: {text.span(walls, text.seconds)}, by launch"
        return
    titles = ["sec/iter"]
    for q in percentiles:
        titles += [f"p{q}", "ex/sec"]
    if samples.cpu_seconds is not None:
        titles.append("CPU p50")
    rows = [titles]
    for rank in (None, *range(len(samples.rank_seconds[0]))):
        cells, durations = ["all"], samples.step_seconds
        if rank is not None:
            cells = [
                text.process(outcome.plan, outcome.measured.environment, rank)
            ]
            durations = tuple(launch[rank] for launch in samples.rank_seconds)
        for q in percentiles:
            cells += [
                _sec(quantiles.percentile(durations, q)),
                _rate(outcome, durations, q, rank),
            ]
        if samples.cpu_seconds is not None:
            cells.append("")
            if rank is not None:
                used = [launch[rank] for launch in samples.cpu_seconds]
                cells[-1] = _sec(quantiles.percentile(used, 50))
        rows.append(cells)
    # Without the columns of rates that are not known.
    columns = [
        column for column in zip(*rows, strict=True) if {*column[1:]} != {"-"}
    ]
    yield from text.aligned([*zip(*columns, strict=True)])


def _sec(seconds: float) -> str:
    """Return seconds in three decimals, as PyTorch's benchmark has them; shorter times in three
    digits."""
    return f"{seconds:.3f}" if seconds >= 0.1 else f"{seconds:.3g}"


_COLLECTIVE_TITLES = """
    op size count type redop root time algbw busbw #wrong
""".split()
_COLLECTIVE_UNITS = (
    "",
    "(B)",
    "(elements)",
    "",
    "",
    "",
    "(us)",
    "(GB/s)",
    "(GB/s)",
    "",
)


def collective_table(outcomes: Outcomes) -> Lines:
    """Yield the tables of nccl-tests, one for each test and group, a row per size, at p50."""
    tables: dict[str, list[tuple[str, ...]]] = {}
    for outcome in outcomes:
        asked, measured = outcome.plan.collective, outcome.measurement
        if asked and measured:
            title = f"{text.shortened(outcome.nodeid)} on {text.ranks(outcome.plan)}"
            facts = (
                asked.op,
                asked.size,
                asked.count,
                asked.dtype,
                asked.redop,
                asked.root,
            )
            seconds = measured.samples.p50
            row = (
                *map(str, facts),
                f"{seconds * 1e6:.5g}",
                f"{asked.algbw(seconds):.3g}",
                f"{asked.busbw(seconds):.3g}",
                "0",  # a wrong result ends its launch
            )
            tables.setdefault(title, []).append(row)
    for title, rows in tables.items():
        yield from ("", title)
        for line in text.aligned(
            [_COLLECTIVE_TITLES, _COLLECTIVE_UNITS, *rows]
        ):
            yield f"  {line}"


_BASELINE_TITLES = (
    "",
    "sessions",
    "last",
    "commit",
    "smallest detectable change in one run",
)


def baseline_table(
    environment: str, baselines: Sequence[Baseline], gone: Collection[TestId]
) -> Lines:
    """Yield the baselines of one environment, a row per test, with the figures of its last
    session, and below it why sessions were saved. Tests that are `gone` are marked."""
    rows = []
    for baseline in baselines:
        last = baseline.sessions[-1]
        kinds = {limit.metric: limit.kind for limit in last.limits}
        resolves = []
        for name, time in last.resolution.items():
            kind = kinds.get(name) or metric_of(name)
            resolves.append(f"{name} {text.amount(text.resolved(kind, time))}")
        digits, dirty, _ = last.commit.partition("-dirty")
        rows.append(
            (
                text.shortened(str(baseline.test))
                + ("?" if baseline.test in gone else ""),
                str(len(baseline.sessions)),
                text.date(last.created) or "unknown",
                text.commit(digits) + ("*" if dirty else "") or "-",
                ", ".join(resolves) or "-",
            )
        )
    titles, *lines = text.aligned([_BASELINE_TITLES, *rows])
    yield from (environment, f"  {titles}")
    for line, baseline in zip(lines, baselines, strict=True):
        yield f"  {line}"
        for session in baseline.sessions:
            if session.why:
                day = text.date(session.created)
                yield f"    saved {day}: {text.shortened(session.why)}"
