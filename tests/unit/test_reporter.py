"""What the end of a run says about coverage of ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pytest_ddpperf.plugin.reporter import _covers_no_ranks

WHOLE = ["subprocess", "fork", "_exit"]


def refuse(name: str) -> list[str]:
    raise KeyError(name)  # as coverage.py before 7.10


@pytest.mark.parametrize(
    ("plugin", "covers_none"),
    [
        (None, False),
        (SimpleNamespace(cov_controller=None), False),  # --no-cov
        (
            SimpleNamespace(
                cov_controller=SimpleNamespace(
                    cov=SimpleNamespace(get_option=lambda name: WHOLE)
                )
            ),
            False,
        ),
        (
            SimpleNamespace(
                cov_controller=SimpleNamespace(
                    cov=SimpleNamespace(get_option=lambda name: WHOLE[:1])
                )
            ),
            True,
        ),
        (
            SimpleNamespace(
                cov_controller=SimpleNamespace(
                    cov=SimpleNamespace(get_option=refuse)
                )
            ),
            True,
        ),
    ],
    ids=["not installed", "off", "set", "set in part", "before 7.10"],
)
def test_ranks_are_not_covered_unless_all_patches_are_set(
    plugin: Any, covers_none: bool
) -> None:
    config: Any = SimpleNamespace(
        pluginmanager=SimpleNamespace(get_plugin=lambda name: plugin)
    )
    assert _covers_no_ranks(config) is covers_none
