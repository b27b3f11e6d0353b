"""The records as JSON: for baselines, for the report, and for the way from an xdist worker.

Knows the type hints of a dataclass and nothing of what it means: no files, no pytest, no torch.
What `encode` returns holds only dict, list, str, int, float, bool and None, exactly those types: execnet,
which carries it for xdist, refuses subclasses such as Status. `decode` trusts nothing: a file may have been
edited by hand or written by another version.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from pytest_ddpperf.records.errors import DdpPerfError

T = TypeVar("T")
Json = Any  # dict[str, Json] | list[Json] | str | int | float | bool | None
Reader = Callable[[Any], Any]

_NOUNS = {str: "a string", int: "an integer", float: "a number", bool: "true or false", NoneType: "null"}


class CodecError(DdpPerfError, ValueError):
    """A value that cannot be encoded or decoded: `path` is where it stands, "samples.step_seconds[0][3]"."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(path, problem)
        self.path, self.problem = path, problem

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}" if self.path else self.problem


class EncodeError(CodecError):
    """A value that JSON has no word for, NaN and infinity among them."""


class DecodeError(CodecError):
    """Data that is not what the type says."""


def _within(error: CodecError, part: str | int) -> CodecError:
    """The same error as the container sees it; paths grow on the way out, so that success costs nothing."""
    head = f"[{part}]" if isinstance(part, int) else part
    dot = "." if error.path and not error.path.startswith("[") else ""
    return type(error)(f"{head}{dot}{error.path}", error.problem)


