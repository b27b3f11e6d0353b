"""Pages of runs and histories in a browser, and where it comes from: a run of pytest, or the
reports of others."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from pytest_ddpperf.cli import main
from pytest_ddpperf.records import codec
from pytest_ddpperf.report import json_report, page
from pytest_ddpperf.report.history_report import history_html
from tests import reports
from tests.integration.conftest import STEP, Run
from tests.unit.test_history import history, judged, stepped
from tests.unit.test_history_page import SEVERAL, named

MEASURES = (
    STEP
    + """
def test_step(ddp_benchmark):
    ddp_benchmark(lasting, batch_size=8)
"""
)

# Here, so that runs in this process do not import it a second time.
for name in ("matplotlib.figure", "matplotlib.backends.backend_svg"):
    pytest.importorskip(name, reason="pages are drawn by matplotlib")


def of_a_run() -> str:
    """One measurement of each kind, and one with a name that is as long as it may be."""
    long = reports.against_baseline(
        "test_x[" + "<b>wide" * 2000 + "]",
        reports.Drawn(),
        reports.Drawn(seed=9),
    )
    return page.html(reports.report([*reports.of_each_kind(), long]))


def of_a_history() -> str:
    """Series of each kind, and one with such a name."""
    long = history(
        stepped((30, 5.0)),
        test=named("test_x[" + "<b>wide" * 2000 + "]"),
        environment="cpu-" + "wide" * 60,
    )
    return history_html(
        judged([each for some in (*SEVERAL, long) for each in some])
    )


class LongTexts(HTMLParser):
    """Collects where a page has texts that are too long for a window: the elements around each, as
    their names and classes, and those of its style sheet."""

    # which have no end
    _EMPTY = frozenset("br col hr img input link meta wbr".split())

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[list[set[str]]] = []
        self._around: list[tuple[str, set[str]]] = []
        self.feed(page)
        self.close()

    def handle_starttag(
        self, tag: str, attrs: list[tuple[str, str | None]]
    ) -> None:
        if tag not in self._EMPTY:
            classes = (dict(attrs).get("class") or "").split()
            self._around.append((tag, {tag, *(f".{each}" for each in classes)}))

    def handle_endtag(self, tag: str) -> None:
        while self._around and self._around.pop()[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        if max(map(len, data.split()), default=0) > 100:
            self.found.append([names for _, names in self._around])


def selects(selector: str, around: list[set[str]]) -> bool:
    """Whether a selector of a style sheet ("summary span") is for one of these elements."""
    names = iter(selector.split())
    wanted = next(names)
    for element in around:
        if wanted in element:
            wanted = next(names, "")
        if not wanted:
            return True
    return False


@pytest.mark.parametrize(
    "drawn", [of_a_run, of_a_history], ids=["run", "history"]
)
def test_a_name_that_is_as_long_as_it_may_be_makes_no_page_wider_than_the_window(
    drawn: Callable[[], str],
) -> None:
    """It is broken wherever the style lets a text be."""
    text = drawn()
    style = text.partition("<style>")[2].partition("</style>")[0]
    rules = re.findall(r"([^{}]+)\{[^{}]*overflow-wrap: anywhere", style)
    breaking = [each.strip() for rule in rules for each in rule.split(",")]
    found = [
        around
        for around in LongTexts(text).found
        if not {"style", "script", "title"} & around[-1]
    ]
    assert found
    for around in found:
        assert any(selects(each, around) for each in breaking), around


def test_a_run_writes_its_page(pytester: pytest.Pytester, run: Run) -> None:
    pytester.makepyfile(MEASURES)
    result = run("--ddp-html=out/page.html", "--ddp-json=out/run.json")
    assert result.ret == 0
    html = (pytester.path / "out/page.html").read_text()
    assert "1 without baseline (0 of 1 compared)" in html
    assert "Nothing was compared: " in html
    status = main.main(
        [
            "html",
            str(pytester.path / "out/run.json"),
            "-o",
            str(pytester.path / "again/page.html"),
        ]
    )
    assert status == 0
    assert (
        html.count("</figure>")
        == (pytester.path / "again/page.html").read_text().count("</figure>")
        == 3
    )


def test_a_page_that_could_not_be_made_is_said_before_the_run(
    pytester: pytest.Pytester, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "pytest_ddpperf.report.figures.find_spec", lambda name: None
    )
    pytester.makepyfile("def test_nothing(): pass")
    result = run("--ddp-html=page.html")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    reported = "--ddp-html needs matplotlib and Jinja2: pip install 'pytest-ddpperf[report]'"
    assert f"ERROR: {reported}" in result.stderr.str()


def test_reports_of_shards_become_one_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    same, slower, *_ = reports.of_each_kind()
    shards = {
        "a": [same],
        "b": [slower, replace(same, notes=("the later one",))],
    }
    for number, (name, outcomes) in enumerate(shards.items()):
        ended = replace(
            reports.RUN, id=name, created=f"2026-03-04T05:06:0{number}+00:00"
        )
        (tmp_path / f"{name}.json").write_text(
            codec.dumps(json_report.report(outcomes, ended))
        )
    out = tmp_path / "page.html"
    assert (
        main.main(
            [
                "html",
                str(tmp_path / "a.json"),
                str(tmp_path / "b.json"),
                "-o",
                str(out),
            ]
        )
        == 0
    )
    html = out.read_text()
    assert (
        "compared with baselines: 1 regressed, 1 passed (2 of 2 compared)"
        in html
    )
    assert "the later one" in html
    assert (
        "measured in several reports: that of 2026-03-04T05:06:01+00:00 counts"
        in html
    )
    assert capsys.readouterr().out == ""
