"""The outcome of a measurement, as it is reported."""

from __future__ import annotations

import os
from pathlib import Path
from statistics import fmean
from typing import Any

from pytest_ddpperf.compare.job import Job
from pytest_ddpperf.compare.result import Measured
from pytest_ddpperf.compare.rounds import recorded
from pytest_ddpperf.compare.sides import shown
from pytest_ddpperf.explain import find_slower_file
from pytest_ddpperf.records.outcome import Outcome
from pytest_ddpperf.records.samples import Status
from pytest_ddpperf.report import causes
from pytest_ddpperf.verdict.stats import geometric_mean, launch_means


def build_outcome(
    found: Measured, rootdir: Path, accept_command: str, **took: float
) -> Outcome:
    """Return the outcome of a measurement, with its evidence and the command that accepts it.
    `took` are its times, as `Outcome` has them."""
    job, verdict, side = found.job, found.verdict, found.baseline_side
    findings, words = causes.explain(
        verdict, job.plan, found.measurement, found.before, job.level, side
    )
    if found.sampled and side is not None:
        now, earlier = (
            geometric_mean(launch_means(each.samples.step_seconds))
            for each in (found.measurement, *found.before)
        )
        stacks = tuple(launch.stacks for launch in found.sampled)
        steps = tuple(fmean(launch.step_seconds) for launch in found.sampled)
        slower = find_slower_file(
            stacks,
            steps,
            findings,
            rise=now - earlier,
            files=side.differing,
            level=job.level,
        )
        findings = (*findings, *filter(None, [slower]))
    accepts = verdict.status is not Status.NOT_GATED and (
        side is None or found.suspected is not None
    )
    return _outcome(
        job,
        verdict=verdict,
        fails=found.fails,
        measurement=found.measurement,
        costs=tuple(launch.cost for launch in found.launches),
        **took,
        recorded=recorded(found.launches),
        baseline_side=side,
        baseline_path=shown(found.stored.path, rootdir),
        traces=shown(os.path.dirname(job.trace), rootdir),
        sessions=found.stored.percentiles(found.steps),
        stored_verdict=found.suspected.verdict if found.suspected is not None else None,
        findings=findings,
        evidence=words,
        accept=accept_command if accepts else "",
        notes=found.notes(rootdir),
    )


def build_failure(job: Job, error: str, **took: float) -> Outcome:
    """Return the outcome of a job that could not be carried out."""
    return _outcome(job, verdict=None, fails=True, error=error, notes=job.notes, **took)


def _outcome(job: Job, **found: Any) -> Outcome:
    """Build the outcome of a job from what was `found`."""
    of_job = (
        "nodeid",
        "test",
        "plan",
        "launches",
        "batch_size",
        "file",
        "line",
        "limits",
        "level",
    )
    return Outcome(**{name: getattr(job, name) for name in of_job}, **found)
