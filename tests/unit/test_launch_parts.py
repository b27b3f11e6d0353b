"""The parts of a launch that need no rank: cores, locks, variables, what a rank's end is called."""

from __future__ import annotations

import math
import os
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_ddpperf.launch import (
    Launcher,
    Observer,
    failed_ranks,
    output,
    placement,
    request,
    run,
    stacks,
)
from pytest_ddpperf.launch import launcher as launcher_module
from pytest_ddpperf.launch.failed_ranks import (
    describe_differing,
    describe_end,
    launch_error,
)
from pytest_ddpperf.launch.launcher import _facts as facts_of_ranks
from pytest_ddpperf.launch.ranks import Peer
from pytest_ddpperf.launch.remote_ranks import Part, RemoteRanks
from pytest_ddpperf.launch.request import for_ranks, recorded
from pytest_ddpperf.launch.template import read_at_import
from pytest_ddpperf.records.errors import DdpPerfError
from pytest_ddpperf.records.messages import ShareProgress
from pytest_ddpperf.records.plan import UPDATE, Plan
from pytest_ddpperf.records.samples import RankError
from pytest_ddpperf.wire.channels import Board, Phase
from pytest_ddpperf.wire.opened import OWN_GROUP

# --- cores


@pytest.fixture
def flat(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that tells nothing of packages and hardware threads."""
    monkeypatch.setattr(placement, "_CPUS", Path("/nowhere"))


@pytest.mark.usefixtures("flat")
@pytest.mark.parametrize(
    ("world_size", "usable", "cpus", "per_rank"),
    [
        (2, (0, 1), ((0,), (1,)), 1),
        (2, (3, 1, 2, 0), ((0, 1), (2, 3)), 2),
        (2, (4, 5, 6, 7, 8), ((4, 5), (6, 7)), 2),
        (1, (0, 1), ((0, 1),), 2),
        (4, (0, 1), ((0,), (1,), (0,), (1,)), 0),
        (3, (5,), ((5,), (5,), (5,)), 0),
    ],
)
def test_ranks_get_disjoint_equal_shares_or_take_turns(
    world_size: int,
    usable: tuple[int, ...],
    cpus: tuple[tuple[int, ...], ...],
    per_rank: int,
) -> None:
    placed = placement.place(
        world_size, {"OMP_NUM_THREADS": str(max(per_rank, 1))}, usable
    )
    assert placed == placement.place(world_size, {}, usable)
    assert placed.threads == 0
    assert (placed.cpus, placed.cores_per_rank, placed.cores) == (
        cpus,
        per_rank,
        len(usable),
    )
    assert placed.pinned
    assert placed.used == tuple(sorted({cpu for rank in cpus for cpu in rank}))


def test_hardware_threads_of_a_core_stay_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for cpu in range(4):  # cpu 0 and 2 are one core, 1 and 3 another
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text("0\n")
        (folder / "core_id").write_text(f"{cpu % 2}\n")
    monkeypatch.setattr(placement, "_CPUS", tmp_path)
    assert placement.place(2, {}, (0, 1, 2, 3)).cpus == ((0, 2), (1, 3))
    assert (
        placement.place(2, {"OMP_NUM_THREADS": "3"}, (0, 1, 2, 3)).cpus
        == ((0, 1, 2, 3),) * 2
    )


@pytest.mark.usefixtures("flat")
@pytest.mark.parametrize(
    ("world_size", "usable", "asked", "threads"),
    [(2, (0, 1), "2", 2), (2, (0, 1, 2, 3), "3,2", 3), (3, (0, 1), " 2", 2)],
)
def test_ranks_with_more_threads_than_their_share_has_cores_share_all(
    world_size: int, usable: tuple[int, ...], asked: str, threads: int
) -> None:
    placed = placement.place(world_size, {"OMP_NUM_THREADS": asked}, usable)
    assert placed.cpus == (usable,) * world_size
    assert (placed.cores, placed.cores_per_rank, placed.pinned) == (
        len(usable),
        0,
        False,
    )
    assert placed.threads == threads


@pytest.mark.parametrize(
    ("quota", "count", "per_rank", "threads"),
    [(4.0, 4, 2, 2), (2.9, 2, 1, 1), (0.5, 1, 0, 1)],
)
def test_under_a_quota_ranks_share_all_cores_and_have_threads_for_their_time(
    quota: float, count: int, per_rank: int, threads: int
) -> None:
    usable = tuple(range(8))
    placed = placement.place(2, {}, usable, quota)
    assert placed.cpus == (usable, usable)
    assert (placed.cores, placed.cores_per_rank, placed.pinned) == (
        count,
        per_rank,
        False,
    )
    assert (placed.own_threads, placed.quota) == (threads, True)
    assert placement.place(2, {}, usable, 8.0) == placement.place(
        2, {}, usable
    ), "which is no less than the cores"


def test_a_test_that_binds_pytest_to_a_core_changes_no_cores_of_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = placement.usable_cores()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {77})
    assert placement.usable_cores() == before != (77,)


def test_without_affinity_nobody_is_pinned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(
        placement, "usable_cores", placement.usable_cores.__wrapped__
    )
    for environ in ({}, {"OMP_NUM_THREADS": "1000"}):
        placed = placement.place(2, environ)
        assert (placed.cpus, placed.pinned, placed.used) == (
            ((), ()),
            False,
            (),
        )


# --- locks


HOLDER = """
import sys
from pathlib import Path
from pytest_ddpperf.launch import placement
with placement.hold([Path(sys.argv[1])], lambda path: None):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_another_process_is_waited_for_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(placement.SWITCH)
    first, second = tmp_path / "cpu0", tmp_path / "cpu1"
    first.mkdir()
    second.mkdir()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, second],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == b"held\n"
        assert placement.holder(second) == holder.pid
        waited: list[Path] = []

        def waiting(path: Path) -> None:
            waited.append(path)
            if len(waited) == 3:
                assert holder.stdin is not None
                holder.stdin.close()

        state = random.getstate()  # of a test that is seeded
        with placement.hold([first, second], waiting):
            assert set(waited) == {second}
        assert random.getstate() == state
        assert holder.wait(60) == 0
    finally:
        holder.kill()
        holder.wait()
    with placement.hold(
        [first, second], lambda path: pytest.fail(f"{path} was not released")
    ):
        assert placement.holder(second) is None
    monkeypatch.setenv(placement.SWITCH, "off")
    with placement.hold([tmp_path / "missing"], lambda path: None):
        pass


