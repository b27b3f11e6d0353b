"""torch's flight recorders: which collectives this process started, and when."""

import math
import pickle
import time
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist

from pytest_ddpperf.rank import torch_names
from pytest_ddpperf.rank.group import NoGroup

# What is read of an entry.
_FIELDS = frozenset(
    """
    record_id time_created_ns process_group profiling_name collective_seq_id is_p2p input_sizes
    input_dtypes
    """.split()
)
# NCCL's process group keeps a recorder of its own and, since torch 2.15, so does each newer one.
_DUMPS = (
    ("torch._C._distributed_c10d:_dump_fr_trace",),
    ("torch._C._distributed_c10d:_dump_nccl_trace",),
    ("torch._C._distributed_c10d:_dump_fr_trace", "nccl2"),
    ("torch._C._distributed_c10d:_dump_fr_trace", "nccl-lazy"),
)
# the recorder's, where they are not torch's in lower case
_OTHER_DTYPES = {"byte": "uint8", "char": "int8"}

Entry = dict[str, Any]


def size() -> dict[str, str]:
    """Return the variable that gives the recorder room for 200 steps with 25 collectives each, or
    for 30 with one for each parameter of a ResNet-50. To read them all takes about 60 ms.

    Before torch 2.8 only NCCL has a recorder. Later versions warn of its variable."""
    is_old = torch_names.find(_DUMPS[0][0]) is None
    name = "TORCH_NCCL_TRACE_BUFFER_SIZE" if is_old else "TORCH_FR_BUFFER_SIZE"
    return {name: "5000"}


def record_something() -> None:
    """Let the recorder hold an entry, if it is on, by a group of this process alone."""
    if dist.is_gloo_available():
        alone = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)  # type: ignore[attr-defined, call-arg]
        alone.barrier().wait()  # type: ignore[attr-defined]


def entries(own: NoGroup) -> tuple[list[Entry], int] | None:
    """Return the entries, each with the place of its "recorder", and since when all are known, in
    ns of CLOCK_REALTIME.

    What a group of our `own` sent is left out. None if the recorders are off or write an unknown
    format."""
    found = []
    since = 0
    is_on = False
    try:
        for place, (name, *backend) in enumerate(_DUMPS):
            dump = torch_names.find(name)
            if dump is None:
                continue
            try:
                dumped = dump(True, False, False, *backend)
            except TypeError:  # an older torch has one for all
                continue
            kept = pickle.loads(dumped).get("entries", ())
            for entry in kept:
                is_on = True
                if not entry.keys() >= _FIELDS:
                    return None
                if entry["process_group"][0] != own.name:
                    found.append({**entry, "recorder": place})
            oldest = min(kept, key=itemgetter("record_id"), default=None)
            if oldest is not None and oldest["record_id"] > 0:
                since = max(since, oldest["time_created_ns"])
    except Exception:  # of another version of torch
        return None
    return (found, since) if is_on else None


def dtype_of(recorded: str) -> torch.dtype | None:
    """Return the dtype that a recorder writes so; None for an unknown one."""
    name = recorded.lower()
    return getattr(torch, _OTHER_DTYPES.get(name, name), None)


# Of each process group, more than a rank is ahead of another.
_TOLD = 100


def started(own: NoGroup) -> dict[str, list[tuple[int, str, int]]]:
    """Return the last collectives that this rank started, by process group: number, name and
    bytes."""
    found: dict[str, list[tuple[int, str, int]]] = {}
    known = entries(own)
    for entry in known[0] if known is not None else ():
        if entry["is_p2p"]:
            continue
        size = 0
        for shape, name in zip(
            entry["input_sizes"], entry["input_dtypes"], strict=False
        ):
            size += math.prod(shape) * getattr(dtype_of(name), "itemsize", 0)
        name = entry["profiling_name"].rpartition(":")[2]
        group = found.setdefault(entry["process_group"][0], [])
        group.append((entry["collective_seq_id"], name, size))
    return {group: sorted(each)[-_TOLD:] for group, each in found.items()}


# By more than so much, the recorder's clock moved against ours while the window was timed.
_CLOCK_MOVED_NS = 50_000


def starts(
    own: NoGroup, before_ns: int
) -> tuple[list[tuple[int, str]], int] | None:
    """Return when each collective was started, on CLOCK_MONOTONIC, with a name that is the same on
    all ranks; and since when all are known. Point-to-point operations are left out.

    `before_ns` is what `realtime_offset_ns` was before. None as `entries`, and if the clocks moved
    against each other since."""
    offset_ns = realtime_offset_ns()
    known = entries(own)
    if known is None or abs(offset_ns - before_ns) > _CLOCK_MOVED_NS:
        return None
    kept, since = known
    found = [
        (
            int(entry["time_created_ns"]) - offset_ns,
            f"{entry['process_group'][0]}:{entry['collective_seq_id']}",
        )
        for entry in kept
        if not entry["is_p2p"]
    ]
    return found, since - offset_ns if since else 0


def realtime_offset_ns() -> int:
    """Return CLOCK_REALTIME less CLOCK_MONOTONIC, by the quickest of five readings."""
    readings = []
    for _ in range(5):
        before, real, after = (
            time.monotonic_ns(),
            time.time_ns(),
            time.monotonic_ns(),
        )
        readings.append((after - before, real - (before + after) // 2))
    return min(readings)[1]
