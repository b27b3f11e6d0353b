"""Suspicions against a stored baseline, confirmed or not by the baseline's own code, in whole
runs."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.conftest import SMALL, Run
from tests.integration.test_against import STEP, Repository, git, repository
from tests.integration.test_collectives import SLOW
from tests.processes import descendants, gone, until

__all__ = ["repository"]
PROJECT = STEP + "from speed import MILLISECONDS\n"
# LASTS stands for the machine: it is read in a way that the plugin does not see.
TEST = """
def test_step(ddp_benchmark):
    ddp_benchmark(lambda ctx: lasting(ctx, MILLISECONDS * float(os.environ._data.get(b"LASTS", 1))))
"""
# seconds: what there is for it ends nowhere but where a test is about its end
CONFIRM = "--ddp-confirm=3600"
# Twice as long is beyond it, and still what the baseline's own code may take on a slower machine.
LIMIT = "--ddp-threshold=p50:60%"


@pytest.fixture
def project(
    repository: Repository, run: Run, monkeypatch: pytest.MonkeyPatch
) -> Repository:
    """A repository with a baseline, which was committed with its code."""
    monkeypatch.delenv("CI", raising=False)
    repository.write("tests/test_step.py", PROJECT, TEST)
    assert run("--ddp-save-baseline").ret == 0
    repository.commit()
    return repository


def test_slower_code_is_red_and_its_file_named(
    project: Repository, run: Run
) -> None:
    project.write("src/speed/__init__.py", "MILLISECONDS = 60\n")
    with project.untouched():
        result = run(CONFIRM, "--ddp-json=out/run.json")
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        [
            "REGRESSED: step time p50 5.00 -> 60.0 ms, 12.0x * (limit 300 %)",
            "why: *changed: python code/src/speed/__init__.py",
            "measured: 3 interleaved launches of each side; * with uncommitted changes",
            "accept: *",
            "*--ddp-save-baseline",
        ]
    )
    (measured,) = json.loads((project.root / "out/run.json").read_text())[
        "measurements"
    ]
    assert (
        measured["verdict"]["reason"],
        measured["stored_verdict"]["status"],
    ) == (
        "confirmed",
        "REGRESSED",
    )
    assert measured["baseline_side"]["version"]["commit"] == git(
        project.top, "rev-parse", "HEAD"
    ), "it has the baseline"
    assert [
        len(session["launch_seconds"]["p50"])
        for session in measured["sessions"]
    ] == [3], "of the baseline"
    assert (measured["file"], measured["level"]) == (
        "python code/tests/test_step.py",
        0.015,
    )


def test_what_looks_slower_within_the_limit_passes_with_both_figures(
    project: Repository, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LASTS", "1.5")  # +50 % of 60 %: more than half of it
    result = run(CONFIRM, LIMIT)
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        [
            (
                "test_step: p50 +50 % against the baseline: next to the baseline's own code it is"
                " not slower"
            ),
            "compared with *: 1 passed (1 of 1 compared)*",
        ]
    )


def test_a_variable_that_the_code_reads_is_red_and_named(
    repository: Repository, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value is not recorded, but a digest of it."""
    repository.write(
        "src/speed/__init__.py",
        "import os\n\nMILLISECONDS = 5 * float(os.environ.get('SPEED_N', '1'))\n",
    )
    repository.write("tests/test_step.py", PROJECT, TEST)
    repository.commit()
    assert run("--ddp-save-baseline").ret == 0
    repository.commit()
    monkeypatch.setenv("SPEED_N", "12")
    result = run(CONFIRM)
    assert result.ret == 1
    digest = hashlib.sha256(b"12").hexdigest()[:8]
    result.stdout.fnmatch_lines(
        [
            "REGRESSED: *",
            f"why: *SPEED_N unset -> digest {digest}",
            "note: *not confirmed *",
        ]
    )
    assert (
        '"read:SPEED_N": "unset"'
        in next(repository.root.glob("baselines/**/test_step.json")).read_text()
    )


