"""What a step sends, compiles and holds, exactly or not at all: see docs/counters.md.

Process groups that have hooks for what they send (torch 2.14) tell all of it. Of others two sources
are asked, and must agree: torch's dispatcher, which sees the operations that Python threads and
DDP's reducer issue but not those of futures' callbacks, and its flight recorders, which see every
collective but, on Gloo, call a reduce-scatter an all-reduce and have no send and recv. Where they
differ the figures are unknown.
"""

from __future__ import annotations

import gc
import math
import pickle
import re
import resource
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pytest_ddpperf.rank.context import noting
from pytest_ddpperf.rank.group import OwnGroup
from pytest_ddpperf.records.metric import COPIES, POINT_TO_POINT, SENT

Count = int | None
_KIND = re.compile(
    r"_?i?(all_?(?:reduce|gather|to_?all)|reduce_scatter|broadcast|gather|scatter|reduce|send|recv)"
)
_OTHER_KINDS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "alltoall": "all_to_all",
}
# the recorder's, where they are not torch's in lower case
_OTHER_DTYPES = {"byte": "uint8", "char": "int8"}
_REDUCING = ("all_reduce", "reduce_scatter")
# The host waits for the device where it reads the result of these, and where it copies from it.
_READ_BY_HOST = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal")
# Of the operations of c10d, which argument has the bytes that count, where it is not the first.
_BYTES_IN = {"reduce_scatter": 1, "all_to_all": 1, "gather": 1}
_BYTES_COME_OUT = ("all_gather", "scatter", "recv")
# Of a note.
_SENT_IS = "what a step sends is"
HAS_HOOKS = hasattr(dist.ProcessGroup, "register_pre_hook")
_HOOK = 0x646470  # hooks have numbers, which others may give, too


class Operation(NamedTuple):
    """An operation of torch.distributed, as one of the sources has it."""

    kind: str  # "all_reduce", ...; "" for one that is not known
    elements: int = 0  # 0 where the recorder has it, and it does not reduce
    dtype: torch.dtype | None = None
    size: int = 0  # bytes, by the dispatcher


def _operation(kind: str, moved: list[torch.Tensor]) -> Operation:
    dtype = moved[0].dtype if moved else None
    return Operation(
        kind, sum(tensor.numel() for tensor in moved), dtype, _bytes(moved)
    )


def _kind(name: str) -> str:
    """Return what an operation is by its name in the dispatcher or in a recorder:
    "c10d::allreduce_"."""
    match = _KIND.match(name.rpartition(":")[2])
    return _OTHER_KINDS.get(match[1], match[1]) if match else ""


class _Dispatched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operations that the dispatcher sees, and counts what they copy between the host
    and a device."""

    # else flex attention and its kin would fail under it
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.problems: list[str] = []  # why something was not counted
        self.operations: list[Operation] = []
        self.copies: Counter[str] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # else torch.compile would be off from here on

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with noting("what a step copies is", self.problems):
            self._count_copies(func.name(), args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        with noting(_SENT_IS, self.problems):
            self._count_operation(func.name(), args, result)
        return result

    def _count_operation(self, name: str, args: Any, result: Any) -> None:
        namespace = name.partition("::")[0]
        kind = _kind(name) if namespace in ("c10d", "_c10d_functional") else ""
        if kind:
            moved = args[_BYTES_IN.get(kind, 0) if namespace == "c10d" else 0]
            if kind == "all_gather" and namespace != "c10d":
                # functional operations have no argument for their output
                moved = result
            self.operations.append(_operation(kind, tree_leaves(moved)))

    def _count_copies(self, name: str, args: Any, options: Any) -> None:
        if name in _READ_BY_HOST:
            self.copies["host_syncs"] += args[0].device.type != "cpu"
        elif name in ("aten::_to_copy", "aten::copy_"):
            source = args[name == "aten::copy_"]
            target = (
                args[0].device
                if source is not args[0]
                else options.get("device") or source.device
            )
            is_from, is_to = source.device.type != "cpu", target.type != "cpu"
            is_async = options.get("non_blocking") or (len(args) > 2 and args[2])
            self.copies["host_syncs"] += is_from and not is_to and not is_async
            self.copies["d2h.bytes"] += _bytes([source]) * (is_from and not is_to)
            self.copies["h2d.bytes"] += _bytes([source]) * (is_to and not is_from)


@contextmanager
def _hooked(
    own: OwnGroup | None, problems: list[str]
) -> Iterator[tuple[list[Operation], list[Operation]]]:
    """Yield the operations that process groups but our `own` issue within: those of the main thread
    and of torch's threads, and all of them. The threads of a step may go on after it."""
    issued, seen = list[Operation](), list[Operation]()

    def note(given: Any) -> None:
        with noting(_SENT_IS, problems):
            take(given)

    def take(given: Any) -> None:
        if kind := _kind(given.name.name.lower()):
            operation = _operation(
                kind,
                given.output_tensors
                if kind in _BYTES_COME_OUT
                else given.input_tensors,
            )
            seen.append(operation)
            # To Python, a thread that it did not start is a dummy.
            main: Any = threading._MainThread  # type: ignore[attr-defined]
            if isinstance(threading.current_thread(), (main, threading._DummyThread)):
                issued.append(operation)

    names: Any = dist.distributed_c10d._world.pg_names if HAS_HOOKS else {}
    groups = [group for group, name in names.items() if own is None or name != own.name]
    for group in groups:
        group.register_pre_hook(_HOOK, note)
    try:
        yield issued, seen
    finally:
        for group in groups:
            group.unregister_pre_hook(_HOOK)


