"""What is measured, for which test, and how it is judged."""

from collections.abc import Sequence

from pytest_ddpperf.baseline import content
from pytest_ddpperf.options.settings import Settings
from pytest_ddpperf.records.figure import figures_of
from pytest_ddpperf.records.messages import ReadyToMeasure
from pytest_ddpperf.records.plan import (
    COUNTER_LIMITS,
    Limits,
    Plan,
    Setup,
    limits_for,
)
from pytest_ddpperf.records.record import record
from pytest_ddpperf.records.samples import (
    Environment,
    Facts,
    Measurement,
    TestId,
    Verdict,
)
from pytest_ddpperf.verdict import decision


@record
class Job:
    """What one call of a test measures."""

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
    facts: Facts
    trace: str = ""  # as `Plan` has it, for the first launch; "" for no traces
    notes: tuple[str, ...] = ()
    # what it is compared with in the same run: the same, but for what ranks run
    reference: "Job | None" = None

    @property
    def launches(self) -> int:
        """How many launches there are before the first look."""
        return self.settings.launches

    @property
    def ready(self) -> ReadyToMeasure:
        """The event that a test asks for this measurement; all nodes of a launch have to ask for
        the same."""
        return ReadyToMeasure(
            label=self.test.label,
            plan=self.plan,
            batch_size=self.batch_size,
            facts=self.facts,
        )

    def limits(self, sides: Sequence[Measurement]) -> Limits:
        """Return the limits that apply to its plan, and to the figures of the user's own that
        these sides have. A reference may send, or compute, something else: its counters have no
        limits but those that are named."""
        figures = figures_of(side.samples.figures for side in sides)
        found = limits_for(self.plan, self.settings.limits, figures)
        if self.reference is None:
            return found
        return tuple(limit for limit in found if limit not in COUNTER_LIMITS)

    def environment(self, facts: Facts) -> Environment:
        """Return the environment of launches that reported these facts."""
        return content.environment(
            {**facts, **self.facts}, self.plan, batch_size=self.batch_size
        )

    def is_failed_by(self, verdict: Verdict) -> bool:
        """Return whether a verdict fails the test."""
        return decision.fails(
            verdict,
            fail_on=self.settings.fail_on,
            baseline_missing=self.settings.baseline_missing,
        )