def test_devices_are_held_where_there_are_some_else_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pci" / "0000:17:00.0").mkdir(parents=True)
    for cpu in (0, 1, 2):
        (tmp_path / "cpu" / f"cpu{cpu}").mkdir(parents=True)
    monkeypatch.setattr(placement, "_PCI", tmp_path / "pci")
    monkeypatch.setattr(placement, "_CPUS", tmp_path / "cpu")
    assert [path.name for path in placement.resources((2, 0))] == [
        "cpu0",
        "cpu2",
    ]
    assert [
        path.name for path in placement.resources((2, 0), ["0000:17:00.0"])
    ] == ["0000:17:00.0"]
    assert placement.resources((7,)) == (Path("/"),), (
        "one lock for the whole host where sysfs tells nothing"
    )


@pytest.mark.parametrize(
    ("visible", "paused"),
    [(None, ["17"]), ("1", ["17", "65", "ca"])],
    ids=["as probed", "chosen by the test"],
)
def test_the_devices_that_a_launch_runs_on_are_held(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, paused: list[str]
) -> None:
    """All where a test chose among them since the probe: which they are by address is not known."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    launcher = Launcher(dict)
    delivery = SimpleNamespace(results=['{"device_addresses": "17,65,ca"}'])
    monkeypatch.setattr(launcher, "_launch", lambda *args: delivery)
    launcher.probe((), 60.0)
    asked: list[list[str]] = []
    monkeypatch.setattr(
        launcher_module,
        "resources",
        lambda cores, addresses: asked.append(addresses),
    )
    monkeypatch.setattr(launcher_module, "hold", lambda *args: None)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    launcher.alone_here(
        Plan(world_size=1, backend="nccl", device="cuda"), 1, Observer()
    )
    assert asked == [paused]


def test_machines_with_different_devices_or_cpus_have_all_their_names() -> None:
    def facts(*by_rank: dict[str, Any]) -> dict[str, Any]:
        return facts_of_ranks([SimpleNamespace(facts=each) for each in by_rank])  # type: ignore[misc]

    a100 = {"device_model": "NVIDIA A100", "device_memory_gib": 40}
    h100 = {"device_model": "NVIDIA H100", "device_memory_gib": 80}
    assert facts({**a100, "torch": "2.13"}, a100) == {**a100, "torch": "2.13"}
    both = {
        "device_model": "NVIDIA A100 + NVIDIA H100",
        "device_memory_gib": "40 + 80",
    }
    assert facts({**h100, "torch": "2.13"}, a100, h100) == {
        **both,
        "torch": "2.13",
    }
    # four ranks on two nodes: the first rank of each has its node's
    intel = {"device_model": None, "cpu_model": "Intel", "deterministic": False}
    amd = {**intel, "cpu_model": "AMD"}
    others = {"device_model": None}
    assert facts(intel, others, amd, others) == {
        **intel,
        "cpu_model": "AMD + Intel",
    }


def test_a_rank_on_a_gpu_has_threads_for_its_share_of_the_cores_and_is_not_pinned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan(world_size=4, backend="nccl", device="cuda")
    placed = placement.place(4, {}, usable=(*range(16),))
    monkeypatch.setattr(request, "place", lambda processes, environ: placed)
    part = Part(processes=plan.part(0))
    asked = request.rank_request(tmp_path, plan, part, modules={})
    assert (asked.threads, asked.cpus) == (4, ((),) * 4)
    assert asked.devices == (), "each sees all"


@pytest.mark.parametrize(
    ("visible", "devices"),
    [
        (None, ("0", "1")),
        ("3,1", ("3", "1")),
        ("GPU-8932f937, GPU-0f4e,GPU-2b", ("GPU-8932f937", "GPU-0f4e")),
        ("MIG-3f,MIG-4a", ("MIG-3f", "MIG-4a")),
    ],
)
def test_each_rank_sees_the_device_of_its_place_alone(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    visible: str | None,
    devices: tuple[str, ...],
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    plan = Plan(
        world_size=4,
        nodes=2,
        backend="nccl",
        device="cuda",
        sees_one_device=True,
    )
    part = Part(processes=plan.part(1), node=1)
    asked = request.rank_request(tmp_path, plan, part, modules={})
    assert asked.devices == devices


def test_fewer_visible_devices_than_ranks_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a test may choose them: the machine's were enough."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8932f937,")
    plan = Plan(
        world_size=2, backend="nccl", device="cuda", sees_one_device=True
    )
    part = Part(processes=plan.part(0))
    with pytest.raises(
        DdpPerfError, match="CUDA_VISIBLE_DEVICES has 1 device for 2 ranks"
    ):
        request.rank_request(tmp_path, plan, part, modules={})


# --- hangs


@pytest.mark.parametrize(
    ("started", "said"),
    [
        (
            {
                0: [(1, "all_reduce", 4), (2, "all_reduce", 8)],
                1: [(1, "all_reduce", 4), (2, "all_reduce", 8)],
            },
            "",
        ),
        (
            {
                0: [(1, "all_reduce", 4)],
                1: [(1, "all_reduce", 4), (2, "all_gather", 8)],
                2: [],
            },
            "rank 2 never entered all_reduce 1 (4 bytes); ranks 0 and 1 wait for it",
        ),
        (
            {
                0: [(7, "all_reduce", 4)],
                1: [(7, "all_reduce", 4), (8, "all_gather", 8000)],
                2: [(7, "all_reduce", 4)],
            },
            "ranks 0 and 2 never entered all_gather 8 (8,000 bytes); rank 1 waits for it",
        ),
        (
            {0: [(3, "all_reduce", 4)], 1: [(3, "all_reduce", 8)]},
            (
                "ranks entered different collectives 3: rank 0 all_reduce (4 bytes), rank 1"
                " all_reduce (8 bytes)"
            ),
        ),
        # DDP starts to broadcast two buffers at once
        (
            {
                0: [(70, "all_reduce", 4)],
                1: [(70, "broadcast", 512), (71, "broadcast", 8)],
            },
            (
                "ranks entered different collectives 70: rank 0 all_reduce (4 bytes), rank 1"
                " broadcast (512 bytes)"
            ),
        ),
        # as they may
        ({0: [(3, "all_to_all", 4)], 1: [(3, "all_to_all", 8)]}, ""),
        ({0: [], 1: []}, ""),
        ({}, ""),
    ],
)
def test_the_rank_that_never_entered_a_collective_is_named(
    started: dict[int, list[tuple[int, str, int]]], said: str
) -> None:
    assert (
        describe_differing(
            {rank: {"0": each} for rank, each in started.items()}
        )
        == said
    )


def test_many_ranks_are_named_by_their_ranges() -> None:
    started = {
        rank: {"0": [(1, "barrier", 1)] if rank == 7 else []}
        for rank in range(512)
    }
    said = (
        "ranks 0-6,8-511 never entered barrier 1 (1 bytes); rank 7 waits for it"
    )
    assert describe_differing(started) == said


def test_only_a_few_other_ranks_have_their_traceback_shown() -> None:
    errors = [
        error(rank, float(rank), summary=f"rank {rank}", traceback=f"in {rank}")
        for rank in range(64)
    ]
    said = str(launch_error(errors, ()))
    for rank in range(1, 64):
        assert f"  rank {rank} in setup: rank {rank}\n" in f"{said}\n"
    assert [f"in {rank}\n" in said for rank in range(5)] == [
        *[True] * 4,
        False,
    ]
    assert said.endswith("\n  (60 more tracebacks are left out)")


def test_who_may_not_be_in_a_process_group_is_not_missed_there() -> None:
    both, one = (
        [(1, "all_reduce", 4)],
        [(1, "all_reduce", 4), (2, "broadcast", 4)],
    )
    said = "rank 2 never entered broadcast 2 (4 bytes) of process group 5; rank 1 waits for it"
    assert (
        describe_differing(
            {
                0: {"0": both},
                1: {"0": both, "5": one},
                2: {"0": both, "5": both},
            }
        )
        == said
    )
    assert describe_differing({0: {"0": both}, 1: {"0": both, "5": one}}) == ""


# --- variables


def test_what_an_outer_launcher_said_is_scrubbed_and_the_rest_stays() -> None:
    outer = {
        "RANK": "3",
        "MASTER_ADDR": "node1",
        "SLURM_PROCID": "3",
        "TORCHELASTIC_RUN_ID": "x",
        "PMI_RANK": "1",
    }
    reported = for_ranks(
        {
            **outer,
            "HOME": "/root",
            "GLOO_SOCKET_IFNAME": "eth0",
            "SLURM_JOB_ID": "7",
        },
        4,
        Part(processes=(0, 1, 2, 3)),
    )
    assert reported.keys().isdisjoint(outer)
    assert (reported["HOME"], reported["SLURM_JOB_ID"]) == ("/root", "7")
    assert (
        reported["WORLD_SIZE"],
        reported["LOCAL_WORLD_SIZE"],
        reported["NODE_RANK"],
    ) == ("4", "4", "0")
    assert reported["GLOO_SOCKET_IFNAME"] == "eth0", "the user's choice"
    assert (
        reported["TP_SOCKET_IFNAME"] == reported["NCCL_SOCKET_IFNAME"] == "lo"
    )


def test_ranks_of_one_of_several_nodes_are_told_so_and_meet_the_others_over_its_interface() -> (
    None
):
    part = Part(
        processes=(2, 3), node=1, store=("10.0.0.1", 4000), interface="eth1"
    )
    reported = for_ranks({"GROUP_RANK": "1", "HOME": "/root"}, 4, part)
    assert (reported["WORLD_SIZE"], reported["LOCAL_WORLD_SIZE"]) == ("4", "2")
    assert reported["NODE_RANK"] == reported["GROUP_RANK"] == "1"
    assert (
        reported["GLOO_SOCKET_IFNAME"] == reported["TP_SOCKET_IFNAME"] == "eth1"
    )
    assert "NCCL_SOCKET_IFNAME" not in reported, "which may know of better ways"


@pytest.mark.parametrize(
    "name",
    [
        *(
            "ATEN_CPU_CAPABILITY",
            "ONEDNN_MAX_CPU_ISA",
            "OPENBLAS_CORETYPE",
            "TORCHINDUCTOR_FREEZING",
        ),
        *("TORCHDYNAMO_DISABLE", "CUBLAS_WORKSPACE_CONFIG", "LD_LIBRARY_PATH"),
        *("MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES", "GOMP_SPINCOUNT"),
        *("PYTHONMALLOC", "PYTHONOPTIMIZE", "PYTHONDEVMODE"),
    ],
)
def test_a_variable_that_changes_how_libraries_compute_is_recorded(
    name: str,
) -> None:
    others = {
        "HOME": "/root",
        "TORCHINDUCTOR_CACHE_DIR": "/tmp/1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "TORCHINDUCTOR_REDIS_URL": "redis://:secret@host",
    }
    assert recorded({name: "a value", **others}) == {f"env:{name}": "a value"}


def test_only_an_allow_list_of_variables_is_recorded() -> None:
    environ = {
        "NCCL_ALGO": "Ring",
        "AWS_SECRET": "x",
        "OMP_NUM_THREADS": "1",
        "CUDA_LAUNCH_BLOCKING": "1",
    }
    assert recorded(environ) == {
        "env:NCCL_ALGO": "Ring",
        "env:OMP_NUM_THREADS": "1",
        "env:CUDA_LAUNCH_BLOCKING": "1",
    }
    assert read_at_import(environ) == {"OMP_NUM_THREADS": "1"}


def test_search_paths_and_folders_of_caches_need_no_other_template() -> None:
    folders = {
        "PYTHONPATH": "a",
        "PYTHONPYCACHEPREFIX": "b",
        "TORCHINDUCTOR_CACHE_DIR": "c",
        "TORCH_HOME": "d",
    }
    assert read_at_import({**folders, "LD_LIBRARY_PATH": "e"}) == {
        "LD_LIBRARY_PATH": "e"
    }


# --- ends


def test_ends_have_names() -> None:
    assert describe_end(-11) == "killed by SIGSEGV"
    assert describe_end(-9).startswith(
        "killed by SIGKILL (the kernel's out-of-memory"
    )
    assert describe_end(-200) == "killed by signal 200"
    assert describe_end(0) == "exited with status 0"
    assert describe_end(2) == "exited with status 2"


def error(rank: int, when: float, **kwargs: object) -> RankError:
    return RankError(
        **{
            "rank": rank,
            "when": when,
            "phase": "setup",
            "summary": "x",
            **kwargs,
        }
    )  # type: ignore[arg-type]


def test_the_earliest_that_is_no_lost_connection_comes_first() -> None:
    found = launch_error(
        [error(0, 1.0, lost_connection=True), error(2, 3.0), error(1, 2.0)], ()
    )
    assert (found.cause.rank, [other.rank for other in found.others]) == (
        1,
        [2, 0],
    )
    assert (
        launch_error(
            [
                error(1, 2.0, lost_connection=True),
                error(0, 1.0, lost_connection=True),
            ],
            (),
        ).cause.rank
        == 0
    )


def test_what_helps_a_program_that_ended_early_is_said_if_no_rank_went_on() -> (
    None
):
    ended = error(
        1,
        1.0,
        summary="the program ended after 2 steps",
        advice="let it take 5",
    )
    later = error(
        0,
        2.0,
        summary="the program ended after 2 steps",
        advice="let it take 5",
    )
    delivered = error(0, math.inf, summary="had delivered its result")
    at_work = error(
        0, math.inf, summary="was still running", traceback="in evaluate"
    )
    for other in (later, at_work):
        assert (
            launch_error([other, ended], ()).cause.summary
            == "the program ended after 2 steps: let it take 5"
        )
    waiting = replace(at_work, waits=True)
    for other in (delivered, waiting):
        assert (
            launch_error([other, ended], ()).cause.summary
            == "the program ended after 2 steps, while other ranks went on"
        )
    assert (
        launch_error([at_work, ended], (), "rank 0 waits for it").cause.summary
        == "the program ended after 2 steps, while other ranks went on; rank 0 waits for it"
    )


def test_each_failure_gives_the_others_time_anew_to_say_what_they_saw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many ranks on few cores lose their connections one after the other."""
    plan, now = Plan(world_size=5, backend="gloo", device="cpu"), 0.0
    part = Part(processes=plan.part(0))
    asked = request.rank_request(tmp_path, plan, part, modules={})
    files = run.LaunchFiles(tmp_path, asked, Board(tmp_path / "board", 5, 1))
    server: Any = SimpleNamespace(send=lambda request: None)
    launch: Any = run.Launch(server, files, Observer(), RemoteRanks())
    launch._deadline, launch._ranks = (
        100.0,
        [Peer(number, None) for number in range(5)],
    )  # type: ignore[arg-type]
    failing = iter(launch._ranks)

    def wait(seconds: float) -> None:
        nonlocal now
        now += 0.9
        rank = next(failing)
        rank.error = error(rank.number, now, lost_connection=rank.number > 0)

    monkeypatch.setattr(run, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(launch, "_wait", wait)
    monkeypatch.setattr(
        launch,
        "_give_up",
        lambda *_, **__: pytest.fail("nobody was to be given up"),
    )
    launch._collect(lambda rank: rank.settled)
    assert all(rank.error for rank in launch._ranks)


@pytest.mark.parametrize(
    "looks",
    [
        [(7, 0), (9, 0), (9, 5), (9, 8), (9, 8)],  # the last is whole
        [(7, 0), (7, 0), (7, 0)],  # one has ended, or is stuck in the kernel
    ],
)
def test_stacks_are_waited_for_until_all_are_whole(
    monkeypatch: pytest.MonkeyPatch, looks: list[tuple[int, int]]
) -> None:
    sizes, now, asked = iter([(0, 0), *looks]), 0.0, []

    def sleep(seconds: float) -> None:
        nonlocal now
        assert asked
        now += stacks._STACKS_LONGEST_SECONDS / len(looks)

    monkeypatch.setattr(
        stacks, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep)
    )
    stacks.await_stacks(lambda: asked.append("now"), lambda: next(sizes))
    assert list(sizes) == []


