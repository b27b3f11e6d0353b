"""The page of a run: what it says, and that nothing in a report can harm it."""

from __future__ import annotations

import base64
import re
import warnings
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from importlib import util
from typing import Any

import pytest

from pytest_ddpperf.records import Limit, Outcome, RunInfo, Status, TestId, Verdict
from pytest_ddpperf.records.errors import MissingExtraError
from pytest_ddpperf.report import page, sentences
from pytest_ddpperf.report.page import drawing, figures
from tests import reports
from tests.reports import Drawn

pytest.importorskip("matplotlib", reason="pages are drawn by matplotlib")

HOSTILE = "</title><script>alert(1)</script>\"'&$x^2$\n\x1b[31mred\x07\u202e\ud800" + "x" * 10_000


class Read(HTMLParser):
    """A page as a browser takes it apart."""

    VOID = {"meta", "link", "br", "hr", "img", "input", "wbr"}
    APART = {"b", "caption", "dd", "dt", "h2", "h3", "li", "p", "strong", "td", "th", "text"}

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text: list[str] = []
        self.within: dict[str, list[str]] = {}  # text by tag
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)
            self.within.setdefault(tag, []).append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
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


def drawn(*outcomes: Outcome, reported: tuple[str, ...] = ()) -> Read:
    return Read(page.html(outcomes, [reports.RUN], messages=reported))


@pytest.fixture(scope="module")
def each_kind() -> Read:
    return drawn(*reports.of_each_kind())


@pytest.fixture(scope="module")
def slower() -> Outcome:
    (found,) = [each for each in reports.of_each_kind() if "test_slower" in each.nodeid]
    return found


# --- the page as such


def test_it_is_one_file_without_script_that_asks_for_nothing(each_kind: Read) -> None:
    tags = Counter(tag for tag, _ in each_kind.tags)
    assert not tags["script"]
    assert [link["href"] for link in each_kind.all("link")] == ["data:,"]  # so that no browser looks for an icon
    policies = [meta["content"] for meta in each_kind.all("meta") if meta.get("http-equiv")]
    assert policies == ["default-src 'none'; img-src data:; style-src 'unsafe-inline'"]
    references = [str(a[name]) for _, a in each_kind.tags for name in ("href", "src") if name in a]
    assert all(value.startswith(("#", "data:,", "data:image/svg+xml;base64,")) for value in references)
    assert not any(name.startswith("on") for _, attributes in each_kind.tags for name in attributes)
    assert not re.search(r"url\((?!#)|@import", "".join(each_kind.within["style"]))
    assert not each_kind.open


def test_ids_are_unique_and_all_that_is_referred_to_is_there(each_kind: Read) -> None:
    ids = Counter(str(attributes["id"]) for _, attributes in each_kind.tags if "id" in attributes)
    assert set(ids.values()) == {1}
    asked = {str(a["href"])[1:] for _, a in each_kind.tags if str(a.get("href", "")).startswith("#")}
    assert asked <= set(ids)
    assert len(asked) == 10


def test_the_same_run_is_the_same_page() -> None:
    outcomes = reports.of_each_kind()[:2]
    assert page.html(outcomes, [reports.RUN]) == page.html(outcomes, [reports.RUN])


def test_every_figure_is_described_and_has_its_numbers(each_kind: Read) -> None:
    figures = len(each_kind.all("figure"))
    assert figures == len(each_kind.all("img")) == 3 * 7 + 2 * 2  # nothing is known of a test that broke
    assert all(image["alt"] for image in each_kind.all("img"))
    assert all("Numbers" in text for text in each_kind.within["figure"])
    assert len([table for table in each_kind.within["figure"] if re.search(r"\d", table)]) == figures


def test_figures_have_axes_in_units(slower: Outcome) -> None:
    images = [base64.b64decode(str(image["src"]).partition(",")[2]).decode() for image in drawn(slower).all("img")]
    assert [image.count("<svg ") for image in images] == [1, 1, 1]
    shifts, distributions, launches = ([*re.findall(r">([^<>]+)</text>", image)] for image in images)
    assert {"p10", "p50", "p95"} <= {*shifts}
    assert any(label.endswith("%") for label in shifts)
    assert any(label.endswith(" ms") for label in distributions)
    assert any(label.endswith(" ms") for label in launches)


