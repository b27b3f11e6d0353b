"""The page of a history: what it draws and says, and that nothing in a history can harm it."""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from pytest_ddpperf.history import curves, judging, tracks
from pytest_ddpperf.history.curves import Curve
from pytest_ddpperf.history.entry import Entry
from pytest_ddpperf.history.judging import Judged
from pytest_ddpperf.records import Limit
from pytest_ddpperf.records.errors import MissingExtraError
from pytest_ddpperf.report import page, steps
from pytest_ddpperf.report.page import canvas
from pytest_ddpperf.report.page import history as module
from pytest_ddpperf.report.page.canvas import Canvas
from tests.unit.test_history import TEST, judged, kept, one, stepped
from tests.unit.test_page import HOSTILE, Read

Facts = Callable[[int], Mapping[str, Any]]


def sha(day: int) -> str:
    return hashlib.sha1(str(day).encode()).hexdigest()


def entries(logs: Sequence[float], name: str = "test_train", of: Facts = lambda day: {}, **facts: Any) -> list[Entry]:
    """A day a point, as `test_history.history` has them, of commits with names; `of` are further facts of a day."""
    test = replace(TEST, name=name)
    return [
        one(day, kept(0.01 * math.exp(log / 100), test, **of(day)), **{"commit": sha(day), **facts})
        for day, log in enumerate(logs)
    ]


def drawn(*several: Sequence[Entry], **kwargs: Any) -> Read:
    return Read(page.history_html(judged([each for some in several for each in some], **kwargs)))


def the_curve(judged_: Judged) -> Curve:
    return curves.curve(judged_, judged_.tracks[0], "p50")


def batch(day: int) -> Mapping[str, Any]:
    return {"must_match": {"batch_size": 32 if day < 30 else 64}}


SEVERAL = (
    entries(stepped((40, 9.0))),
    entries(stepped((40, -9.0)), "test_faster"),
    entries([*stepped(points=40), 15.0], "test_suspected"),
    entries(stepped(), "test_quiet"),
    entries(stepped(points=4), "test_short"),
    entries(stepped((45, 7.0)), "test_split", batch),
    entries(stepped((400, 5.0), points=500), "test_long"),
)


@pytest.fixture(scope="module")
def several() -> Read:
    return drawn(*SEVERAL)


# --- the page as such


def test_it_is_one_file_without_script_that_asks_for_nothing(several: Read) -> None:
    tags = Counter(tag for tag, _ in several.tags)
    assert not tags["script"]
    assert not tags["img"]
    references = [str(a[name]) for _, a in several.tags for name in ("href", "src") if name in a]
    assert all(value.startswith(("#", "data:,")) for value in references)
    assert not several.open
    ids = Counter(str(attributes["id"]) for _, attributes in several.tags if "id" in attributes)
    assert set(ids.values()) == {1}
    assert {value[1:] for value in references if value.startswith("#")} <= set(ids)


def test_every_figure_has_a_title_a_description_and_its_numbers(several: Read) -> None:
    number = len(SEVERAL)
    assert len(several.all("figure")) == len(several.all("svg")) == number
    assert several.within["title"][1:] == ["p50 of each run"] * number
    assert all(" runs of commits of 2026-01-01 to 202" in text for text in several.within["desc"])
    assert all("Numbers" in text and "2026-" in text for text in several.within["figure"])


def test_the_same_history_is_the_same_page() -> None:
    found = judged(SEVERAL[0])
    assert page.history_html(found) == page.history_html(found)


def test_colours_are_the_style_sheets(several: Read) -> None:
    styles = str({attributes.get("style") for tag, attributes in several.tags if tag in ("path", "use", "text")})
    assert {"var(--bad)", "var(--good)", "var(--open)", "var(--now)"} <= {*re.findall(r"var\(--\w+\)", styles)}
    assert not re.search("#[0-9a-f]{3,6}", styles)


def test_a_series_of_1000_points_takes_little_room() -> None:
    html = page.history_html(judged(entries(stepped((700, 5.0), points=1000))))
    empty = page.history_html(judged(entries(stepped(points=2))))
    assert len(html) - len(empty) < 30_000


# --- what it says


def test_the_worst_is_first_and_what_needs_a_look_is_unfolded(several: Read) -> None:
    names = [head.rpartition("::test_")[2].strip() for head in several.within["h2"]]
    assert names == ["train", "split", "long", "suspected", "faster", "quiet", "short"]
    cards = [attributes for attributes in several.all("details") if attributes.get("class") == "card"]
    assert ["open" in attributes for attributes in cards] == [True] * 4 + [False] * 3
    assert [a["href"] for a in several.all("a")] == ["#s1", "#s2", "#s3", "#s4", "#s5"]


