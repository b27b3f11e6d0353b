"""Reads what a program writes of the user's own figures: from its output, from text and JSON lines,
and from TensorBoard's event files."""

import glob
import json
import math
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pytest_ddpperf.records.errors import (
    DdpPerfError,
    MissingExtraError,
    short_repr,
)
from pytest_ddpperf.records.figure import Figure, FigureValues, NamedFigures

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_EVENTS = "tfevents"  # in the name of each of TensorBoard's files


@dataclass
class FigureReader:
    """Reads the figures that a process, or a program of several, writes from a moment on."""

    _figures: NamedFigures
    _folder: str  # where paths of figures begin
    _logs: Sequence[str]  # the files of its output
    _has_ended: bool = False  # whether the program has ended when they are read

    def begin(self) -> None:
        """From now on it counts what is written."""
        paths = {
            path
            for figure in self._figures.values()
            for path in self._files(figure)
        }
        # what was in files before that which counts
        self._before = {path: Path(path).read_bytes() for path in paths}
        self._written_at = {path: os.path.getmtime(path) for path in paths}
        self._began = time.time()

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
            pattern = os.path.join(glob.escape(self._folder), figure.file)
            paths = sorted(glob.glob(pattern, recursive=True))
        return [path for path in paths if os.path.isfile(path)]

    def _written(self, figure: Figure) -> Iterator[object]:
        for path in self._files(figure):
            if figure.pattern:
                added = self._added(path)
                # the last line may not be whole yet
                if figure.file and not self._has_ended:
                    added = added[: added.rfind("\n") + 1]
                yield from re.findall(figure.pattern, added, re.MULTILINE)
            elif _EVENTS not in os.path.basename(path):
                yield from _of_json_lines(path, figure.key, self._added(path))
            # those of earlier runs would take long
            elif os.path.getsize(path) > len(self._before.get(path, b"")):
                yield from _of_events(path, figure.key, self._began)

    def _added(self, path: str) -> str:
        """Return what was added to a file, or all of one that was written anew."""
        now = Path(path).read_bytes()
        added = now.removeprefix(self._before.get(path, b""))
        if not added and os.path.getmtime(path) != self._written_at.get(path):
            added = now
        return _COLOURS.sub("", added.decode(errors="replace"))


def _of_json_lines(path: str, key: str, text: str) -> Iterator[object]:
    """Yield the value of each line that has the key; the last line may not be whole yet."""
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            content = json.loads(line)
        except ValueError:
            if number == len(lines):
                return
            raise DdpPerfError(
                f"{path}: a line is not JSON (the program has to write and flush whole lines):"
                f" {short_repr(line)}"
            ) from None
        if isinstance(content, dict) and key in content:
            yield content[key]


def _of_events(path: str, tag: str, began: float) -> list[float]:
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
    return [
        event.value for event in events.Scalars(tag) if event.wall_time >= began
    ]


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