_replays = 0


def watch_graphs() -> None:
    """Count the replays of CUDA graphs in this process, whose operations neither source sees. To be
    called before the user's code, which may keep a graph's method."""
    replay = torch.cuda.CUDAGraph.replay

    def counted(graph: torch.cuda.CUDAGraph) -> None:
        global _replays
        _replays += 1
        replay(graph)

    torch.cuda.CUDAGraph.replay = counted  # type: ignore[assignment, method-assign]


# Of an entry, what is read here and by stamps.
_FIELDS = {
    "record_id",
    "time_created_ns",
    "process_group",
    "profiling_name",
    "collective_seq_id",
    "is_p2p",
}
_FIELDS |= {"input_sizes", "input_dtypes"}
# NCCL's process group keeps a recorder of its own.
_DUMPS = ("_dump_fr_trace", "_dump_nccl_trace")
# Of 200 steps with 25 collectives each, or of 30 with one for each parameter of a ResNet-50. To
# read them all takes about 60 ms.
RECORDER_SIZE = {"TORCH_FR_BUFFER_SIZE": "5000"}


def entries(own: OwnGroup | None) -> tuple[list[dict[str, Any]], int] | None:
    """Return the entries, each with the place of its "recorder", and since when all are known, in
    ns of CLOCK_REALTIME.

    What a group of our `own` sent is left out. None if the recorders are off or write an unknown
    format."""
    found, since, are_on = list[dict[str, Any]](), 0, False
    try:
        for place, name in enumerate(_DUMPS):
            dump = getattr(torch._C._distributed_c10d, name, None)
            kept = (
                pickle.loads(dump(True, False, False)).get("entries", ())
                if dump is not None
                else ()
            )
            for entry in kept:
                are_on = True
                if not entry.keys() >= _FIELDS:
                    return None
                if own is None or entry["process_group"][0] != own.name:
                    found.append({**entry, "recorder": place})
            if (
                kept
                and (oldest := min(kept, key=itemgetter("record_id")))["record_id"] > 0
            ):
                since = max(since, oldest["time_created_ns"])
    except Exception:  # of another version of torch
        return None
    return (found, since) if are_on else None


# Of each process group, more than a rank is ahead of another.
_TOLD = 100


def started(own: OwnGroup | None) -> dict[str, list[tuple[int, str, int]]]:
    """Return the last collectives that this rank started, by process group: number, name and
    bytes."""
    found: dict[str, list[tuple[int, str, int]]] = {}
    for entry in (entries(own) or ([], 0))[0]:
        if not entry["is_p2p"]:
            sizes = zip(entry["input_sizes"], entry["input_dtypes"], strict=False)
            size = sum(
                math.prod(shape) * getattr(_dtype(name), "itemsize", 0)
                for shape, name in sizes
            )
            name = entry["profiling_name"].rpartition(":")[2]
            found.setdefault(entry["process_group"][0], []).append(
                (entry["collective_seq_id"], name, size)
            )
    return {group: sorted(each)[-_TOLD:] for group, each in found.items()}


def recorded(own: OwnGroup | None) -> dict[tuple[int, int], Operation] | None:
    """Return the entries of the flight recorders by recorder and number, without barriers; None as
    there."""
    if (known := entries(own)) is None:
        return None
    return {
        (entry["recorder"], entry["record_id"]): _recorded(entry)
        for entry in known[0]
        if not entry["profiling_name"].endswith("barrier")  # NCCL's is an all-reduce
    }


