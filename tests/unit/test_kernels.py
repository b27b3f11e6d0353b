"""The work of a device: from the events of a profile to the verdict and its causes. No GPU is
needed: events have the attributes of torch's, and names and times of an H100."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]

from pytest_ddpperf.compare import rounds
from pytest_ddpperf.explain.kernels import find_kernels
from pytest_ddpperf.rank import device
from pytest_ddpperf.records.device import (
    COMMUNICATION,
    COMPUTATION,
    COPY,
    DeviceWork,
    Kernel,
    mean_kernels,
)
from pytest_ddpperf.records.plan import (
    TIME_LIMITS,
    Limit,
    Plan,
    limits_for,
)
from pytest_ddpperf.records.samples import (
    Environment,
    Measurement,
    Samples,
    Status,
)
from pytest_ddpperf.records.step_phases import (
    BACKWARD,
    FORWARD,
    OTHER,
    PHASES,
    StepPhases,
)
from pytest_ddpperf.report import causes, sentences, terminal
from pytest_ddpperf.verdict.decision import judge
from tests.reports import Drawn, outcome

PLAN = Plan(world_size=2, backend="nccl", device="cuda", warmup=5)
GEMM = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64"
ADD = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, "
    "std::array<char*, 3ul> >(int, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>)"
)
REDUCE = (
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
)
TO_DEVICE = "Memcpy HtoD (Pinned -> Device)"


def event(
    name: str,
    begin: float,
    lasts: float,
    *,
    of: Any = DeviceType.CUDA,
    is_annotation: bool = False,
) -> Any:
    """An event as torch.profiler gives it, in microseconds."""
    return SimpleNamespace(
        name=name,
        device_type=of,
        is_user_annotation=is_annotation,
        time_range=SimpleNamespace(start=begin, end=begin + lasts),
    )


def step_of(start: float) -> list[Any]:
    """A step: a copy next to a product, which an all-reduce follows, and a second product in it."""
    return [
        event(TO_DEVICE, start, 30),
        event(GEMM, start + 10, 100),
        event(REDUCE, start + 110, 500),
        event(GEMM, start + 200, 60),
        event("cudaLaunchKernel", start, 5, of=DeviceType.CPU),
        event("nccl:all_reduce", start + 110, 500, is_annotation=True),
    ]


THREE = [each for number in range(3) for each in step_of(1000.0 * number)]


def test_a_step_has_its_kernels_by_kind_with_their_times() -> None:
    work, notes = device.read_work(THREE, 3)
    assert work is not None
    assert notes == ()
    assert [(k.name, k.kind, k.calls) for k in work.kernels] == [
        (REDUCE, COMMUNICATION, 1),
        (GEMM, COMPUTATION, 2),
        (TO_DEVICE, COPY, 1),
    ]
    assert [k.total_seconds for k in work.kernels] == pytest.approx(
        [500e-6, 160e-6, 30e-6]
    )
    # without communication, which waits for others
    assert (work.seconds, work.count) == (pytest.approx(190e-6), 3)
    # the copy and the first product overlap for 20 us
    assert work.busy_seconds == pytest.approx(170e-6)
    # 60 us of the all-reduce are next to the second product
    assert work.exposed_seconds == pytest.approx(440e-6)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclSymkDevKernel_AllGather_LL", COMMUNICATION),
        ("void ncclxKernel(int)", COMMUNICATION),
        ("mscclKernel_Sum_half_Simple", COMMUNICATION),
        (
            "void (anonymous namespace)::two_shot_all_reduce_kernel_inplace<float, 16>()",
            COMMUNICATION,
        ),
        ("void multimem_all_gather_kernel<16, 8>(char*)", COMMUNICATION),
        ("(anonymous namespace)::barrier_kernel(unsigned)", COMMUNICATION),
        ("void find_split_barrier_tile<float>()", COMPUTATION),
        ("Memset (Device)", COPY),
        (ADD, COMPUTATION),
    ],
)
def test_kernels_are_of_three_kinds(name: str, kind: str) -> None:
    work, _ = device.read_work([event(name, 0, 1)], 1)
    assert work is not None
    assert work.kernels[0].kind == kind


@pytest.mark.parametrize(
    ("one", "other", "are_same"),
    [
        ("triton_poi_fused_add_relu_3", "triton_poi_fused_add_relu_12", True),
        ("triton_poi_fused_add_3", "triton_poi_fused_mul_3", False),
        (GEMM, GEMM.replace("128x64", "128x32"), False),
    ],
)
def test_numbers_that_a_compiler_drew_are_no_part_of_a_name(
    one: str, other: str, are_same: bool
) -> None:
    work, _ = device.read_work([event(one, 0, 1), event(other, 1, 1)], 1)
    assert work is not None
    assert (len(work.kernels) == 1) is are_same


def test_a_profile_without_a_kernel_is_unknown_and_says_what_to_do() -> None:
    of_host = [event("cudaLaunchKernel", 0, 5, of=DeviceType.CPU)]
    assert device.read_work(of_host, 3) == (
        None,
        (
            "device time is unknown: torch.profiler recorded no kernel: end other profilers "
            "(nsys, DCGM), or allow this one (docs/gpu.md)",
        ),
    )


def test_events_of_this_torch_can_be_read() -> None:
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU]
    ) as profiler:
        torch.ones(3) + 1
    events = profiler.events()
    assert events
    assert device.read_work(events, 1)[0] is None
    for each in events:
        each.device_type = DeviceType.CUDA
    work, _ = device.read_work(events, 1)
    assert work is not None
    assert "aten::add" in {each.name for each in work.kernels}
    assert 0 < work.busy_seconds <= work.seconds


def test_a_profile_that_lost_a_record_is_unknown_and_no_smaller_sum() -> None:
    assert device.read_work(THREE[:-3], 3) == (
        None,
        (
            "device time is unknown: kernels differ between the 3 profiled steps, or records "
            "were lost",
        ),
    )


class Profiler:
    """torch.profiler.profile on a device that records each step that is taken in between."""

    steps: int | None = None  # None: no profile is taken now
    refuses = False

    def __init__(self, *, activities: Sequence[Any]) -> None:
        assert activities == [torch.profiler.ProfilerActivity.CUDA]

    def start(self) -> None:
        if Profiler.refuses:
            raise RuntimeError("CUPTI is in use")
        Profiler.steps = 0

    def stop(self) -> None:
        assert Profiler.steps

    def events(self) -> list[Any]:
        steps = range(Profiler.steps or 0)
        return [each for number in steps for each in step_of(1000.0 * number)]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps that were taken, on a device with a profiler."""
    monkeypatch.setattr(device, "profile", Profiler)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(Profiler, "steps", None)
    return []


