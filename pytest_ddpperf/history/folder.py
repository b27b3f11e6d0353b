"""The folder of a history: `<environment>/<commit time>-<commit>-<hash>.json`, and `accepted/` beside them.

Knows files; what is in them `entry` and `accepted` say.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from pytest_ddpperf.files import write
from pytest_ddpperf.history import entry
from pytest_ddpperf.history.entry import Entry
from pytest_ddpperf.records.errors import HistoryError

ACCEPTED = "accepted"  # no environment's name: those begin with a type of device


def add(folder: Path, added: Entry) -> Path:
    """Write an entry, and say where; one that is there already stays as it is. Raises HistoryError."""
    content = entry.text(added)
    path = folder / added.environment / entry.file_name(added, content)
    put(path, content)
    return path


def put(path: Path, content: str) -> None:
    """A new file, whole or not at all; where it exists nothing is done. Raises HistoryError."""
    try:
        if not path.exists():
            write(path, content)
    except OSError as error:
        raise HistoryError(path, f"cannot be written: {error.strerror}") from error


def read(folder: Path) -> list[Entry]:
    """All entries, in the order of commits and of runs of one commit; raises HistoryError."""
    found = [entry.parse(path, data) for path, data in files(folder) if path.parent.name != ACCEPTED]
    return sorted(found, key=lambda each: entry.order(each.run))


def files(folder: Path, below: str = "") -> Iterator[tuple[Path, bytes]]:
    """The JSON files of each folder in it, or of that one `below`, by name; raises HistoryError."""
    folders = [folder / below] if below else [folder / name for name in _names(folder) if (folder / name).is_dir()]
    for place in folders:
        for name in _names(place) if not below or place.exists() else ():
            if name.endswith(".json"):
                yield place / name, _bytes(place / name)


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        raise HistoryError(folder, f"cannot be read: {error.strerror}") from error


def _bytes(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise HistoryError(path, f"cannot be read: {error.strerror}") from error