def _recorded(entry: dict[str, Any]) -> Operation:
    kind = _kind(entry["profiling_name"])
    if kind not in _REDUCING or not entry["input_dtypes"]:
        return Operation(kind)
    elements = sum(map(math.prod, entry["input_sizes"]))
    return Operation(kind, elements, _dtype(entry["input_dtypes"][0]))


def _dtype(recorded: str) -> torch.dtype | None:
    name = recorded.lower()
    return getattr(torch, _OTHER_DTYPES.get(name, name), None)


class Meter:
    """Measures more of a step than its time, in a launch without RPC."""

    def __init__(self) -> None:
        self.notes: list[str] = []  # on what is unknown

    def blocked_ns(self) -> int:
        """Return how long this process has waited for RPC so far."""
        return 0

    @contextmanager
    def counting(
        self, own: OwnGroup | None, device: torch.device
    ) -> Iterator[dict[str, Count]]:
        """Count a step that is taken within, on all ranks; what is yielded has the figures
        afterwards. Without a group of our `own` the steps of ranks are not kept apart. A figure
        that cannot be read is missing, and `self.notes` say why."""
        barrier = own.barrier if own is not None else lambda: None
        if own is None and dist.is_gloo_available():
            # A group of this process alone, so that the recorder holds something.
            alone = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)  # type: ignore[attr-defined, call-arg]
            alone.barrier().wait()  # type: ignore[attr-defined]
        gc.collect()  # modules that a set-up made and dropped live in cycles
        barrier()  # so that the recorder holds something, if it is on
        before, compiled = recorded(own), count_compilations()
        dispatched = _Dispatched()
        problems = dispatched.problems
        reduced: dict[int, list[int]] = {}
        with noting(_SENT_IS, problems):
            reduced = {
                id(module): module.reducer.get_backward_stats() for module in replicas()
            }
        with noting("peak_memory.bytes is", self.notes):
            if device.type != "cpu":
                torch.accelerator.reset_peak_memory_stats(device)
        self.begin()
        barrier()  # what a step of another's asks of this process is counted here, too
        figures: dict[str, Count] = {}
        graphs = _replays
        with dispatched, _hooked(own, problems) as hooked:
            yield figures
        replayed = _replays > graphs
        after = recorded(own)
        with noting("peak_memory.bytes is", self.notes):
            figures |= _peak_memory(device)
        self.end()
        barrier()  # a later step of another's must not be counted in this one
        figures |= self.close()
        barrier()  # nor before this one was
        issued, seen = hooked if HAS_HOOKS else (dispatched.operations, None)
        if before is not None and after is not None and not HAS_HOOKS:
            seen = [
                operation for number, operation in after.items() if number not in before
            ]
        # Of graphs nothing is seen, and groups that the step makes have no hooks.
        if (
            replayed
            or problems
            or (HAS_HOOKS and _amounts(dispatched.operations) - _amounts(seen or ()))
        ):
            seen = None
        with noting(_SENT_IS, problems):
            reducing = _reducing(reduced)
            figures |= _gradient_sizes(reducing) | _sent(issued, seen, reducing or ())
        with noting("parameters.bytes is", self.notes):
            figures["parameters.bytes"] = _parameter_bytes()
        figures["recompilations"] = count_compilations() - compiled
        figures["graph_breaks"] = _dynamo("graph_break").total()
        if device.type != "cpu" and not (replayed or problems):
            figures |= {name: dispatched.copies[name] for name in COPIES}
        self.notes += problems[:1]

    def begin(self) -> None:
        """All ranks are about to take the step that is counted."""

    def end(self) -> None:
        """This process has taken it."""

    def close(self) -> dict[str, Count]:
        """All ranks have taken it: return further counters."""
        return {}


def _sent(
    dispatched: list[Operation],
    recorded: list[Operation] | None,
    reducing: Iterable[Mapping[str, Any]],
) -> dict[str, Count]:
    """Return how many operations of each kind a step issued and their bytes, unknown where the
    sources differ. `reducing` is as `_reducing` returns it."""
    one, other = _amounts(dispatched), _amounts(recorded or ())
    differing = {
        kind
        for kind, dtype in one.keys() | other.keys()
        if one[kind, dtype] != other[kind, dtype]
    }
    by_kind = {
        kind: [each for each in dispatched if each.kind == kind] for kind in SENT
    }
    by_kind["collectives"] = [
        each for each in dispatched if each.kind not in POINT_TO_POINT
    ]
    for module in reducing:
        # of used parameters, one a backward
        bitmap = (module["num_parameter_tensors"], torch.int32)
        if module["find_unused_parameters"]:
            by_kind["all_reduce"] = [
                each
                for each in by_kind["all_reduce"]
                if (each.elements, each.dtype) != bitmap
            ]
    figures: dict[str, Count] = {}
    for kind, operations in by_kind.items():
        family = (
            differing
            if kind == "collectives"
            else {"all_reduce" if kind in _REDUCING else kind}
        )
        is_known = recorded is not None and not differing & family
        figures[f"{kind}.count"] = len(operations) if is_known else None
        figures[f"{kind}.bytes"] = (
            sum(each.size for each in operations) if is_known else None
        )
    return figures


