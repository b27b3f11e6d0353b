"""Counts and order of a run: how many measurements have which verdict, and which come first."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from pytest_ddpperf.records.outcome import Outcome, RunInfo
from pytest_ddpperf.records.samples import Status
from pytest_ddpperf.report import sentences, text

# The counts of a run by verdict, in the order of its last line: those that were compared, then the others.
_COMPARED = {
    "regressed": Status.REGRESSED,
    "passed": Status.PASS,
    "improved": Status.IMPROVED,
    "inconclusive": Status.INCONCLUSIVE,
}
_NOT_COMPARED = {
    "without_baseline": Status.NO_BASELINE,
    "incomparable": Status.INCOMPARABLE,
    "not_gated": Status.NOT_GATED,
    "failed": None,  # no figures: a rank failed, or a baseline could not be read
}
# These count tests, and come from the runs.
_OF_RUNS = ("skipped", "never_measured", "other_failures")


def count(outcomes: Sequence[Outcome], *runs: RunInfo) -> dict[str, int]:
    """Return how many outcomes were measured and compared, how many have which verdict, and the counts of the runs."""
    statuses = [outcome.verdict.status if outcome.verdict is not None else None for outcome in outcomes]
    return {
        "measured": len(outcomes),  # failed ones included
        "compared": sum(statuses.count(status) for status in _COMPARED.values()),
        **{name: statuses.count(status) for name, status in (_COMPARED | _NOT_COMPARED).items()},
        **{name: sum(getattr(run, name) for run in runs) for name in _OF_RUNS},
    }


def last_line(outcomes: Sequence[Outcome], *runs: RunInfo, only_before: int = 0, with_cost: bool = False) -> str:
    """Return "compared with main (fe7daa7): 1 regressed, 2 passed (3 of 3 compared)".

    `only_before` is the number of measurements that only the baseline run has. `with_cost`: add what it took."""
    counts = count(outcomes, *runs)
    saved = sum(outcome.saved > 0 for outcome in outcomes)
    numbers = {name.replace("_", " "): counts[name] for name in (*_COMPARED, *_NOT_COMPARED)}
    numbers["not gated"] -= saved
    numbers["diverged"] = 0
    names = {status: name for name, status in _COMPARED.items()}
    for outcome in filter(sentences.is_red_by_loss, outcomes):
        assert outcome.verdict is not None, "it has a loss"
        numbers[names[outcome.verdict.status]] -= 1
        numbers["diverged"] += 1
    numbers["failed to measure"] = numbers.pop("failed")
    numbers |= {"saved": saved, "skipped": counts["skipped"], "never measured": counts["never_measured"]}
    parts = [f"{number} {what}" for what, number in numbers.items() if number]
    parts += [text.several(counts["other_failures"], "other failure")] * bool(counts["other_failures"])
    parts += [f"{only_before} only in the base"] * bool(only_before)
    seconds = sum(outcome.seconds for outcome in outcomes) if with_cost else 0.0
    cost = f" in {seconds:.0f} s" if seconds >= 1 else ""
    line = f"{', '.join(parts) or 'nothing measured'} ({counts['compared']} of {counts['measured']} compared){cost}"
    missing = any(outcome.baseline_path for outcome in outcomes if outcome.verdict == Status.NO_BASELINE.value)
    advice = ": record baselines with --ddp-save-baseline" if missing and not counts["compared"] else ""
    return f"compared with {_base(outcomes)}: {line}" if counts["compared"] else line + advice


def _base(outcomes: Sequence[Outcome]) -> str:
    """Return what most reports name once: the other version, or stored baselines."""
    sides = (each.baseline_side for each in outcomes if each.stored_verdict is None)
    versions = {str(side.version) for side in sides if side is not None}
    if versions:
        return versions.pop() if len(versions) == 1 else "other versions"
    return "baselines" if any(outcome.baseline_path for outcome in outcomes) else "the base"


# Not compared, though nobody asked for that.
_UNINTENDED = ("debugging-variable", "no-supported-limit")


class Concern(IntEnum):
    """The attention that a measurement needs, most first."""

    FAILS = 0  # its test
    DOUBTFUL = 1  # its test passes, but not because all is well
    IMPROVED = 2
    NONE = 3


def concern(outcome: Outcome) -> Concern:
    if outcome.fails:
        return Concern.FAILS
    if outcome.verdict is None or outcome.verdict.diverged is not None:
        return Concern.DOUBTFUL
    status, reason = outcome.verdict.status, outcome.verdict.reason
    if status is Status.IMPROVED:
        return Concern.IMPROVED
    if status is Status.PASS or (status is Status.NOT_GATED and reason not in _UNINTENDED):
        return Concern.NONE
    return Concern.DOUBTFUL


# None: not even measured.
_ORDER = (
    *(Status.REGRESSED, None, Status.INCONCLUSIVE, Status.INCOMPARABLE, Status.NO_BASELINE),
    *(Status.IMPROVED, Status.PASS, Status.NOT_GATED),
)


def worst_first(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return the worst first: by concern, verdict and the size of the change; what is alike stays in its order."""

    def key(outcome: Outcome) -> tuple[int, int, float]:
        verdict = outcome.verdict
        return concern(outcome), _ORDER.index(verdict.status if verdict is not None else None), -_change_size(outcome)

    return sorted(outcomes, key=key)


def _change_size(outcome: Outcome) -> float:
    """Return the largest change, of those that decided if any did; without direction if it is for the better."""
    verdict = outcome.verdict
    if verdict is None:
        return 0.0
    changes = [verdict.worst.change.estimate] if verdict.worst is not None else []
    changes += [counter.change for counter in verdict.counters if counter.status is verdict.status]
    return max(map(abs, changes) if verdict.status is Status.IMPROVED else changes, default=0.0)
