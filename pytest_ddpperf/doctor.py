"""The checklist of `ddpperf doctor`: each check is a fact about the machine, with advice if
something can be better.

Facts come from files below a root, which tests replace, and from nvidia-smi. A file that is missing
(macOS) or cannot be read gives no fact.
"""

import os
import platform
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from pytest_ddpperf import text
from pytest_ddpperf.launch.placement import (
    kernel_list,
    quota_cores,
    usable_cores,
)
from pytest_ddpperf.wire.boot import (
    contents,
    kernel_numbers,
    number_in,
    nvidia_smi,
    topology,
)

_CPU = Path("sys/devices/system/cpu")
# long enough for the load of a core to be known to a few percent
_SAMPLE_SECONDS = 1.0
_BUSY = 0.1  # of a core: below this, an idle system is that busy with itself

_FIELDS = """
    index name persistence_mode enforced.power.limit clocks.sm clocks.max.sm utilization.gpu
    mig.mode.current compute_mode
""".split()
# The mask of what lowers the clocks. Drivers from 535 on use the first name; nvidia-smi answers
# nothing at all if it is asked for a name that it does not know.
_REASON_MASKS = "clocks_event_reasons.active", "clocks_throttle_reasons.active"
# Bits of the mask that are not the user's own wish (idle, a setting of clocks), from NVML's
# documentation.
_REASONS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "heat",
    0x40: "heat (hardware)",
    0x80: "power brake",
}
_BUSY_PERCENT = 10.0
_LITTLE_SHARED = 2**29  # bytes


class Check(NamedTuple):
    """One line of the checklist."""

    name: str
    fact: str
    advice: str = ""  # "" if there is nothing to change


Checks = Iterator[Check]


def run_checks(
    root: Path = Path("/"), seconds: float = _SAMPLE_SECONDS
) -> tuple[Check, ...]:
    """Return all checks of the machine below `root`, in the order in which they are shown. Takes
    `seconds` and more."""
    usable = usable_cores() or tuple(range(os.cpu_count() or 1))
    return (
        *_versions(),
        *_cores(root, usable),
        *_quota(root, usable),
        *_clocks(root, usable),
        *_load(root, usable, seconds),
        *_shared_memory(root),
        *_allocator(),
        *_gpus(),
    )


def _versions() -> Checks:
    """Read the versions without importing torch, which takes seconds."""
    found = []
    for name in ("torch", "pytest", "pytest-ddpperf"):
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            yield Check(
                "versions", f"{name} is not installed", f"pip install {name}"
            )
    yield Check(
        "versions", ", ".join([*found, f"Python {platform.python_version()}"])
    )


def _cores(root: Path, usable: Sequence[int]) -> Checks:
    info = contents(root / "proc/cpuinfo")
    model = re.search(r"^model name\s*:\s*(.+)$", info, re.MULTILINE)
    online = len(kernel_numbers(contents(root / _CPU / "online"))) or len(
        usable
    )
    facts = [text.several(online, "core")]
    if online > len(usable):
        facts = [f"{len(usable)} of {online} cores"]
    if model:
        facts.append(model[1])
    if re.search(r"^flags\b.*\bhypervisor\b", info, re.MULTILINE):
        facts.append("virtual machine")
    yield Check("cores", ", ".join(facts))
    siblings = [_siblings(root, core, usable) for core in usable]
    shared = {group for group in siblings if len(group) > 1}
    if shared:
        fact = f"{text.several(len(shared), 'core')} of several threads, which slow each other"
        one_of_each = kernel_list([group[0] for group in shared])
        advice = (
            "echo off > /sys/devices/system/cpu/smt/control, or use one thread of each core:"
            f" taskset -c {one_of_each} pytest ..."
        )
        yield Check("SMT", fact, advice)


def _siblings(root: Path, core: int, usable: Sequence[int]) -> tuple[int, ...]:
    folder = root / _CPU / f"cpu{core}/topology"
    listed = kernel_numbers(
        contents(folder / "core_cpus_list")
        or contents(folder / "thread_siblings_list")
    )
    return tuple(each for each in listed if each in usable)


def _allocator() -> Checks:
    if found := os.environ.get("LD_PRELOAD") or platform.libc_ver()[0]:
        yield Check("allocator", found)


def _quota(root: Path, usable: Sequence[int]) -> Checks:
    quota = quota_cores(root)
    if quota is not None and quota < len(usable):
        fact = f"the cgroup allows the time of {quota:g} cores on {len(usable)}"
        yield Check(
            "quota",
            fact,
            "give whole cores: docker --cpuset-cpus, or in Kubernetes the static CPU manager with"
            " requests equal to limits",
        )
    else:
        yield Check("quota", "no limit on CPU time")


def _clocks(root: Path, usable: Sequence[int]) -> Checks:
    governors = {
        contents(root / _CPU / f"cpu{core}/cpufreq/scaling_governor")
        for core in usable
    }
    governors.discard("")
    if governors:
        is_slow = governors != {"performance"}
        advice = "cpupower frequency-set -g performance" if is_slow else ""
        yield Check("governor", ", ".join(sorted(governors)), advice)


