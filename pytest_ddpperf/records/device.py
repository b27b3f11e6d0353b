"""What a step gives a device to do, by kernels."""

from collections.abc import Sequence

from pytest_ddpperf.records.record import record

COMPUTATION = "computation"
# Their durations contain waiting for other ranks.
COMMUNICATION = "communication"
COPY = "copy"  # also what sets memory


@record
class Kernel:
    """All calls of one kernel in a step, or of one kind of copy."""

    name: str  # as the profiler has it, without numbers that a compiler drew
    kind: str
    calls: float
    total_seconds: float  # of these calls together


@record
class DeviceWork:
    """What a step gave one rank's device to do: the mean over the profiled steps."""

    kernels: tuple[Kernel, ...]  # the longest first
    # in which it computed or copied anything: less than all together where streams overlap
    busy_seconds: float
    # in which it communicated and did nothing else
    exposed_seconds: float

    @property
    def own(self) -> tuple[Kernel, ...]:
        """The kernels without those that wait for other ranks."""
        return tuple(
            each for each in self.kernels if each.kind != COMMUNICATION
        )

    @property
    def seconds(self) -> float:
        """The durations of computation and copies."""
        return sum(each.total_seconds for each in self.own)

    @property
    def count(self) -> int:
        """The calls of computation and copies."""
        return round(sum(each.calls for each in self.own))


def mean_kernels(launches: Sequence[Sequence[Kernel]]) -> tuple[Kernel, ...]:
    """Return the kernels of a step as the mean over launches, the longest first."""
    found: dict[tuple[str, str], list[Kernel]] = {}
    for launch in launches:
        for each in launch:
            found.setdefault((each.name, each.kind), []).append(each)
    kernels = [
        Kernel(
            name=name,
            kind=kind,
            calls=sum(each.calls for each in same) / len(launches),
            total_seconds=sum(each.total_seconds for each in same)
            / len(launches),
        )
        for (name, kind), same in found.items()
    ]
    return tuple(sorted(kernels, key=lambda each: -each.total_seconds))
