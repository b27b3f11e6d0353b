"""A command that brings its own launcher: its limits, its variables, and what is stored of it."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_ddpperf import Figure, text
from pytest_ddpperf.baseline.content import environment, nonsense
from pytest_ddpperf.launch.request import for_command
from pytest_ddpperf.options import parse
from pytest_ddpperf.plugin import arguments
from pytest_ddpperf.plugin.place import Places
from pytest_ddpperf.plugin.role import PytestRole
from pytest_ddpperf.rank.command import describe_status
from pytest_ddpperf.records.metric import metric_of
from pytest_ddpperf.records.plan import (
    Command,
    Limit,
    Plan,
    Program,
    limits_for,
)
from pytest_ddpperf.records.samples import Measurement, Samples
from pytest_ddpperf.verdict.times import unsupported
from pytest_ddpperf.wire.source_trees import Trees
from tests.unit.test_machine import settings

PLAN = Plan(world_size=1, backend="", device="cpu", command=True)
SAMPLES = Samples(step_seconds=((2.0,), (3.0,)), rank_seconds=((), ()))


def test_a_command_has_a_limit_on_its_wall_time_and_no_others_of_ours() -> None:
    asked = parse.limits("p10:10%,p50:10%,mean:25%,device:3%")
    assert list(map(str, limits_for(PLAN, asked, {}))) == ["wall:10%"]
    tps = {"tps": Figure(better="higher", pattern="(.)")}
    limits = limits_for(PLAN, parse.limits("wall:5%,forward:3%"), tps)
    assert list(map(str, limits)) == ["wall:5%", "tps:10%"]
    assert "wall:5%" not in map(
        str, limits_for(replace(PLAN, command=False), limits, {})
    )


def test_its_wall_time_is_a_figure_of_each_launch_however_few_there_are() -> (
    None
):
    assert metric_of("wall").figures(Measurement(samples=SAMPLES)) == (2.0, 3.0)
    (limit,) = limits_for(PLAN, parse.limits("wall:5%"), {})[:1]
    assert unsupported(limit, steps=1, launches=2) is None


def test_its_samples_have_no_ranks_and_are_no_nonsense() -> None:
    assert nonsense(SAMPLES) == ""
    wrong = replace(SAMPLES, rank_seconds=((), ((1.0,),)))
    assert nonsense(wrong) == "rank_seconds[0]: 0 ranks, not 1"


def test_its_baseline_is_that_of_a_device_and_not_of_ranks() -> None:
    facts = {"cpu_model": "a", "cores": 2}
    found = environment(facts, PLAN, batch_size=None)
    assert found.key == {"cpu_model": "a", "cores": 2, "device_type": "cpu"}
    assert found.must_match == {}


def test_it_runs_as_in_the_environment_of_pytests_interpreter() -> None:
    outer = {"RANK": "3", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "a"}
    found = for_command({**outer, "PATH": "/bin", "HOME": "/root"})
    scripts = os.path.dirname(sys.executable)
    assert found == {
        "PATH": f"{scripts}{os.pathsep}/bin",
        "HOME": "/root",
        "PYTHONHASHSEED": "0",
    }
    # one that is active keeps its place
    assert for_command(found) == found


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (3, "exited with status 3"),
        (-9, "was killed by SIGKILL"),
        (139, "exited with status 139 (as after SIGSEGV)"),
        (255, "exited with status 255"),
    ],
)
def test_its_end_is_told_by_status_or_signal(status: int, said: str) -> None:
    assert describe_status(status) == said


def test_its_line_is_the_same_on_every_machine_and_hides_secrets() -> None:
    command = Command(
        words=(sys.executable, "/repo/train.py", "--api-key=secret", "a b"),
        cwd="/repo",
        env={"TOKEN": "secret"},
    )
    line = arguments.name_of(command, Path("/repo"), None)
    assert line.partition(" ")[0].startswith("TOKEN=digest")
    assert "python train.py" in line
    assert line.endswith("'a b'")
    assert "secret" not in line


def program(
    root: str, path: str, *args: str, cwd: str = "", **env: str
) -> Program:
    return Program(
        path=path, is_module=False, args=args, cwd=cwd or root, env=env
    )


TEMPORARY_FOLDER = tempfile.gettempdir()


@pytest.mark.parametrize(
    "called",
    [
        lambda root: program(
            root,
            f"{root}/sub/train.py",
            "--config",
            f"{root}/a.yaml",
            f"-I{root}/include",
            f"--key-file={root}/key",
            "s3://bucket/my repo/data",
            f"{TEMPORARY_FOLDER}/pytest-{len(root)}/x",
            PYTHONPATH=root,
            DATA=f"{root}/data:{root}/more",
        ),
        lambda root: program(
            root, f"{root}/train.py", cwd=f"{TEMPORARY_FOLDER}/of a test"
        ),
        # outside of the repository
        lambda root: program(root, "/opt/train.py", cwd="/opt"),
        lambda root: program(
            root,
            f"{TEMPORARY_FOLDER}/{len(root)}/train.py",
            "/elsewhere/my repo",
        ),
        lambda root: Command(
            words=("torchrun", f"{root}/train.py", f"--at={root}"),
            cwd=root,
            env={"PYTHONPATH": root},
        ),
    ],
)
@pytest.mark.parametrize("current", ["/home/me/my repo", "/my repo"])
def test_its_line_is_the_same_in_every_tree(
    called: Callable[[str], Any], current: str
) -> None:
    """A worktree is among the temporary files."""
    base = f"{TEMPORARY_FOLDER}/ddpperf-1-2-x/my repo"
    trees = Trees(current=current, base=base, kept=())
    here = arguments.name_of(called(current), Path(current), None)
    assert here == arguments.name_of(called(current), Path(current), trees)
    assert here == arguments.name_of(called(base), Path(base), trees)
    elsewhere = "/builds/my repo"
    assert here == arguments.name_of(called(elsewhere), Path(elsewhere), None)


def test_what_both_sides_have_from_the_working_tree_is_the_same() -> None:
    """As a program of a virtual environment in it."""
    trees = Trees(current="/repo", base="/tmp/x/repo", kept=())
    command = Command(words=("/repo/.venv/bin/torchrun",), cwd="", env={})
    for root in ("/repo/sub", "/tmp/x/repo/sub"):
        line = arguments.name_of(command, Path(root), trees)
        assert line == "/repo/.venv/bin/torchrun"


def test_temporary_files_in_the_tree_are_temporary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/repo/tmp")
    command = Command(words=("run", "/repo/tmp/pytest-3/x"), cwd="", env={})
    assert arguments.name_of(command, Path("/repo"), None) == "run TEMPORARY"
    # tests that lie in the folder itself
    words = "run", "/repo/tmp/a.py", "s3://b/x", "/data/tmp/x"
    command = replace(command, words=words)
    line = arguments.name_of(command, Path("/repo/tmp"), None)
    assert line == "run a.py s3://b/x /data/tmp/x"


def test_temporary_files_are_so_by_both_names_where_a_link_leads_to_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """pytest's tmp_path has none."""
    real, scratch = tmp_path / "lustre/user", tmp_path / "scratch"
    real.mkdir(parents=True)
    scratch.symlink_to(real)
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    words = "run", f"{scratch}/x", f"--out={real}/pytest-of-me/pytest-3/x"
    command = Command(words=words, cwd="", env={})
    line = arguments.name_of(command, Path("/repo"), None)
    assert line == "run TEMPORARY --out=TEMPORARY"


