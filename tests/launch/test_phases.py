"""Phases of steps that real ranks take: which are known, and that they add up. By counts, never by
times."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from pytest_ddpperf.launch import Launcher
from pytest_ddpperf.records.plan import Plan
from pytest_ddpperf.records.samples import LaunchSamples
from pytest_ddpperf.records.step_phases import (
    BACKWARD,
    DATA,
    EXPOSED,
    FORWARD,
    OPTIMIZER,
    OTHER,
    PHASES,
    RANK_WAIT,
)
from tests.launch.conftest import Bench, Recorder
from tests.torch_version import (
    COMPILES_ONCE,
    COUNTS_IN_COMPILED_CODE,
    NEEDS_RECORDER,
    PIPELINES_WORK,
    needs_torch,
)


class Blocks(nn.Module):
    def __init__(self, *, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.is_checkpointed = is_checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = (
                checkpoint(block, x, use_reentrant=False)
                if self.is_checkpointed
                else block(x)
            )
        return x


def training(kind: str) -> Any:
    def setup(ctx: Any) -> Any:
        module = Blocks(is_checkpointed=kind == "checkpointed")
        if kind == "fsdp":
            for block in module.blocks:
                fully_shard(block)
            model: Any = fully_shard(module)
        else:
            model = DistributedDataParallel(module)
        if kind == "compiled":
            # torch warns of hooks on all modules
            warnings.simplefilter("error")
            model = torch.compile(model, backend="eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        x = torch.randn(4, 16)

        def passes() -> Any:
            loss = model(x).sum()
            loss.backward()
            return loss

        def step() -> None:
            optimizer.zero_grad()
            if kind == "closure":
                optimizer.step(passes)
                return
            for _ in range(2 if kind == "accumulating" else 1):
                passes()
            optimizer.step()

        return step

    return setup


def known(samples: LaunchSamples) -> set[str]:
    assert samples.phases is not None
    return {
        phase
        for phase, ranks in samples.phases.own.items()
        if None not in ranks
    }


@NEEDS_RECORDER
@pytest.mark.parametrize(
    "kind",
    [
        "plain",
        "accumulating",
        "checkpointed",
        "closure",
        pytest.param(
            "compiled",
            marks=needs_torch(
                "2.11", "DDP is compiled anew when it is counted"
            ),
        ),
        "fsdp",
    ],
)
def test_all_phases_of_a_training_step_are_known_and_add_up(
    bench: Bench, kind: str
) -> None:
    samples = bench.measure(training(kind), warmup=4, steps=8)
    assert (samples.unfit, samples.unsettled, samples.notes) == ("", "", ())
    assert samples.counters["recompilations"] == 0
    found = samples.phases
    assert found is not None
    assert found.steps == 8
    assert known(samples) == {*PHASES, RANK_WAIT}
    middle = sorted(samples.step_seconds)[2:6]
    assert sum(map(sum, found.path.values())) == pytest.approx(
        fmean(middle), rel=1e-6
    )
    assert all(
        waited <= exposed
        for waited, exposed in zip(
            found.own[RANK_WAIT], found.own[EXPOSED], strict=True
        )
    )
    assert all(
        found.own[phase][rank] > 0
        for phase in (FORWARD, BACKWARD, OPTIMIZER)
        for rank in range(2)
    )


@COMPILES_ONCE
def test_stamps_compile_nothing_in_a_module_that_is_compiled_in_place(
    bench: Bench,
) -> None:
    def setup(ctx: Any) -> Any:
        model = Blocks()
        model.compile(backend="eager")
        return lambda: model(torch.ones(1, 16)).sum().backward()

    samples = bench.measure(setup, warmup=5, steps=4)
    assert (
        samples.unfit,
        samples.unsettled,
        samples.counters["recompilations"],
    ) == (
        "",
        "",
        0,
    )
    assert BACKWARD in known(samples)


@NEEDS_RECORDER
def test_other_threads_leave_the_phases_of_training_alone(bench: Bench) -> None:
    def setup(ctx: Any) -> Any:
        model, own = nn.Linear(16, 16), dist.new_group()

        def work() -> None:
            for _ in range(200):
                dist.all_reduce(torch.ones(1), group=own)
                nn.Linear(1, 1)(torch.ones(1)).sum().backward()

        thread = threading.Thread(target=work)
        thread.start()

        def step() -> None:
            model(torch.ones(4, 16)).sum().backward()
            time.sleep(0.002)

        yield step
        thread.join()

    samples = bench.measure(setup, warmup=4, steps=8)
    assert {FORWARD, BACKWARD} <= known(samples)
    assert samples.notes == ()
    assert samples.phases is not None
    assert set(samples.phases.own[EXPOSED]) == {0.0}


@NEEDS_RECORDER
def test_a_pass_that_lasts_into_the_next_step_is_noted(bench: Bench) -> None:
    def setup(ctx: Any) -> Any:
        def endless() -> Iterator[None]:
            from torch.optim.optimizer import (
                _global_optimizer_pre_hooks as hooks,
            )

            while True:
                for hook in hooks.values():
                    hook(None, (), {})  # type: ignore[arg-type]  # an optimizer that does not end
                yield

        return endless().__next__

    samples = bench.measure(setup, warmup=3, steps=4)
    assert samples.phases is None
    assert samples.notes == (
        "phases of the step are unknown: one of its passes did not end within it",
    )


@NEEDS_RECORDER
def test_a_step_without_a_backward_pass_has_no_such_phase(bench: Bench) -> None:
    def setup(ctx: Any) -> Any:
        model = nn.Linear(4, 4)
        return lambda: model(torch.ones(1, 4))

    assert known(bench.measure(setup, warmup=3, steps=4)) == {
        DATA,
        FORWARD,
        EXPOSED,
        OTHER,
        RANK_WAIT,
    }


@pytest.mark.parametrize("has_parameters", [True, False])
def test_a_module_without_parameters_begins_a_forward_pass_only_if_none_has_any(
    bench: Bench, tmp_path: Path, has_parameters: bool
) -> None:
    """The transforms of a data set are modules, too."""

    def setup(ctx: Any) -> Any:
        transform = nn.Sequential(nn.Flatten(), nn.ReLU())
        model = nn.Sequential(nn.ReLU(), nn.Identity())
        if has_parameters:
            model = nn.Sequential(nn.ReLU(), nn.Sequential(nn.Linear(4, 4)))
        yield lambda: model(transform(torch.ones(1, 4)))
        stamped = [len(each._forward_hooks) for each in (transform, model)]
        (tmp_path / str(ctx.rank)).write_text(str(stamped))

    bench.measure(setup, warmup=3, steps=4, ranks=1)
    expected = "[0, 1]" if has_parameters else "[1, 1]"
    assert (tmp_path / "0").read_text() == expected


@NEEDS_RECORDER
def test_a_module_that_takes_no_hooks_leaves_its_forward_pass_unknown(
    bench: Bench,
) -> None:
    def setup(ctx: Any) -> Any:
        model = torch.jit.script(nn.Linear(4, 4))
        return lambda: model(torch.ones(1, 4)).sum().backward()

    assert known(bench.measure(setup, warmup=3, steps=4)) == {
        BACKWARD,
        EXPOSED,
        OTHER,
        RANK_WAIT,
    }


@NEEDS_RECORDER
def test_a_remote_module_is_called_by_a_step_like_any_other(
    bench: Bench, tmp_path: Path
) -> None:
    def setup(ctx: Any) -> Any:
        from torch.distributed import rpc
        from torch.distributed.nn import RemoteModule

        options = rpc.TensorPipeRpcBackendOptions(
            init_method=f"file://{tmp_path}/{ctx.rank}"
        )
        rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
        remote, dense = (
            RemoteModule("alone/cpu", nn.Linear, (4, 4)),
            DistributedDataParallel(nn.Linear(4, 4)),
        )
        yield lambda: dense(remote(torch.ones(1, 4))).sum().backward()
        rpc.shutdown()

    samples = bench.measure(setup, warmup=4, steps=4)
    assert samples.notes == ()
    assert samples.counters["gradient_bytes"] == (4 * 4 + 4) * 4
    assert {FORWARD, BACKWARD, EXPOSED} <= known(samples)


def on_critical_path(samples: LaunchSamples, phase: str) -> list[float]:
    assert samples.phases is not None
    return list(samples.phases.path[phase])


@NEEDS_RECORDER
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("pipeline", marks=PIPELINES_WORK),
        "blocking",
        "tensor parallel",
    ],
)
def test_a_wait_leads_to_the_rank_that_is_late(bench: Bench, kind: str) -> None:
    """Of messages, and of functional collectives, which DTensor uses."""

    class Slow(nn.Module):
        def __init__(self, rank: int) -> None:
            super().__init__()
            self.layer, self.is_late = nn.Linear(16, 16), rank == 1

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            time.sleep(0.3 * self.is_late)
            return torch.relu(self.layer(x))

    def setup(ctx: Any) -> Any:
        model, x = Slow(ctx.rank), torch.ones(4, 16)
        if kind == "pipeline":
            from torch.distributed.pipelining import PipelineStage, Schedule1F1B

            stage = PipelineStage(model, ctx.rank, 2, ctx.device)
            schedule = Schedule1F1B(
                stage, n_microbatches=2, loss_fn=nn.functional.mse_loss
            )
            return lambda: (
                schedule.step(x)
                if ctx.rank == 0
                else schedule.step(target=x, losses=[])
            )
        if kind == "tensor parallel":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.tensor.parallel import (
                RowwiseParallel,
                parallelize_module,
            )

            mesh = init_device_mesh("cpu", (2,))
            parallelize_module(
                model.layer, mesh, RowwiseParallel(input_layouts=Replicate())
            )
            return lambda: model(x).sum().backward()

        def step() -> None:
            if ctx.rank == 0:
                dist.send(torch.ones(1), 1)
                dist.recv(torch.ones(1), 1)
            else:
                dist.recv(torch.ones(1), 0)
                model(x)
                dist.send(torch.ones(1), 0)

        return step

    samples = bench.measure(setup, warmup=4, steps=4)
    assert samples.notes == ()
    assert {EXPOSED, RANK_WAIT} <= known(samples)
    first, late = on_critical_path(samples, FORWARD)
    assert late > first
    assert samples.phases is not None
    assert samples.phases.own[RANK_WAIT][0]


@NEEDS_RECORDER
def test_a_wait_for_buffers_leads_to_the_rank_that_is_late(
    bench: Bench,
) -> None:
    """DDP broadcasts those of rank 0 in its forward pass."""

    def setup(ctx: Any) -> Any:
        layers = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16))
        model, x = DistributedDataParallel(layers), torch.ones(4, 16)

        def step() -> None:
            time.sleep(0.3 * (ctx.rank == 0))
            model(x).sum().backward()

        return step

    found = bench.measure(setup, warmup=4, steps=4).phases
    assert found is not None
    late, other = found.path[DATA]
    assert late > other
    late, other = found.own[RANK_WAIT]
    assert other is not None
    assert other > (late or 0)


@NEEDS_RECORDER
def test_a_wait_for_whoever_sends_is_unknown(bench: Bench) -> None:
    def setup(ctx: Any) -> Any:
        value = torch.ones(1)
        return lambda: (
            dist.recv(value) if ctx.rank == 0 else dist.send(value, 0)
        )

    samples = bench.measure(setup, warmup=4, steps=4)
    assert samples.notes == ()
    assert samples.phases is not None
    assert (samples.phases.path, samples.phases.own[EXPOSED][0]) == ({}, None)


@COMPILES_ONCE
@COUNTS_IN_COMPILED_CODE
@NEEDS_RECORDER
def test_waits_in_compiled_code_are_unknown(bench: Bench) -> None:
    def setup(ctx: Any) -> Any:
        @torch.compile(backend="aot_eager", fullgraph=True)
        def reduced(x: torch.Tensor) -> torch.Tensor:
            return functional.all_reduce(x, "sum", dist.group.WORLD) + 1

        return lambda: reduced(torch.ones(4))

    samples = bench.measure(setup, warmup=4, steps=4)
    assert samples.counters["all_reduce.count"] == 1
    assert (
        samples.unfit,
        samples.unsettled,
        samples.counters["recompilations"],
    ) == (
        "",
        "",
        0,
    )
    assert samples.phases is not None
    assert samples.phases.own[EXPOSED] == (None, None)


def test_an_optimizer_in_backward_is_no_phase_of_its_own(bench: Bench) -> None:
    def setup(ctx: Any) -> Any:
        model = nn.Linear(4, 4)
        for parameter in model.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.01)
            parameter.register_post_accumulate_grad_hook(
                lambda _, optimizer=optimizer: optimizer.step()
            )  # type: ignore[misc]
        return lambda: model(torch.ones(1, 4)).sum().backward()

    assert OPTIMIZER not in known(bench.measure(setup, warmup=3, steps=4))


def test_user_code_that_replaces_backward_and_takes_several_passes_is_seen(
    bench: Bench,
) -> None:
    def setup(ctx: Any) -> Any:
        model, own = nn.Linear(4, 4), torch.Tensor.backward

        def backward(self: torch.Tensor, *arguments: Any) -> None:
            own(self, *arguments)

        torch.Tensor.backward = backward  # type: ignore[assignment, method-assign]

        def step() -> None:
            torch.autograd.grad(
                model(torch.ones(1, 4)).sum(), list(model.parameters())
            )
            model(torch.ones(1, 4)).sum().backward()  # type: ignore[no-untyped-call]

        return step

    assert {FORWARD, BACKWARD} <= known(bench.measure(setup, warmup=3, steps=4))


@NEEDS_RECORDER
def test_a_full_recorder_leaves_the_phases_of_the_last_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "8")
    launcher = Launcher(dict)
    try:
        plan = Plan(
            world_size=2, backend="gloo", device="cpu", warmup=3, steps=20
        )
        found = launcher.measure(
            plan, lambda ctx: lambda: dist.all_reduce(torch.ones(1)), Recorder()
        ).phases
    finally:
        launcher.close()
    assert found is not None
    assert 1 <= found.steps < 8


@NEEDS_RECORDER
def test_phases_that_cannot_be_taken_leave_the_measurement_as_it_is(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def setup(ctx: Any) -> Any:
        from pytest_ddpperf.rank import stamps

        monkeypatch.setattr(stamps.Stamps, "install", None)
        return lambda: dist.all_reduce(torch.ones(1))

    samples = bench.measure(setup, warmup=3, steps=3)
    assert samples.phases is None
    assert samples.notes == (
        "phases of the step are unknown: TypeError: 'NoneType' object is not callable",
    )
