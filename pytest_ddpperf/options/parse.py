"""Parse values as written into settings. Knows neither pytest nor where a value comes from.

A value is a text (command line, ini file) or of any type (marker, native TOML). `Row.parser` names
the function that parses it. Each raises ValueError that says what is allowed; whoever calls it adds
the place and the value, or the item of it that is refused.
"""

import math
import os
import re
import shlex
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Literal, cast

from pytest_ddpperf.options.definitions import FAIL_ON_NAMES
from pytest_ddpperf.records.figure import split_name
from pytest_ddpperf.records.metric import NAMED, why_no_figure
from pytest_ddpperf.records.plan import Limit, Limits
from pytest_ddpperf.text import printable

# of whatever is counted: more would take days, or more memory than there is
_MOST = 1_000_000
_MOST_RANKS = 10_000
# 31 years; from ten times that on a socket's timeout overflows
_LONGEST_SECONDS = 1e9
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)(%|ms)", re.ASCII)
# Four decimals: p99.9999 needs three million steps, and with many more a percentile is rounded to
# 100.
_PERCENTILE = re.compile(r"(cpu_)?p(\d+(?:\.\d{1,4})?)", re.ASCII)
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


def _guess(value: object, names: Iterable[str], cutoff: float = 0.6) -> str:
    # rarely needed, and every pytest run would pay for it
    from difflib import get_close_matches

    close = get_close_matches(str(value).lower(), names, n=1, cutoff=cutoff)
    return f"; did you mean {close[0]}?" if close else ""


def _items(value: object) -> tuple[object, ...]:
    """Return the items of a comma-separated text, or of a sequence of texts or numbers; () for an
    empty text."""
    items: list[object] = []
    for part in value if isinstance(value, (list, tuple)) else (value,):
        if not isinstance(part, str):
            items.append(part)
        elif part.strip():
            items += map(str.strip, part.split(","))
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
    sizes: tuple[int, ...] = ()
    with suppress(ValueError):
        sizes = tuple(count(item, 1, _MOST_RANKS) for item in _items(value))
    if not sizes or len(set(sizes)) < len(sizes):
        raise ValueError(
            f"whole numbers from 1 to {_MOST_RANKS:,}, separated by commas, none twice: 2 or 1,2,4"
        )
    return sizes


def word(value: object, allowed: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(allowed)
    return value.strip()


def line(value: object, allowed: str) -> str:
    """Parse a text as one line, with control characters spelt out."""
    return printable(" ".join(word(value, allowed).split()))


def path(value: object, allowed: str) -> str:
    """Parse a word and expand `~`, which no shell does in `--option=~/x` nor pytest in an ini
    file."""
    return os.path.expanduser(word(value, allowed))


def file(value: object) -> str:
    return path(value, "a file")


def folder(value: object) -> str:
    return path(value, "a folder")


def choice(value: object, *names: str) -> str:
    if value not in names:
        raise ValueError(f"one of {near(value, names)}")
    return value


def seconds(value: object, least: float = math.ulp(0.0)) -> float:
    number = math.nan
    if type(value) in (int, float, str):  # not isinstance: True is an int
        with suppress(ValueError, OverflowError):
            number = float(cast("int | float | str", value))
    if not least <= number <= _LONGEST_SECONDS:  # nan is neither
        start = "above" if least else "from"
        raise ValueError(
            f"seconds, a number {start} 0 and up to {_LONGEST_SECONDS:.0f}"
        )
    return number


# What a metric that does not exist is compared with. Of percentiles that look alike, only one.
_METRICS = ("p10", "p50", "p90", "cpu_p50", *NAMED)


def _limit(item: object) -> Limit:
    metric, _, size = str(item).partition(":")
    found = _AMOUNT.fullmatch(size)
    if found is None:
        raise Refused(item, f"not {_LIMIT_FORM}")
    unit = cast(Literal["%", "ms"], found[2])
    # limits in ms are on times alone
    if unit == "ms" and metric in NAMED and NAMED[metric].unit != "s":
        raise Refused(item, f"a limit on {metric} is a share: {metric}:5%")
    amount = float(found[1]) / (100 if unit == "%" else 1000)
    if match := _PERCENTILE.fullmatch(metric):
        percentile = float(match[2])
        if not 0 < percentile < 100:
            end = (
                "an end of the sample"
                if percentile in (0, 100)
                else "no percentile"
            )
            allowed = "a metric is p1 to p99, decimals allowed (p99.9)"
            raise Refused(item, f"p{match[2]} is {end}: {allowed}")
        # One text for one percentile, so that p50 and p50.0 are the same metric to baselines and
        # reports.
        metric = f"{match[1] or ''}p{percentile:.10g}"
    elif metric not in NAMED:
        _check_own(item, metric)
        if unit == "ms" or amount >= 1:
            raise Refused(item, f"a limit on {metric} is a share below 100 %")
    elif NAMED[metric].lower_is_worse and amount >= 1:
        allowed = "must be less than 100 %: a bandwidth cannot fall further"
        raise Refused(item, allowed)
    if amount == math.inf:
        raise Refused(item, f"the limit is not finite: {_LIMIT_FORM}")
    return Limit(metric=metric, value=amount, unit=unit)


# A name that is as near to a metric's is one with a mistake, not that of a figure of the user's.
_MISTAKE = 0.8


def _check_own(item: object, metric: str) -> None:
    """Refuse what cannot be a figure of the user's own, or is more likely a metric with a
    mistake."""
    name, percentile = split_name(metric)
    guess = ""
    # "tflops" and "forward_ms" are no mistakes
    if not (metric.endswith("flops") or metric.partition("_")[0] in NAMED):
        guess = _guess(metric, _METRICS, _MISTAKE)
    if metric == "median":
        guess = _guess("p50", _METRICS)
    if guess or why_no_figure(name):
        guess = guess or _guess(metric, _METRICS) or f": {_LIMIT_FORM}"
        raise Refused(item, f"unknown metric {metric}{guess}")
    if percentile is not None and not 0 < percentile < 100:
        raise Refused(item, f"{metric}: percentiles are p1 to p99")


def limits(value: object) -> Limits:
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


def fail_on(
    value: object, allowed: Sequence[str] = FAIL_ON_NAMES
) -> frozenset[str]:
    names = _items(value)
    for name in names:
        if name not in allowed:
            raise Refused(name, f"not one of {near(name, allowed)}")
    if not names:
        raise ValueError(f"name at least one of {', '.join(allowed)}")
    return frozenset(cast("tuple[str, ...]", names))


def confirm_seconds(value: object) -> float:
    """Parse seconds; 0 for never."""
    if value == "auto":
        return 300.0
    if value == "never":
        return 0.0
    try:
        return seconds(value)
    except ValueError:
        raise ValueError(
            "auto, never, or a number of seconds above 0"
        ) from None


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
            word
            for text in cast("list[str]", value)
            for word in shlex.split(text)
        )
        if not words:
            raise ValueError("there are none")
        if "--" in words:
            raise ValueError("-- ends them")
    except ValueError as error:
        raise ValueError(
            f"options for pytest, as in a shell: {error}"
        ) from None
    return words