# --- what it says


def test_the_worst_is_first_and_what_needs_a_look_is_unfolded(each_kind: Read) -> None:
    heads = each_kind.within["h2"]
    order = ["slower", "parameter_server", "pull_request", "broken", "noisy", "new", "faster", "pull_request_same"]
    assert [head.rpartition("::test_")[2].strip() for head in heads][: len(order)] == order
    cards = [attributes for attributes in each_kind.all("details") if attributes.get("class") == "card"]
    assert ["open" in attributes for attributes in cards] == [True] * 6 + [False] * 4
    overview = [a["href"] for a in each_kind.all("a")]
    assert overview == [f"#m{number}" for number in range(1, 11)]


def test_a_measurement_has_the_sentence_the_limits_and_the_evidence_of_other_reports(slower: Outcome) -> None:
    read = drawn(slower)
    summary = next(text for text in read.within["summary"] if "REGRESSED" in text)
    assert " ".join(sentences.sentence(slower).split()) in " ".join(summary.replace("REGRESSED", "REGRESSED:").split())
    assert "slowest rank: 1, its CPU time" in read.words
    assert "5 launches now, 15 in the baseline's 3 sessions" in read.words
    assert "What differs in the environment torch 2.13.0 -> 2.13.1" in read.words
    assert f"Accept these figures: {slower.accept}" in read.words
    assert "tests/perf/test_step.py:42" in read.words
    assert "9a825c73dcb873626cd628f2e15fdef61a4a953b" in read.words


def test_the_change_at_each_percentile_is_told_with_its_bounds(slower: Outcome) -> None:
    read = drawn(slower)
    (table,) = [text for text in read.within["table"] if "Change against baseline" in text]
    words = table.split()
    assert [word for word in words if re.fullmatch(r"p\d+", word)] == ["p10", "p25", "p50", "p75", "p90", "p95"]
    gated = slower.verdict.comparisons[1]  # type: ignore[union-attr]
    assert f"{gated.change.estimate * 100:+.1f}" in words
    assert f"{gated.change.low * 100:+.1f}" in words


def test_launches_in_turns_are_told_pair_by_pair() -> None:
    turned = reports.in_turns("test_x", Drawn(seed=5, step=0.023), Drawn(seed=500))
    read = drawn(turned)
    (table,) = [text for text in read.within["table"] if "Interleaved launches" in text]
    assert table.count("origin/main") == 1 + turned.baseline_side.order[::2].count("b")  # type: ignore[union-attr]
    assert "now was slower in 5 of 5 pairs" in read.words
    assert "1 of 12 imported files differs: src/net.py" in read.words
    assert "origin/main (1a2b3c4d5e6f), now 9a825c73dcb8" in read.words


def test_trainers_have_their_names_and_what_they_waited_for(each_kind: Read) -> None:
    (table,) = [text for text in each_kind.within["table"] if "Trainers' own steps" in text]
    assert "trainer0" in table
    assert "blocked in RPC, p50" in table
    assert "rpc.bytes 4,096 5,120" in each_kind.words


def test_phases_counters_and_the_environment_are_tables(each_kind: Read) -> None:
    assert "Phases of a launch, median of 5" in each_kind.words
    for row in ("setup 0.310s", "all_reduce.bytes - 102,228,128", "OMP_NUM_THREADS 2 2"):
        assert row in each_kind.words


def test_what_steps_recorded_is_shown(slower: Outcome) -> None:
    read = drawn(replace(slower, recorded={"loss": (((1.0, 3.0), (2.0, None)),)}))
    assert "loss 1 2 3" in read.words


@pytest.mark.parametrize(
    ("outcomes", "reported"),
    [
        ((), "Nothing was compared or measured: this page says nothing"),
        ((reports.without_baseline("test_new", Drawn()),), "Nothing was compared: this page says nothing"),
    ],
    ids=["nothing measured", "nothing compared"],
)
def test_a_run_that_compared_nothing_says_so(outcomes: tuple[Outcome, ...], reported: str) -> None:
    assert reported in drawn(*outcomes).words


