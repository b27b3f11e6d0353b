"""The phases of a training step, and what a launch says about them."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TypeVar

from pytest_ddpperf.records.record import record

T = TypeVar("T")

DATA = "data"  # before a forward pass: the loader, `zero_grad`
FORWARD = "forward"  # from the first module of a pass to the backward pass
BACKWARD = "backward"  # until the last gradient is handed over
EXPOSED = "exposed_communication"  # waiting for collectives and messages
RANK_WAIT = "rank_wait"  # of it, until the last rank arrived
RPC_WAIT = "waiting_for_RPC"  # of trainers, which have no other phases
OPTIMIZER = "optimizer"
OTHER = "other"
# All but `rank_wait` add up to the step.
PHASES = (DATA, FORWARD, BACKWARD, EXPOSED, OPTIMIZER, OTHER)

# of a step in order: the index of the phase in PHASES, and its end in ns
Pieces = tuple[tuple[int, int], ...]


@record
class RankPhases:
    """The phases of one rank's last timed steps, as it delivers them; times are as those of
    `Window.marks_ns`."""

    steps: tuple[Pieces, ...]
    seen: tuple[str, ...]  # of PHASES, those that are known
    # When this rank started each collective, in order, and which; None if this is not known. Each
    # `send` and `recv`, too, and again when it began to wait for it.
    arrivals: tuple[tuple[int, str], ...] | None


@record
class StepPhases:
    """Where the time of a launch's steps went, in seconds: the mean over the middle half of them,
    by duration."""

    steps: int  # the last ones, of which phases are known
    # by phase and rank, `rank_wait` included; None where it is unknown
    own: Mapping[str, tuple[float | None, ...]]
    # By phase and rank, the critical path: the step, followed backwards from its end. Where a rank
    # waited for another, the path continues on the one that arrived last; the rest of a wait is
    # `exposed_communication`. All add up to the group's step. Empty if arrivals are unknown.
    path: Mapping[str, tuple[float, ...]]


# by phase, `rank_wait` included, in seconds; None where it is unknown
Means = Mapping[str, float | None]


def by_rank(launches: Sequence[StepPhases]) -> tuple[Means, ...]:
    """Return each rank's phases, as the mean over launches; () if nothing is known."""
    names = (*PHASES, RANK_WAIT)
    ranks = len(launches[0].own[OTHER]) if launches else 0

    def phases_of(rank: int) -> Means:
        return {
            name: _mean([launch.own[name][rank] for launch in launches])
            for name in names
        }

    return tuple(map(phases_of, range(ranks)))


def over_ranks(ranks: Sequence[Means]) -> dict[str, float | None]:
    """Return the mean over ranks; {} if nothing is known."""
    return {
        name: _mean([rank[name] for rank in ranks])
        for name in (ranks[0] if ranks else ())
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = known_by_all(values)
    return None if known is None else fmean(known)


def known_by_all(values: Sequence[T | None]) -> tuple[T, ...] | None:
    """Return the values of all launches or ranks; None if one does not know its own."""
    known = tuple(each for each in values if each is not None)
    return known if len(known) == len(values) else None


ChangedCounter = tuple[str, int, int]  # name, before, after


@record
class Finding:
    """A part of a change of the step time, and what is known of its cause."""

    # that changed; () if only counters did, for a file, or for what is unexplained
    phases: tuple[str, ...]
    # of the step, signed; None if only counters changed
    seconds: float | None = None
    # how far `seconds` may be off, at the error rate of the test; 0 if that is not known
    reach: float = 0.0
    share: float = 0.0  # of the whole change
    # whose phase alone changed; None: that of all ranks, of ranks in turns, or unknown
    rank: int | None = None
    # that changed with it
    counters: tuple[ChangedCounter, ...] = ()
    # of those that differ, the one whose functions take longer; path from the top of
    # the repository
    file: str = ""
    function: str = ""  # of it, the one with the most of it
    # Of the device, whose whole change `share` is a part of, and whether it is that of `rank`
    # alone; with its calls in a step, before and now.
    kernel: str = ""
    calls: tuple[float, float] = (0.0, 0.0)