def encode(value: object) -> Json:
    """A record, or any nest of tuples and mappings of records, as plain JSON values.

    Floats stay exact; `dumps` rounds. Raises EncodeError, with the path, for NaN and infinity (JSON has
    neither, and null would turn a broken measurement into a missing one) and for any other type.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Enum):
        return encode(value.value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise EncodeError("", f"{float(value)} is not a finite number")
        return float(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, (tuple, list)):
        encoded = []
        for index, item in enumerate(value):
            try:
                encoded.append(encode(item))
            except EncodeError as error:
                raise _within(error, index) from None
        return encoded
    if is_dataclass(value) and not isinstance(value, type):
        return _encode_items((field.name, getattr(value, field.name)) for field in fields(value))
    if isinstance(value, Mapping):
        return _encode_items(value.items())
    raise EncodeError("", f"{type(value).__name__} has no form in JSON")


def _encode_items(items: Any) -> dict[str, Json]:
    encoded = {}
    for key, item in items:
        if not isinstance(key, str):
            raise EncodeError("", f"the key {key!r} is not a string")
        try:
            encoded[str.__str__(key)] = encode(item)
        except EncodeError as error:
            raise _within(error, key) from None
    return encoded


def decode(cls: type[T], data: object, *, of_another_version: bool = False) -> T:
    """The record that `encode` made `data` from.

    Strict: every key of the dataclass and no other, an integer where a float is expected but never a bool,
    finite numbers only. Raises DecodeError with the path of the first thing that is wrong. What was encoded
    `of_another_version` may have keys that are not known here, and lack those that have a default.
    """
    return cast(T, _reader(cast(Any, cls), of_another_version)(data))


def _wrong(expected: str, found: object) -> DecodeError:
    text = repr(found)
    return DecodeError("", f"expected {expected}, found {text if len(text) <= 60 else text[:57] + '...'}")


@cache
def _reader(hint: Any, lenient: bool) -> Reader:
    """The function that reads one type hint; made once for each."""
    origin, arguments = get_origin(hint), get_args(hint)
    if is_dataclass(hint):
        return _record_reader(cast(type, hint), lenient)
    if origin is tuple and arguments[1:] == (Ellipsis,):
        return _tuple_reader(_reader(arguments[0], lenient))
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping_reader(_reader(arguments[1], lenient))
    if origin in (Union, UnionType):
        return _union_reader(arguments, lenient)
    if origin is Literal:
        return _choice_reader({choice: choice for choice in arguments})
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _choice_reader({member.value: member for member in hint})
    if hint is float:
        return _read_float
    if hint in _NOUNS:
        return _exact_reader(hint)
    raise TypeError(f"records may not hold {hint}: codec cannot read it back")


def _read_float(data: Any) -> float:
    if type(data) is int:
        try:
            data = float(data)
        except OverflowError:
            raise DecodeError("", "expected a finite number, found an integer beyond the range of a float")
    if type(data) is not float:
        raise _wrong("a number", data)
    if not math.isfinite(data):
        raise _wrong("a finite number", data)
    return data


def _exact_reader(kind: type) -> Reader:
    def read(data: Any) -> Any:
        if type(data) is not kind:  # isinstance would take a bool for an int
            raise _wrong(_NOUNS[kind], data)
        return data

    return read


def _choice_reader(choices: Mapping[Any, Any]) -> Reader:
    expected = "one of " + ", ".join(repr(choice) for choice in choices)

    def read(data: Any) -> Any:
        for choice, meaning in choices.items():
            if type(choice) is type(data) and choice == data:
                return meaning
        raise _wrong(expected, data)

    return read


def _union_reader(arguments: tuple[Any, ...], lenient: bool) -> Reader:
    """Decode None or one other type, whose own errors are reported, or one of several scalar types."""
    optional = NoneType in arguments
    others = [argument for argument in arguments if argument is not NoneType]
    if len(others) == 1:
        read_other = _reader(others[0], lenient)
        return lambda data: None if data is None else read_other(data)
    if not set(others) <= set(_NOUNS):
        raise TypeError(f"records may not hold a union of {others}: codec cannot tell which was meant")
    expected = ", ".join(_NOUNS[other] for other in others) + (" or null" if optional else "")

    def read(data: Any) -> Any:
        if type(data) is float and float in others:
            return _read_float(data)
        if type(data) in others or (data is None and optional):
            return data
        raise _wrong(expected, data)

    return read


def _tuple_reader(read_item: Reader) -> Reader:
    def read(data: Any) -> Any:
        if type(data) is not list:
            raise _wrong("a list", data)
        items = []
        for index, item in enumerate(data):
            try:
                items.append(read_item(item))
            except DecodeError as error:
                raise _within(error, index) from None
        return tuple(items)

    return read


def _mapping_reader(read_item: Reader) -> Reader:
    def read(data: Any) -> Any:
        if type(data) is not dict:
            raise _wrong("an object", data)
        items = {}
        for key, item in data.items():
            try:
                items[key] = read_item(item)
            except DecodeError as error:
                raise _within(error, key) from None
        return items

    return read


def _record_reader(cls: type, lenient: bool) -> Reader:
    hints = get_type_hints(cls)
    readers = {field.name: _reader(hints[field.name], lenient) for field in fields(cls)}
    optional = {f.name for f in fields(cls) if f.default is not MISSING or f.default_factory is not MISSING}

    def read(data: Any) -> Any:
        if type(data) is not dict:
            raise _wrong("an object", data)
        for problem, names in (
            ("missing", readers.keys() - data.keys() - (optional if lenient else set())),
            ("unknown", set() if lenient else data.keys() - readers.keys()),
        ):
            if names:
                raise DecodeError("", f"{problem} key {', '.join(repr(name) for name in sorted(names))}")
        values = {}
        for name, read_value in readers.items():
            if lenient and name not in data:
                continue
            try:
                values[name] = read_value(data[name])
            except DecodeError as error:
                raise _within(error, name) from None
        return cls(**values)

    return read


def dumps(data: Json) -> str:
    """JSON text made for review: the same data gives the same text, and a changed sample changes one line.

    Sorted keys, two spaces, innermost lists of numbers on one line, ASCII, a newline at the end. Floats below
    a key that ends in "_seconds" are rounded to nanoseconds, the resolution of the clocks they came from; the
    digits beyond are dirt of the subtraction. Raises ValueError for NaN and infinity.
    """
    return _text(data, "", False) + "\n"


def _text(data: Json, indent: str, durations: bool) -> str:
    inner = indent + "  "
    if isinstance(data, dict) and data:
        items = [
            f"{json.dumps(key)}: {_text(data[key], inner, durations or key.endswith('_seconds'))}"
            for key in sorted(data)
        ]
        return _block("{", items, "}", indent)
    if isinstance(data, list) and data:
        items = [_text(item, inner, durations) for item in data]
        if all(type(item) in (int, float) for item in data):
            return "[" + ", ".join(items) + "]"
        return _block("[", items, "]", indent)
    if durations and isinstance(data, float):
        data = round(data, 9)
    return json.dumps(data, allow_nan=False)


def _block(opening: str, items: list[str], closing: str, indent: str) -> str:
    body = f",\n{indent}  ".join(items)
    return f"{opening}\n{indent}  {body}\n{indent}{closing}"