def test_what_ended_a_run_is_said_beside_its_measurements(slower: Outcome) -> None:
    read = Read(page.html([slower], [RunInfo()], problem="no test imported a file that differs"))
    assert "loud" in [attributes.get("class") for attributes in read.all("p")]
    assert "no test imported a file that differs" in read.words


def test_a_run_that_compared_something_does_not_say_so(each_kind: Read) -> None:
    assert "Nothing was compared" not in each_kind.words
    assert each_kind.within["h1"] == [
        "ddpperf: 7 of 10 compared: 2 passed, 1 improved, 3 regressed, 1 inconclusive; "
        "1 without baseline, 1 not gated, 1 failed to measure"
    ]


def test_several_runs_are_told_each(slower: Outcome) -> None:
    another = replace(reports.RUN, id="other", commit="fe1d", facts={})
    read = Read(page.html([slower], [reports.RUN, another], messages=("test_x: measured in several reports",)))
    assert "3f2b8c1d" in read.words
    assert "fe1d" in read.words
    assert "test_x: measured in several reports" in read.words


def test_of_an_older_report_what_it_does_not_have_is_left_out(slower: Outcome) -> None:
    older = replace(slower, sessions=(), evidence=(), accept="", file="", line=0)
    read = Read(page.html([older], [RunInfo()]))
    assert "Change against the baseline" in read.words
    (table,) = [text for text in read.within["table"] if "Change against" in text]
    assert re.findall(r"\bp\d+\b", table) == ["p10", "p50"]  # those of the verdict itself
    assert "Accept" not in read.words


def test_a_failed_measurement_says_why_and_has_no_figures() -> None:
    read = drawn(reports.failed("test_broken"))
    assert "not measured launch 2 of 5: rank 1 failed in setup: ValueError: bad shape" in read.words
    assert not read.all("img")


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
    version = replace(turned.baseline_side.version, ref=HOSTILE, option=(HOSTILE,))
    outcomes = [
        replace(slower, **named, verdict=replace(slower.verdict, differences=(HOSTILE,))),  # type: ignore[type-var]
        replace(turned, **named, baseline_side=replace(turned.baseline_side, version=version, differing=(HOSTILE,))),
        replace(reports.failed("test_x"), **{**named, "error": HOSTILE}),
    ]
    run = replace(reports.RUN, commit=HOSTILE, facts={"torch": HOSTILE, "places": HOSTILE, "against": HOSTILE})
    html = page.html(outcomes, [run], messages=[HOSTILE])
    html.encode()  # no surrogate is left
    read = Read(html)
    assert not read.open
    assert not read.all("script")
    assert set("\x1b\x07\u202e").isdisjoint(html)
    assert all(text.startswith("tests/test_a.py::test[</title><script>") for text in read.within["h2"])
    assert max(len(text.strip()) for text in read.within["h2"]) <= 200
    assert r"\x1b[31mred\x07\u202e\ud800" in read.words
    assert len(read.all("img")) == 6


# --- figures


def test_what_matplotlib_warns_of_ends_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with drawing.style():
            warnings.warn("deprecated", DeprecationWarning, stacklevel=1)
        with pytest.raises(DeprecationWarning):
            warnings.warn("deprecated", DeprecationWarning, stacklevel=1)


def test_percentiles_of_a_side_are_those_of_the_verdict(slower: Outcome) -> None:
    both = figures.sides_of(slower)
    assert both is not None
    assert both.base is not None
    (p10, p50) = slower.verdict.comparisons  # type: ignore[union-attr]
    for comparison, q in ((p10, 10), (p50, 50)):
        assert both.now.middle(q) == pytest.approx(comparison.now_seconds)
        assert both.base.middle(q) == pytest.approx(comparison.baseline_seconds)


def test_sides_are_drawn_by_as_many_steps_as_they_are_compared_by() -> None:
    longer, usual = Drawn(steps=90), Drawn(seed=9)
    turned = reports.in_turns("test_x", longer, usual, stretches=False)
    for outcome in (reports.against_baseline("test_x", longer, usual), turned):
        both = figures.sides_of(outcome)
        assert both is not None
        assert outcome.verdict is not None
        assert both.now.middle(50) == pytest.approx(outcome.verdict.comparisons[1].now_seconds)


