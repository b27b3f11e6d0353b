"""A visit from its beginning to its end: what there is, how steady it is, what to change."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from pytest_ddpperf.doctor import bench, findings, gpus, load, noise, system
from pytest_ddpperf.launch import Launcher, Observer, locks, topology
from pytest_ddpperf.launch.cores import place as cores_of
from pytest_ddpperf.measuring.machine import Place, described, resolve
from pytest_ddpperf.options import Settings, plan
from pytest_ddpperf.records import Scalar
from pytest_ddpperf.records.doctor import Diagnosis, Load, Noise, Survey
from pytest_ddpperf.records.errors import DdpPerfError
from pytest_ddpperf.report import text

# All of it, which includes starting two servers of ranks. A launch that has begun may take a little longer.
SECONDS = 110.0
# Of each kind: twice what a gate takes before it looks first.
ROUNDS = 2 * noise.FIRST_LOOK
# That other load is looked at before anything of ours runs.
_LOOKED_SECONDS = 1.0

Told = Callable[[int, int], None]  # how many launches and pairs were taken, of how many


class Visit:
    """Use as a context manager: whatever happens, no process of it is left."""

    def __init__(
        self, settings: Settings, *, root: Path = Path("/"), seconds: float = SECONDS, rounds: int = ROUNDS
    ) -> None:
        """`settings` are those of a run. `root`: below which the system is looked at. `seconds` and `rounds` bound what
        is measured."""
        self._settings, self._root, self._rounds = settings, root, rounds
        self._until = time.monotonic() + seconds
        self._stack = ExitStack()

    def __enter__(self) -> Visit:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def survey(self) -> Survey:
        """What there is; raises OptionError where what was asked for is not."""
        usable = system.usable_cores()
        before = load.counters(self._root)
        time.sleep(_LOOKED_SECONDS)
        going_on = load.between(before, load.counters(self._root), usable)
        self._here = self._launcher()
        survey = Survey(
            machine=replace(system.read(self._root, usable), gpus=gpus.read()),
            load=going_on,
            world_size=self._world_size,
        )
        try:
            facts = self._here.probe((), self._left)
        except DdpPerfError as error:
            return replace(survey, problem=bench.briefly(error))
        self._place = resolve(self._settings, self._world_size, facts)
        cores = cores_of(self._world_size, os.environ)
        return replace(
            survey,
            device=self._place.device,
            gpus=tuple(topology.visible(os.environ.get("CUDA_VISIBLE_DEVICES"), self._world_size))
            if self._place.device == "cuda"
            else (),
            place=described(self._place, text.several(self._world_size, "rank"), self._world_size, os.environ),
            crowded=cores.threads,
            timing=tuple(_timing(self._place, facts, cores.used, self._world_size)),
            facts=facts,
        )

    def measure(self, survey: Survey, watch: Observer, told: Told) -> Noise | None:
        """How steady it is; None where no rank can be started. Other runs that time their steps are waited for, but
        no longer than there is time."""
        if survey.problem:
            return None
        place, settings, began = self._place, self._settings, time.monotonic()
        asked = plan(settings, world_size=self._world_size, backend=place.backend, device=place.device)
        in_stretches = settings.in_stretches(asked)
        there = self._launcher() if in_stretches else None
        trials = findings.trials(survey)
        before = load.counters(self._root)
        try:
            if there is not None:
                there.probe((), self._left)  # starts its server, while no launch is timed
            taken = bench.take(
                bench.Bench(asked, self._here, there, watch, self._until),
                [cores for _, cores in trials],
                rounds=self._rounds,
                until=self._until,
                told=told,
            )
        except DdpPerfError as error:
            return Noise(seconds=time.monotonic() - began, limits=settings.limits, problem=bench.briefly(error))
        return noise.of(
            taken,
            trials,
            settings.limits,
            in_stretches=in_stretches,
            seconds=time.monotonic() - began,
            during=self._during(before, survey),
        )

    def _during(self, before: load.Counters, survey: Survey) -> Load:
        """Without processes: those are ours, or were told."""
        return replace(load.between(before, load.counters(self._root), survey.machine.usable), processes=())

    @property
    def _world_size(self) -> int:
        return self._settings.world_sizes[0]

    @property
    def _left(self) -> float:
        """Seconds; one where there is none, so that what is asked for ends with what is known by then."""
        return max(1.0, self._until - time.monotonic())

    def _launcher(self) -> Launcher:
        launcher = Launcher(dict)
        self._stack.callback(launcher.close)
        return launcher


def diagnosis(survey: Survey, measured: Noise | None) -> Diagnosis:
    return Diagnosis(survey=survey, noise=measured, findings=findings.findings(survey, measured))


def _timing(place: Place, facts: Mapping[str, Scalar], cores: Sequence[int], world_size: int) -> Iterator[str]:
    """What others hold of that which a launch must have alone."""
    addresses = str(facts.get("device_addresses") or "").split(",")[:world_size] if place.device == "cuda" else ()
    for path in locks.resources(cores, addresses):
        if (pid := locks.holder(path)) is not None:
            yield f"{path.name or 'this host'}, held by pid {pid}"