@pytest.mark.parametrize("left_out", ["", "PATH", "HOME"])
def test_variables_of_pytest_itself_are_no_further_ones(
    monkeypatch: pytest.MonkeyPatch, left_out: str
) -> None:
    """They would be other ones in each run."""
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.setenv("HOME", "/root")
    copied = {**os.environ, "NCCL_ALGO": "Ring"}
    copied.pop(left_out, None)
    with pytest.raises(ValueError, match=r"f\(env=\.\.\.\): give only further"):
        arguments.read_variables("f", copied)
    further = {"NCCL_ALGO": "Ring", "HOME": "/root"}
    assert arguments.read_variables("f", further) == further


def test_a_folder_whose_name_begins_as_that_of_the_tree_stays_in_its_line() -> (
    None
):
    words = "run", "/repo/a", "/repo2/a", "/mnt/repo/a"
    command = Command(words=words, cwd="/repo", env={})
    assert (
        arguments.name_of(command, Path("/repo"), None)
        == "run a /repo2/a /mnt/repo/a"
    )


@pytest.mark.parametrize("asked", ["auto", "cuda"])
def test_its_device_is_that_of_the_machine_whatever_backend_ranks_have(
    asked: str,
) -> None:
    facts = {
        "torch": "2.13",
        "backends": "gloo,nccl",
        "device_type": "cuda",
        "device_count": 1,
        "default_backends": "cpu:gloo,cuda:nccl",
    }
    own = settings(device=asked, backend="gloo")
    # of a phase, which the steps of other tests have
    own = replace(own, limits=(Limit(metric="forward", value=0.1, unit="%"),))
    places = Places(own, PytestRole(), lambda: facts)
    place = places.find_for_command(own)
    assert (place.device, place.backend) == ("cuda", "")
    assert text.ranks(PLAN) == "command"
