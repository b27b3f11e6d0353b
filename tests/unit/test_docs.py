"""The pages hold together: links lead somewhere in the repository, and the site has every page and
public name."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from urllib.parse import unquote

import pytest

import pytest_ddpperf
from pytest_ddpperf.cli.main import main
from pytest_ddpperf.history.entries import read_entries
from pytest_ddpperf.history.series import ChangeStatus, analyze, build_series
from pytest_ddpperf.records.outcome import Outcome
from pytest_ddpperf.records.plan import Limit
from pytest_ddpperf.records.reason import Reason
from pytest_ddpperf.report import json_report
from pytest_ddpperf.report.summary import last_line

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *DOCS,
    ROOT / "baselines" / "README.md",
    ROOT / "benchmarks" / "README.md",
]

_HEADING = re.compile(r"^#{1,6} +(.+?)\s*$", re.MULTILINE)
_LINK = re.compile(r"\]\(([^()\s]+)\)")
_FENCE = re.compile(r"^(`{3,}).*?^\1`*$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]+`")


def links(text: str) -> list[str]:
    """Targets of links and pictures that lead to no other site; what stands in code is none."""
    found = _LINK.findall(_CODE.sub("", _FENCE.sub("", text)))
    return [target for target in found if not re.match(r"[a-z]+:", target)]


def anchors(text: str) -> set[str]:
    """Of headings, as GitHub names them."""
    found: set[str] = set()
    for heading in _HEADING.findall(_FENCE.sub("", text)):
        slug = base = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        number = 0
        while slug in found:
            number += 1
            slug = f"{base}-{number}"
        found.add(slug)
    return found


def broken(page: Path) -> list[str]:
    """Links of a page that lead nowhere."""
    wrong = []
    for target in links(page.read_text(encoding="utf-8")):
        name, _, anchor = unquote(target).partition("#")
        path = page.parent / name if name else page
        if not path.exists() or (
            anchor and anchor not in anchors(path.read_text(encoding="utf-8"))
        ):
            wrong.append(target)
    return wrong


@pytest.mark.parametrize(
    "page", PAGES, ids=lambda page: str(page.relative_to(ROOT))
)
def test_links_lead_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_every_field_of_a_measurement_in_the_json_is_documented_and_no_other() -> (
    None
):
    table = (
        (ROOT / "docs" / "json.md")
        .read_text()
        .partition("| `nodeid` |")[2]
        .partition("\n\n")[0]
    )
    names = re.findall(r"^\| (.+?) \|", table, re.MULTILINE)
    rows = ["nodeid", *re.findall(r"`(\w+)`", " ".join(names))]
    assert sorted(rows) == sorted(
        [
            *(field.name for field in fields(Outcome)),
            "percentile_seconds",
            "busy_share",
            "mean_seconds",
        ]
    )


def test_links_that_lead_nowhere_are_seen(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text(
        "# A `b` c's, d\n```\n# no heading\n```\n# Twice\n## Twice\n"
    )
    page = tmp_path / "page.md"
    page.write_text(
        "[a](other.md#a-b-cs-d) ![b](none.png) [`c`](other.md#no-heading) [d](#d) [e](other.md)"
        " [f](other.md#twice-1)\n`[g](none)`"
        " [h](https://example.org/none)\n```\n[i](none)\n```\n[j](none/)\n"
    )
    assert broken(page) == ["none.png", "other.md#no-heading", "#d", "none/"]


@pytest.mark.parametrize(
    "page", PAGES, ids=lambda page: str(page.relative_to(ROOT))
)
def test_no_example_asks_for_a_verdict_that_saving_does_not_have(
    page: Path,
) -> None:
    examples = (
        found.group()
        for found in _FENCE.finditer(page.read_text(encoding="utf-8"))
    )
    assert [
        example
        for example in examples
        if re.search(r"assert .*\.verdict\b", example)
    ] == []


@pytest.mark.parametrize(
    "page", PAGES, ids=lambda page: str(page.relative_to(ROOT))
)
def test_no_page_claims_that_all_communication_is_counted(page: Path) -> None:
    assert "what a step sends" not in page.read_text(encoding="utf-8").lower()


def test_the_site_has_every_page() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    trees = re.findall(
        r"^```{toctree}\n(.*?)^```", index, re.MULTILINE | re.DOTALL
    )
    listed = {line for tree in trees for line in tree.splitlines()}
    pages = {
        str(page.relative_to(ROOT / "docs").with_suffix("")) for page in DOCS
    }
    assert pages - {"index"} == {
        line for line in listed if line and not line.startswith(":")
    }


def test_the_reference_has_every_public_name() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    found = set(
        re.findall(
            r"^\.\. auto\w+:: pytest_ddpperf\.(\w+)$", text, re.MULTILINE
        )
    )
    assert found == set(pytest_ddpperf.__all__)


def test_the_sample_can_be_read_and_is_the_run_that_is_shown() -> None:
    kept = ROOT / "docs" / "sample"
    outcomes = json_report.read([kept / "run.json"]).outcomes
    assert all(outcome.baseline_side is not None for outcome in outcomes)
    assert (
        f"\n{last_line(outcomes, with_cost=True)}\n"
        in (kept / "output.txt").read_text()
    )


def test_the_history_that_is_shown_can_be_read_and_has_a_change_point() -> None:
    series = build_series(read_entries(ROOT / "docs" / "sample" / "history"))
    changes = analyze(
        series, [Limit(metric="p10", value=0.0, unit="%")]
    ).changes
    slower = [
        str(change.series.test)
        for change in changes
        if change.status is ChangeStatus.REGRESSED
    ]
    assert slower == ["tests/perf/test_gpt::test_train_step"]


def test_the_sample_on_the_page_of_histories_is_what_the_command_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["history", str(ROOT / "docs" / "sample" / "history")]) == 1
    assert (
        f"\n{capsys.readouterr().out}$ ddpperf history accept"
        in (ROOT / "docs" / "history.md").read_text()
    )


def test_each_reason_code_that_a_report_can_have_is_documented() -> None:
    text = (ROOT / "docs" / "json.md").read_text()
    # the pytest of a leader replaces these by its own
    of_workers = {Reason.BASE_SIDE, Reason.FOLLOWS}
    assert {each for each in Reason if f"`{each}`" not in text} == of_workers
