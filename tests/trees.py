"""Systems that this one is not, as files below a folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

MEMINFO = """\
MemTotal:       16000000 kB
MemFree:         1000000 kB
MemAvailable:   12000000 kB
SwapTotal:       2000000 kB
SwapFree:        1500000 kB
"""
V2 = {
    "proc/self/mounts": "proc /proc proc rw 0 0\ncgroup2 /sys/fs/cgroup cgroup2 rw,nosuid 0 0\n",
    "proc/self/cgroup": "0::/ci/job\n",
}
V1 = {
    "proc/self/mounts": (
        "cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,cpu,cpuacct 0 0\n"
        "cgroup /sys/fs/cgroup/memory cgroup rw,memory 0 0\n"
    ),
    "proc/self/cgroup": "4:memory:/docker/0123\n3:cpu,cpuacct:/docker/0123\n",
}


def written(root: Path, *files: Mapping[str, str]) -> Path:
    """Those files below `root`."""
    for path, content in (item for each in files for item in each.items()):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(content)
    return root


def cores(*groups: Sequence[int], package: int = 0) -> dict[str, str]:
    """Hardware threads, those of one core together."""
    files = {}
    for number, group in enumerate(groups):
        for core in group:
            folder = f"sys/devices/system/cpu/cpu{core}/topology"
            files[f"{folder}/core_cpus_list"] = ",".join(map(str, group)) + "\n"
            files[f"{folder}/physical_package_id"] = f"{package}\n"
            files[f"{folder}/core_id"] = f"{number}\n"
    return files


def stat(*busy: int, total: int, stolen: int = 0) -> str:
    """/proc/stat where each core was busy for so many of `total` ticks."""
    lines = [f"cpu{core} {ticks} 0 0 {total - ticks - stolen} 0 0 0 {stolen} 0 0" for core, ticks in enumerate(busy)]
    return "\n".join(["cpu  1 2 3 4 5 6 7 8 0 0", *lines, "intr 1 2 3"])
