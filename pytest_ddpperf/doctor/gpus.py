"""NVIDIA GPUs, as nvidia-smi reports them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Sequence

from pytest_ddpperf.launch.placement import kernel_list

_FIELDS = (
    "index",
    "name",
    "persistence_mode",
    "enforced.power.limit",
    "power.default_limit",
    "clocks.sm",
    "clocks.max.sm",
    "utilization.gpu",
    "mig.mode.current",
)
# The mask of what lowers the clocks. Drivers from 535 on use the first name; nvidia-smi answers nothing at all if it is
# asked for a name that it does not know.
_REASON_MASKS = "clocks_event_reasons.active", "clocks_throttle_reasons.active"
# Bits of the mask that are not the user's own wish (idle, a setting of clocks), from NVML's documentation.
_REASONS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "heat",
    0x40: "heat (hardware)",
    0x80: "power brake",
}
_BUSY_PERCENT = 10.0
_POWER = 0.99  # of the usual limit


def check_gpus() -> Iterator[tuple[str, str, str]]:
    """Yield the name, the fact and the advice of each check; nothing if nvidia-smi is missing."""
    rows = _query()
    for row in rows:
        parts = [row["name"], f"{row['enforced.power.limit']} W", f"{row['clocks.sm']} of {row['clocks.max.sm']} MHz"]
        if row["mig.mode.current"] == "Enabled":
            parts.append("MIG enabled")
        yield f"GPU {row['index']}", ", ".join(parts), ""
    busy = [row for row in rows if (_number(row["utilization.gpu"]) or 0.0) >= _BUSY_PERCENT]
    if busy:
        yield "GPU load", f"{_names(busy)} in use by other processes", "run nothing else while tests are timed"
    slowed = {row["index"]: _reasons(row["mask"]) for row in rows}
    if any(slowed.values()):
        reasons = dict.fromkeys(reason for found in slowed.values() for reason in found)
        low = [row for row in rows if slowed[row["index"]]]
        advice = "improve cooling or power, or lock lower clocks: nvidia-smi -lgc"
        yield "GPU clocks", f"{_names(low)} below full clocks: {', '.join(reasons)}", advice
    pairs = [(row, _number(row["enforced.power.limit"]), _number(row["power.default_limit"])) for row in rows]
    if limited := [row for row, own, usual in pairs if own and usual and own < _POWER * usual]:
        yield "GPU power", f"{_names(limited)} below the default power limit", "use the same limit on all machines"
    if off := [row for row in rows if row["persistence_mode"] == "Disabled"]:
        fact = f"off for {_names(off)}: the driver starts anew for each launch"
        yield "persistence", fact, "nvidia-smi -pm 1, or nvidia-persistenced"
    if len(rows) > 1:
        yield from (("topology", line.strip(), "") for line in _output("nvidia-smi", "topo", "-m").splitlines() if line)


def _query() -> list[dict[str, str]]:
    for mask in (*_REASON_MASKS, ""):
        names = (*_FIELDS, mask) if mask else _FIELDS
        said = _output("nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits")
        # For a GPU that fell off the bus nvidia-smi prints a sentence instead of a row.
        rows = ([cell.strip() for cell in line.split(",")] for line in said.splitlines())
        found = [dict(zip((*_FIELDS, "mask"), [*row, ""], strict=False)) for row in rows if len(row) >= len(_FIELDS)]
        if found:
            return found
    return []


def _output(*command: str) -> str:
    """Return what a tool prints; "" if it is missing or does not answer."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _reasons(mask: str) -> list[str]:
    bits = int(mask, 16) if re.fullmatch("0x[0-9a-fA-F]+", mask) else 0
    return [words for bit, words in _REASONS.items() if bits & bit]


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:  # "[N/A]" and the like
        return None


def _names(rows: Sequence[dict[str, str]]) -> str:
    """Return "GPU 0-3,6"."""
    return f"GPU {kernel_list([int(row['index']) for row in rows])}"
