"""What the kernel tells of cores, clocks and memory, by files below a root, which in tests is another machine's.

A file that is not there, as on macOS, or that may not be read tells nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from pytest_ddpperf.launch import cgroups
from pytest_ddpperf.records.doctor import Cores, Machine, Node

_CPU = Path("sys/devices/system/cpu")
_NODES = Path("sys/devices/system/node")


def text(path: Path) -> str:
    """What a file says; "" where it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def number(path: Path) -> int | None:
    """The number that a file holds."""
    said = text(path)
    return int(said) if said.isdecimal() else None


def listed(said: str) -> Cores:
    """The numbers of a list as the kernel writes it: "0-3,8"."""
    found: list[int] = []
    for part in said.split(","):
        if match := re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip()):
            found += range(int(match[1]), int(match[2] or match[1]) + 1)
    return tuple(found)


def usable_cores() -> Cores:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def read(root: Path, usable: Cores) -> Machine:
    """The machine below `root`, GPUs left out, for a process that may use those cores."""
    memory = _memory(text(root / "proc/meminfo"))
    swap = memory.get("SwapTotal", 0) - memory.get("SwapFree", 0) if "SwapTotal" in memory else None
    cpuinfo = text(root / "proc/cpuinfo")
    limits = cgroups.limits(root)
    return Machine(
        usable=usable,
        online=len(listed(text(root / _CPU / "online"))) or len(usable),
        siblings=_siblings(root, usable),
        packages=len({text(root / _CPU / f"cpu{core}/topology/physical_package_id") for core in usable} - {""}) or None,
        nodes=tuple(_nodes(root, usable)),
        governors=_distinct(text(root / _CPU / f"cpu{core}/cpufreq/scaling_governor") for core in usable),
        boost=_boost(root),
        virtual=bool(re.search(r"^flags\b.*\bhypervisor\b", cpuinfo, re.MULTILINE)) if "flags" in cpuinfo else None,
        memory_bytes=memory.get("MemTotal"),
        available_bytes=memory.get("MemAvailable"),
        swap_used_bytes=swap,
        huge_pages=_chosen(text(root / "sys/kernel/mm/transparent_hugepage/enabled")),
        quota_cores=limits.quota_cores,
        memory_limit_bytes=limits.memory_bytes,
    )


def _siblings(root: Path, usable: Cores) -> tuple[Cores, ...]:
    """None where the kernel does not tell."""
    groups: dict[Cores, None] = {}
    for core in usable:
        folder = root / _CPU / f"cpu{core}/topology"
        there = listed(text(folder / "core_cpus_list") or text(folder / "thread_siblings_list"))
        if core not in there:
            return ()
        groups[tuple(each for each in there if each in usable)] = None
    return tuple(groups)


def _nodes(root: Path, usable: Cores) -> Iterable[Node]:
    for node in listed(text(root / _NODES / "online")):
        folder = root / _NODES / f"node{node}"
        total = re.search(r"MemTotal:\s+(\d+) kB", text(folder / "meminfo"))
        cores = tuple(core for core in listed(text(folder / "cpulist")) if core in usable)
        yield Node(number=node, cores=cores, memory_bytes=int(total[1]) * 1024 if total else None)


def _boost(root: Path) -> bool | None:
    no_turbo = number(root / _CPU / "intel_pstate/no_turbo")
    if no_turbo is not None:
        return not no_turbo
    boost = number(root / _CPU / "cpufreq/boost")
    return None if boost is None else bool(boost)


def _memory(said: str) -> dict[str, int]:
    """Bytes, by the kernel's names."""
    return {name: int(amount) * 1024 for name, amount in re.findall(r"^(\w+):\s+(\d+) kB", said, re.MULTILINE)}


def _chosen(said: str) -> str:
    """The one in brackets: "always [madvise] never"."""
    match = re.search(r"\[(\w+)\]", said)
    return match[1] if match else ""


def _distinct(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({value for value in values if value}))


def spelt(cores: Sequence[int]) -> str:
    """As the kernel and taskset write them: "0-3,8"."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][-1] + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
