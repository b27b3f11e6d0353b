"""What a launch takes only if it is asked to: traces of some steps, and samples of Python stacks.

A trace is in Chrome's format, and shows where the time of a step goes, operation by operation. The
traces of the ranks of a host share a clock and its origin, so they can be laid over each other.
Samples of stacks show which functions of the repository a rank is in while its steps are timed.
"""

import os
import random
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import CodeType
from typing import Any

import torch
from torch.profiler import (
    ProfilerActivity,
    profile,
    record_function,
    supported_activities,
)

from pytest_ddpperf.rank.timed_rank import TimedRank
from pytest_ddpperf.rank.warm_up import Step
from pytest_ddpperf.records.samples import StackSamples
from pytest_ddpperf.wire.source_trees import Trees, real_path

_STEPS = 3
# Compressed. Viewers take ten times as much in JSON, and become slow from there on.
_MOST_BYTES = 20_000_000


def trace(step: Step, rank: TimedRank) -> str:
    """Take some more steps and write their trace to `<plan.trace>-rank0.json.gz`; all ranks call it
    together.

    Return a note on why there is no trace, else ""."""
    who = rank.plan.name(rank.ctx.rank)
    process = replace(rank.plan, is_reference=False).name(rank.ctx.rank)
    side = "reference-" if rank.plan.is_reference else ""
    path = f"{rank.plan.trace}-{side}{process.replace(' ', '')}.json.gz"
    activities: Any = [ProfilerActivity.CPU]
    if not rank.on_cpu:
        activities = supported_activities()
    # Without shapes and stacks, which would make it large.
    with profile(activities=activities) as profiler:
        # or the first step would wait for profilers that start later
        rank.own.barrier()
        for number in range(1, _STEPS + 1):
            with record_function(f"step {number}"):
                step()
        if not rank.on_cpu:
            torch.accelerator.synchronize()
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        profiler.export_chrome_trace(unfinished := f"{path}.unfinished.gz")
        size = os.path.getsize(unfinished)
        if size > _MOST_BYTES:
            os.remove(unfinished)
            return (
                f"the trace of {who} was removed: {size / 1e6:.0f} MB of at most"
                f" {_MOST_BYTES / 1e6:.0f} MB"
            )
        os.replace(unfinished, path)
    except OSError as error:
        return f"the trace of {who} could not be written: {error.strerror}: {error.filename}"
    return ""


# --- stacks

_EVERY_SECONDS = 0.002  # on average
_OURS = __name__.partition(".")[0]
Stack = list[tuple[CodeType, str]]
# Within these a thread waits, or C++ and other processes do what no Python stack shows. Other
# functions of the same packages work for their caller: a tensor's `__deepcopy__`,
# `default_collate`, an average of weights, a checkpoint.
_HIDDEN = re.compile(
    r"torch\.autograd:"  # `backward` and `grad`; not the package
    r"|torch\.optim\..*:step$"
    r"|torch\.distributed(?!\.(checkpoint|tensor)\b)"
    r"|torch\.utils\.data\.dataloader:"
    r"|threading:"
)
_MODULE = "torch.nn.modules.module"
_CALLS_MODULE = f"{_MODULE}:_wrapped_call_impl"


class StackSampler:
    """Samples the stack of the thread that makes it, within its context.

    The times between two samples are exponentially distributed, so that the share of samples that
    find a function is the share of its time, whatever the length of a step, and samples are
    independent (R. W. Wolff, "Poisson arrivals see time averages", Operations Research 30 (1982)).
    A sample that is late is not made up for."""

    def __init__(self, trees: Trees, is_timed: Callable[[], bool]) -> None:
        """`is_timed` returns whether the steps of the window run now: nothing else is sampled."""
        self._trees = trees
        self._is_timed = is_timed
        self._observed = threading.get_ident()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._taken = 0
        self._counted: Counter[tuple[str, ...]] = Counter()
        # by code's file name, the path from the top; None outside
        self._files: dict[str, str | None] = {}

    def __enter__(self) -> "StackSampler":
        self._interval = sys.getswitchinterval()
        # by default Python code would not be interrupted for as long
        sys.setswitchinterval(_EVERY_SECONDS / 20)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        sys.setswitchinterval(self._interval)

    @property
    def samples(self) -> StackSamples:
        functions = tuple(sorted(self._counted.items()))
        return StackSamples(taken=self._taken, functions=functions)

    def _run(self) -> None:
        times = random.Random()  # the program's own stay as they are seeded
        while not self._over.wait(times.expovariate(1 / _EVERY_SECONDS)):
            if self._is_timed():
                self._count(_stack_of(self._observed))

    def _count(self, stack: Stack) -> None:
        """Count the innermost function of the repository, unless what it called hides whose time
        this is."""
        self._taken += 1
        called = ""  # module and function that this one called
        frames = iter(stack)
        for code, module in frames:
            if (file := self._file(code, module)) is not None:
                break
            called = f"{module}:{code.co_name}"
            if _HIDDEN.match(called):
                return
        else:
            return
        outer = [*frames]
        # A step that calls a model of another package's class: who wrote the model is not known.
        of_module = outer[:1] and outer[0][1] == _MODULE
        if called == _CALLS_MODULE and not of_module:
            return
        names = [f"{file}:{_name(code)}"]
        for each, module in outer:
            if (file := self._file(each, module)) is not None:
                names.append(f"{file}:{_name(each)}")
        self._counted[tuple(names)] += 1

    def _file(self, code: CodeType, module: str) -> str | None:
        """Return the path of the code from the top of the repository; None if it is not of the
        user's."""
        name = code.co_filename
        if name not in self._files:
            is_ours = module.partition(".")[0] == _OURS
            is_generated = name.startswith("<")  # "<string>"
            self._files[name] = (
                None
                if is_ours or is_generated
                else self._trees.within(real_path(name))
            )
        return self._files[name]


def _stack_of(thread: int) -> Stack:
    """Return code and module of what a thread is in, the innermost first. It is quick, and keeps no
    frame: while something has one of `Tensor.__iter__`, iterating raises."""
    found = []
    frame = sys._current_frames().get(thread)
    while frame is not None:
        found.append((frame.f_code, str(frame.f_globals.get("__name__", ""))))
        frame = frame.f_back
    return found


def _name(code: CodeType) -> str:
    # with its class since Python 3.11
    return str(getattr(code, "co_qualname", code.co_name))
