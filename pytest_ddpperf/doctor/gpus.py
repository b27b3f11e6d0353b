"""NVIDIA GPUs as nvidia-smi tells of them."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence

from pytest_ddpperf.records.doctor import Gpu

_FIELDS = (
    "index",
    "name",
    "persistence_mode",
    "enforced.power.limit",
    "power.default_limit",
    "clocks.sm",
    "clocks.max.sm",
    "utilization.gpu",
)
# A mask of what holds the clocks down. Drivers from 535 on call it by the first name, and nvidia-smi answers nothing
# at all where it is asked for a name that it does not know.
_SLOWED = "clocks_event_reasons.active", "clocks_throttle_reasons.active"
# Bits of the mask that are not the user's own wish (idle, a setting of clocks), from NVML's documentation.
_REASONS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "heat",
    0x40: "heat (hardware)",
    0x80: "power brake",
}

Run = Callable[[Sequence[str]], str]


def output(command: Sequence[str]) -> str:
    """What a tool prints; "" where there is none, or where it does not answer."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def read(run: Run = output) -> tuple[Gpu, ...]:
    """All of this machine's, visible to CUDA or not; none where nvidia-smi is not there."""
    for mask in (*_SLOWED, ""):
        names = (*_FIELDS, mask) if mask else _FIELDS
        if said := run(["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits"]):
            return parse(said)
    return ()


def parse(said: str) -> tuple[Gpu, ...]:
    """nvidia-smi's CSV; "[N/A]" and its kin are unknown."""
    return tuple(_gpu([cell.strip() for cell in line.split(",")]) for line in said.splitlines() if line.strip())


def _gpu(cells: Sequence[str]) -> Gpu:
    index, name, persistence, power, default, clock, most, busy, mask = [*cells, ""][:9]
    share = _number(busy)
    reasons = int(mask, 16) if mask.startswith("0x") else 0
    return Gpu(
        index=int(index),
        name=name,
        persistence={"Enabled": True, "Disabled": False}.get(persistence),
        power_limit_watts=_number(power),
        default_power_watts=_number(default),
        clock_mhz=_number(clock),
        most_clock_mhz=_number(most),
        slowed_by=tuple(words for bit, words in _REASONS.items() if reasons & bit),
        busy=None if share is None else share / 100,
    )


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None
