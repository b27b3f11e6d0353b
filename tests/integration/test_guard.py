"""What became weaker since the other version is told, whatever the verdicts say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pytest_ddpperf.remote.process import RemotePytest
from tests.git import git
from tests.integration.conftest import FEW, STEP, Run

INI = "[pytest]\naddopts = -p no:cacheprovider\n"
PACKAGE = "MILLISECONDS = 5\n"
TESTS = (
    STEP
    + """
import speed

def test_first(ddp_benchmark):
    ddp_benchmark(lasting, name="one")
    ddp_benchmark(lasting, name="two")

def test_second(ddp_benchmark):
    ddp_benchmark(lasting)

def test_third(ddp_benchmark):
    ddp_benchmark(lasting)

def test_gone(ddp_benchmark):
    step = lasting
    ddp_benchmark(step)
"""
)


@pytest.fixture
def top(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, temporary: Path
) -> Path:
    """A repository whose last commit has tests; its code has changed since."""
    top = pytester.path / "a repo"
    for folder in ("src/speed", "tests"):
        (top / folder).mkdir(parents=True)
    git(top.parent, "init", "--quiet", "--initial-branch=main", str(top))
    (top / ".gitignore").write_text("__pycache__\nout\n")
    write(top, "pytest.ini", INI + "pythonpath = src\n")
    write(top, "src/speed/__init__.py", PACKAGE)
    write(top, "tests/test_step.py", TESTS)
    git(top, "add", "--all")
    git(top, "commit", "--quiet", "-m", "a commit")
    write(top, "src/speed/__init__.py", PACKAGE + "# changed\n")
    monkeypatch.chdir(top)
    return top


def write(top: Path, name: str, text: str) -> None:
    (top / name).write_text(text)


def guard_lines(result: pytest.RunResult) -> list[str]:
    return [line for line in result.outlines if line.startswith("guard: ")]


def test_what_is_weaker_in_tests_conftest_and_ini_file_is_told_at_every_verbosity(
    top: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(
        top,
        "pytest.ini",
        INI.replace("cacheprovider", "cacheprovider -k 'not third'")
        + "pythonpath = src\nddp_min_time = 0\nddp_fail_on = regressed\n",
    )
    write(
        top,
        "tests/conftest.py",
        'import os\nos.environ["OMP_NUM_THREADS"] = "1"\n',
    )
    changed = TESTS.replace("test_gone", "test_renamed")
    changed = changed.replace('lasting, name="two"', 'lasting, name="2"')
    changed = changed.replace(
        "def test_second",
        '@pytest.mark.ddp(threshold="p50:900%")\ndef test_second',
    )
    write(top, "tests/test_step.py", changed)
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    result = run(
        "-q",
        "--ddp-against=main",
        *FEW,
        "--ddp-json=out/run.json",
        "--ddp-markdown=out/run.md",
    )
    assert result.ret == 0
    lines = guard_lines(result)
    assert lines == [
        (
            "guard: 2 tests that main compared are not compared now: test_step.py::test_first"
            " (two) (removed), test_step.py::test_third (deselected)"
        ),
        "guard: limit of test_step.py::test_second raised: p50 300 % -> 900 % (marker)",
        "guard: renamed since main: test_step.py::test_gone -> test_step.py::test_renamed",
        (
            "guard: tests/conftest.py, tests/test_step.py, pytest.ini differ from main's; both"
            " sides ran the current ones"
        ),
    ]
    (annotation,) = [
        line for line in result.outlines if line.startswith("::warning")
    ]
    assert annotation.startswith("::warning title=guard::guard: 2 tests that")
    assert annotation.count("%0Aguard: ") == len(lines) - 1
    markdown = (top / "out/run.md").read_text()
    assert [line for line in lines if f"- `{line}`" not in markdown] == []
    found = json.loads((top / "out/run.json").read_text())["guard"]
    (limit,) = [each for each in found if each["kind"] == "limit"]
    assert limit == {
        "kind": "limit",
        "since": "main",
        "test": "tests/test_step.py::test_second",
        "name": "p50",
        "before": "300 %",
        "now": "900 %",
        "source": "marker",
    }


def test_a_run_may_be_red_because_its_gate_is_weaker(
    top: Path, run: Run
) -> None:
    """What the other version's ini file says about it holds, too."""
    strict = INI + "pythonpath = src\nddp_fail_on = regressed,loosened\n"
    write(top, "pytest.ini", strict)
    git(top, "commit", "--quiet", "-m", "strict", "pytest.ini")
    write(top, "pytest.ini", strict.replace(",loosened", ""))
    changed = TESTS.replace(
        'lasting, name="two"', 'lasting, name="two", gate=False'
    )
    changed = changed.replace(
        "def test_second", '@pytest.mark.skip("flaky")\ndef test_second'
    )
    changed = changed.replace(
        "def test_third", '@pytest.mark.xfail(reason="slow")\ndef test_third'
    )
    changed = changed.replace(
        "    step = lasting", '    pytest.skip("no data")'
    )
    write(top, "tests/test_step.py", changed)
    write(
        top,
        "tests/conftest.py",
        """
import pytest

@pytest.fixture
def ddp_world_size():
    return 1
""",
    )
    result = run("--ddp-against=main", *FEW, "--ddp-json=out/run.json")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(passed=1, skipped=2, xpassed=1)
    assert guard_lines(result) == [
        (
            "guard: 4 tests that main compared are not compared now: test_step.py::test_first"
            ' (two) (gate=False), test_step.py::test_second (skipped: "flaky"),'
            ' test_step.py::test_third (expected to fail: "slow"), ...'
        ),
        (
            "guard: a fixture of test_step.py::test_first, test_step.py::test_gone is not the"
            " plugin's now: ddp_world_size (conftest)"
        ),
        "guard: a run of main is red if loosened, this one is not",
        (
            "guard: tests/conftest.py, tests/test_step.py differ from main's; both sides ran the"
            " current ones"
        ),
        "guard: the run fails: --ddp-fail-on loosened",
    ]
    report = json.loads((top / "out/run.json").read_text())
    assert "measures nothing" in [each["now"] for each in report["guard"]]
    assert report["too_weak"] == "--ddp-fail-on loosened"


