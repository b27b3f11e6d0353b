"""Counts, order and advice of a run: how many measurements have which verdict, which come first, what to do next."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from itertools import chain

from pytest_ddpperf.records import SESSIONS_KEPT, Comparison, Outcome, RunInfo, Status
from pytest_ddpperf.report import text

# The counts of a run by verdict, in the order of its last line: those that were compared, then the others.
_COMPARED = {
    "passed": Status.PASS,
    "improved": Status.IMPROVED,
    "regressed": Status.REGRESSED,
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


def last_line(counts: Mapping[str, int], only_before: int = 0) -> str:
    """Return "ddpperf: 3 of 5 compared: 2 passed, 1 regressed; 1 without baseline, 1 not gated; 1 skipped".

    `only_before` is the number of measurements that only the baseline run has."""
    failures = counts["other_failures"]
    words = {"failed": "failed to measure", "other_failures": text.several(failures, "other failure").partition(" ")[2]}
    parts = [
        ", ".join(f"{counts[name]} {words.get(name, name.replace('_', ' '))}" for name in names if counts[name])
        for names in (_COMPARED, _NOT_COMPARED, ["other_failures"], ["skipped", "never_measured"])
    ]
    rest = "; ".join(filter(None, [*parts, f"{only_before} only in the base" * bool(only_before)]))
    head = f"ddpperf: {counts['compared']} of {counts['measured']} compared"
    return f"{head}: {rest}" if rest else head


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
    if outcome.verdict is None:
        return Concern.DOUBTFUL
    status, reason = outcome.verdict.status, outcome.verdict.reason
    if status is Status.IMPROVED:
        return Concern.IMPROVED
    if status is Status.PASS or (status is Status.NOT_GATED and reason not in _UNINTENDED):
        return Concern.NONE
    return Concern.DOUBTFUL


# None: not even measured.
_ORDER = (
    Status.REGRESSED,
    None,
    Status.INCONCLUSIVE,
    Status.INCOMPARABLE,
    Status.NO_BASELINE,
    Status.IMPROVED,
    Status.PASS,
    Status.NOT_GATED,
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


# Four times as many launches halve what is resolved. Where twice as fine is not fine enough, it is not launches that
# are missing. Twenty are what a measurement may take by default.
_TIMES_LAUNCHES, _USUAL_LAUNCHES = 4, 20


def advice(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yield advice for the summary of a run."""
    # In a comparison of two reports, both sides are already measured: no option helps.
    outcomes = [outcome for outcome in outcomes if outcome.baseline_path or outcome.baseline_side is not None]
    yield from _resolution(outcomes)
    yield from _drift(outcomes)


def _resolution(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yield limits that are finer than the smallest detectable change, with what would make that smaller."""
    advised: dict[str, dict[str, list[Comparison]]] = {}  # by advice, and by the name of a measurement
    for outcome in outcomes:
        comparisons = outcome.verdict.comparisons if outcome.verdict is not None else ()
        coarse = [c for c in comparisons if 0 < text.limit_share(c) < text.resolution(c)]
        if coarse:
            advised.setdefault(_advice_for(outcome, coarse), {})[text.name(outcome)] = coarse
    for advice, found in advised.items():
        asked: dict[str, list[Comparison]] = {}
        for c in chain.from_iterable(found.values()):
            asked.setdefault(str(c.limit), []).append(c)
        resolved = ", ".join(text.span([text.resolution(c) for c in same]) for same in asked.values())
        limits = f"{', '.join(asked)} {'were' if len(asked) > 1 else 'was'} asked"
        who = f"{next(iter(found))}: {limits}, but this measurement resolves"
        if len(found) > 1:
            who = f"{limits}, but {len(found)} measurements resolve"
        launches = max(c.launches_needed or 0 for c in chain.from_iterable(asked.values()))
        yield f"{who} {resolved}: {advice.format(launches=launches)}"


def _advice_for(outcome: Outcome, coarse: Sequence[Comparison]) -> str:
    """Return what would make changes as small as the limits detectable; it may have a place for `launches`."""
    assert outcome.verdict is not None
    stored = outcome.baseline_side is None
    needed = [c.launches_needed for c in coarse if c.launches_needed is not None]
    if stored and len(needed) < len(coarse) and outcome.verdict.sessions < SESSIONS_KEPT:
        return "the baseline allows no finer one: let --ddp-extend-baseline add sessions to it"
    if stored and len(needed) < len(coarse):
        return "the baseline's sessions drift too far apart: raise the limit, or compare with --ddp-against"
    if needed and max(needed) <= _TIMES_LAUNCHES * max(_USUAL_LAUNCHES, len(outcome.phases)):
        return "raise --ddp-launches to about {launches}" + ("" if stored else ", or measure on a quieter machine")
    otherwise = ", compare with --ddp-against" if stored else ""
    return f"no sensible number of launches would do here: measure on a quieter machine{otherwise} or raise the limit"


def _drift(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yield what was assumed about drift, once for a run."""
    single = [outcome.verdict for outcome in outcomes if outcome.verdict is not None and outcome.verdict.sessions == 1]
    assumed = [c.drift for verdict in single for c in verdict.comparisons if c.drift is not None]
    if assumed:
        have = f"{len(single)} baseline{'s have' if len(single) > 1 else ' has'}"
        yield (
            f"{have} one session, which cannot tell how far sessions drift apart: {text.span(assumed)} was assumed; "
            "--ddp-extend-baseline on another occasion adds one"
        )
