"""What a rank does before it joins a group; that it does is tested on launches."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pytest_ddpperf.rank import loop_states
from pytest_ddpperf.rank.group import (
    ProcessPlace,
    _tcp_store,
    cores,
    join,
    store_of,
)
from pytest_ddpperf.records.errors import DdpPerfError
from pytest_ddpperf.records.plan import Plan
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
    place: ProcessPlace,
) -> None:
    timeout = timedelta(seconds=700)
    assert store_of("store", 2, place, timeout).timeout == timeout


def test_a_store_is_hosted_on_a_descriptor_that_libuv_does_not_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in torch 2.6."""
    asked: list[dict[str, Any]] = []

    def store(host: str, port: int, **options: Any) -> str:
        asked.append(options)
        if options.get("use_libuv", True) and "master_listen_fd" in options:
            raise NotImplementedError("libuv ... listen fd")
        return f"{host}:{port}"

    monkeypatch.setattr(dist, "TCPStore", store)
    assert _tcp_store("localhost", 1, master_listen_fd=7) == "localhost:1"
    assert asked[-1] == {
        "master_listen_fd": 7,
        "is_master": True,
        "wait_for_workers": False,
        "use_libuv": False,
    }
    assert _tcp_store("localhost", 1) == "localhost:1"
    assert asked[-1] == {"is_master": False, "wait_for_workers": False}


def plan_of(backend: str, device: str) -> Plan:
    return Plan(world_size=2, backend=backend, device=device)


@pytest.fixture
def place(tmp_path: Path) -> ProcessPlace:
    return ProcessPlace(
        number=0, index=0, node=0, folder=tmp_path, store=None, threads=0
    )


@pytest.mark.parametrize(
    ("backend", "device", "is_bound"),
    [
        ("nccl", "cuda:1", True),
        ("nccl2", "cuda:1", True),
        ("nccl-lazy", "cuda:1", True),
        ("nccl-legacy", "cuda:1", True),
        ("cuda:ncclx", "cuda:1", True),
        ("cpu:gloo,cuda:nccl", "cuda:1", True),
        ("xccl", "xpu:1", True),
        ("gloo", "cuda:1", False),
        ("cpu:gloo,cuda:nccl", "cpu", False),
        ("gloo", "cpu", False),
    ],
)
def test_nccl_by_any_name_is_bound_to_its_device(
    monkeypatch: pytest.MonkeyPatch,
    place: ProcessPlace,
    backend: str,
    device: str,
    is_bound: bool,
) -> None:
    asked: dict[str, Any] = {}

    def initialise(name: str, **options: Any) -> None:
        asked.update(options, name=name)

    monkeypatch.setattr(dist, "init_process_group", initialise)
    there = torch.device(device)
    join(plan_of(backend, there.type), 0, 2, place, "store", there)
    assert asked["name"] == backend
    assert asked["device_id"] == (there if is_bound else None)


@pytest.mark.skipif(len(cores()) < 2, reason="one core has no smaller share")
def test_the_cores_of_a_rank_are_put_back_after_a_group_has_connected(
    monkeypatch: pytest.MonkeyPatch, place: ProcessPlace
) -> None:
    """As NCCL 2.29 leaves a thread on the cores that it chose."""
    before = cores()

    def connect(*_: object, **__: object) -> None:
        os.sched_setaffinity(0, {min(before)})

    monkeypatch.setattr(dist, "init_process_group", connect)
    try:
        cpu = torch.device("cpu")
        join(plan_of("gloo", "cpu"), 0, 2, place, "store", cpu)
        assert cores() == before
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize(
    ("asked", "has", "uses"),
    [
        ("nccl", "cuda:nccl", ""),
        ("nccl", "cuda:nccl2", ""),
        ("cpu:gloo,cuda:nccl-lazy", "cpu:gloo,cuda:nccl-legacy", ""),
        ("cuda:ncclx", "cuda:ncclx", ""),
        ("nccl", "cpu:gloo,cuda:gloo", "uses gloo, and nccl was"),
        ("gloo", "cuda:nccl2", "uses nccl2, and gloo was"),
        ("cpu:gloo,cuda:nccl", "cpu:gloo", "no backend for cuda, and nccl was"),
    ],
)
def test_a_program_may_have_any_implementation_of_nccl(
    monkeypatch: pytest.MonkeyPatch, asked: str, has: str, uses: str
) -> None:
    """Which one it has is a fact that must match."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_backend_config", lambda: has)
    plan = plan_of(asked, "cuda")
    if not uses:
        loop_states.refuse_wrong_group(plan, torch.device("cuda", 0))
        return
    with pytest.raises(DdpPerfError, match=uses):
        loop_states.refuse_wrong_group(plan, torch.device("cuda", 0))


def test_a_program_that_trains_on_cuda_is_not_measured_as_one_on_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its steps would be those of the host."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(
        dist, "get_backend_config", lambda: "cpu:gloo,cuda:gloo"
    )
    plan = plan_of("gloo", "cpu")
    loop_states.refuse_wrong_group(plan, torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 512)
    with pytest.raises(DdpPerfError, match=r"cuda, and its .*ddp-device"):
        loop_states.refuse_wrong_group(plan, torch.device("cpu"))
    plan = plan_of("gloo", "cuda")
    loop_states.refuse_wrong_group(plan, torch.device("cuda", 0))


def test_an_update_that_is_captured_in_a_graph_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before the device is waited for, which a capture forbids."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    warming = object.__new__(loop_states.Warming)
    warming._rank = SimpleNamespace(  # type: ignore[assignment]
        board=None, ctx=SimpleNamespace(device=torch.device("cuda", 0))
    )
    with pytest.raises(DdpPerfError, match="captured in a CUDA graph"):
        warming.step_ended(1)
