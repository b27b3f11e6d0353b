"""Two nodes on one machine, where there can be any."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.nodes.machines import SOON_SECONDS, Machines, missing


@pytest.fixture
def machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Machines]:
    """Two nodes, on which a test leaves no process and no file of ours."""
    if why := missing():
        pytest.skip(why)
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv(
        "PYTEST_ADDOPTS", "-p no:randomly -p no:benchmark -p no:cacheprovider"
    )
    (tmp_path / "run").mkdir()
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "run/pytest.ini").write_text("[pytest]\n")
    with ExitStack() as closing:
        made = Machines(tmp_path / "run", closing)
        yield made
        until = time.monotonic() + SOON_SECONDS
        while left := [
            *made.left(),
            *(tmp_path / "temporary").glob("ddpperf-*"),
        ]:
            assert time.monotonic() < until, left
            time.sleep(0.1)
