"""Where a test runs, for machines this one is not."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from pytest_ddpperf.launch import placement
from pytest_ddpperf.options.settings import Settings
from pytest_ddpperf.plugin.place import (
    Place,
    Places,
    described,
    nodes_for,
    resolve,
)
from pytest_ddpperf.plugin.role import ComparesStored, LeadsVersion
from pytest_ddpperf.plugin.session import Session
from pytest_ddpperf.records.errors import MarkerError, OptionError, Unavailable
from pytest_ddpperf.records.plan import Limit
from pytest_ddpperf.records.samples import Scalar
from pytest_ddpperf.remote.worktree import one_tree
from tests.unit.test_git import git

CPU: dict[str, Scalar] = {
    "torch": "2.13.0",
    "device_type": "cpu",
    "device_count": 0,
    "backends": "gloo",
    "default_backends": "cpu:gloo,cuda:nccl,xpu:xccl,mps:gloo",
}
GPUS: dict[str, Scalar] = {
    **CPU,
    "device_type": "cuda",
    "device_count": 8,
    "backends": "gloo,nccl,nccl2,nccl-lazy,ncclx",
}


def settings(source: str = "command line", **asked: Any) -> Settings:
    values: dict[str, Any] = {
        "world_sizes": (2,),
        "nodes": None,
        "trainers": 2,
        "parameter_servers": 2,
        "backend": "auto",
        "device": "auto",
        "warmup": 5,
        "steps": 30,
        "min_seconds": 1.0,
        "launches": 5,
        "max_launches": 20,
        "limits": (),
        "timing": "auto",
        "turns": "auto",
        "timeout_seconds": 300.0,
        "preload": (),
        "baseline_dir": Path("/"),
        "baseline_missing": "warn",
        "fail_on": None,
        "confirm_seconds": 300.0,
        "save_baseline": False,
        "extend_baseline": False,
        "why": None,
        "against": None,
        "against_setup": None,
        "against_python": None,
        "against_env": None,
        "against_option": None,
        "disable": False,
        "suite_size": "auto",
        "suite_bucket_mb": 25,
        "suite_plots": None,
        "trace_dir": None,
        "json_path": None,
        "history_dir": None,
        "markdown_path": None,
        "html_path": None,
    }
    sources = {
        field.name: source if field.name in asked else "default"
        for field in fields(Settings)
    }
    return Settings(**{**values, **asked}, sources=sources)


@pytest.mark.parametrize(
    ("facts", "asked", "world_size", "place"),
    [
        (CPU, {}, 2, ("gloo", "cpu", "auto: no CUDA device")),
        (GPUS, {}, 8, ("nccl", "cuda", "auto: 8 CUDA devices")),
        (GPUS, {}, 9, ("gloo", "cpu", "auto: 8 CUDA devices for 9 ranks")),
        (
            {**GPUS, "device_count": 1},
            {},
            1,
            ("nccl", "cuda", "auto: 1 CUDA device"),
        ),
        (
            {**GPUS, "backends": "gloo"},
            {},
            2,
            ("gloo", "cpu", "auto: 8 CUDA devices, but this torch has no nccl"),
        ),
        (GPUS, {"device": "cpu"}, 2, ("gloo", "cpu", "for cpu")),
        (GPUS, {"device": "cuda"}, 2, ("nccl", "cuda", "for cuda")),
        (
            GPUS,
            {"device": "cuda", "backend": "gloo"},
            2,
            ("gloo", "cuda", "for cuda"),
        ),
        (GPUS, {"backend": "nccl"}, 2, ("nccl", "cuda", "asked")),
        (GPUS, {"backend": "gloo"}, 2, ("gloo", "cpu", "asked")),
        (GPUS, {"backend": "nccl-lazy"}, 2, ("nccl-lazy", "cuda", "asked")),
        (
            GPUS,
            {"backend": "cpu:gloo,cuda:nccl2"},
            2,
            ("cpu:gloo,cuda:nccl2", "cuda", "asked"),
        ),
        (
            GPUS,
            {"backend": "cpu:gloo,cuda:nccl", "device": "cpu"},
            2,
            ("cpu:gloo,cuda:nccl", "cpu", "for cpu"),
        ),
        (GPUS, {"backend": "cuda:ncclx"}, 2, ("cuda:ncclx", "cuda", "asked")),
        (CPU, {"backend": "cpu:gloo"}, 2, ("cpu:gloo", "cpu", "asked")),
    ],
)
def test_what_auto_comes_to(
    facts: dict[str, Scalar],
    asked: dict[str, Any],
    world_size: int,
    place: tuple[str, str, str],
) -> None:
    backend, device, why = place
    assert resolve(settings(**asked), world_size, facts) == Place(
        backend=backend, device=device, why=why
    )


@pytest.mark.parametrize(
    ("facts", "asked", "world_size", "words"),
    [
        (
            CPU,
            {"backend": "nccl"},
            2,
            "--ddp-backend: 'nccl': this torch (2.13.0) has gloo",
        ),
        (
            CPU,
            {"device": "cuda"},
            2,
            "--ddp-device: 'cuda': no accelerator here",
        ),
        (
            CPU,
            {"device": "cdua"},
            2,
            "no accelerator here; torch knows cpu, cuda, xpu, mps; did you mean cuda?",
        ),
        (
            GPUS,
            {"device": "cdua"},
            2,
            "8 cuda devices here; torch knows cpu, cuda, xpu, mps; did you mean cuda?",
        ),
        (
            GPUS,
            {"device": "xpu", "backend": "gloo"},
            2,
            "--ddp-device: 'xpu': 8 cuda devices here",
        ),
        (
            GPUS,
            {"backend": "nccl", "world_sizes": (16,)},
            16,
            "a rank needs a device of its own; 8 cuda devices here",
        ),
        (
            GPUS,
            {"backend": "nccl-legacy"},
            2,
            "--ddp-backend: 'nccl-legacy': this torch (2.13.0) has gloo, nccl,",
        ),
        (
            CPU,
            {"backend": "cpu:gloo,cuda:nccl"},
            2,
            "--ddp-backend: 'cpu:gloo,cuda:nccl': this torch (2.13.0) has gloo",
        ),
        (
            GPUS,
            {"device": "cuda:0", "world_sizes": (9,)},
            9,
            "a rank needs a device of its own; 8 cuda devices here",
        ),
    ],
)
def test_what_is_missing_is_refused_to_the_command_line_and_skips_a_marker(
    facts: dict[str, Scalar], asked: dict[str, Any], world_size: int, words: str
) -> None:
    with pytest.raises(OptionError) as refused:
        resolve(settings(**asked), world_size, facts)
    assert words in str(refused.value)
    with pytest.raises(Unavailable):
        resolve(settings("marker", **asked), world_size, facts)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (
            {"backend": "cpu:gloo", "device": "cuda"},
            "--ddp-backend: 'cpu:gloo': has no backend for cuda",
        ),
        ({"backend": "cpu:gloo,cuda"}, "'cpu:gloo,cuda': this torch (2.13.0)"),
        ({"backend": "cpu:auto"}, "'cpu:auto': this torch (2.13.0) has gloo"),
        ({"device": "cuda:1"}, "did you mean cuda?"),
    ],
)
def test_a_composite_backend_or_a_device_that_cannot_be_is_refused(
    asked: dict[str, Any], words: str
) -> None:
    with pytest.raises(OptionError) as refused:
        resolve(settings(**asked), 2, GPUS)
    assert words in str(refused.value)


# --- one visible device a rank


def test_each_rank_may_see_its_own_device_alone() -> None:
    place = resolve(settings(device="cuda:0"), 8, GPUS)
    assert (place.device, place.backend) == ("cuda", "nccl")
    assert place.sees_one_device
    assert (
        described(place, "8 ranks", 8, {})
        == "8 ranks over nccl (for cuda), each sees one device, cuda:0"
    )
    assert not resolve(settings(device="cuda"), 8, GPUS).sees_one_device


def test_a_process_sees_one_mig_device_but_each_rank_may_have_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-3f, MIG-4a")
    one = {**GPUS, "device_count": 1}
    assert resolve(settings(device="cuda:0"), 2, one).sees_one_device
    with pytest.raises(OptionError, match="1 cuda device here"):
        resolve(settings(device="cuda"), 2, one)
    with pytest.raises(OptionError, match="2 cuda devices here"):
        resolve(settings(device="cuda:0"), 3, one)


def test_devices_of_rpc_are_addressed_so_all_are_visible() -> None:
    with pytest.raises(OptionError, match="'cuda:0': not for RPC"):
        resolve(settings(device="cuda:0"), 2, GPUS, field="trainers")


def test_a_backend_nobody_knows_is_a_mistake_in_a_marker_too() -> None:
    with pytest.raises(MarkerError) as marked:
        resolve(settings("marker", backend="glo"), 2, GPUS)
    assert str(marked.value).endswith(
        "'glo': this torch (2.13.0) has gloo, nccl, nccl2, nccl-lazy, ncclx; did you mean gloo?"
    )
    with pytest.raises(OptionError, match="'glo'") as refused:
        resolve(settings(backend="glo"), 2, CPU)
    assert not isinstance(refused.value, MarkerError)


@pytest.mark.parametrize(
    ("metric", "what"), [("cpu_p50", "CPU time is"), ("forward", "phases are")]
)
def test_cpu_time_and_phases_are_limited_on_cpu_only(
    metric: str, what: str
) -> None:
    limited = settings(limits=(Limit(metric=metric, value=0.05, unit="%"),))
    assert resolve(limited, 2, CPU).device == "cpu"
    with pytest.raises(
        OptionError, match=f"{what} measured on CPU only, not on cuda"
    ) as refused:
        resolve(limited, 2, GPUS)
    assert not isinstance(refused.value, MarkerError)
    with pytest.raises(
        MarkerError, match=f"{what} measured on CPU only, not on cuda"
    ):
        resolve(
            replace(
                limited,
                backend="nccl",
                sources={**limited.sources, "backend": "marker"},
            ),
            2,
            GPUS,
        )


# --- what is said of it


class Base:
    """A version to compare with."""

    trees = None
    version = "OMP_NUM_THREADS=2"
    environ = {"OMP_NUM_THREADS": "2"}


ALONE = "2 ranks over gloo (auto: no CUDA device), each pinned to 1 core of 2"
SHARING = (
    "2 ranks over gloo (auto: no CUDA device): 2 x 2 threads (OMP_NUM_THREADS) share 2 cores,"
    " expect noise"
)


@pytest.mark.parametrize(
    ("environ", "base", "words"),
    [
        ({}, None, [ALONE]),
        ({"OMP_NUM_THREADS": "2"}, Base, [SHARING]),
        (
            {"OMP_NUM_THREADS": "1"},
            Base,
            [ALONE, f"OMP_NUM_THREADS=2: {SHARING}"],
        ),
    ],
)
def test_who_shares_cores_is_reported_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch,
    environ: dict[str, str],
    base: Any,
    words: list[str],
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(placement, "usable_cores", lambda: (0, 1))
    monkeypatch.setattr(placement, "quota_cores", lambda root: None)
    role = LeadsVersion(base()) if base is not None else ComparesStored()
    places = Places(settings(), role, lambda: CPU)
    places.find(settings(), 2)
    assert str(places).splitlines() == words


def test_a_file_is_shown_from_the_top_of_the_repository(tmp_path: Path) -> None:
    outside = tmp_path / "elsewhere" / "test_b.py"
    rootdir = tmp_path / "repository" / "python"
    rootdir.mkdir(parents=True)
    file = rootdir / "tests" / "test_a.py"
    launcher: Any = None  # which nothing is asked of
    session = Session(settings(), rootdir, launcher, one_tree(rootdir), "")
    assert session.shown(file) == "tests/test_a.py", (
        "from rootdir, where there is no repository"
    )
    git(rootdir.parent, "init", "-q")
    session = Session(settings(), rootdir, launcher, one_tree(rootdir), "")
    assert session.shown(file) == "python/tests/test_a.py"
    assert session.shown(outside) == str(outside)


# --- over several nodes


@pytest.mark.parametrize(
    ("source", "asked", "world_size", "nodes", "wanted"),
    [
        ("command line", {"world_sizes": (16,)}, 16, 2, 2),
        ("command line", {"world_sizes": (16,)}, 16, 1, 1),
        ("marker", {"world_sizes": (8,)}, 8, 2, 1),
        ("marker", {"world_sizes": (10,)}, 10, 2, 2),
        ("marker", {"world_sizes": (8,), "nodes": 2}, 8, 2, 2),
        ("marker", {"world_sizes": (16,), "nodes": 1}, 16, 2, 1),
        ("marker", {"world_sizes": (16,), "nodes": 2}, 16, 4, 2),
    ],
)
def test_ranks_are_dealt_over_all_nodes_unless_a_marker_asks_for_few(
    source: str, asked: dict[str, Any], world_size: int, nodes: int, wanted: int
) -> None:
    run = settings(world_sizes=(16,))
    assert (
        nodes_for(settings(source, **asked), run, world_size, nodes) == wanted
    )


def test_ranks_divide_evenly_over_nodes() -> None:
    run = settings(world_sizes=(9,))
    with pytest.raises(
        OptionError,
        match="--ddp-world-size: 9: must divide evenly over the 2 nodes",
    ):
        nodes_for(run, run, 9, 2)
    with pytest.raises(MarkerError, match="must divide evenly"):
        nodes_for(settings("marker", world_sizes=(3,), nodes=2), run, 3, 2)


@pytest.mark.parametrize(
    ("nodes", "there"), [(1, "torchrun started no other node"), (2, "2 there")]
)
def test_a_test_that_wants_more_nodes_than_there_are_is_skipped(
    nodes: int, there: str
) -> None:
    with pytest.raises(Unavailable, match=there):
        nodes_for(settings("marker", nodes=3), settings(), 6, nodes)