def profiled(
    taken: list[int], *, milliseconds: int = 20, kind: str = "cuda"
) -> tuple[DeviceWork | None, tuple[str, ...]]:
    """Return the work of a device, of steps of that length; another rank's take as long."""

    def step() -> None:
        taken.append(len(taken))
        if Profiler.steps is not None:
            Profiler.steps += 1

    marks = tuple(1_000_000 * milliseconds * step for step in range(31))
    window: Any = SimpleNamespace(marks_ns=(marks,))
    rank: Any = SimpleNamespace(
        ctx=SimpleNamespace(
            device=torch.device(kind), keep=lambda *_: None, figures={}
        ),
        own=SimpleNamespace(barrier=lambda: None, maximum=lambda own: own),
    )
    return device.measure_device(step, window, rank)


@pytest.mark.parametrize(
    ("milliseconds", "steps"), [(100, 3), (10, 5), (1, 10)]
)
def test_a_few_steps_are_profiled_after_the_window(
    taken: list[int], milliseconds: int, steps: int
) -> None:
    work, notes = profiled(taken, milliseconds=milliseconds)
    assert (len(taken), notes) == (steps, ())
    assert work is not None
    assert work.count == 3


def test_a_rank_whose_profiler_is_refused_takes_its_steps(
    taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Profiler, "refuses", True)
    assert profiled(taken) == (
        None,
        ("device time is unknown: RuntimeError: CUPTI is in use",),
    )
    assert len(taken) == 3


