"""Which kernels made the work of a device change."""

from statistics import fmean

from pytest_ddpperf.records.device import COMMUNICATION, Kernel
from pytest_ddpperf.records.samples import Measurement
from pytest_ddpperf.records.step_phases import Finding

# As many are named, of those that have this share of the change.
_MOST = 3
_LEAST_SHARE = 0.1
# The work of unchanged code differs by less between launches.
_LEAST_CHANGE = 0.005


def device_rise(now: Measurement, before: Measurement) -> float:
    """Return by how many seconds the kernels of a step take longer on the device, without
    communication; 0 if that is unknown, or no more than launches of unchanged code differ by."""
    sides = now.kernels, before.kernels
    if not all(sides):
        return 0.0
    after, earlier = (
        sum(each.total_seconds for each in _own(kernels).values())
        for kernels in sides
    )
    rise = after - earlier
    return rise if abs(rise) > _LEAST_CHANGE * earlier else 0.0


def exposed_rise(now: Measurement, before: Measurement) -> float:
    """Return by how many seconds a step communicates longer while its device does nothing else, on
    the rank that waits least for others; 0 if that is unknown."""
    after, earlier = (
        [min(ranks) for ranks in side.samples.exposed_seconds or ()]
        for side in (now, before)
    )
    return fmean(after) - fmean(earlier) if after and earlier else 0.0


_NO_CALLS = Kernel(name="", kind="", calls=0.0, total_seconds=0.0)


def find_kernels(now: Measurement, before: Measurement) -> tuple[Finding, ...]:
    """Return the kernels that changed as the device's work did, the largest change first."""
    whole = device_rise(now, before)
    if not whole:
        return ()
    rank = _late_rank(now, before, whole)
    later, earlier = _own(now.kernels), _own(before.kernels)
    found = []
    for name in {**earlier, **later}:
        after = later.get(name, _NO_CALLS)
        prior = earlier.get(name, _NO_CALLS)
        change = after.total_seconds - prior.total_seconds
        if change / whole < _LEAST_SHARE:
            continue
        found.append(
            Finding(
                phases=(),
                seconds=change,
                share=change / whole,
                rank=rank,
                kernel=name,
                calls=(prior.calls, after.calls),
            )
        )
    found.sort(key=lambda each: -each.share)
    return tuple(found[:_MOST])


def _own(kernels: tuple[Kernel, ...]) -> dict[str, Kernel]:
    """Return by name the kernels that do not wait for other ranks."""
    return {each.name: each for each in kernels if each.kind != COMMUNICATION}


def _late_rank(
    now: Measurement, before: Measurement, whole: float
) -> int | None:
    """Return the rank whose device alone has more to do; None if none is, or work fell."""
    means = []
    for side in (now, before):
        launches = side.samples.device_seconds or ()
        means.append([fmean(own) for own in zip(*launches, strict=True)])
    if whole < 0 or len(means[0]) < 2 or len(means[0]) != len(means[1]):
        return None
    rises = [after - prior for after, prior in zip(*means, strict=True)]
    most = max(rises)
    late = rises.index(most)
    others = [rise for rank, rise in enumerate(rises) if rank != late]
    return late if max(others) < most / 2 else None
