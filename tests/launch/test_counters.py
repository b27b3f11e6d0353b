"""Counters of a step, as equalities: those of the forum thread "Node-to-node communication traffic
in Distributed Data Parallel & RPC Model Parallel", and what the counters do not know."""

from __future__ import annotations

import copy
import itertools
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from pytest_ddpperf.rank import torch_names
from pytest_ddpperf.rank.group import NoGroup
from pytest_ddpperf.rank.sent import HAS_HOOKS, Sent
from pytest_ddpperf.records.metric import WORK
from pytest_ddpperf.records.samples import Counters
from tests.launch.conftest import Bench
from tests.torch_version import (
    COMPILES_ONCE,
    COUNTS_IN_COMPILED_CODE,
    NEEDS_RECORDER,
    TORCH,
)

FLOAT = 4  # bytes
GRADIENTS = (20 * 8 + 8 + 8 * 3 + 3) * FLOAT  # of `network`


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 3))


def counted(bench: Bench, setup: Any, *, warmup: int = 3) -> Counters:
    return bench.measure(setup, warmup=warmup).counters


def counted_rpc(bench: Bench, trainer: Any) -> Counters:
    plan = replace(bench.plan(warmup=3), parameter_servers=2)
    samples = bench.launch(plan, trainer, None, None)
    assert samples.blocked_seconds is not None
    assert [len(steps) for steps in samples.blocked_seconds] == [3, 3]
    return samples.counters


def training(batch: int, model: Any = network, **ddp: Any) -> Any:
    def setup(ctx: Any) -> Any:
        replicated = DDP(model(), **ddp)
        inputs = torch.randn(batch, 20)
        return lambda: replicated(inputs).sum().backward()

    return setup


# --- DDP


def known(counters: Counters) -> dict[str, int]:
    """Return the counters that are not 0, without the memory of the process, which varies, and the
    work of a step."""
    return {
        name: count
        for name, count in counters.items()
        if count and name not in ("peak_rss.bytes", *WORK)
    }


def sent(**moved: tuple[int, int]) -> dict[str, int]:
    """Return the counters of operations, of which so many moved so many bytes."""
    figures = {f"{kind}.count": count for kind, (count, _) in moved.items()}
    return figures | {
        f"{kind}.bytes": size for kind, (_, size) in moved.items()
    }


@NEEDS_RECORDER
@pytest.mark.parametrize("batch", [1, 64])
def test_ddp_reduces_the_gradients_bytes_whatever_the_batch_size(
    bench: Bench, batch: int
) -> None:
    counters = counted(bench, training(batch))
    one = (1, GRADIENTS)
    sizes = dict.fromkeys(
        ("gradient_bytes", "buckets.largest_bytes", "parameters.bytes"),
        GRADIENTS,
    )
    assert known(counters) == {
        **sent(all_reduce=one, collectives=one),
        **sizes,
        "buckets": 1,
    }
    assert {name for name in counters if counters[name] is None} == {
        "rpc.calls",
        "rpc.bytes",
        "kernels.count",
        "peak_memory.bytes",
        "host_syncs",
        "h2d.bytes",
        "d2h.bytes",
    }
    assert counters["peak_rss.bytes"]
    assert known(counted(bench, training(batch))) == known(counters)


def test_flops_are_those_of_the_batch_and_each_operator_counts(
    bench: Bench,
) -> None:
    # Both layers and the gradients of their weights, and of the second layer's input.
    products = 2 * (20 * 8) + 3 * (8 * 3)
    assert counted(bench, training(64))["flops"] == 2 * 64 * products

    def setup(ctx: Any) -> Any:
        values = torch.ones(8)
        return lambda: [values.mul_(2) for _ in range(5)]

    counters = counted(bench, setup)
    assert (counters["operators.count"], counters["flops"]) == (5, 0)