def test_a_run_without_any_test_that_was_compared_is_red_in_ci(
    top: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(top, "tests/test_step.py", "def test_other():\n    pass\n")
    arguments = ["tests", "--ddp-against=main"]
    result = run(*arguments)
    assert result.ret == 0
    told = (
        "guard: 4 tests that main compared are not compared now: test_step.py::test_first"
        " (removed), test_step.py::test_second (removed), test_step.py::test_third (removed), ..."
    )
    file = "guard: tests/test_step.py differs from main's; both sides ran the current one"
    assert guard_lines(result) == [told, file]
    monkeypatch.setenv("CI", "true")
    result = run("-q", *arguments)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    fails = "guard: the run fails: nothing is compared any more"
    assert guard_lines(result) == [told, file, fails]
    assert "nothing measured (0 of 0 compared)" in result.stdout.str()

    result = run("--ddp-against=nonesuch")
    assert result.ret == 0, "it would not have been used"
    result.stdout.fnmatch_lines(["no distributed test to compare: *nonesuch*"])


def test_a_test_module_that_needs_code_which_is_gone_is_red_in_ci(
    top: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module is the same in both versions, so nothing else tells."""
    step = (top / "tests/test_step.py").read_text()
    write(top, "src/speed/fast.py", "")
    needs = 'import pytest\npytest.importorskip("speed.fast")\n'
    write(top, "tests/test_step.py", needs + step)
    write(top, "tests/test_plain.py", "def test_other():\n    pass\n")
    git(top, "add", "--all")
    git(top, "commit", "--quiet", "-m", "fast")
    (top / "src/speed/fast.py").unlink()
    monkeypatch.setenv("CI", "true")
    result = run("tests", "--ddp-against=main")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    *_, told = guard_lines(result)
    assert told == "guard: the run fails: nothing is compared any more"


def test_a_conftest_and_an_ini_file_that_sets_the_other_version_up_are_named(
    top: Path, run: Run
) -> None:
    """A conftest is no test module, whatever names these may have."""
    write(top, "tests/conftest.py", "import os\n")
    ini = INI + "pythonpath = src\npython_files = *.py\n"
    write(top, "pytest.ini", ini)
    git(top, "add", "--all")
    git(top, "commit", "--quiet", "-m", "a conftest")
    write(top, "tests/conftest.py", "import os\nos.environ['FAST'] = '1'\n")
    write(top, "pytest.ini", ini + "ddp_against_setup = touch built\n")
    write(top, "src/speed/__init__.py", PACKAGE + "# changed again\n")
    result = run("-ksecond", "--ddp-against=HEAD", *FEW)
    assert guard_lines(result) == [
        "guard: tests/conftest.py, pytest.ini differ from HEAD's; both sides ran the current ones"
    ]


def test_a_helper_with_the_name_of_a_test_module_and_files_of_arguments_are_named(
    top: Path, run: Run
) -> None:
    """What measured tests import comes first. A plain test is not named."""
    write(top, "tests/test_models.py", "SIZE = 1\n")
    write(top, "tests/test_plain.py", "def test_plain():\n    pass\n")
    write(top, "tests/test_step.py", TESTS + "\nimport test_models\n")
    for name in ("a.txt", "b.txt", "c.txt"):
        write(top, f"tests/{name}", "")
    write(top, "perf.txt", "--ddp-threshold=p50:300%\n")
    git(top, "add", "--all")
    git(top, "commit", "--quiet", "-m", "helpers")
    write(top, "tests/test_models.py", "SIZE = 2\n")
    write(top, "tests/test_plain.py", "def test_plain():\n    assert 1\n")
    for name in ("a.txt", "b.txt", "c.txt"):
        write(top, f"tests/{name}", "changed")
    write(top, "perf.txt", "--ddp-threshold=p50:900%\n")
    write(top, "src/speed/__init__.py", PACKAGE + "# changed again\n")
    result = run("tests", "-ksecond", "@perf.txt", "--ddp-against=HEAD", *FEW)
    assert result.ret == 0
    assert guard_lines(result) == [
        (
            "guard: limit of test_step.py::test_second raised:"
            " p50 300 % -> 900 % (command line)"
        ),
        (
            "guard: tests/test_models.py, perf.txt, tests/a.txt, ... differ from HEAD's; both sides"
            " ran the current ones"
        ),
    ]


def test_tests_that_a_file_of_the_ini_file_leaves_out_are_named(
    top: Path, run: Run
) -> None:
    ini = INI.replace("\n", " @perf.txt\n").replace("] @perf.txt", "]")
    write(top, "pytest.ini", ini + "pythonpath = src\n")
    write(top, "perf.txt", "-q\n")
    git(top, "add", "--all")
    git(top, "commit", "--quiet", "-m", "arguments")
    write(top, "perf.txt", "-k\nsecond\n")
    write(top, "src/speed/__init__.py", PACKAGE + "# changed again\n")
    result = run("--ddp-against=HEAD", *FEW)
    first, second = guard_lines(result)
    assert first.startswith(
        "guard: 3 tests that HEAD compared are not compared now: "
    )
    assert (
        second
        == "guard: perf.txt differs from HEAD's; both sides ran the current one"
    )


def test_a_baseline_is_named_if_its_test_has_a_reference_now_but_not_if_a_condition_skips_it(
    pytester: pytest.Pytester, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    tests = (
        STEP
        + """
def test_day(ddp_benchmark):
    ddp_benchmark(lasting)

@pytest.mark.skipif("NIGHT" not in os.environ, reason="at night")
def test_night(ddp_benchmark):
    ddp_benchmark(lasting)
"""
    )
    (pytester.path / "test_step.py").write_text(tests)
    monkeypatch.setenv("NIGHT", "1")
    run("--ddp-save-baseline", *FEW).assert_outcomes(passed=2)
    monkeypatch.delenv("NIGHT")
    strict = *FEW, "--ddp-fail-on=regressed,loosened"
    result = run(*strict)
    assert (result.ret, guard_lines(result)) == (0, [])
    other = "lasting, reference=lambda ctx: lasting(ctx)"
    changed = tests.replace("(lasting)", f"({other})", 1)
    (pytester.path / "test_step.py").write_text(changed)
    result = run(*strict)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert guard_lines(result) == [
        "guard: tests that have baselines are not compared now: test_step::test_day (it has a"
        " reference)",
        "guard: the run fails: --ddp-fail-on loosened",
    ]


def test_what_the_code_under_test_does_to_tests_is_told(
    top: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file of tests differs: plugins and constants of the package do."""
    plugin = "CASES, LIMIT = 'ab', 'p50:300%'\n"
    tests = (
        STEP
        + """
from speed import plugin

@pytest.mark.ddp(threshold=plugin.LIMIT)
@pytest.mark.parametrize("case", plugin.CASES)
def test_case(ddp_benchmark, case):
    ddp_benchmark(lasting)
"""
    )
    write(top, "tests/test_step.py", tests)
    write(top, "src/speed/plugin.py", plugin)
    git(top, "add", "--all")
    git(top, "commit", "--quiet", "-m", "a plugin")
    # "c" is new, of which nothing is to be said
    weaker = plugin.replace("'ab'", "'cb'").replace("300", "900")
    write(top, "src/speed/plugin.py", weaker)
    result = run("--ddp-against=main", *FEW)
    assert result.ret == 0
    assert guard_lines(result) == [
        (
            "guard: 1 test that main compared is not compared now: test_step.py::test_case[a]"
            " (removed)"
        ),
        "guard: limit of test_step.py::test_case[b] raised: p50 300 % -> 900 % (marker)",
    ]


def test_of_tests_that_are_the_same_nothing_is_collected_or_told(
    top: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor of what the call itself left out, or of tests that are new."""

    started = []

    class Counted(RemotePytest):
        def __init__(self, *arguments: Any) -> None:
            started.append(self)
            super().__init__(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr("pytest_ddpperf.remote.version.RemotePytest", Counted)
        result = run("-ksecond", "--ddp-against=main", *FEW)
    assert result.ret == 0
    assert guard_lines(result) == []
    assert len(started) == 1, "none to collect its own tests"

    write(
        top,
        "tests/test_new.py",
        STEP + "def test_new(ddp_benchmark):\n    ddp_benchmark(lasting)\n",
    )
    chosen = "tests/test_step.py::test_second", "tests/test_new.py"
    result = run(*chosen, "--ddp-against=main", *FEW)
    assert guard_lines(result) == []


def test_a_call_that_names_none_of_the_other_versions_tests_says_so(
    top: Path, run: Run
) -> None:
    (top / "tests/test_step.py").rename(top / "tests/test_renamed.py")
    result = run(
        "tests/test_renamed.py", "--ddp-against=main", "-ksecond", *FEW
    )
    assert result.ret == 0
    assert (
        "guard: what main's own tests are judged by is unknown, because they cannot be collected:"
        " it has none of the tests of this call"
    ) in guard_lines(result)


def test_what_cannot_be_collected_is_told(top: Path, run: Run) -> None:
    write(top, "tests/conftest.py", "import nonesuch\n")
    git(top, "add", "tests")
    git(top, "commit", "--quiet", "-m", "a conftest that cannot be imported")
    write(top, "tests/conftest.py", "")
    result = run("-ksecond", "--ddp-against=main", *FEW)
    assert result.ret == 0
    file, unknown = guard_lines(result)
    assert unknown.startswith(
        "guard: what main's own tests are judged by is unknown, because they cannot be collected: "
    )
    assert "nonesuch" in unknown
    assert file.startswith("guard: tests/conftest.py differs from main's")


def test_baselines_whose_tests_are_weaker_are_told_until_they_are_saved_anew(
    pytester: pytest.Pytester, run: Run
) -> None:
    file = pytester.path / "test_step.py"
    file.write_text(TESTS.replace("import speed\n", ""))
    run("--ddp-save-baseline", *FEW).assert_outcomes(passed=4)
    result = run(*FEW)
    result.assert_outcomes(passed=4)
    assert guard_lines(result) == []

    changed = TESTS.replace("import speed\n", "")
    changed = changed.replace(', name="two"', ', name="two", gate=False')
    changed = changed.replace(
        "def test_second",
        '@pytest.mark.ddp(threshold="p50:900%")\ndef test_second',
    )
    changed = changed.replace(
        "def test_third", '@pytest.mark.skip("flaky")\ndef test_third'
    )
    file.write_text(changed.replace("def test_gone", "def gone"))
    result = run("-q", *FEW)
    assert result.ret == 0
    lines = [
        "guard: limit of test_step::test_second raised since its baseline was saved:"
        " p50 300 % -> 900 %",
        "guard: tests that have baselines are not compared now: test_step::test_first (two)"
        " (gate=False), test_step::test_gone (not measured), test_step::test_third (skipped:"
        ' "flaky")',
    ]
    lines[0] = lines[0].replace("test_step::", "test_step.py::")
    assert guard_lines(result) == lines
    fails = "--ddp-fail-on=regressed,loosened"
    result = run(*FEW, fails)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert guard_lines(result) == [
        *lines,
        "guard: the run fails: --ddp-fail-on loosened",
    ]
    # what the call itself left out says nothing, and what ran does
    result = run(*FEW, "-k", "first")
    assert guard_lines(result) == [
        "guard: tests that have baselines are not compared now: test_step::test_first (two)"
        " (gate=False)"
    ]

    expected = TESTS.replace("import speed\n", "")
    file.write_text(
        expected.replace("def test_gone", "@pytest.mark.xfail\ndef test_gone")
    )
    result = run(*FEW, fails)
    assert guard_lines(result) == [
        "guard: tests that have baselines are not compared now: test_step::test_gone (expected to"
        ' fail: "")',
        "guard: the run fails: --ddp-fail-on loosened",
    ]

    file.write_text(changed.replace("def test_gone", "def gone"))
    saved = run("--ddp-save-baseline", *FEW, fails)
    assert (saved.ret, guard_lines(saved)) == (0, [])
    for gone in ("test_gone", "test_third", "test_first+two"):
        (path,) = (pytester.path / "baselines").rglob(f"{gone}.json")
        path.unlink()
    result = run(*FEW, fails)
    assert (result.ret, guard_lines(result)) == (0, [])
