"""What is measured, and the launches of one side: one after the other, and what they come to
together.

Knows neither what they are compared with nor what is claimed of them.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib import metadata
from statistics import fmean, median
from typing import Any

from pytest_ddpperf import baseline
from pytest_ddpperf.launch import Launcher, Observer
from pytest_ddpperf.launch.paused_launch import PausedLaunch
from pytest_ddpperf.options.settings import Settings
from pytest_ddpperf.records.metric import MEMORY_COUNTERS
from pytest_ddpperf.records.plan import Limit, Plan, Setup, limits_for
from pytest_ddpperf.records.samples import (
    Counters,
    Distribution,
    Environment,
    LaunchSamples,
    Measurement,
    RankFigures,
    Recorded,
    Samples,
    Scalar,
    TestId,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is measured, for which test, and how it is judged."""

    test: TestId
    nodeid: str
    file: str = ""  # of the test, as `Outcome` has it
    line: int = 0
    # one; of an RPC launch the trainers', the master's and the parameter servers'
    setups: tuple[Setup, ...]
    settings: Settings
    plan: Plan
    level: float  # the error rate of this measurement
    batch_size: int | None
    gate: bool
    # recorded with the measurement, beyond what the ranks report
    facts: Mapping[str, Scalar]
    trace: str = ""  # as `Plan` has it, for the first launch; "" for no traces
    notes: tuple[str, ...] = ()

    @property
    def launches(self) -> int:
        """How many launches there are before the first look."""
        return self.settings.launches

    @property
    def limits(self) -> tuple[Limit, ...]:
        return limits_for(self.plan, self.settings.limits)

    def environment(self, launches: Launches) -> Environment:
        """Return the environment of its launches."""
        facts = {**launches.facts, **self.facts}
        return baseline.environment(facts, self.plan, batch_size=self.batch_size)


# The clock and the loop take 1.5 to 3 us a step.
_TINY_SECONDS = 20e-6


class Launches:
    """The launches of one side.

    `launch(place, launches, steps)` takes one: `place` counts from 0, `launches` is how many are
    planned, and `steps` is the length of the window. With None the first launch decides how many
    steps each window has.
    """

    def __init__(
        self,
        plan: Plan,
        launch: Callable[[int, int, int | None], LaunchSamples],
        *,
        steps: int | None = None,
    ) -> None:
        self._plan, self._launch = plan, launch
        self.steps = steps  # of each launch
        self.taken: list[LaunchSamples] = []

    @property
    def facts(self) -> Mapping[str, Scalar]:
        return self.taken[-1].facts

    def take(self, count: int, *, planned: int | None = None) -> None:
        """Launch until there are `count` launches; progress shows `planned` as their number."""
        while len(self.taken) < count:
            self.add(self._launch(len(self.taken), planned or count, self.steps))

    def add(self, launch: LaunchSamples) -> None:
        """Add the next launch, which was taken by the caller."""
        self.taken.append(launch)
        self.steps = len(launch.step_seconds)

    def seconds(self, count: int) -> float:
        """Return how long `count` launches take, estimated from those so far."""
        seconds = [launch.cost.total for launch in self.taken]
        return sum(seconds) + (count - len(self.taken)) * fmean(seconds)

    @property
    def mostly_unfit(self) -> bool:
        """Whether more than half of the launches say little of steady training."""
        return sum(bool(launch.unfit) for launch in self.taken) > len(self.taken) / 2

    def doubts(self) -> dict[str, str]:
        """Return the doubts that more than half of the launches raise: one alone may have been
        disturbed."""
        found: dict[str, str] = {}
        for kind in dict.fromkeys(
            kind for launch in self.taken for kind in launch.doubts
        ):
            doubts = [
                launch.doubts[kind] for launch in self.taken if kind in launch.doubts
            ]
            if len(doubts) > len(self.taken) / 2:
                found[kind] = doubts[0]
        return found

    def notes(self, *, advise: bool = True) -> tuple[str, ...]:
        """Return the notes on the launches; with `advise` also what would make their figures
        better."""
        notes = list(
            dict.fromkeys(note for launch in self.taken for note in launch.notes)
        )
        if not advise or not self.taken:
            return tuple(notes)
        unfit = [launch.unfit for launch in self.taken if launch.unfit]
        if unfit:
            notes.append(f"{len(unfit)} of {len(self.taken)} launches: {unfit[0]}")
        unsettled = [
            (launch.unsettled, launch.warmup)
            for launch in self.taken
            if launch.unsettled
        ]
        if unsettled:
            cause, steps = unsettled[0]
            notes.append(
                f"after {steps} warm-up steps ({self._plan.warmup} asked) ranks were still {cause}"
            )
        if all(launch.is_silent for launch in self.taken):
            notes.append("no collective in a step: is the model wrapped in DDP?")
        if (
            self._plan.collective is None
            and median(median(each.step_seconds) for each in self.taken) < _TINY_SECONDS
        ):
            notes.append(
                "a step takes less than 20 us, and the clock and the loop have a large part: let it"
                " do more"
            )
        return (*notes, *self.doubts().values())