@NEEDS_RECORDER
def test_more_buckets_are_more_all_reduces_of_as_many_bytes(
    bench: Bench,
) -> None:
    counters = counted(bench, training(4, bucket_cap_mb=1e-5))
    # a bucket for each of weights and biases
    assert counters["all_reduce.count"] == counters["buckets"] == 4
    assert counters["all_reduce.bytes"] == GRADIENTS
    assert counters["buckets.largest_bytes"] == 20 * 8 * FLOAT


@NEEDS_RECORDER
def test_gradients_reduced_one_by_one_are_an_all_reduce_each(
    bench: Bench,
) -> None:
    def setup(ctx: Any) -> Any:
        model, inputs = network(), torch.randn(4, 20)

        def step() -> None:
            model(inputs).sum().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)

        return step

    counters = counted(bench, setup)
    assert (counters["all_reduce.count"], counters["all_reduce.bytes"]) == (
        4,
        GRADIENTS,
    )
    assert (
        counters["gradient_bytes"],
        counters["buckets"],
        counters["parameters.bytes"],
    ) == (None, None, GRADIENTS)


@NEEDS_RECORDER
@pytest.mark.parametrize(("reshards", "gathers"), [(True, 2), (False, 1)])
def test_fsdp_scatters_padded_gradients_and_gathers_parameters(
    bench: Bench, reshards: bool, gathers: int
) -> None:
    def setup(ctx: Any) -> Any:
        from torch.distributed.fsdp import fully_shard

        model, inputs = network(), torch.randn(4, 20)
        for layer in (model[0], model[2]):  # type: ignore[index]
            fully_shard(layer, reshard_after_forward=reshards)
        fully_shard(model)
        return lambda: model(inputs).sum().backward()

    padded = GRADIENTS + (8 + 1) * FLOAT  # of 3 rows, for two ranks
    shard = padded // 2  # of the first rank
    moved = sent(
        reduce_scatter=(2, padded), all_gather=(2 * gathers, gathers * padded)
    )
    moved |= sent(collectives=(2 + 2 * gathers, (1 + gathers) * padded))
    assert known(counted(bench, setup)) == {**moved, "parameters.bytes": shard}


@NEEDS_RECORDER
def test_what_sharded_tensors_send_is_counted(bench: Bench) -> None:
    """A DTensor sends within an operator: the norm of gradients that FSDP2 shards, and the output
    of a layer whose columns are on several ranks."""

    def clipped(ctx: Any) -> Any:
        from torch.distributed.fsdp import fully_shard

        model, inputs = network(), torch.randn(4, 20)
        fully_shard(model)

        def step() -> None:
            model(inputs).sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)

        return step

    def split(ctx: Any) -> Any:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            parallelize_module,
        )

        model = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 8))
        mesh = init_device_mesh("cpu", (2,))
        parallel = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, mesh, parallel)
        inputs = torch.randn(4, 32)
        return lambda: model(inputs).sum().backward()

    norms = counted(bench, clipped)
    assert (norms["all_reduce.count"], norms["all_reduce.bytes"]) == (
        1,
        4 * FLOAT,
    )
    assert norms["reduce_scatter.count"] == 1
    output = counted(bench, split)
    assert (output["all_reduce.count"], output["all_reduce.bytes"]) == (
        1,
        4 * 8 * FLOAT,
    )
    # a rank's half: both products, their weights' gradients, and the hidden layer's
    assert output["flops"] == 2 * 4 * (2 * 32 * 8 + 3 * 8 * 8)


