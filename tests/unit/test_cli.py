"""The `ddpperf` command as such: how it ends, and what it does without."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from pytest_ddpperf import __version__
from pytest_ddpperf.baseline import Store
from pytest_ddpperf.cli import commands, diff, main
from pytest_ddpperf.history.entries import add_entry
from pytest_ddpperf.records.samples import Baseline, Status, TestId
from tests.unit.test_baseline_command import SESSION
from tests.unit.test_history import history, stepped
from tests.unit.test_init import RECIPES
from tests.unit.test_reading import written
from tests.unit.test_report import outcome, verdict

COMMANDS = tuple("diff history html markdown init baseline doctor".split())


def test_a_usage_error_has_no_colors(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python 3.14 would give it some."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main.main(["history", "--nonsense"]) == 4
    assert capsys.readouterr().err.startswith("usage: ddpperf ")


def test_help_names_the_commands_and_the_exit_statuses(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for arguments in (
        ["--help"],
        ["--version"],
        *([name, "--help"] for name in COMMANDS),
    ):
        with pytest.raises(SystemExit) as ended:
            main.main(arguments)
        assert ended.value.code == 0
    reported = capsys.readouterr().out
    page = (Path(__file__).parents[2] / "docs" / "command.md").read_text()
    for name in COMMANDS:
        assert f"usage: ddpperf {name}" in reported
        assert f"`ddpperf {name} " in page
    assert f"pytest-ddpperf {__version__}\n" in reported
    for words in (
        "compare one run with another",
        "4    an invalid command, or a file that cannot be",
        "130  it was interrupted",
    ):
        assert words in reported
    assert "| 130 | it was interrupted (Ctrl-C) |\n" in page


@pytest.mark.parametrize(
    ("error", "status", "reported"),
    [
        (ValueError("0.0 is not a duration"), 3, "0.0 is not a duration"),
        (ZeroDivisionError("oops"), 3, "oops"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_of_our_own_and_interrupts_have_a_status(
    error: BaseException,
    status: int,
    reported: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(arguments: object) -> int:
        raise error

    monkeypatch.setattr(diff, "run", fail)
    assert main.main(["diff", "a", "b"]) == status
    assert reported in capsys.readouterr().err


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write what the commands read."""
    folder = tmp_path_factory.mktemp("inputs")
    written(
        folder / "a.json",
        outcome(verdict(Status.PASS), nodeid="test_\u00fc\u2192.py::test_step"),
    )
    written(
        folder / "other.json",
        outcome(verdict(Status.PASS), test=TestId(module="m", name="other")),
    )
    for each in history(stepped(points=8)):
        add_entry(folder / "history", each)
    Store(folder / "baselines").write(
        Baseline(test=outcome(None).test, sessions=(SESSION,))
    )
    return folder


@pytest.mark.parametrize(
    "arguments",
    [
        "diff a.json a.json",
        "history history",
        "html a.json -o a.html",
        "markdown a.json -o a.md",
        "baseline list",
        "doctor",
    ],
)
def test_commands_import_neither_pytest_nor_torch_nor_matplotlib_if_they_draw_nothing(
    arguments: str, inputs: Path
) -> None:
    if arguments.startswith("html"):
        pytest.importorskip(
            "matplotlib", reason="pages are drawn by matplotlib"
        )
    code = (
        "import sys; from pytest_ddpperf.cli.main import main; status = main(sys.argv[1:]);"
        " print(sorted({'torch', '_pytest', 'pytest', 'matplotlib'} & set(sys.modules)));"
        " sys.exit(status)"
    )
    command = [sys.executable, "-c", code, *arguments.split()]
    ended = subprocess.run(
        command, cwd=inputs, capture_output=True, text=True, check=False
    )
    drawn = "['matplotlib']" if arguments.startswith("html") else "[]"
    assert (ended.returncode, ended.stdout.splitlines()[-1]) == (0, drawn), (
        ended.stderr
    )


def test_a_history_needs_no_more_than_the_recipe_installs(
    inputs: Path,
) -> None:
    recipe = (
        RECIPES / "github-main/.github/workflows/perf-history.yml"
    ).read_text()
    installed = re.search(r"pip install (.+)\n +pip install --no-deps", recipe)
    assert installed is not None
    code = (
        "import sys; before = {*sys.modules}; from pytest_ddpperf.cli.main import main;"
        " status = main(sys.argv[1:]);"
        " new = {name.partition('.')[0] for name in {*sys.modules} - before};"
        " print(*sorted(new - sys.stdlib_module_names)); sys.exit(status)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, "history", "history"],
        cwd=inputs,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    imported = {*ended.stdout.splitlines()[-1].split()} - {"pytest_ddpperf"}
    # msgspec imports it if it is there
    assert imported - {"typing_extensions"} == {*installed[1].split()}


def test_a_program_and_its_arguments_have_any_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    program = ["\U0001f600.py", "\xe9", "\udcff", '"\\']
    Path(program[0]).touch()
    test = commands.test_of(program).encode("utf-8", "backslashreplace")
    made: dict[str, Any] = {}
    exec(test, made)
    fixture = Mock()
    made["test_train"](fixture)
    fixture.script.assert_called_once_with(program[0], args=program[1:])


def test_the_command_is_installed() -> None:
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f'ddpperf = "{main.main.__module__}:{main.main.__name__}"' in project


BREAKS = (
    f"{shlex.quote(sys.executable)} -c 'import sys; from pytest_ddpperf.cli import diff, main;"
    " diff.run = None; "
)
BREAKS += "sys.exit(main.main())'"
