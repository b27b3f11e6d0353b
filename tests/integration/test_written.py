"""The reports of a run that are files."""

from __future__ import annotations

import json

import pytest

from pytest_ddpperf.cli.main import main
from pytest_ddpperf.report import markdown
from pytest_ddpperf.report.json_report import StoredReport
from tests.git import git
from tests.integration.conftest import STEP, Run

NOTHING = "def test_nothing(): pass"


@pytest.mark.parametrize(
    "option", ["--ddp-json", "--ddp-markdown", "--ddp-html"]
)
def test_a_report_that_cannot_be_written_is_told_and_is_red(
    pytester: pytest.Pytester, run: Run, option: str
) -> None:
    pytester.makepyfile(NOTHING)
    (pytester.path / "file").write_text("")
    result = run(f"{option}=file/out")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        [f"{option} {pytester.path}/file/out was not written: *"]
    )
    assert run(f"{option}=file/out", "--collect-only").ret == 0


def test_a_report_that_cannot_be_made_is_told_and_costs_no_other(
    pytester: pytest.Pytester, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """matplotlib is there, and does not come up, say."""

    def broken(stored: StoredReport) -> str:
        raise ImportError("undefined symbol: _Zn")

    monkeypatch.setattr(markdown, "report", broken)
    pytester.makepyfile(NOTHING)
    result = run("--ddp-markdown=out.md", "--ddp-json=out.json")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    reported = (
        f"--ddp-markdown {pytester.path}/out.md was not written: ImportError: undefined "
        "symbol: _Zn"
    )
    result.stdout.fnmatch_lines(
        [reported, "nothing measured (0 of 0 compared)"]
    )
    assert (
        json.loads((pytester.path / "out.json").read_text())["measurements"]
        == []
    )


def test_a_run_without_distributed_tests_writes_a_report_of_none(
    pytester: pytest.Pytester, run: Run
) -> None:
    pytester.makepyfile(NOTHING)
    assert run("--ddp-json=new/folder/out.json").ret == 0
    report = json.loads((pytester.path / "new/folder/out.json").read_text())
    assert report["measurements"] == []
    assert report["summary"]["measured"] == 0


HEADING = "## 1 without baseline (0 of 1 compared): record baselines with --ddp-save-baseline\n"


def test_people_are_told_where_they_look(
    pytester: pytest.Pytester, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(
        test_step=STEP
        + """
@pytest.mark.parametrize("name", ["a\\n::error::<b>%|`"], ids=lambda name: name)
def test_step(ddp_benchmark, name):
    ddp_benchmark(lasting)
""",
        test_nothing=NOTHING,
    )
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    summary, other = (
        pytester.path / "summary.md",
        pytester.path / "out/other.md",
    )
    summary.write_text("the summary of what ran before\n")
    other.parent.mkdir()
    other.write_text("the report of an earlier run\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    result = run("-q", "--ddp-markdown=summary.md")
    lines = (pytester.path / "test_step.py").read_text().splitlines()
    line = next(
        number
        for number, each in enumerate(lines, 1)
        if each.startswith("@pytest")
    )
    commands = [each for each in result.outlines if each.startswith("::")]
    assert len(commands) == 1
    assert commands[0].startswith(
        "::warning title=NO BASELINE%3A test_step.py%3A%3Atest_step[a\\n%3A%3Aerror"
    )
    assert (
        f",file=test_step.py,line={line}::NO BASELINE: record one with --ddp-save-baseline"
        in commands[0]
    )
    assert summary.read_text().startswith(
        "the summary of what ran before\n<!-- pytest-ddpperf -->\n" + HEADING
    )

    assert run("test_nothing.py", "--ddp-markdown=summary.md").ret == 0
    assert summary.read_text().endswith(
        "\n<!-- pytest-ddpperf -->\n## nothing measured (0 of 0 compared)\n"
    )
    assert HEADING in summary.read_text()
    assert run("test_nothing.py", "--ddp-markdown=out/other.md").ret == 0
    assert (
        other.read_text()
        == "<!-- pytest-ddpperf -->\n## nothing measured (0 of 0 compared)\n"
    )


def test_reports_say_of_which_commit_they_are_and_compare_as_the_gate_did(
    pytester: pytest.Pytester,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = pytester.mkdir("perf")
    (folder / "test_step.py").write_text(
        STEP + "\ndef test_step(ddp_benchmark):\n    ddp_benchmark(lasting)\n"
    )
    monkeypatch.setenv("GIT_COMMITTER_DATE", "2026-01-02T03:04:05Z")
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "1"]):
        git(pytester.path, *command)
    commit = git(pytester.path, "rev-parse", "HEAD")
    asked = ["perf", "--rootdir=perf"]
    run(*asked, "--ddp-save-baseline", "--ddp-json=base.json").assert_outcomes(
        passed=1
    )
    monkeypatch.setenv("LASTS", "40")
    run(*asked, "--ddp-json=now.json").assert_outcomes(failed=1)

    base, now = (
        json.loads(pytester.path.joinpath(name).read_text())
        for name in ("base.json", "now.json")
    )
    assert (base["commit"], base["committed"]) == (
        commit,
        "2026-01-02T03:04:05+00:00",
    )
    assert len({base["run_id"], now["run_id"]}) == 2
    (measured,) = now["measurements"]
    line = 1 + (folder / "test_step.py").read_text().splitlines().index(
        "def test_step(ddp_benchmark):"
    )
    assert (measured["file"], measured["line"]) == ("perf/test_step.py", line)
    (session,) = measured["sessions"]
    assert session["commit"] == commit
    assert session["launch_seconds"]["p50"] == pytest.approx([0.005] * 3)
    assert base["measurements"][0]["sessions"] == []

    assert (
        main(
            [
                "diff",
                str(pytester.path / "base.json"),
                str(pytester.path / "now.json"),
            ]
        )
        == 1
    )
    reported = capsys.readouterr().out
    assert measured["verdict"]["comparisons"][0]["change"][
        "estimate"
    ] == pytest.approx(7)
    assert "REGRESSED: step time p50 5.00 -> 40.0 ms, 8.00x [" in reported


SECTION = """
from pytest_ddpperf import add_section

def pytest_sessionfinish(session):
    add_section(session.config, "our tables", ["| a </pre>", "| b"])
"""


def test_a_conftest_adds_a_section_to_all_reports(
    pytester: pytest.Pytester, run: Run
) -> None:
    pytester.makeconftest(SECTION)
    pytester.makepyfile(
        test_one=STEP + "def test_step(ddp_benchmark): ddp_benchmark(lasting)"
    )
    result = run(
        "--ddp-json=out.json", "--ddp-markdown=out.md", "--ddp-html=out.html"
    )
    result.stdout.fnmatch_lines(["*= our tables =*", "| a </pre>", "| b"])
    assert json.loads((pytester.path / "out.json").read_text())["sections"] == {
        "our tables": ["| a </pre>", "| b"]
    }
    folded = (
        "<details><summary><code>our tables</code></summary>\n\n```text\n| a </pre>\n|"
        " b\n```\n\n</details>"
    )
    assert folded in (pytester.path / "out.md").read_text()
    assert (
        "<summary>our tables</summary><pre>| a &lt;/pre&gt;\n| b</pre>"
        in (pytester.path / "out.html").read_text()
    )
    again = main(
        [
            "markdown",
            str(pytester.path / "out.json"),
            "-o",
            str(pytester.path / "again.md"),
        ]
    )
    assert again == 0
    assert folded in (pytester.path / "again.md").read_text()