@NEEDS_RECORDER
def test_each_kind_of_operation_has_its_bytes(bench: Bench) -> None:
    def setup(ctx: Any) -> Any:
        from torch.distributed import _functional_collectives as functional

        def step() -> None:
            five, ten = torch.ones(5), torch.ones(10)
            dist.all_gather([five, five.clone()], torch.ones(5))
            dist.all_gather_into_tensor(ten, five)
            functional.wait_tensor(
                functional.all_gather_tensor(torch.ones(5), 0, dist.group.WORLD)
            )  # type: ignore[arg-type]
            # on Gloo two all-reduces
            dist.reduce_scatter(five, [torch.ones(5), torch.ones(5)])
            dist.reduce_scatter_tensor(five, ten)
            dist.all_to_all_single(torch.ones(10), ten)
            dist.broadcast(five, 0)
            dist.gather(
                five, [torch.ones(5), torch.ones(5)] if ctx.rank == 0 else None
            )
            dist.barrier()
            dist.send(five, 1) if ctx.rank == 0 else dist.recv(five, 0)

        return step

    expected = {
        "all_gather": (3, 30),
        "reduce_scatter": (2, 20),
        "all_to_all": (1, 10),
        "broadcast": (1, 5),
    }
    expected |= {
        "send": (1, 5),
        "recv": (1, 5),
        "collectives": (8, 30 + 20 + 10 + 5 + 5),
    }
    assert known(counted(bench, setup)) == sent(
        **{kind: (n, size * FLOAT) for kind, (n, size) in expected.items()}
    )


