"""torch's flight recorders, which note every collective: when each was started."""

from __future__ import annotations

import pickle
import time
from operator import itemgetter
from typing import Any

import torch

from pytest_ddpperf.rank.group import OwnGroup

# NCCL's process group keeps a recorder of its own.
_DUMPS = ("_dump_fr_trace", "_dump_nccl_trace")
# Of 200 steps with 25 collectives each, or of 30 with one for each parameter of a ResNet-50. To read them all takes
# about 60 ms.
SIZE = {"TORCH_FR_BUFFER_SIZE": "5000"}


def entries(own: OwnGroup | None) -> tuple[list[dict[str, Any]], int] | None:
    """Return the entries, each with the place of its "recorder", and since when all are known, in ns of CLOCK_REALTIME.

    What a group of our `own` sent is left out. None if the recorders are off or write an unknown format."""
    found, since, are_on = list[dict[str, Any]](), 0, False
    try:
        for place, name in enumerate(_DUMPS):
            dump = getattr(torch._C._distributed_c10d, name, None)
            kept = pickle.loads(dump(True, False, False)).get("entries", ()) if dump is not None else ()
            for entry in kept:
                are_on = True
                if own is None or entry["process_group"][0] != own.name:
                    found.append({**entry, "recorder": place})
            if kept and (oldest := min(kept, key=itemgetter("record_id")))["record_id"] > 0:
                since = max(since, oldest["time_created_ns"])
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, EOFError, pickle.UnpicklingError):
        return None
    return (found, since) if are_on else None


def starts(own: OwnGroup | None) -> tuple[list[tuple[int, str]], int] | None:
    """Return when each collective was started, in order, with a name that is the same on all ranks; and since when all
    are known. None as `entries`. Point-to-point operations are left out."""
    if (known := entries(own)) is None:
        return None
    kept, since = known
    try:
        found = [
            (int(entry["time_created_ns"]), f"{entry['process_group'][0]}:{entry['collective_seq_id']}")
            for entry in kept
            if not entry["is_p2p"]
        ]
    except (KeyError, TypeError):
        return None
    return sorted(found), since


def realtime_offset_ns() -> int:
    """Return CLOCK_REALTIME less CLOCK_MONOTONIC, by the quickest of five readings."""
    readings = []
    for _ in range(5):
        before, real, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        readings.append((after - before, real - (before + after) // 2))
    return min(readings)[1]
