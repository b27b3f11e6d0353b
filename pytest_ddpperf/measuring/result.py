"""What the fixtures that measure return to a test."""

from __future__ import annotations

from dataclasses import dataclass

from pytest_ddpperf.records import Counters, Environment, LaunchRankSteps, LaunchSteps, Recorded, Verdict
from pytest_ddpperf.records.collective import Collective
from pytest_ddpperf.verdict.stats import geometric_mean, launch_quantiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A measurement and its verdict. All times are in seconds."""

    step_seconds: LaunchSteps  #: launch x step: the group's step times
    samples: LaunchRankSteps  #: launch x rank x step: each rank's own step durations
    world_size: int
    backend: str
    verdict: Verdict
    environment: Environment
    counters: Counters  #: per step, the largest over ranks; None where it is unknown
    recorded: Recorded  #: by name, launch x rank x step: what `ctx.record` was told; None where it was not

    def percentile(self, q: float) -> float:
        """The q-th percentile (0 to 100) of the group's step time: per launch, then the geometric mean over
        launches, as the verdict has it (of fewer steps, where a baseline has fewer)."""
        if not 0 <= q <= 100:
            raise ValueError(f"percentile({q!r}): from 0 to 100")
        return geometric_mean(launch_quantiles(self.step_seconds, q))

    @property
    def p10(self) -> float:
        return self.percentile(10)

    @property
    def p50(self) -> float:
        return self.percentile(50)

    @property
    def p75(self) -> float:
        return self.percentile(75)

    @property
    def p90(self) -> float:
        return self.percentile(90)

    @property
    def p95(self) -> float:
        return self.percentile(95)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveResult(Result):
    """A measurement of one collective over one size, in nccl-tests' terms too; all times are in seconds."""

    collective: Collective

    @property
    def size(self) -> int:
        """Bytes: of the largest buffer of a rank."""
        return self.collective.size

    @property
    def algbw(self) -> float:
        """GB/s (1e9 bytes), at p50: the size over the time."""
        return self.collective.algbw(self.p50)

    @property
    def busbw(self) -> float:
        """GB/s (1e9 bytes), at p50: what a link carries, for every number of ranks."""
        return self.collective.busbw(self.p50)
