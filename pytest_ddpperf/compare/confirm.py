"""Confirming a suspicion against a stored baseline: the baseline's own code is measured again, next
to today's.

It is an ordinary comparison with another version. A run has one budget of seconds for all of them,
and one baseline side at a time.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from pytest_ddpperf import text
from pytest_ddpperf.compare.result import Measured
from pytest_ddpperf.compare.source import find_causes, find_source
from pytest_ddpperf.records.errors import AgainstError, DdpPerfError
from pytest_ddpperf.records.reason import Reason
from pytest_ddpperf.records.samples import Status
from pytest_ddpperf.remote.version import BaseSide
from pytest_ddpperf.verdict import decision

# of a commit, ready within so many seconds; raises DdpPerfError
SideOf = Callable[[str, float], BaseSide]


# `run.carry_out` of one job: with the stored baseline, or with the side that it is given.
Compare = Callable[..., Measured]
# What is said of files that changed, by the reason of a verdict.
_CHANGED = {
    Reason.CONFIRMED: "changed, but not used by any rank",
    Reason.MACHINE_SLOWER: "these files changed, and did not make it slower",
}


def weigh(
    stored: Measured, interleaved: Measured, causes: Sequence[str], commit: str
) -> Measured | str:
    """Return what the comparison with the baseline's own code, of this commit, makes of the
    `stored` verdict; or, if it decides nothing, why the stored verdict stands. `causes` are what
    else may make the same code slower."""
    verdict = interleaved.verdict
    differs = f"; what else differs: {', '.join(causes)}" if causes else ""
    (baseline_today,) = interleaved.before
    ratio = decision.implausible_ratio(stored.before, baseline_today)
    # Whatever makes the baseline's code slow today makes both sides slow, and changes no counter.
    is_slower_still = ratio > 1 and verdict.status is Status.REGRESSED
    if ratio and not is_slower_still:
        return (
            f"it now takes {ratio:.3g}x its recorded time, which is more than machines usually"
            f" drift{differs}"
        )
    final = decision.confirm(stored.verdict, verdict, causes)
    if final is None:
        changes = [
            f"{each.limit.metric} {text.interval(text.changed(each))}"
            for each in verdict.comparisons
        ]
        return f"interleaved with {commit[:12]}: {', '.join(changes)}{differs}"
    return replace(
        interleaved,
        verdict=final,
        fails=stored.job.is_failed_by(final),
        stored=stored.stored,
        suspected=stored,
    )


@dataclass
class Confirmation:
    """What a run has for confirming suspicions: seconds, and the baseline side that is alive."""

    _budget: float  # seconds
    _rootdir: Path
    _baseline_dir: Path
    # starts a commit's own tests; a string says why nothing is confirmed, "" if nobody asked for it
    _side_of: SideOf | str
    _side: BaseSide | None = None
    _commit: str = ""  # of the side
    # by commit, why it has no side
    _failed: dict[str, str] = field(default_factory=dict)
    # commands that would fetch the code of baselines
    _fetch: dict[str, None] = field(default_factory=dict)
    _unaffordable: int = 0  # suspicions for which no time was left

    def __post_init__(self) -> None:
        self._left = self._budget

    def confirm(self, measured: Measured, compare: Compare) -> Measured:
        """Return `measured` or, if there is a suspicion, what re-measuring the baseline's code
        makes of it."""
        if not self._side_of or not measured.stored.sessions:
            return measured
        if not decision.is_suspected(measured.verdict):
            return measured
        # by the monotonic clock, when the budget is used up
        until = time.monotonic() + self._left
        found: Measured | str
        try:
            found = self._compare(measured, compare, until)
        except DdpPerfError as error:
            found = _first_line(str(error))
        except BaseException:
            # Ctrl-C or a plugin's time limit: the state of the baseline side is unknown
            self.close()
            raise
        finally:
            if self._side is not None:
                # so that it does not disturb the next measurement
                self._side.leave()
            self._left = until - time.monotonic()
        if isinstance(found, Measured):
            return found
        # a PASS says nothing that could not be confirmed
        if measured.verdict.status is Status.PASS:
            return measured
        return replace(
            measured,
            further_notes=(
                f"not confirmed with the baseline's own code: {found}",
            ),
        )

    def _compare(
        self, measured: Measured, compare: Compare, until: float
    ) -> Measured | str:
        """Measure the baseline's own code next to today's, and weigh what that shows. Raises
        DdpPerfError."""
        if isinstance(self._side_of, str):
            return self._side_of
        # Two looks of both sides, which is what a slowdown takes.
        launches = measured.launches[: measured.job.launches]
        needed = 4 * sum(launch.cost.total for launch in launches)
        if shortage := self._find_shortage(needed, until):
            return shortage
        session = measured.stored.sessions[-1]
        source = find_source(
            session,
            Path(measured.stored.path),
            self._baseline_dir,
            self._rootdir,
        )
        if source.fetch:
            self._fetch[source.fetch] = None
        if not source.commit:
            return source.why
        side = self._open_side(self._side_of, source.commit, until)
        if side is None:
            return self._failed[source.commit]
        if missing := side.tests.why_missing(measured.job.nodeid):
            return _first_line(missing)
        if shortage := self._find_shortage(needed, until):
            return shortage
        # Windows are as long as those that raised the suspicion: some slowdowns grow with every
        # step.
        interleaved = compare(
            side, steps=measured.steps, confirm_seconds=until - time.monotonic()
        )
        if interleaved.error:
            return _first_line(interleaved.error)
        verdict = interleaved.verdict
        if not verdict.status.compared:
            return ", ".join(verdict.differences) or str(verdict.reason)
        causes = find_causes(measured, Path(side.trees.current))
        found = weigh(measured, interleaved, [*causes], source.commit)
        if isinstance(found, Measured):
            notes = (*found.further_notes, *self._find_notes(found, side))
            return replace(found, further_notes=notes)
        return found

    def _find_shortage(self, needed: float, until: float) -> str:
        """Return, in words, that fewer seconds are left than a comparison needs; "" if there are
        enough."""
        left = until - time.monotonic()
        if left >= needed:
            return ""
        self._unaffordable += 1
        return (
            f"it takes about {needed:.0f} s, and {max(left, 0.0):.0f} of the {self._budget:g} s of"
            " --ddp-confirm are left: raise it"
        )

    def _open_side(
        self, side_of: SideOf, commit: str, until: float
    ) -> BaseSide | None:
        """Return the side of a commit: the one that is alive, or another in its place; None if it
        cannot be started."""
        is_alive = self._side is not None and not self._side.remote_pytest.dead
        if commit in self._failed:
            return None
        if not is_alive or self._commit != commit:
            self.close()
            try:
                self._side = side_of(commit, until - time.monotonic())
                self._commit = commit
            except DdpPerfError as error:
                problem = (
                    error.problem
                    if isinstance(error, AgainstError)
                    else str(error)
                )
                self._failed[commit] = _first_line(problem)
        return self._side

    def _find_notes(self, found: Measured, side: BaseSide) -> Iterator[str]:
        """Yield which of the files that differ between the baseline's code and today's matter."""
        reason = found.verdict.reason
        if (
            reason in (Reason.CONFIRMED, Reason.COUNTER_ROSE)
            and found.differing
        ):
            if all(map(_is_test, found.differing)):
                yield "only test files differ: the test itself changed"
            return
        words = _CHANGED.get(reason)
        if words is None:
            return
        with suppress(AgainstError):
            # Baselines are newer than the commit that has their code.
            baselines = self._baseline_dir.resolve()
            top = Path(side.trees.current)
            changed = [
                file
                for file in side.checkout.changed
                if not (top / file).is_relative_to(baselines)
            ]
            if changed:
                yield f"{words}: {text.some(changed)}"

    def messages(self) -> Iterator[str]:
        """Yield what the end of the run says once."""
        for command in self._fetch:
            yield f"this clone does not have the code of some baselines: {command}"
        if self._unaffordable:
            suspicions = text.several(
                self._unaffordable, "suspected regression"
            )
            yield (
                f"{suspicions} not re-measured: the {self._budget:g} s of --ddp-confirm are not"
                " enough"
            )

    def close(self) -> None:
        """End the baseline side that is alive, if there is one."""
        side, self._side = self._side, None
        if side is not None:
            side.close()


def _first_line(words: str) -> str:
    """Return the line that says what went wrong; pytest marks it in a traceback."""
    lines = words.splitlines()
    for line in lines:
        if line.startswith("E  "):
            return line[1:].strip()
    return lines[0] if lines else ""


def _is_test(file: str) -> bool:
    name = Path(file).name
    return (
        name == "conftest.py"
        or name.startswith("test_")
        or name.endswith("_test.py")
    )