class CurrentSide(Launches):
    """The launches of the current code, by this process's own ranks."""

    def __init__(
        self,
        job: Job,
        launcher: Launcher,
        observer: Observer,
        *,
        steps: int | None = None,
    ) -> None:
        super().__init__(job.plan, self._measure, steps=steps)
        self._setups, self._launcher, self._observer = job.setups, launcher, observer
        self._trace = job.trace

    def add(self, launch: LaunchSamples) -> None:
        super().add(launch)
        self._observer.launched(launch)

    def pause(
        self, planned: int, steps: int | None
    ) -> AbstractContextManager[PausedLaunch]:
        """Return the next of `planned` launches, which has warmed up and is paused."""
        self._observer.begin(len(self.taken), planned)
        return self._launcher.pause(self._with(steps), self._setups[0], self._observer)

    def alone(self) -> AbstractContextManager[None]:
        """Hold the cores and devices of a launch, so that nothing else is timed on them."""
        return self._launcher.alone(self._plan, self._observer)

    def _measure(self, place: int, planned: int, steps: int | None) -> LaunchSamples:
        self._observer.begin(place, planned)
        return self.launch(self._with(steps))

    def launch(self, plan: Plan) -> LaunchSamples:
        """Return what a launch of this `plan` brings, which is not added; raises DdpPerfError."""
        setup, *others = self._setups
        return self._launcher.measure(plan, setup, self._observer, others)

    def _with(self, steps: int | None) -> Plan:
        plan = self._plan if steps is None else self._plan.exactly(steps)
        return plan if self.taken else replace(plan, trace=self._trace)


def measurement(
    launches: Sequence[LaunchSamples], environment: Environment
) -> Measurement:
    def every(name: str) -> Any:
        """Return a figure of all launches; None if one of them lacks it."""
        found = tuple(getattr(launch, name) for launch in launches)
        return None if None in found else found

    samples = Samples(**{figure.name: every(figure.name) for figure in fields(Samples)})
    counters, phases = _counters(launches), every("phases") or ()
    return Measurement(
        samples=samples, environment=environment, counters=counters, phases=phases
    )


def modules_imported(launches: Sequence[LaunchSamples]) -> set[str]:
    """Return the top-level modules from outside the repository that ranks imported."""
    return {module for launch in launches for module in launch.others}


def recorded(launches: Sequence[LaunchSamples]) -> Recorded:
    """Return every figure that steps of any launch recorded, by name."""
    figures: dict[str, tuple[RankFigures, ...]] = {}
    for name in dict.fromkeys(name for launch in launches for name in launch.recorded):
        figures[name] = tuple(
            launch.recorded.get(
                name, tuple((None,) * len(steps) for steps in launch.rank_seconds)
            )
            for launch in launches
        )
    return figures