def test_stacks_are_all_there_with_the_outermost_frame_of_the_main_thread() -> (
    None
):
    """It comes last, and a busy rank pauses anywhere."""
    dump = [
        'Thread 0x1 (most recent call first):\n  File "loader.py", line 5 in load\n\n',
        "Current thread 0x2 (most recent call first):\n",
        '  File "stamps.py", line 1 in stamped\n',
        '  File "train.py", line 7 in step\n',
        '  File "<string>", line 9 in <module>\n',
    ]
    assert [
        stacks.frames_written("".join(dump[:lines])) for lines in range(6)
    ] == [
        0,
        0,
        0,
        0,
        0,
        4,
    ]
    assert stacks.frames_written("".join(dump[:4]) + "  ...\n") == 3


OUR_THREAD = 'Thread 0x2 (most recent call first):\n  File "lifecycle.py", line 1 in _tell_started\n\n'


@pytest.mark.parametrize("other", ["", OUR_THREAD], ids=["alone", "after ours"])
def test_a_heading_without_frames_is_no_stack_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    heading = f"{other}Current thread 0x1 (most recent call first):\n"
    frame = '  File "train.py", line 7 in step\n  File "<string>", line 9 in <module>\n'
    looks = iter([heading, heading, heading, heading + frame])
    file = tmp_path / "rank0.stacks"
    sleeping = SimpleNamespace(
        monotonic=lambda: 0.0,
        sleep=lambda _: file.write_text(next(looks, heading + frame)),
    )
    monkeypatch.setattr(stacks, "time", sleeping)
    board: Any = SimpleNamespace(
        describe=lambda number, warmup: "setup", phase=lambda number: None
    )
    plan = Plan(world_size=1, backend="gloo", device="cpu")
    rank: Any = SimpleNamespace(number=0, resting=None, error=None, result=None)
    failed_ranks.Diagnosis(
        tmp_path, board, plan, lambda: None, lambda: None
    ).add_hanging([rank], 0, at_deadline=True)
    assert "in step" in rank.error.traceback


