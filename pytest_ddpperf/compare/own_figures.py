"""Figures of the user's own that cannot be judged: a test with one is red, and never passes."""

from pytest_ddpperf.compare.job import Job
from pytest_ddpperf.options.definitions import MARKER
from pytest_ddpperf.options.settings import where
from pytest_ddpperf.records.errors import DdpPerfError, LaunchError
from pytest_ddpperf.records.figure import Figure, FigureValues, split_name
from pytest_ddpperf.records.samples import LaunchSamples, Measurement, RankError
from pytest_ddpperf.verdict import stats
from pytest_ddpperf.verdict.times import LAUNCHES_NEEDED


def check_launch(job: Job, launch: LaunchSamples) -> None:
    """Raise LaunchError if a launch lacks a figure, or has one that has no logarithm."""
    if job.settings.disable and not job.plan.command:  # a step or two
        return
    for name, found in launch.figures.items():
        if not any(found.values[0]):
            raise _failed(
                f"{name} has no value: {_why_missing(found.figure, job)}",
                launch,
            )
        (mean,) = found.by_launch()
        if mean <= 0:
            raise _failed(
                f"{name} is {mean:.3g}: a figure must be above 0, since changes are shares"
                " of it",
                launch,
            )


def _failed(problem: str, launch: LaunchSamples) -> LaunchError:
    """Return the error of a launch without a figure that can be judged, with its output."""
    first = launch.output[0]
    cause = RankError(
        rank=first.rank, when=0.0, phase="", summary=problem, name=first.name
    )
    return LaunchError(cause, (), launch.output)


def _why_missing(figure: Figure, job: Job) -> str:
    if figure.file:
        what = figure.key or figure.pattern
        return f'{figure.file} has no new "{what}": the program has to write and flush it'
    if not figure.pattern:
        return "no timed step recorded it"
    of_steps = ""
    if job.plan.boundary:
        of_steps = (
            " of timed steps; if it comes less often, raise --ddp-min-time"
        )
    return f'pattern "{figure.pattern}" matches nothing in the output{of_steps}'


# So many values that are all the same are no accident, even of a log with few digits.
_TELLING = 5


def check_measurement(job: Job, measurement: Measurement) -> None:
    """Raise DdpPerfError if a figure is constant that must not be, or if a limit is on one that
    the test does not have, or has too few values of."""
    if job.settings.disable:
        return
    figures = measurement.samples.figures
    for name, found in figures.items():
        if not found.by_launch():
            raise DdpPerfError(
                f"{name} is not in all launches, or not the same figure in all"
            )
        values = _all_values(found)
        is_constant = len(values) >= _TELLING and len(set(values)) == 1
        several = measurement.samples.launches >= LAUNCHES_NEEDED
        if is_constant and several and not found.figure.constant:
            raise DdpPerfError(
                f"{name} is {values[0]:.10g} in all launches, so it is probably not measured: if it"
                " is constant, say constant=True"
            )
    has_limits = job.gate or job.reference is not None
    for limit in job.settings.limits if has_limits else ():
        own = limit.kind.own_figure
        place = f"{where(job.settings, 'limits')}: {limit}"
        if own in figures:
            needed = 0
            if split_name(limit.metric)[1] is not None:
                needed = stats.steps_needed(limit.kind.percentile)
            count = len(_all_values(figures[own]))
            if count < needed:
                raise DdpPerfError(
                    f"{place}: needs {needed} values of {own} in all launches, there are {count}"
                )
        elif own and job.settings.sources["limits"] == MARKER:
            known = f": it has {', '.join(figures)}" if figures else ""
            raise DdpPerfError(
                f"limit {limit}: this measurement has no figure {own}{known}"
            )


def _all_values(found: FigureValues) -> list[float]:
    return [
        value for launch in found.values for rank in launch for value in rank
    ]