def test_other_devices_have_no_device_time(taken: list[int]) -> None:
    assert profiled(taken, kind="xpu") == (
        None,
        ("device time is unknown: it is measured on cuda devices only",),
    )
    assert taken == []


# --- the metric


def kernel(name: str, milliseconds: float, calls: float = 1) -> Kernel:
    return Kernel(
        name=name,
        kind=COMMUNICATION if name == REDUCE else COMPUTATION,
        calls=calls,
        total_seconds=milliseconds / 1e3,
    )


def side(
    *kernels: Kernel,
    steps: Sequence[float] = (30, 26, 34),
    ranks: Sequence[float] = (0.0, 0.0),
    exposed: Sequence[float] = (0.0, 0.0),
    counters: Mapping[str, int | None] | None = None,
    of_device: bool = True,
) -> Measurement:
    """A launch for each of the `steps`, in milliseconds: their kernels differ by 0.06 % between
    launches at most, and `ranks` have more to do. `exposed` are the milliseconds in which each only
    communicates."""
    work = sum(each.total_seconds for each in kernels if each.name != REDUCE)
    seconds = tuple((each / 1e3,) * 30 for each in steps)
    table = tuple(
        tuple(work * (1 + 1e-4 * (step % 7)) + more / 1e3 for more in ranks)
        for step in steps
    )
    only = (tuple(each / 1e3 for each in exposed),) * len(steps)
    samples = Samples(
        step_seconds=seconds,
        rank_seconds=tuple((launch, launch) for launch in seconds),
        device_seconds=table if of_device else None,
        busy_seconds=table if of_device else None,
        exposed_seconds=only if of_device else None,
    )
    return Measurement(
        samples=samples,
        environment=Environment(),
        counters=counters or {},
        kernels=kernels if of_device else (),
    )


USUAL = (kernel(GEMM, 12, 200), kernel(ADD, 6, 300), kernel(REDUCE, 4))
DEVICE = Limit(metric="device", value=0.01, unit="%")
LIMITS = limits_for(PLAN, TIME_LIMITS, {})


def test_device_time_has_a_default_limit_where_it_is_measured() -> None:
    def limited(plan: Plan) -> bool:
        return "device" in {
            limit.metric for limit in limits_for(plan, TIME_LIMITS, {})
        }

    assert str(next(each for each in LIMITS if each.metric == "device")) == (
        "device:3%"
    )
    assert not limited(replace(PLAN, device="cpu"))
    assert not limited(replace(PLAN, boundary="update"))
    assert not limited(replace(PLAN, stacks=True))
    assert not limited(replace(PLAN, parameter_servers=1))
    assert not limited(replace(PLAN, warmup=0))


def decided(
    now: Measurement, before: Measurement, *limits: Limit, **how: Any
) -> Any:
    how = {"interleaved": True, **how}
    return judge(now, [before], limits or LIMITS, **how)


@pytest.mark.parametrize(
    ("more", "status"),
    [(0.0, Status.PASS), (0.4, Status.REGRESSED), (-0.4, Status.IMPROVED)],
)
def test_the_work_of_a_device_is_judged_where_steps_are_too_noisy(
    more: float, status: Status
) -> None:
    """2 % more is found with three launches, whose steps differ by 30 %."""
    now = side(kernel(GEMM, 12 + more, 200), *USUAL[1:], steps=(27, 33, 29))
    verdict = decided(now, side(*USUAL), DEVICE)
    assert verdict.status is status
    assert verdict.comparisons[0].resolution < 0.01


