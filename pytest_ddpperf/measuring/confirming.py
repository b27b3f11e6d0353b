"""A suspicion against a stored baseline, settled by the baseline's own code, measured beside the code at hand.

For a run there is one budget of seconds, and one other side alive at a time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from pytest_ddpperf import verdict as verdicts
from pytest_ddpperf.against import BaseSide
from pytest_ddpperf.against.origin import origin_of
from pytest_ddpperf.against.proof import for_people
from pytest_ddpperf.baseline import Store
from pytest_ddpperf.launch import Launcher
from pytest_ddpperf.measuring import benchmark
from pytest_ddpperf.measuring.benchmark import Job, Measured, Progress
from pytest_ddpperf.measuring.circumstances import circumstances, had_others, held_then
from pytest_ddpperf.records import Baseline, Outcome, Status, Verdict
from pytest_ddpperf.records.errors import AgainstError, BaseSideError, CheckoutError, DdpPerfError, LaunchError
from pytest_ddpperf.report import text
from pytest_ddpperf.verdict import Circumstances
from pytest_ddpperf.wire.trees import digests


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """What is measured beside the code at hand."""

    commit: str
    file: str  # of its tests
    # What the baseline ran with: "NAME=VALUE", or "NAME" of a variable to unset; options of the user's own.
    assignments: tuple[str, ...] = ()
    options: tuple[tuple[str, str], ...] = ()


_NAMED = 5

SideOf = Callable[[Code, float], BaseSide]  # ready within so many seconds; raises the errors of one


class Confirming:
    """What a run has left for it."""

    def __init__(self, seconds: float, rootdir: Path, side_of: SideOf | str) -> None:
        """`side_of`: or why nothing is confirmed, which is told of what would have been; "" for nobody asked."""
        self._left, self._rootdir, self._side_of = seconds, rootdir, side_of
        self._asked = seconds
        self._side: BaseSide | None = None
        self._of: Code | None = None  # that it has
        self._failed: dict[Code, str] = {}  # of which there can be none, and why
        self._fetch: dict[str, None] = {}  # commands that would bring the code of baselines
        self._unsettled = 0  # suspicions for which no time was left

    def settle(self, job: Job, measured: Measured, launcher: Launcher, store: Store, progress: Progress) -> Measured:
        """`measured` against its baseline; with the verdict of turns where that is a suspicion that they settle. Raises
        the errors of a launch of the side at hand."""
        stored, baseline = measured.outcome.verdict, measured.baseline
        if not self._side_of or stored is None or baseline is None or not verdicts.suspected(stored):
            return measured
        began = time.monotonic()
        try:
            settled = self._settled(job, measured, baseline, launcher, store, progress)
        except _Unconfirmed as why:
            settled = measured
            if stored.status is not Status.PASS or why.failed:  # else nobody doubts it but we
                settled = _noted(measured, f"not confirmed on the baseline's own code: {why}")
        except BaseException:  # Ctrl-C, a plugin's time limit: nobody knows what goes on there
            self._left -= time.monotonic() - began
            self.close()
            raise
        if self._side is not None:
            self._side.leave()  # what goes on there would be beside the next measurement
        self._left -= time.monotonic() - began
        return settled

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
        began = time.monotonic()
        self._afford(needed, self._left)
        builds = job.settings.against_setup is not None
        origin = origin_of(session, Path(measured.outcome.baseline_path), self._rootdir, builds=builds)
        if not origin.commit:
            if origin.fetch:
                self._fetch[origin.fetch] = None
            raise _Unconfirmed(origin.why)
        held = held_then(measured, session)
        file = job.nodeid.partition("::")[0]
        code = Code(commit=origin.commit, file=file, assignments=held.variables, options=held.options)
        side = self._side_for(code)
        if missing := side.why_missing(job.nodeid):
            raise _Unconfirmed(_gist(missing))
        left = self._left - (time.monotonic() - began)
        self._afford(needed, left)
        seconds = min(job.settings.max_seconds, left)
        settings = replace(job.settings, against=origin.commit, max_seconds=seconds)
        # As long as those that raised it, however slow the machine is by now: what grows with every step is not
        # acquitted by fewer.
        steps = len(measured.shown[0].step_seconds)
        turning = replace(job, settings=settings, settles=True, steps=steps)
        try:
            turned, failed = self._in_turns(turning, launcher, store, progress, side)
        except BaseSideError as error:
            raise _Unconfirmed(_gist(str(error))) from None
        except LaunchError:  # of the code at hand
            raise
        except DdpPerfError as error:
            raise _Unconfirmed(_gist(str(error)), failed=True) from None

        def unconfirmed(why: str) -> _Unconfirmed:
            return _Unconfirmed("; ".join((why, *failed)), failed=bool(failed))

        measured, turned = _noted(measured, *failed), _noted(turned, *failed)
        verdict, beside = turned.outcome.verdict, turned.outcome.baseline_side
        assert verdict is not None
        assert beside is not None
        if beside.error:
            raise unconfirmed(_gist(beside.error))
        assert beside.measurement is not None
        sides = beside.measurement, measured.result, session.measurement
        facts = (measurement.environment.recorded for measurement in sides)
        if others := had_others(*facts, held=held, trees=side.tree):
            wanted = "not what was recorded" if held.told else "neither what was recorded nor what is here"
            raise unconfirmed(f"it ran with {', '.join(others)}, which is {wanted}")
        if not verdict.status.compared:
            raise unconfirmed(", ".join(verdict.differences) or verdict.reason)
        found = circumstances(
            measured, baseline, session, held, there=turned.beside, code_differs=bool(beside.differing)
        )
        rebuilt = digests(side.tree.base, origin.built) if origin.built else {}
        otherwise = tuple(file for file in origin.built if rebuilt[file] != session.files[file])
        found = replace(found, unaccounted=found.unaccounted + otherwise)
        final = verdicts.settled(stored, verdict, found)
        told = f"beside the baseline's own code ({origin.commit[:12]}), in turns: {_changes(verdict)}"
        if final is stored:
            unknown = f": nobody knows what {', '.join(found.unaccounted)} held then" if found.unaccounted else ""
            differs = f"; what else differs: {', '.join(found.environment)}" if found.environment else ""
            variables_told = f"; {_of_variables(found)}" if found.variables else ""
            return _noted(measured, f"{told}, which settles nothing{unknown}{differs}{variables_told}")
        if final.comparisons is stored.comparisons:
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
        if found.variables:
            settled = _noted(settled, _of_variables(found))
        if final.status is Status.REGRESSED:
            settled = _noted(settled, *_of_files(side, beside.differing, job.settings.baseline_dir))
        outcome = replace(
            _with(settled, final, job),
            baseline_path=measured.outcome.baseline_path,
            stored_verdict=stored,
            level=job.level,
            sessions=measured.outcome.sessions,
        )
        return replace(settled, outcome=outcome)

    def _in_turns(
        self, job: Job, launcher: Launcher, store: Store, progress: Progress, side: BaseSide
    ) -> tuple[Measured, tuple[str, ...]]:
        """With what is to be told of launches that failed. Raises the errors of a launch of the side at hand: of one
        that is alone, as it was before anybody doubted."""
        until = time.monotonic() + job.settings.max_seconds
        try:
            return benchmark.carry_out(job, launcher, store, progress, side), ()
        except LaunchError as error:
            if not job.settings.in_stretches(job.plan):
                raise
            failed = str(error).partition("\n")[0]
        side.leave()
        left = max(0.0, until - time.monotonic())
        apart = replace(job, settings=replace(job.settings, turns="launches", max_seconds=left))
        told = f"a launch failed that took turns with the baseline's own code, and none by itself: {failed}"
        try:
            return benchmark.carry_out(apart, launcher, store, progress, side), (told,)
        except LaunchError:  # of the code at hand
            raise
        except DdpPerfError as error:
            raise _Unconfirmed(f"{_gist(str(error))}; {told}", failed=True) from None

    def _afford(self, needed: float, left: float) -> None:
        """Raises _Unconfirmed where so many seconds are not left."""
        if left < needed:
            self._unsettled += 1
            told = f"{max(left, 0.0):.0f} of the {self._asked:g} s of --ddp-confirm are left"
            raise _Unconfirmed(f"it takes about {needed:.0f} s, and {told}")

    def _side_for(self, code: Code) -> BaseSide:
        """The one that is there, or another in its place; of the same commit in the same tree, which may have taken
        long to set up."""
        tree = replace(code, file="")
        if why := self._failed.get(tree) or self._failed.get(code):
            raise _Unconfirmed(why)
        if self._side is not None and self._of == code and not self._side.dead:
            return self._side
        try:
            if self._side is not None and self._of is not None and replace(self._of, file="") == tree:
                self._of = tree  # until it has that file's tests
                self._side.again(code.file, self._left)
            else:
                self.close()
                assert callable(self._side_of)
                self._side = self._side_of(code, self._left)
            self._of = code
        except DdpPerfError as error:
            why = _gist(error.problem if isinstance(error, AgainstError) else str(error))
            self._failed[tree if isinstance(error, CheckoutError) else code] = why
            raise _Unconfirmed(why) from None
        return self._side

    def told(self) -> Iterator[str]:
        """What is to be said once of all of it."""
        yield from (f"not in this clone: code of baselines; {command} brings it" for command in self._fetch)
        if self._unsettled:
            tests = f"{self._unsettled} measurement{'s' * (self._unsettled != 1)} that looked slower"
            yield f"the {self._asked:g} s of --ddp-confirm did not suffice: {tests} stayed with what the baselines say"

    def close(self) -> None:
        side, self._side, self._of = self._side, None, None
        if side is not None:
            side.close()


class _Unconfirmed(Exception):
    """Why the stored rule decides alone; `failed`: something went wrong that did not before."""

    def __init__(self, why: str, *, failed: bool = False) -> None:
        super().__init__(why)
        self.failed = failed


def _gist(told: str) -> str:
    """A line of what went wrong: pytest marks it in a traceback."""
    lines = told.splitlines()
    return next((line[1:].strip() for line in lines if line.startswith("E  ")), lines[0] if lines else "")


def _of_tests(file: str) -> bool:
    name = Path(file).name
    return name == "conftest.py" or name.startswith("test_") or name.endswith("_test.py")


def _with(measured: Measured, verdict: Verdict, job: Job) -> Outcome:
    fails = verdicts.fails(verdict, fail_on=job.settings.fail_on, baseline_missing=job.settings.baseline_missing)
    return replace(measured.outcome, verdict=verdict, fails=fails)


def _changes(verdict: Verdict) -> str:
    return ", ".join(text.change(comparison) for comparison in verdict.comparisons)


def _noted(measured: Measured, *notes: str) -> Measured:
    return replace(measured, outcome=replace(measured.outcome, notes=(*measured.outcome.notes, *notes)))


def _of_files(side: BaseSide, differing: Sequence[str], baselines: Path) -> Iterator[str]:
    """What the files that ranks imported do not tell of slower code."""
    if differing:
        if all(map(_of_tests, differing)):
            yield "no file but tests differs: it is the test that changed"
        return
    with suppress(AgainstError):
        apart = Path(os.path.realpath(baselines))  # whose files are younger than their commit
        top = Path(side.trees.hand)
        files = [file for file in side.changed() if not ((top / file).is_relative_to(apart) and file.endswith(".json"))]
        if files := sorted(files, key=for_people):
            more = ", ..." * (len(files) > _NAMED)
            yield f"files that no rank imported and that differ: {', '.join(files[:_NAMED])}{more}"


def _of_variables(found: Circumstances) -> str:
    differ = ", ".join(found.variables)
    what = "variables and options" if any(each.startswith("--") for each in found.variables) else "variables"
    beside = f"the baseline's own code ran with the {what} of the baseline: {differ}"
    return f"{beside}; files differ, too, and which of both it is was not measured" if found.code_differs else beside