def test_an_amended_commit_is_red_and_said_how_to_fetch(
    repository: Repository, run: Run
) -> None:
    repository.write("tests/test_step.py", PROJECT, TEST)
    commit = repository.commit()
    assert run("--ddp-save-baseline").ret == 0
    repository.write("src/speed/__init__.py", "MILLISECONDS = 60\n")
    git(repository.top, "add", "--all")
    git(repository.top, "commit", "--quiet", "--amend", "--no-edit")
    git(repository.top, "reflog", "expire", "--expire=now", "--all")
    git(repository.top, "gc", "--quiet", "--prune=now")
    result = run(CONFIRM)
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        [
            "REGRESSED: *",
            f"note:     not confirmed *: commit {commit[:12]} of the baseline is not in this clone",
            f"this clone does not have the code of some baselines: git fetch origin {commit}",
        ]
    )


def test_a_variable_that_a_conftest_sets_is_red_and_the_file_named(
    project: Repository, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LASTS", "1")  # which nobody records
    project.write(
        "tests/conftest.py", "import os\nos.environ['LASTS'] = '12'\n"
    )
    with project.untouched():
        result = run(CONFIRM)
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        [
            "REGRESSED: step time p50 *",
            "note:     changed, but not used by any rank: python code/tests/conftest.py",
        ]
    )


def test_an_ini_file_that_is_named_by_its_whole_path_is_each_sides_own(
    repository: Repository, run: Run
) -> None:
    ini = "[pytest]\npythonpath = src\naddopts = -p no:cacheprovider\nlasts = {}\n"
    repository.write(
        "conftest.py",
        "def pytest_addoption(parser): parser.addini('lasts', 'milliseconds')\n",
    )
    test = "(ddp_benchmark, pytestconfig):\n    lasts = float(pytestconfig.getini('lasts'))"
    test = TEST.replace("(ddp_benchmark):", test).replace(
        'MILLISECONDS * float(os.environ._data.get(b"LASTS", 1))', "lasts"
    )
    repository.write("tests/test_step.py", PROJECT, test)
    repository.write("ci.ini", ini.format(5))
    repository.commit()
    named = (
        f"--config-file={repository.root / 'ci.ini'}",
        f"--rootdir={repository.root}",
    )
    assert run("--ddp-save-baseline", *named).ret == 0
    repository.write("ci.ini", ini.format(60))
    result = run(CONFIRM, *named)
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        ["REGRESSED: step time p50 5.00 -> 60.0 ms, 12.0x *"]
    )


def test_an_option_of_the_users_own_is_red_and_named(
    repository: Repository, run: Run
) -> None:
    conftest = (
        "def pytest_addoption(parser):\n    parser.addoption('--lasts', type=float, "
        "default=1)\n"
    )
    repository.write("tests/conftest.py", conftest)
    test = TEST.replace(
        "(ddp_benchmark):",
        "(ddp_benchmark, request):\n    lasts = request.config.getoption('lasts')",
    )
    repository.write(
        "tests/test_step.py",
        PROJECT,
        test.replace('float(os.environ._data.get(b"LASTS", 1))', "lasts"),
    )
    assert run("--ddp-save-baseline", "tests").ret == 0
    repository.commit()
    assert run(CONFIRM, "tests").ret == 0
    repository.write(
        "pytest.ini",
        "[pytest]\npythonpath = src\naddopts = -p no:cacheprovider --lasts 2\n",
    )
    with repository.untouched():
        result = run(CONFIRM, LIMIT, "tests")
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        [
            "REGRESSED: step time p50 *",
            (
                "note:     not confirmed with the baseline's own code: *; what else differs:"
                " --lasts 1* -> 2.0"
            ),
        ]
    )


