"""The tables and lines at the end of a run, of collectives, and of stored baselines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from statistics import median

from pytest_ddpperf.records import (
    COUNTERS,
    Baseline,
    LaunchSteps,
    Outcome,
    Phases,
    RunInfo,
    Samples,
    Scalar,
    Verdict,
)
from pytest_ddpperf.report import sentences, text
from pytest_ddpperf.report.summary import advice, count, last_line
from pytest_ddpperf.verdict import TEST_LEVEL, stats

_PERCENTILES = (50, 75, 90, 95)


def header(facts: Mapping[str, Scalar], *, verbose: bool) -> Iterator[str]:
    """Yield what runs the ranks, from the facts of a probe rank; `places` says where each world size runs."""
    versions = [f"torch {facts.get('torch')}", f"Python {facts.get('python')}"]
    versions += [f"{name} {facts[key]}" for key, name in (("cuda", "CUDA"), ("nccl", "NCCL")) if facts.get(key)]
    parts = [", ".join(versions)]
    if facts.get("device_count"):
        parts.append(f"{facts['device_count']} x {facts.get('device_model')}")
    parts.append(str(facts.get("cpu_model")))
    yield "ddpperf: " + "; ".join(parts)
    if facts.get("machines"):
        yield f"ddpperf: {facts['machines']}"
    yield from (f"ddpperf: {place}" for place in str(facts.get("places") or "").splitlines())
    if facts.get("against"):
        yield f"ddpperf: against {facts['against']}"
    if verbose and facts.get("topology"):
        yield "nvidia-smi topo -m"
        yield from str(facts["topology"]).rstrip().splitlines()


def table(outcomes: Sequence[Outcome], *, verbosity: int) -> Iterator[str]:
    """Yield a row per measurement: step times and rates at percentiles, change, verdict; at -v with rows per rank."""
    rows = [row(outcome) for outcome in outcomes if outcome.measurement is not None]
    if not rows:
        return
    heads = ["", "ranks", *(title for q in _PERCENTILES for title in titles(q)), "change", "verdict"]
    title, *lines = text.aligned([heads, *rows])
    yield title
    measured = (outcome for outcome in outcomes if outcome.measurement is not None)
    for outcome, line in zip(measured, lines, strict=True):
        yield line
        if verbosity > 0:
            yield from _details(outcome)
        elif outcome.plan.rpc:
            yield from (f"  {line}" for line in _ranks(outcome))
    yield from collective_table(outcomes)


def summary(outcomes: Sequence[Outcome], *runs: RunInfo, never_measured: Sequence[str] = ()) -> Iterator[str]:
    """Yield the remarks, then the counts, those of `runs` among them; the counts are the last line. `never_measured`
    are node ids."""
    for outcome in outcomes:
        yield from sentences.summary_lines(outcome)
    yield from unmeasured(never_measured)
    yield from advice(outcomes)
    yield last_line(count(outcomes, *runs))


def unmeasured(nodeids: Sequence[str]) -> Iterator[str]:
    """Yield a line for each test that passed and measured nothing."""
    yield from (f"{nodeid}: never measured: it does not call the fixture that it asks for" for nodeid in nodeids)


def expected_false_alarms(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Say how many false alarms a run of several tests has on average, by its noise and limits."""
    compared = [o.verdict for o in outcomes if o.verdict is not None and o.verdict.status.compared]
    if len(compared) > 1:
        expected = sum(comparison.alarm_rate for verdict in compared for comparison in verdict.comparisons)
        yield (
            f"expected false alarms in a run like this: {expected:.2g} "
            f"(at most {text.amount(TEST_LEVEL)} in each of {len(compared)} tests)"
        )


def titles(q: int) -> tuple[str, str]:
    """Return the titles of the two columns of a percentile."""
    return f"p{q} sec/iter", "ex/sec"


def row(outcome: Outcome, percentiles: Sequence[int] = _PERCENTILES) -> list[str]:
    """Return name, ranks, step time and rate at each percentile, change, verdict."""
    cells = [text.name(outcome), text.ranks(outcome.plan)]
    for q in percentiles:
        if outcome.measurement is None:
            cells += ["-", "-"]
        else:
            launches = outcome.measurement.samples.step_seconds
            cells += [text.seconds(stats.percentile(launches, q)), _rate(outcome, q)]
    return [*cells, change(outcome.verdict), sentences.verdict_of(outcome)]


def change(verdict: Verdict | None) -> str:
    """Return the change that decided."""
    if verdict is None:
        return "-"
    if verdict.reason in ("counter-rose", "counter-fell"):
        return ", ".join(text.counted(c) for c in verdict.counters if c.status is verdict.status)
    return text.change(verdict.worst) if verdict.worst else "-"


