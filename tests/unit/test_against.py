"""Another version beside the code at hand: what its pytest is told, its worktree, whether it is
another at all."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from pytest_ddpperf.git import worktrees
from pytest_ddpperf.launch import placement, template
from pytest_ddpperf.launch.template import Templates
from pytest_ddpperf.records.errors import AgainstError, BaseSideError, GitError
from pytest_ddpperf.records.messages import (
    MeasureAs,
    ReadyToMeasure,
    ServeVersion,
    Sources,
)
from pytest_ddpperf.records.plan import Plan
from pytest_ddpperf.remote import process
from pytest_ddpperf.remote import version as side
from pytest_ddpperf.remote import worktree as folder_module
from pytest_ddpperf.remote.node_pytests import NodePytests
from pytest_ddpperf.remote.version import (
    BaseSide,
    Invocation,
    nothing_differs,
    remote_arguments,
)
from pytest_ddpperf.remote.worktree import Checkout, Worktree, sources_here
from pytest_ddpperf.wire.source_trees import Trees
from tests.git import git
from tests.processes import descendants, ended, gone, until
from tests.unit.test_git import commit
from tests.unit.test_machine import settings

# --- arguments


@pytest.mark.parametrize(
    "dropped",
    [
        "--ddp-save-baseline",
        "--ddp-extend-baseline",
        "--ddp-disable",
        "-x",
        "--exitfirst",
        "--lf",
        "--last-failed",
        "--ff",
        "--failed-first",
        "--nf",
        "--new-first",
        "--sw",
        "--stepwise",
        "--sw-skip",
        "--stepwise-skip",
        "--sw-reset",
        "--cache-clear",
        "--pdb",
        "--trace",
        "--no-cov",
        "--no-cov-on-fail",
        "--collect-only",
        "--co",
        "--cov-append",
        "--cov-branch",
        "--benchmark-autosave",
        "--benchmark-save-data",
        "--json-report",
        "--self-contained-html",
    ],
)
def test_a_flag_that_writes_selects_or_is_ours_is_dropped_by_itself(
    dropped: str,
) -> None:
    assert remote_arguments(["-v", dropped, "tests", dropped], ["tests"]) == [
        "-v",
        "tests",
    ]


@pytest.mark.parametrize(
    "option",
    [
        "--ddp-json",
        "--ddp-against",
        "--ddp-against-setup",
        "--ddp-against-python",
        "--ddp-against-env",
        "--ddp-confirm",
        "--ddp-reason",
        "--ddp-trace",
        "--ddp-suite-plots",
        "--ddp-markdown",
        "--ddp-html",
        "--ddp-against-option",
        "--junitxml",
        "--junit-xml",
        "--junitprefix",
        "--junit-prefix",
        "--basetemp",
        "--maxfail",
        "--lfnf",
        "--last-failed-no-failures",
        "--pastebin",
        "--log-file",
        "--report-log",
        "--html",
        "--csv",
        "--json-report-file",
        "--alluredir",
        "--benchmark-json",
        "--benchmark-save",
        "--benchmark-compare-fail",
        "--cov-report",
        "--cov-config",
        "--cov-fail-under",
        "--cov-context",
    ],
)
def test_an_option_that_writes_selects_or_is_ours_is_dropped_with_its_value(
    option: str,
) -> None:
    assert remote_arguments(["-v", option, "value", "tests"], ["tests"]) == [
        "-v",
        "tests",
    ]
    assert remote_arguments(["-v", f"{option}=value", "tests"], ["tests"]) == [
        "-v",
        "tests",
    ]
    assert remote_arguments(["-v", f"{option}=", "tests"], ["tests"]) == [
        "-v",
        "tests",
    ]
    assert remote_arguments(["tests", option, "--bucket-mb 1"], ["tests"]) == [
        "tests"
    ], "a value may look like an option"
    assert remote_arguments(["tests", option], ["tests"]) == ["tests"]


@pytest.mark.parametrize(
    ("given", "left"),
    [
        (["-xvs"], ["-vs"]),
        (["-vx"], ["-v"]),
        (["-sxq"], ["-sq"]),
        (["-xx"], []),
        (["-vv"], ["-vv"]),
        (["-rx"], ["-rx"]),  # a report of expected failures
        (["-rxX"], ["-rxX"]),
        (["-kx"], ["-kx"]),
        (["-mx"], ["-mx"]),
        (["-k", "x"], ["-k", "x"]),
    ],
)
def test_stopping_at_the_first_failure_is_taken_out_of_joined_flags(
    given: list[str], left: list[str]
) -> None:
    assert remote_arguments([*given, "tests"], ["tests"]) == [*left, "tests"]


# --- whether two sides are two

SOURCES = Sources(
    python="3.11.7", prefix="/venv", files={"src/a.py": "1", "src/b.py": "2"}
)


def test_what_is_the_same_in_all_ways_does_not_differ() -> None:
    assert nothing_differs(SOURCES, SOURCES, {}, ())


def test_a_variable_differs_where_its_value_is_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SAME", "1")
    monkeypatch.delenv("UNSET", raising=False)
    assert nothing_differs(SOURCES, SOURCES, {"SAME": "1"}, ())
    for environ in (
        {"SAME": "2"},
        {"SAME": ""},
        {"UNSET": ""},
        {"SAME": "1", "UNSET": "1"},
    ):
        assert not nothing_differs(SOURCES, SOURCES, environ, ())


def test_an_option_always_differs() -> None:
    assert not nothing_differs(SOURCES, SOURCES, {}, ("--bucket-mb", "1"))


@pytest.mark.parametrize(
    ("changed", "is_nothing"),
    [
        ("README.md", True),
        ("src/notes.rst", True),
        ("docs/a.txt", True),
        (".github/workflows/ci.yml", True),
        ("tests/test_new.py", True),
        ("tests/deep/data.bin", True),
        ("baselines/cpu x2/tests.test_a/test_step.json", True),
        ("baselines/sizes.json", False),  # the code's own, perhaps
        ("baselines/cpu x2/tests.test_a/step.py", False),
        ("other/cpu x2/tests.test_a/test_step.json", False),
        ("src/later.py", False),
        ("src/x.so", False),
        ("conf.yaml", False),
        ("src/op.cu", False),
        ("requirements.txt", False),
        ("src/docs/vocabulary.txt", False),
        ("docs/conf.py", False),
        ("docs.txt", False),
        (".env", False),
        ("Makefile", False),
        ("ignored.py", False),  # the other version would lack it
        ("_version.py", True),  # which git ignores, too
    ],
)
def test_nothing_is_to_be_compared_if_only_documentation_or_tests_differ(
    top: Path, changed: str, is_nothing: bool
) -> None:
    (top / ".gitignore").write_text("ignored.py\n_version.py\nignored data\n")
    commit(top)
    for file in ("ignored data/x.py", "docs/b.md", changed):
        (top / file).parent.mkdir(parents=True, exist_ok=True)
        (top / file).write_text("changed")
    said = nothing_to_compare(top, against="main")
    if is_nothing:
        assert said.startswith("nothing differs from main (")
        assert ") but docs/b.md" in said or f") but {changed}" in said
        assert said.endswith(": nothing to compare")
    else:
        assert said == ""


def nothing_to_compare(top: Path, **asked: Any) -> str:
    kept = (f"{top}/tests",)
    with_baselines = settings(baseline_dir=top / "baselines", **asked)
    return Checkout(with_baselines, top, kept).nothing_to_compare()


@pytest.mark.parametrize(
    "asked",
    [
        {"against_env": ("A=1",)},
        {"against_option": ("-v",)},
        {"against_python": sys.executable},
        {"against_setup": "make"},
        {"against": "self"},
    ],
)
def test_what_is_not_in_git_may_differ_where_it_is_asked_for(
    top: Path, asked: dict[str, Any]
) -> None:
    assert nothing_to_compare(top, **{"against": "HEAD", **asked}) == ""
    head = git(top, "rev-parse", "HEAD")[:7]
    assert (
        nothing_to_compare(top, against="HEAD")
        == f"nothing differs from HEAD ({head}): nothing to compare"
    )


@pytest.mark.parametrize("how", ["--assume-unchanged", "--skip-worktree"])
def test_a_file_that_git_shall_not_look_at_differs_if_it_does(
    top: Path, how: str
) -> None:
    git(top, "update-index", how, "src/a.py")
    assert nothing_to_compare(top, against="HEAD")
    (top / "src/a.py").write_text("slower")
    with untouched(top):
        assert nothing_to_compare(top, against="HEAD") == ""


def test_the_sources_of_this_process_are_its_interpreter_and_the_files_of_a_tree() -> (
    None
):
    top = os.path.realpath(Path(__file__).parents[2])
    here = sources_here(
        Trees(current=top, base=top, kept=(os.path.join(top, "tests"),))
    )
    assert (here.python, here.prefix) == (
        sys.version.split()[0],
        os.path.realpath(sys.prefix),
    )
    assert "conftest.py" in here.files
    assert all(here.files.values())
    assert not [file for file in here.files if file.startswith("tests/")]


# --- its process


def test_a_node_has_as_long_to_check_out_as_its_leader(
    top: Path, tmp_path: Path
) -> None:
    invocation = Invocation(
        arguments=(),
        tests=(),
        folder=top,
        rootdir=top,
        caches=False,
        kept=(),
    )
    own = NodePytests(
        settings(), invocation, {"node": 1}, tmp_path, MagicMock()
    )
    order = ServeVersion(
        commit=git(top, "rev-parse", "v1"),
        kept=(),
        own_tests=True,
        seconds=0.0,
    )
    with ExitStack() as closing:
        start = own._prepare(order, closing)
        with pytest.raises(
            BaseSideError, match="git did not answer within 0 s"
        ):
            start(())


@pytest.mark.parametrize(
    ("there", "here", "problem"),
    [
        ((4, 2), (4, 2), ""),
        ((4, 1), (8, 1), ""),
        ((4, 2), (8, 2), "there the test has 4 ranks on 2 nodes, here 8 ranks"),
        (
            (4, 1),
            (4, 2),
            "there the test has one node, here 4 ranks on 2 nodes",
        ),
    ],
)
def test_a_baselines_own_test_has_the_ranks_of_each_node_that_the_current_one_has(
    there: tuple[int, int], here: tuple[int, int], problem: str
) -> None:
    plan, own = (
        Plan(world_size=ranks, nodes=nodes, backend="gloo", device="cpu")
        for ranks, nodes in (here, there)
    )
    base: Any = object.__new__(BaseSide)
    base._invocation = MagicMock(own_tests=True)
    base._passed_over = set()
    base.tests, base.remote_pytest = MagicMock(), MagicMock()
    base.tests.receive.return_value = ReadyToMeasure(label="", plan=own)
    if problem:
        with pytest.raises(BaseSideError, match=problem):
            base.begin("test_a.py::test_a", "", plan)
    else:
        ready = base.begin("test_a.py::test_a", "", plan)
        base.remote_pytest.send.assert_called_once_with(MeasureAs(ready.plan))
        assert ready.plan.world_size == plan.world_size


def test_interpreters_that_a_step_starts_find_the_versions_own_code(
    top: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the folders that an editable install adds to sys.path, not by those of pytest."""
    search_path = ["", str(top / "src"), "/lib"]
    monkeypatch.setattr(
        folder_module, "search_path_of_new", lambda: search_path
    )
    monkeypatch.chdir(top)  # which an empty entry means
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(["/elsewhere", "", str(top / "tests")])
    )
    given: list[dict[str, str]] = []

    def start(
        name: str,
        python: str,
        environ: dict[str, str],
        folder: Path,
        descriptors: list[int],
    ) -> None:
        given.append(environ)
        raise OSError("it is not started")

    monkeypatch.setattr(side, "RemotePytest", start)
    invocation = Invocation(
        arguments=(),
        tests=(),
        folder=top,
        rootdir=top,
        caches=False,
        kept=(),
        sys_path=["", str(top / "src"), str(top / "other"), "/lib"],
    )
    monkeypatch.setattr(template, "Template", MagicMock())
    base = BaseSide(settings(against="v1"), invocation, Templates())
    try:
        with pytest.raises(AgainstError, match="it is not started"):
            base.start()
        tree = base.tree.base
    finally:
        base.close()
    assert [environ["PYTHONPATH"].split(os.pathsep) for environ in given] == [
        ["/elsewhere", "", f"{tree}/tests", f"{tree}/src"]
    ]


