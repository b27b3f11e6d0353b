"""Runs a program that owns its loop, and times it by its optimizer updates, its own marks or a
function, without a collective of ours."""

import importlib.util
import inspect
import os
import pkgutil
import re
import runpy
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, NoReturn

import torch

from pytest_ddpperf import marks
from pytest_ddpperf.rank import context, torch_names
from pytest_ddpperf.rank.loop_states import Learning, Timing, Warming
from pytest_ddpperf.rank.timed_rank import TimedRank
from pytest_ddpperf.rank.updates import Updates
from pytest_ddpperf.records.errors import DdpPerfError, EndedEarly, short_repr
from pytest_ddpperf.records.plan import MARK, UPDATE, Plan, Program
from pytest_ddpperf.records.samples import Window
from pytest_ddpperf.wire.figures import FigureReader


@dataclass
class Loop:
    """The steps of a program, in the process that makes it and not in its children."""

    _state: Learning | Warming | Timing
    # takes what was measured, and does not return
    _deliver: Callable[[Window], NoReturn]
    _pid: int = field(default_factory=os.getpid)

    def learned(self, ended_ns: list[int]) -> bool:
        """It is known where steps end, or turns out to be otherwise; some have ended at these
        times. Return whether that counts."""
        if os.getpid() != self._pid:
            return False
        state = self._state.learned(ended_ns)
        if state is None:
            return False
        self._state = state
        return True

    def step_ended(self, passes: int) -> None:
        """A step of so many backward passes has ended."""
        if os.getpid() != self._pid:
            return
        state = self._state.step_ended(passes)
        if isinstance(state, Window):
            self._deliver(state)
        self._state = state

    def unfinished(self, ended: str, has_passed: bool) -> EndedEarly:
        """Say how far the program came; `ended` says how it ended. `has_passed` says whether it
        has made a backward pass."""
        when, advice = self._state.when(has_passed)
        return EndedEarly(f"{ended} {when}", advice)


def run(
    rank: TimedRank,
    program: Any,
    deliver: Callable[[Window], NoReturn],
    fail: Callable[[BaseException], None],
    end_child: Callable[..., None],
) -> NoReturn:
    """Run a program until its window is over. `fail` reports an error and ends the rank; in a child
    of the rank it does nothing. `end_child` ends such a child, with an error or without."""
    loop = Loop(Learning(rank), deliver)
    updates = Updates(loop.step_ended, loop.learned, fail)
    # The phases of `rank` are stamped by now: what ends a step is stamped before the step ends.
    if rank.plan.boundary == UPDATE:
        updates.install()
    try:
        if isinstance(program, Program):
            _prepare(program)
        if rank.plan.boundary != UPDATE:
            _mark_steps(rank.plan.boundary, program, loop, fail)
        if isinstance(program, Program):
            _run(program)
        else:
            made = context.call_keeping_locals(program, rank.ctx)
            if kind := context.describe_not_run(made):
                raise DdpPerfError(
                    f"main returned {kind}, which did not run: write it without yield and async"
                )
        ended = "the program ended"
    except SystemExit as error:
        end_child(error)
        # The program may end because of an error that it has caught, as Hydra does.
        handled = error.__context__
        if error.code == 1 and isinstance(
            handled, Exception | KeyboardInterrupt
        ):
            fail(handled)
        code = short_repr(error.code or 0)
        ended = f"the program called sys.exit({code}) in {_place_of(error)}"
        if error.code not in (None, 0):
            # A text is the reason itself: the last line would be about something else.
            if not isinstance(error.code, str):
                ended += f": {_last_line():.200}"
            raise DdpPerfError(ended) from None
    end_child()
    raise loop.unfinished(ended, updates.has_passed)


def figure_reader(plan: Plan, program: Any, rank: int) -> FigureReader:
    """Return what reads the figures that a program writes on this `rank`. Files are read on the
    first one alone."""
    folder = program.cwd if isinstance(program, Program) else os.getcwd()
    logs = [os.path.realpath(f"/proc/self/fd/{number}") for number in (1, 2)]
    figures = {
        name: figure
        for name, figure in plan.figures.items()
        if rank == 0 or not figure.file
    }
    return FigureReader(figures, folder, logs)


def _mark_steps(
    boundary: str,
    program: Any,
    loop: Loop,
    fail: Callable[[BaseException], None],
) -> None:
    """Let a step end where the program says so, or where a function returns:
    "package.module:Class.method"."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def mark() -> None:
        try:
            loop.step_ended(1)
        except Exception as error:  # which the program might catch
            fail(error)

    if boundary == MARK:
        marks.called.append(mark)
        return
    module, _, path = boundary.partition(":")
    owners, _, last = path.rpartition(".")
    # Imported as a module, the program would be a second copy, or run to its end here.
    spec = importlib.util.find_spec(module)
    # of a package, `python -m` runs another module
    is_package = spec and spec.submodule_search_locations
    own = getattr(program, "path", "")
    origin = spec and spec.origin
    is_own = own in (module, origin) or os.path.realpath(own) == origin
    if is_own and not is_package:
        raise DdpPerfError(
            f'boundary="{boundary}" is in the program itself, which runs as __main__: move it'
            ' to another module, or call pytest_ddpperf.step_end() there (boundary="mark")'
        )
    try:
        owner = pkgutil.resolve_name(f"{module}:{owners}")
        found = inspect.getattr_static(owner, last)
    except AttributeError as error:
        raise DdpPerfError(
            f'boundary="{boundary}" does not exist: {error}'
        ) from None
    # of a class method or static method
    function = getattr(found, "__func__", found)
    if isinstance(function, type) or not callable(function):
        raise DdpPerfError(
            f'boundary="{boundary}" is no function, but {short_repr(found)}'
        )

    @wraps(function)
    def marking(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        mark()
        return result

    torch_names.keep_from_compiler(marking)
    setattr(owner, last, marking if function is found else type(found)(marking))
    # other modules may have imported it by name
    for other in [*sys.modules.values()]:
        for name, value in [*getattr(other, "__dict__", {}).items()]:
            if value is function:
                setattr(other, name, marking)


def _prepare(program: Program) -> None:
    """Let this process look as Python does for a program: its own folder, or that of a module,
    first on sys.path, then those of its PYTHONPATH."""
    os.chdir(program.cwd)
    sys.argv[:] = [program.path, *program.args]
    first = program.cwd
    if not program.is_module:
        first = os.path.dirname(os.path.realpath(program.path))
    others = program.env.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [first, *map(os.path.abspath, filter(None, others))]


def _run(program: Program) -> None:
    if program.is_module:
        runpy.run_module(program.path, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(program.path, run_name="__main__")


def _place_of(error: SystemExit) -> str:
    """Return where the program ended: its own last line, not that of a library which it called."""
    frames = traceback.extract_tb(error.__traceback__)
    # `exit()` is a function of _sitebuiltins: the caller's frame comes before it.
    known = [each for each in frames if "_sitebuiltins" not in each.filename]
    folder = os.getcwd() + os.sep
    own = [
        each
        for each in known
        if each.filename.startswith(folder)
        and "site-packages" not in each.filename
    ]
    last = [*known, *own][-1]
    return f"{last.filename.removeprefix(folder)}:{last.lineno}"


def _last_line() -> str:
    """Return the last line that this process wrote to its error output."""
    with suppress(Exception):
        sys.stderr.flush()
        with open(os.readlink("/proc/self/fd/2"), errors="replace") as log:
            # without what draws a box
            lines = [line.strip() for line in log if re.search(r"\w", line)]
            return lines[-1] if lines else "it wrote nothing"
    return "see its error output"
