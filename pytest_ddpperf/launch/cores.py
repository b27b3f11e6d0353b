"""Which cores each CPU rank is pinned to, so that a measurement says which share of the machine it had."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_SYSFS = Path("/sys/devices/system/cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The cores of every rank; empty tuples where the platform cannot pin (macOS)."""

    cpus: tuple[tuple[int, ...], ...]  # rank x core
    cores: int  # usable by this process
    cores_per_rank: int  # 0: ranks share cores

    @property
    def pinned(self) -> bool:
        return bool(self.cpus and self.cpus[0])

    @property
    def used(self) -> tuple[int, ...]:
        """All cores that some rank runs on, in order."""
        return tuple(sorted({cpu for cpus in self.cpus for cpu in cpus}))


def place(world_size: int, usable: tuple[int, ...] | None = None) -> Placement:
    """Disjoint, equal shares of the usable cores; with more ranks than cores, rank r gets core r mod n."""
    if usable is None:
        if not hasattr(os, "sched_getaffinity"):
            return Placement(
                cpus=((),) * world_size,
                cores=os.cpu_count() or 1,
                cores_per_rank=(os.cpu_count() or 1) // world_size,
            )
        usable = tuple(os.sched_getaffinity(0))
    ordered = sorted(usable, key=_physical)
    share = len(ordered) // world_size
    if share == 0:
        cpus: tuple[tuple[int, ...], ...] = tuple((ordered[rank % len(ordered)],) for rank in range(world_size))
    else:
        cpus = tuple(tuple(sorted(ordered[rank * share : (rank + 1) * share])) for rank in range(world_size))
    return Placement(cpus=cpus, cores=len(ordered), cores_per_rank=share)


def _physical(cpu: int) -> tuple[int, int, int]:
    """Sorts hardware threads of one core next to each other, and cores of one package."""
    folder = _SYSFS / f"cpu{cpu}" / "topology"
    try:
        package = int((folder / "physical_package_id").read_text())
        core = int((folder / "core_id").read_text())
    except (OSError, ValueError):
        return 0, cpu, cpu
    return package, core, cpu
