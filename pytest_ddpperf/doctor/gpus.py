"""NVIDIA GPUs as nvidia-smi tells of them, and what hinders them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator, Sequence

from pytest_ddpperf.doctor.system import spelt
from pytest_ddpperf.records.doctor import Finding, Gpu
from pytest_ddpperf.report import text

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

# Of the last moment: what others use beyond that is told.
_BUSY = 0.1
# Of the usual power limit.
_POWER = 0.99

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
        if found := parse(run(["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits"])):
            return found
    return ()


def parse(said: str) -> tuple[Gpu, ...]:
    """nvidia-smi's CSV; "[N/A]" and its kin are unknown. Of a GPU that fell off the bus it tells in a sentence."""
    rows = ([cell.strip() for cell in line.split(",")] for line in said.splitlines())
    return tuple(_gpu(cells) for cells in rows if len(cells) >= len(_FIELDS) and cells[0].isdecimal())


def _gpu(cells: Sequence[str]) -> Gpu:
    index, name, persistence, power, default, clock, most, busy, mask = [*cells, ""][:9]
    share = _number(busy)
    reasons = int(mask, 16) if re.fullmatch("0x[0-9a-fA-F]+", mask) else 0
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


def findings(gpus: Sequence[Gpu]) -> Iterator[Finding]:
    """What hinders those that ranks run on."""
    if busy := [gpu for gpu in gpus if gpu.busy is not None and gpu.busy >= _BUSY]:
        shares = text.span([gpu.busy or 0.0 for gpu in busy])
        yield Finding(
            code="gpu-load",
            problem=f"others use {_those(busy)}: busy for {shares} of the last moment",
            remedy="let nothing else run meanwhile: `nvidia-smi` tells who does",
        )
    if slowed := [gpu for gpu in gpus if gpu.slowed_by]:
        reasons = dict.fromkeys(reason for gpu in slowed for reason in gpu.slowed_by)
        yield Finding(
            code="gpu-slowed",
            problem=f"held below its clocks now: {_those(slowed)}, by {', '.join(reasons)}",
            remedy="cooling or power that lasts for the run, or clocks that need less: `nvidia-smi -lgc`",
        )
    limits = [(gpu, gpu.power_limit_watts, gpu.default_power_watts) for gpu in gpus]
    if low := [(gpu, own, usual) for gpu, own, usual in limits if own and usual and own < _POWER * usual]:
        watts = text.span([own for _, own, _ in low], "{:g} W".format)
        yield Finding(
            code="gpu-power",
            problem=f"{_those([gpu for gpu, _, _ in low])} may use {watts} of the usual {low[0][2]:g} W",
            remedy="the same limit on all machines whose figures are compared: the gate refuses others",
            gain=None,
        )
    if off := [gpu for gpu in gpus if gpu.persistence is False]:
        yield Finding(
            code="gpu-persistence",
            problem=f"the driver's state goes when nobody uses {_those(off)} (persistence mode is off): each launch "
            "begins anew",
            remedy="`nvidia-smi -pm 1`, or nvidia-persistenced",
        )


def _those(gpus: Sequence[Gpu]) -> str:
    """ "GPU 0-3,6"."""
    return f"GPU {spelt([gpu.index for gpu in gpus])}"
