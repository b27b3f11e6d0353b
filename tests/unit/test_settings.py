"""Paths among what a user asks for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_ddpperf.options.settings import Settings, read_settings
from tests.unit.test_options import _Registers

PATHS = {
    "--ddp-json": "json_path",
    "--ddp-markdown": "markdown_path",
    "--ddp-html": "html_path",
    "--ddp-history": "history_dir",
    "--ddp-baseline-dir": "baseline_dir",
    "--ddp-suite-plots": "suite_plots",
}


@pytest.fixture
def read(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Settings]:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    pytester.plugins = [_Registers()]
    return lambda *arguments: read_settings(pytester.parseconfig(*arguments))


@pytest.mark.parametrize("option", PATHS)
def test_a_path_may_begin_with_the_home_folder(
    option: str,
    read: Callable[..., Settings],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert (
        getattr(read(f"{option}=~/there"), PATHS[option]) == tmp_path / "there"
    )
