"""What ranks used that no commit has: files that git ignores, and shared libraries from outside."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from pytest_ddpperf.git import ignored_files
from pytest_ddpperf.records.samples import LaunchSamples
from pytest_ddpperf.wire.source_trees import file_digest, is_code

_MOST = 20  # that a baseline names
_LIBRARY = "library "


def find_inputs(top: Path, launches: Sequence[LaunchSamples]) -> dict[str, str]:
    """Return the digests of files, by their paths from `top`, "" for those that the run wrote, and of libraries by
    name; raises GitError."""
    files = {file: digest for launch in launches for file, digest in launch.files.items()}
    ignored = ignored_files(top, list(files)) if files else []
    libraries = {f"{_LIBRARY}{name}": digest for launch in launches for name, digest in launch.libraries.items()}
    return dict(sorted({**{file: files[file] for file in ignored}, **libraries}.items(), key=_code_first)[:_MOST])


def select_code(names: Iterable[str]) -> list[str]:
    """Return those of the inputs that are code of the repository, which each version has to build."""
    return [name for name in names if is_code(name) and not name.startswith(_LIBRARY)]


def find_changed_inputs(top: Path, recorded: Mapping[str, str], launches: Sequence[LaunchSamples]) -> Iterator[str]:
    """Yield, in words, which inputs are not as they were recorded; raises GitError."""
    current = find_inputs(top, launches)
    names = {**recorded, **(current if len(recorded) < _MOST else {})}
    for name in sorted({*names} - {*select_code(names)}):
        before, now = recorded.get(name), current.get(name) or file_digest(str(top / name))
        if before != now and before != "" and current.get(name) != "":  # else the run wrote it, then or now
            yield f"{name} ({'new' if before is None else 'changed' if now else 'gone'}, and in no commit)"


def _code_first(item: tuple[str, str]) -> tuple[bool, str]:
    return not is_code(item[0]), item[0]
