"""Names, figures and tables as text, the same in every report."""

import math
import re
import shutil
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime, timezone

from pytest_ddpperf.records.metric import Metric
from pytest_ddpperf.records.outcome import Outcome
from pytest_ddpperf.records.plan import Collective, Limit, Plan
from pytest_ddpperf.records.samples import (
    Change,
    Comparison,
    CounterChange,
    Environment,
    Interval,
    LossChange,
    Verdict,
)
from pytest_ddpperf.records.step_phases import PHASES, Means

# of a time, as a share: bounds may be so wide that nothing is left of it
_LEAST = 1e-9
_MOST = 99.99  # of a change, as a share: a bound beyond it is shown as this
_UNITS = (
    (1.0, 1.0, "s"),
    (1e-3, 1e3, "ms"),
    (1e-6, 1e6, "us"),
    (0.0, 1e9, "ns"),
)
# longer than the names that people give, short enough for a line
_LONGEST_NAME = 160

# Columns, at most, of what a terminal shows.
WIDTH = 100


Lines = Iterator[str]  # of a report


def name(outcome: Outcome) -> str:
    """Return the name of a measurement on one line: node id and label."""
    return shortened(
        f"{outcome.nodeid} ({outcome.test.label})"
        if outcome.test.label
        else outcome.nodeid
    )


def names_within(outcomes: Sequence[Outcome], width: int) -> list[str]:
    """Return the names in at most `width` characters: if need be without folders, without files,
    without a middle."""
    whole = [name(each) for each in outcomes]
    in_files = [re.sub("^[^:]*/(?=[^/:]*::)", "", each) for each in whole]
    tests = [each.partition("::")[2] or each for each in whole]
    fitting = (
        names
        for names in (whole, in_files)
        if max(map(len, names), default=0) <= width
    )
    return [shortened(each, width) for each in next(fitting, tests)]


def shortened(text: str, most: int = _LONGEST_NAME) -> str:
    """Return the text on one line; if it is longer, without its middle: the end of a name matters
    most."""
    line = printable(text).replace("\n", "\\n")
    return (
        line
        if len(line) <= most
        else f"{line[: most // 3]}...{line[most // 3 + 3 - most :]}"
    )


def printable(text: str) -> str:
    """Return the text with control characters spelt out, also those that turn the direction of
    writing; lines stay."""
    return "".join(
        each
        if each.isprintable() or each == "\n"
        else each.encode("unicode_escape").decode()
        for each in text
    )


def wrapped(line: str, width: int = WIDTH, indent: str = "  ") -> list[str]:
    """Return a line as one or several of at most `width` characters; those after the first are
    indented. A longer word, as a path, stays whole, so that it can be copied."""
    # so that an amount stays on one line
    lines = textwrap.wrap(
        line.replace(" %", "\u00a0%"),
        width,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )
    return [each.replace("\u00a0", " ") for each in lines] or [""]


def wrap_text(lines: str, width: int) -> Lines:
    """Yield lines of at most `width` characters, but for those of a traceback."""
    for line in lines.split("\n"):
        is_code = line.startswith(("    ", '  File "'))
        yield from (
            wrapped(line, width)
            if len(line) > width and not is_code
            else [line]
        )


def terminal_width() -> int:
    """Return the columns of a line: those of the terminal, from 20 to 100."""
    return min(WIDTH, max(20, shutil.get_terminal_size((WIDTH, 0)).columns))


def wrap_for_terminal(lines: Iterable[str]) -> Lines:
    """Yield lines wrapped to the columns of the terminal. A file or a program gets them whole."""
    width = shutil.get_terminal_size((0, 0)).columns
    for line in lines:
        # a command can be copied
        is_whole = not width or "ddpperf bisect" in line
        yield from [line] if is_whole else wrapped(line, width, "    ")


def commit(recorded: str) -> str:
    """Return a recorded commit in seven digits: "1a2b3c4", "1a2b3c4 with uncommitted changes"."""
    digits, dirty, _ = recorded.partition("-dirty")
    return f"{digits[:7]} with uncommitted changes" if dirty else digits[:7]


