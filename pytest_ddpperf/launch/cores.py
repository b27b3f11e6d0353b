"""Which cores each CPU rank is pinned to, so that a measurement says which share of the machine it had."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pytest_ddpperf.launch import cgroups

_SYSFS = Path("/sys/devices/system/cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The cores of every rank; empty tuples where the platform cannot pin (macOS)."""

    cpus: tuple[tuple[int, ...], ...]  # rank x core
    cores: int  # usable by this process, or as many as a quota has the time of
    cores_per_rank: int  # 0: ranks share cores
    pinned: bool  # not where all share all
    own_threads: int  # of a rank whose environment asks for none; 0: torch's choice
    quota: bool  # less time than that of the usable cores
    threads: int  # that the environment asks for in each rank, where its share has not so many cores; else 0

    @property
    def used(self) -> tuple[int, ...]:
        """All cores that some rank runs on, in order."""
        return tuple(sorted({cpu for cpus in self.cpus for cpu in cpus}))


def place(
    world_size: int,
    environ: Mapping[str, str],
    usable: tuple[int, ...] | None = None,
    quota_cores: float | None = None,
) -> Placement:
    """Disjoint, equal shares of the usable cores; with more ranks than cores, rank r gets core r mod n.

    Where the ranks' `environ` asks for more threads a rank than a share has cores, all ranks share all cores: threads
    that spin for each other at every operation stand still when one core has to do for several. So they do under a
    quota of CPU time, with threads for their share of it: others of the host may be on any of the cores.
    """
    if usable is None:
        usable = tuple(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else ()
        quota_cores = cgroups.limits(Path("/")).quota_cores
    ordered = sorted(usable, key=_physical)
    there = len(ordered) or os.cpu_count() or 1
    cores = min(there, max(int(quota_cores), 1)) if quota_cores is not None else there
    share, threads = cores // world_size, _threads(environ)
    crowded, quota = threads > max(share, 1), cores < there
    shared = crowded and world_size > 1
    cpus: tuple[tuple[int, ...], ...] = ((),) * world_size
    if shared or quota:
        cpus = (tuple(sorted(ordered)),) * world_size
    elif share == 0 and ordered:
        cpus = tuple((ordered[rank % cores],) for rank in range(world_size))
    elif ordered:
        cpus = tuple(tuple(sorted(ordered[rank * share : (rank + 1) * share])) for rank in range(world_size))
    return Placement(
        cpus=cpus,
        cores=cores,
        cores_per_rank=0 if shared else share,
        pinned=bool(ordered) and not (shared or quota),
        own_threads=max(share, 1) if quota else len(cpus[0]),
        quota=quota,
        threads=threads if crowded else 0,
    )


def _threads(environ: Mapping[str, str]) -> int:
    """Of OMP_NUM_THREADS, which may be a list by depth; 0 where it asks for none."""
    match = re.match(r"\s*\d+", environ.get("OMP_NUM_THREADS", ""))
    return int(match[0]) if match else 0


def _physical(cpu: int) -> tuple[int, int, int]:
    """Sorts hardware threads of one core next to each other, and cores of one package."""
    folder = _SYSFS / f"cpu{cpu}" / "topology"
    try:
        package = int((folder / "physical_package_id").read_text())
        core = int((folder / "core_id").read_text())
    except (OSError, ValueError):
        return 0, cpu, cpu
    return package, core, cpu
