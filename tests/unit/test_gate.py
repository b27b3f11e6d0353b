"""What a test's report shows of its launches."""

from __future__ import annotations

import pytest

from pytest_ddpperf.plugin.gate import once


@pytest.mark.parametrize(
    ("texts", "told"),
    [
        ([], ""),
        (["", ""], ""),
        (["a\n"], "a\n"),
        (["a\n", "b\n"], "a\nb\n"),
        (["a\n", "", "b\n", "a\n"], "a\n(the same in 2 launches)\nb\n"),
        (["a"] * 10, "a\n(the same in 10 launches)\n"),
    ],
)
def test_what_launches_wrote_the_same_is_shown_once(texts: list[str], told: str) -> None:
    assert once(texts) == told