@pytest.mark.parametrize(
    "setting", ["--ddp-timeout", "@pytest.mark.ddp(timeout=...)"]
)
def test_a_launch_that_is_too_late_names_the_setting_of_its_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    monkeypatch.setattr(failed_ranks, "await_stacks", lambda send, sizes: None)
    plan = Plan(
        world_size=1,
        backend="gloo",
        device="cpu",
        timeout_seconds=5.0,
        timeout_setting=setting,
    )
    board: Any = SimpleNamespace(
        describe=lambda number, warmup: "setup", phase=lambda number: None
    )
    diagnosis = failed_ranks.Diagnosis(
        tmp_path, board, plan, lambda: None, lambda: None
    )
    rank: Any = SimpleNamespace(number=0, resting=None, error=None, result=None)
    diagnosis.add_hanging([rank], 0.0, at_deadline=True)
    assert rank.error.summary == f"did not end within 5 s ({setting})"
    (note,) = diagnosis.notes_on_clean_up([rank])
    assert f"did not end within 5 s ({setting});" in note


@pytest.mark.parametrize(
    ("phase", "fields", "is_told"),
    [
        (Phase.SETUP, {}, True),
        (Phase.STEPS, {}, False),
        (Phase.SETUP, {"command": True}, False),
        (Phase.SETUP, {"parameter_servers": 1}, False),
        (Phase.SETUP, {"boundary": UPDATE}, False),
    ],
)
def test_only_a_set_up_is_told_that_it_started_ranks(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    phase: Phase,
    fields: dict[str, Any],
    is_told: bool,
) -> None:
    monkeypatch.setattr(failed_ranks, "await_stacks", lambda send, sizes: None)
    (tmp_path / OWN_GROUP).write_text("a group")
    plan = Plan(world_size=1, backend="gloo", device="cpu", **fields)
    board: Any = SimpleNamespace(
        describe=lambda number, warmup: "setup",
        phase=lambda number: phase,
        updates=lambda: [0],
    )
    diagnosis = failed_ranks.Diagnosis(
        tmp_path, board, plan, lambda: None, lambda: None
    )
    rank: Any = SimpleNamespace(number=0, resting=None, error=None, result=None)
    diagnosis.add_hanging([rank], 0.0, at_deadline=True)
    assert ("group of their own" in rank.error.summary) is is_told