@pytest.mark.parametrize(
    ("conftest", "arguments", "said", "lacks"),
    [
        ("import no_such_module", [], "No module named 'no_such_module'", True),
        (
            "",
            ["--no-such-option"],
            "unrecognized arguments: --no-such-option",
            False,
        ),
    ],
)
def test_a_conftest_that_cannot_be_loaded_there_is_told_from_other_ends(
    tmp_path: Path, conftest: str, arguments: list[str], said: str, lacks: bool
) -> None:
    """Each test reports that the version lacks its code; an option would be a mistake."""
    (tmp_path / "conftest.py").write_text(conftest)
    called = Invocation(
        arguments=(),
        tests=(),
        folder=tmp_path,
        rootdir=tmp_path,
        caches=False,
        kept=(),
    )
    trees = Trees(current=str(tmp_path), base=str(tmp_path), kept=())
    remote_pytest = process.RemotePytest(
        "v1", sys.executable, os.environ, tmp_path
    )
    try:
        remote_pytest.send(called.start(trees, arguments, tmp_path))
        tests = process.Tests(remote_pytest, 60.0)
        tests.hello(60.0)
        with pytest.raises(BaseSideError, match=f"v1 died: [^$]*{said}"):
            tests.collect(60.0)
    finally:
        remote_pytest.close()
    assert tests.lacks_conftest is lacks


