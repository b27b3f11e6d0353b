"""A visit of the doctor with real ranks: behaviour, never times."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pytest_ddpperf import options
from pytest_ddpperf.doctor import system
from pytest_ddpperf.doctor.visit import Visit, diagnosis
from pytest_ddpperf.launch import Nobody
from tests import trees
from tests.processes import until

SMALL = {"min_seconds": "0", "steps": "20", "warmup": "1"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Of a machine whose cores are hardware threads of one."""
    usable = system.usable_cores()
    return trees.written(tmp_path, trees.cores(usable), {"proc/meminfo": trees.MEMINFO})


@pytest.mark.skipif(len(system.usable_cores()) < 2, reason="needs two cores, to use one of them")
def test_a_visit_measures_all_that_it_tells(root: Path) -> None:
    usable = system.usable_cores()
    told: list[tuple[int, int]] = []
    settings = options.without_pytest(world_sizes="1", **SMALL)
    with Visit(settings, root=root, seconds=300.0, rounds=2) as visit:
        survey = visit.survey()
        noise = visit.measure(survey, Nobody(), lambda *at: told.append(at))
    assert survey.place.startswith("1 rank over gloo")
    assert survey.machine.siblings == (usable,)
    assert noise is not None
    assert noise.problem == ""
    assert told == [(number, 6) for number in range(7)]
    assert (noise.steps, noise.in_stretches) == (20, True)
    (stored,), (turns,), (trial,) = noise.stored, noise.turns, noise.trials
    assert stored.launches == turns.launches == 2
    assert set(stored.resolution) == set(turns.resolution) == {"p10", "p50"}
    assert trial.cores == usable[:1]
    assert trial.here is not None
    assert tuple(sorted(os.sched_getaffinity(0))) == usable  # as before
    gains = {found.code: found.gain for found in diagnosis(survey, noise).findings}
    assert gains["siblings"].startswith(f"on core {usable[0]} 2 launches spread by p10 ")


def test_what_there_is_no_time_for_is_not_measured(root: Path) -> None:
    with Visit(options.without_pytest(world_sizes="1", **SMALL), root=root, seconds=0.0) as visit:
        survey = visit.survey()
        noise = visit.measure(survey, Nobody(), lambda *at: None)
    assert noise is None or noise.stored == ()
    # Which of them depends on how fast a probe is that has a second.
    assert diagnosis(survey, noise).findings[0].code in ("no-ranks", "unmeasured")


def test_a_backend_that_is_not_there_is_a_usage_error_by_its_own_name() -> None:
    asked = [sys.executable, "-m", "pytest_ddpperf", "doctor", "--backend", "glo"]
    ended = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert ended.returncode == 4
    assert "--backend" in ended.stderr
    assert "did you mean gloo?" in ended.stderr
    assert "--ddp-" not in ended.stderr


def test_torch_that_cannot_be_imported_is_a_finding(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so is not there')\n")
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    asked = [sys.executable, "-m", "pytest_ddpperf", "doctor"]
    ended = subprocess.run(asked, env=environ, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    told = " ".join(ended.stdout.split())
    assert "1. no rank can be started: the rank server did not start: ImportError: libcudart.so is not there" in told


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    asked = [sys.executable, "-m", "pytest_ddpperf", "doctor"]
    with subprocess.Popen(asked, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while not process.stdout.readline().startswith("  a run"):  # what there is was told, the measurement begins
            assert process.poll() is None
        while not list(tmp_path.glob("ddpperf-*/rank0.out")):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert list(tmp_path.glob("ddpperf-*")) == []
    until(lambda: _of(tmp_path) == [])


def _of(folder: Path) -> list[str]:
    """Processes whose temporary folder that is."""
    wanted = f"TMPDIR={folder}".encode()
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if wanted in environ.read_bytes().split(b"\0"):
                found.append(environ.parent.name)
        except OSError:
            continue
    return found
