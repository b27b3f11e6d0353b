"""How the user's code travels to the ranks (both halves, so that they are read together), and how
it can be called.

Functions and classes of importable modules, test modules and conftests go by name: a rank imports
them under the names and from the files that pytest used, whatever its import mode. Closures go by
value, but their globals are those of the rank's own import of their module: so a closure may use a
global that cannot be pickled (a lock, a logger), while a global that was monkeypatched in pytest is
not seen. Does not import torch.
"""

import copyreg
import importlib
import inspect
import io
import marshal
import pickle
import sys
import unittest
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CellType, CodeType, FunctionType, SimpleNamespace
from typing import Any

import cloudpickle

from pytest_ddpperf.records.errors import DdpPerfError, short_repr

# --- in pytest


def dumps(task: str, function: Any, args: Sequence[Any]) -> bytes:
    """Pickle a task for ranks; raises DdpPerfError that names the variable at fault."""
    try:
        return _dump((task, function, tuple(args)))
    except Exception as error:
        what = _culprit(function, args)
        why = f"{type(error).__name__}: {error}"
        raise DdpPerfError(
            f"{what} cannot be pickled for the ranks. Create it inside the function: {why}"
        ) from None


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no type hints
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, FunctionType) and (module := _home(obj)) is not None:
            return (
                _new_function,
                (module, obj.__code__),
                _state(obj),
                None,
                None,
                _fill_function,
            )
        # cloudpickle 3.1.3 drops the file's name, which tracebacks show
        if isinstance(obj, CodeType):
            return marshal.loads, (marshal.dumps(obj),)
        if isinstance(obj, unittest.TestCase):
            # While it runs, its _outcome and its test method hold pytest's own objects, which stay
            # here, as those of asyncio do.
            ours = ("_outcome", obj._testMethodName)
            state = {
                name: value
                for name, value in vars(obj).items()
                if name not in ours and not name.startswith("_asyncio")
            }
            return copyreg.__newobj__, (type(obj),), state  # type: ignore[attr-defined]
        return super().reducer_override(obj)


def _dump(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


def _home(function: FunctionType) -> str | None:
    """Return the importable module whose globals a closure uses; None for one that goes by name or
    wholly by value."""
    name = function.__globals__.get("__name__", "__main__")
    module = sys.modules.get(name)
    if (
        name == "__main__"
        or module is None
        or vars(module) is not function.__globals__
    ):
        return None
    named: Any = module
    for part in function.__qualname__.split("."):
        named = getattr(named, part, None)
    return None if named is function else str(name)


def _state(function: FunctionType) -> dict[str, Any]:
    """All but the code. Globals with names that no source can spell were put there by whoever
    compiled the module: pytest, for the asserts it rewrote. The rank's own import of the module
    lacks them."""
    return {
        "cells": [_contents(cell) for cell in function.__closure__ or ()],
        "dict": vars(function),
        "globals": {
            name: value
            for name, value in function.__globals__.items()
            if name.startswith("@")
        },
        **{name: getattr(function, name) for name in _KEPT},
        "__annotations__": _annotations(function),
    }


_KEPT = """
    __name__ __qualname__ __module__ __doc__ __defaults__ __kwdefaults__
""".split()


def _annotations(function: FunctionType) -> dict[str, Any]:
    """Return a function's annotations, or none if they cannot be evaluated: Python 3.14 evaluates
    them when they are read, and they may have names that only type checkers know."""
    try:
        return function.__annotations__
    except Exception:
        return {}


def _contents(cell: CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # a name that was not bound yet
        return ()


def _culprit(function: Any, args: Sequence[Any]) -> str:
    """Names what cannot be pickled: an argument, or a variable that the function captured."""
    name = getattr(function, "__name__", short_repr(function))
    for index, value in enumerate(args):
        if not _picklable(value):
            return (
                _culprit(value, ())
                if isinstance(value, FunctionType)
                else f"argument {index + 1} of {name}"
            )
    if isinstance(function, FunctionType):
        for variable, cell in zip(
            function.__code__.co_freevars,
            function.__closure__ or (),
            strict=True,
        ):
            if not _picklable(_contents(cell)):
                return f"variable {variable!r}, which {name} uses,"
    return name


def _picklable(value: Any) -> bool:
    try:
        _dump(value)
    except Exception:
        return False
    return True


def make_refusal(name: str) -> Callable[..., None]:
    """Return what replaces a fixture's callable in a rank: a test's `self` may refer to it, no rank
    may call it."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError(
            f"{name} starts ranks: call it in the test, not in a rank"
        )

    return refuse


# --- in a rank


def install(files: Mapping[str, str]) -> None:
    """Make the modules of `files` (name -> file) importable, ahead of everything else.

    Packages that pytest's importlib mode invented for their names come after everything else.
    """
    parents: dict[str, Path] = {}
    for name, file in files.items():
        folder = Path(file).parent
        if _is_package(file):
            folder = folder.parent
        while name := name.rpartition(".")[0]:
            parents.setdefault(name, folder)
            folder = folder.parent

    def find_module(name: str, *_: object) -> ModuleSpec | None:
        file = files.get(name)
        if file is None:
            return None
        package = [str(Path(file).parent)] if _is_package(file) else None
        return spec_from_file_location(
            name, file, submodule_search_locations=package
        )

    def find_parent(name: str, *_: object) -> ModuleSpec | None:
        if name not in parents:
            return None
        return PathFinder.find_spec(
            name, [str(parents[name].parent)]
        ) or ModuleSpec(name, None, is_package=True)

    first: Any = SimpleNamespace(find_spec=find_module)
    last: Any = SimpleNamespace(find_spec=find_parent)
    sys.meta_path[:] = [first, *sys.meta_path, last]


def _is_package(file: str) -> bool:
    return Path(file).name == "__init__.py"


# Unpickles a task: its name, its function and the arguments.
loads = pickle.loads


def _new_function(module: str, code: CodeType) -> FunctionType:
    cells = tuple(CellType() for _ in code.co_freevars)
    return FunctionType(
        code, vars(importlib.import_module(module)), code.co_name, None, cells
    )


def _fill_function(function: FunctionType, state: dict[str, Any]) -> None:
    """Second half of `_new_function`: a closure may refer to itself, so its cells are filled once
    it exists."""
    for cell, content in zip(
        function.__closure__ or (), state.pop("cells"), strict=True
    ):
        if content:
            cell.cell_contents = content[0]
    vars(function).update(state.pop("dict"))
    function.__globals__.update(state.pop("globals"))
    for name, value in state.items():
        setattr(function, name, value)


_MODULE = "torch.nn.modules.module.Module"
_DDP = "torch.nn.parallel.distributed.DistributedDataParallel"


def accepts(function: Any, count: int) -> bool:
    """Judge by its signature whether `function` takes so many arguments; without a signature it
    may.

    Asked in pytest before anything is launched, so modules of torch are recognised by name."""
    while _is(function, _DDP):
        function = function.module
    if is_model(function):
        function = function.forward  # a call of a module takes anything
    try:
        # A decorated function by what its wrapper takes, not by what that may pass on.
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError, NameError):
        return True  # a NameError: of an annotation, since Python 3.14
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


def is_model(thing: object) -> bool:
    return _is(thing, _MODULE)


def _is(thing: object, name: str) -> bool:
    return any(
        f"{base.__module__}.{base.__qualname__}" == name
        for base in type(thing).__mro__
    )


def name_of(function: object) -> str:
    """Return the name of a function for a message; of an object its type, because the repr of a
    model is long."""
    return str(getattr(function, "__name__", type(function).__name__))