def _rate(outcome: Outcome, q: float, rank: int | None = None) -> str:
    """Return examples per second at a percentile of the step time, of the whole group or of a rank."""
    assert outcome.measurement is not None
    samples = outcome.measurement.samples
    durations = _durations(samples, rank)
    if samples.examples is not None:
        # From the examples really processed in each step; the slow end of time is the low end of the rate.
        processed = [
            [sum(step) for step in zip(*launch, strict=True)] if rank is None else launch[rank]
            for launch in samples.examples
        ]
        rates = [
            [examples / seconds if seconds else 0.0 for examples, seconds in zip(*launch, strict=True)]
            for launch in zip(processed, durations, strict=True)
        ]
        return text.rate(stats.geometric_mean([stats.quantile(launch, 100 - q) for launch in rates]))
    seconds = stats.percentile(durations, q)
    if outcome.batch_size is None or not seconds:
        return "-"
    return text.rate(outcome.batch_size * (outcome.plan.world_size if rank is None else 1) / seconds)


def _durations(samples: Samples, rank: int | None) -> LaunchSteps:
    """Return the step times of the whole group, or a rank's own."""
    return samples.step_seconds if rank is None else tuple(launch[rank] for launch in samples.rank_seconds)


def _details(outcome: Outcome) -> Iterator[str]:
    assert outcome.measurement is not None
    yield from (f"  {line}" for line in _ranks(outcome))
    if outcome.verdict is not None and outcome.verdict.comparisons:
        smallest = ", ".join(f"{c.limit.metric} {text.amount(text.resolution(c))}" for c in outcome.verdict.comparisons)
        yield f"  resolves {smallest}"
    counters = outcome.measurement.counters.items()
    known = {
        name: n for name, n in counters if n is not None and (n or name in COUNTERS)
    }  # of the finer ones few matter
    if known:
        yield f"  a step: {', '.join(f'{name} {count:,}' for name, count in known.items())}"
    if outcome.measurement.samples.clock_seconds is not None:
        yield f"  clocks of the nodes: within {text.seconds(max(outcome.measurement.samples.clock_seconds))}"
    if outcome.phases:
        costs = ", ".join(
            f"{field.name} {text.seconds(median(getattr(phases, field.name) for phases in outcome.phases))}"
            for field in fields(Phases)
        )
        total = sum(phases.total for phases in outcome.phases)
        yield f"  a launch (median of {len(outcome.phases)}): {costs}; all launches {text.seconds(total)}"


def _ranks(outcome: Outcome) -> Iterator[str]:
    """Each rank's own step durations, rates and CPU time. Of an RPC launch the trainers' and, as PyTorch's benchmark of
    it has them, a last line for all."""
    assert outcome.measurement is not None
    samples = outcome.measurement.samples
    rows = []
    shown: list[int | None] = [*range(len(samples.rank_seconds[0])), *([None] if outcome.plan.rpc else [])]
    for rank in shown:
        cells = [f"{text.process(outcome, rank)}:" if rank is not None else "All:"]
        durations = _durations(samples, rank)
        for q in _PERCENTILES:
            cells += [f"p{q}: {text.seconds(stats.percentile(durations, q))}", _rate(outcome, q, rank)]
        if samples.cpu_seconds is not None:
            used = [launch[rank] for launch in samples.cpu_seconds] if rank is not None else []
            cells.append(f"CPU p50: {text.seconds(stats.percentile(used, 50))}" if used else "")
        rows.append(cells)
    yield from text.aligned(rows)


_COLLECTIVE_TITLES = ("", "op", "size", "count", "type", "redop", "root", "time", "algbw", "busbw", "#wrong")
_COLLECTIVE_UNITS = ("", "", "(B)", "(elements)", "", "", "", "(us)", "(GB/s)", "(GB/s)", "")


def collective_table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yield a row per size, at p50; nothing if no collective was measured."""
    rows = [_collective_row(outcome) for outcome in outcomes if outcome.plan.collective and outcome.measurement]
    if rows:
        yield ""
        yield from text.aligned([_COLLECTIVE_TITLES, _COLLECTIVE_UNITS, *rows])


def _collective_row(outcome: Outcome) -> tuple[str, ...]:
    asked, measured = outcome.plan.collective, outcome.measurement
    assert asked is not None
    assert measured is not None
    seconds = stats.percentile(measured.samples.step_seconds, 50)
    return (
        f"{outcome.nodeid} on {outcome.plan.world_size} {outcome.plan.backend}",
        asked.op,
        str(asked.size),
        str(asked.count),
        asked.dtype,
        asked.redop,
        str(asked.root),
        f"{seconds * 1e6:.5g}",
        f"{asked.algbw(seconds):.3g}",
        f"{asked.busbw(seconds):.3g}",
        "0",  # a wrong result ends its launch
    )


_BASELINE_TITLES = ("", "sessions", "last", "commit", "resolves")


def baseline_table(environment: str, baselines: Iterable[Baseline]) -> Iterator[str]:
    """Yield the baselines of one environment, a row per test, with the figures of its last session."""
    rows = []
    for baseline in baselines:
        last = baseline.sessions[-1]
        resolves = (f"{name} {text.amount(text.resolved(name, time))}" for name, time in last.resolution.items())
        row = (last.created.partition("T")[0] or "unknown", text.commit(last.commit) or "-", ", ".join(resolves) or "-")
        rows.append((text.shortened(str(baseline.test)), str(len(baseline.sessions)), *row))
    yield environment
    yield from (f"  {line}" for line in text.aligned([_BASELINE_TITLES, *rows]))
