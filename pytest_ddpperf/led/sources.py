"""What a pytest runs: its interpreter, and the files that it imported of the user's package."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pytest_ddpperf.git import top_level
from pytest_ddpperf.records.errors import GitError
from pytest_ddpperf.wire.trees import Trees, digests


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """What a side runs."""

    python: str  # version
    prefix: str  # of the interpreter's environment: virtual ones share an interpreter
    files: Mapping[str, str]  # those of the user's package that were imported by now: path -> digest

    @classmethod
    def here(cls, trees: Trees) -> Sources:
        """Of this process."""
        return cls(
            python=platform.python_version(),
            prefix=os.path.realpath(sys.prefix),
            files=digests(trees.base, trees.imported()),
        )


def differing(one: Mapping[str, str], other: Mapping[str, str]) -> tuple[str, ...]:
    """The files that are on one side only, or hold something else there, sorted."""
    return tuple(sorted(file for file in {*one, *other} if one.get(file) != other.get(file)))


def one_tree(rootdir: Path) -> Trees:
    """The repository; where git knows none, the rootdir."""
    try:
        top = top_level(rootdir)
    except GitError:
        top = Path(os.path.realpath(rootdir))
    return Trees(hand=str(top), base=str(top), kept=())
