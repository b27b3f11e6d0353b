"""Whether the user's functions can be called as they will be, by what their signatures say.

Asked in pytest before anything is launched, so modules of torch are known by name.
"""

from __future__ import annotations

import inspect
from typing import Any

_MODULE = "torch.nn.modules.module.Module"
_DDP = "torch.nn.parallel.distributed.DistributedDataParallel"


def takes(function: Any, count: int) -> bool:
    """Whether `function` may be called with so many arguments; what has no signature may."""
    while _is(function, _DDP):
        function = function.module
    if is_model(function):
        function = function.forward  # a call of a module takes anything
    try:
        # A decorated function by what its wrapper takes, not by what that may pass on.
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


def is_model(thing: object) -> bool:
    return _is(thing, _MODULE)


def _is(thing: object, name: str) -> bool:
    return any(f"{base.__module__}.{base.__qualname__}" == name for base in type(thing).__mro__)


def named(function: object) -> str:
    """A function for a message; an object by its type, for models are long."""
    return str(getattr(function, "__name__", type(function).__name__))