@pytest.mark.skipif(not placement.usable_cores(), reason="no core is bound")
def test_another_version_has_the_cores_that_pytest_began_with(
    tmp_path: Path,
) -> None:
    """A conftest or a test may have bound pytest, and so what it starts, to fewer."""
    core = placement.usable_cores()[0]
    called = Invocation(
        arguments=(),
        tests=(),
        folder=tmp_path,
        rootdir=tmp_path,
        caches=False,
        kept=(),
        cores=(core,),
    )
    trees = Trees(current=str(tmp_path), base=str(tmp_path), kept=())
    remote_pytest = process.RemotePytest(
        "v1", sys.executable, os.environ, tmp_path
    )
    try:
        remote_pytest.send(called.start(trees, [], tmp_path))
        pid = remote_pytest._child.process.pid
        until(lambda: os.sched_getaffinity(pid) == {core})
    finally:
        remote_pytest.close()


@pytest.mark.parametrize(
    ("asked", "shares"),
    [
        ({}, True),
        ({"against_env": ("GOMP_SPINCOUNT=0",)}, False),
        ({"against_python": sys.executable}, False),
    ],
)
def test_only_a_side_with_the_same_interpreter_and_variables_shares_our_template(
    top: Path,
    monkeypatch: pytest.MonkeyPatch,
    asked: dict[str, Any],
    shares: bool,
) -> None:
    """Libraries read variables when they are loaded, of which only some are known by name."""
    shared: list[bool] = []

    def start(
        name: str,
        python: str,
        environ: dict[str, str],
        folder: Path,
        descriptors: Sequence[int] = (),
    ) -> None:
        shared.append(bool(descriptors))
        raise OSError("it is not started")

    monkeypatch.setattr(side, "RemotePytest", start)
    monkeypatch.setattr(template, "Template", MagicMock())
    invocation = Invocation(
        arguments=(), tests=(), folder=top, rootdir=top, caches=False, kept=()
    )
    base = BaseSide(settings(against="v1", **asked), invocation, Templates())
    try:
        with pytest.raises(AgainstError, match="it is not started"):
            base.start()
    finally:
        base.close()
    assert shared == [shares]