def test_steps_are_told_as_the_command_tells_them() -> None:
    days = entries(stepped((40, 9.0)), of=lambda day: {"recorded": {"torch": "2.12" if day < 40 else "2.13"}})
    found = judged(days)
    read = Read(page.history_html(found))
    assert read.within["h1"] == ["ddpperf history: 1 regressed in 1 series of 60 runs at 60 commits (p50)"]
    (item,) = [text for text in read.within["li"] if "REGRESSED" in text and "points since" in text]
    assert " ".join(item.split()) == f"REGRESSED {steps.sentence(found.found[0])}there, too: torch 2.12 -> 2.13"
    assert f"{sha(40)[:12]} 2026-02-10" in read.words
    assert f"What changed in the environment first run with it of what {sha(40)[:12]} 2026-02-10 torch" in read.words


def test_a_step_has_its_shape_and_commit_in_the_figure(several: Read) -> None:
    labels = [label.strip() for label in several.within["text"]]
    assert f"\N{BLACK UP-POINTING TRIANGLE} {sha(40)[:7]}" in labels
    assert f"\N{BLACK DOWN-POINTING TRIANGLE} {sha(40)[:7]}" in labels
    assert f"{sha(40)[:7]} ?" in labels
    keys = {" ".join(text.split()) for text in several.within["li"]}
    assert {"step, REGRESSED", "step, IMPROVED", "suspected step"} <= keys


def test_an_accepted_step_says_why() -> None:
    (step,) = judged(SEVERAL[0]).found
    read = drawn(SEVERAL[0], told=[judging.acceptance(step, "NaN checks")])
    assert "accepted: NaN checks" in read.words
    assert "\N{CHECK MARK} " in " ".join(read.within["text"])


def test_a_series_goes_on_as_one_of_its_own_where_facts_that_must_match_changed() -> None:
    read = drawn(SEVERAL[5])
    assert len(read.all("svg")) == 1
    for told in (
        "series 1 of 2 batch_size 32: 30 runs series 2 of 2 batch_size 64: 30 runs",
        "a series of its own from here",
        "cpu-gloo-ws2, batch_size 64: 1 series of its own",
        f"{sha(30)[:12]} 2026-01-31 batch_size 64",
    ):
        assert told in read.words


def test_series_side_by_side_have_a_figure_each() -> None:
    read = drawn(entries(stepped(), of=lambda day: {"must_match": {"batch_size": 32 + 32 * (day % 2)}}))
    assert len(read.all("svg")) == 2
    assert "a series of its own batch_size 32: 30 runs" in read.words


def test_numbers_are_those_around_steps_and_the_last(several: Read) -> None:
    (table,) = [text for text in several.within["table"] if sha(499)[:12] in text]
    last = [f"2027-05-{day:02}" for day in range(6, 16)]
    assert re.findall("2027-[0-9-]{5}", table) == ["2027-02-04", "2027-02-05", *last]
    assert "REGRESSED" in table


def test_runs_share_a_bar_where_there_is_no_room_for_each_and_that_is_said(several: Read) -> None:
    (figure,) = [text for text in several.within["figure"] if "500 runs of commits" in text]
    assert "up to 6 runs share a bar" in figure
    assert "least to most of up to 6 runs, thick: the middle half" in figure
    others = [text for text in several.within["figure"] if "500 runs" not in text]
    assert not any("share a bar" in text for text in others)


def test_a_run_that_is_far_off_is_an_arrowhead_and_leaves_room_for_the_others() -> None:
    read = drawn(entries([*stepped(points=30), 300.0, *stepped(points=30)]))
    assert "beyond the figure" in read.words
    assert not any(label.startswith(("100 ", "200 ")) for label in read.within["text"])


def test_an_environment_that_changes_all_the_time_is_told_in_short() -> None:
    read = drawn(entries(stepped(), of=lambda day: {"recorded": {"host": f"node{day}"}}))
    assert "What changed in the environment: the last 30 of 59 times" in read.words
    assert "environment changed" in read.words


def test_series_too_short_to_tell_say_so_and_have_no_level(several: Read) -> None:
    read = drawn(SEVERAL[4])
    assert "loud" in [attributes.get("class") for attributes in read.all("p")]
    assert "No series has the 6 runs that it takes to tell a step: this page says nothing of whether" in read.words
    assert "too short 4 runs; the last: p50 9.86ms" in read.words
    assert "level" not in {" ".join(text.split()) for text in read.within["li"]}
    assert "No series has" not in several.words


