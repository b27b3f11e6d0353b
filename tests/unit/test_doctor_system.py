"""What systems tell of themselves: laptops, servers, containers, and those that tell nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pytest_ddpperf.doctor import gpus, load, system
from pytest_ddpperf.launch import cgroups
from pytest_ddpperf.launch.cgroups import Limits
from pytest_ddpperf.records.doctor import Machine, Node
from tests import trees


@pytest.mark.parametrize(("written", "cores"), [("0-3,8", (0, 1, 2, 3, 8)), ("5", (5,)), ("", ()), ("no", ())])
def test_lists_of_cores_are_read_as_the_kernel_writes_them(written: str, cores: tuple[int, ...]) -> None:
    assert system.listed(written) == cores


@pytest.mark.parametrize(("cores", "written"), [((8, 0, 1, 2, 3), "0-3,8"), ((5,), "5"), ((), ""), ((1, 3), "1,3")])
def test_and_written_as_taskset_reads_them(cores: tuple[int, ...], written: str) -> None:
    assert system.spelt(cores) == written


def test_a_laptop(tmp_path: Path) -> None:
    root = trees.written(
        tmp_path,
        trees.cores((0, 1), (2, 3)),
        {f"sys/devices/system/cpu/cpu{core}/cpufreq/scaling_governor": "powersave\n" for core in range(4)},
        {
            "sys/devices/system/cpu/online": "0-3\n",
            "sys/devices/system/cpu/intel_pstate/no_turbo": "0\n",
            "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
            "proc/cpuinfo": "processor : 0\nflags : fpu vme\n",
            "proc/meminfo": trees.MEMINFO,
        },
    )
    assert system.read(root, (0, 1, 2, 3)) == Machine(
        usable=(0, 1, 2, 3),
        online=4,
        siblings=((0, 1), (2, 3)),
        packages=1,
        governors=("powersave",),
        boost=True,
        virtual=False,
        memory_bytes=16_384_000_000,
        available_bytes=12_288_000_000,
        swap_used_bytes=512_000_000,
        huge_pages="madvise",
    )


def test_a_server_of_two_nodes_of_which_a_part_may_be_used(tmp_path: Path) -> None:
    nodes = "sys/devices/system/node"
    root = trees.written(
        tmp_path,
        trees.cores((0, 4), (1, 5)),
        trees.cores((2, 6), (3, 7), package=1),
        {
            "sys/devices/system/cpu/online": "0-7",
            "sys/devices/system/cpu/cpufreq/boost": "0",
            f"{nodes}/online": "0-1",
            f"{nodes}/node0/cpulist": "0-1,4-5",
            f"{nodes}/node0/meminfo": "Node 0 MemTotal:       1000 kB\n",
            f"{nodes}/node1/cpulist": "2-3,6-7",
        },
    )
    machine = system.read(root, (0, 1, 2, 4))
    assert machine.siblings == ((0, 4), (1,), (2,))
    assert (machine.online, machine.packages, machine.boost) == (8, 2, False)
    assert machine.nodes == (
        Node(number=0, cores=(0, 1, 4), memory_bytes=1_024_000),
        Node(number=1, cores=(2,), memory_bytes=None),
    )


def test_a_system_without_sysfs_and_procfs_tells_nothing(tmp_path: Path) -> None:
    assert system.read(tmp_path, (0, 1)) == Machine(usable=(0, 1), online=2)
    before = load.counters(tmp_path)
    told = load.between(before, load.counters(tmp_path), (0, 1))
    assert (told.cores, told.processes, told.throttled, told.swapped_pages) == ((), (), None, 0)


def test_a_virtual_machine_is_known_by_its_processor(tmp_path: Path) -> None:
    trees.written(tmp_path, {"proc/cpuinfo": "flags\t\t: fpu hypervisor lahf_lm\n"})
    assert system.read(tmp_path, (0,)).virtual is True


def test_this_machine_has_cores() -> None:
    machine = system.read(Path("/"), system.usable_cores())
    assert machine.usable
    assert machine.online >= len(machine.usable)


# --- cgroups


@pytest.mark.parametrize(
    ("files", "limits"),
    [
        ({}, Limits()),
        ({"ci/job/cpu.max": "150000 100000\n", "ci/job/memory.max": "max\n"}, Limits(quota_cores=1.5)),
        (
            {"ci/cpu.max": "50000 100000", "ci/job/cpu.max": "max 100000", "ci/memory.max": "4096"},
            Limits(quota_cores=0.5, memory_bytes=4096),
        ),
        # Of the uppermost a container sees its own, whatever its cgroup is called outside.
        ({"cpu.max": "200000 100000", "memory.max": "1024"}, Limits(quota_cores=2.0, memory_bytes=1024)),
    ],
)
def test_limits_of_version_2_are_the_least_of_all_above(files: dict[str, str], limits: Limits, tmp_path: Path) -> None:
    trees.written(tmp_path, trees.V2, {f"sys/fs/cgroup/{path}": content for path, content in files.items()})
    assert cgroups.limits(tmp_path) == limits


@pytest.mark.parametrize("inside", ["", "docker/0123/"])
def test_limits_of_version_1(inside: str, tmp_path: Path) -> None:
    cpu, memory = f"sys/fs/cgroup/cpu,cpuacct/{inside}", f"sys/fs/cgroup/memory/{inside}"
    trees.written(
        tmp_path,
        trees.V1,
        {
            f"{cpu}cpu.cfs_quota_us": "300000\n",
            f"{cpu}cpu.cfs_period_us": "100000\n",
            f"{memory}memory.limit_in_bytes": "2048\n",
        },
    )
    assert cgroups.limits(tmp_path) == Limits(quota_cores=3.0, memory_bytes=2048)


def test_version_1_says_no_limit_by_numbers(tmp_path: Path) -> None:
    trees.written(
        tmp_path,
        trees.V1,
        {
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
    )
    assert cgroups.limits(tmp_path) == Limits()


def test_what_was_throttled_is_counted_in_both_versions(tmp_path: Path) -> None:
    two = trees.written(tmp_path / "two", trees.V2)
    assert cgroups.throttling(two) is None
    trees.written(two, {"sys/fs/cgroup/ci/job/cpu.stat": "usage_usec 5\nnr_throttled 3\nthrottled_usec 2500000\n"})
    one = trees.written(tmp_path / "one", trees.V1)
    trees.written(one, {"sys/fs/cgroup/cpu,cpuacct/cpu.stat": "nr_throttled 3\nthrottled_time 2500000000\n"})
    for root in (one, two):
        assert cgroups.throttling(root) == cgroups.Throttling(periods=3, seconds=2.5)


# --- load


FREE = 1 << 22  # Linux gives no process a number from here on


def process(pid: int, name: str, ticks: int) -> dict[str, str]:
    return {f"proc/{pid}/stat": f"{pid} ({name}) R 1 1 1 0 -1 4194304 1 0 0 0 {ticks} 0 0 0 20 0 1 0 5"}


def test_load_is_what_was_done_in_between(tmp_path: Path) -> None:
    tick = os.sysconf("SC_CLK_TCK")
    before = trees.written(
        tmp_path / "before",
        trees.V2,
        process(FREE + 1, "make (all) :", 0),
        process(FREE + 3, "sleep", 5),
        process(os.getpid(), "we", 0),
        {
            "proc/stat": trees.stat(50, 0, 0, total=1000),
            "proc/vmstat": "pswpin 1\npswpout 2\nother 9\n",
            "sys/fs/cgroup/ci/job/cpu.stat": "nr_throttled 3\nthrottled_usec 1000000\n",
        },
    )
    after = trees.written(
        tmp_path / "after",
        trees.V2,
        process(FREE + 1, "make (all) :", 2 * tick),
        process(FREE + 2, "new", tick),
        process(FREE + 3, "sleep", 5),
        process(os.getpid(), "we", 4 * tick),
        {
            "proc/stat": trees.stat(140, 25, 0, total=1100, stolen=10),
            "proc/vmstat": "pswpin 4\npswpout 6\n",
            "sys/fs/cgroup/ci/job/cpu.stat": "nr_throttled 5\nthrottled_usec 3500000\n",
        },
    )
    first, second = load.counters(before), load.counters(after)
    took = second.when - first.when
    told = load.between(first, second, (0, 1, 5))  # of core 5 nothing is told
    assert [(core.core, core.busy, core.stolen) for core in told.cores] == [(0, 0.9, 0.1), (1, 0.25, 0.1)]
    assert [(each.pid, each.name) for each in told.processes] == [(FREE + 1, "make (all) :"), (FREE + 2, "new")]
    assert told.processes[0].cores == pytest.approx(2 / took)
    assert (told.throttled, told.throttled_seconds, told.swapped_pages) == (2, 2.5, 7)


# --- GPUs

SMI = """\
0, NVIDIA H100 80GB HBM3, Enabled, 700.00, 700.00, 1980, 1980, 0, 0x0000000000000001
1, NVIDIA H100 80GB HBM3, Disabled, 500.00, 700.00, 1200, 1980, 93, 0x0000000000000024
2, NVIDIA A100-SXM4-40GB MIG 1g.5gb, Enabled, [N/A], [N/A], 1410, 1410, [N/A], [N/A]
"""


def test_gpus_are_what_nvidia_smi_says() -> None:
    first, second, third = gpus.parse(SMI)
    assert (first.persistence, first.power_limit_watts, first.slowed_by, first.busy) == (True, 700.0, (), 0.0)
    assert (second.persistence, second.power_limit_watts, second.default_power_watts) == (False, 500.0, 700.0)
    assert (second.slowed_by, second.busy, second.clock_mhz) == (("power cap", "heat"), 0.93, 1200.0)
    assert (third.index, third.power_limit_watts, third.busy, third.slowed_by) == (2, None, None, ())


def test_a_sentence_of_nvidia_smi_is_no_gpu() -> None:
    lost = "Unable to determine the device handle for GPU2: 0000:3B:00.0: Unknown Error,,,,,,,,\n\n"
    assert gpus.parse(f"{lost}3, NVIDIA H100\n{SMI}") == gpus.parse(SMI)
    assert gpus.parse(SMI.replace("0x0000000000000001", "0xno"))[0].slowed_by == ()
    assert gpus.read(lambda command: "No devices were found\n") == ()


def test_an_older_driver_is_asked_by_its_own_words() -> None:
    asked = []

    def run(command: list[str]) -> str:
        asked.append(command[1])
        return SMI if command[1].endswith("clocks_throttle_reasons.active") else ""

    assert len(gpus.read(run)) == 3
    assert [query.rpartition(",")[2] for query in asked] == [
        "clocks_event_reasons.active",
        "clocks_throttle_reasons.active",
    ]


def test_where_there_is_no_nvidia_smi_there_are_no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus.read() == ()