def _load(root: Path, usable: Sequence[int], seconds: float) -> Checks:
    """Sample what other processes and the hypervisor use of the cores."""
    before = _ticks(root, usable)
    if not before:
        return
    time.sleep(seconds)
    after = _ticks(root, usable)
    shares = []
    for core in before.keys() & after.keys():
        busy, stolen, total = (
            new - old
            for new, old in zip(after[core], before[core], strict=True)
        )
        shares.append((busy / max(total, 1), stolen / max(total, 1)))
    load = sum(busy for busy, _ in shares if busy >= _BUSY)
    if load:
        fact = f"other processes use {load:.1f} of {len(usable)} cores"
        yield Check(
            "load",
            fact,
            "run nothing else while tests are timed: top shows what runs",
        )
    else:
        yield Check("load", "idle")
    most_stolen = max((share for _, share in shares), default=0.0)
    if most_stolen >= _BUSY / 2:
        fact = (
            f"the hypervisor took {text.amount(most_stolen)} of a core's time"
        )
        yield Check(
            "stolen",
            fact,
            "use a machine with cores of its own (dedicated, not shared or burstable)",
        )


def _ticks(
    root: Path, usable: Sequence[int]
) -> dict[int, tuple[int, int, int]]:
    """Return the busy, the stolen and all ticks of each core, from /proc/stat: user nice system
    idle iowait irq softirq steal; guests are part of user and nice."""
    found = {}
    cores = {f"cpu{core}": core for core in usable}
    for line in contents(root / "proc/stat").splitlines():
        name, *rest = line.split()
        if name in cores and len(rest) >= 8:
            user, nice, system, idle, waiting, irq, softirq, stolen = map(
                int, rest[:8]
            )
            busy = user + nice + system + irq + softirq
            found[cores[name]] = busy, stolen, busy + idle + waiting + stolen
    return found


def _shared_memory(root: Path) -> Checks:
    """Yield a check where there is little, as in a container that nobody gave more."""
    with suppress(OSError):
        there = os.statvfs(root / "dev/shm")
        size = there.f_frsize * there.f_blocks
        if size < _LITTLE_SHARED:
            fact = (
                f"{size / 2**20:.0f} MiB in /dev/shm, of which NCCL and the workers of data loaders"
                " need more"
            )
            yield Check("shared memory", fact, "docker run --shm-size=1g")


def _gpus() -> Checks:
    """Yield the checks of NVIDIA GPUs, as nvidia-smi reports them; nothing if it is missing."""
    rows = _query()
    for row in rows:
        mig = ", MIG enabled" if row["mig.mode.current"] == "Enabled" else ""
        clocks = f"{row['clocks.sm']} of {row['clocks.max.sm']} MHz"
        fact = f"{row['name']}, {row['enforced.power.limit']} W, {clocks}{mig}"
        yield Check(f"GPU {row['index']}", fact)
    if busy := [
        row
        for row in rows
        if (number_in(row["utilization.gpu"]) or 0.0) >= _BUSY_PERCENT
    ]:
        yield Check(
            "GPU load",
            f"{_names(busy)} in use by other processes",
            "run nothing else while tests are timed",
        )
    if slowed := [row for row in rows if _reasons(row["mask"])]:
        reasons = dict.fromkeys(
            reason for row in slowed for reason in _reasons(row["mask"])
        )
        fact = f"{_names(slowed)} below full clocks: {', '.join(reasons)}"
        yield Check(
            "GPU clocks",
            fact,
            "improve cooling or power, or lock lower clocks: nvidia-smi -lgc",
        )
    if off := [row for row in rows if row["persistence_mode"] == "Disabled"]:
        fact = f"off for {_names(off)}: the driver starts anew for each launch"
        yield Check(
            "persistence", fact, "nvidia-smi -pm 1, or nvidia-persistenced"
        )
    if exclusive := [
        row for row in rows if row["compute_mode"].startswith("Exclusive")
    ]:
        fact = f"{_names(exclusive)} for one process at a time: --ddp-turns stretches has two"
        yield Check("compute mode", fact, "nvidia-smi -c DEFAULT")
    if len(rows) > 1:
        for line in filter(None, topology()):
            yield Check("topology", line.rstrip())


def _query() -> list[dict[str, str]]:
    for mask in _REASON_MASKS:
        if rows := nvidia_smi([*_FIELDS, mask]):
            break
    else:
        rows = [[*row, ""] for row in nvidia_smi(_FIELDS)]
    return [dict(zip((*_FIELDS, "mask"), row, strict=True)) for row in rows]


def _reasons(mask: str) -> list[str]:
    bits = int(mask, 16) if re.fullmatch("0x[0-9a-fA-F]+", mask) else 0
    return [words for bit, words in _REASONS.items() if bits & bit]


def _names(rows: Sequence[dict[str, str]]) -> str:
    """Return "GPU 0-3,6"."""
    return f"GPU {kernel_list([int(row['index']) for row in rows])}"
