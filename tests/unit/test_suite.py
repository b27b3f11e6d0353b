"""The shipped suite without ranks: rows, sizes, batch sizes, buckets, tables, and communication
that is not hidden."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pytest_ddpperf.options.settings import with_markers
from pytest_ddpperf.plugin.place import nodes_for
from pytest_ddpperf.plugin.state import RUN
from pytest_ddpperf.suite import (
    conftest,
    test_data_parallel,
    test_ddp_correctness,
    test_ddp_latency,
    test_ddp_sweep,
    test_traffic,
    workloads,
)
from pytest_ddpperf.suite.tables import Tables, describe
from pytest_ddpperf.suite.test_rpc import _row
from pytest_ddpperf.suite.workloads import (
    SIZES,
    Need,
    Size,
    SweepRow,
    share_of,
)
from pytest_ddpperf.suite.wrappers import ddps_buckets
from tests.unit.test_machine import settings as run_settings


def configured(
    monkeypatch: pytest.MonkeyPatch,
    *,
    nodes: int = 1,
    devices: int = 0,
    **asked: Any,
) -> Any:
    """A run over so many machines with so many devices each."""
    for module in (conftest, workloads):
        monkeypatch.setattr(module, "node_count", lambda config: nodes)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    return SimpleNamespace(getoption=asked.get, getini=lambda name: None)


# --- rows


def rows(config: Any, fixture: str) -> list[Any]:
    """Those that a test has which asks for the fixture."""
    made: list[Any] = []
    metafunc: Any = SimpleNamespace(
        config=config,
        fixturenames=[fixture],
        parametrize=lambda name, each: made.extend(each),
    )
    conftest.pytest_generate_tests(metafunc)
    return made


@pytest.mark.parametrize("nodes", [1, 2, 3, 4])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8, 12, 16])
def test_every_row_has_its_place(
    monkeypatch: pytest.MonkeyPatch, nodes: int, ranks: int
) -> None:
    config = configured(monkeypatch, nodes=nodes, ddp_world_size=[str(ranks)])
    of_run = run_settings(world_sizes=(ranks,))
    for row in rows(config, "scaled_ranks") + rows(config, "sweep_row"):
        settings = with_markers(of_run, [mark.mark for mark in row.marks])
        # A row without a place would raise.
        assert (
            nodes_for(settings, of_run, settings.world_sizes[0], nodes)
            == settings.nodes
        )


def test_rows_over_several_machines_are_those_of_the_original(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = configured(monkeypatch, nodes=4, ddp_world_size=["32"])
    assert [row.id for row in rows(config, "sweep_row")] == [
        *("no-ddp", "1m-1g", "1m-2g", "1m-4g", "1m-8g"),
        *("2m-8g", "4m-8g"),
    ]
    assert [row.values[0] for row in rows(config, "scaled_ranks")] == [
        1,
        2,
        4,
        8,
        16,
        32,
    ]


# --- figures


def test_figures_go_below_the_home_folder_where_that_is_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    drawn: list[Path] = []
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(
        conftest, "save", lambda plots, folder: drawn.append(folder) or [folder]
    )
    config: Any = SimpleNamespace(
        getoption={"ddp_suite_plots": "~/plots"}.get,
        option=SimpleNamespace(collectonly=False),
        stash={conftest._TABLES: Tables(), RUN: SimpleNamespace(sections={})},
        invocation_params=SimpleNamespace(dir=tmp_path),
    )
    conftest.pytest_sessionfinish(SimpleNamespace(config=config), 0)  # type: ignore[arg-type]
    assert drawn == [tmp_path / "home/plots"]


# --- sizes


@pytest.mark.parametrize(
    ("nodes", "devices", "asked", "expected"),
    [
        (1, 0, {}, "small"),
        (1, 4, {"ddp_world_size": "1,4"}, "full"),
        (1, 4, {"ddp_world_size": "8"}, "small"),
        (2, 4, {"ddp_world_size": "8"}, "full"),
        (2, 3, {"ddp_world_size": "8"}, "small"),
        (1, 4, {"ddp_backend": "gloo"}, "small"),
        (1, 0, {"ddp_suite_size": "tiny"}, "tiny"),
    ],
)
def test_the_size_follows_from_the_devices_of_a_machine(
    monkeypatch: pytest.MonkeyPatch,
    nodes: int,
    devices: int,
    asked: dict[str, str],
    expected: str,
) -> None:
    given = {"ddp_device": "auto", "ddp_backend": "auto", **asked}
    assert (
        workloads.chosen_size(
            configured(monkeypatch, nodes=nodes, devices=devices, **given)
        ).name
        == expected
    )


def test_tiny_takes_few_steps_after_five_of_warmup_and_hangs_are_waited_for_briefly() -> (
    None
):
    settings = SIZES["tiny"].settings
    asked = [settings[name] for name in ("launches", "warmup", "steps")]
    assert asked == [2, 5, 5]
    for name, test in inspect.getmembers(
        test_ddp_correctness, inspect.isfunction
    ):
        if name.startswith("test_hang"):
            assert [mark.kwargs["timeout"] for mark in test.pytestmark] == [15]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (
            {},
            {
                "launches",
                "max_launches",
                "warmup",
                "steps",
                "min_time",
                "threshold",
            },
        ),
        ({"ddp_steps": 3}, {"launches", "max_launches", "warmup", "min_time"}),
        ({"ddp_launches": 9}, {"warmup", "steps", "min_time"}),
    ],
)
def test_a_size_sets_what_the_run_leaves_open(
    monkeypatch: pytest.MonkeyPatch, asked: dict[str, int], expected: set[str]
) -> None:
    config = configured(monkeypatch, ddp_suite_size="tiny", **asked)
    settings = conftest._open_settings(config)
    assert settings.keys() == expected
    of_run = run_settings(
        "default",
        **{name.removeprefix("ddp_"): value for name, value in asked.items()},
    )
    with_markers(of_run, [pytest.mark.ddp(**settings).mark])  # or it raised


# --- memory

GIB = 2.0**30


@pytest.mark.parametrize(
    ("need", "reason"),
    [
        (Need(3 * GIB, 2, 6 * GIB), None),
        (
            Need(3.5 * GIB, 2, 6 * GIB),
            "needs about 3.5 GiB on each of 2 ranks, 6.0 GiB are free",
        ),
        (
            Need(81 * GIB, 1, 80 * GIB),
            "needs about 81.0 GiB, 80.0 GiB are free",
        ),
    ],
)
def test_what_does_not_fit_into_memory_is_skipped_with_figures(
    need: Need, reason: str | None
) -> None:
    if reason is None:
        need.require()
        return
    with pytest.raises(pytest.skip.Exception) as caught:
        need.require()
    assert caught.value.msg == reason


def test_gradients_are_counted_without_torchs_compiler() -> None:
    program = """if True:
        import sys
        from pytest_ddpperf.suite.workloads import SIZES, gradient_bytes
        counts = [gradient_bytes(model, SIZES["tiny"]) for model in ("mini", "resnet50")]
        print(counts, "torch._inductor" in sys.modules)
    """
    ended = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout == "[8309760, 102228128] False\n"


def in_a_rank(local_rank: int = 0, local_world_size: int = 2) -> Any:
    counts = {
        "world_size": 2,
        "local_world_size": local_world_size,
        "local_rank": local_rank,
        "rank": local_rank,
    }
    return SimpleNamespace(device=torch.device("cpu"), seed=0, **counts)


def test_a_first_step_is_measured_in_one_rank_of_a_machine() -> None:
    assert (
        workloads.first_step(in_a_rank(1), "mini", SIZES["tiny"], None) is None
    )
    need = workloads.first_step(in_a_rank(), "mini", SIZES["tiny"], None)
    assert need is not None
    gradients = workloads.gradient_bytes("mini", SIZES["tiny"])
    # the peak of this whole process, with torch, is above that
    assert gradients <= need.each < 40 * gradients
    assert need.ranks == 2
    assert need.free == pytest.approx(workloads.free_memory(), rel=0.5)


@pytest.mark.parametrize(
    ("of_container", "free"),
    [("3000\n", 3000), ("max\n", 4096), ("9000\n", 4096), (None, 4096)],
)
def test_a_container_may_have_less_memory_than_its_machine(
    of_container: str | None, free: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"/proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 4 kB\n"}
    if of_container is not None:
        files["/sys/fs/cgroup/memory.max"] = of_container

    def read_text(path: Path) -> str:
        if str(path) not in files:
            raise FileNotFoundError(path)
        return files[str(path)]

    monkeypatch.setattr(Path, "read_text", read_text)
    assert workloads.free_memory() == free


def test_no_first_step_is_tried_that_cannot_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size = SIZES["full"]
    copies = 4.0 * workloads.gradient_bytes("2.7B", size)
    monkeypatch.setattr(workloads, "free_memory", lambda: copies + 1)
    assert workloads.first_step(in_a_rank(), "2.7B", size, None) == (
        copies,
        2,
        copies + 1,
    )


def test_a_first_step_that_a_device_has_no_memory_for_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def overflowing(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(workloads, "workload", overflowing)
    need = workloads.first_step(
        in_a_rank(local_world_size=1), "mini", SIZES["tiny"], None
    )
    assert need is not None
    with pytest.raises(pytest.skip.Exception):
        need.require()


# --- batch sizes

# Of the parameters of tests one each, whichever.
PARAMETERS: dict[str, Any] = {
    "every": 8,
    "bucket": 25,
    "model": "mini",
    "hook": "none",
    "option": "none",
    "share": 0.5,
    "groups": 1,
    "variant": "overlapped",
    "kind": "DDP",
    "scaled_ranks": 2,
    "sweep_row": SweepRow(1, 2),
    "ddp_run": None,
    "fits": lambda model, sequences=None: None,
    "backend": "gloo-cpu",
    "pytestconfig": SimpleNamespace(getoption={}.get, getini=lambda name: None),
}
BENCHMARKS = [
    test
    for module in (test_data_parallel, test_ddp_latency, test_ddp_sweep)
    for name, test in inspect.getmembers(module, inspect.isfunction)
    if name.startswith("test_")
    and {"ddp_benchmark", "timed", "compared"}
    & inspect.signature(test).parameters.keys()
]


class AskedError(Exception):
    """With what a benchmark was called."""


def batch_size(test: Callable[..., None], size: Size, **further: Any) -> int:
    def asked(setup: object, **how: Any) -> None:
        raise AskedError(how)

    tokens = share_of(size, 2) * size.tokens
    given = {
        **PARAMETERS,
        "ddp_benchmark": asked,
        "size": size,
        "tokens": tokens,
        "tables": Tables(),
        "model": size.gpts[0],
        **further,
    }
    given["timed"] = partial(
        workloads.time_step, asked, given["fits"], size, tokens
    )
    given["compared"] = partial(
        conftest.time_variant, given["timed"], given["tables"]
    )
    with pytest.raises(AskedError) as caught:
        test(
            **{name: given[name] for name in inspect.signature(test).parameters}
        )
    return int(caught.value.args[0]["batch_size"])


@pytest.mark.parametrize("test", BENCHMARKS, ids=lambda test: test.__name__)
def test_a_baseline_of_another_size_has_another_batch_size(
    test: Callable[..., None],
) -> None:
    assert len({batch_size(test, size) for size in SIZES.values()}) == len(
        SIZES
    )


@pytest.mark.parametrize("test", BENCHMARKS, ids=lambda test: test.__name__)
def test_every_experiment_that_trains_a_model_asks_whether_it_fits(
    test: Callable[..., None],
) -> None:
    asked: list[str] = []
    batch_size(
        test,
        SIZES["tiny"],
        fits=lambda model, sequences=None: asked.append(model),
    )
    assert len(asked) == 1


# --- buckets, percentiles


def test_buckets_are_closed_as_ddp_closes_them() -> None:
    mib = 2**18  # elements
    sizes_in_mib = (9.0, 30.0, 13.0, 12.0, 3.0, 0.5, 0.25)
    parameters = [
        torch.nn.Parameter(torch.empty(int(each * mib)))
        for each in sizes_in_mib
    ]
    filled = [
        [len(parameter) / mib for parameter in bucket]
        for bucket in ddps_buckets(parameters)
    ]
    assert filled == [[0.25, 0.5, 3.0], [12.0, 13.0], [30.0], [9.0]]


def test_the_topology_is_shown_without_escapes_below_the_headings_of_the_originals(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(
        "#!/bin/sh\nprintf '\\t\\033[4mGPU0\\tCPU Affinity\\033[0m\\nGPU0\\t X \\t0-7\\n'\n"
    )
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    recorded = SimpleNamespace(
        environment=SimpleNamespace(
            recorded={"torch": "2.13.0", "cuda": "12.8"}
        )
    )
    shown = list(
        describe(
            recorded,
            "* Distributed backend: nccl",
            heading="--- nvidia-smi topo -m ---",
        )
    )
    assert shown == [
        *(
            "* PyTorch version: 2.13.0",
            "* CUDA version: 12.8",
            "* Distributed backend: nccl",
            "",
        ),
        *(
            "--- nvidia-smi topo -m ---",
            "",
            "\tGPU0\tCPU Affinity",
            "GPU0\t X \t0-7",
        ),
    ]


def test_percentiles_of_a_trainer_are_interpolated() -> None:
    assert (
        _row("Trainer0", [0.4, 0.1, 0.2, 0.3], 10.0)
        == "    Trainer0:  p50:  0.250s      40/s  p75:  0.325s      31/s  p90:  0.370s      27/s "
        " p95:  0.385s      26/s"
    )
    assert "p95:  0.200s" in _row("All", [0.2], 1.0)


# --- RPC


@pytest.mark.parametrize("call", ["rpc_sync", "to_here"])
def test_what_goes_over_rpc_is_on_the_devices_of_its_processes(
    monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    class SentError(Exception):
        """With the device of what is sent."""

    def send(
        server: str, function: object, arguments: tuple[torch.Tensor, int]
    ) -> None:
        raise SentError(arguments[0].device.type)

    def rpc_benchmark(
        trainer: Callable[[Any], Any],
        *,
        parameter_server: Callable[[Any], None],
    ) -> None:
        ctx = SimpleNamespace(
            device=torch.device("meta"), workers={"parameter_server": ("ps0",)}
        )
        parameter_server(ctx)
        trainer(ctx)()

    monkeypatch.setattr(
        test_traffic, "rpc", SimpleNamespace(rpc_sync=send, remote=send)
    )
    monkeypatch.setattr(
        test_traffic, "dist_autograd", SimpleNamespace(context=nullcontext)
    )
    monkeypatch.setattr(test_traffic, "second_part", [])
    with pytest.raises(SentError, match="meta"):
        test_traffic.test_rpc_traffic(rpc_benchmark, 1, 1, call, Tables())  # type: ignore[arg-type]
    assert next(test_traffic.second_part[0].parameters()).device.type == "meta"


# --- communication that is not hidden


def event(name: str, start: float, end: float, **further: Any) -> Any:
    facts = {
        "thread": 1,
        "is_async": False,
        "device_type": SimpleNamespace(name="CPU"),
    } | further
    return SimpleNamespace(
        name=name, time_range=SimpleNamespace(start=start, end=end), **facts
    )


def profiled(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    backend: str,
    events: list[Any],
) -> tuple[float, float]:
    class Taken:
        def __init__(self, activities: list[Any]) -> None:
            assert [activity.name for activity in activities] == (
                ["CPU"] if device == "cpu" else ["CPU", "CUDA"]
            )

        def __enter__(self) -> Taken:
            return self

        def __exit__(self, *_: object) -> None: ...

        def events(self) -> list[Any]:
            return events

    monkeypatch.setattr(test_data_parallel, "profile", Taken)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    ctx: Any = SimpleNamespace(
        device=SimpleNamespace(type=device), backend=backend
    )
    return test_data_parallel.profiled(ctx, lambda: None)


def test_gloo_communicates_while_the_training_thread_does_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events = [
        event("ddpperf step", 0, 1e6),
        event("aten::mm", 0, 4e5),
        event("gloo:all_reduce", 3e5, 6e5, thread=2, is_async=True),
        # Gloo's own: not the training thread's
        event("aten::add_", 3e5, 6e5, thread=3),
        event("aten::copy_", 5e5, 1e6),
    ]
    taken = profiled(monkeypatch, "cpu", "gloo", events)
    assert taken == pytest.approx((1, 0.1))


def test_gloo_may_communicate_until_the_step_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events = [
        # before the step
        event("aten::mm", 0, 4e5),
        event("ddpperf step", 1e6, 3e6),
        event("gloo:all_reduce", 2e6, 3e6, thread=2, is_async=True),
    ]
    taken = profiled(monkeypatch, "cpu", "gloo", events)
    assert taken == pytest.approx((2, 1))


def test_nccls_kernels_run_while_no_others_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_device = {"device_type": SimpleNamespace(name="CUDA"), "thread": 7}
    events = [
        event("ddpperf step", 0, 1e6),
        event("cudaDeviceSynchronize", 2e5, 1e6),
        event("gemm", 0, 4e5, **on_device),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 3e5, 9e5, **on_device),
        event(
            "nccl:all_reduce", 3e5, 1e6, **on_device, is_user_annotation=True
        ),
        event("ddpperf step", 0, 1e6, **on_device, is_user_annotation=True),
        event("Memcpy DtoD", 5e5, 6e5, **on_device),
    ]
    taken = profiled(monkeypatch, "cuda", "nccl", events)
    assert taken == pytest.approx((1, 0.4))


# --- convergence


def test_convergence_takes_the_seconds_of_the_slowest_rank() -> None:
    def ddp_run(
        learn: object, size: Size, every: int, sequences: int
    ) -> list[test_ddp_correctness.Learned]:
        curves = [[8.0, float(every)]] * test_ddp_correctness.SEEDS
        return [
            test_ddp_correctness.Learned(curves, seconds)
            for seconds in (0.25, 0.5)
        ]

    tables = Tables()
    test_ddp_correctness.test_convergence(
        ddp_run,  # type: ignore[arg-type]
        "small",
        SIZES["tiny"],
        tables,
        lambda *_: None,  # type: ignore[arg-type]
    )
    shown = "\n".join(tables.lines())
    assert "every 8" in shown
    assert shown.count("0.500000s") == len(test_ddp_correctness.SYNC_EVERY)
