"""The page of a run: what it says, and that nothing in a report can harm it."""

from __future__ import annotations

import base64
import re
import warnings
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from pytest_ddpperf import text
from pytest_ddpperf.records.errors import MissingExtraError
from pytest_ddpperf.records.outcome import DIVERGED, FAILED, Outcome
from pytest_ddpperf.records.samples import Status, TestId
from pytest_ddpperf.records.step_phases import PHASES
from pytest_ddpperf.report import figures, page, sentences
from pytest_ddpperf.report.json_report import StoredReport
from tests import reports
from tests.reports import Drawn

pytest.importorskip("matplotlib", reason="pages are drawn by matplotlib")

HOSTILE = (
    "</title><script>alert(1)</script>\"'&$x^2$\n\x1b[31mred\x07\u202e\ud800"
    + "x" * 10_000
)


class Read(HTMLParser):
    """A page as a browser takes it apart."""

    VOID = {"meta", "link", "br", "hr", "img", "input", "wbr"}
    APART = {
        "b",
        "caption",
        "dd",
        "dt",
        "h2",
        "h3",
        "li",
        "p",
        "strong",
        "td",
        "th",
        "text",
    }

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text: list[str] = []
        self.within: dict[str, list[str]] = {}  # text by tag
        self.feed(html)
        self.close()

    def handle_starttag(
        self, tag: str, attrs: list[tuple[str, str | None]]
    ) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)
            self.within.setdefault(tag, []).append("")

    def handle_startendtag(
        self, tag: str, attrs: list[tuple[str, str | None]]
    ) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag in self.APART:
            self.handle_data(" ")
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        for tag in {*self.open}:
            self.within[tag][-1] += data
        if "style" not in self.open:
            self.text.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    @property
    def words(self) -> str:
        return " ".join("".join(self.text).split())


def drawn(*outcomes: Outcome) -> Read:
    return Read(page.html(reports.report(outcomes)))


@pytest.fixture(scope="module")
def each_kind() -> Read:
    return drawn(*reports.of_each_kind())


@pytest.fixture(scope="module")
def slower() -> Outcome:
    (found,) = [
        each for each in reports.of_each_kind() if "test_slower" in each.nodeid
    ]
    return found


# --- the page as such


def test_it_is_one_file_without_script_that_asks_for_nothing(
    each_kind: Read,
) -> None:
    tags = Counter(tag for tag, _ in each_kind.tags)
    assert not tags["script"]
    # so that no browser looks for an icon
    assert [link["href"] for link in each_kind.all("link")] == ["data:,"]
    policies = [
        meta["content"]
        for meta in each_kind.all("meta")
        if meta.get("http-equiv")
    ]
    assert policies == [
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    ]
    references = [
        str(a[name])
        for _, a in each_kind.tags
        for name in ("href", "src")
        if name in a
    ]
    assert all(
        value.startswith(("#", "data:,", "data:image/svg+xml;base64,"))
        for value in references
    )
    assert not any(
        name.startswith("on")
        for _, attributes in each_kind.tags
        for name in attributes
    )
    assert not re.search(
        r"url\((?!#)|@import", "".join(each_kind.within["style"])
    )
    assert not each_kind.open


# --- what it says


def test_the_worst_is_first_and_what_needs_a_look_is_unfolded(
    each_kind: Read,
) -> None:
    heads = each_kind.within["h2"]
    order = [
        "slower",
        "parameter_server",
        "pull_request",
        "broken",
        "noisy",
        "new",
        "faster",
        "pull_request_same",
    ]
    assert [head.rpartition("::test_")[2].strip() for head in heads][
        : len(order)
    ] == order
    cards = [
        attributes
        for attributes in each_kind.all("details")
        if attributes.get("class") == "card"
    ]
    assert ["open" in attributes for attributes in cards] == [True] * 6 + [
        False
    ] * 4
    assert "Counters of a step" in each_kind.words
    overview = [a["href"] for a in each_kind.all("a")]
    assert overview == [f"#m{number}" for number in range(1, 11)]


def test_a_measurement_has_the_sentence_the_limits_and_the_evidence_of_other_reports(
    slower: Outcome,
) -> None:
    read = drawn(slower)
    summary = next(
        text for text in read.within["summary"] if "REGRESSED" in text
    )
    assert " ".join(sentences.headline(slower).split()) in " ".join(
        summary.split()
    )
    assert "rank 1: CPU time" in read.words
    assert "5 launches now, 15 in the baseline's 3 sessions" in read.words
    assert (
        "What differs in the environment torch 2.13.0 -> 2.13.1" in read.words
    )
    assert f"Accept these figures: {slower.accept}" in read.words
    assert "tests/perf/test_step.py:42" in read.words
    assert "9a825c73dcb873626cd628f2e15fdef61a4a953b" in read.words


def test_ids_are_unique_and_every_link_has_its_target(each_kind: Read) -> None:
    ids = Counter(
        str(attributes["id"])
        for _, attributes in each_kind.tags
        if "id" in attributes
    )
    assert set(ids.values()) == {1}
    links = {
        str(a["href"])[1:]
        for _, a in each_kind.tags
        if str(a.get("href", "")).startswith("#")
    }
    assert links == set(ids) == {f"m{number}" for number in range(1, 11)}


def test_the_tables_of_each_kind_of_measurement(each_kind: Read) -> None:
    for row in (
        "all_reduce.bytes - 102,228,128",
        "rpc.bytes 4,096 5,120",
        "changed: src/net.py",
        "interleaved launches of each side; origin/main (1a2b3c4) and 9a825c7",
        "failed not measured: launch 2 of 5: rank 1 failed in setup: ValueError: bad shape",
    ):
        assert row in each_kind.words
    (trainers,) = [
        text
        for text in each_kind.within["table"]
        if "Trainers' own steps" in text
    ]
    assert "trainer0" in trainers


