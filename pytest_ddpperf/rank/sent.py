"""What a step sends and copies, exactly or not at all: see docs/counters.md.

Process groups that have hooks for what they send (torch 2.14) tell all of it. Of others two sources
are asked, and must agree: torch's dispatcher, which sees the operations that Python threads and
DDP's reducer issue but not those of futures' callbacks, and its flight recorders, which see every
collective but, on Gloo, call a reduce-scatter an all-reduce and have no send and recv. Where they
differ the figures are unknown.
"""

import math
import re
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_ddpperf.rank import recorder, torch_names
from pytest_ddpperf.rank.context import noting
from pytest_ddpperf.rank.group import NoGroup
from pytest_ddpperf.rank.modules import Figures, bytes_of
from pytest_ddpperf.rank.work import Work
from pytest_ddpperf.records.metric import COPIES, POINT_TO_POINT, SENT

_KIND = re.compile(
    r"_?i?(all_?(?:reduce|gather|to_?all)|reduce_scatter|broadcast|gather|scatter|reduce|send|recv)"
)
_OTHER_KINDS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "alltoall": "all_to_all",
}
_REDUCING = ("all_reduce", "reduce_scatter")
# The host waits for the device where it reads the result of these, and where it copies from it.
_READ_BY_HOST = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal")
# Of the operations of c10d, which argument has the bytes that count, where it is not the first.
_BYTES_IN = {"reduce_scatter": 1, "all_to_all": 1, "gather": 1}
_BYTES_COME_OUT = ("all_gather", "scatter", "recv")
SENT_IS = "what a step sends is"  # of a note
_REGISTER_HOOK = "torch.distributed:ProcessGroup.register_pre_hook"
_IGNORED = (
    "torch.utils._python_dispatch:TorchDispatchMode.ignore_compile_internals"
)
HAS_HOOKS = torch_names.find(_REGISTER_HOOK) is not None
_HOOK = 0x646470  # hooks have numbers, which others may give, too


class Operation(NamedTuple):
    """An operation of torch.distributed, as one of the sources has it."""

    kind: str  # "all_reduce", ...; "" for one that is not known
    elements: int = 0  # 0 where the recorder has it, and it does not reduce
    dtype: torch.dtype | None = None
    size: int = 0  # bytes, by the dispatcher


def _operation(kind: str, moved: list[torch.Tensor]) -> Operation:
    dtype = moved[0].dtype if moved else None
    elements = sum(tensor.numel() for tensor in moved)
    return Operation(kind, elements, dtype, bytes_of(moved))


def _kind(name: str) -> str:
    """Return what an operation is by its name in the dispatcher or in a recorder:
    "c10d::allreduce_"."""
    match = _KIND.match(name.rpartition(":")[2])
    return _OTHER_KINDS.get(match[1], match[1]) if match else ""