# Less of it waits for communication, so kernels overlap it and take longer.
FASTER = side(kernel(GEMM, 13, 200), *USUAL[1:], steps=(20.1, 20, 20.2))
STEADY = side(*USUAL, steps=(30, 30.1, 30.2))


@pytest.mark.parametrize(
    ("now", "limits", "status"),
    [
        (FASTER, LIMITS, Status.IMPROVED),
        (FASTER, [*TIME_LIMITS, DEVICE], Status.REGRESSED),
        (replace(FASTER, samples=STEADY.samples), LIMITS, Status.PASS),
        (
            side(kernel(GEMM, 13, 200), *USUAL[1:], steps=(30.1, 30, 30.2)),
            LIMITS,
            Status.REGRESSED,
        ),
    ],
)
def test_the_default_limit_on_the_device_calls_no_faster_step_slower(
    now: Measurement, limits: Sequence[Limit], status: Status
) -> None:
    """It has its figures all the same."""
    verdict = decided(now, STEADY, *limits)
    assert verdict.status is status
    assert "device" in [c.limit.metric for c in verdict.comparisons]


def test_the_slowest_rank_is_that_of_the_group() -> None:
    verdict = decided(side(*USUAL, ranks=(0, 0.9)), side(*USUAL), DEVICE)
    assert verdict.status is Status.REGRESSED
    assert verdict.comparisons[0].change.estimate == pytest.approx(0.05, 0.01)


@pytest.mark.parametrize(
    ("knows_now", "knows_before", "dropped"),
    [
        (True, False, ("device:3%: the baseline does not know it",)),
        (False, True, ()),  # a note of the launch says why
        (False, False, ()),
    ],
)
def test_a_default_limit_on_what_is_unknown_is_dropped(
    knows_now: bool, knows_before: bool, dropped: tuple[str, ...]
) -> None:
    sides = (
        side(*USUAL, of_device=knows_now),
        side(*USUAL, of_device=knows_before),
    )
    verdict = decided(*sides)
    assert [c.limit.metric for c in verdict.comparisons] == [
        limit.metric for limit in TIME_LIMITS if limit.metric != "device"
    ]
    assert verdict.dropped == dropped


@pytest.mark.parametrize(
    ("knows_now", "reason", "why"),
    [
        (
            False,
            "unknown-metric-now",
            "device is unknown now, or 0, or differs between launches: see the notes, if any, or"
            " remove its limit",
        ),
        (
            True,
            "unknown-metric",
            "device is unknown in the baseline: measure as before, or save a new baseline",
        ),
    ],
)
def test_a_limit_of_the_users_on_what_is_unknown_is_incomparable(
    knows_now: bool, reason: str, why: str
) -> None:
    now = side(*USUAL, of_device=knows_now)
    verdict = decided(now, side(*USUAL, of_device=not knows_now), DEVICE)
    assert (verdict.status, verdict.reason) == (Status.INCOMPARABLE, reason)
    said = outcome("step", Drawn(), verdict, now, baseline_path="x.json")
    assert sentences.why_not_compared(said) == why


def test_launches_together_have_the_kernels_of_the_slowest_rank() -> None:
    slow, fast = kernel(GEMM, 12, 200), kernel(GEMM, 10, 200)
    launches: Any = (
        SimpleNamespace(device_seconds=(1.0, 1.2), kernels=((fast,), (slow,))),
        SimpleNamespace(
            device_seconds=(1.0, 1.2),
            kernels=((fast,), (kernel(GEMM, 14, 200),)),
        ),
    )
    (mean,) = rounds._kernels(launches)
    assert (mean.calls, mean.total_seconds) == (200, pytest.approx(0.013))
    without: Any = (*launches, SimpleNamespace(device_seconds=None, kernels=()))
    assert rounds._kernels(without) == ()


