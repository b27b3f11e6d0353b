"""What a rank does before it joins a group; that it does is tested on launches."""

from __future__ import annotations

import pytest

from pytest_ddpperf.rank.group import parse_cpulist


@pytest.mark.parametrize(
    ("written", "cores"), [("0-3,8,10-11\n", {0, 1, 2, 3, 8, 10, 11}), ("5\n", {5}), ("0-0", {0}), ("\n", set())]
)
def test_the_cores_near_a_device_are_read_as_the_kernel_writes_them(written: str, cores: set[int]) -> None:
    assert parse_cpulist(written) == cores