@NEEDS_RECORDER
def test_buffers_and_bitmaps_are_counted_apart(bench: Bench) -> None:
    def with_buffers() -> nn.Module:
        return nn.Sequential(
            nn.Linear(20, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        )

    counters = counted(
        bench, training(4, with_buffers, find_unused_parameters=True)
    )
    assert (counters["all_reduce.count"], counters["all_reduce.bytes"]) == (
        1,
        GRADIENTS + 2 * 8 * FLOAT,
    )
    # by dtype
    assert (counters["broadcast.count"], counters["broadcast.bytes"]) == (
        2,
        2 * 8 * FLOAT + 8,
    )
    assert counters["collectives.count"] == 4  # the bitmap, too


@NEEDS_RECORDER
def test_the_copy_of_a_ddp_module_adds_nothing_to_what_is_synchronised(
    bench: Bench,
) -> None:
    def setup(ctx: Any) -> Any:
        replicated, inputs = DDP(network()), torch.randn(4, 20)
        average, teacher = (
            torch.optim.swa_utils.AveragedModel(replicated),
            copy.deepcopy(replicated),
        )

        def step() -> None:
            with torch.no_grad():
                teacher(inputs)
            replicated(inputs).sum().backward()
            average.update_parameters(replicated)

        return step

    counters = counted(bench, setup)
    assert (counters["gradient_bytes"], counters["buckets"]) == (GRADIENTS, 1)
    assert (counters["all_reduce.bytes"], counters["parameters.bytes"]) == (
        GRADIENTS,
        3 * GRADIENTS,
    )


@NEEDS_RECORDER
@pytest.mark.parametrize(
    "options", [{}, {"static_graph": True}, {"find_unused_parameters": True}]
)
def test_every_ddp_module_that_synchronises_in_the_step_counts(
    bench: Bench, options: dict[str, bool]
) -> None:
    def setup(ctx: Any) -> Any:
        first, second = (
            DDP(network(), **options),
            torch.compile(DDP(network(), **options), backend="eager"),
        )
        inputs = torch.randn(4, 20)

        def step() -> None:
            first(inputs).sum().backward()
            second(inputs).sum().backward()

        return step

    counters = counted(bench, setup, warmup=4)
    assert (counters["gradient_bytes"], counters["buckets"]) == (
        2 * GRADIENTS,
        2,
    )
    assert (counters["all_reduce.count"], counters["all_reduce.bytes"]) == (
        2,
        2 * GRADIENTS,
    )


@NEEDS_RECORDER
def test_a_step_that_only_accumulates_synchronises_nothing(
    bench: Bench,
) -> None:
    def setup(ctx: Any) -> Any:
        replicated, inputs = DDP(network()), torch.randn(4, 20)

        def step() -> None:
            with replicated.no_sync():
                replicated(inputs).sum().backward()

        return step

    counters = counted(bench, setup)
    assert (
        counters["gradient_bytes"],
        counters["buckets"],
        counters["all_reduce.count"],
    ) == (0, 0, 0)


def test_what_ddp_synchronises_in_python_is_unknown(bench: Bench) -> None:
    def setup(ctx: Any) -> Any:
        torch._dynamo.config.optimize_ddp = "python_reducer"
        return training(4)(ctx)

    counters = counted(bench, setup)
    assert (counters["gradient_bytes"], counters["buckets"]) == (None, None)


@NEEDS_RECORDER
def test_a_layer_that_is_frozen_later_is_still_in_the_bitmap(
    bench: Bench,
) -> None:
    def setup(ctx: Any) -> Any:
        replicated, inputs = (
            DDP(network(), find_unused_parameters=True),
            torch.randn(4, 20),
        )
        replicated.module[0].requires_grad_(requires_grad=False)
        return lambda: replicated(inputs).sum().backward()

    counters = counted(bench, setup)
    assert (counters["all_reduce.count"], counters["collectives.count"]) == (
        1,
        2,
    )
    assert (
        counters["gradient_bytes"] == counters["all_reduce.bytes"] == GRADIENTS
    )


# --- modules that cannot be asked


class Refusing(nn.Module):
    """A module that answers nothing."""

    def refuse(self, *_: Any, **__: Any) -> Any:
        raise ValueError("not to be asked")

    parameters = named_parameters = modules = named_modules = children = refuse
    register_forward_hook = register_forward_pre_hook = state_dict = refuse

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs


def odd_module(kind: str) -> Any:
    """Return an object that the process keeps, and that has no parameters with bytes of their
    own."""
    if kind == "refusing":
        return Refusing()
    if kind == "lazy":
        return nn.LazyLinear(3)
    if kind == "on meta":
        return nn.Linear(20, 8, device="meta")
    if kind == "unfinished":
        return nn.Module.__new__(nn.Linear)
    if kind == "ddp that failed":
        try:
            return DDP(nn.ReLU())
        except RuntimeError as error:
            return error  # whose frames have the module
    raise AssertionError(kind)


@NEEDS_RECORDER
@pytest.mark.parametrize(
    "kind", ["refusing", "lazy", "on meta", "unfinished", "ddp that failed"]
)
def test_a_module_that_cannot_be_asked_leaves_counters_known(
    bench: Bench, kind: str
) -> None:
    def setup(ctx: Any) -> Any:
        kept, step = odd_module(kind), training(4)(ctx)
        return lambda: (kept, step())

    samples = bench.measure(setup, warmup=3)
    assert samples.notes == ()
    assert (
        samples.counters["gradient_bytes"]
        == samples.counters["parameters.bytes"]
        == GRADIENTS
    )


@NEEDS_RECORDER
def test_a_module_without_a_table_of_parameters_leaves_their_bytes_unknown(
    bench: Bench,
) -> None:
    def setup(ctx: Any) -> Any:
        kept, step = nn.Linear(4, 4), training(4)(ctx)
        vars(kept)["_parameters"] = None
        return lambda: (kept, step())

    samples = bench.measure(setup, warmup=3)
    assert samples.notes == (
        "parameters.bytes is unknown: AttributeError: 'NoneType' object has no attribute 'values'",
    )
    assert samples.counters["parameters.bytes"] is None
    assert (
        samples.counters["gradient_bytes"]
        == samples.counters["all_reduce.bytes"]
        == GRADIENTS
    )


@NEEDS_RECORDER
@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("script", GRADIENTS),
        pytest.param("compiled", GRADIENTS, marks=COUNTS_IN_COMPILED_CODE),
        # padded to an even number, for two ranks
        ("fsdp", (GRADIENTS + FLOAT) // 2),
        ("fsdp with views", (GRADIENTS + FLOAT) // 2),
        # half of the outputs, and of the next layer's inputs
        ("dtensor", (20 * 4 + 4 + 4 * 3 + 3) * FLOAT),
    ],
)
def test_parameters_of_wrapped_and_sharded_modules_are_counted_once(
    bench: Bench, kind: str, size: int
) -> None:
    def setup(ctx: Any) -> Any:
        model, inputs = network(), torch.randn(4, 20)
        if kind == "script":
            model = torch.jit.script(model)
        elif kind == "compiled":
            model = torch.compile(model, backend="eager")
        elif kind == "dtensor":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.tensor.parallel import (
                ColwiseParallel,
                RowwiseParallel,
                parallelize_module,
            )

            parallelize_module(
                model,
                init_device_mesh("cpu", (2,)),
                {"0": ColwiseParallel(), "2": RowwiseParallel()},
            )
        else:
            from torch.distributed.fsdp import FullyShardedDataParallel

            model = FullyShardedDataParallel(
                model,
                use_orig_params="views" in kind,
                device_id=torch.device("cpu"),
            )
        return lambda: model(inputs).sum().backward()

    samples = bench.measure(setup, warmup=4)
    assert samples.notes == ()
    assert samples.counters["parameters.bytes"] == size


def test_what_a_step_sends_is_unknown_if_it_cannot_be_read(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def setup(ctx: Any) -> Any:
        from pytest_ddpperf.rank import sent

        def fail(*_: object) -> None:
            raise ValueError("of another version of torch")

        monkeypatch.setattr(sent, "_operation", fail)
        return training(4)(ctx)

    samples = bench.measure(setup, warmup=3)
    assert samples.notes == (
        "what a step sends is unknown: ValueError: of another version of torch",
    )
    assert (
        samples.counters["all_reduce.count"],
        samples.counters["broadcast.count"],
    ) == (None, None)
    assert samples.counters["gradient_bytes"] == GRADIENTS


@NEEDS_RECORDER
@pytest.mark.parametrize(
    ("name", "unknown"),
    [
        (torch_names.ENGINE[0], "phases of the step are unknown"),
        (
            "torch._C._distributed_c10d:Work.wait",
            "phases of the step are unknown",
        ),
        (
            "torch.distributed:Reducer.get_backward_stats",
            "what a step sends is unknown",
        ),
        ("torch.utils._pytree:tree_leaves", "what a step sends is unknown"),
        pytest.param(
            "torch._dynamo.utils:curr_frame",
            "what a step compiles is unknown",
            marks=COUNTS_IN_COMPILED_CODE,
        ),
        pytest.param(
            "torch._dynamo.utils:counters",
            "what a step compiles is unknown",
            marks=COUNTS_IN_COMPILED_CODE,
        ),
    ],
)
def test_a_private_name_that_torch_lacks_leaves_figures_unknown(
    bench: Bench, name: str, unknown: str
) -> None:
    def setup(ctx: Any) -> Any:
        from pytest_ddpperf.rank.torch_names import NAMES

        NAMES[name] = "torch:of_another_version"
        return training(4)(ctx)

    samples = bench.measure(setup, warmup=3)
    (note,) = samples.notes
    assert note.startswith(f"{unknown}: AttributeError: torch ")
    assert note.endswith(f"has no {name}")
    assert samples.counters["parameters.bytes"] == GRADIENTS


@NEEDS_RECORDER
def test_a_half_precision_hook_halves_the_bytes_and_not_the_gradients(
    bench: Bench,
) -> None:
    def setup(ctx: Any) -> Any:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
            fp16_compress_hook,
        )

        replicated = DDP(network())
        replicated.register_comm_hook(None, fp16_compress_hook)
        inputs = torch.randn(4, 20)
        return lambda: replicated(inputs).sum().backward()

    counters = counted(bench, setup)
    assert (counters["all_reduce.bytes"], counters["gradient_bytes"]) == (
        GRADIENTS // 2,
        GRADIENTS,
    )


@NEEDS_RECORDER
def test_what_the_sources_do_not_agree_on_is_unknown(bench: Bench) -> None:
    """PowerSGD issues two of its three collectives from callbacks of futures, where the dispatcher
    sees them only if the first had ended before the callback was there. Hooks of process groups see
    all."""

    def setup(ctx: Any) -> Any:
        from torch.distributed.algorithms.ddp_comm_hooks import (
            powerSGD_hook as powersgd,
        )

        replicated = DDP(nn.Linear(64, 64))
        state = powersgd.PowerSGDState(
            None, start_powerSGD_iter=2, min_compression_rate=1
        )
        replicated.register_comm_hook(state, powersgd.powerSGD_hook)
        inputs = torch.randn(4, 64)
        return lambda: replicated(inputs).sum().backward()

    counters = counted(bench, setup, warmup=6)
    sent, all_known = (
        (counters["all_reduce.count"], counters["all_reduce.bytes"]),
        (3, (64 + 64 + 64) * FLOAT),
    )
    assert sent == all_known or (sent == (None, None) and not HAS_HOOKS)
    assert counters["collectives.count"] == counters["all_reduce.count"]
    assert (counters["broadcast.count"], counters["gradient_bytes"]) == (
        0,
        (64 * 64 + 64) * FLOAT,
    )


@pytest.mark.skipif(not HAS_HOOKS, reason="process groups have no hooks")
def test_what_a_group_sends_that_the_step_makes_is_unknown(
    bench: Bench,
) -> None:
    def step() -> None:
        dist.all_reduce(torch.ones(5), group=(group := dist.new_group()))
        dist.destroy_process_group(group)

    counters = counted(bench, lambda ctx: step)
    assert (counters["all_reduce.count"], counters["all_reduce.bytes"]) == (
        None,
        None,
    )


@pytest.mark.skipif(not HAS_HOOKS, reason="process groups have no hooks")
def test_what_a_thread_of_the_step_sends_to_another_rank_is_unknown(
    bench: Bench,
) -> None:
    def setup(ctx: Any) -> Any:
        def send() -> None:
            dist.send(torch.ones(5), 1) if ctx.rank == 0 else dist.recv(
                torch.ones(5), 0
            )

        def step() -> None:
            thread = threading.Thread(target=send)
            thread.start()
            thread.join()

        return step

    counters = counted(bench, setup)
    assert (counters["send.count"], counters["recv.count"]) == (None, None)


@NEEDS_RECORDER
def test_nothing_is_known_of_a_short_warm_up_and_of_no_model(
    bench: Bench,
) -> None:
    assert set(counted(bench, training(4), warmup=2).values()) == {None}
    counters = counted(
        bench, lambda ctx: lambda: dist.all_reduce(torch.ones(5))
    )
    assert (counters["all_reduce.count"], counters["all_reduce.bytes"]) == (
        1,
        5 * FLOAT,
    )
    assert counters["gradient_bytes"] is None
    assert counted(bench, lambda ctx: lambda: None)["all_reduce.count"] == 0


@COMPILES_ONCE
@COUNTS_IN_COMPILED_CODE
@NEEDS_RECORDER
def test_counting_leaves_compilation_alone(bench: Bench) -> None:
    def setup(ctx: Any) -> Any:
        @torch.compile(backend="eager")
        def broken(x: torch.Tensor) -> torch.Tensor:
            y = torch.sin(x)
            torch._dynamo.graph_break()  # type: ignore[no-untyped-call]
            return y + 1

        late = torch.compile(lambda x: torch.sin(x) + 1, backend="eager")
        value, steps = torch.ones(3), itertools.count(1)

        def step() -> None:
            dist.all_reduce(broken(value))
            if next(steps) == 3:  # which is counted
                late(value)

        return step

    samples = bench.measure(setup, warmup=4)
    assert samples.counters["all_reduce.count"] == 1
    assert samples.counters["recompilations"] == 1
    assert samples.counters["graph_breaks"] == 1
    assert (samples.unfit, samples.unsettled, samples.warmup) == ("", "", 4)


def test_compiled_code_is_compiled_code_after_counting(bench: Bench) -> None:
    """Before torch 2.9, to count in it would switch torch.compile off for good."""

    def setup(ctx: Any) -> Any:
        runs: list[int] = []

        def compiler(graph: Any, _: Any) -> Any:
            def run(*args: Any) -> Any:
                runs.append(1)
                return graph(*args)

            return run

        model: Any = torch.compile(nn.Linear(3, 3), backend=compiler)
        value = torch.ones(3)

        def step() -> None:
            model(value)
            ctx.record("runs", len(runs), better=None)
            runs.clear()

        return step

    samples = bench.measure(setup, warmup=4)
    assert samples.recorded["runs"] == ((1.0,) * 3,) * 2
    is_counted = TORCH >= (2, 9)
    assert (samples.counters["operators.count"] is not None) == is_counted
    said = (
        "what a step sends is unknown: to count would switch torch.compile off in this"
        " torch"
    )
    assert (said in samples.notes) == (not is_counted)


def test_counting_in_compiled_code_is_refused_by_a_torch_that_would_stop_compiling(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "torch.utils._python_dispatch:TorchDispatchMode.ignore_compile_internals"
    monkeypatch.setitem(torch_names.NAMES, name, "torch:absent")
    for has_compiled in (False, True):
        sent = Sent(NoGroup(), has_compiled=has_compiled)
        with sent.watching():
            torch.ones(2).add(1)
        work = sent.work(has_compiled=False)
        assert work == (
            {} if has_compiled else {"operators.count": 2, "flops": 0}
        )


@NEEDS_RECORDER
def test_functional_collectives_are_counted_like_the_others(
    bench: Bench,
) -> None:
    def setup(ctx: Any) -> Any:
        from torch.distributed import _functional_collectives as functional

        value = torch.ones(5)
        return lambda: functional.wait_tensor(
            functional.all_reduce(value, "sum", dist.group.WORLD)
        )

    counters = counted(bench, setup)
    assert (counters["all_reduce.count"], counters["all_reduce.bytes"]) == (
        1,
        5 * FLOAT,
    )


# --- RPC


@pytest.mark.parametrize("kind", ["remote module", "references"])
def test_parameters_in_another_process_are_not_counted(
    bench: Bench, kind: str
) -> None:
    def trainer(ctx: Any) -> Any:
        from torch.distributed.nn import RemoteModule
        from torch.distributed.optim import DistributedOptimizer

        dense, inputs = DDP(network()), torch.randn(4, 20)
        if kind == "remote module":
            remote = RemoteModule("ps0/cpu", nn.Linear, (20, 20))
            references = remote.remote_parameters()
        else:
            remote = rpc.remote("ps0", nn.Linear, (20, 20))
            references = rpc.rpc_sync("ps0", parameters_of, (remote,))
            remote = remote.rpc_sync()
        references += [rpc.RRef(parameter) for parameter in dense.parameters()]
        optimizer: Any = DistributedOptimizer(
            torch.optim.SGD, references, lr=0.1
        )  # type: ignore[no-untyped-call]

        def step() -> None:
            with dist_autograd.context() as context:
                dist_autograd.backward(
                    context, [dense(remote.forward(inputs)).sum()]
                )
                optimizer.step(context)

        return step

    counters = counted_rpc(bench, trainer)
    assert (
        counters["gradient_bytes"] == counters["parameters.bytes"] == GRADIENTS
    )
    assert counters["rpc.calls"]


def parameters_of(module: Any) -> list[Any]:
    return [
        rpc.RRef(parameter) for parameter in module.local_value().parameters()
    ]


def double(values: torch.Tensor) -> torch.Tensor:
    return values * 2


def images(batch: int) -> torch.Tensor:
    return torch.randn(batch, 3, 5, 7)  # B x C x W x H at the boundary


BOUNDARY = 3 * 5 * 7 * FLOAT


@NEEDS_RECORDER
@pytest.mark.parametrize("batch", [1, 16])
def test_forward_bytes_grow_with_the_batch_at_the_boundary(
    bench: Bench, batch: int
) -> None:
    def trainer(ctx: Any) -> Any:
        values = images(batch)
        return lambda: rpc.rpc_sync("ps0", double, (values,))

    counters = counted_rpc(bench, trainer)
    # there and back
    assert (counters["rpc.calls"], counters["rpc.bytes"]) == (
        1,
        2 * batch * BOUNDARY,
    )
    assert counters["all_reduce.count"] == 0


def test_backward_carries_what_forward_carried_for_tensors_that_require_a_gradient(
    bench: Bench,
) -> None:
    def trainer(ctx: Any) -> Any:
        values = images(4).requires_grad_()

        def step() -> None:
            with dist_autograd.context() as context:
                dist_autograd.backward(
                    context, [rpc.rpc_sync("ps0", double, (values,)).sum()]
                )

        return step

    forward = 2 * 4 * BOUNDARY
    assert {
        name: count
        for name, count in counted_rpc(bench, trainer).items()
        if name.startswith("rpc.")
    } == {
        "rpc.calls": 1,
        "rpc.calls.trainer": 0,
        "rpc.calls.parameter_server": 1,
        "rpc.calls.master": 0,
        "rpc.bytes": forward + forward,
        "rpc.bytes.forward": forward,
        "rpc.bytes.backward": forward,
    }


def test_references_and_asynchronous_calls_are_counted(bench: Bench) -> None:
    def trainer(ctx: Any) -> Any:
        values = images(2)

        def step() -> None:
            rpc.rpc_async("ps0", double, (values,))  # nobody waits for it
            rpc.remote("ps1", double, (values,)).to_here()

        return step

    counters = counted_rpc(bench, trainer)
    assert (counters["rpc.calls"], counters["rpc.bytes"]) == (
        3,
        4 * 2 * BOUNDARY,
    )
    assert counters["rpc.calls.parameter_server"] == 3


def test_a_backward_that_was_not_seen_leaves_the_bytes_unknown(
    bench: Bench,
) -> None:
    def trainer(ctx: Any) -> Any:
        # not by the name that is watched
        from torch._C._distributed_autograd import backward

        values = images(2).requires_grad_()

        def step() -> None:
            with dist_autograd.context() as context:
                backward(
                    context, [rpc.rpc_sync("ps0", double, (values,)).sum()]
                )

        return step

    counters = counted_rpc(bench, trainer)
    assert (counters["rpc.calls"], counters["rpc.bytes"]) == (1, None)


def test_calls_between_trainers_are_counted_of_one_step_alone(
    bench: Bench,
) -> None:
    def trainer(ctx: Any) -> Any:
        (other,) = set(ctx.workers["trainer"]) - {ctx.name}
        values = images(2)
        return lambda: rpc.rpc_sync(other, double, (values,))

    counters = counted_rpc(bench, trainer)
    # as caller and as called
    assert (counters["rpc.calls"], counters["rpc.bytes"]) == (
        1,
        4 * 2 * BOUNDARY,
    )


def test_calls_are_counted_by_the_role_of_the_other_side(bench: Bench) -> None:
    def trainer(ctx: Any, shared: Any) -> Any:
        values, few = images(2).requires_grad_(), images(1)

        def step() -> None:
            rpc.rpc_sync("master", double, (few,))
            with dist_autograd.context() as context:
                answers = [
                    rpc.rpc_sync(name, doubled, (values,))
                    for name in ("ps0", "ps1")
                ]
                dist_autograd.backward(
                    context, [answer["twice"].sum() for answer in answers]
                )

        return step

    plan = replace(bench.plan(warmup=3), parameter_servers=2, master=True)
    counters = bench.launch(plan, trainer, lambda ctx: None, None).counters
    assert (
        counters["rpc.calls.parameter_server"],
        counters["rpc.calls.master"],
    ) == (
        2,
        1,
    )
    assert counters["rpc.bytes"] == 16 * BOUNDARY + 2 * BOUNDARY


def doubled(values: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"twice": values * 2}
