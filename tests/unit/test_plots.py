"""The suite's figures show what was measured."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pytest_ddpperf.suite.tables import (
    ALONE,
    NOT_OVERLAPPED,
    OVERLAPPED,
    Breakdown,
    Plot,
    Scaling,
    Spread,
    boxes,
    lines,
    save,
    spread_of,
    stacks,
)


def drawn(plot: Plot) -> Axes:
    axes = Figure().add_subplot()
    plot.draw(axes)
    return axes


def result(ranks: int, *launches: list[float]) -> Any:
    return SimpleNamespace(
        world_size=ranks,
        backend="gloo",
        step_seconds=launches,
        p50=launches[0][1],
    )


def legend(axes: Axes) -> list[str]:
    return axes.get_legend_handles_labels()[1]


def test_a_line_a_variant_with_its_spread_as_bars_or_as_a_band() -> None:
    few = {1.0: Spread(1.0, 0.5, 2.0), 2.0: Spread(3.0, 2.0, 3.5)}
    axes = drawn(lines("L", "ranks", "s", {"a": few}))
    (container,) = axes.containers
    assert [
        list(segment[:, 1]) for segment in container[2][0].get_segments()
    ] == [
        [0.5, 2.0],
        [2.0, 3.5],
    ]
    assert (
        axes.get_xscale(),
        [label.get_text() for label in axes.get_xticklabels()],
    ) == ("log", ["1", "2"])
    assert legend(axes) == ["a"]

    many = {float(place): Spread(1.0, 0.5, 2.0) for place in range(11)}
    axes = drawn(lines("L", "iterations", "loss", {"a": many, "b": many}))
    assert len(axes.collections) == 2
    assert legend(axes) == ["a", "b"]


def test_a_part_that_only_some_have_is_drawn_of_those() -> None:
    parts = {
        "overlapped": {"backward": 2.0},
        "not": {"backward": 1.0, "communication": 5.0},
    }
    wholes = {"overlapped": Spread(2.0, 2.0, 2.0), "not": Spread(6.0, 6.0, 6.0)}
    axes = drawn(stacks("S", parts, wholes))
    heights = [patch.get_height() for patch in axes.patches]  # type: ignore[attr-defined]
    assert heights == [2, 1, 0, 5]


def test_figures_are_files_named_as_they_are(tmp_path: Path) -> None:
    plot = boxes("Bucket size, GPT mini, 2 ranks", "MB", {"1": [1.0]})
    (path,) = save([plot], tmp_path / "made" / "here")
    assert (
        path == tmp_path / "made" / "here" / "bucket-size-gpt-mini-2-ranks.png"
    )
    assert path.read_bytes().startswith(b"\x89PNG")


def test_efficiency_over_ranks_is_compared_with_the_fewest() -> None:
    table = Scaling()
    table.add("GPT", result(2, [4.0, 4.0]))
    table.add("GPT", result(1, [2.0, 2.0]))
    _, one, two = table.lines()
    assert (one.split()[-1], two.split()[-1]) == ("100%", "50%")
    assert spread_of(result(1, [1.0, 2.0], [6.0, 6.0]), 2) == pytest.approx(
        (1.0, 0.75, 3.0)
    )


def test_a_breakdown_shows_what_communication_adds_to_the_backward_pass() -> (
    None
):
    table = Breakdown()
    for variant, backward in (
        (ALONE, 1.0),
        (OVERLAPPED, 1.5),
        (NOT_OVERLAPPED, 2.4),
    ):
        seconds = {"forward": 0.5, "backward": backward, "optimizer": 0.1}
        # launch x rank x step: one rank recorded only the first step
        recorded = {
            phase: [[[each, each], [each, None]]]
            for phase, each in seconds.items()
        }
        measured: Any = SimpleNamespace(
            backend="gloo", world_size=2, recorded=recorded
        )
        table.add("gpt", variant, measured)
    _, titles, *rows, overlap = table.lines()
    assert titles.split() == [
        *("forward", "backward", "communication", "optimizer", "total")
    ]
    assert [row.split()[-5:] for row in rows] == [
        ["0.500000s", "1.000000s", "0.000000s", "0.100000s", "1.600000s"],
        ["0.500000s", "1.000000s", "0.500000s", "0.100000s", "2.100000s"],
        ["0.500000s", "1.000000s", "1.400000s", "0.100000s", "3.000000s"],
    ]
    assert overlap.startswith("  overlap saves 30% of a step")
    (plot,) = table.plots()
    parts = ["forward", "backward", "communication", "optimizer"]
    assert legend(drawn(plot))[:4] == parts
