"""What a rank does before it joins a group; that it does is tested on launches."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from pytest_ddpperf.rank.group import store_of
from pytest_ddpperf.wire.boot import kernel_numbers


@pytest.mark.parametrize(
    ("written", "cores"),
    [
        ("0-3,8,10-11\n", {0, 1, 2, 3, 8, 10, 11}),
        ("5\n", {5}),
        ("0-0", {0}),
        ("\n", set()),
    ],
)
def test_the_cores_near_a_device_are_read_as_the_kernel_writes_them(
    written: str, cores: set[int]
) -> None:
    assert set(kernel_numbers(written)) == cores


def test_ranks_wait_for_each_other_at_a_file_for_as_long_as_they_are_told(
    tmp_path: Path,
) -> None:
    assert store_of(
        "store", 2, tmp_path, None, timedelta(seconds=700)
    ).timeout == timedelta(seconds=700)
