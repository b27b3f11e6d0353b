"""Machines as `ddpperf doctor` checks them: laptops, servers, containers, GPUs, and those that show
nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from pytest_ddpperf import doctor as checks
from pytest_ddpperf.cli.main import main
from pytest_ddpperf.doctor import Check, run_checks
from pytest_ddpperf.launch.placement import quota_cores
from pytest_ddpperf.wire import boot

CPU = "sys/devices/system/cpu"
CGROUP = {
    "proc/self/mounts": "proc /proc proc rw 0 0\ncgroup2 /sys/fs/cgroup cgroup2 rw,nosuid 0 0\n",
    "proc/self/cgroup": "0::/ci/job\n",
}


def written(root: Path, *files: Mapping[str, str]) -> Path:
    for path, content in (item for each in files for item in each.items()):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(content)
    return root


def threads(*groups: Sequence[int]) -> dict[str, str]:
    """Hardware threads, those of one core in one group."""
    return {
        f"{CPU}/cpu{core}/topology/core_cpus_list": ",".join(map(str, group))
        + "\n"
        for group in groups
        for core in group
    }


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine of four usable cores, without GPUs."""
    monkeypatch.setattr(checks, "usable_cores", lambda: (0, 1, 2, 3))
    monkeypatch.setattr(boot, "output_of", lambda *command: "")
    return monkeypatch


def found(root: Path) -> dict[str, Check]:
    return {
        check.name: check
        for check in run_checks(root, seconds=0.0)
        if check.name != "versions"
    }


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, None),
        ({"ci/job/cpu.max": "150000 100000\n"}, 1.5),
        ({"ci/cpu.max": "50000 100000", "ci/job/cpu.max": "max 100000"}, 0.5),
        # A container often sees its own as the uppermost, whatever its cgroup is called outside.
        ({"cpu.max": "200000 100000"}, 2.0),
    ],
)
def test_the_quota_is_the_least_of_all_cgroups_above(
    files: dict[str, str], cores: float | None, tmp_path: Path
) -> None:
    written(
        tmp_path,
        CGROUP,
        {f"sys/fs/cgroup/{path}": content for path, content in files.items()},
    )
    assert quota_cores(tmp_path) == cores


