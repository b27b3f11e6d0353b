"""Parse values as written into settings. Knows neither pytest nor where a value comes from.

A value is a text (command line, ini file) or of any type (marker, native TOML). `Row.parser` names
the function that parses it. Each raises ValueError that says what is allowed; whoever calls it adds
the place and the value, or the item of it that is refused.
"""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Iterable
from typing import Literal, cast

from pytest_ddpperf.options.definitions import FAIL_ON_NAMES
from pytest_ddpperf.records.metric import NAMED
from pytest_ddpperf.records.plan import Limit

# of whatever is counted: more would take days, or more memory than there is
_MOST = 1_000_000
_MOST_RANKS = 10_000
_LONGEST_SECONDS = 1e9  # 31 years; from ten times that on a socket's timeout overflows
# Four decimals: p99.9999 needs three million steps, and with many more a percentile is rounded to
# 100.
_OF_STEP = "|".join(name for name in NAMED if NAMED[name].unit == "s")
_LIMIT = re.compile(
    rf"(?:(cpu_)?p(\d+(?:\.\d{{1,4}})?)|({_OF_STEP})):(\d+(?:\.\d+)?)(%|ms)", re.ASCII
)
_SHARE = re.compile(
    rf"({'|'.join(re.escape(name) for name in NAMED if NAMED[name].unit != 's')})"
    r":(\d+(?:\.\d+)?)%",
    re.ASCII,
)
_LIMIT_FORM = (
    "metric:N% or metric:Nms, as in p50:5%, p95:2ms, mean:20%, forward:5%, cpu_p50:5%, busbw:5%,"
    " rpc.bytes:0%"
)


class Refused(ValueError):
    """One item of a value is invalid."""

    def __init__(self, item: object, allowed: str) -> None:
        super().__init__(allowed)
        self.item = item


def near(value: object, names: Iterable[str]) -> str:
    """Return the names, with a guess at which was meant."""
    return ", ".join(names) + _guess(value, names)


def _guess(value: object, names: Iterable[str]) -> str:
    # rarely needed, and every pytest run would pay for it
    from difflib import get_close_matches

    close = get_close_matches(str(value).lower(), names, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _items(value: object) -> tuple[object, ...]:
    """Return the items of a comma-separated text, or of a sequence of texts or numbers; () for an
    empty text."""
    items: list[object] = []
    for part in value if isinstance(value, (list, tuple)) else (value,):
        if not isinstance(part, str):
            items.append(part)
        elif part.strip():
            items += [item.strip() for item in part.split(",")]
    return tuple(items)


def count(value: object, least: int, most: int = _MOST) -> int:
    text = value.strip() if isinstance(value, str) else ""
    # Python refuses to read very many digits
    if text.isascii() and text.isdigit() and len(text) < 20:
        value = int(text)
    # not isinstance: True is an int
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"a whole number from {least} to {most:,}")
    return value


def world_sizes(value: object) -> tuple[int, ...]:
    sizes_are = f"whole numbers from 1 to {_MOST_RANKS:,}"
    allowed = f"{sizes_are}, separated by commas, none twice: 2 or 1,2,4"
    try:
        sizes = tuple(count(item, 1, _MOST_RANKS) for item in _items(value))
    except ValueError:
        raise ValueError(allowed) from None
    if not sizes or len(set(sizes)) < len(sizes):
        raise ValueError(allowed)
    return sizes


