"""The page of a history: its cards and figures, and that no content of a history can harm it."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from pytest_ddpperf.history.entries import HistoryEntry
from pytest_ddpperf.history.series import make_acceptance
from pytest_ddpperf.records import Limit
from pytest_ddpperf.report import history_report as module
from pytest_ddpperf.report.history_report import change_lines, history_html
from tests.unit.test_history import TEST, history, judged, stepped
from tests.unit.test_page import HOSTILE, Read

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
    return Read(history_html(judged([each for some in several for each in some], **kwargs)))


@pytest.fixture(scope="module")
def several() -> Read:
    return drawn(*SEVERAL)


def test_every_series_has_a_figure_of_each_metric(several: Read) -> None:
    assert len(several.all("figure")) == len(several.all("img")) == len(SEVERAL)
    limits = [Limit(metric=metric, value=0.0, unit="%") for metric in ("p10", "p90")]
    titles = [title.strip() for title in drawn(SEVERAL[2], limits=limits).within["strong"]]
    assert titles == ["p10 of each run", "p90 of each run"]


def test_the_worst_is_first_and_unfolded(several: Read) -> None:
    names = [head.rpartition("::test_")[2].strip() for head in several.within["h2"]]
    assert names == ["long", "train", "faster", "quiet", "short"]
    cards = [attributes for attributes in several.all("details") if attributes.get("class") == "card"]
    assert ["open" in attributes for attributes in cards] == [True] * 2 + [False] * 3


def test_change_points_are_described_as_in_the_terminal() -> None:
    analysis = judged(SEVERAL[0])
    accepted = [make_acceptance(analysis.changes[0], "NaN checks")]
    read = Read(history_html(analysis))
    assert read.within["h1"] == ["ddpperf history: 1 regressed in 1 series of 60 runs at 60 commits (p50)"]
    assert f"REGRESSED: {'; '.join(change_lines(analysis.changes[0]))}" in read.words
    assert "accepted: NaN checks" in drawn(SEVERAL[0], accepted=accepted).words


def test_a_history_that_is_too_short_or_too_large_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Nothing was judged: no series has 6 runs." in drawn(SEVERAL[3]).words
    monkeypatch.setattr(module, "_MAX_FIGURES", 1)
    read = drawn(*SEVERAL[:3])
    assert len(read.all("img")) == 1
    assert "2 further series are not shown." in read.words


def test_a_hostile_history_harms_nothing() -> None:
    entries = history(
        stepped((45, 9.0)),
        test=named(HOSTILE),
        environment=HOSTILE,
        must_match={HOSTILE: HOSTILE},
        recorded={HOSTILE: HOSTILE},
    )
    accepted = [make_acceptance(change, HOSTILE) for change in judged(entries).changes]
    html = history_html(judged(entries, accepted=accepted))
    html.encode()  # every character has a form in UTF-8
    read = Read(html)
    assert accepted
    assert not read.open
    assert not read.all("script")
    assert set("\x1b\x07\u202e").isdisjoint(html)
    assert len(html) < 60_000
    images = [base64.b64decode(str(image["src"]).partition(",")[2]) for image in read.all("img")]
    assert images
    assert not any(b"script" in image for image in images)
