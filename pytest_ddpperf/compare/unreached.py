"""A measurement that ends after one launch of the current side: nothing that differs from the other
version can have a part in it."""

from pytest_ddpperf.compare.job import Job
from pytest_ddpperf.compare.own_figures import check_launch
from pytest_ddpperf.compare.result import Measured
from pytest_ddpperf.compare.rounds import Round, combine
from pytest_ddpperf.compare.rule import Rule
from pytest_ddpperf.compare.sides import CurrentSide, OtherVersion
from pytest_ddpperf.launch import Launcher, Observer
from pytest_ddpperf.remote.reach import Imports
from pytest_ddpperf.remote.version import BaseSide
from pytest_ddpperf.verdict import decision
from pytest_ddpperf.wire.source_trees import is_code


def take_unreached(
    job: Job,
    launcher: Launcher,
    base: BaseSide,
    imports: Imports,
    observer: Observer,
) -> Measured | None:
    """Return a PASS after one launch of the current side, if it is certain that nothing runs there
    that differs; None if the sides have to be compared. `imports`: what the code of the test
    imports. Raises the errors of a launch."""
    # What all processes of a command, or of other nodes, read is not known.
    if job.plan.command or job.plan.nodes > 1:
        return None
    if (
        not job.gate
        or job.plan.preload
        or not base.is_unreached(job.nodeid, imports)
    ):
        return None
    observer.begin(0, 1)
    now = CurrentSide(job, launcher, 0).measure(observer, None)
    observer.launched(now)
    check_launch(job, now)
    rounds = (Round(now),)
    uses_code = any(map(is_code, now.files))
    is_gated = Rule(job=job, max_seconds=0.0).not_gated(rounds) is None
    is_whole = not base.lacking(now.files, {})
    if not (uses_code and is_gated and is_whole):
        return None
    if {*now.files} & {*base.checkout.changed} or not base.is_unreached(
        job.nodeid, imports
    ):
        return None
    base.pass_over(job.test.label)
    why = (
        f"none of the files that it reads ({len(now.files)}) differs from"
        f" {base.version}"
    )
    return Measured(
        job=job,
        verdict=decision.unreached(),
        fails=False,
        rounds=rounds,
        measurement=combine((now,), job.environment(now.facts)),
        other=OtherVersion(base.version, job),
        further_notes=(why,),
    )
