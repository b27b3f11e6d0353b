"""How names and figures are written, the same in every report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from pytest_ddpperf.records import Comparison, CounterChange, Interval, Outcome, Plan
from pytest_ddpperf.records.asked import BANDWIDTH, Collective

_LEAST = 1e-9  # of what a time was: bounds may be so wide that nothing is left of it
_BELOW_SECONDS = ((1e-3, 1e3, "ms"), (1e-6, 1e6, "us"), (0.0, 1e9, "ns"))


# Of a name: longer than those that people give, short enough for a line of a table.
_LONGEST_NAME = 160


def name(outcome: Outcome) -> str:
    """Return the name of a measurement on one line, shortened and printable."""
    return shortened(f"{outcome.nodeid} ({outcome.test.label})" if outcome.test.label else outcome.nodeid)


def shortened(text: str, most: int = _LONGEST_NAME) -> str:
    """Return the text on one line; if it is longer, without its middle: the end of a name matters most."""
    line = printable(text).replace("\n", "\\n")
    return line if len(line) <= most else f"{line[: most // 3]}...{line[most // 3 + 3 - most :]}"


def printable(text: str) -> str:
    """Return the text with control characters spelt out, also those that turn the direction of writing; lines stay."""
    return "".join(
        each if each.isprintable() or each == "\n" else each.encode("unicode_escape").decode() for each in text
    )


def commit(recorded: str) -> str:
    """Return a recorded commit in twelve digits: "1a2b3c4d5e6f", "1a2b3c4d5e6f-dirty"."""
    digits, dirty, _ = recorded.partition("-dirty")
    return digits[:12] + dirty


def ranks(plan: Plan) -> str:
    """Return who runs: "2 gloo", or the roles of RPC."""
    return plan.roles or f"{plan.world_size} {plan.backend}"


def process(outcome: Outcome, rank: int) -> str:
    """Return the name of a process: "rank 3", or with several nodes "rank 3 (node 1, host-b)"."""
    plan, name = outcome.plan, outcome.plan.name(rank)
    if plan.nodes == 1 or outcome.measurement is None:
        return name
    hosts = str(outcome.measurement.environment.recorded.get("hosts") or "").split(", ")
    node = plan.node_of(rank)
    return f"{name} (node {node}, {hosts[node]})" if node < len(hosts) and hosts[node] else f"{name} (node {node})"


def some(items: Sequence[str], most: int = 5) -> str:
    """Return the first items of a list: "a, b, c, d, e, ..."."""
    return ", ".join(items[:most]) + (", ..." if len(items) > most else "")


def several(number: int, what: str) -> str:
    """Return the number with its noun: "1 run", "2 runs"."""
    return f"{number} {what}{'s' * (number != 1)}"


def seconds(value: float) -> str:
    """Return a duration of `value` seconds: "12.4s", "0.243s", "3.41ms", "341us"."""
    # From 0.01 on in seconds: step times are read in columns, as PyTorch's DDP benchmark has them.
    return _in_units(value, least_seconds=0.01)


def more(value: float) -> str:
    """Return a difference of durations in seconds: "+20.1ms", "-341us"."""
    return f"{'' if value < 0 else '+'}{_in_units(value, least_seconds=1.0)}"


def _in_units(value: float, *, least_seconds: float) -> str:
    """Return three significant digits, and all of those before the point."""
    if not value:
        return "0s"
    rounded = float(f"{value:.2e}")  # so that 9.996 ms are 0.0100s, not 10.00ms
    units = ((least_seconds, 1.0, "s"), *_BELOW_SECONDS)
    scale, unit = next((scale, unit) for least, scale, unit in units if abs(rounded) >= least)
    exponent = int(f"{value * scale:.2e}".partition("e")[2])
    return f"{value * scale:.{max(2 - exponent, 0)}f}{unit}"


def rate(value: float) -> str:
    """Return examples per second."""
    return f"{value:,.0f}/s" if value >= 100 else f"{value:.3g}/s"


def share(value: float) -> str:
    """Return a relative change: "+12.3 %", or a factor if it is large."""
    return f"{value * 100:+.1f} %" if value < 9 else f"x {value + 1:.3g}"


def amount(value: float) -> str:
    """Return a share without direction: "18 %", "1.4 %"."""
    return f"{value * 100:.2g} %" if value < 0.995 else f"{value * 100:.0f} %"


def span(values: Sequence[float], written: Callable[[float], str] = amount) -> str:
    """Return the range of some values, of shares by default: "4.1 % to 5.7 %", or "4.1 %"."""
    least, most = written(min(values)), written(max(values))
    return least if least == most else f"{least} to {most}"


def interval(change: Interval) -> str:
    """Return the change with its bounds."""
    return f"{share(change.estimate)} [{share(change.low)}, {share(change.high)}]"


def change(comparison: Comparison) -> str:
    """Return the metric and its change with bounds."""
    return f"{comparison.limit.metric} {interval(changed(comparison))}"


def changed(comparison: Comparison) -> Interval:
    """Return the change of the metric; the change of a bandwidth is that of time upside down."""
    change = comparison.change
    if not comparison.limit.is_bandwidth:
        return change
    # Its bounds at the ends of time's, the longest of which is the least bandwidth.
    times = (max(1 + time, _LEAST) for time in (change.estimate, change.high, change.low))
    estimate, low, high = (1 / time - 1 for time in times)
    return Interval(estimate=estimate, low=low, high=high)


def resolution(comparison: Comparison) -> float:
    """Return the smallest detectable change of the metric for the worse, as a share."""
    return resolved(comparison.limit.metric, comparison.resolution)


def limit_share(comparison: Comparison) -> float:
    """Return the limit as a share."""
    limit = comparison.limit
    return limit.value if limit.unit == "%" else limit.value / comparison.baseline_seconds


def resolved(metric: str, time: float) -> float:
    """Return a share of time as a share of the metric."""
    return 1 - 1 / (1 + time) if metric == BANDWIDTH else time


def figure(comparison: Comparison, seconds_: float, collective: Collective | None) -> str:
    """Return the value of the metric for a step of so many seconds."""
    if comparison.limit.is_bandwidth and collective is not None:
        return f"{collective.busbw(seconds_):.3g} GB/s"
    return seconds(seconds_)


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield a line per row: the first column and the last to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        middle = (cell.rjust(width) for cell, width in zip(row[1:-1], widths[1:-1], strict=True))
        yield "  ".join([row[0].ljust(widths[0]), *middle, row[-1]]).rstrip()


def counted(changed: CounterChange) -> str:
    """Return the counter and its change; counts are exact."""
    how = "was 0" if not changed.baseline and changed.now else share(changed.change)
    return f"{changed.limit.metric} {how}"
