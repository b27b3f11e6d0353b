"""What would let the next measurements tell more: each advice once for a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from pytest_ddpperf.records import SESSIONS_KEPT, Comparison, Outcome
from pytest_ddpperf.report import text

# Four times as many launches halve what is resolved. Where twice as fine is not fine enough, it is not launches that
# are missing. Twenty are what a measurement may take by default.
_TIMES_LAUNCHES, _USUAL_LAUNCHES = 4, 20


def lines(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """For the summary of a run."""
    # Two reports that were held against each other have both sides behind them: no option would tell more.
    outcomes = [outcome for outcome in outcomes if outcome.baseline_path or outcome.baseline_side is not None]
    yield from _resolution(outcomes)
    yield from _drift(outcomes)


def _resolution(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Limits that are finer than what measurements can see, with what would make them see those."""
    advised: dict[str, dict[str, list[Comparison]]] = {}  # by advice, and by the name of a measurement
    for outcome in outcomes:
        coarse = (
            [c for c in outcome.verdict.comparisons if 0 < _bound(c) < text.resolution(c)] if outcome.verdict else []
        )
        if coarse:
            advised.setdefault(_advice(outcome, coarse), {})[text.name(outcome)] = coarse
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


def _bound(comparison: Comparison) -> float:
    """The limit as a share."""
    limit = comparison.limit
    return limit.value if limit.unit == "%" else limit.value / comparison.baseline_seconds


def _advice(outcome: Outcome, coarse: Sequence[Comparison]) -> str:
    """What would make a measurement see changes as small as its limits; it may have a place for `launches`."""
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
    """What was assumed where a baseline could not tell, once for a run."""
    single = [outcome.verdict for outcome in outcomes if outcome.verdict is not None and outcome.verdict.sessions == 1]
    assumed = [c.drift for verdict in single for c in verdict.comparisons if c.drift is not None]
    if assumed:
        have = f"{len(single)} baseline{'s have' if len(single) > 1 else ' has'}"
        yield (
            f"{have} one session, which cannot tell how far sessions drift apart: {text.span(assumed)} was assumed; "
            "--ddp-extend-baseline on another occasion adds one"
        )