@pytest.mark.parametrize(
    ("answer", "is_late"),
    [
        # rank 1 waits in its 9th collective for rank 0, which has delivered
        (ShareProgress({1: 8}, (1,), {1: {"0": [(9, "all_reduce", 4)]}}), True),
        (
            ShareProgress({1: 8}, (1,), {1: {"0": [(8, "all_reduce", 4)]}}),
            False,
        ),
        # it has gone on meanwhile
        (
            ShareProgress({1: 9}, (1,), {1: {"0": [(9, "all_reduce", 4)]}}),
            False,
        ),
        # it does not answer
        (None, False),
    ],
)
def test_a_rank_of_another_node_waits_in_vain(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    answer: ShareProgress | None,
    is_late: bool,
) -> None:
    monkeypatch.setattr(failed_ranks, "_PROGRESS_SECONDS", 0.0)
    plan = Plan(
        world_size=2,
        nodes=2,
        backend="gloo",
        device="cpu",
        boundary=UPDATE,
    )
    board = Board(tmp_path / "board", 2, 1)
    board.set_updates({0: 10, 1: 8})
    asked: list[bool] = []

    def ask(some_delivered: bool) -> list[ShareProgress]:
        asked.append(some_delivered)
        return [answer] if answer is not None else []

    diagnosis = failed_ranks.Diagnosis(
        tmp_path, board, plan, lambda: None, lambda: None
    )
    monkeypatch.setattr(
        diagnosis, "ask_started", lambda: {0: {"0": [(8, "all_reduce", 4)]}}
    )
    assert diagnosis.wait_in_vain([], ask) is is_late
    assert asked == [True]
    assert ("rank 0 took 10, rank 1 took 8" in diagnosis.late) is is_late
    board.close()


