"""Reads what a program writes of the user's own figures: from its output, from text and JSON lines,
and from TensorBoard's event files."""

from __future__ import annotations

import glob
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from pytest_ddpperf.records.errors import (
    DdpPerfError,
    MissingExtraError,
    short_repr,
)
from pytest_ddpperf.records.figure import Figure, FigureValues, NamedFigures

# What was in files before that which counts, by path.
_Before = Mapping[str, bytes]
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_EVENTS = "tfevents"  # in the name of each of TensorBoard's files


class FigureReader:
    """Reads the figures that a process, or a program of several, writes from a moment on."""

    def __init__(
        self, figures: NamedFigures, folder: str, logs: Sequence[str]
    ) -> None:
        """`logs` are the files of its output; paths of figures begin at `folder`."""
        self._figures = figures
        self._folder = folder
        self._logs = logs
        self._before: _Before = {}

    def begin(self) -> None:
        """From now on it counts what is written."""
        paths: set[str] = set()
        for figure in self._figures.values():
            paths.update(self._files(figure))
        self._before = {path: Path(path).read_bytes() for path in paths}

    def read(self) -> dict[str, FigureValues]:
        """Return what was written of each figure, as one launch of one rank; raises DdpPerfError
        for what is no finite number, and MissingExtraError."""
        found = {}
        for name, figure in self._figures.items():
            written = [*self._written(figure)][figure.skip :]
            values = tuple(_number(name, value) for value in written)
            found[name] = FigureValues(figure=figure, values=((values,),))
        return found

    def _files(self, figure: Figure) -> list[str]:
        paths: Iterable[str] = self._logs
        if figure.file:
            pattern = os.path.join(self._folder, figure.file)
            paths = sorted(glob.glob(pattern, recursive=True))
        return [path for path in paths if os.path.isfile(path)]

    def _written(self, figure: Figure) -> Iterator[object]:
        for path in self._files(figure):
            if figure.pattern:
                text = _text_since(path, self._before)
                yield from re.findall(figure.pattern, text)
            elif _EVENTS not in os.path.basename(path):
                yield from _of_json_lines(path, figure.key, self._before)
            elif path not in self._before:
                yield from _of_events(path, figure.key)


def _text_since(path: str, before: _Before) -> str:
    """Return what was added to a file, or all of one that was written anew."""
    now = Path(path).read_bytes().removeprefix(before.get(path, b""))
    return _COLOURS.sub("", now.decode(errors="replace"))


def _of_json_lines(path: str, key: str, before: _Before) -> Iterator[object]:
    """Yield the value of each line that has the key; the last line may not be whole yet."""
    *lines, _ = _text_since(path, before).split("\n")
    for line in lines:
        if not line.strip():
            continue
        try:
            content = json.loads(line)
        except ValueError:
            raise DdpPerfError(
                f"{path}: a line is not JSON: {short_repr(line)}"
            ) from None
        if isinstance(content, dict) and key in content:
            yield content[key]


def _of_events(path: str, tag: str) -> list[float]:
    try:
        from tensorboard.backend.event_processing.event_accumulator import (
            EventAccumulator,
        )
    except ImportError:
        raise MissingExtraError(
            f"{path} needs tensorboard: pip install 'pytest-ddpperf[tensorboard]'"
        ) from None
    events = EventAccumulator(path, size_guidance={"scalars": 0})
    events.Reload()
    if tag not in events.Tags()["scalars"]:
        return []
    return [event.value for event in events.Scalars(tag)]


def _number(name: str, value: object) -> float:
    """Return a value as a number; "1,234.5" is one, True is none."""
    number = math.nan
    if isinstance(value, str):
        value = value.replace(",", "").rstrip(".")
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        with suppress(ValueError):
            number = float(value)
    if not math.isfinite(number):
        raise DdpPerfError(
            f"{name} is {short_repr(value)}, not a finite number"
        )
    return number
