"""Communication that nothing hides: of intervals by hand, and of events as torch's profiler has them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pytest_ddpperf.suite import exposed as module
from pytest_ddpperf.suite.exposed import exposed

# Communication, computation, and how long there is the first without the second from 0 to 10.
CASES: list[tuple[list[tuple[float, float]], list[tuple[float, float]], float]] = [
    ([], [(0, 10)], 0),
    ([(2, 4)], [], 2),
    ([(2, 4)], [(1, 5)], 0),
    ([(2, 6)], [(0, 3), (5, 9)], 2),
    ([(2, 6), (3, 8)], [(4, 5)], 5),  # two at once count once
    ([(2, 6)], [(3, 5), (3, 4)], 2),
    ([(-5, 2), (9, 20)], [(1, 1.5)], 2.5),  # what lies outside the step does not count
    ([(-5, -1), (11, 12)], [(20, 30)], 0),
]


@pytest.mark.parametrize(("communication", "computation", "expected"), CASES)
def test_communication_counts_where_nothing_is_computed(
    communication: list[tuple[float, float]], computation: list[tuple[float, float]], expected: float
) -> None:
    assert exposed(communication, computation, (0, 10)) == pytest.approx(expected)


def event(name: str, start: float, end: float, **further: Any) -> Any:
    facts = {"thread": 1, "is_async": False, "device_type": SimpleNamespace(name="CPU")} | further
    return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end), **facts)


def told(monkeypatch: pytest.MonkeyPatch, device: str, backend: str, events: list[Any]) -> list[tuple[float, float]]:
    class Taken:
        def __init__(self, activities: list[Any]) -> None:
            assert [activity.name for activity in activities] == (["CPU"] if device == "cpu" else ["CPU", "CUDA"])

        def __enter__(self) -> Taken:
            return self

        def __exit__(self, *_: object) -> None: ...

        def events(self) -> list[Any]:
            return events

    monkeypatch.setattr(module, "profile", Taken)
    ctx: Any = SimpleNamespace(device=SimpleNamespace(type=device), backend=backend)
    return module.profiled(ctx, lambda: None, 0)


def test_on_cpus_what_gloos_threads_do_while_the_training_thread_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    events = [
        event("ddpperf step", 0, 1e6),
        event("aten::mm", 0, 4e5),
        event("gloo:all_reduce", 3e5, 6e5, thread=2, is_async=True),
        event("aten::add_", 3e5, 6e5, thread=3),  # Gloo's own: not the training thread's
        event("aten::copy_", 5e5, 1e6),
        event("ddpperf step", 1e6, 3e6),
        event("gloo:all_reduce", 2e6, 3e6, thread=2, is_async=True),
    ]
    assert told(monkeypatch, "cpu", "gloo", events) == [pytest.approx((1, 0.1)), pytest.approx((2, 1))]


def test_on_cuda_what_nccls_kernels_do_while_no_other_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"device_type": SimpleNamespace(name="CUDA"), "thread": 7}
    events = [
        event("ddpperf step", 0, 1e6),
        event("cudaDeviceSynchronize", 2e5, 1e6),
        event("gemm", 0, 4e5, **there),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 3e5, 9e5, **there),
        event("nccl:all_reduce", 3e5, 1e6, **there, is_user_annotation=True),
        event("ddpperf step", 0, 1e6, **there, is_user_annotation=True),
        event("Memcpy DtoD", 5e5, 6e5, **there),
    ]
    assert told(monkeypatch, "cuda", "nccl", events) == [pytest.approx((1, 0.4))]


def test_gloo_on_cuda_devices_is_held_beside_their_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"device_type": SimpleNamespace(name="CUDA"), "thread": 7}
    events = [
        event("ddpperf step", 0, 1e6),
        event("aten::mm", 0, 1e6),  # the CPU only says what there is to do
        event("gemm", 0, 4e5, **there),
        event("gloo:all_reduce", 3e5, 6e5, thread=2, is_async=True),
    ]
    assert told(monkeypatch, "cuda", "gloo", events) == [pytest.approx((1, 0.2))]
