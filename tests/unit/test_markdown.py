"""A run as Markdown: what it says, where it is cut, and that nothing a user named is read as
Markdown."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_ddpperf.cli import init
from pytest_ddpperf.cli.main import main
from pytest_ddpperf.plugin.results import RunResults
from pytest_ddpperf.records import codec
from pytest_ddpperf.records.guard import Kind, Loosened
from pytest_ddpperf.records.outcome import Outcome, RunInfo
from pytest_ddpperf.records.samples import FactChange, Status, TestId
from pytest_ddpperf.report import markdown, page
from tests import reports
from tests.unit.test_baseline_side import BESIDE
from tests.unit.test_report import FAILED, measurement, outcome, verdict


def report(
    *outcomes: Outcome, messages: Sequence[str] = (), **kwargs: Any
) -> str:
    return markdown.report(
        reports.report(outcomes, RunInfo(**kwargs), messages=messages)
    )


ACCEPT = "pytest x --ddp-save-baseline"
RED = reports.explained(
    outcome(verdict(Status.REGRESSED, facts=(reports.NEWER_TORCH,))),
    [measurement(0.1)],
    ACCEPT,
)
DOUBT = outcome(
    verdict(Status.INCONCLUSIVE, "not-significant"),
    nodeid="doubt",
    accept=ACCEPT,
)
NEW = outcome(verdict(Status.NO_BASELINE, "no-baseline"), nodeid="new")
GREEN = outcome(verdict(Status.PASS), nodeid="green")
FREE = outcome(verdict(Status.NOT_GATED, "gate-off"), nodeid="free")


def test_it_reads_from_the_counts_over_what_is_wrong_to_what_is_well() -> None:
    noted = replace(NEW, notes=("there is one for x",))
    reported = report(
        GREEN,
        noted,
        RED,
        FREE,
        messages=["2 tests, of which one is odd"],
        facts={"torch": "2.13.0"},
    )
    assert (
        reported
        == """\
<!-- pytest-ddpperf -->
## compared with baselines: 1 regressed, 1 passed, 1 without baseline, 1 not gated (2 of 4 compared)

| result | test | p50: before -> now |
|---|---|--:|
| **REGRESSED** `p50 +12 % (limit 10 %): every rank computes longer: CPU time +100 ms \
(the step: +100 ms); torch 2.12 -> 2.13` \
| `tests/test_a.py::test_step on 2 gloo` | 100 -> 200 ms |
| NO BASELINE `record one with --ddp-save-baseline` | `new on 2 gloo` | 200 ms |

<details><summary>REGRESSED: <code>tests/test_a.py::test_step</code></summary>

```text
REGRESSED: step time p50 100 -> 200 ms, +12 % [+8, +17] (limit 10 %)
why: every rank computes longer: CPU time +100 ms (the step: +100 ms); torch 2.12 -> 2.13

  metric  before     now  change [range]   limit
  p50        100  200 ms  +12 % [+8, +17]  10 %

measured: 2 launches
accept:   pytest x --ddp-save-baseline
```

</details>

<details><summary>1 PASS, 1 NOT GATED</summary>

| result | test | p50: before -> now |
|---|---|--:|
| PASS `p50 +1.0 % (limit 10 %)` | `green on 2 gloo` | 100 -> 200 ms |
| NOT GATED `gate=False` | `free on 2 gloo` | 200 ms |

</details>

