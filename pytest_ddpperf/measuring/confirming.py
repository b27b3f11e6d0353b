"""A suspicion against a stored baseline, settled by the baseline's own code, measured beside the code at hand.

For a run there is one budget of seconds, and one other side alive at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from pytest_ddpperf import verdict as verdicts
from pytest_ddpperf.against import BaseSide
from pytest_ddpperf.against.origin import origin_of
from pytest_ddpperf.baseline import Store
from pytest_ddpperf.launch import Launcher
from pytest_ddpperf.measuring import benchmark, provenance
from pytest_ddpperf.measuring.benchmark import Job, Measured, Progress
from pytest_ddpperf.records import Baseline, Outcome, Recording, Scalar, Status, Verdict
from pytest_ddpperf.records.errors import DdpPerfError
from pytest_ddpperf.report import text
from pytest_ddpperf.verdict import Circumstances

SideOf = Callable[[str, str], BaseSide]  # of a commit, for the test with this node id; raises the errors of one

# What may make the same code slower, and is no property of the machine at hand.
_ENVIRONMENT = ("python", "torch", "cuda", "hip", "nccl", "driver")
_VARIABLE = "env:"


class Confirming:
    """What a run has left for it."""

    def __init__(self, seconds: float, rootdir: Path, side_of: SideOf | str) -> None:
        """`side_of`: or why nothing is confirmed, which is told of what would have been; "" for nobody asked."""
        self._left, self._rootdir, self._side_of = seconds, rootdir, side_of
        self._asked = seconds
        self._side: BaseSide | None = None
        self._of = ("", "")  # commit and file that it is there for
        self.fetch: dict[str, None] = {}  # commands that would bring the code of baselines

    def settle(self, job: Job, measured: Measured, launcher: Launcher, store: Store, progress: Progress) -> Measured:
        """`measured` against its baseline; with the verdict of turns where that is a suspicion that they settle. Raises
        the errors of a launch of the side at hand."""
        stored, baseline = measured.outcome.verdict, measured.baseline
        if not self._side_of or stored is None or baseline is None or not verdicts.suspected(stored):
            return measured
        began = time.monotonic()
        try:
            return self._settled(job, measured, baseline, launcher, store, progress)
        except _Unconfirmed as why:
            if stored.status is Status.PASS:  # which nobody doubts but we
                return measured
            return _noted(measured, f"not confirmed on the baseline's own code: {why}")
        finally:
            self._left -= time.monotonic() - began

    def _settled(
        self, job: Job, measured: Measured, baseline: Baseline, launcher: Launcher, store: Store, progress: Progress
    ) -> Measured:
        if isinstance(self._side_of, str):
            raise _Unconfirmed(self._side_of)
        stored = measured.outcome.verdict
        assert stored is not None
        session = baseline.sessions[-1]
        # Two looks of both sides, which is what a slowdown takes.
        needed = 4 * sum(launch.phases.total for launch in measured.shown[: job.launches])
        if self._left < needed:
            raise _Unconfirmed(f"the {self._asked:g} s of --ddp-confirm are spent, but for {max(self._left, 0):.0f}")
        origin = origin_of(session, Path(measured.outcome.baseline_path), self._rootdir)
        if not origin.commit:
            if origin.fetch:
                self.fetch[origin.fetch] = None
            raise _Unconfirmed(origin.why)
        side = self._side_for(origin.commit, job.nodeid)
        seconds = min(job.settings.max_seconds, self._left)
        settings = replace(job.settings, against=origin.commit, max_seconds=seconds)
        turned = benchmark.carry_out(replace(job, settings=settings), launcher, store, progress, side)
        verdict, beside = turned.outcome.verdict, turned.outcome.beside
        assert verdict is not None
        assert beside is not None
        if beside.error:
            raise _Unconfirmed(beside.error.partition("\n")[0])
        if not verdict.status.compared:
            raise _Unconfirmed(", ".join(verdict.differences) or verdict.reason)
        found = _circumstances(measured, baseline, session, code_differs=bool(beside.differing))
        final = verdicts.settled(stored, verdict, found)
        told = f"beside the baseline's own code ({origin.commit[:12]}), in turns: {_changes(verdict)}"
        if final is stored:
            return _noted(measured, f"{told}, which settles nothing")
        if final.reason == "environment":
            differs = ", ".join(found.environment)
            measured = _noted(measured, f"{told}: not the code is slower, but what else differs: {differs}")
            return replace(
                measured, result=replace(measured.result, verdict=final), outcome=_with(measured, final, job)
            )
        settled = replace(
            turned,
            result=replace(turned.result, verdict=final),
            candidate=measured.candidate,
            output=measured.output + turned.output,
        )
        if beside.differing and all(map(_of_tests, beside.differing)):
            settled = _noted(settled, "no file but tests differs: it is the test that changed")
        outcome = replace(_with(settled, final, job), baseline_path=measured.outcome.baseline_path, stored=stored)
        return replace(settled, outcome=outcome)

    def _side_for(self, commit: str, nodeid: str) -> BaseSide:
        """The one that is there, or another in its place."""
        of = commit, nodeid.partition("::")[0]
        if self._side is None or self._of != of:
            self.close()
            assert callable(self._side_of)
            try:
                self._side, self._of = self._side_of(commit, nodeid), of
            except DdpPerfError as error:
                raise _Unconfirmed(str(error).partition("\n")[0]) from None
        return self._side

    def leave(self) -> None:
        """The test is over."""
        if self._side is not None:
            self._side.leave()

    def close(self) -> None:
        side, self._side = self._side, None
        if side is not None:
            side.close()


class _Unconfirmed(Exception):
    """Why the stored rule decides alone."""


def _of_tests(file: str) -> bool:
    name = Path(file).name
    return name == "conftest.py" or name.startswith("test_") or name.endswith("_test.py")


def _with(measured: Measured, verdict: Verdict, job: Job) -> Outcome:
    fails = verdicts.fails(verdict, fail_on=job.settings.fail_on, baseline_missing=job.settings.baseline_missing)
    return replace(measured.outcome, verdict=verdict, fails=fails)


def _changes(verdict: Verdict) -> str:
    return ", ".join(text.change(comparison) for comparison in verdict.comparisons)


def _noted(measured: Measured, note: str) -> Measured:
    return replace(measured, outcome=replace(measured.outcome, notes=(*measured.outcome.notes, note)))


def _circumstances(measured: Measured, baseline: Baseline, session: Recording, *, code_differs: bool) -> Circumstances:
    now = measured.result.environment.recorded
    hosts = {each.measurement.environment.recorded.get("host") for each in baseline.sessions}
    files = provenance.files([launch.files for launch in measured.shown])
    brought = provenance.distributions({module for launch in measured.shown for module in launch.others})
    return Circumstances(
        another_host=now.get("host") not in hosts,
        environment=(
            *_differing(now, session.measurement.environment.recorded),
            *(
                f"{name} {was.version if was else 'not there'} -> {found.version if found else 'not there'}"
                for name in sorted({*brought, *session.distributions})
                if (was := session.distributions.get(name)) != (found := brought.get(name))
            ),
        ),
        code_differs=code_differs,
        code_is_todays=all(session.files.get(file) == held for file, held in files.items() if file in session.files)
        and brought == session.distributions,
    )


def _differing(now: Mapping[str, Scalar], then: Mapping[str, Scalar]) -> tuple[str, ...]:
    names = sorted(name for name in {*now, *then} if name in _ENVIRONMENT or name.startswith(_VARIABLE))
    return tuple(
        f"{name.removeprefix(_VARIABLE)} {then.get(name, 'unset')} -> {now.get(name, 'unset')}"
        for name in names
        if now.get(name) != then.get(name)
    )
