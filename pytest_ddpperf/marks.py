"""The end of a step, as a training program marks it."""

from collections.abc import Callable

# What a mark calls. A rank that times a program by its marks adds its own function.
called: list[Callable[[], None]] = []


def step_end() -> None:
    """Say that a step of a training loop has ended, for `ddp_benchmark.loop(..., boundary="mark")`.

    Outside of a rank that is timed it does nothing, so a program may keep it."""
    for call in called:
        call()
