"""The gates in examples/gates, each in its shortest form on CPU, and the project of the demo."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import demo
import pytest

from tests.integration.conftest import FEW, Run

GATES = Path(__file__).parents[2] / "examples/gates"

SHORT = (*FEW, "--ddp-steps=5", "--ddp-min-time=0", "--ddp-warmup=4")
WIDE = "p50:9900%"


def test_each_gate_is_short() -> None:
    for gate in GATES.glob("*.py"):
        assert len(gate.read_text().splitlines()) <= 40, gate.name


def test_golden_values(pytester: pytest.Pytester, run: Run) -> None:
    gate = (GATES / "test_golden.py").read_text()
    # five short steps cannot support its limits
    gate = gate.replace("p50:10%,mean:25%", WIDE)
    Path("test_golden.py").write_text(gate)
    assert run(*SHORT, "--ddp-save-baseline").ret == 0

    result = run(*SHORT)
    assert result.ret == 0
    result.stdout.fnmatch_lines(["*1 passed (1 of 1 compared)*"])

    # an expert that is 16 times as wide keeps more activations and gradients
    wider = gate.replace("4 * WIDTH", "64 * WIDTH")
    Path("test_golden.py").write_text(wider)
    result = run(*SHORT)
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*REGRESSED: peak_rss.bytes*"])


def test_two_builds(pytester: pytest.Pytester, run: Run) -> None:
    gate = (GATES / "test_builds.py").read_text()
    gate = gate.replace("busbw:5%", "busbw:90%")
    gate = gate.replace('"1MiB", "16MiB"', '"128KiB"')
    Path("test_builds.py").write_text(gate)
    other_build = "--ddp-against-env=NCCL_DEBUG=WARN"
    result = run(*SHORT, other_build, "-k", "all_reduce")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["*(2 of 2 compared)*"])


def test_unit_tests(pytester: pytest.Pytester, run: Run) -> None:
    shutil.copy(GATES / "test_units.py", ".")
    run().assert_outcomes(passed=4)


def test_the_demos_planted_commit_makes_several_all_reduces_of_one(
    pytester: pytest.Pytester, run: Run
) -> None:
    for name, text in {**demo.PROJECT, **demo.PLANTED}.items():
        path = pytester.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    result = run(
        "--ddp-steps=1",
        "--ddp-min-time=0",
        "--ddp-launches=1",
        "--ddp-baseline-missing=warn",
        "--ddp-json=report.json",
        small=False,
    )
    assert result.ret == 0
    report = json.loads((pytester.path / "report.json").read_text())
    (measured,) = report["measurements"]
    # buckets of 30 kB
    assert measured["measurement"]["counters"]["all_reduce.count"] == 4
