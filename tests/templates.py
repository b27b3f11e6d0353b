"""Templates that outlive whoever takes rank servers from them: torch is imported once for all."""

from __future__ import annotations

from pytest_ddpperf.launch.template import Templates


class KeptTemplates(Templates):
    """`Templates` that are not closed with their launcher, but by the owner of `kept`."""

    def __init__(self, kept: Templates) -> None:
        super().__init__()
        self._templates = kept._templates

    def close(self) -> None:
        pass