def test_another_version_of_a_package_that_the_step_imports_is_red_and_named(
    repository: Repository,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Both sides run what is installed, so the same code is not slower in turns."""
    before, after = (
        installed(tmp_path / version, version, milliseconds)
        for version, milliseconds in (("1.0", 5), ("1.1", 10))
    )
    test = TEST.replace(
        "MILLISECONDS *", "__import__('slowkernels').MILLISECONDS *"
    )
    repository.write("tests/test_step.py", PROJECT, test)
    with monkeypatch.context() as patched:
        patched.syspath_prepend(before)
        assert run("--ddp-save-baseline").ret == 0
    repository.commit()
    with monkeypatch.context() as patched, repository.untouched():
        patched.syspath_prepend(after)
        result = run(CONFIRM, LIMIT)
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        [
            "REGRESSED: step time p50 *",
            (
                "note:     not confirmed with the baseline's own code: *; what else differs:"
                " slowkernels 1.0 -> 1.1"
            ),
        ]
    )


def installed(folder: Path, version: str, milliseconds: int) -> Path:
    """Make a folder of packages with this version of one, as pip does from a wheel."""
    name = f"slowkernels-{version}"
    files = {
        "slowkernels.py": f"MILLISECONDS = {milliseconds}\n",
        f"{name}.dist-info/METADATA": (
            f"Metadata-Version: 2.1\nName: slowkernels\nVersion: {version}\n"
        ),
    }
    files[f"{name}.dist-info/RECORD"] = "".join(
        f"{file},{hashed(text)}\n" for file, text in files.items()
    )
    for file, text in files.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text)
    return folder


def hashed(text: str) -> str:
    """Hash and size, as a wheel's RECORD has them."""
    digest = base64.urlsafe_b64encode(
        hashlib.sha256(text.encode()).digest()
    ).decode()
    return f"sha256={digest.rstrip('=')},{len(text)}"


def test_a_test_that_changed_is_named_as_such(
    project: Repository, run: Run
) -> None:
    project.write(
        "tests/test_step.py",
        PROJECT,
        TEST.replace("MILLISECONDS *", "12 * MILLISECONDS *"),
    )
    result = run(CONFIRM)
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        [
            "why: *changed: python code/tests/test_step.py",
            "note:     only test files differ: the test itself changed",
        ]
    )


def test_without_the_baselines_code_the_stored_rule_decides_and_says_why(
    repository: Repository, run: Run
) -> None:
    """Recorded with code that was never committed."""
    repository.write("tests/test_step.py", PROJECT, TEST)
    repository.commit()
    repository.write("src/speed/__init__.py", "MILLISECONDS = 5.0\n")
    assert run("--ddp-save-baseline").ret == 0
    repository.write("src/speed/__init__.py", "MILLISECONDS = 60\n")
    result = run(CONFIRM)
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        [
            "REGRESSED: *",
            "measured: 6 launches now, 3 in the baseline (*)",
            (
                "note:     not confirmed with the baseline's own code: * recorded with files that"
                " are in no commit"
            ),
        ]
    )


def faster_then(repository: Repository) -> None:
    """Let the stored figures be those of a machine twice as fast."""
    for path in (repository.root / "baselines").rglob("*.json"):
        stored = json.loads(path.read_text())
        for session in stored["sessions"]:
            samples = session["measurement"]["samples"]
            samples["step_seconds"] = [
                [step / 2 for step in launch]
                for launch in samples["step_seconds"]
            ]
        del stored["checksum"]
        path.write_text(json.dumps(stored))


def test_parameters_methods_rpc_and_collectives_are_confirmed_likewise(
    repository: Repository, run: Run
) -> None:
    repository.write("src/slow.py", SLOW)
    repository.write(
        "tests/test_step.py",
        PROJECT,
        """
        class TestSizes:
            @pytest.mark.parametrize("size", [1, "a/b [c]"])
            def test_step(self, ddp_benchmark, size):
                ddp_benchmark(lasting)

        def test_rpc(rpc_benchmark):
            rpc_benchmark(lasting)

        def test_collective(collective_benchmark):
            collective_benchmark("all_reduce", sizes=(1024,))
        """,
    )
    options = (
        "--ddp-trainers=1",
        "--ddp-parameter-servers=1",
        "--ddp-preload=slow",
    )
    assert run("--ddp-save-baseline", *options).ret == 0
    faster_then(repository)
    repository.commit()
    with repository.untouched():
        result = run(CONFIRM, LIMIT, *options)
    assert result.ret == 0
    line = "*4 tests (test_step?1?, test_step?a/b ?c??, test_rpc, ...): * the machine is slower: *"
    result.stdout.fnmatch_lines([line])


