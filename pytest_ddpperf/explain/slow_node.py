"""The node that is slower on both sides of a comparison, so that no change of the code is why."""

from collections.abc import Iterator, Sequence
from statistics import fmean

from pytest_ddpperf import text
from pytest_ddpperf.records.plan import Plan
from pytest_ddpperf.records.samples import Measurement
from pytest_ddpperf.records.step_phases import RANK_WAIT
from pytest_ddpperf.verdict import stats

# Of a step: it is worth a word if the others wait longer for it.
_LEAST_SHARE = 0.1


def describe_slow_node(
    plan: Plan, sides: Sequence[Measurement], level: float
) -> Iterator[str]:
    """Yield, in words, the node whose ranks are later than all others on both `sides`, if there is
    one. The first side is the current one.

    Student's t-test on how much later they are in each launch of a side, at the `level` of the
    test, shared by the nodes."""
    now = sides[0]
    step_seconds = now.samples.p50
    for node in range(plan.nodes):
        behind = [_seconds_behind(plan, node, side) for side in sides]
        if not all(_is_clear(each, level / plan.nodes) for each in behind):
            continue
        seconds = min(map(fmean, behind))
        if seconds < _LEAST_SHARE * step_seconds:
            continue
        ranks = plan.part(node)
        who = f"rank {ranks[0]}"
        if len(ranks) > 1:
            who = f"ranks {ranks[0]}-{ranks[-1]}"
        yield (
            f"{text.node(now.environment, node)} ({who}) is slower on both sides: the"
            f" others wait {text.seconds(seconds)} of a step of"
            f" {text.seconds(step_seconds)} for it"
        )


def _is_clear(launches: Sequence[float], level: float) -> bool:
    """Whether the mean over launches is above zero, with evidence at the `level`."""
    if len(launches) < 2:
        return False
    return stats.paired(launches, [0.0] * len(launches)).p_value() <= level


def _seconds_behind(plan: Plan, node: int, side: Measurement) -> list[float]:
    """Return, by launch, by how many seconds of a step the first rank of a node comes after the
    last of other nodes; [] if that is unknown."""
    own = plan.part(node)
    found = []
    for launch in _lateness(side):
        others = [late for rank, late in enumerate(launch) if rank not in own]
        found.append(min(launch[rank] for rank in own) - max(others))
    return found


def _lateness(side: Measurement) -> Sequence[Sequence[float]]:
    """Return how late ranks are, in seconds from any beginning, launch x rank: by the work of their
    devices or, without, by how little they wait for others; () if that is unknown."""
    if side.samples.device_seconds is not None:
        return side.samples.device_seconds
    found = []
    for launch in side.phases:
        waits = launch.own[RANK_WAIT]
        known = [seconds for seconds in waits if seconds is not None]
        if len(known) < len(waits):
            return ()
        found.append([-seconds for seconds in known])
    return found
