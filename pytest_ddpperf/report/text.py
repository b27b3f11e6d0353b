"""How figures are written, the same in every report."""

from __future__ import annotations

from pytest_ddpperf.records import Comparison, CounterChange, Interval


def seconds(value: float) -> str:
    """Three significant digits or more, never "0.000s": "0.243s", "0.00341s", "12.4s", "734.2us" is 0.000734s."""
    decimals = 3
    while decimals < 9 and 0 < abs(value) < 10.0 ** (2 - decimals):
        decimals += 1
    return f"{value:.{decimals}f}s"


def rate(value: float) -> str:
    """Examples per second."""
    return f"{value:,.0f}/s" if value >= 100 else f"{value:.3g}/s"


def share(value: float) -> str:
    """A relative change: "+12.3 %"; factors where percentages stop being read."""
    return f"{value * 100:+.1f} %" if value < 9 else f"x {value + 1:.3g}"


def amount(value: float) -> str:
    """A share without direction: "18 %", "1.4 %"."""
    return f"{value * 100:.2g} %" if value < 0.995 else f"{value * 100:.0f} %"


def interval(change: Interval) -> str:
    """The change with its bounds."""
    return f"{share(change.estimate)} [{share(change.low)}, {share(change.high)}]"


def change(comparison: Comparison) -> str:
    """The change of one metric, as a table has it."""
    return f"{comparison.limit.metric} {interval(comparison.change)}"


def counted(changed: CounterChange) -> str:
    """The change of a counter, as a table has it; counts are exact."""
    how = "was 0" if not changed.baseline and changed.now else share(changed.change)
    return f"{changed.limit.metric} {how}"
