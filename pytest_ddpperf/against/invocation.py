"""How this pytest was called, and how that of another version is."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_ddpperf.led.arguments import of_led
from pytest_ddpperf.wire.trees import Trees


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """How this pytest was called."""

    arguments: tuple[str, ...]  # all of them: of the ini file, of the environment, of the command line
    tests: tuple[str, ...]  # those that name tests
    folder: Path  # where it was called
    rootdir: Path
    caches: bool  # whether pytest's cache is on
    kept: tuple[str, ...]  # files and folders that come from the tree at hand on both sides, absolute, links resolved
    own_tests: bool = False  # whether the other version runs its own tests and conftests, in its own tree
    # As they were before conftests and tests, which may have changed them by now; None: as they are.
    environ: Mapping[str, str] | None = None
    sys_path: Sequence[str] | None = None

    def arguments_in(self, trees: Trees) -> list[str]:
        """Return the arguments of the other version's pytest; its own tests have the same paths in its own tree."""
        arguments = of_led(self.arguments, self.tests)
        if not self.own_tests:
            return arguments
        moved = [str(_there(trees, Path(word))) if os.path.isabs(word) else word for word in arguments]
        return [*moved, f"--rootdir={_there(trees, self.rootdir)}"]

    def folder_in(self, trees: Trees) -> Path:
        """Return the folder where the other version's pytest is called."""
        return _there(trees, self.folder) if self.own_tests else self.folder


def _there(trees: Trees, folder: Path) -> Path:
    """The same folder of the version's tree."""
    within = trees.within(os.path.realpath(folder))
    return Path(trees.base, within) if within is not None else folder