def word(value: object, allowed: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(allowed)
    return value.strip()


def path(value: object, allowed: str) -> str:
    """Parse a word and expand `~`, which no shell does in `--option=~/x` nor pytest in an ini
    file."""
    return os.path.expanduser(word(value, allowed))


def choice(value: object, *names: str) -> str:
    if value not in names:
        raise ValueError(f"one of {near(value, names)}")
    return value


def seconds(value: object, least: float = math.ulp(0.0)) -> float:
    allowed = f"seconds, a number {'above' if least else 'from'} 0 and up to {_LONGEST_SECONDS:.0f}"
    if type(value) not in (int, float, str):  # not isinstance: True is an int
        raise ValueError(allowed)
    try:
        number = float(cast("int | float | str", value))
    except (ValueError, OverflowError):
        raise ValueError(allowed) from None
    if not least <= number <= _LONGEST_SECONDS:  # nan is neither
        raise ValueError(allowed)
    return number


# What a metric that does not exist is compared with. Of percentiles that look alike, only one.
_METRICS = ("p10", "p50", "p90", "cpu_p50", *NAMED)


def _limit(item: object) -> Limit:
    share = _SHARE.fullmatch(item) if isinstance(item, str) else None
    if share is not None:
        if NAMED[share[1]].lower_is_worse and float(share[2]) >= 100:
            raise Refused(
                item, "must be less than 100 %: a bandwidth cannot fall further"
            )
        return Limit(metric=share[1], value=float(share[2]) / 100, unit="%")
    match = _LIMIT.fullmatch(item) if isinstance(item, str) else None
    if match is None:
        name, _, size = str(item).partition(":")
        allowed = f"not {_LIMIT_FORM}"
        if name not in _METRICS and _LIMIT.fullmatch(f"p50:{size}"):
            allowed = (
                f"unknown metric {name}{_guess(name, _METRICS) or f': {_LIMIT_FORM}'}"
            )
        raise Refused(item, allowed)
    cpu, percentile, metric, value, unit = match.groups()
    amount = float(value) / (100 if unit == "%" else 1000)
    if percentile is not None:
        q = float(percentile)
        if not 0 < q < 100:
            end = "an end of the sample" if q in (0, 100) else "no percentile"
            raise Refused(
                item,
                f"p{percentile} is {end}: a metric is p1 to p99, decimals allowed (p99.9)",
            )
        # One text for one percentile, so that p50 and p50.0 are the same metric to baselines and
        # reports.
        metric = f"{cpu or ''}p{q:.10g}"
    if amount == float("inf"):
        raise Refused(item, f"the limit is not finite: {_LIMIT_FORM}")
    return Limit(metric=metric, value=amount, unit=cast(Literal["%", "ms"], unit))


def limits(value: object) -> tuple[Limit, ...]:
    parsed = tuple(_limit(item) for item in _items(value))
    if not parsed:
        raise ValueError(f"no limit given: {_LIMIT_FORM}, separated by commas")
    metrics = [limit.metric for limit in parsed]
    for metric in metrics:
        if metrics.count(metric) > 1:
            raise ValueError(
                f"{metric} has {metrics.count(metric)} limits: give each metric one"
            )
    return parsed


def modules(value: object) -> tuple[str, ...]:
    names = _items(value)
    for name in names:
        if not isinstance(name, str) or not all(
            part.isidentifier() for part in name.split(".")
        ):
            raise Refused(
                name,
                "not a module's import name: names separated by commas, as in torch.fx,my.ops",
            )
    return cast("tuple[str, ...]", names)


def fail_on(value: object) -> frozenset[str]:
    names = _items(value)
    for name in names:
        if name not in FAIL_ON_NAMES:
            raise Refused(name, f"not one of {near(name, FAIL_ON_NAMES)}")
    if not names:
        raise ValueError(f"name at least one of {', '.join(FAIL_ON_NAMES)}")
    return frozenset(cast("tuple[str, ...]", names))


def confirm_seconds(value: object) -> float:
    """Parse seconds; 0 for never."""
    if value in ("auto", "never"):
        return 300.0 if value == "auto" else 0.0
    try:
        return seconds(value)
    except ValueError:
        raise ValueError("auto, never, or a number of seconds above 0") from None


def assignments(value: object) -> tuple[str, ...]:
    texts = cast("list[str]", value)
    for text in texts:
        name, equals, _ = text.partition("=")
        if not (equals and name.isascii() and name.isidentifier()):
            raise Refused(text, "not NAME=VALUE")
    return tuple(texts)


def arguments(value: object) -> tuple[str, ...]:
    """Split options for pytest as a shell would."""
    try:
        words = tuple(
            word for text in cast("list[str]", value) for word in shlex.split(text)
        )
    except ValueError as error:
        raise ValueError(f"options for pytest, as in a shell: {error}") from None
    if not words:
        raise ValueError("options for pytest, as in a shell: there are none")
    if "--" in words:
        raise ValueError("options for pytest, as in a shell: -- ends them")
    return words
