"""Step times of variants beside each other, and over numbers of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from statistics import median

from pytest_ddpperf import Result
from pytest_ddpperf.suite.plots import Boxes, Lines, Plot, Spread
from pytest_ddpperf.suite.tables import Table


def over_launches(result: Result, iterations: int = 1) -> Spread:
    """p50 of a step, or of an iteration where a step has several; of all launches, the fastest, the slowest."""
    each = [median(launch) / iterations for launch in result.step_seconds]
    return Spread(result.p50 / iterations, min(each), max(each))


class Latencies(Table):
    """By experiment and variant, beside the first variant's."""

    def __init__(self) -> None:
        # By experiment, ranks and variant; and how many iterations a step has.
        self._results: dict[str, dict[int, dict[str, tuple[Result, int]]]] = {}
        self._variants: dict[str, list[str]] = {}

    def add(
        self, experiment: str, variant: str, result: Result, *, among: Iterable[object], iterations: int = 1
    ) -> None:
        """`among` are all variants, in order: the first that was measured is what others are held beside."""
        experiment = f"{experiment}, {result.backend}"  # a smaller number of ranks may have found devices
        self._variants[experiment] = list(map(str, among))
        by_ranks = self._results.setdefault(experiment, {})
        by_ranks.setdefault(result.world_size, {})[variant] = result, iterations

    def _each(self) -> Iterator[tuple[str, int, dict[str, tuple[Result, int]]]]:
        """Experiment, ranks, and what was measured of its variants, in their order."""
        for experiment, by_ranks in self._results.items():
            for ranks, taken in sorted(by_ranks.items()):
                order = self._variants[experiment]
                yield experiment, ranks, {variant: taken[variant] for variant in order if variant in taken}

    def lines(self) -> Iterator[str]:
        for experiment, ranks, taken in self._each():
            yield f"{experiment}, {ranks} ranks (p50 of an iteration; from the fastest launch to the slowest)"
            each = {variant: over_launches(*measured) for variant, measured in taken.items()}
            first, fastest = next(iter(each.values())).middle, min(spread.middle for spread in each.values())
            for variant, spread in each.items():
                best = "  fastest" * (spread.middle == fastest and len(each) > 1)
                yield f"  {variant:>28}:  {spread}  {spread.middle / first - 1:+7.1%}{best}"

    def plots(self) -> Iterator[Plot]:
        for experiment, ranks, taken in self._each():
            yield Boxes(
                title=f"{experiment}, {ranks} ranks",
                across=experiment,
                seconds={
                    variant: [step / iterations for launch in result.step_seconds for step in launch]
                    for variant, (result, iterations) in taken.items()
                },
            )
        for experiment, by_ranks in self._results.items():
            if len(by_ranks) > 1:
                yield _over_ranks(
                    f"{experiment} over ranks",
                    {
                        variant: {
                            ranks: over_launches(*taken[variant])
                            for ranks, taken in by_ranks.items()
                            if variant in taken
                        }
                        for variant in self._variants[experiment]
                    },
                )


class Scaling(Table):
    """By model, over numbers of ranks, each of which has the same work."""

    def __init__(self) -> None:
        self._spreads: dict[str, dict[int, Spread]] = {}

    def add(self, model: str, result: Result) -> None:
        self._spreads.setdefault(f"{model}, {result.backend}", {})[result.world_size] = over_launches(result)

    def lines(self) -> Iterator[str]:
        yield "Latency over ranks (p50; from the fastest launch to the slowest; efficiency beside the fewest)"
        for model, by_ranks in self._spreads.items():
            first = by_ranks[min(by_ranks)].middle
            for ranks, spread in sorted(by_ranks.items()):
                yield f"  {model:>20} {ranks:>4} ranks:  {spread}  {first / spread.middle:7.0%}"

    def plots(self) -> Iterator[Plot]:
        yield _over_ranks("Latency over ranks", self._spreads)


def _over_ranks(title: str, spreads: Mapping[str, Mapping[int, Spread]]) -> Lines:
    return Lines(
        title=title,
        across="ranks",
        upwards="seconds an iteration",
        lines={
            name: {float(ranks): points[ranks] for ranks in sorted(points)}
            for name, points in spreads.items()
            if points
        },
        doubling=True,
    )
