"""Where the time of a step goes: the table and the figure of the latency breakdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import fmean, median

from pytest_ddpperf import Result
from pytest_ddpperf.suite.plots import Plot, Spread, Stacks
from pytest_ddpperf.suite.tables import Table

PHASES = ("forward", "backward", "optimizer")


class Breakdown(Table):
    """Where the time of a step goes, a column a phase: medians over steps, of the slowest rank."""

    def __init__(self) -> None:
        self._taken: dict[int, dict[str, list[dict[str, float]]]] = {}  # by ranks and variant: a launch's phases

    def add(self, variant: str, result: Result) -> None:
        by_phase = {phase: _medians(result, phase) for phase in PHASES}
        launches = [dict(zip(by_phase, launch, strict=True)) for launch in zip(*by_phase.values(), strict=True)]
        self._taken.setdefault(result.world_size, {})[variant] = launches

    def _parts(self) -> Iterator[tuple[int, dict[str, dict[str, float]]]]:
        """By ranks: of each variant what its launches' phases come to, communication told apart."""
        for ranks, by_variant in self._taken.items():
            means = {
                variant: {phase: fmean(launch[phase] for launch in launches) for phase in PHASES}
                for variant, launches in by_variant.items()
            }
            alone = means.get(ALONE, {}).get("backward")
            yield ranks, {variant: _apart(phases, alone) for variant, phases in means.items()}

    def lines(self) -> Iterator[str]:
        for ranks, parts in self._parts():
            yield (
                f"Latency breakdown, {ranks} ranks (p50 of each phase; communication is what the backward pass is "
                "longer by than without)"
            )
            yield f"  {'':>24} {'forward':>11} {'backward':>11} {'communication':>14} {'optimizer':>11}"
            for variant, of in parts.items():
                apart = f"{of['communication']:13.6f}s" if "communication" in of else f"{'-':>14}"
                cells = f"{of['forward']:10.6f}s {of['backward']:10.6f}s {apart} {of['optimizer']:10.6f}s"
                yield f"  {variant:>24} {cells}"

    def plots(self) -> Iterator[Plot]:
        for ranks, parts in self._parts():
            wholes = {
                variant: [sum(launch.values()) for launch in launches]
                for variant, launches in self._taken[ranks].items()
            }
            yield Stacks(
                title=f"Latency breakdown, {ranks} ranks",
                parts=parts,
                wholes={variant: Spread(fmean(each), min(each), max(each)) for variant, each in wholes.items()},
            )


ALONE = "without communication"


def _apart(phases: Mapping[str, float], alone: float | None) -> dict[str, float]:
    """What the backward pass takes alone, and what communication adds to it; undivided where the former is unknown."""
    if alone is None:
        return dict(phases)
    computed = min(phases["backward"], alone)
    return {
        "forward": phases["forward"],
        "backward": computed,
        "communication": phases["backward"] - computed,
        "optimizer": phases["optimizer"],
    }


def _medians(result: Result, phase: str) -> list[float]:
    """A launch's, of the slowest rank's."""
    return [
        median(max(told for told in step if told is not None) for step in zip(*launch, strict=True))
        for launch in result.recorded[phase]
    ]