class Dispatched(TorchDispatchMode):
    """Records the operations that the dispatcher sees, and counts their work and what they copy
    between the host and a device."""

    # else flex attention and its kin would fail under it
    supports_higher_order_operators = True

    def __init__(self, problems: list[str]) -> None:
        """`problems` get why something is not counted."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.problems = problems
        self.operations: list[Operation] = []
        self.copies: Counter[str] = Counter()
        self.work = Work()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # else torch.compile would be off from here on

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if "DTensor" in [kind.__name__ for kind in types]:
            # It calls operators on the tensor of this rank, and collectives: these are counted.
            return NotImplemented
        options = kwargs or {}
        with noting("what a step copies is", self.problems):
            self._count_copies(func.name(), args, options)
        result = func(*args, **options)
        self.work.add(func, args, options, result)
        with noting(SENT_IS, self.problems):
            self._count_operation(func.name(), args, result)
        return result

    def _count_operation(self, name: str, args: Any, result: Any) -> None:
        namespace = name.partition("::")[0]
        if namespace not in ("c10d", "_c10d_functional"):
            return
        kind = _kind(name)
        if not kind:
            return
        if namespace == "c10d":
            moved = args[_BYTES_IN.get(kind, 0)]
        else:
            # functional operations have no argument for their output
            moved = result if kind == "all_gather" else args[0]
        tensors = torch_names.need("torch.utils._pytree:tree_leaves")(moved)
        self.operations.append(_operation(kind, tensors))

    def _count_copies(self, name: str, args: Any, options: Any) -> None:
        if name in _READ_BY_HOST and args[0].device.type != "cpu":
            self.copies["host_syncs"] += 1
        if name == "aten::copy_":
            source = args[1]
            target = args[0].device
        elif name == "aten::_to_copy":
            source = args[0]
            target = options.get("device") or source.device
        else:
            return
        is_to = target.type != "cpu"
        if is_to == (source.device.type != "cpu"):
            return
        self.copies["h2d.bytes" if is_to else "d2h.bytes"] += bytes_of([source])
        # torch waits for the stream in either direction
        if not (options.get("non_blocking") or (len(args) > 2 and args[2])):
            self.copies["host_syncs"] += 1


def recorded(own: NoGroup) -> dict[tuple[int, int], Operation] | None:
    """Return what the flight recorders have but barriers, by recorder and number; None as
    `recorder.entries`."""
    known = recorder.entries(own)
    if known is None:
        return None
    return {
        (entry["recorder"], entry["record_id"]): _recorded(entry)
        for entry in known[0]
        # NCCL's barrier is an all-reduce, and the end of a batch sends nothing
        if not entry["profiling_name"].endswith(("barrier", ":coalesced"))
    }


def _recorded(entry: recorder.Entry) -> Operation:
    kind = _kind(entry["profiling_name"])
    if kind not in _REDUCING or not entry["input_dtypes"]:
        return Operation(kind)
    elements = sum(map(math.prod, entry["input_sizes"]))
    return Operation(
        kind, elements, recorder.dtype_of(entry["input_dtypes"][0])
    )


_replays = 0
_unwatched: list[str] = []  # why replays are not counted


def watch_graphs() -> None:
    """Count the replays of CUDA graphs in this process, whose operations no source sees. To be
    called before the user's code, which may keep a graph's method."""

    def counting(replay: Any) -> Any:
        def counted(graph: torch.cuda.CUDAGraph) -> None:
            global _replays
            _replays += 1
            replay(graph)

        return counted

    with noting(SENT_IS, _unwatched):
        torch_names.replace("torch.cuda:CUDAGraph.replay", counting)


class Sent:
    """What a step sends and copies."""

    def __init__(self, own: NoGroup, *, has_compiled: bool) -> None:
        """Groups of our `own` do not count. The recorder must hold something by now. An older torch
        compiles nothing any more after it was counted in code that it `has_compiled`: there nothing
        is counted."""
        self.problems = [*_unwatched]  # why something is not known
        ignored = torch_names.find(_IGNORED) is not None
        self._is_counting = ignored or not has_compiled
        if not self._is_counting:
            self.problems.append(
                f"{SENT_IS} unknown: to count would switch torch.compile off in this torch"
            )
        self._own = own
        self._before = recorded(own)
        self._dispatched = Dispatched(self.problems)
        # what process groups issue, by their hooks: those of the main thread and of torch's
        # threads, and all of them. The threads of a step may go on after it
        self._issued: list[Operation] = []
        self._hooked: list[Operation] = []
        self._recorded: list[Operation] | None = None
        self._is_hidden = False  # some operations were seen by no source

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the step that is taken within."""
        graphs = _replays
        groups = self._groups()
        for group in groups:
            group.register_pre_hook(_HOOK, self._note)
        try:
            with self._dispatched if self._is_counting else nullcontext():
                yield
        finally:
            for group in groups:
                group.unregister_pre_hook(_HOOK)
        self._is_hidden = _replays > graphs
        after = recorded(self._own)
        if self._before is not None and after is not None:
            new = after.keys() - self._before.keys()
            self._recorded = [after[number] for number in new]

    def _groups(self) -> list[Any]:
        """Return the process groups whose hooks are used."""
        if not HAS_HOOKS:
            return []
        names = torch_names.need(
            "torch.distributed.distributed_c10d:_world.pg_names"
        )
        return [
            group for group, name in names.items() if name != self._own.name
        ]

    def _note(self, given: Any) -> None:
        """Note an operation that a process group is about to issue."""
        with noting(SENT_IS, self.problems):
            kind = _kind(given.name.name.lower())
            if not kind:
                return
            comes_out = kind in _BYTES_COME_OUT
            moved = given.output_tensors if comes_out else given.input_tensors
            operation = _operation(kind, moved)
            self._hooked.append(operation)
            # To Python, a thread that it did not start is a dummy.
            main: Any = threading._MainThread  # type: ignore[attr-defined]
            if isinstance(
                threading.current_thread(), (main, threading._DummyThread)
            ):
                self._issued.append(operation)

    def copies(self) -> Figures:
        """Return what the step copied between the host and a device, and how often the host
        waited for it; {} if that is unknown."""
        if self._is_hidden or self.problems:
            return {}
        return {name: self._dispatched.copies[name] for name in COPIES}

    def work(self, *, has_compiled: bool) -> Figures:
        """Return how many operators the step called, and their floating-point operations: unknown
        of compiled code and replayed graphs, which call what no source sees. {} if nothing was
        counted."""
        if not self._is_counting:
            return {}
        work = self._dispatched.work
        is_seen = not (self._is_hidden or _unwatched or has_compiled)
        return {
            "operators.count": work.operators,
            "flops": work.flops if is_seen else None,
        }

    def figures(self, reducing: Iterable[Mapping[str, Any]]) -> Figures:
        """Return how many operations of each kind the step issued and their bytes, None where the
        sources differ. `reducing` is as `modules.reducing` returns it."""
        issued = self._dispatched.operations
        seen = self._recorded
        if HAS_HOOKS:
            # Groups that the step makes have no hooks.
            unhooked = _amounts(issued) - _amounts(self._hooked)
            issued = self._issued
            seen = None if unhooked else self._hooked
        elif self._recorded is None:
            self.problems.append(
                f"{SENT_IS} unknown: torch's flight recorder is off (Gloo has it from torch 2.8 on)"
            )
        if self._is_hidden or self.problems:
            seen = None
        return _figures(issued, seen, reducing)


