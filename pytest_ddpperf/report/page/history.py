"""What the page of a history says of each series, in the words that the command has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pytest_ddpperf.history import curves
from pytest_ddpperf.history.judging import Found, Judged
from pytest_ddpperf.history.steps import FEWEST_POINTS
from pytest_ddpperf.history.tracks import Mark, Track
from pytest_ddpperf.records import Status
from pytest_ddpperf.report import steps, text
from pytest_ddpperf.report.page import series
from pytest_ddpperf.report.page.parts import Figure, Sheet, Table

# What is drawn takes time and room; of larger histories the worst are.
_MOST_FIGURES = 200
_MOST_CHANGES = 30  # of an environment that changes with each run, a fleet's say
_Chain = tuple[Track, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    anchor: str  # of its series
    kind: str  # of its verdict, in the style sheet
    status: str
    name: str
    environment: str
    change: str
    commit: str
    when: str
    sentence: str
    told: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A test in an environment."""

    anchor: str
    name: str
    kind: str
    status: str
    sentence: str
    opened: bool
    facts: tuple[tuple[str, str], ...]
    steps: tuple[Step, ...]
    figures: tuple[Figure, ...]
    tables: tuple[Table, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    cards: tuple[Card, ...]
    steps: tuple[Step, ...]  # of all series, the worst first
    further: Table | None  # series that are not drawn


def content(judged: Judged, sheet: Sheet) -> Content:
    found: dict[int, dict[int, Found]] = {}  # by series: by their place among all, the worst first
    for place, each in enumerate(judged.found):
        found.setdefault(id(each.track), {})[place] = each
    none = {len(judged.found): None}
    chains = sorted(
        curves.chains(judged.tracks), key=lambda chain: min(min(found.get(id(track), none)) for track in chain)
    )
    drawn = _MOST_FIGURES // len(judged.metrics)
    cards: list[Card] = []
    told: dict[int, Step] = {}
    for number, chain in enumerate(chains, 1):
        anchor = f"s{number}" if number <= drawn else ""
        own = {place: _step(each, anchor) for track in chain for place, each in found.get(id(track), {}).items()}
        told.update(own)
        if anchor:
            cards.append(_card(judged, sheet, anchor, chain, tuple(own[place] for place in sorted(own))))
    return Content(
        cards=tuple(cards),
        steps=tuple(told[place] for place in sorted(told)),
        further=_further(chains[drawn:], judged.metrics),
    )


def _step(found: Found, anchor: str) -> Step:
    return Step(
        anchor=anchor,
        kind=found.status.lower(),
        status=str(found.status),
        name=text.shortened(str(found.track.test)),
        environment=text.shortened(found.track.environment),
        change=f"{found.metric} {text.interval(found.change)}",
        commit=found.after.run.commit[:12],
        when=found.after.run.committed[:10],
        sentence=steps.sentence(found),
        told=tuple(steps.told(found)),
    )


def _card(judged: Judged, sheet: Sheet, anchor: str, chain: _Chain, own: tuple[Step, ...]) -> Card:
    marks = [mark for track in chain for mark in track.marks]
    changed = curves.changes(marks)
    short = all(len(track.marks) < FEWEST_POINTS for track in chain)
    status = own[0].status if own else "too short" if short else "no step"
    return Card(
        anchor=anchor,
        name=text.shortened(str(chain[-1].test)),
        kind=status.lower().replace(" ", "-"),
        status=status,
        sentence=_summary(own) if own else _last_run(chain, judged.metrics),
        opened=status in (Status.REGRESSED, Status.INCONCLUSIVE),
        facts=tuple(_facts(chain, marks)),
        steps=own,
        figures=tuple(
            series.over_time(sheet, [curves.curve(judged, track, metric) for track in chain], sorted(changed))
            for metric in judged.metrics
        ),
        tables=tuple(_changes(marks, changed)),
    )


def _summary(own: Sequence[Step]) -> str:
    """The worst step, which comes first."""
    more = f", and {len(own) - 1} more" if len(own) > 1 else ""
    return f"{own[0].change} at {own[0].commit} of {own[0].when}{more}"


def _last_run(chain: _Chain, metrics: Sequence[str]) -> str:
    told = (f"{metric} {_last(chain, metric)}" for metric in metrics)
    return f"{text.several(sum(len(track.marks) for track in chain), 'run')}; the last: {', '.join(told)}"


def _last(chain: _Chain, metric: str) -> str:
    return text.seconds(chain[-1].last_seconds(metric))


def _facts(chain: _Chain, marks: Sequence[Mark]) -> Iterator[tuple[str, str]]:
    yield "environment", text.shortened(chain[-1].environment)
    yield "runs", f"{len(marks):,}"
    yield "from", _point(marks[0])
    yield "to", _point(marks[-1])
    for number, track in enumerate(chain, 1):
        if track.told:
            name = f"series {number} of {len(chain)}" if len(chain) > 1 else "a series of its own"
            yield name, f"{text.shortened(track.told)}: {text.several(len(track.marks), 'run')}"


def _point(mark: Mark) -> str:
    return f"{mark.run.committed[:10]} {mark.run.commit[:12]}"


def _changes(marks: Sequence[Mark], changed: Mapping[int, Sequence[str]]) -> Iterator[Table]:
    if changed:
        shown = sorted(changed)[-_MOST_CHANGES:]
        which = "" if len(shown) == len(changed) else f": the last {len(shown)} of {len(changed)} times"
        yield Table(
            title=f"What changed in the environment{which}",
            head=("first run with it", "of", "what"),
            rows=tuple(
                (
                    marks[at].run.commit[:12],
                    marks[at].run.committed[:10],
                    ", ".join(map(text.shortened, changed[at])),
                )
                for at in shown
            ),
        )


def _further(chains: Sequence[_Chain], metrics: Sequence[str]) -> Table | None:
    if not chains:
        return None
    return Table(
        title=f"{len(chains):,} further series, which are not drawn: the {_MOST_FIGURES} worst figures are",
        head=("test", "environment", "runs", *(f"last {metric}" for metric in metrics)),
        rows=tuple(
            (
                text.shortened(str(chain[-1].test)),
                text.shortened(chain[-1].environment),
                str(sum(len(track.marks) for track in chain)),
                *(_last(chain, metric) for metric in metrics),
            )
            for chain in chains
        ),
    )