def now() -> str:
    """Return the time as files have it: ISO 8601, UTC."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def date(recorded: str) -> str:
    """Return the day of a recorded time, which is in ISO 8601: "2026-03-04"."""
    return recorded.partition("T")[0]


def ranks(plan: Plan) -> str:
    """Return who runs: "2 gloo", "command", or the roles of RPC."""
    if plan.command:
        return "command"
    return plan.roles or f"{plan.world_size} {plan.backend}"


def process(plan: Plan, environment: Environment, rank: int) -> str:
    """Return the name of a process: "rank 3", or with several nodes "rank 3 (node 1, host-b)"."""
    name = plan.name(rank)
    if plan.nodes == 1:
        return name
    return f"{name} ({node(environment, plan.node_of(rank))})"


def node(environment: Environment, number: int) -> str:
    """Return the name of a node: "node 1, host-b"."""
    hosts = str(environment.recorded.get("hosts") or "").split(", ")
    host = hosts[number] if number < len(hosts) else ""
    return f"node {number}, {host}" if host else f"node {number}"


def some(items: Sequence[str], most: int = 5) -> str:
    """Return the first items of a list: "a, b, c, d, e, ..."."""
    return ", ".join(items[:most]) + (", ..." if len(items) > most else "")


def several(number: int, what: str) -> str:
    """Return the number with its noun: "1 run", "2 runs", "2 launches"."""
    if number != 1:
        what += "es" if what.endswith("ch") else "s"
    return f"{number} {what}"


def seconds(value: float, *, signed: bool = False) -> str:
    """Return a duration in seconds with its unit: "1.24 s", "12.4 ms", "341 us"; signed "+12.4
    ms"."""
    (figure,), unit = in_one_unit([value])
    return f"{'+' if signed and value >= 0 else ''}{figure} {unit}"


def in_one_unit(values: Sequence[float]) -> tuple[list[str], str]:
    """Return durations in seconds as figures in the unit of the largest, and that unit."""
    # so that 0.9996 ms are 1.00 ms, not 1000 us
    most = float(f"{max(map(abs, values)):.2e}")
    scale, unit = next(
        (scale, unit) for least, scale, unit in _UNITS if most >= least
    )
    return [_in_three_digits(value * scale) for value in values], unit


def number(value: float) -> str:
    """Return a number without a unit: "12,300", "0.0123"."""
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


def figure(kind: Metric, value: float) -> str:
    """Return a figure of a launch, which is a duration or one of the user's own."""
    return (
        number(kind.shown(value, None)) if kind.own_figure else seconds(value)
    )


def _in_three_digits(value: float) -> str:
    exponent = int(f"{value:.2e}".partition("e")[2]) if value else 2
    return f"{value:.{min(max(2 - exponent, 0), 5)}f}"


def share(value: float) -> str:
    """Return a relative change: "+12 %", "-1.3 %"; "2.36x" if it is more than double."""
    return (
        f"{_in_three_digits(1 + value)}x"
        if value >= 1
        else f"{_percent(value, _decimals(value))} %"
    )


def _decimals(value: float) -> int:
    return 1 if abs(value) < 0.0995 else 0


def _percent(value: float, decimals: int) -> str:
    """Return a share as a signed number, "+0.0" for what is rounded to nothing."""
    return f"{100 * round(value, decimals + 2) + 0.0:+.{decimals}f}"


def interval(change: Interval) -> str:
    """Return the change with its bounds: "-1.3 % [-5.0, +2.6]", "2.36x [2.08, 2.68]"."""
    # a bound is never shown as less than the estimate
    most = max(_MOST, 10 * change.estimate)
    bounds = change.low, min(change.high, most)
    if change.estimate >= 1:
        low, high = (_in_three_digits(1 + bound) for bound in bounds)
    else:
        decimals = _decimals(change.estimate)
        low, high = (_percent(bound, decimals) for bound in bounds)
    if change.high > most:
        high = f">{high.removeprefix('+')}"
    return f"{share(change.estimate)} [{low}, {high}]"


def amount(value: float) -> str:
    """Return a share without direction: "18 %", "1.4 %", "over 9999 %"."""
    if value > _MOST:
        return f"over {_MOST * 100:.0f} %"
    return f"{value * 100:.2g} %" if value < 0.995 else f"{value * 100:.0f} %"


def span(
    values: Sequence[float], written: Callable[[float], str] = amount
) -> str:
    """Return the range of some values, of shares by default: "4.1 % to 5.7 %", or "4.1 %"."""
    least, most = written(min(values)), written(max(values))
    return least if least == most else f"{least} to {most}"


def limit(limit: Limit) -> str:
    """Return the amount of a limit: "10 %", "2 ms"."""
    return f"{limit.value * (100 if limit.unit == '%' else 1000):.10g} {limit.unit}"


def changed(comparison: Comparison) -> Interval:
    """Return the change of the metric."""
    return changed_as(comparison.limit.kind, comparison.change)


