"""What cores and processes do between two moments, by files below a root."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pytest_ddpperf.doctor.system import text
from pytest_ddpperf.launch import cgroups
from pytest_ddpperf.launch.cgroups import Throttling
from pytest_ddpperf.records.doctor import Busy, CoreLoad, Cores, Load

# Of a core: less is what any system does by itself.
_LEAST = 0.05


@dataclass(frozen=True, slots=True)
class Ticks:
    """What a core did since it started, in the kernel's ticks."""

    busy: int
    stolen: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """What the kernel had counted at one moment."""

    when: float  # CLOCK_MONOTONIC, seconds
    cores: Mapping[int, Ticks] = field(default_factory=dict)
    processes: Mapping[int, tuple[str, float]] = field(default_factory=dict)  # by pid: name, seconds of CPU time
    throttling: Throttling | None = None
    swapped_pages: int = 0


def counters(root: Path) -> Counters:
    return Counters(
        when=time.monotonic(),
        cores=_cores(text(root / "proc/stat")),
        processes=_processes(root / "proc"),
        throttling=cgroups.throttling(root),
        swapped_pages=_swapped(text(root / "proc/vmstat")),
    )


def between(before: Counters, after: Counters, usable: Cores) -> Load:
    """What went on in between, of this process nothing."""
    seconds = after.when - before.when
    cores = []
    for core in usable:
        if core in before.cores and core in after.cores:
            then, now = before.cores[core], after.cores[core]
            total = max(now.total - then.total, 1)
            busy, stolen = (now.busy - then.busy) / total, (now.stolen - then.stolen) / total
            cores.append(CoreLoad(core=core, busy=busy, stolen=stolen))
    used = []
    for pid, (name, cpu) in after.processes.items():
        share = (cpu - before.processes.get(pid, (name, 0.0))[1]) / seconds if seconds > 0 else 0.0
        if pid != os.getpid() and share >= _LEAST:
            used.append(Busy(pid=pid, name=name, cores=share))
    throttled = None
    if before.throttling is not None and after.throttling is not None:
        throttled = after.throttling.periods - before.throttling.periods
    return Load(
        seconds=seconds,
        cores=tuple(cores),
        processes=tuple(sorted(used, key=lambda process: -process.cores)),
        throttled=throttled,
        throttled_seconds=(after.throttling.seconds - before.throttling.seconds)
        if before.throttling and after.throttling
        else 0.0,
        swapped_pages=after.swapped_pages - before.swapped_pages,
    )


def _cores(stat: str) -> dict[int, Ticks]:
    """Of /proc/stat: user nice system idle iowait irq softirq steal; guests are in user and nice already."""
    found = {}
    for line in stat.splitlines():
        name, *rest = line.split()
        if name.startswith("cpu") and name[3:].isdecimal() and len(rest) >= 8:
            user, nice, system, idle, waiting, irq, softirq, steal = map(int, rest[:8])
            busy = user + nice + system + irq + softirq
            found[int(name[3:])] = Ticks(busy, steal, busy + idle + waiting + steal)
    return found


def _processes(proc: Path) -> dict[int, tuple[str, float]]:
    """One that ends meanwhile is left out."""
    tick = os.sysconf("SC_CLK_TCK")
    found = {}
    for folder in proc.glob("[0-9]*"):
        # The name is in parentheses and may hold anything, those included.
        start, _, rest = text(folder / "stat").rpartition(")")
        fields = rest.split()
        if start and len(fields) > 12:
            name = start.partition("(")[2]
            found[int(folder.name)] = name, (int(fields[11]) + int(fields[12])) / tick
    return found


def _swapped(vmstat: str) -> int:
    pairs = (line.split() for line in vmstat.splitlines())
    return sum(int(pair[1]) for pair in pairs if pair[0] in ("pswpin", "pswpout"))
