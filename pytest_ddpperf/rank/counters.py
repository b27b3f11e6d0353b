"""How many all-reduces a step issues and how many bytes they reduce, exactly or not at all.

Two sources of torch are asked, and must agree: its dispatcher, which sees collectives that Python threads and DDP's
reducer issue but not those of futures' callbacks, and its flight recorders, which see every collective but, on Gloo,
call a reduce-scatter an all-reduce. Where they differ the figures are unknown.
"""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_ddpperf.rank.group import OwnGroup

Count = int | None
Reduced = tuple[int, torch.dtype | None]  # an all-reduce: of so many elements of a kind
_ALL_REDUCE = {"c10d::allreduce_", "c10d::allreduce_coalesced_"}
_ALL_REDUCE |= {f"_c10d_functional::all_reduce{kind}" for kind in ("", "_", "_coalesced", "_coalesced_")}
_OTHER_NAMES = {"byte": "uint8", "char": "int8"}  # the recorder's, where they are not torch's in lower case


class _Dispatched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the all-reduces that the dispatcher sees."""

    supports_higher_order_operators = True  # else flex attention and its kin would fail under it

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reduced: list[Reduced] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # else torch.compile would be off from here on

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() in _ALL_REDUCE:
            tensors = [args[0]] if isinstance(args[0], torch.Tensor) else args[0]
            self.reduced.append((sum(t.numel() for t in tensors), tensors[0].dtype))
        return func(*args, **(kwargs or {}))


# NCCL's process group keeps a recorder of its own.
_RECORDERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")


def recorded(own: OwnGroup) -> dict[tuple[str, int], Reduced | None] | None:
    """Return the entries of the flight recorders by recorder and number, None for other operations than all-reduces.

    Barriers and what our `own` group sent are left out. None if they are off or write an unknown format."""
    found: dict[tuple[str, int], Reduced | None] = {}
    are_on = False
    for recorder in _RECORDERS:
        dump = getattr(torch._C._distributed_c10d, recorder, None)
        try:
            for entry in json.loads(dump()).get("entries", ()) if dump is not None else ():
                are_on = True
                # NCCL's barrier is an all-reduce.
                if not entry["profiling_name"].endswith("barrier") and entry["process_group"][0] != own.name:
                    found[recorder, entry["record_id"]] = _reduced(entry)
        except (KeyError, TypeError, ValueError, AttributeError):
            return None
    return found if are_on else None


def _reduced(entry: dict[str, Any]) -> Reduced | None:
    if "all_reduce" not in entry["profiling_name"]:
        return None
    kind = entry["input_dtypes"][0].lower()
    return sum(map(math.prod, entry["input_sizes"])), getattr(torch, _OTHER_NAMES.get(kind, kind), None)


class Meter:
    """Measures more of a step than its time, in a launch without RPC."""

    def blocked_ns(self) -> int:
        """Return how long this process has waited for RPC so far."""
        return 0

    def counters(self, step: Callable[[], Any], own: OwnGroup) -> dict[str, Count]:
        """Run a step of this process, as all do, and count its all-reduces."""
        gc.collect()  # DDP modules that a set-up made and dropped live in cycles
        own.barrier()  # so that the recorder holds something, if it is on
        before = recorded(own)
        self.begin()
        own.barrier()  # what a step of another's asks of this process is counted here, too
        with _Dispatched() as dispatched:
            step()
        after = recorded(own)
        self.end()
        own.barrier()  # a later step of another's must not be counted in this one
        more = self.close()
        own.barrier()  # nor before this one was
        seen = None
        if before is not None and after is not None:
            new = [reduced for number, reduced in after.items() if number not in before]
            seen = _agreed(dispatched.reduced, [reduced for reduced in new if reduced is not None])
        modules = _replicas()
        gradients = [gradient for module in modules for gradient in _synchronised(module)]
        return {
            "all_reduce.count": len(seen) if seen is not None else None,
            "all_reduce.bytes": sum(n * kind.itemsize for n, kind in seen if kind) if seen is not None else None,
            "gradient_bytes": sum(p.numel() * p.element_size() for p in gradients) if modules else None,
            **more,
        }

    def begin(self) -> None:
        """All ranks are about to take the step that is counted."""

    def end(self) -> None:
        """This process has taken it."""

    def close(self) -> dict[str, Count]:
        """All ranks have taken it: return further counters."""
        return {}


def _agreed(dispatched: list[Reduced], recorded: list[Reduced]) -> list[Reduced] | None:
    """Return what both sources saw, without the bitmaps of used parameters that DDP reduces besides gradients."""
    if sorted(map(str, dispatched)) != sorted(map(str, recorded)):
        return None
    left = list(dispatched)
    for module in _replicas():
        bitmap = (len(_synchronised(module)), torch.int32)
        if module.find_unused_parameters:  # one a backward
            left = [each for each in left if each != bitmap]
    return left


def _replicas() -> list[DistributedDataParallel]:
    """Return the DDP modules of this process."""
    return [thing for thing in gc.get_objects() if issubclass(type(thing), DistributedDataParallel)]


def _synchronised(module: DistributedDataParallel) -> list[torch.Tensor]:
    ignored = module.parameters_to_ignore
    return [p for name, p in module.module.named_parameters() if p.requires_grad and name not in ignored]
