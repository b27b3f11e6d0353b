"""A suspicion against a stored baseline, settled by the baseline's own code, measured beside the code at hand.

For a run there is one budget of seconds, and one other side alive at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from pytest_ddpperf import verdict as verdicts
from pytest_ddpperf.against import BaseSide
from pytest_ddpperf.against.origin import origin_of
from pytest_ddpperf.baseline import Store
from pytest_ddpperf.launch import Launcher
from pytest_ddpperf.measuring import benchmark, provenance
from pytest_ddpperf.measuring.benchmark import Job, Measured, Progress
from pytest_ddpperf.records import Baseline, Distribution, Outcome, Recording, Scalar, Status, Verdict
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
        self._failed: dict[tuple[str, str], str] = {}  # those for which there can be none, and why
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
            if stored.status is Status.PASS and not why.failed:  # which nobody doubts but we
                return measured
            return _noted(measured, f"not confirmed on the baseline's own code: {why}")
        finally:
            self._left -= time.monotonic() - began
            self._leave()  # what goes on there would be beside the next measurement

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
        began = time.monotonic()
        side = self._side_for(origin.commit, job.nodeid)
        if missing := side.why_missing(job.nodeid):
            raise _Unconfirmed(missing.partition("\n")[0])
        seconds = min(job.settings.max_seconds, self._left - (time.monotonic() - began))
        settings = replace(job.settings, against=origin.commit, max_seconds=seconds)
        turning = replace(job, settings=settings, level=job.level * job.level_in_turns)
        try:
            turned = benchmark.carry_out(turning, launcher, store, progress, side)
        except DdpPerfError as error:  # beside the other side; the figures that there are were taken alone
            raise _Unconfirmed(str(error).partition("\n")[0], failed=True) from None
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
            unknown = f": nobody knows what {', '.join(found.unaccounted)} held then" if found.unaccounted else ""
            return _noted(measured, f"{told}, which settles nothing{unknown}")
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
        outcome = replace(
            _with(settled, final, job),
            baseline_path=measured.outcome.baseline_path,
            stored=stored,
            level=job.level,
            sessions=measured.outcome.sessions,
        )
        return replace(settled, outcome=outcome)

    def _side_for(self, commit: str, nodeid: str) -> BaseSide:
        """The one that is there, or another in its place."""
        of = commit, nodeid.partition("::")[0]
        if of in self._failed:
            raise _Unconfirmed(self._failed[of])
        if self._side is None or self._of != of:
            self.close()
            assert callable(self._side_of)
            try:
                self._side, self._of = self._side_of(commit, nodeid), of
            except DdpPerfError as error:
                self._failed[of] = str(error).partition("\n")[0]
                raise _Unconfirmed(self._failed[of]) from None
        return self._side

    def _leave(self) -> None:
        if self._side is not None:
            self._side.leave()

    def close(self) -> None:
        side, self._side = self._side, None
        if side is not None:
            side.close()


class _Unconfirmed(Exception):
    """Why the stored rule decides alone; `failed`: something went wrong that did not before."""

    def __init__(self, why: str, *, failed: bool = False) -> None:
        super().__init__(why)
        self.failed = failed


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
    others = {module for launch in measured.shown for module in launch.others}
    brought = provenance.distributions(others)
    return Circumstances(
        another_host=now.get("host") not in hosts,
        environment=(
            *_differing(now, session.measurement.environment.recorded),
            *_installed(brought, session.distributions, added=not code_differs),
        ),
        code_differs=code_differs,
        code_is_todays=all(session.files.get(file) == held for file, held in files.items() if file in session.files)
        and brought == session.distributions,
        unaccounted=provenance.unaccounted(others),
    )


def _installed(now: Mapping[str, Distribution], then: Mapping[str, Distribution], *, added: bool) -> Iterator[str]:
    """Distributions that are others; those that one side alone imports, too, where it is not its code that does."""
    for name in sorted({*now, *then}):
        before, after = then.get(name), now.get(name)
        if before is not None and after is not None and before != after:
            build = ", another build" * (before.version == after.version)
            yield f"{name} {before.version} -> {after.version}{build}"
        elif added and (before is None or after is None):
            yield f"{name} {before.version if before else 'not there'} -> {after.version if after else 'not there'}"


def _differing(now: Mapping[str, Scalar], then: Mapping[str, Scalar]) -> tuple[str, ...]:
    names = sorted(name for name in {*now, *then} if name in _ENVIRONMENT or name.startswith(_VARIABLE))
    return tuple(
        f"{name.removeprefix(_VARIABLE)} {then.get(name, 'unset')} -> {now.get(name, 'unset')}"
        for name in names
        if now.get(name) != then.get(name)
    )
