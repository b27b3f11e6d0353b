"""The rounds of a measurement, and what the launches of a side come to together.

A measurement has no other state than its rounds: a tuple to which rounds are added. Knows neither
limits nor verdicts.
"""

from dataclasses import dataclass, fields
from statistics import fmean, median
from typing import Any

from pytest_ddpperf.records.device import Kernel, mean_kernels
from pytest_ddpperf.records.figure import FigureValues, figures_of
from pytest_ddpperf.records.metric import MEMORY_COUNTERS
from pytest_ddpperf.records.plan import Plan
from pytest_ddpperf.records.samples import (
    Counters,
    Environment,
    LaunchSamples,
    Measurement,
    RankFigures,
    Recorded,
    Samples,
)


@dataclass(frozen=True, slots=True)
class Round:
    """A launch of the current side and, in an interleaved comparison, one of the baseline side."""

    now: LaunchSamples
    before: LaunchSamples | None = None
    # in which order they were launched: "n" for the current side, "b" for the baseline side
    order: str = "n"
    # why they were launched one after the other, if both could not be alive together
    apart: str = ""
    # what went wrong on the baseline side, which has no part in later rounds
    error: str = ""


Rounds = tuple[Round, ...]
Launches = tuple[LaunchSamples, ...]  # of one side


def current_launches(rounds: Rounds) -> Launches:
    """Return the launches of the current side."""
    return tuple(each.now for each in rounds)


def baseline_launches(rounds: Rounds) -> Launches:
    """Return the launches of the baseline side; () if nothing was launched there."""
    return tuple(each.before for each in rounds if each.before is not None)


def find_error(rounds: Rounds) -> str:
    """Return what went wrong on the baseline side, "" if nothing did."""
    return next((each.error for each in rounds if each.error), "")


def find_apart(rounds: Rounds) -> str:
    """Return why launches of both sides were not alive together, "" if they were or need not be."""
    return next((each.apart for each in rounds if each.apart), "")


def expect_seconds(rounds: Rounds, count: int) -> float:
    """Return how long `count` rounds take, estimated from those so far."""
    total = 0.0
    for launches in (current_launches(rounds), baseline_launches(rounds)):
        seconds = [launch.cost.total for launch in launches]
        if seconds:
            total += sum(seconds) + (count - len(seconds)) * fmean(seconds)
    return total


# --- the launches of one side


def are_mostly_unfit(launches: Launches) -> bool:
    """Return whether more than half of the launches say little of steady training."""
    return sum(bool(launch.unfit) for launch in launches) > len(launches) / 2


def find_doubts(launches: Launches) -> dict[str, str]:
    """Return the doubts that more than half of the launches raise, by kind: one launch alone may
    have been disturbed."""
    found: dict[str, str] = {}
    for launch in launches:
        for kind, doubt in launch.doubts.items():
            if (
                sum(kind in each.doubts for each in launches)
                > len(launches) / 2
            ):
                found.setdefault(kind, doubt)
    return found


SILENT = "no collective in a step: is the model wrapped in DDP?"
# The clock and the loop take 1.5 to 3 us a step.
_TINY_SECONDS = 20e-6


def find_notes(
    launches: Launches, plan: Plan, *, advise: bool = True
) -> tuple[str, ...]:
    """Return the notes on the launches; with `advise` also what would make their figures
    better."""
    notes = list(
        dict.fromkeys(note for launch in launches for note in launch.notes)
    )
    if not advise or not launches:
        return tuple(notes)
    if plan.command:
        notes.append(
            "a command is timed as a whole: steps, phases, counters and device time are unknown"
            " (ddp_benchmark.script measures them, if torchrun could start the program, and"
            " ddp_benchmark.loop, if it reads other variables)"
        )
    unfit = [launch.unfit for launch in launches if launch.unfit]
    if unfit:
        notes.append(f"{len(unfit)} of {len(launches)} launches: {unfit[0]}")
    unsettled = next((launch for launch in launches if launch.unsettled), None)
    if unsettled is not None:
        notes.append(
            f"after {unsettled.warmup} warm-up steps ({plan.warmup} asked) ranks were still"
            f" {unsettled.unsettled}: raise --ddp-warmup"
        )
    if all(launch.is_silent for launch in launches):
        notes.append(SILENT)
    typical = median(median(launch.step_seconds) for launch in launches)
    if plan.collective is None and typical < _TINY_SECONDS:
        notes.append(
            "a step takes less than 20 us, and the clock and the loop have a large part: let it"
            " do more"
        )
    return (*notes, *find_doubts(launches).values())


def combine(launches: Launches, environment: Environment) -> Measurement:
    """Return the measurement that these launches are together."""

    def every(name: str) -> Any:
        """Return a figure of all launches; None if one of them lacks it."""
        found = tuple(getattr(launch, name) for launch in launches)
        return None if None in found else found

    tables = {each.name: every(each.name) for each in fields(Samples)}
    tables["figures"] = _figures(launches)
    return Measurement(
        samples=Samples(**tables),
        environment=environment,
        counters=_counters(launches),
        phases=every("phases") or (),
        kernels=_kernels(launches),
    )


def _kernels(launches: Launches) -> tuple[Kernel, ...]:
    """Return the kernels of the rank whose device works longest; () if a launch does not know
    them."""
    if not all(launch.kernels for launch in launches):
        return ()
    by_rank = zip(
        *(launch.device_seconds or () for launch in launches), strict=True
    )
    means = list(map(fmean, by_rank))
    slowest = means.index(max(means))
    return mean_kernels([launch.kernels[slowest] for launch in launches])


def _figures(launches: Launches) -> dict[str, FigureValues]:
    """Return the figures of the user's own that any launch has. One that launches differ in is
    unknown in those that differ from the first."""
    found = {}
    figures = figures_of(launch.figures for launch in launches)
    for name, figure in figures.items():
        values = []
        for launch in launches:
            own = launch.figures.get(name)
            is_same = own and own.figure == figure
            values.append(own.values[0] if own and is_same else ())
        found[name] = FigureValues(figure=figure, values=tuple(values))
    return found


def recorded(launches: Launches) -> Recorded:
    """Return every figure that steps of any launch recorded, by name."""
    figures: dict[str, tuple[RankFigures, ...]] = {}
    for name in dict.fromkeys(
        name for launch in launches for name in launch.recorded
    ):
        figures[name] = tuple(
            launch.recorded.get(
                name,
                tuple((None,) * len(steps) for steps in launch.rank_seconds),
            )
            for launch in launches
        )
    return figures


def _counters(launches: Launches) -> Counters:
    """Return the counters of all launches. One that a launch does not know, or on which launches
    differ, is unknown: it has noise, and would be gated as if it had none. Of memory the most
    counts."""
    counters: dict[str, int | None] = {}
    for name in launches[0].counters:
        counts = {launch.counters.get(name) for launch in launches}
        if name in MEMORY_COUNTERS:
            known = [count for count in counts if count is not None]
            counts = {max(known, default=None)}
        counters[name] = counts.pop() if len(counts) == 1 else None
    return counters