def _amounts(operations: Iterable[Operation]) -> Counter[tuple[str, str]]:
    """Return what both sources have of the collectives: the elements of those that reduce, by
    dtype, since Gloo takes several all-reduces for a reduce-scatter; of other kinds their number.
    """
    amounts: Counter[tuple[str, str]] = Counter()
    for each in operations:
        if each.kind in _REDUCING:
            amounts["all_reduce", str(each.dtype)] += each.elements
        elif HAS_HOOKS or each.kind not in POINT_TO_POINT:
            # which Gloo's recorder does not have
            amounts[each.kind, ""] += 1
    return amounts


def find_objects(kind: type) -> list[Any]:
    """Return the objects of this process that are of a type; no code of theirs runs."""
    return [each for each in gc.get_objects() if issubclass(type(each), kind)]


def replicas() -> list[DistributedDataParallel]:
    """Return the DDP modules of this process, without those that were never finished."""
    return [
        module
        for module in find_objects(DistributedDataParallel)
        if "reducer" in vars(module)
    ]


def _reducing(before: Mapping[int, list[int]]) -> list[Mapping[str, Any]] | None:
    """Return what DDP logs of its modules whose gradients were synchronised since `before`, which
    has when each of them was ready in the last such backward pass: the copy of a module (an
    average, a teacher) has a reducer, too. None without a DDP module, and under compiled DDP's
    Python reducer, which notes no times."""
    found = replicas()
    if not found or any(vars(module).get("_use_python_reducer") for module in found):
        return None
    logged = []
    for module in found:
        ready = module.reducer.get_backward_stats()
        if any(ready) and ready != before.get(id(module)):
            logged.append(DistributedDataParallel._get_ddp_logging_data(module))  # type: ignore[no-untyped-call]
    return logged


def _gradient_sizes(reducing: Sequence[Mapping[str, Any]] | None) -> dict[str, Count]:
    """Return the bytes of the gradients that DDP synchronised, and its buckets; it logs those that
    it rebuilt one forward later."""
    if reducing is None:
        return {}
    logged = [
        module.get("rebuilt_bucket_sizes") or module["bucket_sizes"]
        for module in reducing
    ]
    buckets = [int(size) for sizes in logged for size in sizes.split(",")]
    return {
        "gradient_bytes": sum(
            module["total_parameter_size_bytes"] for module in reducing
        ),
        "buckets": len(buckets),
        "buckets.largest_bytes": max(buckets, default=None),
    }


def _parameter_bytes() -> int:
    """Return the bytes of all parameters in this process, of sharded ones the shard. Modules are
    not asked: a RemoteModule refuses it, for its parameters are elsewhere."""
    own: dict[int, Any] = {}
    for module in find_objects(nn.Module):
        own |= {id(p): p for p in vars(module).get("_parameters", {}).values()}
    known = (
        p for p in own.values() if p is not None and not is_lazy(p) and not p.is_meta
    )
    return _bytes(getattr(p, "_local_tensor", p) for p in known)


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _dynamo(kind: str) -> Counter[str]:
    """Return what torch.compile counts of a kind; nothing where it was never used."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo.counters[kind] if dynamo is not None else Counter()


def count_compilations() -> int:
    """Return how many frames torch.compile has compiled so far, recompilations included."""
    return _dynamo("frames")["total"]


def has_compiled() -> bool:
    """Return whether torch.compile made a graph; with `fullgraph=True` it counts no frame."""
    return bool(_dynamo("stats"))


def _peak_memory(device: torch.device) -> dict[str, Count]:
    """Return the most memory of this process so far or, on an accelerator, of the step's
    tensors."""
    if device.type != "cpu":
        return {"peak_memory.bytes": torch.accelerator.max_memory_allocated(device)}
    unit = 1 if sys.platform == "darwin" else 1024
    return {"peak_rss.bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
