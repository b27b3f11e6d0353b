"""A step of a history, measured again: the commit that it is at in a worktree, with the commit before it beside it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pytest_ddpperf.against.worktree import Worktree
from pytest_ddpperf.baseline.naming import environment_name
from pytest_ddpperf.cli import console
from pytest_ddpperf.git import commit_named, outside_of_hooks, top_level
from pytest_ddpperf.history.judging import Found
from pytest_ddpperf.history.tracks import Track
from pytest_ddpperf.records import Outcome, Status
from pytest_ddpperf.records.errors import GitError
from pytest_ddpperf.report import reading, text

_RED = 1  # pytest's exit status where tests failed


def confirm(found: Found, extra: Sequence[str]) -> int:
    """Measure, tell, and return how the command ends: 0 where it is not slower, 1 where it is, 5 where neither can be
    said. `extra` is for pytest. Raises UsageError."""
    here = Path(os.path.realpath(Path.cwd()))
    earlier, later = found.before.run.commit, found.after.run.commit
    if earlier == later:
        raise console.UsageError(f"both sides of this step are commit {later[:12]}: it is the machine's")
    try:
        top = top_level(here)
    except GitError:
        raise console.UsageError(f"{here} is in no git repository: call it where pytest is called") from None
    for commit in (earlier, later):
        try:
            commit_named(top, commit)
        except GitError:
            words = f"this clone lacks commit {commit[:12]}: git fetch --depth=1 origin {commit} brings it"
            raise console.UsageError(words) from None
    try:
        worktree = Worktree(top, later)
    except (GitError, OSError) as error:
        raise console.UsageError(f"commit {later[:12]} cannot be checked out: {error}") from error
    try:
        return _measured(found, worktree.tree, here.relative_to(top), top, extra)
    finally:
        worktree.remove()


def _measured(found: Found, tree: Path, below: Path, top: Path, extra: Sequence[str]) -> int:
    test = found.track.test
    folder = tree / below
    if not (folder / f"{test.module}.py").is_file():
        commit = found.after.run.commit[:12]
        raise console.UsageError(f"{test.module}.py is not in {below} of {commit}: call it where pytest is called")
    json = tree.parent / "confirmed.json"
    command = [
        *(sys.executable, "-m", "pytest", _node(found)),
        *("--ddp-against", found.before.run.commit, f"--ddp-json={json}"),
        *_place(found.track.key, found.after.kept.sized),
        # The plugin's usual limits are for pull requests: most steps of a history are smaller.
        f"--ddp-threshold={found.metric}:{abs(found.change.estimate) * 50:.6f}%",
        *extra,
    ]
    console.say([f"measuring {found.after.run.commit[:12]} beside {found.before.run.commit[:12]}"])
    status = _called(command, folder, _environ(tree, top))
    report = reading.read([json]) if json.is_file() else None
    if report is None or (status not in (0, _RED) and not _both_the_same(report)):
        console.complain(f"pytest ended with status {status}: nothing was measured")
        return console.USAGE_ERROR
    outcomes = [outcome for outcome in report.outcomes if outcome.test == test]
    console.say(map(_sentence, outcomes))
    if report.run.problem:
        console.complain(report.run.problem)
        return console.NOTHING_IN_COMMON
    return _ended(outcomes, found.track)


def _both_the_same(report: reading.Report) -> bool:
    """Whether that is why pytest refused: before anything was measured, or by what ranks had imported."""
    from pytest_ddpperf.against.side import NOTHING_DIFFERS

    problem = report.run.problem
    return NOTHING_DIFFERS in problem or bool(problem and report.outcomes)


def _ended(outcomes: Sequence[Outcome], track: Track) -> int:
    """The exit status, with what keeps it from being 0 or 1."""
    environments = [each.measurement.environment for each in outcomes if each.measurement is not None]
    elsewhere = [environment_name(each) for each in environments if each.key != track.key]
    if elsewhere:
        console.complain(f"this was measured in {elsewhere[0]}, and the step is in {track.environment}")
        return console.NOTHING_IN_COMMON
    compared = [each for each in outcomes if each.verdict is not None and each.verdict.status.compared]
    if any(outcome.verdict == Status.REGRESSED for outcome in compared):
        return console.NAMED_VERDICT
    if not compared:
        console.complain("nothing was compared")
    elif all(outcome.beside is not None and outcome.beside.same for outcome in compared):
        console.complain("no file that ranks imported differs: the step is in none, or both sides ran the same code")
    elif any(outcome.verdict == Status.INCONCLUSIVE for outcome in compared):
        console.complain(
            "neither slower nor certainly not: more launches may tell, as by --option='--ddp-max-launches 40'"
        )
    else:
        return console.OK
    return console.NOTHING_IN_COMMON


def _node(found: Found) -> str:
    """The name that pytest has for the test."""
    test, size = found.track.test, f"ws{found.track.key.get('world_size')}"
    name = test.name
    if found.after.kept.sized:
        name = f"{name[:-1]}-{size}]" if name.endswith("]") else f"{name}[{size}]"
    return f"{test.module}.py::{name}"


def _called(command: Sequence[str], folder: Path, environ: Mapping[str, str]) -> int:
    """Its exit status. Ctrl-C is for both of us, and the other has its own worktree to remove."""
    process = subprocess.Popen(command, cwd=folder, env=environ)
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.wait()
        raise


def _place(key: Mapping[str, object], sized: bool) -> list[str]:
    """Options for the same kind of group; an RPC test's roles its marker or call says."""
    options = {"--ddp-backend": "backend", "--ddp-device": "device_type"}
    if not key.get("roles"):
        options["--ddp-world-size"] = "world_size"
    words = [f"{option}={key[name]}" for option, name in options.items() if name in key]
    if sized:  # a marker or the command line had several sizes: with another one, which is not measured, it has again
        words[-1] += ",2" if key["world_size"] == 1 else ",1"
    return words


def _environ(tree: Path, top: Path) -> dict[str, str]:
    """What is imported from the working tree, an editable install say, comes from the worktree instead."""
    ours = [Path(os.path.realpath(entry)) for entry in sys.path if entry]
    instead = [str(tree / entry.relative_to(top)) for entry in ours if entry.is_relative_to(top)]
    given = os.environ.get("PYTHONPATH", "")
    return {**outside_of_hooks(), "PYTHONPATH": os.pathsep.join(filter(None, [*dict.fromkeys(instead), given]))}


def _sentence(outcome: Outcome) -> str:
    verdict = outcome.verdict
    if verdict is None:
        return f"{text.name(outcome)}: {outcome.error}"
    changes = ", ".join(map(text.change, verdict.comparisons))
    return f"{verdict.status}  {text.name(outcome)}  {changes or verdict.reason}"