# --- the worktree


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, empty."""
    folder = tmp_path / "temporary files"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


@pytest.fixture
def top(tmp_path: Path, temporary: Path) -> Path:
    """A repository of two commits, the first with the tag v1."""
    top = tmp_path / "a repo"
    commit(top, src__a="1", tests__test_a="1")
    git(top, "tag", "v1")
    commit(top, src__a="2", tests__test_a="2")
    return top


def contents(folder: Path) -> dict[str, bytes | None]:
    """All files and folders below one, and what the files hold."""
    return {
        str(path): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


@contextmanager
def untouched(top: Path) -> Iterator[None]:
    before = contents(top)
    yield
    after = contents(top)
    assert after.keys() == before.keys()
    assert [path for path in before if before[path] != after[path]] == []


def test_a_worktree_has_the_commit_and_is_gone_again(
    top: Path, temporary: Path
) -> None:
    (top / "src/a.py").write_text("uncommitted")
    git(top, "add", "--all")
    (top / "src/a.py").write_text("not even staged")
    with untouched(top):
        worktree = Worktree(top, git(top, "rev-parse", "v1"))
        assert (worktree.tree / "src/a.py").read_text() == "1"
        assert worktree.tree.is_relative_to(temporary)
        assert (
            git(worktree.tree, "rev-parse", "--abbrev-ref", "HEAD") == "HEAD"
        ), "no branch"
        assert worktrees(top) == [top, worktree.tree]
        (worktree.tree / "built.so").touch()
        git(worktree.tree, "worktree", "lock", worktree.tree)
        worktree.remove()
        assert worktrees(top) == [top]
        assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("by", ["commit", "filter", "folder"])
def test_a_worktree_that_cannot_be_added_leaves_nothing(
    top: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    if by == "filter":  # which fails while files are written
        (top / ".gitattributes").write_text("*.py filter=broken\n")
        commit(top)
        git(top, "config", "filter.broken.smudge", "false")
        git(top, "config", "filter.broken.required", "true")
    if by == "folder":  # of a name that is taken, by a file
        (temporary / "file").touch()
        monkeypatch.setattr(tempfile, "tempdir", str(temporary / "file"))
    with untouched(top), pytest.raises(OSError if by == "folder" else GitError):
        Worktree(top, "0" * 40 if by == "commit" else "main")
    assert worktrees(top) == [top]
    assert [path.name for path in temporary.iterdir()] == ["file"] * (
        by == "folder"
    )


def test_the_users_hooks_do_not_run(top: Path, tmp_path: Path) -> None:
    hook = tmp_path / "hooks/post-checkout"
    hook.parent.mkdir()
    hook.write_text(f"#!/bin/sh\ntouch '{tmp_path}/ran'\n")
    hook.chmod(0o755)
    shutil.copy(hook, top / ".git/hooks/post-checkout")
    for configured in (False, True):
        if configured:
            git(top, "config", "core.hooksPath", hook.parent)
        with untouched(top):
            Worktree(top, "v1").remove()
        assert not (tmp_path / "ran").exists()
    git(top, "worktree", "add", "--quiet", "--detach", tmp_path / "mine")
    assert (tmp_path / "ran").exists(), "it would have run"


HOLDER = """
import sys
from pathlib import Path
from pytest_ddpperf.remote.worktree import Worktree
worktree = Worktree(Path(sys.argv[1]), "v1")
print(worktree.tree, flush=True)
sys.stdin.read()
worktree.remove()
"""


@contextmanager
def another_run(top: Path) -> Iterator[subprocess.Popen[str]]:
    """It has a worktree until its input ends."""
    command = [sys.executable, "-c", HOLDER, str(top)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            stream.close()


def worktree_of(process: subprocess.Popen[str]) -> Path:
    assert process.stdout is not None
    return Path(process.stdout.readline().removesuffix("\n"))


@pytest.mark.skipif(
    not Path("/proc/locks").exists(),
    reason="who waits for a lock is told by Linux only",
)
def test_runs_in_one_repository_add_and_remove_worktrees_one_after_the_other(
    top: Path,
) -> None:
    holder = os.open(top / ".git", os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    with untouched(top), another_run(top) as process:
        await_lock(process)
        assert worktrees(top) == [top]
        os.close(holder)
        path = worktree_of(process)
        assert worktrees(top) == [top, path]
        holder = os.open(top / ".git", os.O_RDONLY)
        fcntl.flock(holder, fcntl.LOCK_EX)
        assert process.stdin is not None
        process.stdin.close()
        await_lock(process)
        assert worktrees(top) == [top, path]
        os.close(holder)
        assert process.wait(60) == 0
        assert worktrees(top) == [top]


def await_lock(process: subprocess.Popen[str]) -> None:
    """Until it waits for one."""
    deadline = time.monotonic() + 60
    while not re.search(
        rf"-> FLOCK .* {process.pid} ", Path("/proc/locks").read_text()
    ):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)


@pytest.mark.parametrize("is_locked", [False, True])
def test_the_next_run_lets_git_forget_a_worktree_of_a_killed_one(
    top: Path, temporary: Path, is_locked: bool
) -> None:
    with untouched(top):
        killed, alive = Worktree(top, "v1"), Worktree(top, "v1")
        if is_locked:
            git(top, "worktree", "lock", killed.tree)
        shutil.rmtree(killed.path)
        worktree = Worktree(top, "v1")
        assert set(worktrees(top)) == {top, alive.tree, worktree.tree}
        worktree.remove()
        alive.remove()


# It stops before git is called, while git checks out, or when all is there.
KILLED = """
import sys, time
from pathlib import Path
from pytest_ddpperf.remote import worktree
top, phase, reached = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])

def stop(*_):
    reached.touch()
    time.sleep(600)

if phase == "folder":
    worktree._alone = stop