def _counters(launches: Sequence[LaunchSamples]) -> Counters:
    """Return the counters of all launches. One that a launch does not know, or on which launches
    differ, is unknown: it has noise, and would be gated as if it had none. Of memory the most
    counts."""
    counted = {
        name: {launch.counters.get(name) for launch in launches}
        for name in launches[0].counters
    }
    for name in counted.keys() & {*MEMORY_COUNTERS}:
        counted[name] = {
            max((count for count in counted[name] if count is not None), default=None)
        }
    return {
        name: counts.pop() if len(counts) == 1 else None
        for name, counts in counted.items()
    }


# What installers and Python itself add to packages: it finds modules, and does nothing in a step.
_OF_THE_INSTALLATION = (
    "__editable__",
    "_sysconfigdata",
    "_virtualenv",
    "sitecustomize",
    "usercustomize",
)


def distributions(modules: Iterable[str]) -> dict[str, Distribution]:
    """Return, by name, the distributions that have these modules, as `Imported.others` has them; of
    a namespace, all that have a part of it.

    A module of no distribution, or of one that is installed to be edited, has its own name and no
    digest.
    """
    by_module = _by_module(tuple(sys.path))
    found: dict[str, Distribution] = {}
    for entry in sorted(
        entry for entry in modules if not entry.startswith(_OF_THE_INSTALLATION)
    ):
        module, _, folder = entry.partition("@")
        own = [
            each
            for each in by_module.get(module, ())
            if folder in ("", os.path.realpath(str(each.locate_file(""))))
        ]
        if not own or any(
            module not in _modules_of(each) or _is_editable(each) for each in own
        ):
            found[module] = Distribution(version="", digest="")
            continue
        for distribution in own:
            facts = distribution.metadata
            # else it is what a broken installation left
            if "Name" in facts and "Version" in facts:
                found.setdefault(
                    facts["Name"],
                    Distribution(
                        version=facts["Version"], digest=_digest(distribution)
                    ),
                )
    return found


def _is_editable(distribution: metadata.Distribution) -> bool:
    """Whether a distribution is installed to be edited, by any installer: uv writes JSON without
    spaces."""
    try:
        return bool(
            json.loads(distribution.read_text("direct_url.json") or "{}")["dir_info"][
                "editable"
            ]
        )
    except (ValueError, KeyError, TypeError):
        return False


@cache
def _by_module(path: tuple[str, ...]) -> Mapping[str, list[metadata.Distribution]]:
    """Return the distributions by module. `metadata.packages_distributions` takes five times as
    long, and in Python 3.10 leaves out those without top_level.txt."""
    found: dict[str, list[metadata.Distribution]] = {}
    for distribution in metadata.distributions(path=list(path)):
        for module in (
            distribution.read_text("top_level.txt") or ""
        ).split() or _modules_of(distribution):
            found.setdefault(module, []).append(distribution)
    return found


def _modules_of(distribution: metadata.Distribution) -> set[str]:
    """Return the top-level modules of a distribution's files; an editable install has none."""
    return {
        line.split(",")[0].split("/")[0].split(".")[0] for line in _record(distribution)
    }


def _digest(distribution: metadata.Distribution) -> str:
    """Return a digest of a distribution's files that does not depend on where and by what it was
    installed.

    Scripts name the interpreter, files that an installer compiled have no hash, and its own notes
    are in the metadata."""
    lines = [
        line
        for line in _record(distribution)
        if not line.startswith("..")
        and not line.endswith(",,")
        and ".dist-info/" not in line
    ]
    return (
        hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:16]
        if lines
        else ""
    )


def _record(distribution: metadata.Distribution) -> list[str]:
    """Return a line for each file: path, hash and size."""
    return (distribution.read_text("RECORD") or "").splitlines()
