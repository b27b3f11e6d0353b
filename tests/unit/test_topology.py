from __future__ import annotations

from pytest_ddpperf.launch.placement import interconnect

TOPOLOGY = """\
	GPU0	GPU1	GPU2	mlx5_0	CPU Affinity
GPU0\t X \tNV2\tSYS\tPIX\t0-19,40-59
GPU1\tNV2\t X \tNV1\tPHB\t0-19,40-59
GPU2\tSYS\tNV1\t X \tSYS\t20-39
mlx5_0\tPIX\tPHB\tSYS\t X

Legend:

  X    = Self
"""


def test_several_kinds_of_links_are_all_named() -> None:
    assert interconnect(TOPOLOGY, [0, 1, 2]) == "NV1+NV2+SYS"


def test_one_gpu_has_no_link_and_an_unknown_matrix_none() -> None:
    assert interconnect(TOPOLOGY, [0]) is None
    assert interconnect("", [0, 1]) is None
