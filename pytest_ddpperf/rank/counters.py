"""The counters of a step: what it sends, copies, calls, compiles and holds. See
docs/counters.md."""

import gc
import resource
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from pytest_ddpperf.rank import modules, recorder, torch_names
from pytest_ddpperf.rank.context import noting
from pytest_ddpperf.rank.group import NoGroup, OwnGroup
from pytest_ddpperf.rank.modules import Figures
from pytest_ddpperf.rank.sent import SENT_IS, Sent

_MEMORY_IS = "peak_memory.bytes is"  # of a note


class Meter:
    """Measures more of a step than its time, in a launch without RPC."""

    def __init__(self) -> None:
        self.notes: list[str] = []  # on what is unknown
        # of all objects, by Python, before the step that was counted
        self.collections = sys.maxsize

    def blocked_ns(self) -> int:
        """Return how long this process has waited for RPC so far."""
        return 0

    @contextmanager
    def counting(self, own: NoGroup, device: torch.device) -> Iterator[Figures]:
        """Count a step that is taken within, on all ranks; what is yielded has the figures
        afterwards. Without a group of our own the steps of ranks are not kept apart. A figure
        that cannot be read is missing, and `self.notes` say why."""
        if not isinstance(own, OwnGroup):
            recorder.record_something()
        gc.collect()  # modules that a set-up made and dropped live in cycles
        self.collections = gc.get_stats()[-1]["collections"]
        own.barrier()  # so that the recorder holds something, if it is on
        sent = Sent(own, has_compiled=has_compiled())
        reduced: dict[int, list[int]] = {}
        with noting(SENT_IS, sent.problems):
            reduced = modules.ready_times(modules.replicas())
        compiled, _ = compilation_state()
        with noting(_MEMORY_IS, self.notes):
            if device.type != "cpu":
                torch_names.allocator().reset_peak_memory_stats(device)
        self.begin()
        # what a step of another's asks of this process is counted here, too
        own.barrier()
        figures: Figures = {}
        with sent.watching():
            yield figures
        with noting(_MEMORY_IS, self.notes):
            figures |= _peak_memory(device)
        self.end()
        # a later step of another's must not be counted in this one
        own.barrier()
        figures |= self.close()
        own.barrier()  # nor before this one was
        if device.type != "cpu":
            figures |= sent.copies()
        with noting(SENT_IS, sent.problems):
            reducing = modules.reducing(reduced)
            figures |= modules.gradient_sizes(reducing) | sent.figures(
                reducing or ()
            )
        with noting("parameters.bytes is", self.notes):
            figures["parameters.bytes"] = modules.parameter_bytes()
        with noting("what a step compiles is", self.notes):
            figures["graph_breaks"] = sum(
                _compiler_counts("graph_break").values()
            )
            figures["recompilations"] = compilation_state()[0] - compiled
        figures |= sent.work(has_compiled=has_compiled())
        self.notes += sent.problems[:1]

    def begin(self) -> None:
        """All ranks are about to take the step that is counted."""

    def end(self) -> None:
        """This process has taken it."""

    def close(self) -> Figures:
        """All ranks have taken it: return further counters."""
        return {}


_DYNAMO = "torch._dynamo.utils"  # not imported here: it costs a second


def compilation_state() -> tuple[int, int]:
    """Return two counts that differ after a compilation. The first is that of all frames which
    torch.compile has compiled so far, recompilations included; `torch.compiler.reset` clears it.
    The second lacks those with `fullgraph=True`."""
    # In each timed step, so without the detour by `torch_names.find`.
    dynamo = sys.modules.get(_DYNAMO)
    if dynamo is None:
        return 0, 0
    frames = getattr(dynamo, "counters", {}).get("frames", {})
    return getattr(dynamo, "curr_frame", 0), frames.get("total", 0)


def _compiler_counts(kind: str) -> Mapping[str, int]:
    """Return what torch.compile counts of a kind. Raises AttributeError if that is unknown, or the
    number of compilations."""
    if _DYNAMO not in sys.modules:
        return {}
    torch_names.need(f"{_DYNAMO}:curr_frame")
    counts: Mapping[str, int] = torch_names.need(f"{_DYNAMO}:counters")[kind]
    return counts


def has_compiled() -> bool:
    """Return whether torch.compile made a graph, or that is unknown."""
    try:
        return bool(_compiler_counts("stats"))
    except AttributeError:
        return True


def _peak_memory(device: torch.device) -> Figures:
    """Return the most memory of this process so far or, on an accelerator, of the step's
    tensors."""
    if device.type != "cpu":
        most = torch_names.allocator().max_memory_allocated(device)
        return {"peak_memory.bytes": most}
    unit = 1 if sys.platform == "darwin" else 1024
    return {
        "peak_rss.bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        * unit
    }
