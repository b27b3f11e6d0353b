"""The page of a history: its cards and figures, and that no content of a history can harm it."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_ddpperf.history.entries import HistoryEntry, HistoryFigure
from pytest_ddpperf.records.plan import Limit
from pytest_ddpperf.report.history_report import history_html, history_lines
from tests.unit.test_history import TEST, history, judged, kept, one, stepped
from tests.unit.test_page import Read

pytest.importorskip("matplotlib", reason="pages are drawn by matplotlib")


def named(name: str) -> Any:
    return type(TEST)(module=TEST.module, name=name)


SEVERAL = (
    history(stepped((40, 9.0))),
    history(stepped((40, -9.0)), test=named("test_faster")),
    history(stepped(), test=named("test_quiet")),
    history(stepped(points=4), test=named("test_short")),
    history(stepped((400, 20.0), points=500), test=named("test_long")),
)


def drawn(*several: list[HistoryEntry], **kwargs: Any) -> Read:
    return Read(
        history_html(
            judged([each for some in several for each in some], **kwargs)
        )
    )


@pytest.fixture(scope="module")
def several() -> Read:
    return drawn(*SEVERAL)


def test_the_worst_is_first_and_unfolded(several: Read) -> None:
    names = [
        head.rpartition("::test_")[2].strip() for head in several.within["h2"]
    ]
    assert names == ["long", "train", "faster", "quiet", "short"]
    cards = [
        attributes
        for attributes in several.all("details")
        if attributes.get("class") == "card"
    ]
    assert ["open" in attributes for attributes in cards] == [True] * 2 + [
        False
    ] * 3


def test_a_series_without_a_change_point_has_its_smallest_detectable_change(
    several: Read,
) -> None:
    assert several.words.count("p50: no change point; a change under ") == 1
    assert " % could not be seen" in several.words


def test_of_series_without_a_change_point_fifty_are_listed() -> None:
    many = [
        each
        for number in range(52)
        for each in history(stepped(points=8), test=named(f"test_{number}"))
    ]
    lines = list(history_lines(judged(many)))
    assert sum("could not be seen" in line for line in lines) == 50
    assert "and 2 more without a change point: -k NAME shows them" in lines


def test_a_history_that_is_too_short_says_so() -> None:
    assert (
        "Nothing was judged: no series has 6 runs with p50."
        in drawn(SEVERAL[3]).words
    )


def test_the_smallest_change_of_a_rate_is_that_of_the_runs_which_have_it() -> (
    None
):
    """A change of a rate is not that of its reciprocal."""
    rates = [(90.0, 140.0), (80.0, 130.0)] * 6
    entries = [
        one(
            day,
            kept(
                figures={"tps": HistoryFigure(better="higher", launches=rate)}
            ),
        )
        for day, rate in enumerate(rates)
    ]
    entries.append(one(len(entries), kept()))
    limits = (Limit(metric="tps", value=0.0, unit="%"),)
    (line,) = [
        line.partition("  ")[2].partition("  ")[2]
        for line in history_lines(judged(entries, limits=limits))
        if "tps: no change point" in line
    ]
    assert line in drawn(entries, limits=limits).words
