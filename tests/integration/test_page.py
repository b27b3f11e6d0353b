"""Pages of runs and histories in a browser, and where it comes from: a run of pytest, or the reports of others."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
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

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_BROWSER = next(filter(None, map(shutil.which, _NAMES)), None)
in_a_browser = pytest.mark.skipif(_BROWSER is None, reason=f"no browser: none of {', '.join(_NAMES)} is on PATH")

# A page in a frame as wide as a phone or a desk's screen; data-width is how wide it wants to be.
_FRAME = """<!doctype html><body><iframe src="page.html" style="width:{width}px;height:900px"></iframe><script>
addEventListener("load", () => {{
  const shown = document.querySelector("iframe").contentDocument;
  for (const each of shown.querySelectorAll("details")) each.open = true;
  document.body.dataset.width = shown.documentElement.scrollWidth;
}});
</script>"""


def browse(file: Path, profile: Path, at: str = "") -> tuple[str, list[str]]:
    """The document as the browser has it in the end, and what its console says."""
    assert _BROWSER is not None
    options = [
        "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run",
        "--allow-file-access-from-files", f"--user-data-dir={profile}", "--enable-logging=stderr",
        "--virtual-time-budget=5000", "--dump-dom",
    ]  # fmt: skip
    command = [_BROWSER, *options, file.as_uri() + at]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return result.stdout, re.findall(r"CONSOLE[^\]]*\] (.*)", result.stderr)


def of_a_run() -> str:
    """One measurement of each kind, and one with a name that is as long as it may be."""
    long = reports.against_baseline("test_x[" + "<b>wide" * 2000 + "]", reports.Drawn(), reports.Drawn(seed=9))
    return page.html(reports.report([*reports.of_each_kind(), long]))


def of_a_history() -> str:
    """Series of each kind, and one with such a name."""
    long = history(stepped((30, 5.0)), test=named("test_x[" + "<b>wide" * 2000 + "]"), environment="cpu-" + "wide" * 60)
    return history_html(judged([each for some in (*SEVERAL, long) for each in some]))


@pytest.fixture(scope="module", params=[of_a_run, of_a_history], ids=["run", "history"])
def shown(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("page") / "page.html"
    file.write_text(request.param(), encoding="utf-8")
    return file


@in_a_browser
def test_a_browser_has_nothing_to_complain_of_and_asks_for_nothing(shown: Path, tmp_path: Path) -> None:
    document, console = browse(shown, tmp_path)
    assert console == []  # where a request that the page's policy refuses would be told, see below
    assert document.count("<figure>") == document.count("data:image/svg+xml") >= 8


@in_a_browser
@pytest.mark.parametrize("shown", [of_a_run], indirect=True)
def test_a_link_to_a_folded_measurement_unfolds_it(shown: Path, tmp_path: Path) -> None:
    folded = '<details class="card">'
    document, _ = browse(shown, tmp_path)
    last = re.findall('href="(#[ms][0-9]+)"', document)[-1]
    linked, _ = browse(shown, tmp_path, at=last)
    assert linked.count(folded) == document.count(folded) - 1


@in_a_browser
def test_a_request_would_be_seen(shown: Path, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(shown.read_text().replace("<main>", '<main><img src="http://127.0.0.1:9/x.png">'))
    _, console = browse(file, tmp_path)
    assert ["127.0.0.1:9/x.png" in reported for reported in console] == [True]


@in_a_browser
@pytest.mark.parametrize("width", [390, 1280], ids=["phone", "desk"])
def test_it_fits_its_screen(shown: Path, tmp_path: Path, width: int) -> None:
    (tmp_path / "page.html").write_bytes(shown.read_bytes())
    file = tmp_path / "frame.html"
    file.write_text(_FRAME.format(width=width))
    document, _ = browse(file, tmp_path)
    assert int(re.findall('data-width="(.*?)"', document)[0]) <= width


def test_a_run_writes_its_page(pytester: pytest.Pytester, run: Run) -> None:
    pytester.makepyfile(MEASURES)
    result = run("--ddp-html=out/page.html", "--ddp-json=out/run.json")
    assert result.ret == 0
    html = (pytester.path / "out/page.html").read_text()
    assert "1 without baseline (0 of 1 compared)" in html
    assert "Nothing was compared: " in html
    status = main.main(["html", str(pytester.path / "out/run.json"), "-o", str(pytester.path / "again/page.html")])
    assert status == 0
    assert html.count("</figure>") == (pytester.path / "again/page.html").read_text().count("</figure>") == 2


def test_a_page_that_could_not_be_made_is_said_before_the_run(
    pytester: pytest.Pytester, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pytest_ddpperf.report.figures.find_spec", lambda name: None)
    pytester.makepyfile("def test_nothing(): pass")
    result = run("--ddp-html=page.html")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    reported = "--ddp-html needs matplotlib and Jinja2: pip install 'pytest-ddpperf[report]'"
    assert f"ERROR: {reported}" in result.stderr.str()


def test_reports_of_shards_become_one_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    same, slower, *_ = reports.of_each_kind()
    shards = {"a": [same], "b": [slower, replace(same, notes=("the later one",))]}
    for number, (name, outcomes) in enumerate(shards.items()):
        ended = replace(reports.RUN, id=name, created=f"2026-03-04T05:06:0{number}+00:00")
        (tmp_path / f"{name}.json").write_text(codec.dumps(json_report.report(outcomes, ended)))
    out = tmp_path / "page.html"
    assert main.main(["html", str(tmp_path / "a.json"), str(tmp_path / "b.json"), "-o", str(out)]) == 0
    html = out.read_text()
    assert "compared with baselines: 1 regressed, 1 passed (2 of 2 compared)" in html
    assert "the later one" in html
    assert "measured in several reports: that of 2026-03-04T05:06:01+00:00 counts" in html
    assert capsys.readouterr().out == ""
