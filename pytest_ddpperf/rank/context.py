"""The `ctx` that user code gets in a rank, and the values that it records or returns."""

import inspect
import io
import math
import operator
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import field
from itertools import takewhile
from types import FrameType
from typing import Any, Literal, get_args

import cloudpickle
import torch

from pytest_ddpperf.records.errors import DdpPerfError, short_repr
from pytest_ddpperf.records.figure import Better, Figure, FigureValues
from pytest_ddpperf.records.metric import why_no_figure
from pytest_ddpperf.records.record import record
from pytest_ddpperf.records.samples import StepFigures

# So many losses of a launch are compared and kept in a baseline: their mean is steadier than one.
LOSSES = 10
# A larger loss counts as infinite: its square would overflow.
_LARGEST_LOSS = 1e150


def first_losses(steps: Sequence[Any]) -> StepFigures:
    """Return the losses of the first steps, up to one that recorded none; None for one that is not
    finite."""
    known = takewhile(lambda loss: loss is not None, steps[:LOSSES])
    return tuple(
        number if abs(number := float(loss)) < _LARGEST_LOSS else None
        for loss in known
    )


def figures_by_name(
    steps: Sequence[Mapping[str, Any]],
) -> dict[str, StepFigures]:
    """Return each figure by step: None where the step recorded none, or one that is not finite."""
    names = dict.fromkeys(name for said in steps for name in said)
    return {
        name: tuple(_finite(said.get(name)) for said in steps) for name in names
    }


def _finite(value: Any) -> float | None:
    if value is None:
        return None
    number = float(value)
    return number if math.isfinite(number) else None


def judged_figures(
    figures: Mapping[str, Figure | None],
    steps: Sequence[Mapping[str, Any]],
    is_late: object,
) -> dict[str, FigureValues]:
    """Return the values of each figure that has a direction, of one launch and rank. With
    `is_late`, the value of the first step is left out if other steps have one. Raises DdpPerfError
    for one that is not finite."""
    found = {}
    for name, figure in figures.items():
        if figure is None:
            continue
        values = []
        for step, said in enumerate(steps, 1):
            if name not in said:
                continue
            value = _finite(said[name])
            if value is None:
                raise DdpPerfError(
                    f"ctx.record({name!r}, ...) in timed step {step}: a figure must be finite,"
                    " and not nan"
                )
            values.append(value)
        if is_late and len(values) > 1 and name in steps[0]:
            del values[0]
        found[name] = FigureValues(figure=figure, values=((tuple(values),),))
    return found


@contextmanager
def noting(what: str, notes: list[str]) -> Iterator[None]:
    """Turn an error within into a note that `what` ("buckets are") is unknown: it must not fail a
    valid step."""
    try:
        yield
    except Exception as error:
        notes.append(f"{what} unknown: {type(error).__name__}: {error}")