def test_kernels_of_some_launches_count_by_their_share() -> None:
    assert mean_kernels([[kernel(ADD, 4, 2)], []]) == (kernel(ADD, 2, 1),)
    assert mean_kernels([]) == ()


# --- causes and sentences


def test_kernels_that_changed_are_named_with_their_calls() -> None:
    now = side(*USUAL, kernel("gemm_2048", 0.74, 32), steps=(31, 26, 34))
    before = side(*USUAL)
    verdict = decided(now, before)
    assert verdict.shown.limit.metric == "device"
    found, words = causes.explain(verdict, PLAN, now, [before], 0.015)
    assert (found[0].kernel, found[0].calls) == ("gemm_2048", (0, 32))
    assert found[0].share == pytest.approx(1)
    assert words[0] == "device +740 us: gemm_2048 +740 us (0 -> 32 calls)"


def test_of_a_slower_step_the_kernels_come_first_if_they_are_a_part_of_it() -> (
    None
):
    slower = kernel(GEMM, 30, 200)
    now = side(slower, *USUAL[1:], steps=(50, 50.1, 50.2, 50.3), ranks=(0, 0))
    before = side(*USUAL, steps=(32, 32.1, 32.2, 32.3))
    limits = [each for each in LIMITS if each.metric != "device"]
    verdict = decided(now, before, *limits)
    _, words = causes.explain(verdict, PLAN, now, [before], 0.015)
    short = causes.kernel_name(GEMM)
    assert words[0] == (
        f"device +18.0 ms (the step: +18.0 ms): {short} +18.0 ms (200 calls as before)"
    )


def test_a_rank_whose_device_alone_has_more_to_do_is_named() -> None:
    more = (*USUAL, kernel("extra", 0.9, 1))
    now = replace(side(*USUAL, ranks=(0, 0.9)), kernels=more)
    (found,) = find_kernels(now, side(*USUAL))
    assert (found.rank, found.kernel) == (1, "extra")
    both = replace(side(*USUAL, ranks=(0.9, 0.9)), kernels=more)
    (found,) = find_kernels(both, side(*USUAL))
    assert found.rank is None


def test_communication_and_noise_are_no_cause() -> None:
    waiting = (*USUAL[:2], kernel(REDUCE, 40))
    assert find_kernels(side(*waiting), side(*USUAL)) == ()
    noise = (kernel(GEMM, 12.05, 200), *USUAL[1:])
    assert find_kernels(side(*noise), side(*USUAL)) == ()
    assert find_kernels(side(*USUAL, of_device=False), side(*USUAL)) == ()


def test_a_kernel_is_named_without_types_and_namespaces() -> None:
    name = "vectorized_elementwise_kernel<4, CUDAFunctor_add<float>, array<char*, 3ul> >"
    assert causes.kernel_name(ADD) == causes.kernel_name(name)
    assert len(causes.kernel_name(ADD)) <= 60
    assert (
        causes.kernel_name("void (anonymous namespace)::softmax<float>(float*)")
        == "softmax<float>"
    )


def test_a_step_that_grew_while_its_device_did_not_is_host_bound() -> None:
    before = side(
        *USUAL,
        steps=(30, 30.1, 30.2, 30.3),
        counters={"operators.count": 1_204},
    )
    now = side(
        *USUAL,
        steps=(60, 60.1, 60.2, 60.3),
        counters={"operators.count": 4_816},
    )
    verdict = decided(now, before)
    _, words = causes.explain(verdict, PLAN, now, [before], 0.015)
    assert words == (
        "operators.count 1,204 -> 4,816",
        "host-bound: the device waits 70 % of a step",
    )
    # if the device communicates for 12 of 60 ms, it does not wait then
    busier = side(*USUAL, steps=(60, 60.1, 60.2, 60.3), exposed=(12.0, 12.0))
    already = side(*USUAL, steps=(30, 30.1, 30.2, 30.3), exposed=(12.0, 12.0))
    _, words = causes.explain(verdict, PLAN, busier, [already], 0.015)
    assert words == ("host-bound: the device waits 50 % of a step",)
    waiting = replace(
        before, samples=replace(now.samples, exposed_seconds=None)
    )
    _, words = causes.explain(verdict, PLAN, waiting, [before], 0.015)
    assert "host-bound" not in " ".join(words)


