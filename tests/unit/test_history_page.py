"""The page of a history: its cards and figures, and that no content of a history can harm it."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_ddpperf.history.entries import HistoryEntry
from pytest_ddpperf.report.history_report import history_html, history_lines
from tests.unit.test_history import TEST, history, judged, stepped
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