def test_a_laptop_has_advice_on_clocks_and_threads(
    machine: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    written(
        tmp_path,
        threads((0, 1), (2, 3)),
        {
            f"{CPU}/cpu{core}/cpufreq/scaling_governor": "powersave\n"
            for core in range(4)
        },
        {
            f"{CPU}/online": "0-3\n",
            "proc/cpuinfo": "model name\t: Core i7\nflags : fpu hypervisor\n",
        },
    )
    checked = found(tmp_path)
    assert checked["cores"].fact == "4 cores, Core i7, virtual machine"
    assert checked["SMT"].advice.endswith("taskset -c 0,2 pytest ...")
    assert (checked["governor"].fact, checked["governor"].advice) == (
        "powersave",
        "cpupower frequency-set -g performance",
    )


def test_a_server_has_advice_on_its_quota(
    machine: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    written(
        tmp_path,
        CGROUP,
        {
            "sys/fs/cgroup/ci/job/cpu.max": "150000 100000\n",
            f"{CPU}/online": "0-7",
            f"{CPU}/cpu0/cpufreq/scaling_governor": "performance",
        },
    )
    checked = found(tmp_path)
    assert checked["cores"].fact == "4 of 8 cores"
    assert (
        checked["quota"].fact == "the cgroup allows the time of 1.5 cores on 4"
    )
    assert checked["governor"].advice == ""


def test_load_is_named(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def stat(busy: int, stolen: int) -> str:
        return f"cpu 1 2 3\ncpu0 {busy} 0 0 {100 - busy - stolen} 0 0 0 {stolen} 0 0\nintr 1 2 3"

    def passes(seconds: float) -> None:
        written(tmp_path, {"proc/stat": stat(90, 10)})

    written(tmp_path, {"proc/stat": stat(0, 0).replace(" 100 ", " 0 ")})
    machine.setattr(checks.time, "sleep", passes)
    checked = found(tmp_path)
    assert checked["load"].fact == "other processes use 0.9 of 4 cores"
    assert checked["stolen"].fact == "the hypervisor took 10 % of a core's time"


@pytest.mark.parametrize(("mebibytes", "told"), [(64, True), (8192, False)])
def test_little_shared_memory_is_told(
    machine: pytest.MonkeyPatch, tmp_path: Path, mebibytes: int, told: bool
) -> None:
    machine.setattr(
        checks.os,
        "statvfs",
        lambda path: SimpleNamespace(f_frsize=4096, f_blocks=mebibytes * 256),
    )
    shown = {each.name: each for each in checks._shared_memory(tmp_path)}
    assert ("shared memory" in shown) is told
    if told:
        assert shown["shared memory"].fact.startswith("64 MiB in /dev/shm")


SMI = """\
0, NVIDIA H100, Enabled, 700.00, 1980, 1980, 0, Disabled, Default, 0x0000000000000001
1, NVIDIA H100, Disabled, 500.00, 1200, 1980, 60, Enabled, Exclusive_Process, 0x0000000000000024
Unable to determine the device handle for GPU 0000:03:00.0: Unknown Error
"""


@pytest.mark.parametrize(
    "mask",
    ["clocks_event_reasons.active", "clocks_throttle_reasons.active", ""],
)
def test_gpus_are_read_whatever_the_driver_calls_its_masks(
    machine: pytest.MonkeyPatch, mask: str
) -> None:
    def output(*command: str) -> str:
        if command[1] == "topo":
            return "\t\x1b[4mGPU0\tGPU1\x1b[0m\nGPU0\t X \tNV18\n\n"
        asked = command[1]
        if not mask:
            return re.sub(", 0x.*", "", SMI) if "reasons" not in asked else ""
        return SMI if asked.endswith(mask) else ""

    machine.setattr(boot, "output_of", output)
    found = list(checks._gpus())
    checked = {each.name: (each.fact, each.advice) for each in found}
    shown = [(each.name, each.fact) for each in found]
    assert checked["GPU 0"][0] == "NVIDIA H100, 700.00 W, 1980 of 1980 MHz"
    assert (
        checked["GPU 1"][0]
        == "NVIDIA H100, 500.00 W, 1200 of 1980 MHz, MIG enabled"
    )
    assert checked["GPU load"][0] == "GPU 1 in use by other processes"
    clocks = (
        "GPU 1 below full clocks: power cap, heat",
        "improve cooling or power, or lock lower clocks: nvidia-smi -lgc",
    )
    assert checked.get("GPU clocks") == (clocks if mask else None)
    assert (
        checked["persistence"][1] == "nvidia-smi -pm 1, or nvidia-persistenced"
    )
    assert checked["compute mode"][0].startswith(
        "GPU 1 for one process at a time"
    )
    assert [fact for name, fact in shown if name == "topology"] == [
        "        GPU0    GPU1",
        "GPU0     X      NV18",
    ]


def test_the_allocator_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    monkeypatch.setattr(checks.platform, "libc_ver", lambda: ("glibc", "2.36"))
    assert list(checks._allocator()) == [Check("allocator", "glibc")]
    monkeypatch.setenv("LD_PRELOAD", "libjemalloc.so.2")
    assert list(checks._allocator()) == [Check("allocator", "libjemalloc.so.2")]
    monkeypatch.delenv("LD_PRELOAD")
    monkeypatch.setattr(checks.platform, "libc_ver", lambda: ("", ""))
    assert list(checks._allocator()) == []


def test_without_nvidia_smi_there_are_no_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert list(checks._gpus()) == []


def test_the_command_prints_advice_and_writes_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = Check(
        "governor", "powersave", "cpupower frequency-set -g performance"
    )
    monkeypatch.setattr(
        checks, "run_checks", lambda: (Check("cores", "2 cores"), slow)
    )
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "  cores     2 cores",
        "! governor  powersave",
        "            -> cpupower frequency-set -g performance",
        "",
        "1 of 2 checks have advice",
        "smallest change that can be detected here: pytest TESTS --ddp-against self",
    ]