def test_a_result_that_comes_after_the_deadline_is_too_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank: Any = SimpleNamespace(number=0, resting=None, error=None, result=None)
    monkeypatch.setattr(
        failed_ranks,
        "await_stacks",
        lambda send, sizes: setattr(rank, "result", b"{}"),
    )
    plan = Plan(
        world_size=1, backend="gloo", device="cpu", timeout_seconds=0.001
    )
    board: Any = SimpleNamespace(
        describe=lambda number, warmup: "setup", phase=lambda number: None
    )
    diagnosis = failed_ranks.Diagnosis(
        tmp_path, board, plan, lambda: None, lambda: None
    )
    diagnosis.add_hanging([rank], 0.0, at_deadline=False)
    assert rank.error is None
    diagnosis.add_hanging([rank], 0.0, at_deadline=True)
    assert rank.error.summary == "did not end within 0.001 s (--ddp-timeout)"


STACKS = """Thread 0x1 (most recent call first):
  File "/usr/lib/python3/threading.py", line 1 in wait

Current thread 0x2 (most recent call first):
  File "{innermost}", line 5 in f
  File "test_a.py", line 9 in step"""
OURS = str(Path(placement.__file__).parents[1] / "rank" / "rpc.py")


@pytest.mark.parametrize(
    ("innermost", "waits"),
    [
        ("/x/torch/distributed/c10d.py", True),
        # the wait for a future is in ours, and that for parameter servers
        (OURS, True),
        (
            f'/usr/lib/python3.11/threading.py", line 1 in acquire\n  File "{OURS}',
            True,
        ),
        ("test_a.py", False),
        (
            '/usr/lib/python3.11/threading.py", line 1 in acquire\n  File "test_a.py',
            False,
        ),
    ],
)
def test_of_ranks_that_hang_those_inside_torch_or_ours_wait_for_the_others(
    innermost: str, waits: bool
) -> None:
    found = STACKS.format(innermost=innermost)
    assert stacks.waits_for_others(found, serves=False) is waits


