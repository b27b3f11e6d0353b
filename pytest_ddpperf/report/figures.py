"""Draw the three figures of a measurement with matplotlib: its changes, its step times and its
launches."""

from __future__ import annotations

import base64
import io
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_ddpperf import text
from pytest_ddpperf.records import quantiles
from pytest_ddpperf.records.errors import MissingExtraError
from pytest_ddpperf.records.outcome import Outcome
from pytest_ddpperf.records.samples import Comparison
from pytest_ddpperf.records.step_phases import PHASES, Means
from pytest_ddpperf.verdict.observed import (
    PERCENTILES,
    launch_figures,
    of_one_length,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

# As in the style sheet where its ground is white: figures are drawn on white, also in a dark page.
INK, FAINT = "#1c2126", "#d3d9df"
CURRENT, BASELINE, LIMIT = "#0a5cc2", "#9a5b00", "#b3261e"
BAD, GOOD = "#b3261e", "#136f3a"
# Marks differ in shape and in colour: the current side is a filled circle, the baseline side a
# hollow square.
_CURRENT: Mapping[str, Any] = {
    "color": CURRENT,
    "marker": "o",
    "linestyle": "none",
}
_BASELINE: Mapping[str, Any] = {
    "color": BASELINE,
    "marker": "s",
    "linestyle": "none",
    "markerfacecolor": "white",
}
# as wide as a phone, so that its letters can be read there
_INCHES = (5.0, 2.8)
# with a date, no two pages would be the same
_METADATA = dict.fromkeys(("Date", "Creator", "Format", "Type"))
# Bounds may be so wide that nothing else could be seen: the axis ends at so many times the largest
# change or limit.
_MOST = 3.0


def check(what: str) -> None:
    """Raise MissingExtraError, about `what` was asked for, if a page cannot be made here."""
    needed = {"matplotlib": "matplotlib", "jinja2": "Jinja2"}
    missing = [
        name for module, name in needed.items() if find_spec(module) is None
    ]
    if missing:
        raise MissingExtraError(
            f"{what} needs {' and '.join(missing)}: pip install 'pytest-ddpperf[report]'"
        )


@contextmanager
def style() -> Iterator[None]:
    """Use matplotlib's own settings, not the user's, and silence its warnings: under -W error they
    would end a run whose tests are over."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import matplotlib

        ours: Any = {
            "svg.fonttype": "none",
            "svg.hashsalt": "ddpperf",
            "font.size": 11,
            "text.parse_math": False,
        }
        with matplotlib.rc_context():
            matplotlib.rcdefaults()
            matplotlib.rcParams.update(ours)
            yield


def figure(
    title: str, description: str, draw: Callable[[Axes], None]
) -> dict[str, str]:
    """Return what a template needs of the figure that `draw` puts on new axes. Used within
    `style`."""
    from matplotlib.figure import Figure

    drawing = Figure(figsize=_INCHES, layout="constrained")
    axes = drawing.subplots()
    axes.grid(axis="y", color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    draw(axes)
    drawing.legend(
        loc="outside upper left", ncols=3, fontsize="small", frameon=False
    )
    file = io.BytesIO()
    drawing.savefig(file, format="svg", metadata=_METADATA)
    image = f"data:image/svg+xml;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"title": title, "description": description, "image": image}


def show_seconds(axis: Axis) -> None:
    """Label an axis in s, ms or us."""
    from matplotlib.ticker import EngFormatter

    axis.set_major_formatter(EngFormatter(unit="s"))


class Side(NamedTuple):
    """One side of a comparison: the sessions of a stored baseline, or one session."""

    name: str
    # by metric, the seconds of each launch
    sessions: tuple[Mapping[str, Sequence[float]], ...]
    phases: Means  # of the last session; {} if they are unknown

    def at(self, metric: str) -> list[float]:
        """Return the metric of each launch, in seconds."""
        return [
            seconds for session in self.sessions for seconds in session[metric]
        ]

    def middle(self, metric: str) -> float:
        """Return the mean over launches, then over sessions, as the verdict computes it."""
        return quantiles.geometric_mean(
            [
                quantiles.geometric_mean(session[metric])
                for session in self.sessions
            ]
        )


def sides_of(outcome: Outcome) -> tuple[Side, Side | None]:
    """Return the current side, and the baseline side if there is one: the first steps of each
    launch, as many as the side with the fewest has."""
    own, other = outcome.measured.samples, outcome.other_side
    base = None
    if outcome.baseline_side and other:
        own, before = of_one_length([own, other.samples])
        base = Side(
            text.shortened(str(outcome.baseline_side.version), 60),
            (launch_figures(before.step_seconds),),
            other.mean_phases,
        )
    elif outcome.baseline_side is None and outcome.sessions:
        own = own.first(min(session.steps for session in outcome.sessions))
        base = Side(
            "baseline",
            tuple(session.launch_seconds for session in outcome.sessions),
            outcome.sessions[-1].phases,
        )
    return (
        Side(
            "now",
            (launch_figures(own.step_seconds),),
            outcome.measured.mean_phases,
        ),
        base,
    )


def draw_changes(
    comparisons: Sequence[Comparison], name: str
) -> dict[str, str]:
    """Draw the change of each limited metric with its bounds and its limit."""
    changes = [text.changed(comparison) for comparison in comparisons]
    limits = []
    for comparison in comparisons:
        share = text.limit_share(comparison)
        is_less = comparison.limit.kind.lower_is_worse
        limits.append(-share if is_less else share)
    places = range(len(changes))

    def draw(axes: Axes) -> None:
        from matplotlib.ticker import PercentFormatter

        bounds = [
            [c.estimate - c.low for c in changes],
            [c.high - c.estimate for c in changes],
        ]
        estimates = [change.estimate for change in changes]
        axes.errorbar(
            places,
            estimates,
            yerr=bounds,
            elinewidth=2.5,
            label="change and its bounds",
            **_CURRENT,
        )
        starts = [at - 0.35 for at in places]
        ends = [at + 0.35 for at in places]
        axes.hlines(
            limits, starts, ends, LIMIT, linestyles="dashed", label="limit"
        )
        axes.axhline(0, color=INK, linewidth=0.8)
        axes.set_xticks(
            places, [comparison.limit.metric for comparison in comparisons]
        )
        low, high = axes.get_ylim()
        most = _MOST * max(map(abs, (*estimates, *limits)))
        if most:
            axes.set_ylim(max(low, -most), min(high, most))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))

    described = [
        f"{each.limit.metric} {text.interval(text.changed(each))}, limit {each.limit}"
        for each in comparisons
    ]
    return figure(f"Change against {name}", "; ".join(described), draw)


def draw_distributions(now: Side, base: Side | None) -> dict[str, str]:
    """Draw the step times of both sides: each percentile over launches, and from the fastest launch
    to the slowest."""

    def draw_side(axes: Axes, side: Side, colour: str, line: str) -> None:
        launches = [side.at(f"p{q}") for q in PERCENTILES]
        least, most = [*map(min, launches)], [*map(max, launches)]
        axes.fill_betweenx(
            PERCENTILES, least, most, color=colour, alpha=0.15, linewidth=0
        )
        axes.plot(
            [side.middle(f"p{q}") for q in PERCENTILES],
            PERCENTILES,
            color=colour,
            linewidth=2,
            linestyle=line,
            label=_label(side),
        )

    def draw(axes: Axes) -> None:
        if base:
            draw_side(axes, base, BASELINE, "--")
        draw_side(axes, now, CURRENT, "-")
        axes.set_yticks((10, 25, 50, 75, 90), "p10 p25 p50 p75 p90".split())
        axes.locator_params(axis="x", nbins=5)
        show_seconds(axes.xaxis)

    described = [
        f"{each.name}: p50 {text.seconds(each.middle('p50'))}, p95"
        f" {text.seconds(each.middle('p95'))}"
        for each in (now, base)
        if each
    ]
    return figure(
        "Step times",
        f"{'; '.join(described)}; bands: fastest to slowest launch",
        draw,
    )


# In the order of PHASES: with each its neighbours differ in lightness, too.
_PHASE_COLOURS = "#f2c14e #0a5cc2 #7fb2e5 #b3261e #136f3a #c3cad1".split()


def draw_phases(now: Side, base: Side | None) -> dict[str, str]:
    """Draw the phases of a typical step as a bar for each side."""
    sides = [side for side in (now, base) if side and side.phases]

    def draw(axes: Axes) -> None:
        lefts = [0.0] * len(sides)
        for name, colour in zip(PHASES, _PHASE_COLOURS, strict=True):
            widths = [side.phases[name] or 0.0 for side in sides]
            axes.barh(
                range(len(sides)),
                widths,
                left=lefts,
                color=colour,
                height=0.6,
                label=text.phase(name),
            )
            lefts = [
                left + width for left, width in zip(lefts, widths, strict=True)
            ]
        axes.set_yticks(
            range(len(sides)), [_label(side)[:20] for side in sides]
        )
        axes.locator_params(axis="x", nbins=5)
        show_seconds(axes.xaxis)

    return figure(
        "Phases of a step",
        "; ".join(f"{side.name}: {text.phases(side.phases)}" for side in sides),
        draw,
    )


def _label(side: Side) -> str:
    # An underscore would keep a name out of the legend.
    return text.printable(side.name).lstrip("_") or "baseline"


def draw_launches(
    now: Side, base: Side | None, metric: str, *, title: str, interleaved: bool
) -> dict[str, str]:
    """Draw a metric of each launch, which the title names: interleaved ones in pairs, else those of
    the baseline's sessions first."""
    after = now.at(metric)
    before = base.at(metric) if base else []
    start = 1 if interleaved else 1 + len(before)

    def draw(axes: Axes) -> None:
        if base:
            places = range(1, 1 + len(before))
            axes.plot(places, before, label=_label(base), **_BASELINE)
        if interleaved:
            axes.vlines(
                range(1, 1 + len(after)), before, after, FAINT, linewidth=2
            )
        elif base:
            end = 0.5
            for session in base.sessions:
                end += len(session[metric])
                axes.axvline(end, color=FAINT, linewidth=1, linestyle="dotted")
        axes.plot(
            range(start, start + len(after)), after, label="now", **_CURRENT
        )
        axes.locator_params(axis="x", integer=True)
        show_seconds(axes.yaxis)

    described = [
        f"{side.name}: {text.span(side.at(metric), text.seconds)}"
        for side in (now, base)
        if side
    ]
    order = "Launches in the order they were taken"
    if interleaved:
        order = "Interleaved launches"
        slower = sum(a > b for b, a in zip(before, after, strict=True))
        described.insert(0, f"now was slower in {slower} of {len(after)} pairs")
    return figure(f"{order}, {title}", "; ".join(described), draw)