worktree.Worktree(top, "v1")
stop()
"""


@pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="needs the start of a process"
)
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("phase", ["folder", "checkout", "set-up"])
def test_the_next_run_removes_what_a_killed_one_left_in_any_phase(
    top: Path,
    temporary: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    phase: str,
    signum: signal.Signals,
) -> None:
    reached = tmp_path / "reached"
    if phase == "checkout":
        (top / ".git/info").mkdir(exist_ok=True)
        (top / ".git/info/attributes").write_text("*.py filter=slow\n")
        slow = f"cat; [ -e '{reached}-no' ] || (touch '{reached}'; sleep 600)"
        git(top, "config", "filter.slow.smudge", slow)
    with untouched(top):
        command = [sys.executable, "-c", KILLED, top, phase, reached]
        started = subprocess.Popen(command)
        with ended(started) as process:
            until(reached.exists)
            below = descendants(process.pid)
            process.send_signal(signum)
            process.wait(60)
            for pid in below:  # git, and what it started
                os.kill(pid, signal.SIGKILL)
            until(lambda: gone(below))
        (left,) = temporary.iterdir()
        assert left.name.startswith(folder_module._PREFIX)
        Path(f"{reached}-no").touch()
        # the next run may have another folder for temporary files
        if signum == signal.SIGTERM and phase != "folder":
            (tmp_path / "other").mkdir()
            monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "other"))
        worktree = Worktree(top, "v1")
        assert not left.exists()
        assert worktrees(top) == [top, worktree.tree]
        worktree.remove()


def test_a_folder_is_abandoned_only_if_its_owner_is_gone(
    temporary: Path,
) -> None:
    prefix = folder_module._own_prefix()
    pid, start = os.getpid(), folder_module._start_of(os.getpid())
    names = {
        f"{prefix}{pid}-{start}-abc": False,
        f"{prefix}1-{folder_module._start_of(1)}-abc": False,
        f"{prefix}{pid}-1-abc": True,
        f"{prefix}99999999-1-abc": True,
        f"{prefix}alive": False,
        f"{prefix}{10**30}-1-abc": False,
        f"{folder_module._PREFIX}000000-99999999-1-abc": False,
    }
    for name, is_abandoned in names.items():
        assert folder_module._is_abandoned(temporary / name) is is_abandoned


def test_worktrees_of_the_users_stay_those_that_are_gone_too(
    top: Path, tmp_path: Path, temporary: Path
) -> None:
    mine, gone, here = (
        tmp_path / "my own",
        tmp_path / "gone",
        temporary / "mine",
    )
    # another's, with a folder of its own
    containers = temporary / f"{folder_module._PREFIX}000000-alive" / "a repo"
    for path in (mine, gone, here, containers):
        git(top, "worktree", "add", "--quiet", "--detach", path, "v1")
    shutil.rmtree(gone)
    shutil.rmtree(containers.parent)
    (mine / "src/a.py").write_text("work of mine")
    with untouched(top), untouched(mine), untouched(here):
        Worktree(top, "v1").remove()
    assert sorted(worktrees(top)) == sorted([top, mine, gone, here, containers])


# --- the version


def refusal(folder: Path, **asked: Any) -> tuple[str, str, str]:
    """Option, problem and remedy of what refuses a version."""
    with pytest.raises(AgainstError) as caught:
        Checkout(settings(**asked), folder, ()).check_out()
    return caught.value.option, caught.value.problem, caught.value.remedy


def test_a_ref_is_checked_out_beside_the_tree_at_hand(
    top: Path, temporary: Path
) -> None:
    first, second = git(top, "rev-parse", "v1"), git(top, "rev-parse", "main")
    kept = (f"{top}/tests",)
    with untouched(top):
        checkout = Checkout(settings(against="v1"), top, kept)
        assert (
            checkout.version.ref,
            checkout.version.commit,
            checkout.version.now,
        ) == ("v1", first, second)
        assert checkout.current_trees == Trees(
            current=str(top), base=str(top), kept=kept
        )
        assert list(temporary.iterdir()) == [], "nothing is checked out yet"
        trees = checkout.check_out()
        assert (trees.current, trees.kept) == (str(top), kept)
        assert Path(trees.base, "src/a.py").read_text() == "1"
        checkout.remove()
        checkout.remove()  # once more is no error
    assert list(temporary.iterdir()) == []


def test_the_version_gets_the_current_tests_and_ignored_data(
    top: Path, temporary: Path
) -> None:
    """No other conftest is there, and no ignored code."""
    (top / ".gitignore").write_text("data\n*.bin\n*.so\n")
    for file, text in {
        "data/train.csv": "1",
        "data/images/1.png": "6",
        "src/weights.bin": "2",
        "src/fast.so": "3",
        "tests/data.bin": "4",
        "tests/test_new.py": "5",
        "pytest.ini": "[pytest]",
        "src/a.py": "now",
    }.items():
        (top / file).parent.mkdir(parents=True, exist_ok=True)
        (top / file).write_text(text)
    (top / "data/linked").symlink_to(top / "data/images")
    (top / "src/conftest.py").write_text("")
    git(top, "add", "src/conftest.py")
    git(top, "commit", "-q", "-m", "a conftest")
    (top / "src/conftest.py").unlink()
    kept = (str(top / "pytest.ini"), str(top / "tests"))
    checkout = Checkout(settings(against="HEAD"), top, kept)
    try:
        tree = Path(checkout.check_out().base)
        walked = [[*os.walk(each)] for each in (top / "data", tree / "data")]
        found, linked = (
            [(sorted(folders), sorted(files)) for _, folders, files in each]
            for each in walked
        )
        assert found == linked
        assert (tree / "data/linked/1.png").read_text() == "6"
        assert (tree / "src/weights.bin").read_text() == "2"
        assert (tree / "tests/data.bin").read_text() == "4"
        assert (tree / "tests/test_new.py").read_text() == "5"
        assert (tree / "pytest.ini").exists()
        assert (tree / "src/a.py").read_text() == "2"
        assert not (tree / "src/fast.so").exists()
        assert not (tree / "src/conftest.py").exists()
    finally:
        checkout.remove()
    assert (top / "data/train.csv").read_text() == "1", "the data itself stays"
    own = Checkout(settings(against="HEAD"), top, (), own_tests=True)
    try:
        tree = Path(own.check_out().base)
        assert (tree / "data/train.csv").read_text() == "1"
        assert (tree / "src/conftest.py").exists()
        files = {
            "data/train.csv": "digest",
            "src/fast.so": "digest",
            "src/a.py": "digest",
            "gone.bin": "digest",
            # by the run itself
            "src/built.so": "",
            "src/run.bin": "",
        }
        (top / "src/built.so").touch()
        (top / "src/run.bin").touch()
        assert own.lacking(files) == ["src/fast.so", "src/built.so"]
    finally:
        own.remove()


def test_what_the_version_has_as_a_link_is_replaced_and_not_what_it_leads_to(
    top: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    for name in ("conftest.py", "test_b.py"):
        (outside / name).write_text("the user's")
    (top / "tests").mkdir(exist_ok=True)
    (top / "tests/conftest.py").unlink(missing_ok=True)
    (top / "tests/conftest.py").symlink_to(outside / "conftest.py")
    (top / "perf").symlink_to(outside)
    git(top, "add", "--all")
    git(top, "commit", "-q", "-m", "links")
    for name in ("tests/conftest.py", "perf"):
        (top / name).unlink()
    (top / "perf").mkdir()
    for name in ("tests/conftest.py", "perf/test_b.py"):
        (top / name).write_text("current")
    kept = (str(top / "tests/conftest.py"), str(top / "perf/test_b.py"))
    checkout = Checkout(settings(against="HEAD"), top, kept)
    try:
        tree = Path(checkout.check_out().base)
        for name in ("tests/conftest.py", "perf/test_b.py"):
            assert (tree / name).read_text() == "current"
    finally:
        checkout.remove()
    for file in outside.iterdir():
        assert file.read_text() == "the user's"


def test_a_folder_that_the_version_lacks_has_no_tests_of_its_own(
    top: Path, tmp_path: Path
) -> None:
    trees = Trees(current=str(top), base=str(tmp_path / "base"), kept=())
    called = Invocation(
        arguments=(),
        tests=(),
        folder=top / "tests",
        rootdir=top,
        caches=False,
        kept=(),
    )
    assert called.to_collect_own_tests(trees) is None
    (tmp_path / "base/tests").mkdir(parents=True)
    assert called.to_collect_own_tests(trees) is not None


def test_the_versions_pytest_is_called_in_its_tree(top: Path) -> None:
    trees = Trees(current=str(top), base="/t/base", kept=())
    called = Invocation(
        arguments=("-q", str(top / "tests/test_a.py"), "/outside/test_b.py"),
        tests=(),
        folder=top / "tests",
        rootdir=top,
        caches=False,
        kept=(),
        ini=top / "pytest.ini",
    )
    moved = [
        "-q",
        "/t/base/tests/test_a.py",
        "/outside/test_b.py",
        "--rootdir=/t/base/",
    ]
    assert called.arguments_in(trees) == [*moved, "-c", "/t/base/pytest.ini"]
    assert replace(called, own_tests=True).arguments_in(trees) == moved
    assert called.folder_in(trees) == Path("/t/base/tests")
    assert called.arguments_in(replace(trees, base=trees.current)) == list(
        called.arguments
    )


INI = "{top}/ci.ini"
MOVED = "/t/base/ci.ini"


@pytest.mark.parametrize(
    ("folder", "given", "moved"),
    [
        ("", ["-c", INI], ["-c", MOVED]),
        ("", [f"-c{INI}"], [f"-c{MOVED}"]),
        (
            "",
            ["--config-file", INI, "--rootdir", "{top}"],
            ["--config-file", MOVED, "--rootdir", "/t/base/"],
        ),
        (
            "",
            [f"--config-file={INI}", "--rootdir={top}"],
            [f"--config-file={MOVED}", "--rootdir=/t/base/"],
        ),
        (
            "",
            ["--confcutdir={top}/tests", "--ignore={top}/a"],
            ["--confcutdir=/t/base/tests", "--ignore=/t/base/a"],
        ),
        ("", ["--data={top}/data"], ["--data=/t/base/data"]),
        ("", ["-o", "pythonpath={top}/src"], ["-o", "pythonpath=/t/base/src"]),
        (
            "",
            ["-c", "/outside/ci.ini", "--data=/outside"],
            ["-c", "/outside/ci.ini", "--data=/outside"],
        ),
        # In the repository a relative path leads into the version's tree by itself.
        (
            "tests",
            ["-c", "../ci.ini", "--rootdir=..", "test_a.py"],
            ["-c", "../ci.ini", "--rootdir=..", "test_a.py"],
        ),
        (
            "tests",
            ["-c../ci.ini", "--ignore", "old"],
            ["-c../ci.ini", "--ignore", "old"],
        ),
        ("tests", ["-c", "../../ci.ini"], ["-c", "{top}/tests/../../ci.ini"]),
        (
            "..",
            [
                "-c{name}/ci.ini",
                "--rootdir={name}",
                "{name}/tests/test_a.py",
                "-k",
                "{name}",
            ],
            [
                f"-c{MOVED}",
                "--rootdir=/t/base/",
                "/t/base/tests/test_a.py",
                "-k",
                "{name}",
            ],
        ),
        (
            "..",
            ["--config-file", "{name}/ci.ini", "other/test_a.py"],
            ["--config-file", MOVED, "other/test_a.py"],
        ),
    ],
)
def test_paths_into_the_repository_lead_into_the_versions_tree(
    top: Path, folder: str, given: list[str], moved: list[str]
) -> None:
    def filled(words: list[str]) -> tuple[str, ...]:
        return tuple(word.format(top=top, name=top.name) for word in words)

    called = Invocation(
        arguments=filled(given),
        tests=tuple(
            f"{word}::test_a"
            for word in filled(given)
            if word.endswith("test_a.py")
        ),
        folder=Path(os.path.normpath(top / folder)),
        rootdir=top,
        caches=False,
        kept=(),
        own_tests=True,
    )
    trees = Trees(current=str(top), base="/t/base", kept=())
    assert called.arguments_in(trees) == [*filled(moved), "--rootdir=/t/base/"]


@pytest.mark.parametrize(
    "asked",
    [
        {"against": "self"},
        {"against_env": ("A=1", "B=x=y", "C=")},
        {"against_option": ("--bucket-mb", "1")},
    ],
)
def test_without_another_ref_there_is_one_tree(
    top: Path, tmp_path: Path, temporary: Path, asked: dict[str, Any]
) -> None:
    outside = tmp_path / "no repository"
    outside.mkdir()
    for folder, commits in (
        (top, git(top, "rev-parse", "main")),
        (outside, ""),
    ):
        checkout = Checkout(settings(**asked), folder, ("/kept",))
        assert checkout.check_out() == Trees(
            current=str(folder), base=str(folder), kept=("/kept",)
        )
        assert (checkout.version.commit, checkout.version.now) == (
            commits,
            commits,
        )
        assert checkout.changed == ()
        assert list(temporary.iterdir()) == [checkout.folder], (
            "for what its pytest leaves"
        )
        checkout.remove()
    assert list(temporary.iterdir()) == []


def test_rootdir_may_be_below_the_top(top: Path) -> None:
    (top / "link").symlink_to(top / "src")
    for folder in (top / "src", top / "link"):
        checkout = Checkout(settings(against="v1"), folder, ())
        trees = checkout.check_out()
        assert (checkout.top, trees.current) == (top, str(top))
        assert Path(trees.base, "src/a.py").read_text() == "1"
        checkout.remove()


@pytest.mark.parametrize("ref", ["nothing", "origin/main", "--all"])
def test_a_ref_that_names_no_commit_is_refused(top: Path, ref: str) -> None:
    option, problem, remedy = refusal(top, against=ref)
    assert (option, problem) == (
        "--ddp-against",
        f"{ref!r} is no commit of {top}",
    )
    assert (
        remedy
        == "git fetch may bring it; git branch --all and git tag list what there is"
    )


@pytest.mark.parametrize(
    ("tag", "other"),
    [("main", "refs/heads/main"), ("origin/x", "refs/remotes/origin/x")],
)
def test_a_ref_that_names_two_commits_is_refused(
    top: Path, tag: str, other: str
) -> None:
    """Git takes the tag, with no more than a warning."""
    git(top, "update-ref", other, "main")
    git(top, "tag", tag, other)
    assert Checkout(settings(against=tag), top, ()).other_commit
    git(top, "tag", "--force", tag, "v1")
    option, problem, remedy = refusal(top, against=f"{tag}~0")
    assert (option, remedy) == (
        "--ddp-against",
        f"write {other}~0, or delete one",
    )
    named = git(top, "rev-parse", "v1")[:12]
    assert problem == (f"'{tag}~0' is {named}, and {other}~0 is another commit")
    assert Checkout(settings(against=other), top, ()).other_commit == git(
        top, "rev-parse", other
    )


def test_a_ref_of_no_repository_is_refused(
    tmp_path: Path, top: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = tmp_path / "no repository"
    outside.mkdir()
    option, problem, _ = refusal(outside, against="main")
    assert option == "--ddp-against"
    assert problem.startswith(
        f"main is a git ref, and git cannot read the repository of {outside}: fatal: not a git repository"
    )
    monkeypatch.setenv("PATH", str(outside))
    assert (
        refusal(top, against="main")[1]
        == f"main is a git ref, and git cannot read the repository of {top}: git is not installed,"
        " or not on PATH"
    )


def test_a_shallow_clone_is_told_how_to_become_deeper(
    top: Path, tmp_path: Path
) -> None:
    git(top, "branch", "feature/x", "v1")
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "--quiet", "--depth=1", f"file://{top}", clone)
    deeper = "this clone is shallow: git fetch --unshallow brings all commits, --deepen=N some more"
    for ref in ("HEAD~1", git(top, "rev-parse", "v1"), "upstream/main"):
        assert refusal(clone, against=ref)[1:] == (
            f"{ref!r} is no commit of {clone}",
            deeper,
        )
    remedy = refusal(clone, against="origin/feature/x")[2]
    command = (
        "git fetch --depth=1 origin +feature/x:refs/remotes/origin/feature/x"
    )
    assert remedy == f"this clone is shallow: {command} brings it"
    git(clone, *command.split()[1:])
    checkout = Checkout(settings(against="origin/feature/x"), clone, ())
    assert Path(checkout.check_out().base, "src/a.py").read_text() == "1"
    checkout.remove()


def test_a_version_that_cannot_be_checked_out_is_refused(
    top: Path, temporary: Path
) -> None:
    (top / ".gitattributes").write_text("*.py filter=broken\n")
    head = commit(top)
    git(top, "config", "filter.broken.smudge", "false")
    git(top, "config", "filter.broken.required", "true")
    option, problem, _ = refusal(top, against="main")
    assert option == "--ddp-against"
    assert problem.startswith(f"main ({head[:7]}) cannot be checked out: ")
    assert "broken" in problem
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        (
            "error: unable to write file a.py\nfatal: Could not reset index file to 'HEAD'.",
            "; is there space in {temporary}?",
        ),
        (
            "fatal: could not create leading directories of '.git/worktrees/a': Permission denied",
            "; git writes into .git: make a clone that this user may write to",
        ),
        # not of git's own files
        ("fatal: could not open 'tests/data.pt': Permission denied", ""),
    ],
)
def test_the_place_is_named_that_git_could_not_write_to(
    top: Path,
    temporary: Path,
    monkeypatch: pytest.MonkeyPatch,
    said: str,
    remedy: str,
) -> None:
    run_git = folder_module.git.git

    def fail(folder: Path, *arguments: object, **options: Any) -> str:
        if arguments[:2] == ("worktree", "add"):
            raise GitError(said)
        return run_git(folder, *arguments, **options)

    monkeypatch.setattr(folder_module.git, "git", fail)
    _, problem, _ = refusal(top, against="main")
    *_, last = said.splitlines()
    assert problem.endswith(last + remedy.format(temporary=temporary))


def test_what_changed_is_told_less_the_tests_and_documentation(
    top: Path,
) -> None:
    (top / "src/new.py").touch()
    (top / "README.md").touch()
    checkout = Checkout(settings(against="v1"), top / "src", (f"{top}/tests",))
    assert checkout.changed == ("src/a.py", "src/new.py")


@pytest.mark.parametrize(
    ("changed", "is_certain"),
    [
        ("src/a.py", True),
        ("saved/cpu x2/tests.test_a/test_step.json", True),
        # code may ask whether these exist
        ("README.md", False),
        ("src/new.py", False),
        ("src/data.json", False),
        ("gone", False),
        ("executable", False),
        ("link", False),
    ],
)
def test_only_python_source_that_both_sides_have_has_to_be_opened(
    top: Path, changed: str, is_certain: bool
) -> None:
    file = top / "src/b.py"
    commit(top, src__b="1")
    (top / "src/a.py").write_text("today's")
    cached = top / "src/__pycache__/a.cpython-399.pyc"
    cached.parent.mkdir()
    cached.touch()
    (top / ".git/info/exclude").write_text("__pycache__\n")
    if changed == "gone":
        file.unlink()
    elif changed == "executable":
        file.chmod(0o755)
    elif changed == "link":
        file.unlink()
        file.symlink_to("a.py")
    else:
        (top / changed).parent.mkdir(parents=True, exist_ok=True)
        (top / changed).write_text("today's")
    checkout = Checkout(
        settings(against="HEAD", baseline_dir=top / "saved"),
        top,
        (f"{top}/tests",),
    )
    assert not checkout.certain_files(), "it is not checked out yet"
    tree = Path(checkout.check_out().base)
    found = checkout.certain_files()
    checkout.remove()
    expected = {
        top / "src/a.py": "src/a.py",
        cached: "src/a.py",
        tree / "src/a.py": "src/a.py",
        top / ".git/HEAD": "",
    }
    assert found == (expected if is_certain else {})


def test_a_step_may_read_documentation_that_differs(top: Path) -> None:
    (top / "guide.md").write_text("yesterday's")
    commit(top, src__b="1")
    (top / "guide.md").write_text("today's")
    checkout = Checkout(settings(against="HEAD"), top, (f"{top}/tests",))
    tree = Path(checkout.check_out().base)
    found = checkout.certain_files()
    checkout.remove()
    assert [*found][:2] == [top / "guide.md", tree / "guide.md"]


@pytest.mark.parametrize(
    "asked",
    [
        {"against_env": ("A=1",)},
        {"against_option": ("-v",)},
        {"against_python": sys.executable},
        {"against_setup": "true"},
        {"own_tests": True},
    ],
)
def test_nothing_is_certain_where_more_than_the_commit_may_differ(
    top: Path, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    own_tests = asked.pop("own_tests", False)
    (top / "src/a.py").write_text("today's")
    checkout = Checkout(
        settings(against="HEAD", **asked), top, (), own_tests=own_tests
    )
    checkout.check_out()
    assert not checkout.certain_files()
    checkout.remove()


# --- the set-up


def test_a_version_is_set_up_at_the_top_of_its_worktree_with_its_variables(
    top: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAME", "of the run")
    command = (
        'test "$SAME" = "of the run" && echo "$OTHER" > src/built.py && cat'
    )
    asked = settings(
        against="v1", against_setup=command, against_env=("OTHER=a b",)
    )
    checkout = Checkout(asked, top / "src", ())
    trees = checkout.check_out()
    assert Path(trees.base, "src/built.py").read_text() == "a b\n"
    assert not (top / "src/built.py").exists()
    checkout.remove()


def test_a_socket_next_to_tests_is_left_out(
    top: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (top / "tests").mkdir(exist_ok=True)
    monkeypatch.chdir(top / "tests")  # the path of a socket must be short
    (top / "tests/helper.py").write_text("1")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("a.sock")
        checkout = Checkout(settings(against="v1"), top, (f"{top}/tests",))
        tests = Path(checkout.check_out().base, "tests")
        assert (tests / "helper.py").exists()
        assert not (tests / "a.sock").exists()
        checkout.remove()


def test_what_sets_a_version_up_reads_and_imports_that_version(
    top: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where an editable install leads to the working tree."""
    (top / "src/a.py").write_text("today's")
    monkeypatch.setenv("CFLAGS", f"-O2 -I{top}/src")
    monkeypatch.setattr(
        folder_module,
        "search_path_of_new",
        lambda: ["/usr/lib", str(top / "src")],
    )
    command = 'printf "%s\n" "$CFLAGS" "$PYTHONPATH" > built'
    asked = settings(against="v1", against_setup=command)
    checkout = Checkout(asked, top, ())
    tree = checkout.check_out().base
    built = Path(tree, "built").read_text()
    checkout.remove()
    flags, paths = built.splitlines()
    assert flags == f"-O2 -I{tree}/src"
    assert f"{tree}/src" in paths.split(os.pathsep)
    assert f"{top}/src" not in paths.split(os.pathsep)


@pytest.mark.parametrize(
    ("command", "end"),
    [
        ("echo said; echo warned >&2; exit 3", "exited with status 3"),
        ("kill -9 $$", "killed by "),
    ],
)
def test_a_set_up_that_fails_shows_what_it_wrote(
    top: Path, command: str, end: str
) -> None:
    first = git(top, "rev-parse", "v1")
    option, problem, _ = refusal(top, against="v1", against_setup=command)
    assert option == "--ddp-against-setup"
    reported, _, output = problem.partition("\n")
    assert reported.startswith(f"{command!r} {end}")
    assert reported.endswith(f" in a worktree of v1 ({first[:7]})")
    assert output == ("said\nwarned" if "said" in command else "")
