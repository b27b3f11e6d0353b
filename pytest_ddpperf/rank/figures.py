"""What steps record of themselves: figures by name, the last of each that a step says."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch


class Figures:
    """Those of the step under way. The timed loop takes them after each step, and drops what came before the first."""

    __slots__ = ("said",)

    def __init__(self) -> None:
        self.said: dict[str, Any] = {}

    def record(self, name: str, value: Any) -> None:
        """Raises TypeError or ValueError for what is no name or no number."""
        if not isinstance(name, str) or not name.strip() or not name.isprintable():
            raise ValueError(f"ctx.record({name!r}, ...): a figure's name is printable text")
        if isinstance(value, torch.Tensor):
            if value.numel() != 1:
                told = f"a figure is a number, not a tensor of {tuple(value.shape)}"
                raise TypeError(f"ctx.record({name!r}, ...): {told}")
            value = value.detach()  # torch warns of a number made of one that requires grad
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            # To read it would wait for the device, so it is copied there: a step may record the same one each time.
            self.said[name] = value.clone()
        elif hasattr(type(value), "__float__"):
            self.said[name] = float(value)
        else:
            raise TypeError(f"ctx.record({name!r}, {value!r}): a figure is a number")

    def take(self) -> dict[str, Any]:
        """What was said since."""
        said, self.said = self.said, {}
        return said


def by_name(steps: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float | None, ...]]:
    """Each figure by step: None where the step recorded none, or one that is not finite."""
    names = dict.fromkeys(name for said in steps for name in said)
    return {name: tuple(_finite(said.get(name)) for said in steps) for name in names}


def _finite(value: Any) -> float | None:
    if value is None:
        return None
    number = float(value)
    return number if math.isfinite(number) else None
