"""The `ddpperf` command as such: how it ends, and what it does without."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from pytest_ddpperf import __version__
from pytest_ddpperf.cli import console, diff, main
from pytest_ddpperf.history.entries import add_entry
from pytest_ddpperf.records import Status, TestId
from pytest_ddpperf.records.errors import SampleError
from tests.unit.test_history import history, stepped
from tests.unit.test_reading import written
from tests.unit.test_report import outcome, verdict


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest_ddpperf", *map(str, arguments)], capture_output=True, text=True, check=False
    )


def test_help_names_the_commands_and_the_exit_statuses(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(["--help"])
    reported = capsys.readouterr().out
    assert ended.value.code == 0
    for words in (
        "what pytest --ddp-json wrote",
        "their history over",
        "stored baselines",
        "how well this machine can measure",
        "diff ",
        "compare one run with another",
        "4    a command that cannot be, or a file that cannot be",
        "130  it was interrupted",
    ):
        assert words in reported


@pytest.mark.parametrize("command", main.COMMANDS, ids=lambda module: module.__name__.rpartition(".")[2])
def test_each_command_explains_itself(command: object, capsys: pytest.CaptureFixture[str]) -> None:
    name = command.__name__.rpartition(".")[2]  # type: ignore[attr-defined]
    with pytest.raises(SystemExit) as ended:
        main.main([name, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: ddpperf {name}")


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["dif"], "invalid choice: 'dif'"),
        (["diff"], "the following arguments are required: BASE, NOW"),
        (["diff", "a", "b", "--thresh", "p50:5%"], "unrecognized arguments: --thresh"),
    ],
)
def test_a_command_that_cannot_be_ends_with_4(
    arguments: Sequence[str], reported: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(arguments) == 4
    said = capsys.readouterr().err
    assert "usage: ddpperf" in said
    assert reported in said


def test_a_file_that_cannot_be_read_ends_with_4(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["diff", str(tmp_path / "a.json"), "b.json"]) == 4
    assert capsys.readouterr().err == f"ddpperf: error: {tmp_path}/a.json: cannot be read: No such file or directory\n"


@pytest.mark.parametrize("error", [SampleError("0.0 is not a duration"), ZeroDivisionError("oops")])
def test_an_error_of_our_own_ends_with_3(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(arguments: object) -> int:
        raise error

    monkeypatch.setattr(diff, "run", fail)
    assert main.main(["diff", "a", "b"]) == 3
    assert str(error) in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    with pytest.raises(console.FileError, match=r"/a/b\.txt: cannot be written: (File exists|Not a directory)"):
        console.write(tmp_path / "a" / "b.txt", "")
    console.write(tmp_path / "new" / "b.txt", "ü\n")
    assert (tmp_path / "new" / "b.txt").read_bytes() == b"\xc3\xbc\n"


def test_the_version_is_told() -> None:
    ended = command("--version")
    assert (ended.returncode, ended.stdout) == (0, f"pytest-ddpperf {__version__}\n")


def test_a_process_ends_with_the_same_status() -> None:
    ended = command("diff", "no-such.json", "b.json")
    assert (ended.returncode, ended.stdout) == (4, "")
    assert ended.stderr == "ddpperf: error: no-such.json: cannot be read: No such file or directory\n"


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: Path) -> None:
    path = written(tmp_path / "a.json", outcome(verdict(Status.PASS)))
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest_ddpperf", "diff", path, path], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.close()
    _, errors = process.communicate()
    assert (process.returncode, errors) == (0, b"")


FAILING = "import sys; from pytest_ddpperf.cli import diff, main; diff.run = None; sys.exit(main.main())"


@pytest.mark.parametrize("closed", ["broken", "not there"])
@pytest.mark.parametrize(
    ("code", "arguments", "status"),
    [
        ("", ["diff", "{path}", "{other}"], 5),
        ("", ["diff", "no-such.json", "b.json"], 4),
        ("", ["dif"], 4),
        (FAILING, ["diff", "a", "b"], 3),
    ],
    ids=["nothing in common", "no file", "no command", "ours"],
)
def test_where_nobody_reads_errors_the_status_stays(
    code: str, arguments: Sequence[str], status: int, closed: str, tmp_path: Path
) -> None:
    there = written(tmp_path / "a.json", outcome(verdict(Status.PASS)))
    other = written(tmp_path / "b.json", outcome(verdict(Status.PASS), test=TestId(module="m", name="other")))
    given = [each.format(path=there, other=other) for each in arguments]
    command = shlex.join([sys.executable, *(["-c", code] if code else ["-m", "pytest_ddpperf"]), *given])
    process = subprocess.Popen(
        command + (" 2>&-" if closed == "not there" else ""),
        shell=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    process.stderr.close()
    reported = process.stdout.read()
    process.stdout.close()
    assert process.wait() == status
    assert "ddpperf: error" not in reported
    assert "usage" not in reported
    assert "Traceback" not in reported


def test_an_interrupt_ends_as_a_shell_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(arguments: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(diff, "run", interrupt)
    assert main.main(["diff", "a", "b"]) == 130
    page = (Path(__file__).parents[2] / "docs" / "command.md").read_text()
    assert "| 130 | it was interrupted (Ctrl-C) |\n" in page


@pytest.mark.parametrize("redirection", ["", ">&-"])
def test_what_the_terminal_has_no_characters_for_is_spelt_out(tmp_path: Path, redirection: str) -> None:
    path = written(tmp_path / "a.json", outcome(verdict(Status.PASS), nodeid="test_\u00fc\u2192.py::test_step"))
    line = f"{shlex.quote(sys.executable)} -m pytest_ddpperf diff {path} {path} {redirection}"
    environ = {**os.environ, "PYTHONIOENCODING": "ascii"}
    ended = subprocess.run(line, shell=True, env=environ, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ("test_\\xfc\\u2192.py::test_step" in ended.stdout) is (not redirection)


def test_the_command_is_installed() -> None:
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f'ddpperf = "{main.main.__module__}:{main.main.__name__}"' in project


def test_neither_pytest_nor_torch_is_imported(tmp_path: Path) -> None:
    path = written(tmp_path / "a.json", outcome(verdict(Status.PASS)))
    code = (
        "import sys; from pytest_ddpperf.cli.main import main; "
        f"status = main(['diff', {str(path)!r}, {str(path)!r}]); "
        "print(sorted({'torch', '_pytest', 'pytest', 'numpy', 'matplotlib'} & set(sys.modules))); sys.exit(status)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout.splitlines()[-1]) == (0, "[]"), ended.stderr


def test_the_documentation_has_every_command() -> None:
    page = (Path(__file__).parents[2] / "docs" / "command.md").read_text()
    for module in main.COMMANDS:
        assert f"`ddpperf {module.__name__.rpartition('.')[2]} " in page


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_no_error_of_ours(tmp_path: Path) -> None:
    there = written(tmp_path / "a.json", outcome(verdict(Status.PASS)))
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "pytest_ddpperf", "diff", there, there],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    reported = "ddpperf: error: standard output: cannot be written: No space left on device\n"
    assert (ended.returncode, ended.stderr) == (4, reported)


def test_a_history_is_judged_where_nobody_reads_errors(tmp_path: Path) -> None:
    for each in history(stepped(points=8)):
        add_entry(tmp_path, each)
    command = shlex.join([sys.executable, "-m", "pytest_ddpperf", "history", str(tmp_path)])
    ended = subprocess.run(f"{command} 2>&-", shell=True, stdout=subprocess.PIPE, text=True)
    assert ended.returncode == 0
    assert "no change point in 1 series" in ended.stdout