def _figures(
    issued: list[Operation],
    seen: list[Operation] | None,
    reducing: Iterable[Mapping[str, Any]],
) -> Figures:
    one = _amounts(issued)
    other = _amounts(seen or ())
    differing = {amount[0] for amount in (one - other) | (other - one)}
    # of used parameters, one a backward
    bitmaps = [
        (module["num_parameter_tensors"], torch.int32)
        for module in reducing
        if module["find_unused_parameters"]
    ]
    figures: Figures = {}
    for kind in (*SENT, "collectives"):
        if kind == "collectives":
            differs = bool(differing)
            operations = [
                each for each in issued if each.kind not in POINT_TO_POINT
            ]
        else:
            differs = ("all_reduce" if kind in _REDUCING else kind) in differing
            operations = [each for each in issued if each.kind == kind]
        if kind == "all_reduce":
            operations = [
                each
                for each in operations
                if (each.elements, each.dtype) not in bitmaps
            ]
        is_known = seen is not None and not differs
        size = sum(each.size for each in operations)
        figures[f"{kind}.count"] = len(operations) if is_known else None
        figures[f"{kind}.bytes"] = size if is_known else None
    return figures


def _amounts(operations: Iterable[Operation]) -> Counter[tuple[str, str]]:
    """Return what both sources have of the collectives: the elements of those that reduce, by
    dtype, since Gloo takes several all-reduces for a reduce-scatter; of other kinds their number.
    Without hooks, sends and receives are left out: Gloo's recorder does not have them."""
    amounts: Counter[tuple[str, str]] = Counter()
    for each in operations:
        if each.kind in _REDUCING:
            amounts["all_reduce", str(each.dtype)] += each.elements
        elif HAS_HOOKS or each.kind not in POINT_TO_POINT:
            amounts[each.kind, ""] += 1
    return amounts
