"""torch's flight recorders, which note every collective: when each was started."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Iterator
from typing import Any

import torch

from pytest_ddpperf.rank.group import OwnGroup

# NCCL's process group keeps a recorder of its own.
_DUMPS = ("_dump_fr_trace", "_dump_nccl_trace")
# Of 200 steps with 25 collectives each, or of 30 with one for each parameter of a ResNet-50. To read them all takes
# about 60 ms.
_ENTRIES = "5000"


def keep_more() -> None:
    """Let the recorder keep more than the 2,000 entries of torch's default; before any process group is made."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", _ENTRIES)


def starts(own: OwnGroup) -> tuple[list[tuple[int, str]], int] | None:
    """Return when each collective was started, in ns of CLOCK_REALTIME and in order, with a name that is the same on
    all ranks; and since when all are known. None if the recorders are off or write an unknown format.

    Point-to-point operations and what our `own` group sent are left out."""
    found, since, are_on = list[tuple[int, str]](), 0, False
    try:
        for entry in _entries():
            are_on = True
            group, when = entry["process_group"][0], entry["time_created_ns"]
            if not entry["is_p2p"] and group != own.name:
                found.append((when, f"{group}:{entry['collective_seq_id']}"))
            if entry["is_oldest"] and entry["record_id"] > 0:
                since = max(since, when)
    except (KeyError, TypeError, ValueError, AttributeError, pickle.UnpicklingError):
        return None
    return (sorted(found), since) if are_on else None


def _entries() -> Iterator[dict[str, Any]]:
    """Yield the entries of all recorders, each with whether it is the oldest one that its recorder still has."""
    for name in _DUMPS:
        if (dump := getattr(torch._C._distributed_c10d, name, None)) is not None:
            held = pickle.loads(dump(True, False, False)).get("entries", ())
            oldest = min((entry["record_id"] for entry in held), default=0)
            yield from ({**entry, "is_oldest": entry["record_id"] == oldest} for entry in held)


def realtime_offset_ns() -> int:
    """Return CLOCK_REALTIME less CLOCK_MONOTONIC, by the quickest of five readings."""
    readings = []
    for _ in range(5):
        before, real, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        readings.append((after - before, real - (before + after) // 2))
    return min(readings)[1]