- `torch 2.13.0, Python None; None`
- `2 tests, of which one is odd`
- `new: there is one for x`
"""
    )


def test_if_nothing_needs_attention_the_table_is_open() -> None:
    reported = report(
        GREEN,
        problem="no test imported a file that differs",
        commit=f"{'c0ffee' * 6}-dirty",
    )
    begin = (
        "(1 of 1 compared)\n\n`no test imported a file that differs`\n\n<details open><summary>1"
        " PASS</summary>\n"
    )
    assert begin in reported
    assert "- `commit c0ffeec with uncommitted changes`\n" in reported
    assert (
        report()
        == "<!-- pytest-ddpperf -->\n## nothing measured (0 of 0 compared)\n"
    )


@pytest.mark.parametrize("form", ["markdown", "html"])
def test_the_command_reports_a_run_as_the_run_itself_did(
    form: str, tmp_path: Path
) -> None:
    if form == "html":
        pytest.importorskip(
            "matplotlib", reason="pages are drawn by matplotlib"
        )
    run = RunResults(
        RunInfo(commit="c0ffee" * 6),
        messages=["only main has test_x"],
        facts={"torch": "2.13.0"},
        skipped=1,
    )
    run.usage_error = "no test imported a file that differs"
    run.take(
        {
            "outcomes": [codec.encode(GREEN)],
            "never_measured": "test_a.py::test_b",
        }
    )
    run.end({GREEN.nodeid, "test_a.py::test_red"})
    (tmp_path / "run.json").write_text(codec.dumps(run.data()))
    assert (
        main([form, str(tmp_path / "run.json"), "-o", str(tmp_path / "out")])
        == 0
    )
    reported = (tmp_path / "out").read_text()
    assert (
        "1 passed, 1 skipped, 1 never measured, 2 other failures (1 of 1 compared)"
        in reported
    )
    assert reported == (markdown.report if form == "markdown" else page.html)(
        run.stored()
    )


def test_another_version_is_named_with_the_files_that_differ() -> None:
    red = replace(
        outcome(verdict(Status.REGRESSED)),
        baseline_side=BESIDE,
        baseline_path="",
    )
    reported = report(red, facts={"against": "origin/main (1a2b3c4)"})
    assert "(limit 10 %): changed: src/net.py` |" in reported
    assert (
        "\nmeasured: 2 interleaved launches of each side; origin/main (1a2b3c4) and 5d6e7f8\n```"
        in reported
    )
    assert "accept" not in reported
    assert "- `against origin/main (1a2b3c4)`\n" in reported


@pytest.mark.parametrize(
    "ref",
    ["<img src=x>", "fix-#12", "@octocat", "a\n\n## b", "\udcff", "x" * 9000],
    ids=range(6),
)
def test_a_hostile_version_stays_in_code(ref: str) -> None:
    side = replace(BESIDE, version=replace(BESIDE.version, ref=ref))
    red = replace(
        outcome(verdict(Status.REGRESSED)),
        baseline_side=side,
        baseline_path="",
    )
    _, heading, *_ = outside_of_code(report(red)).splitlines()
    assert heading == "## CODE"
    assert report(red).encode()


def test_what_was_saved_is_counted_as_rows_show_it() -> None:
    saved = outcome(verdict(Status.NOT_GATED, "saving"), saved=1)
    assert "<summary>1 SAVED</summary>" in report(saved)


def test_the_column_of_commands_has_wall_times() -> None:
    red = outcome(verdict(Status.REGRESSED))
    assert "| result | test | p50: before -> now |" in report(red)
    plan = replace(red.plan, command=True)
    reported = report(replace(red, plan=plan))
    assert "| result | test | wall: before -> now |" in reported


def test_the_recipe_for_comments_looks_for_the_marker() -> None:
    recipe = (
        Path(init.__file__).with_name("recipes")
        / "github/.github/workflows/perf-comment.yml"
    ).read_text()
    assert f'startswith("{markdown.MARKER}")' in recipe


# --- at most so many characters


def many(measured: Outcome, number: int = 1000) -> list[Outcome]:
    return [
        replace(
            measured,
            nodeid=f"tests/perf/test_of_module_{i}.py::test_step[resnet50-{i}]",
            test=TestId(module="m", name=str(i)),
        )
        for i in range(number)
    ]


def rows(reported: str, status: str) -> int:
    return len(re.findall(rf"^\| \**{status}\** ", reported, re.MULTILINE))


@pytest.mark.parametrize(
    "measured",
    [RED, DOUBT, NEW, GREEN, FAILED],
    ids=lambda measured: str(measured.verdict),
)
def test_fifty_rows_are_shown_and_the_others_counted(measured: Outcome) -> None:
    text = report(
        *many(measured), messages=["of the run"] * 30, facts={"torch": "2.13.0"}
    )
    assert len(text) <= 60_000
    status = str(measured.verdict) if measured.verdict is not None else "failed"
    assert rows(text, status) == 50
    assert text.count("```text") == (10 if measured in (RED, DOUBT) else 0)
    assert "\nAnd 950 more rows: see the JSON report.\n" in text
    assert " more remarks: see the JSON report.\n" in text


def test_names_may_be_long_and_full_of_what_html_spells_out() -> None:
    name = "'" * 400
    noted = replace(RED, notes=("x" * 5_000,), evidence=("y" * 1_000,))
    reds = [
        replace(each, nodeid=f"{each.test.name}{name}")
        for each in many(noted, 60)
    ]
    text = report(
        *reds,
        messages=[f"{i} {'m' * 500}" for i in range(30)],
        sections={f"{i}{name}": ("line " * 2_000,) for i in range(3)},
        guard=[
            Loosened(kind=kind, since=since, name="n" * 500)
            for kind in Kind
            for since in ("a", "b", "c")
        ],
    )
    assert 50_000 < len(text) <= 60_000
    assert rows(text, "REGRESSED") == 50


def test_the_worst_rows_come_first() -> None:
    text = report(
        *many(GREEN, 40), *many(NEW, 3), *many(DOUBT, 12), *many(RED, 3)
    )
    shown = [
        rows(text, status)
        for status in ("REGRESSED", "INCONCLUSIVE", "NO BASELINE", "PASS")
    ]
    assert shown == [3, 12, 3, 32]


def test_what_is_said_of_a_measurement_is_cut_in_the_middle() -> None:
    noted = replace(
        RED, notes=tuple(f"note {i} {'x' * 5_000}" for i in range(100))
    )
    details = report(noted).partition("```text")[2].partition("```\n")[0]
    assert 1_600 < len(details) < 1_800
    assert details.startswith("\nREGRESSED: ")
    assert "\n...\n" in details
    assert details.endswith("accept:   pytest x --ddp-save-baseline\n")


# --- hostile names


HOSTILE = [
    "<script>alert(1)</script>",
    "</pre></code></details><img src=x onerror=alert(1)>",
    "a|b\\|c\\",
    "`x` ``` ````",
    "```",
    "~~~",
    "@octocat fixes #123, GH-1, owner/repo#5",
    "https://evil.example www.evil.example a@b.example",
    "[x](javascript:alert(1)) ![x](http://evil.example/x.png)",
    "line\n\n## heading\n- item\n</details>",
    "line\n```\n<script>alert(1)</script>",
    "\x1b[31mred\r\n\u202e\u2028\x85\x00\ud800",
    "<!-- pytest-ddpperf -->",
    "-->",
    "$\\frac{1}{2}$ :smile: &lt; &#64;",
    "x" * 10_000,
    "`" * 10_000,
    "|" * 10_000,
]


def outside_of_code(reported: str) -> str:
    """What Markdown reads of it: less fences, code spans of one backtick, and <code>."""
    lines: list[str] = []
    fence = ""
    for line in reported.split("\n"):
        if fence:
            fence = "" if line == fence else fence
        elif opened := re.match("`{3,}", line):
            fence = opened[0]
        else:
            lines.append(re.sub(r"`[^`]+`|<code>[^<]*</code>", "CODE", line))
    assert not fence
    return "\n".join(lines)


def with_name(name: str) -> list[Outcome]:
    nodeid = f"tests/test_a.py::test_step[{name}]"
    common: Any = {
        "nodeid": nodeid,
        "test": TestId(module="tests/test_a", name=f"test_step[{name}]"),
        "notes": (name,),
    }
    judged: Sequence[Outcome] = [
        outcome(
            verdict(
                Status.REGRESSED,
                facts=(FactChange(name="VARIABLE", before=name, now="1"),),
            ),
            evidence=(name,),
            accept=name,
            **common,
        ),
        outcome(verdict(Status.INCONCLUSIVE, "not-significant"), **common),
        outcome(verdict(Status.NO_BASELINE), baseline_path=name, **common),
        outcome(verdict(Status.PASS), **common),
    ]
    return [*judged, replace(FAILED, error=name, **common)]


def test_the_title_of_a_section_stays_on_its_line() -> None:
    shown = report(sections={"a\n\n# b <c>": ("d",)})
    assert "<summary><code>a\\n\\n# b &lt;c&gt;</code></summary>" in shown


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_name_stays_in_code(name: str) -> None:
    def named(name: str) -> str:
        facts = {"torch": name, "cpu_model": name, "places": name}
        return report(
            *with_name(name),
            problem=name,
            messages=[name],
            commit=name,
            facts=facts,
        )

    reported, harmless = (
        named(name),
        outside_of_code(named("plain")).splitlines(),
    )
    assert len(reported) <= 60_000
    assert all(
        character.isprintable() or character == "\n" for character in reported
    )
    assert {
        line.count("|")
        for line in reported.splitlines()
        if line.startswith("| ")
    } == {4}
    lines = outside_of_code(reported).splitlines()
    assert [line for line in lines if "CODE" not in line] == [
        line for line in harmless if "CODE" not in line
    ]
    assert {re.sub(r"[\d.]+", "", line) for line in lines} == {
        re.sub(r"[\d.]+", "", line) for line in harmless
    }
