"""The records as JSON: for baselines, reports and histories, and for messages between processes.

msgspec checks every value against the type hints of its dataclass.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from pytest_ddpperf.records.errors import DdpPerfError

T = TypeVar("T")
Json = Any  # dict[str, Json] | list[Json] | str | int | float | bool | None


@dataclass(eq=False)
class CodecError(DdpPerfError, ValueError):
    """A value that cannot be encoded or decoded: `path` is its place, such as
    "samples.step_seconds[0][3]"."""

    path: str
    problem: str

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}" if self.path else self.problem


def encode(value: object) -> Json:
    """Return a record or a message, or any nest of tuples and mappings of them, as plain values of
    JSON.

    Floats stay exact; `dumps` rounds. Raises CodecError for a value of any other type.
    """
    try:
        return msgspec.to_builtins(value, enc_hook=_plain)
    except (TypeError, NotImplementedError) as error:
        raise CodecError("", str(error)) from None


def _plain(value: Any) -> Json:
    """Return the plain value of a subclass, which other processes may not have: a NumPy float,
    say."""
    for kind in (float, int, str):
        if isinstance(value, kind):
            return kind.__str__(value) if kind is str else kind(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise NotImplementedError(f"{type(value).__name__} has no form in JSON")


def decode(cls: type[T], data: object) -> T:
    """Return the record that `encode` made `data` from, or the one of a union of messages; raises
    CodecError with the place of what is wrong.

    Unknown keys are ignored, and those with a default may be missing: another version may have
    written them.
    """
    try:
        return msgspec.convert(data, cls, str_keys=True)
    except msgspec.ValidationError as error:
        problem, _, place = str(error).partition(" - at `$")
        raise CodecError(
            place.strip(".`"), problem[:1].lower() + problem[1:]
        ) from None


def to_json(value: object) -> bytes:
    """Return JSON for another process: what `encode` returns, on one line. Infinity is allowed."""
    return json.dumps(encode(value)).encode()


def from_json(cls: type[T], text: bytes) -> T:
    """Return the record that `to_json` made `text` from; raises as `decode`."""
    return decode(cls, json.loads(text))


def loads(text: bytes) -> Json:
    """Return what JSON holds; raises ValueError for anything else, NaN and infinity included."""

    def finite(number: str) -> float:
        found = float(number)
        if not math.isfinite(found):
            raise ValueError(f"{number} is not a number")
        return found

    return json.loads(text, parse_constant=finite, parse_float=finite)


def dumps(data: Json) -> str:
    """JSON text made for review: the same data gives the same text, and a changed sample changes
    one line.

    Sorted keys, two spaces, innermost lists of numbers on one line, ASCII, a newline at the end.
    Floats in lists and tables whose key ends in "_seconds" are rounded to nanoseconds, the
    resolution of the clocks they came from; the digits beyond are dirt of the subtraction. Raises
    CodecError for NaN and infinity.
    """
    try:
        return _text(data, "", False) + "\n"
    except ValueError:
        raise CodecError("", "a number is not finite") from None


# Tables of figures of the users' own, whose names say nothing of clocks.
_NAMED_BY_USERS = ("figures", "recorded")


def _text(
    data: Json, indent: str, durations: bool, by_users: bool = False
) -> str:
    inner = indent + "  "
    if isinstance(data, dict) and data:
        items = []
        for key in sorted(data):
            value = data[key]
            # a single number may be a fact, or the inverse of a rate
            is_table = not (by_users or isinstance(value, float))
            are = durations or (is_table and key.endswith("_seconds"))
            named = key in _NAMED_BY_USERS
            items.append(
                f"{json.dumps(key)}: {_text(value, inner, are, named)}"
            )
        return _block("{", items, "}", indent)
    if isinstance(data, (list, tuple)) and data:
        if not all(type(item) in (int, float) for item in data):
            items = [_text(item, inner, durations) for item in data]
            return _block("[", items, "]", indent)
        if durations:
            data = [round(item, 9) for item in data]
    elif durations and isinstance(data, float):
        data = round(data, 9)
    return json.dumps(data, allow_nan=False)


def _block(opening: str, items: list[str], closing: str, indent: str) -> str:
    body = f",\n{indent}  ".join(items)
    return f"{opening}\n{indent}  {body}\n{indent}{closing}"
