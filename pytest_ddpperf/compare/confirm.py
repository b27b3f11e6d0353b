"""Confirming a suspicion against a stored baseline: the baseline's own code is measured again, next
to today's.

It is an ordinary comparison with another version. A run has one budget of seconds for all of them,
and one baseline side at a time.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from pytest_ddpperf import text
from pytest_ddpperf.compare.launches import distributions, modules_imported
from pytest_ddpperf.compare.measurement import Measured, does_fail
from pytest_ddpperf.git import (
    commit_named,
    git,
    ignored_files,
    last_change,
    top_level,
    tree_of,
)
from pytest_ddpperf.records.errors import AgainstError, DdpPerfError, GitError
from pytest_ddpperf.records.samples import (
    Baseline,
    Distribution,
    LaunchSamples,
    Reason,
    Recording,
    Scalar,
    Status,
)
from pytest_ddpperf.remote.version import BaseSide, for_people
from pytest_ddpperf.verdict import decision
from pytest_ddpperf.wire.source_trees import file_digest, is_code
from pytest_ddpperf.wire.variables import READ, digest

# of a commit, ready within so many seconds; raises DdpPerfError
SideOf = Callable[[str, float], BaseSide]
# `measurement.carry_out` of the same job with another baseline side
Compare = Callable[..., Measured]

# Recorded facts that may make the same code slower. Measured ones (clocks, temperatures) differ in
# every run.
_CAUSES = ("python", "torch", "cuda", "hip", "nccl", "driver")
_VARIABLE, _OPTION = "env:", "--"


class NotConfirmed(Exception):
    """Why the stored verdict stands, in words."""


class Confirmation:
    """What a run has for confirming suspicions: seconds, and the baseline side that is alive."""

    def __init__(
        self, seconds: float, rootdir: Path, baseline_dir: Path, side_of: SideOf | str
    ) -> None:
        """`side_of` starts a commit's own tests; a string says why nothing is confirmed, "" if
        nobody asked for it."""
        self._budget = self._left = seconds
        # by the monotonic clock, when the budget of this suspicion is used up
        self._until = 0.0
        self._rootdir, self._baseline_dir, self._side_of = (
            rootdir,
            baseline_dir,
            side_of,
        )
        self._side: BaseSide | None = None
        self._commit = ""  # of the side
        self._failed: dict[str, str] = {}  # by commit, why it has no side
        # commands that would fetch the code of baselines
        self._fetch: dict[str, None] = {}
        self._unaffordable = 0  # suspicions for which no time was left

    def confirm(self, measured: Measured, compare: Compare) -> Measured:
        """Return `measured` or, if there is a suspicion, what re-measuring the baseline's code
        makes of it."""
        stored, baseline = measured.verdict, measured.side.baseline
        if not self._side_of or baseline is None or not decision.is_suspected(stored):
            return measured
        self._until = time.monotonic() + self._left
        try:
            return self._confirmed(measured, baseline, compare)
        except NotConfirmed as why:
            if stored.status is Status.PASS:
                return measured
            return replace(
                measured,
                further_notes=(f"not confirmed with the baseline's own code: {why}",),
            )
        except BaseException:
            # Ctrl-C or a plugin's time limit: the state of the baseline side is unknown
            self.close()
            raise
        finally:
            if self._side is not None:
                self._side.leave()  # so that it does not disturb the next measurement
            self._left = self._until - time.monotonic()

    def _confirmed(
        self, measured: Measured, baseline: Baseline, compare: Compare
    ) -> Measured:
        if isinstance(self._side_of, str):
            raise NotConfirmed(self._side_of)
        job = measured.job
        # Two looks of both sides, which is what a slowdown takes.
        needed = 4 * sum(
            launch.cost.total for launch in measured.current.taken[: job.launches]
        )
        self._check_budget(needed)
        source = find_source(
            baseline.sessions[-1],
            Path(measured.side.path),
            self._baseline_dir,
            self._rootdir,
        )
        if source.fetch:
            self._fetch[source.fetch] = None
        if not source.commit:
            raise NotConfirmed(source.why)
        side = self._side_for(source.commit)
        if missing := side.tests.why_missing(job.nodeid):
            raise NotConfirmed(_first_line(missing))
        left = self._check_budget(needed)
        # Windows are as long as those that raised the suspicion: some slowdowns grow with every
        # step.
        steps = len(measured.current.taken[0].step_seconds)
        try:
            interleaved = compare(side, steps=steps, confirm_seconds=left)
        except DdpPerfError as error:
            raise NotConfirmed(_first_line(str(error))) from None
        verdict, other = (
            interleaved.verdict,
            interleaved.side.record(interleaved.current),
        )
        assert other is not None
        if other.error:
            raise NotConfirmed(_first_line(other.error))
        if not verdict.status.compared:
            raise NotConfirmed(", ".join(verdict.differences) or verdict.reason)
        causes = self._other_causes(measured, baseline, Path(side.trees.current))
        differs = f"; what else differs: {', '.join(causes)}" if causes else ""
        (now,) = interleaved.side.measurements()
        if ratio := decision.implausible_ratio(baseline.measurements, now):
            problem = (
                f"it now takes {ratio:.3g}x its recorded time, which a drift of the machine does"
                " not explain"
            )
            raise NotConfirmed(f"{problem}{differs}")
        final = decision.confirm(measured.verdict, verdict, causes)
        if final is measured.verdict:
            changes = [
                f"{each.limit.metric} {text.interval(text.changed(each))}"
                for each in verdict.comparisons
            ]
            raise NotConfirmed(
                f"interleaved with {self._commit[:12]}: {', '.join(changes)}{differs}"
            )
        notes: tuple[str, ...] = ()
        if final.status is Status.REGRESSED and other.differing:
            notes = ("only test files differ: the test itself changed",) * all(
                map(_is_test, other.differing)
            )
        elif final.status is Status.REGRESSED:
            notes = tuple(self._changed(side, "changed, but not used by any rank"))
        elif final.reason == Reason.MACHINE_SLOWER:
            notes = tuple(
                self._changed(side, "these files changed, and did not make it slower")
            )
        fails = does_fail(job, final)
        return replace(
            interleaved,
            verdict=final,
            fails=fails,
            suspected=measured,
            further_notes=notes,
        )

    def _check_budget(self, needed: float) -> float:
        """Return how many seconds are left; raises NotConfirmed if they are too few."""
        left = self._until - time.monotonic()
        if left < needed:
            self._unaffordable += 1
            have = (
                f"{max(left, 0.0):.0f} of the {self._budget:g} s of --ddp-confirm are left:"
                " raise it"
            )
            raise NotConfirmed(f"it takes about {needed:.0f} s, and {have}")
        return left

    def _side_for(self, commit: str) -> BaseSide:
        """Return the side of a commit: the one that is alive, or another in its place."""
        if commit in self._failed:
            raise NotConfirmed(self._failed[commit])
        if (
            self._side is None
            or self._commit != commit
            or self._side.remote_pytest.dead
        ):
            self.close()
            assert callable(self._side_of)
            try:
                self._side, self._commit = (
                    self._side_of(commit, self._until - time.monotonic()),
                    commit,
                )
            except DdpPerfError as error:
                why = _first_line(
                    error.problem if isinstance(error, AgainstError) else str(error)
                )
                self._failed[commit] = why
                raise NotConfirmed(why) from None
        return self._side

    def _other_causes(
        self, measured: Measured, baseline: Baseline, top: Path
    ) -> tuple[str, ...]:
        """Return what else may make the same code slower; raises NotConfirmed."""
        try:
            inputs = find_changed_inputs(
                top, baseline.sessions[-1].inputs, measured.current.taken
            )
            return (*_changed_facts(measured, baseline), *inputs)
        except GitError as error:
            raise NotConfirmed(_first_line(str(error))) from None

    def _changed(self, side: BaseSide, words: str) -> Iterator[str]:
        """Yield which files differ between the baseline's code and today's, after these words."""
        with suppress(AgainstError):
            # younger than their commit
            baselines = Path(os.path.realpath(self._baseline_dir))
            top = Path(side.trees.current)
            changed = [
                file
                for file in side.changed()
                if not (top / file).is_relative_to(baselines)
            ]
            if changed:
                yield f"{words}: {text.some(sorted(changed, key=for_people))}"

    def messages(self) -> Iterator[str]:
        """Yield what the end of the run says once."""
        yield from (
            f"this clone does not have the code of some baselines: {command}"
            for command in self._fetch
        )
        if self._unaffordable:
            suspicions = text.several(self._unaffordable, "suspected regression")
            yield (
                f"{suspicions} not re-measured: the {self._budget:g} s of --ddp-confirm are not"
                " enough"
            )

    def close(self) -> None:
        side, self._side = self._side, None
        if side is not None:
            side.close()


def _changed_facts(measured: Measured, baseline: Baseline) -> Iterator[str]:
    """Yield what may make the same code slower, and is not as it was when the baseline was
    recorded, or is unknown."""
    session = baseline.sessions[-1]
    current, recorded = (
        measured.environment.recorded,
        session.measurement.environment.recorded,
    )
    for name in sorted({*current, *recorded}):
        if _is_cause(name, current, recorded) and current.get(name) != recorded.get(
            name
        ):
            shown = name.removeprefix(_VARIABLE)
            yield f"{shown} {recorded.get(name, 'unset')} -> {current.get(name, 'unset')}"
    # whether today's code reads it or not
    for name in filter(lambda name: name.startswith(READ), recorded):
        variable = name.removeprefix(READ)
        value = current.get(name, digest(os.environ.get(variable)))
        if value != recorded[name]:
            yield f"{variable} {recorded[name]} -> {value}"
    hosts = [
        each.measurement.environment.recorded.get("host") for each in baseline.sessions
    ]
    if current.get("host") not in hosts:
        yield f"host {hosts[-1]} -> {current.get('host')}"
    before, after = (
        session.distributions,
        distributions(modules_imported(measured.current.taken)),
    )
    for name in sorted({*before, *after}):
        old, new = before.get(name), after.get(name)
        if old != new:
            yield f"{name} {_version(old)} -> {_version(new)}"
        elif new is not None and not new.digest:
            yield f"{name} (its files are not known)"


def _version(distribution: Distribution | None) -> str:
    return (
        "not imported"
        if distribution is None
        else distribution.version or "an unknown version"
    )


def _is_cause(
    name: str, current: Mapping[str, Scalar], recorded: Mapping[str, Scalar]
) -> bool:
    """Whether a fact is a version, a variable, or an option that conftests had on both
    occasions."""
    if name.startswith(_OPTION):
        return name in current and name in recorded
    return name in _CAUSES or name.startswith(_VARIABLE)


def _first_line(words: str) -> str:
    """Return the line that says what went wrong; pytest marks it in a traceback."""
    lines = words.splitlines()
    return next(
        (line[1:].strip() for line in lines if line.startswith("E  ")),
        lines[0] if lines else "",
    )


def _is_test(file: str) -> bool:
    name = Path(file).name
    return (
        name == "conftest.py" or name.startswith("test_") or name.endswith("_test.py")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The commit that has a session's code or, with commit "", why there is none."""

    commit: str = ""
    why: str = ""
    fetch: str = ""  # the command that would fetch it


