"""What the cgroups of this process allow it, of both versions, by files below a root."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

# Version 1 has no word for "no limit": it says the largest multiple of a page, 8 EiB and a little less.
_ENDLESS = 1 << 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a process may use; None: all there is."""

    quota_cores: float | None = None  # CPU time a second
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Throttling:
    """Counters since the cgroup was made."""

    periods: int  # in which the quota was used up
    seconds: float  # that its threads waited for the next one


def limits(root: Path) -> Limits:
    """The least of what its cgroup and those above it allow."""
    quotas = [_quota(folder) for folder in _folders(root, "cpu")]
    memory = [_memory(folder) for folder in _folders(root, "memory")]
    least, most = min(quotas, default=math.inf), min(memory, default=_ENDLESS)
    return Limits(
        quota_cores=None if math.isinf(least) else least,
        memory_bytes=None if most >= _ENDLESS else most,
    )


def throttling(root: Path) -> Throttling | None:
    """Of all its cgroups together; None where none of them counts."""
    said = [_pairs(folder / "cpu.stat") for folder in _folders(root, "cpu")]
    counted = [pairs for pairs in said if "nr_throttled" in pairs]
    if not counted:
        return None
    seconds = (pairs.get("throttled_usec", 0) / 1e6 + pairs.get("throttled_time", 0) / 1e9 for pairs in counted)
    return Throttling(periods=sum(pairs["nr_throttled"] for pairs in counted), seconds=sum(seconds))


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """Of this process's cgroup and those above it. What a container sees is often the uppermost alone, in the place of
    the others."""
    for mount, version in _mounts(root, controller):
        inside = PurePosixPath("/")
        for line in _lines(root / "proc/self/cgroup"):
            _, names, path = [*line.split(":", 2), "", ""][:3]
            if (names == "" and version == 2) or (version == 1 and controller in names.split(",")):
                inside = PurePosixPath(path)
        for each in (inside, *inside.parents):
            folder = mount / str(each).lstrip("/")
            if folder.is_dir():
                yield folder


def _mounts(root: Path, controller: str) -> Iterator[tuple[Path, int]]:
    for line in _lines(root / "proc/self/mounts"):
        _, place, kind, options = [*line.split(), "", "", "", ""][:4]
        if kind == "cgroup2" or (kind == "cgroup" and controller in options.split(",")):
            yield root / place.lstrip("/"), 2 if kind == "cgroup2" else 1


def _quota(folder: Path) -> float:
    """Cores; infinite where there is none."""
    two = _lines(folder / "cpu.max")
    quota, period = [*(two[0].split() if two else ()), "", ""][:2]
    if not two:
        quota, period = ((_lines(folder / name) or [""])[0] for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
    if not (quota.isdecimal() and period.isdecimal() and int(period)):
        return math.inf
    return int(quota) / int(period)


def _memory(folder: Path) -> int:
    said = (_lines(folder / "memory.max") or _lines(folder / "memory.limit_in_bytes") or ["max"])[0]
    return int(said) if said.isdecimal() else _ENDLESS


def _pairs(path: Path) -> dict[str, int]:
    split = (line.split() for line in _lines(path))
    return {pair[0]: int(pair[1]) for pair in split if len(pair) == 2 and pair[1].isdecimal()}


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []
