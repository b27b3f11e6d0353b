"""A held launch of the other side (see `launch.paused`), as it is led from here."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from pytest_ddpperf.records import LaunchSamples, codec
from pytest_ddpperf.records.errors import BaseSideError
from pytest_ddpperf.wire.channels import Message


class HeldThere:
    def __init__(self, said: Message, ask: Callable[[Message], Message]) -> None:
        """`said` when it came to rest; `ask` sends an order and returns the answer, or raises BaseSideError."""
        self.steps: int = said["steps"]
        self.step_seconds: float = said["step_seconds"]
        self._ask = ask
        self.over = False

    def stretch(self, steps: int) -> None:
        """Run so many steps, of which the first is not counted; returns when all ranks rest. Raises BaseSideError."""
        self._order({"op": "stretch", "steps": steps})

    def deliver(self) -> LaunchSamples:
        """The end of it, and what came of it; raises BaseSideError."""
        answer = self._order({"op": "deliver"})
        self.over = True
        return codec.decode(LaunchSamples, answer["samples"])

    def drop(self) -> None:
        """End it as `deliver` does, clean-up included, whatever comes of it."""
        if not self.over:
            with suppress(BaseSideError):
                self._order({"op": "drop"})
            self.over = True

    def _order(self, order: Message) -> Message:
        try:
            return self._ask(order)
        except BaseSideError:
            self.over = True
            raise