def test_who_waits_and_who_idles_is_not_the_first_cause() -> None:
    waiting, idle, lost = (
        error(0, 1.0, waits=True),
        error(2, math.inf),
        error(3, 0.5, lost_connection=True),
    )
    found = launch_error([waiting, error(1, 1.0), idle, lost], ())
    assert (found.cause.rank, [other.rank for other in found.others]) == (
        1,
        [0, 3, 2],
    )
    assert launch_error([idle, lost], ()).cause.rank == 3


def test_of_servers_those_at_work_for_others_may_be_at_fault() -> None:
    handler = 'Thread 0x1 (most recent call first):\n  File "{}", line 5 in f\n'
    handler += (
        '  File "/x/torch/distributed/rpc/internal.py", line 8 in _run_function'
    )
    idle = "Current thread 0x2 (most recent call first):"
    at_work, asking = (
        f"{handler.format(place)}\n\n{idle}"
        for place in ("test_a.py", "/x/torch/rpc/api.py")
    )
    assert not stacks.handlers(idle)
    assert stacks.handlers(at_work)
    assert stacks.waits_for_others(asking, serves=True)
    assert not stacks.waits_for_others(at_work, serves=True)


def test_the_processes_of_a_launch_have_names() -> None:
    ranks = Plan(world_size=2, backend="gloo", device="cpu")
    assert [ranks.name(process) for process in range(ranks.processes)] == [
        "rank 0",
        "rank 1",
    ]
    assert (ranks.rpc, ranks.roles) == (False, "")
    roles = replace(ranks, parameter_servers=3, master=True)
    names = ["trainer0", "trainer1", "ps0", "ps1", "ps2", "master"]
    assert [roles.name(process) for process in range(roles.processes)] == names
    assert (roles.rpc, roles.roles) == (True, "2 trainers 3 ps master")
    assert replace(roles, world_size=1, master=False).roles == "1 trainer 3 ps"


def test_of_a_progress_bar_the_last_state_is_kept(tmp_path: Path) -> None:
    (tmp_path / "rank0.out").write_bytes(b"begin\r\n")
    (tmp_path / "rank0.err").write_bytes(
        b"\r 0 of 3\r 1 of 3\r 2 of 3\r\n\r\nlast"
    )
    (written,) = output.read(tmp_path, {0: "rank 0"})
    assert (written.stdout, written.stderr) == ("begin\n", " 2 of 3\n\nlast")


def test_the_middle_of_a_long_output_is_cut(tmp_path: Path) -> None:
    (tmp_path / "rank0.out").write_text("begin" + "x" * 100_000 + "end")
    (written,) = output.read(tmp_path, {0: "rank 0"})
    assert re.fullmatch(
        r"begin(x+)\n\.\.\. 36,008 bytes cut \.\.\.\n(x+)end", written.stdout
    )