def changed_as(kind: Metric, change: Interval) -> Interval:
    """Return the change of a metric by that of its figures; the change of a bandwidth is that of
    time upside down."""
    if not kind.lower_is_worse:
        return change
    # Its bounds at the ends of time's, the longest of which is the least bandwidth.
    times = (
        max(1 + time, _LEAST)
        for time in (change.estimate, change.high, change.low)
    )
    estimate, low, high = (1 / time - 1 for time in times)
    return Interval(estimate=estimate, low=low, high=high)


def counter_change(changed: CounterChange) -> str:
    """Return the change of a counter, which is exact."""
    return (
        f"from 0 to {changed.now:,}"
        if not changed.baseline and changed.now
        else share(changed.change)
    )


def loss_change(change: LossChange) -> str:
    """Return "2.31 -> 2.58", with as many digits as the difference takes."""
    known = [mean for mean in (change.before, change.now) if mean is not None]
    share = (max(known) - min(known)) / (max(map(abs, known)) or 1) or 1
    digits = max(3, 2 - math.floor(math.log10(share)))
    return " -> ".join(
        "nan" if mean is None else f"{mean:.{digits}g}"
        for mean in (change.before, change.now)
    )


def resolution(comparison: Comparison) -> float:
    """Return the smallest detectable change of the metric for the worse, as a share."""
    return resolved(comparison.limit.kind, comparison.resolution)


def resolutions(comparisons: Iterable[Comparison]) -> str:
    """Return "4.1 % (p10), 5.7 % (p50)": the smallest detectable change of each metric."""
    return ", ".join(
        f"{amount(resolution(each))} ({each.limit.metric})"
        for each in comparisons
    )


def drifts(verdicts: Iterable[Verdict]) -> list[float]:
    """Return the drift between sessions that comparisons reckoned with, if they did."""
    return [
        c.drift
        for each in verdicts
        for c in each.comparisons
        if c.drift is not None
    ]


def limit_share(comparison: Comparison) -> float:
    """Return the limit as a share."""
    limit = comparison.limit
    return (
        limit.value
        if limit.unit == "%"
        else limit.value / comparison.baseline_seconds
    )


def resolved(kind: Metric, time: float) -> float:
    """Return a share of time as a share of the metric."""
    return 1 - 1 / (1 + time) if kind.lower_is_worse else time


def both_sides(
    compared: Change, collective: Collective | None
) -> tuple[str, str]:
    """Return the figures of the baseline and of now, the second with the unit of both."""
    if isinstance(compared, CounterChange):
        return f"{compared.baseline:,}", f"{compared.now:,}"
    sides = [compared.baseline_seconds, compared.now_seconds]
    kind = compared.limit.kind
    if kind.unit != "s":
        before, now = (number(kind.shown(each, collective)) for each in sides)
        return before, f"{now} {kind.unit}".rstrip()
    (before, now), unit = in_one_unit(sides)
    return before, f"{now} {unit}"


def aligned(rows: Sequence[Sequence[str]], left: Sequence[int] = ()) -> Lines:
    """Yield a line per row. The first column, the last one and those in `left` go to the left,
    others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    to_left = {0, len(widths) - 1, *left}
    for row in rows:
        yield "  ".join(
            cell.ljust(width) if at in to_left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()


def phase(name: str) -> str:
    """Return "exposed communication" for "exposed_communication"."""
    return name.replace("_", " ")


def phases(means: Means) -> str:
    """Return "forward 4.02 ms, backward 9.11 ms": the phases of a step and their seconds."""
    return ", ".join(
        f"{phase(name)} {seconds(taken)}"
        for name in PHASES
        if (taken := means[name])
    )


# Lines of each stream of a rank, in the report of a red test: the end of it, and the cause above
# stays in sight.
MOST_LINES = 25
MOST_LINES_OF_FAILURE = 50  # of a launch that failed
_LONGEST_LINE = 1_000


def last_lines(texts: Iterable[str], most: int) -> str:
    """Return the last lines of what the last launch wrote, of those that wrote anything; the first
    one says so."""
    launches = [text for text in texts if text]
    lines = launches[-1].splitlines()
    if len(launches) > 1 or len(lines) > most:
        lines = [
            f"(of the last launch, at most {most} lines: -v shows more)",
            *lines[-most:],
        ]
    return "\n".join(
        line if len(line) <= _LONGEST_LINE else shortened(line, _LONGEST_LINE)
        for line in lines
    )
