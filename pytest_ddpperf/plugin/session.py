"""What a run measures with: its ranks, and the baselines that it compares with and writes. Knows no
pytest."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from pytest_ddpperf import text
from pytest_ddpperf.baseline import Store
from pytest_ddpperf.compare.confirm import Compare, Confirmation, SideOf
from pytest_ddpperf.compare.job import Job
from pytest_ddpperf.compare.packages import distributions
from pytest_ddpperf.compare.result import Measured
from pytest_ddpperf.compare.rounds import Launches
from pytest_ddpperf.compare.run import carry_out
from pytest_ddpperf.compare.source import find_inputs, select_code
from pytest_ddpperf.git import checked_out, tree_of
from pytest_ddpperf.launch import Launcher, Observer
from pytest_ddpperf.options.settings import Settings
from pytest_ddpperf.records.errors import BaselineError, GitError
from pytest_ddpperf.records.guard import BASELINE, Kind, Loosened
from pytest_ddpperf.records.outcome import Outcome
from pytest_ddpperf.records.reason import Reason
from pytest_ddpperf.records.samples import Facts, Status
from pytest_ddpperf.report import sentences
from pytest_ddpperf.verdict import decision
from pytest_ddpperf.verdict.guard import GATE_OFF, HAS_REFERENCE
from pytest_ddpperf.wire.source_trees import Trees


class Session:
    """Made when the first distributed test needs it."""

    def __init__(
        self,
        settings: Settings,
        rootdir: Path,
        launcher: Launcher,
        trees: Trees,
        side_of: SideOf | str,
    ) -> None:
        """`trees` are those of the launcher; `side_of` is as in `Confirmation`."""
        self.launcher = launcher
        self.store = Store(settings.baseline_dir, rootdir)
        self.confirmation = Confirmation(
            settings.confirm_seconds, rootdir, settings.baseline_dir, side_of
        )
        self._settings, self._rootdir = settings, rootdir
        self._top = Path(trees.current)
        # why saved baselines do not say which code they are of
        self._unidentified: dict[str, None] = {}
        # Once: the first baseline that is refreshed makes the working tree dirty for the second.
        self._commit = checked_out(rootdir)[0] if settings.records else ""

    def shown(self, file: Path) -> str:
        """Return a file's path from the top of the working tree, as reviewers see it; outside of it
        the whole path."""
        real = file.resolve()
        if real.is_relative_to(self._top):
            return real.relative_to(self._top).as_posix()
        return str(file)

    def facts(self) -> Facts:
        """Return what the machine offers, from a probe rank; raises the errors of a launch."""
        settings = self._settings
        return self.launcher.probe(settings.preload, settings.timeout_seconds)

    def comparison(self, job: Job, observer: Observer) -> Compare:
        """Return the comparison of a job with its baseline, or with another version that it is
        called with."""
        return partial(carry_out, job, self.launcher, self.store, observer)

    def save(self, measured: Measured) -> int:
        """Write a baseline, in place of the one before or in addition to it, and return how many
        sessions it now has. Raises BaselineError."""
        tree, inputs = self._code_and_inputs(measured.launches)
        candidate = measured.candidate
        (measured_now,) = candidate.sessions
        session = replace(
            measured_now,
            created=text.now(),
            commit=self._commit,
            tree=tree,
            inputs=inputs,
        )
        path = self.store.write(
            replace(candidate, sessions=(session,)),
            extend=self._settings.extend_baseline,
        )
        return len(self.store.read_file(path).sessions)

    def refuse_worse(self, measured: Measured) -> None:
        """Raise BaselineError if a session that would be added is worse than those before, or
        cannot be compared with them. The same code may be worse with the same distributions: that
        is drift."""
        if not (
            self._settings.extend_baseline
            and measured.verdict.reason == Reason.SAVING
        ):
            return
        environment, job = measured.measurement.environment, measured.job
        stored = self.store.read(environment, job.test)
        if stored is None:
            return
        tree, _ = self._code_and_inputs(measured.launches)
        last = stored.sessions[-1]
        installed = distributions(measured.launches)
        if tree and (tree, installed) == (last.tree, last.distributions):
            return
        before = stored.measurements
        verdict = decision.judge(
            measured.measurement,
            before,
            job.limits([measured.measurement, *before]),
            level=job.level,
        )
        worst, why = verdict.shown, ""
        if verdict.status is Status.REGRESSED and worst is not None:
            why = f"worse: {worst.limit.metric} {sentences.change(worst)}"
        elif verdict.status is Status.INCOMPARABLE:
            why = f"INCOMPARABLE: {'; '.join(verdict.differences) or verdict.reason}"
        if why:
            raise BaselineError(
                self.store.path(environment, job.test),
                f"the session was not added, because it is {why}",
                "measure again, or accept it with --ddp-save-baseline",
            )

    def find_lost(
        self,
        outcomes: Sequence[Outcome],
        marked: Mapping[tuple[str, str], str],
        missing: str,
    ) -> Iterator[Loosened]:
        """Yield the baselines of the environments and modules of a run whose measurements it did
        not compare. `marked` has why marks keep a test from being judged, by module and name; "" if
        it need not be. `missing` is why a test that did not run is not compared; "" if that is
        meant."""
        known: dict[Path, str] = {}
        for outcome in outcomes:
            path, why = self._rootdir / outcome.baseline_path, ""
            if outcome.has_reference and outcome.measurement is not None:
                environment = outcome.measurement.environment
                path = self.store.path(environment, outcome.test)
                why = HAS_REFERENCE
            verdict = outcome.verdict
            if verdict is not None and verdict.reason == Reason.GATE_OFF:
                why = GATE_OFF
            if path != self._rootdir:
                known[path] = why
        for folder in sorted({path.parent for path in known}):
            for path in sorted(folder.glob("*.json")):
                why = known.get(path, missing)
                with suppress(BaselineError):
                    test = self.store.read_file(path).test
                    if not known.get(path):
                        why = marked.get((test.module, test.name), why)
                    if why:
                        yield Loosened(
                            kind=Kind.NOT_COMPARED,
                            since=BASELINE,
                            test=str(test),
                            now=why,
                        )

    def _code_and_inputs(
        self, launches: Launches
    ) -> tuple[str, dict[str, str]]:
        """Return git's tree of the code that was measured, "" if there is none that identifies it,
        and its inputs."""
        found: dict[str, str] = {}
        try:
            found = find_inputs(self._top, launches)
            code = select_code(found)
            if not code or self._settings.against_setup:  # which builds it
                return tree_of(self._top, self._settings.baseline_dir), found
            why = (
                f"git ignores files that ranks imported: {text.some(code)}:"
                " ddp_against_setup can build them"
            )
        except GitError as error:
            why = str(error).partition("\n")[0].removeprefix("fatal: ")
        self._unidentified[why] = None
        return "", found

    def messages(self) -> Iterator[str]:
        """Yield what is said once about all baselines."""
        yield from self.confirmation.messages()
        for why in self._unidentified:
            yield (
                "a later run cannot measure the code of these baselines again, to confirm a"
                f" regression: {why}"
            )

    def close(self) -> None:
        try:
            self.confirmation.close()
        finally:
            self.launcher.close()