def test_communication_that_nothing_hides_any_more_is_the_cause() -> None:
    before = side(*USUAL, steps=(30, 30.1, 30.2, 30.3), exposed=(1.0, 9.0))
    # the rank that waits least for others says how long it takes
    now = side(*USUAL, steps=(40, 40.1, 40.2, 40.3), exposed=(10.0, 10.5))
    verdict = decided(now, before)
    findings, words = causes.explain(verdict, PLAN, now, [before], 0.015)
    assert words == ("exposed communication +9.00 ms (the step: +10.0 ms)",)
    assert [each.share for each in findings] == [pytest.approx(0.9, rel=1e-3)]
    # less than half of the rise is not the cause
    now = side(*USUAL, steps=(40, 40.1, 40.2, 40.3), exposed=(5.0, 6.0))
    _, words = causes.explain(verdict, PLAN, now, [before], 0.015)
    assert words == ("host-bound: the device waits 41 % of a step",)


def test_the_wait_of_ddp_is_named_with_the_backward_pass_that_has_it() -> None:
    def phases(backward: Sequence[float]) -> tuple[StepPhases, ...]:
        return tuple(
            StepPhases(
                steps=30,
                own={
                    **dict.fromkeys(PHASES, (None, None)),
                    FORWARD: (0.01, 0.01),
                    BACKWARD: (each / 1e3, each / 1e3),
                    OTHER: (0.0, 0.0),
                },
                path={},
            )
            for each in backward
        )

    before = side(*USUAL, steps=(30, 30.1, 30.2, 30.3))
    now = side(*USUAL, steps=(40, 40.1, 40.2, 40.3), exposed=(9.0, 9.5))
    verdict = decided(now, before)
    before = replace(before, phases=phases((15, 15.1, 15.2, 15.1)))
    now = replace(now, phases=phases((25, 25.1, 25.2, 25.1)))
    _, words = causes.explain(verdict, PLAN, now, [before], 0.015)
    assert words == (
        "backward and exposed communication +10.0 ms (the step: +10.0 ms)",
    )


def test_the_verdict_says_what_is_known_of_the_device() -> None:
    work = (kernel(GEMM, 12.001, 200), *USUAL[1:])
    now = side(*work, steps=(27, 33, 29, 31))
    verdict = decided(now, side(*USUAL, steps=(30, 26, 34, 29)))
    said = sentences.reason(
        outcome("step", Drawn(), verdict, now, baseline_path="x.json")
    )
    device_time, _, step = said.partition("; ")
    assert device_time.startswith("device time: unchanged within 0.")
    assert step.startswith("the step: a change below ")
    assert step.endswith(
        " could not be seen, as the host is noisy (a step keeps the device busy for 60 %)"
    )
    # where communication fills the rest, it is not the host
    now = side(*work, steps=(27, 33, 29, 31), exposed=(11, 11))
    said = sentences.reason(
        outcome("step", Drawn(), verdict, now, baseline_path="x.json")
    )
    assert said.endswith(
        " could not be seen (a step keeps the device busy for 60 %)"
    )


def test_details_show_device_time_and_how_busy_the_device_is() -> None:
    assert [*terminal.device(side(*USUAL))] == [
        "device: 18.0 ms a step, busy for 61 % of it"
    ]
    assert [*terminal.device(side(*USUAL, of_device=False))] == []


def test_a_device_is_busy_for_at_most_the_whole_step() -> None:
    share = side(*USUAL, steps=(10, 10)).busy_share
    assert share is not None
    assert math.isclose(share, 1)