def test_code_that_cannot_be_collected_or_run_today_confirms_nothing_and_is_told_in_its_own_words(
    repository: Repository, run: Run
) -> None:
    """Both need something that a checkout lacks."""
    built = (
        "import speed\nif 'ddpperf-against' in speed.__file__:\n    raise RuntimeError('not"
        " built')\n"
    )
    repository.write("tests/test_step.py", PROJECT, TEST, "\n", built)
    in_rank = TEST.replace(
        "lambda ctx:",
        "lambda ctx: 'ddpperf-against' in speed.__file__ and 1 / 0 or",
    )
    repository.write("tests/test_run.py", PROJECT, "import speed\n", in_rank)
    assert run("--ddp-save-baseline").ret == 0
    faster_then(repository)
    repository.commit()
    with repository.untouched():
        result = run(CONFIRM, LIMIT)
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        [
            (
                "note:     not confirmed with the baseline's own code: *ZeroDivisionError: division"
                " by zero"
            ),
            "note:     not confirmed with the baseline's own code: *RuntimeError: not built",
            "compared with *: 2 regressed (2 of 2 compared)*",
        ]
    )


def test_ctrl_c_while_a_suspicion_is_confirmed_leaves_nothing(
    repository: Repository, run: Run
) -> None:
    hanging = TEST.replace(
        "lambda ctx:",
        "lambda ctx: 'ddpperf-against' in speed.__file__ and hang() or",
    )
    hang = """
        def hang():
            open(os.environ["HANGS"], "w").close()
            time.sleep(3600)
        """
    repository.write(
        "tests/test_step.py", PROJECT, "import speed\n", hang, hanging
    )
    marker = repository.top.parent / "hangs"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:randomly",
        "-p",
        "no:benchmark",
        *SMALL,
        CONFIRM,
        LIMIT,
    ]
    environ = {**os.environ, "HANGS": str(marker)}
    assert run("--ddp-save-baseline").ret == 0
    faster_then(repository)
    repository.commit()
    with repository.untouched():
        process = subprocess.Popen(
            command, env=environ, stdout=subprocess.DEVNULL
        )
        try:
            until(marker.exists)
            below = descendants(process.pid)
            process.send_signal(signal.SIGINT)
            assert process.wait(600) == 2
            until(lambda: gone(below))
        finally:
            process.kill()
            process.wait()


def test_what_cannot_be_confirmed_says_why(
    project: Repository, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LASTS", "12")
    result = run("--ddp-confirm=0.001")
    assert result.ret == 1
    left = "it takes about * s, and 0 of the 0.001 s of --ddp-confirm are left: raise it"
    result.stdout.fnmatch_lines([f"note:     not confirmed with *: {left}"])


def test_saving_says_when_no_commit_will_have_the_code(
    repository: Repository, run: Run
) -> None:
    (repository.top / ".gitignore").write_text("__pycache__\nout\nmade.py\n")
    repository.write("src/speed/made.py", "MILLISECONDS = 5\n")
    repository.write(
        "tests/test_step.py",
        PROJECT.replace("from speed import", "from speed.made import"),
        TEST,
    )
    result = run("--ddp-save-baseline")
    result.stdout.fnmatch_lines(
        [
            "a later run cannot measure the code *: git ignores files that ranks imported:"
            " *made.py: ddp_against_setup *"
        ]
    )
    assert (
        "a later run"
        not in run(
            "--ddp-save-baseline", "-o", "ddp_against_setup=make"
        ).stdout.str()
    )
