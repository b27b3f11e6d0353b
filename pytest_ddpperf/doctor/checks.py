"""The checklist of `ddpperf doctor`: each check is a fact about the machine, with advice if something can be better.

Facts come from files below a root, which tests replace, and from nvidia-smi. A file that is missing (macOS) or cannot
be read gives no fact.
"""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from pytest_ddpperf.doctor import gpus
from pytest_ddpperf.launch import locks
from pytest_ddpperf.launch.placement import kernel_list, kernel_numbers, quota_cores
from pytest_ddpperf.report import text

_CPU = Path("sys/devices/system/cpu")
_SAMPLE_SECONDS = 1.0  # long enough for the load of a core to be known to a few percent
_BUSY = 0.1  # of a core: below this, an idle system is that busy with itself
_SPARE = 0.1  # of the memory: with less available, the kernel drops pages of files and reads them again
_NAMED = 3  # processes


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of the checklist."""

    name: str
    fact: str
    advice: str = ""  # "" if there is nothing to change


def run_checks(root: Path = Path("/"), seconds: float = _SAMPLE_SECONDS) -> tuple[Check, ...]:
    """Return all checks of the machine below `root`, in the order in which they are shown. Takes `seconds` and more."""
    usable = _usable_cores()
    return (
        *_versions(),
        *_cores(root, usable),
        *_quota(root, usable),
        *_clocks(root, usable),
        *_memory(root),
        *_load(root, usable, seconds),
        *_locks(usable),
        *(Check(name=name, fact=fact, advice=advice) for name, fact, advice in gpus.check_gpus()),
    )


def _versions() -> Iterator[Check]:
    """Read the versions without importing torch, which takes seconds."""
    found = []
    for name in ("torch", "pytest", "pytest-ddpperf"):
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            yield Check(name="versions", fact=f"{name} is not installed", advice=f"pip install {name}")
    yield Check(name="versions", fact=", ".join([*found, f"Python {platform.python_version()}"]))


def _usable_cores() -> tuple[int, ...]:
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def _cores(root: Path, usable: Sequence[int]) -> Iterator[Check]:
    info = _read(root / "proc/cpuinfo")
    model = re.search(r"^model name\s*:\s*(.+)$", info, re.MULTILINE)
    virtual = "virtual machine" if re.search(r"^flags\b.*\bhypervisor\b", info, re.MULTILINE) else ""
    online = len(kernel_numbers(_read(root / _CPU / "online"))) or len(usable)
    count = f"{len(usable)} of {online} cores" if online > len(usable) else text.several(online, "core")
    yield Check(name="cores", fact=", ".join(filter(None, [count, model[1] if model else "", virtual])))
    siblings = [_siblings(root, core, usable) for core in usable]
    shared = {group for group in siblings if len(group) > 1}
    if shared:
        yield Check(
            name="SMT",
            fact=f"{len(shared)} cores run two hardware threads or more, which slow each other",
            advice="echo off > /sys/devices/system/cpu/smt/control, or use one thread of each core: "
            f"taskset -c {kernel_list([group[0] for group in shared])} pytest ...",
        )
    folder = root / "sys/devices/system/node"
    lists = (kernel_numbers(_read(node / "cpulist")) for node in sorted(folder.glob("node[0-9]*")))
    nodes = [own for cores in lists if (own := [core for core in cores if core in usable])]
    if len(nodes) > 1:
        yield Check(
            name="NUMA",
            fact=f"the cores belong to {len(nodes)} nodes, so that some memory is far from some cores",
            advice=f"use the cores of one node: taskset -c {kernel_list(max(nodes, key=len))} pytest ...",
        )


def _siblings(root: Path, core: int, usable: Sequence[int]) -> tuple[int, ...]:
    folder = root / _CPU / f"cpu{core}/topology"
    listed = kernel_numbers(_read(folder / "core_cpus_list") or _read(folder / "thread_siblings_list"))
    return tuple(each for each in listed if each in usable)


def _quota(root: Path, usable: Sequence[int]) -> Iterator[Check]:
    quota = quota_cores(root)
    if quota is not None and quota < len(usable):
        yield Check(
            name="quota",
            fact=f"the cgroup allows the time of {quota:g} cores on {len(usable)}",
            advice="give whole cores: docker --cpuset-cpus, or in Kubernetes the static CPU manager with requests "
            "equal to limits",
        )
    else:
        yield Check(name="quota", fact="no limit on CPU time")


def _clocks(root: Path, usable: Sequence[int]) -> Iterator[Check]:
    governors = {_read(root / _CPU / f"cpu{core}/cpufreq/scaling_governor") for core in usable} - {""}
    if governors:
        slow = governors - {"performance"}
        advice = "cpupower frequency-set -g performance" if slow else ""
        yield Check(name="governor", fact=", ".join(sorted(governors)), advice=advice)
    no_turbo, boost = _read(root / _CPU / "intel_pstate/no_turbo"), _read(root / _CPU / "cpufreq/boost")
    if no_turbo == "0" or boost == "1":
        command = "echo 1 > /sys/devices/system/cpu/intel_pstate/no_turbo"
        yield Check(
            name="boost",
            fact="clocks rise above the base clock as long as heat allows",
            advice=command if no_turbo else "echo 0 > /sys/devices/system/cpu/cpufreq/boost",
        )


def _memory(root: Path) -> Iterator[Check]:
    found = dict(re.findall(r"^(\w+):\s+(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE))
    total, available = (int(found.get(name, 0)) * 1024 for name in ("MemTotal", "MemAvailable"))
    if total:
        advice = "end the processes that use the memory" if available < _SPARE * total else ""
        yield Check(name="memory", fact=f"{available / 1e9:.3g} of {total / 1e9:.3g} GB available", advice=advice)


def _load(root: Path, usable: Sequence[int], seconds: float) -> Iterator[Check]:
    """Sample what other processes use of the cores."""
    before = _ticks(root, usable)
    if not before:
        return
    processes = _cpu_seconds(root)
    began = time.monotonic()
    time.sleep(seconds)
    passed = max(time.monotonic() - began, 1e-9)
    after = _ticks(root, usable)
    busy = {core: _share(before[core], after[core], "busy") for core in before if core in after}
    stolen = {core: _share(before[core], after[core], "stolen") for core in before if core in after}
    used = {
        f"{name} ({pid})": (cpu - processes.get(pid, (name, 0.0))[1]) / passed
        for pid, (name, cpu) in _cpu_seconds(root).items()
        if pid != os.getpid()
    }
    named = [f"{name} {share:.1f}" for name, share in sorted(used.items(), key=lambda item: -item[1])[:_NAMED]]
    cores = [core for core, share in busy.items() if share >= _BUSY]
    if cores:
        total = sum(busy[core] for core in cores)
        yield Check(
            name="load",
            fact=f"other processes use {total:.1f} of {len(usable)} cores: {', '.join(named)}",
            advice="run nothing else while tests are timed",
        )
    else:
        yield Check(name="load", fact="idle")
    if stolen and max(stolen.values()) >= _BUSY / 2:
        yield Check(
            name="stolen",
            fact=f"the hypervisor took {text.amount(max(stolen.values()))} of a core's time",
            advice="use a machine with cores of its own (dedicated, not shared or burstable)",
        )


def _ticks(root: Path, usable: Sequence[int]) -> dict[int, dict[str, int]]:
    """Read /proc/stat: user nice system idle iowait irq softirq steal; guests are part of user and nice."""
    found = {}
    for line in _read(root / "proc/stat").splitlines():
        name, *rest = line.split()
        if re.fullmatch(r"cpu\d+", name) and len(rest) >= 8 and int(name[3:]) in usable:
            user, nice, system, idle, waiting, irq, softirq, stolen = map(int, rest[:8])
            busy = user + nice + system + irq + softirq
            found[int(name[3:])] = {"busy": busy, "stolen": stolen, "total": busy + idle + waiting + stolen}
    return found


def _share(before: dict[str, int], after: dict[str, int], what: str) -> float:
    return (after[what] - before[what]) / max(after["total"] - before["total"], 1)


def _cpu_seconds(root: Path) -> dict[int, tuple[str, float]]:
    """Return the name and the CPU seconds of each process."""
    tick, found = os.sysconf("SC_CLK_TCK"), {}
    for folder in (root / "proc").glob("[0-9]*"):
        # The name is in parentheses and may hold any characters, these included.
        start, _, rest = _read(folder / "stat").rpartition(")")
        fields = rest.split()
        if start and len(fields) > 12:
            found[int(folder.name)] = start.partition("(")[2], (int(fields[11]) + int(fields[12])) / tick
    return found


def _locks(usable: Sequence[int]) -> Iterator[Check]:
    holders = {path.name or "this host": locks.holder(path) for path in locks.resources(usable)}
    timed = [f"{name} (pid {pid})" for name, pid in holders.items() if pid is not None]
    if timed:
        yield Check(
            name="locks",
            fact=f"another run times steps on {', '.join(timed)}",
            advice="run one job per machine: timed launches wait for each other",
        )


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