def test_tables_have_the_percentiles_of_both_sides(slower: Outcome) -> None:
    read = drawn(slower)
    (times,) = [
        text
        for text in read.within["table"]
        if text.split()[:2] == ["Step", "times"]
    ]
    _, p50 = slower.verdict.comparisons  # type: ignore[union-attr]
    assert all(
        text.seconds(seconds) in times
        for seconds in (p50.now_seconds, p50.baseline_seconds)
    )


@pytest.mark.parametrize(
    ("report", "words"),
    [
        (
            reports.report([]),
            "Nothing was compared or measured: this page says nothing",
        ),
        (
            reports.report([reports.without_baseline("test_new", Drawn())]),
            "Nothing was compared: this page says nothing",
        ),
        (
            reports.report(
                [],
                replace(reports.RUN, problem="no file differs"),
                messages=["measured twice"],
            ),
            "no file differs measured twice",
        ),
        (
            reports.report(
                [], reports.RUN, replace(reports.RUN, commit="fe1d", facts={})
            ),
            (
                "ended 2026-03-04T05:06:07+00:00 commit fe1d committed 2026-03-04T04:00:00+00:00"
                " pytest-ddpperf 0.1"
            ),
        ),
    ],
    ids=["nothing measured", "nothing compared", "problem", "two runs"],
)
def test_what_is_said_of_whole_runs(report: StoredReport, words: str) -> None:
    assert words in Read(page.html(report)).words


# --- figures


def axes_of(read: Read) -> list[list[str]]:
    """Return the words on each figure."""
    images = [
        base64.b64decode(str(image["src"]).partition(",")[2]).decode()
        for image in read.all("img")
    ]
    return [re.findall(r">([^<>]+)</text>", image) for image in images]


def test_a_measurement_has_at_most_three_figures_which_are_described(
    each_kind: Read, slower: Outcome
) -> None:
    # none of the test that broke
    assert (
        len(each_kind.all("figure"))
        == len(each_kind.all("img"))
        == 3 * 7 + 2 * 2
    )
    assert all(image["alt"] for image in each_kind.all("img"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # those of matplotlib are silenced
        changes, times, launches = axes_of(drawn(slower))
    assert {"p10", "p50", "limit"} <= {*changes}
    assert any(label.endswith("%") for label in changes)
    assert {"now", "baseline"} <= {*times}
    for words in (times, launches):
        assert any(label.endswith(" ms") for label in words)


TURNED = reports.in_turns("test_x", Drawn(seed=5, step=0.023), Drawn(seed=500))
ALONE = replace(TURNED.baseline_side, measurement=None, error="no such test")  # type: ignore[type-var]


# --- what users name


def test_a_hostile_name_harms_nothing(slower: Outcome) -> None:
    turned = reports.in_turns("test_x", Drawn(seed=5), Drawn(seed=500))
    assert turned.baseline_side is not None
    named: dict[str, Any] = {
        "nodeid": f"tests/test_a.py::test[{HOSTILE}]",
        "test": TestId(module="tests/test_a", name=HOSTILE, label=HOSTILE),
        "file": HOSTILE,
        "notes": (HOSTILE,),
        "evidence": (HOSTILE,),
        "accept": HOSTILE,
        "baseline_path": HOSTILE,
        "recorded": {HOSTILE: (((1.0,),),)},
    }
    version = replace(
        turned.baseline_side.version, ref=HOSTILE, option=(HOSTILE,)
    )
    outcomes = [
        replace(
            slower, **named, verdict=replace(slower.verdict, details=(HOSTILE,))
        ),  # type: ignore[type-var]
        replace(
            turned,
            **named,
            baseline_side=replace(
                turned.baseline_side, version=version, differing=(HOSTILE,)
            ),
        ),
        replace(reports.failed("test_x"), **{**named, "error": HOSTILE}),
    ]
    run = replace(
        reports.RUN,
        commit=HOSTILE,
        facts={"torch": HOSTILE, "places": HOSTILE, "against": HOSTILE},
    )
    html = page.html(reports.report(outcomes, run, messages=[HOSTILE]))
    html.encode()  # every character has a form in UTF-8
    read = Read(html)
    assert not read.open
    assert not read.all("script")
    assert set("\x1b\x07\u202e").isdisjoint(html)
    assert all(
        text.startswith("tests/test_a.py::test[</title><script>")
        for text in read.within["h2"]
    )
    assert max(len(text.strip()) for text in read.within["h2"]) <= 200
    assert r"\x1b[31mred\x07\u202e\ud800" in read.words
    assert len(read.all("img")) == 6


# --- what it needs


def test_what_is_not_installed_is_named_with_the_extra_that_brings_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(figures, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError) as raised:
        page.html(reports.report([]))
    assert (
        str(raised.value)
        == "a page needs matplotlib and Jinja2: pip install 'pytest-ddpperf[report]'"
    )


def test_the_caption_of_phases_has_words_and_figures_alone() -> None:
    means = {**dict.fromkeys(PHASES), "forward": 0.004, "backward": 0.009}
    now = figures.Side(name="now", sessions=(), phases=means)
    with figures.style():
        drawn = figures.draw_phases(now, None)
    assert drawn["description"] == "now: forward 4.00 ms, backward 9.00 ms"


def test_what_fails_has_the_colour_of_failures() -> None:
    style = Path(page.__file__).with_name("templates") / "style.css"
    (rule,) = [
        line
        for line in style.read_text().splitlines()
        if line.startswith(".regressed") and "color: var(--bad)" in line
    ]
    for status in (Status.REGRESSED.value, FAILED, DIVERGED):
        assert f".{status.lower()}" in rule