def find_source(
    session: Recording, baseline: Path, baseline_dir: Path, rootdir: Path
) -> Source:
    """Return the commit whose tree, without the baselines' folder, is the session's.

    Candidates are the recorded commit, the last one that changed the file of the `baseline`, and
    HEAD. Nothing is fetched.
    """
    if not session.tree:
        built = (
            f"git ignored {text.some(code)}"
            if (code := select_code(session.inputs))
            else "git had no tree of it"
        )
        return Source(why=f"the baseline does not identify its code: {built}")
    try:
        top = top_level(rootdir)
    except GitError as error:
        return Source(why=f"git cannot find the baseline's code: {error}")
    recorded = session.commit.partition("-dirty")[0]
    for commit in dict.fromkeys(_candidates(top, recorded, baseline)):
        try:
            if tree_of(top, baseline_dir, commit) == session.tree:
                return Source(commit=commit)
        except GitError:
            continue  # a partial clone does not have its trees
    remote = _remote(top)
    if recorded and not _is_present(top, recorded):
        return Source(
            why=f"commit {recorded[:12]} of the baseline is not in this clone",
            fetch=(
                "git fetch --unshallow"
                if "-dirty" in session.commit
                else f"git fetch {remote} {recorded}"
            ),
        )
    return Source(why="the baseline was recorded with files that are in no commit")