@record
class Context:
    """The `ctx` that `setup(ctx)` and `fn(ctx, ...)` receive in every rank. Names and meanings are
    torchrun's."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int
    device: torch.device
    backend: str
    #: random, numpy and torch are seeded with it, alike in every rank
    seed: int
    # What `record` keeps of the step under way; for the timed loop to take, and to drop after the
    # warm-up.
    figures: dict[str, Any] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    # What `record` was told of each figure; None of one that is only kept.
    judged: dict[str, Figure | None] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def record(
        self,
        name: str,
        value: Any,
        *,
        better: Better | Literal[""] | None = "",
        constant: bool = False,
    ) -> None:
        """Record a figure of the step under way, which is judged as step times are:
        `result.recorded[name]` has it by launch, rank and step.

        `value` is a number, or a tensor with one element, which is read after the window where it
        is on an accelerator. `better` is "higher" or "lower", or None for a figure that is kept
        and not judged. `constant` says that it may be the same in all launches, as a count may.
        The last value counts that a step records under a name; those of warm-up steps do not.
        Raises TypeError or ValueError for what is no number, no name or no direction.
        """
        self.keep(name, value)
        if not better or name not in self.judged:
            self.judged.setdefault(name, _declared(name, better, constant))
        known = self.judged[name]
        before = known.better if known is not None else None
        if better != before:
            raise ValueError(
                f"ctx.record({name!r}, ...): better={better!r}, and {before!r} before: a figure has"
                " one direction"
            )
        kind = str(getattr(value, "dtype", type(value).__name__))
        if better and kind.endswith("bool"):
            raise TypeError(
                f"ctx.record({name!r}, {short_repr(value)}): the figure must be a number"
            )

    def keep(self, name: str, value: Any) -> None:
        """Keep a figure of the step under way, which has no direction."""
        if (
            not isinstance(name, str)
            or not name.strip()
            or not name.isprintable()
        ):
            raise ValueError(
                f"ctx.record({short_repr(name)}, ...): the name must be printable text"
            )
        if isinstance(value, torch.Tensor):
            if value.numel() != 1:
                problem = f"the figure must be a number, not a tensor of {tuple(value.shape)}"
                raise TypeError(f"ctx.record({name!r}, ...): {problem}")
            # torch warns of a number made of one that requires grad
            value = value.detach()
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            # To read it would wait for the device, so it is copied there: a step may record the
            # same one each time.
            self.figures[name] = value.clone()
        elif hasattr(type(value), "__float__"):
            self.figures[name] = float(value)
        else:
            raise TypeError(
                f"ctx.record({name!r}, {short_repr(value)}): the figure must be a number"
            )


def _declared(name: str, better: Any, constant: bool) -> Figure | None:
    """Return what is judged by that name; None if the figure is only kept. Raises TypeError and
    ValueError."""
    if better is None:
        return None
    if better not in get_args(Better):
        raise TypeError(
            f'ctx.record({short_repr(name)}, ...): say better="higher" or better="lower"; with'
            " better=None the figure is kept, and not judged"
        )
    if problem := why_no_figure(name):
        raise ValueError(f"ctx.record({short_repr(name)}, ...): {problem}")
    return Figure(better=better, constant=constant)


Role = Literal["trainer", "parameter_server", "master"]


@record
class RpcContext(Context):
    """The `ctx` of an RPC launch. `rank` and `world_size` count the processes of the same role,
    which have a process group of their own; the master has none."""

    role: Role
    name: str  #: for torch.distributed.rpc: "trainer0", "ps0", "master"
    workers: Mapping[str, tuple[str, ...]]  #: names by role


def describe_not_run(value: object) -> str:
    """Name the kind of value that a function with `yield` or `async` returns before its code runs;
    "" for others."""
    if inspect.iscoroutine(value):
        value.close()  # or Python warns that nobody awaited it
    is_kind = (
        inspect.isgenerator(value)
        or inspect.isasyncgen(value)
        or inspect.isawaitable(value)
    )
    return f"a value of type {type(value).__name__}" if is_kind else ""


def read_returned(returned: Any, keep: Callable[[str, Any], None]) -> Any:
    """Return the examples of a step as `read_examples` does; `keep` the loss of one that returned
    a dict of both.

    A dict with other keys is the result of a model, and is ignored as any other result."""
    if type(returned) is not dict or not returned.keys() <= {
        "examples",
        "loss",
    }:
        return read_examples(returned)
    if returned.get("loss") is not None:
        keep("loss", returned["loss"])
    return read_examples(returned.get("examples"))


def read_examples(returned: Any) -> Any:
    """Return what a step returned if it is a whole number, for `count_examples`; else None, because
    keeping a loss would keep its graph. Raises DdpPerfError if the step has not run.

    To read an accelerator's tensor would wait for the device, so it is copied there: a step may
    return the same one each time.
    """
    if isinstance(returned, torch.Tensor):
        dtype = returned.dtype
        if (
            returned.numel() != 1
            or dtype.is_floating_point
            or dtype.is_complex
            or dtype == torch.bool
        ):
            return None
        return (
            operator.index(returned)
            if returned.device.type == "cpu"
            else returned.clone()
        )
    if isinstance(returned, bool):
        return None
    if hasattr(type(returned), "__index__"):
        # NumPy's arrays of other numbers, or of several
        with suppress(TypeError):
            return operator.index(returned)
    if kind := describe_not_run(returned):
        raise DdpPerfError(
            f"the step returned {kind}, which did not run: a step must do its work when it is"
            " called, without yield or async"
        )
    return None


def count_examples(examples: Sequence[Any]) -> tuple[int, ...] | None:
    """Return the number of examples of each step, if every step returned one; raises
    DdpPerfError."""
    if any(number is None for number in examples):
        return None
    numbers = tuple(map(operator.index, examples))
    if min(numbers, default=0) < 0:
        raise DdpPerfError(
            f"the step returned {min(numbers)}: a step may only return the number of examples that"
            " it processed"
        )
    return numbers


class _ResultPickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no type hints
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor) and obj.layout is torch.strided:
            # DDP's gradients are views of whole buckets: each would carry its bucket along.
            shared = obj.untyped_storage().nbytes() > obj.nbytes
            if shared or obj.device.type != "cpu":
                own = obj.detach().to(
                    "cpu", copy=True, memory_format=torch.contiguous_format
                )
                own.requires_grad_(obj.requires_grad)
                return own.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return super().reducer_override(obj)


def dump_result(value: Any) -> bytes:
    """Pickle a result, with tensors on the CPU and without the rest of larger storages; raises
    DdpPerfError."""
    buffer = io.BytesIO()
    try:
        _ResultPickler(buffer).dump(value)
    except Exception as error:
        raise DdpPerfError(
            f"the result cannot be pickled for pytest: {type(error).__name__}: {error}"
        ) from None
    return buffer.getvalue()


_kept: list[FrameType] = []


def call_keeping_locals(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, whose locals live as long as this process: a frame that is referred to
    keeps them.

    The profiler's hook sees the first call and is put back then, so the function itself runs at
    full speed.
    """
    before = sys.getprofile()

    def keep(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            _kept.append(frame)
            sys.setprofile(before)

    sys.setprofile(keep)
    try:
        return function(*args)
    finally:
        sys.setprofile(before)
