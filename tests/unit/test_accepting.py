"""The command that makes a test's figures its baseline: which words of a run it has, and where pytest then stands."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from pytest_ddpperf.led.arguments import spelt_out
from pytest_ddpperf.plugin import accepting
from pytest_ddpperf.plugin.accepting import repeated

SAVE = "--ddp-save-baseline"
TEST = "def test_step(ddp_benchmark): ..."


@pytest.fixture(autouse=True)
def _of_this_command_line_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (["perf", "--hidden", "64", "--ddp-world-size=2"], ["--hidden", "64", "--ddp-world-size=2"]),
        (["perf", "-x", "--ddp-json", "a.json", "--junitxml=b.xml", "-c", "my.ini"], ["-c", "my.ini"]),
        (["perf", "-n", "2", "-n2", "-nauto", "--dist=load", "-v"], ["-v"]),
        (["perf", "--ddp-fail-on", "improved", "--ddp-extend-baseline"], []),
        (["perf", "--slack-token", "xoxb", "--rp-api-key=1", "--PASSWORD=2", "-q"], ["-q"]),
        (["--db-pass", "hunter2", "--auth", "x", "--pwd=1", "--my_api_key", "a", "--credentials=c", "perf"], []),
        (
            [
                "perf",
                "--max-tokens=4096",
                "--tokenizer",
                "gpt2",
                "--ddp-steps",
                "50",
                "--bypass",
                "--tokens-per-step=8",
            ],
            ["--max-tokens=4096", "--tokenizer", "gpt2", "--ddp-steps", "50", "--bypass", "--tokens-per-step=8"],
        ),
        (["--fast-tokenizer", "--ddp-steps", "50", "perf"], ["--fast-tokenizer", "--ddp-steps", "50"]),
        (["--no-auth", "--ddp-steps", "50", "perf"], ["--ddp-steps", "50"]),
        (["-ktoken_loss", "perf", "-mpass"], ["-ktoken_loss", "-mpass"]),
    ],
)
def test_what_says_how_a_test_is_measured_is_repeated_and_no_secret(words: list[str], kept: list[str]) -> None:
    assert repeated(words, ["perf"]) == kept


def collected(pytester: pytest.Pytester, *arguments: str) -> pytest.Item:
    """The first test of such a run."""
    return pytester.inline_genitems("-p", "no:randomly", *arguments)[0][0]


def accept_command(pytester: pytest.Pytester, *arguments: str, worker: bool = False) -> list[str]:
    item = collected(pytester, *arguments)
    if worker:
        item.config.workerinput = {}  # type: ignore[attr-defined]
    return shlex.split(accepting.command(item))


def test_under_xdist_one_process_accepts(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_a=TEST)
    path = "test_a.py::test_step"
    assert accept_command(pytester, "--ddp-steps=50") == ["pytest", path, "-p", "no:randomly", "--ddp-steps=50", SAVE]
    kept = ["-p", "no:randomly", "--ddp-steps=50", "-n", "0", SAVE]
    assert accept_command(pytester, "--ddp-steps=50", "-n0", worker=True) == ["pytest", path, *kept]


def test_what_a_file_of_arguments_says_is_repeated_without_its_tests(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_a="def test_step(ddp_benchmark): ...\ndef test_other(ddp_benchmark): ...\n")
    Path("asked.txt").write_text("test_a.py\n--ddp-steps=50\n@more.txt\n")
    Path("more.txt").write_text("--ddp-json=a.json\n--ddp-warmup\n9\n--my-token\nx\n")
    pytester.makeconftest("def pytest_addoption(parser): parser.addoption('--my-token')")
    kept = ["-p", "no:randomly", "--ddp-steps=50", "--ddp-warmup", "9", SAVE]
    assert accept_command(pytester, "@asked.txt") == ["pytest", "test_a.py::test_step", *kept]


def test_a_file_of_arguments_that_cannot_be_read_again_says_nothing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert list(spelt_out(["-v", "@pipe", "@gone", "a@b"], tmp_path)) == ["-v", "a@b"]


def test_what_another_shell_does_not_know_is_said_first(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(test_a=TEST)
    monkeypatch.setenv("PYTEST_ADDOPTS", "--ddp-steps 50 --ddp-json='a b.json' -n 0 test_a.py")
    kept = ["--ddp-steps", "50", "-p", "no:randomly", "--ddp-warmup=9", SAVE]
    assert accept_command(pytester, "--ddp-warmup=9") == ["pytest", "test_a.py::test_step", *kept]


# --- rootdir and ini file


def at(root: Path, *files: str) -> None:
    for file in files:
        path = root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(TEST if path.suffix == ".py" else "[pytest]\n")


@pytest.mark.parametrize(
    ("files", "asked", "more"),
    [
        (["pytest.ini"], ["a", "b"], []),
        (["pytest.ini"], [], []),
        (["a/pyproject.toml", "pytest.ini"], ["a", "b"], []),  # which says nothing to pytest
        (["a/pytest.ini"], ["a"], []),
        ([], ["a", "b"], []),
        (["a/setup.py"], ["a", "b"], ["--rootdir", "."]),
        (["a/pytest.ini", "pytest.ini"], ["a", "b"], ["-c", "pytest.ini", "--rootdir", "."]),
        (["a/pytest.ini", "pytest.ini"], ["a", "b", "-c", "pytest.ini"], []),
        (["a/pytest.ini", "pytest.ini"], ["a", "b", "--rootdir=."], ["-c", "pytest.ini"]),
        (["a/pytest.ini", "b/pytest.ini"], ["b", "a"], ["-c", "b/pytest.ini", "--rootdir", "b"]),
        (["a/pytest.ini"], [], ["-c", os.devnull, "--rootdir", "."]),
    ],
)
def test_the_command_has_the_runs_rootdir_and_ini_file(
    pytester: pytest.Pytester, files: list[str], asked: list[str], more: list[str]
) -> None:
    at(pytester.path, "a/test_a.py", "b/test_b.py", *files)
    item = next(item for item in pytester.inline_genitems("-p", "no:randomly", *asked)[0] if item.path.stem == "test_a")
    command = shlex.split(accepting.command(item))
    said = [word for word in asked if word not in ("a", "b")]
    assert command == ["pytest", "a/test_a.py::test_step", "-p", "no:randomly", *said, *more, SAVE]
    then = pytester.parseconfig(*command[1:])
    assert then.rootpath == item.config.rootpath
    assert then.inipath == item.config.inipath or os.devnull in command


def test_tests_of_an_installed_package_are_accepted_in_the_project_they_were_measured_for(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = "venv/lib/python3/site-packages"
    at(pytester.path, f"{packages}/shipped/__init__.py", f"{packages}/shipped/test_a.py", "project/pytest.ini")
    monkeypatch.syspath_prepend(pytester.path / packages)
    monkeypatch.chdir("project")
    command = accept_command(pytester, "--pyargs", "shipped")
    more = ["--pyargs", "-c", "pytest.ini", "--rootdir", ".", SAVE]
    assert command == ["pytest", f"../{packages}/shipped/test_a.py::test_step", "-p", "no:randomly", *more]
    assert pytester.parseconfig(*command[1:]).rootpath == pytester.path / "project"


@pytest.mark.parametrize("text", ["[pytest", "[pytest]\n"], ids=["no ini file", "as pytest is no more"])
def test_an_ini_file_that_cannot_be_read_is_passed_over(pytester: pytest.Pytester, text: str) -> None:
    at(pytester.path, "a/test_a.py", "b/test_b.py", "pytest.ini")
    (pytester.path / "a" / "setup.cfg").write_text(text)
    command = accept_command(pytester, "a", "b")
    assert command[4:] == ["-c", "pytest.ini", "--rootdir", ".", SAVE]
