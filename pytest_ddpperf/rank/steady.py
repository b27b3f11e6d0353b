"""When a step has settled: what still compiles, grows or is rearranged is no steady state, whatever it takes.

Looks at counts only, never at times.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import torch
import torch.distributed as dist

# How many steps the warm-up may go on beyond those asked, until nothing changes any more.
WARMUP_BEYOND = 20
_CAUSES = ("compiling", "allocating device memory", "rebuilding gradient buckets")


class Steadiness:
    """One rank's view of whether its last step changed anything that later steps find done."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rebuilds = _Rebuilds()
        self._before = self._counts()

    def _counts(self) -> tuple[int, ...]:
        return graphs(), _allocator_growth(self._device), self._rebuilds.count

    def changed(self) -> list[bool]:
        """Since it was asked last, by cause."""
        now, before = self._counts(), self._before
        self._before = now
        return [after != earlier for after, earlier in zip(now, before, strict=True)]

    def unsettled(self) -> str:
        """What the last step changed in any rank, in words; all ranks ask together."""
        changes = torch.tensor(self.changed(), dtype=torch.uint8, device=self._device)
        dist.all_reduce(changes, dist.ReduceOp.MAX)
        return ", ".join(cause for cause, any_rank in zip(_CAUSES, changes.tolist(), strict=True) if any_rank)


def graphs() -> int:
    """How many frames were handed to torch.compile so far, recompilations included."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["frames"]["total"]) if dynamo is not None else 0


def _allocator_growth(device: torch.device) -> int:
    """Segments that the caching allocator asked of the device, and retries after it was told there is no more."""
    if device.type == "cpu":
        return 0
    told = torch.accelerator.memory_stats(device)
    return int(told.get("segment.all.allocated", 0)) + int(told.get("num_alloc_retries", 0))


class _Rebuilds:
    """Counts the rebuilds of DDP's buckets, which it tells its log only: whatever of that the user lets be shown."""

    def __init__(self) -> None:
        self.count = 0
        log = logging.getLogger("torch.nn.parallel.distributed")
        log.info, self._info = self._counted, log.info  # type: ignore[method-assign, assignment]

    def _counted(self, message: object, *arguments: object, **options: Any) -> None:
        self.count += "buckets have been rebuilt" in str(message)
        self._info(message, *arguments, **{"stacklevel": 2, **options})