def test_each_metric_has_a_figure() -> None:
    limits = [Limit(metric=metric, value=0.0, unit="%") for metric in ("p10", "p90")]
    assert drawn(SEVERAL[3], limits=limits).within["title"][1:] == ["p10 of each run", "p90 of each run"]


def test_what_is_not_drawn_of_a_large_history_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_FIGURES", 1)
    read = drawn(*SEVERAL[:4])
    assert len(read.all("svg")) == 1
    assert "3 further series, which are not drawn: the 1 worst figures are" in read.words
    assert "tests/perf/test_step::test_quiet cpu-gloo-ws2 60 9.83ms" in read.words
    assert [a["href"] for a in read.all("a")] == ["#s1"]
    assert len(read.within["nav"][0].split("REGRESSED")) == 2


def test_a_hostile_history_harms_nothing() -> None:
    def facts(day: int) -> Mapping[str, Any]:
        return {"recorded": {HOSTILE: day // 20}, "must_match": {HOSTILE: HOSTILE * (1 + day // 30)}}

    hostile = [
        replace(each, environment=HOSTILE, run=replace(each.run, commit=f"{HOSTILE[:60]}{each.run.commit}"))
        for each in entries(stepped((45, 9.0)), HOSTILE, facts)
    ]
    told = [judging.acceptance(step, HOSTILE) for step in judged(hostile).found]
    assert told
    html = page.history_html(judged(hostile, told=told))
    html.encode()  # no surrogate is left
    read = Read(html)
    assert not read.open
    assert not read.all("script")
    assert set("\x1b\x07\u202e").isdisjoint(html)
    assert len(html) < 60_000
    assert len(read.all("svg")) == 1
    assert not any("script" in label for label in read.within["text"])


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pytest_ddpperf.report.page.shell.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="a page needs matplotlib and Jinja2"):
        page.history_html(judged(SEVERAL[4]))


# --- curves


def test_a_run_is_drawn_at_the_mean_of_its_launches_with_its_error() -> None:
    curve = the_curve(judged(SEVERAL[3]))
    assert curve.seconds[7] == pytest.approx(0.01 * math.exp(stepped()[7] / 100), rel=1e-3)
    (low, high) = curve.bounds[7]
    assert low < curve.seconds[7] < high
    within = [low < 0.01 < high for low, high in curve.bounds]
    assert 54 <= sum(within) <= 60  # of noise of 1 %, 95 % of the intervals hold what it is noise about


def test_a_launch_that_is_off_makes_an_error_larger() -> None:
    logs = [0.0, 1.0] * 10
    noisy = entries(logs)
    launches = {"p50": (0.005, 0.01, 0.02)}
    noisy[8] = replace(noisy[8], measurements=(replace(noisy[8].measurements[0], launch_seconds=launches),))
    curve = the_curve(judged(noisy))
    widths = [high / low for low, high in curve.bounds]
    assert max(widths) == widths[8]


def test_levels_are_apart_where_a_step_is_and_only_there() -> None:
    curve = the_curve(judged(SEVERAL[0]))
    assert curve.breaks == (40,)
    assert curve.levels[40] / curve.levels[39] == pytest.approx(math.exp(0.09), rel=0.01)
    assert max(curve.levels[:40]) / min(curve.levels[:40]) < 1.01


def test_a_suspicion_does_not_break_the_level() -> None:
    curve = the_curve(judged(SEVERAL[2]))
    assert (curve.breaks, [found.place for found in curve.found]) == ((), [40])


def test_changes_are_those_from_run_to_run() -> None:
    newer = {"recorded": {"torch": "2.12", "driver": "560"}}
    (track,) = tracks.tracks(entries([0.0] * 6, of=lambda day: newer if day >= 3 else {}))
    assert curves.changes(track.marks) == {3: ("driver unset -> 560",)}


# --- marks on a canvas


def test_labels_of_marks_that_have_no_room_are_left_out_and_the_marks_stay() -> None:
    marks = [(50.0, "A", canvas.BAD, "0000001"), (52.0, "B", canvas.GOOD, "0000002"), (99.0, "C", canvas.OPEN, "3")]

    def draw(axes: Any) -> None:
        canvas.along(axes, [0], [""], ends=(0, 100))
        canvas.above(axes, marks)

    with canvas.style():
        svg = Canvas().svg(draw, key="f1", title="t", description="d")
    assert re.findall(r">([^<>]+)</text>", svg) == ["A 0000001", "B", "3 C"]
    assert svg.count("var(--bad)") == 1
