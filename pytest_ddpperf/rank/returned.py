"""What the user's functions return: a number of examples, or nothing that counts, or the sign that they never ran."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from pytest_ddpperf.records.errors import SetupError

_INTEGERS = (
    *(torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint64, torch.uint32, torch.uint16, torch.uint8),
)


def not_run(value: object) -> str:
    """What a call of a function with `yield` or `async` returns, by its kind: its code has not begun. "" otherwise."""
    if inspect.isgenerator(value):
        return "a generator"
    if inspect.isasyncgen(value):
        return "an async generator"
    if inspect.iscoroutine(value):
        value.close()  # or Python warns that nobody awaited it
        return "a coroutine"
    return f"an awaitable {type(value).__name__}" if inspect.isawaitable(value) else ""


def examples(returned: Any) -> Any:
    """What a step returned if it is a whole number, to be read by `counts`; else None, and nothing is kept: a loss's
    graph would live as long. Raises SetupError where nothing has run.

    To read an accelerator's tensor would wait for the device, so it is copied there: a step may return the same one
    each time.
    """
    if isinstance(returned, torch.Tensor):
        if returned.numel() != 1 or returned.dtype not in _INTEGERS:
            return None
        return operator.index(returned) if returned.device.type == "cpu" else returned.clone()
    if isinstance(returned, bool):
        return None
    if hasattr(type(returned), "__index__"):
        with suppress(TypeError):  # NumPy's arrays of other numbers, or of several
            return operator.index(returned)
    if kind := not_run(returned):
        raise SetupError(
            f"the step returned {kind}, of which nothing has run: a step does its work when it is called, "
            "without yield or async"
        )
    return None


def counts(examples: Sequence[Any]) -> tuple[int, ...] | None:
    """The numbers of examples by step, if every step told; raises SetupError."""
    if any(number is None for number in examples):
        return None
    numbers = tuple(map(operator.index, examples))
    if min(numbers, default=0) < 0:
        raise SetupError(
            f"the step returned {min(numbers)}: a whole number that a step returns is how many examples it processed"
        )
    return numbers