@pytest.mark.parametrize("stored", [True, False], ids=["stored", "in turns"])
def test_a_shift_without_a_limit_is_what_the_judge_would_say_of_one(slower: Outcome, stored: bool) -> None:
    turned = reports.in_turns("test_x", Drawn(seed=5, step=0.023), Drawn(seed=500))
    outcome = slower if stored else turned
    verdict = outcome.verdict
    assert verdict is not None
    gated = {comparison.limit.metric: comparison for comparison in verdict.comparisons}
    # The same comparison without its limit, at the level that it had.
    kept = gated["p10"]
    without = replace(outcome, verdict=replace(verdict, comparisons=(replace(gated["p50"], level=kept.level),)))
    found = {shift.metric: shift for shift in figures.find_shifts(without)}
    assert found["p10"].limit is None
    for end in ("estimate", "low", "high"):
        assert getattr(found["p10"].change, end) == pytest.approx(getattr(kept.change, end))


def test_percentiles_that_too_few_steps_support_have_no_shift() -> None:
    few = Drawn(steps=10, launches=3)
    found = figures.find_shifts(reports.in_turns("test_x", few, replace(few, seed=9)))
    assert [shift.metric for shift in found] == ["p10", "p25", "p50", "p75", "p90"]  # p95 needs 59


def test_limits_in_milliseconds_on_bandwidth_and_on_cpu_time_are_drawn_as_shares(slower: Outcome) -> None:
    verdict = slower.verdict
    assert verdict is not None
    kept = verdict.comparisons[1]
    asked = [
        Limit(metric="busbw", value=0.1, unit="%"),
        Limit(metric="cpu_p50", value=0.2, unit="%"),
        Limit(metric="p95", value=0.002, unit="ms"),
    ]
    comparisons = tuple(replace(kept, limit=limit) for limit in asked)
    outcome = replace(slower, verdict=replace(verdict, comparisons=comparisons))
    found = {shift.metric: shift for shift in figures.find_shifts(outcome)}
    assert list(found) == ["p10", "p25", "p50", "p75", "p90", "p95", "busbw", "cpu_p50"]
    shares = [found[limit.metric].limit_share for limit in asked]
    assert shares == [-0.1, 0.2, pytest.approx(0.002 / kept.baseline_seconds)]
    assert found["busbw"].change.estimate == pytest.approx(1 / (1 + kept.change.estimate) - 1)
    assert "busbw:10%" in drawn(outcome).words


def test_one_launch_of_one_step_is_drawn() -> None:
    single = Drawn(launches=1, steps=1)
    measured = reports.measurement(single)
    verdict = Verdict(status=Status.NOT_GATED, reason="disabled")
    read = drawn(reports.outcome("test_x", single, verdict, measured))
    assert len(read.all("img")) == 2
    assert "--ddp-disable" in read.words


def test_a_version_that_could_not_be_measured_has_no_side() -> None:
    turned = reports.in_turns("test_x", Drawn(), Drawn(seed=9))
    assert turned.baseline_side is not None
    missing = Verdict(status=Status.NO_BASELINE, reason="no-baseline")
    read = drawn(
        replace(
            turned, verdict=missing, baseline_side=replace(turned.baseline_side, measurement=None, error="no such test")
        )
    )
    assert "origin/main (1a2b3c4d5e6f) was not measured: no such test" in read.words
    assert len(read.all("img")) == 2
    assert "Launches in the order they were taken, p50" in read.words


# --- what it needs


def test_what_is_not_installed_is_named_with_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(util, "find_spec", lambda name: None)
    monkeypatch.setattr("pytest_ddpperf.report.page.drawing.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError) as raised:
        page.html([], [])
    assert str(raised.value) == "a page needs matplotlib and Jinja2: pip install 'pytest-ddpperf[report]'"
    assert raised.value.missing == ("matplotlib", "Jinja2")
