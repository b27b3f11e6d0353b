"""Who watches a launch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from pytest_ddpperf.wire.channels import Phase


class Observer(Protocol):
    """Who watches a launch: a terminal, or nobody."""

    @property
    def streams(self) -> bool:
        """Whether `output` wants lines as they come."""

    def waiting(self, resource: Path) -> None:
        """Called again and again while another process times its steps on `resource`."""

    def progress(self, phase: Phase, step: int, steps: int, marks_ns: Sequence[int]) -> None:
        """Called about ten times a second with the place and the marks so far of rank 0; `steps` are those of its
        window, 0 until that is known."""

    def output(self, name: str, stream: str, line: str) -> None:
        """A line that a process wrote; `name` is `Plan.name`."""


class Nobody:
    """Watches nothing."""

    streams = False

    def waiting(self, resource: object) -> None:
        pass

    def progress(self, phase: object, step: int, steps: int, marks_ns: Sequence[int]) -> None:
        pass

    def output(self, name: str, stream: str, line: str) -> None:
        pass