def _candidates(top: Path, recorded: str, baseline: Path) -> Iterator[str]:
    """Yield the candidates that are in the repository."""
    named = [recorded] * bool(re.fullmatch("[0-9a-f]{40,64}", recorded))
    with suppress(GitError):
        changed = git(
            top, "status", "--porcelain", "--no-renames", "--", baseline, offline=True
        )
        if not changed:  # else the last commit of it has another session
            named.append(last_change(top, baseline))
    for ref in (*named, "HEAD"):
        with suppress(GitError):
            yield commit_named(top, ref, offline=True)


def _is_present(top: Path, commit: str) -> bool:
    with suppress(GitError):
        return bool(commit_named(top, commit, offline=True))
    return False


def _remote(top: Path) -> str:
    with suppress(GitError):
        remotes = git(top, "remote").split()
        return "origin" if "origin" in remotes or not remotes else remotes[0]
    return "origin"


# What ranks used that no commit has: files that git ignores, and shared libraries from outside. So
# many a baseline names.
_MOST_INPUTS = 20
_LIBRARY = "library "


def find_inputs(top: Path, launches: Sequence[LaunchSamples]) -> dict[str, str]:
    """Return the digests of files, by their paths from `top`, "" for those that the run wrote, and
    of libraries by name; raises GitError."""
    files = {
        file: digest for launch in launches for file, digest in launch.files.items()
    }
    ignored = ignored_files(top, list(files)) if files else []
    libraries = {
        f"{_LIBRARY}{name}": digest
        for launch in launches
        for name, digest in launch.libraries.items()
    }
    found = {**{file: files[file] for file in ignored}, **libraries}
    return {
        name: found[name]
        for name in sorted(found, key=lambda name: (not is_code(name), name))[
            :_MOST_INPUTS
        ]
    }


def select_code(names: Iterable[str]) -> list[str]:
    """Return those of the inputs that are code of the repository, which each version has to
    build."""
    return [name for name in names if is_code(name) and not name.startswith(_LIBRARY)]


def find_changed_inputs(
    top: Path, recorded: Mapping[str, str], launches: Sequence[LaunchSamples]
) -> Iterator[str]:
    """Yield, in words, which inputs are not as they were recorded; raises GitError."""
    current = find_inputs(top, launches)
    names = {**recorded, **(current if len(recorded) < _MOST_INPUTS else {})}
    for name in sorted({*names} - {*select_code(names)}):
        before, now = (
            recorded.get(name),
            current.get(name) or file_digest(str(top / name)),
        )
        # else the run wrote it, then or now
        if before != now and before != "" and current.get(name) != "":
            yield (
                f"{name} ({'new' if before is None else 'changed' if now else 'gone'}, and in no"
                " commit)"
            )
