"""The test that `ddpperf init` writes."""

from __future__ import annotations

import pytest

from pytest_ddpperf.cli.main import main
from tests.integration.conftest import FEW, Run


def test_the_first_test_runs_as_it_is(
    pytester: pytest.Pytester, run: Run
) -> None:
    assert main(["init"]) == 0
    run("tests/perf", *FEW).assert_outcomes(passed=1)
