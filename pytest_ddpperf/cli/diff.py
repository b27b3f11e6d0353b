"""`ddpperf diff`: compare reports with another one, by the judge of the gate."""

from __future__ import annotations

import argparse
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pytest_ddpperf import verdict as verdicts
from pytest_ddpperf.cli import console
from pytest_ddpperf.measuring.judging import follow, schedule
from pytest_ddpperf.records import Baseline, Limit, Measurement, Outcome, Recording, RunInfo, Status, Verdict, codec
from pytest_ddpperf.records.asked import TIME_LIMITS, limits_for
from pytest_ddpperf.report import failure, json_report, markdown, page, side_by_side, text
from pytest_ddpperf.report import side_by_side as pytorch
from pytest_ddpperf.report.json_report import Entry, StoredReport, gone_of, identity
from pytest_ddpperf.report.summary import count


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How it shall be judged."""

    limits: tuple[Limit, ...] | None  # None: the limits of each measurement's own run
    fail_on: frozenset[str]


def compare(base: StoredReport, now: StoredReport, terms: Terms) -> StoredReport:
    """Return `now`, each measurement with the verdict against the same test in `base`."""
    partners = _partners(base, now)
    entries = []
    for number, entry in enumerate(now.entries):
        level = entry.outcome.level if entry.outcome.level is not None else verdicts.TEST_LEVEL
        partner = base.entries[partners[number]] if number in partners else None
        entries.append(replace(entry, outcome=_with_verdict(entry.outcome, partner, terms, level)))
    taken = set(partners.values())
    return replace(
        now,
        entries=tuple(entries),
        runs=tuple(map(_bare, now.runs)),
        bases=base.runs,
        only_before=tuple(gone_of(entry.outcome) for number, entry in enumerate(base.entries) if number not in taken),
    )


def _bare(run: RunInfo) -> RunInfo:
    """Without what it says of itself as a whole, which is not of the comparison: `-k` may have left a part."""
    return replace(run, skipped=0, never_measured=0, other_failures=0, problem="", messages=())


def _partners(base: StoredReport, now: StoredReport) -> dict[int, int]:
    """By the place of a measurement in `now`, the place in `base` of that of the same test with as many ranks; where
    there are several, of that on the same kind of machine."""
    found: dict[int, int] = {}
    left = dict(enumerate(base.entries))
    for alike in (identity, _by_name):
        places: dict[Hashable, list[int]] = {}
        for there, entry in left.items():
            places.setdefault(alike(entry.outcome), []).append(there)
        for here, entry in enumerate(now.entries):
            if here not in found and (of_it := places.get(alike(entry.outcome))):
                found[here] = of_it.pop(0)
                del left[found[here]]
    return found


def _by_name(outcome: Outcome) -> Hashable:
    return outcome.test, outcome.plan.world_size, outcome.plan.roles


def _with_verdict(now: Outcome, other: Entry | None, terms: Terms, level: float) -> Outcome:
    """Return a measurement with the new verdict, without traces of the comparison in its own run."""
    asked = terms.limits if terms.limits is not None else now.limits or TIME_LIMITS
    limits = limits_for(now.plan, asked)
    fresh = replace(
        now, limits=limits, level=level, baseline_path="", baseline_side=None, stored_verdict=None, saved=0,
        sessions=(), evidence=(), accept="", notes=(),
    )  # fmt: skip
    if now.measurement is None:
        return replace(fresh, verdict=None, notes=now.notes)  # nothing to compare: it fails as before
    fresh = replace(fresh, error="")  # of what was not saved
    if other is None:
        return _judged(fresh, _no_baseline(), terms, "only in the later run")
    if other.outcome.measurement is None:
        return _judged(
            fresh, _no_baseline(), terms, f"not measured in the earlier run: {text.shortened(other.outcome.error)}"
        )
    before = Recording(measurement=other.outcome.measurement, created=other.run.created, commit=other.run.commit)
    launches = now.measurement.samples.launches
    verdict, taken = (
        verdicts.refused(now.measurement, before.measurement, now=now.verdict, then=other.outcome.verdict),
        launches,
    )
    if verdict is None:
        verdict, taken = _verdict(now.launches, now.measurement, before.measurement, limits, level)
    notes: tuple[str, ...] = ()
    if taken < launches:
        fresh = _of_first(fresh, now.measurement, taken)
        notes = (f"the first {taken} of {launches} launches decide: the gate would have taken no more",)
    judged = _judged(fresh, verdict, terms, *notes)
    steps = min(now.measurement.samples.steps, before.measurement.samples.steps)
    judged = replace(judged, sessions=(verdicts.in_percentiles(before, steps),))
    return failure.explained(judged, baseline=Baseline(test=now.test, sessions=(before,)), accept_command="")


def _of_first(outcome: Outcome, measured: Measurement, launches: int) -> Outcome:
    """With what those launches showed alone, so that figures are of what the verdict is of."""
    return replace(
        outcome,
        measurement=replace(measured, samples=measured.samples.of_launches(0, launches)),
        phases=outcome.phases[:launches],
        recorded={name: of_all[:launches] for name, of_all in outcome.recorded.items()},
    )


def _no_baseline() -> Verdict:
    return Verdict(status=Status.NO_BASELINE, reason="no-baseline")


def _judged(outcome: Outcome, verdict: Verdict, terms: Terms, *notes: str) -> Outcome:
    # The gate refuses what cannot be supported before it measures, but for its own limits; here a note must do.
    ours = {str(limit) for limit in outcome.limits if limit.default}
    refused = [line for line in verdict.dropped if line.partition(": ")[0] not in ours]
    verdict = replace(verdict, dropped=tuple(line for line in verdict.dropped if line not in refused))
    notes = (*notes, *(f"no limit is applied to {line}" for line in refused))
    fails = verdicts.fails(verdict, fail_on=terms.fail_on, baseline_missing="warn")
    return replace(outcome, verdict=verdict, fails=fails, notes=notes)


def _verdict(
    asked: int, current: Measurement, before: Measurement, limits: tuple[Limit, ...], level: float
) -> tuple[Verdict, int]:
    """And by how many launches: where the first look, after `asked`, leaves nothing open, the gate takes no more."""
    taken = 0

    def judge(start: int, stop: int, ease: float) -> Verdict:
        nonlocal taken
        taken = max(taken, stop)
        part = replace(current, samples=current.samples.of_launches(start, stop))
        return verdicts.judge_times(part, [before], limits, level=level * ease)

    launches = current.samples.launches
    looks = schedule(asked, launches)
    if len(looks) > 1 and looks[-1] == launches:  # so a suspicion was confirmed, or was not
        verdict, _ = follow(looks, judge, final=True)
    else:
        verdict = judge(0, launches, 1.0)
    verdict = verdicts.with_counters(verdict, current, [before], limits)
    return verdict, taken if verdict.status.compared else launches


_DESCRIPTION = """\
Compares reports of pytest --ddp-json with another, test by test, with the plugin's judge: BASE counts as a stored
baseline of one session. Several NOW are one report, as the shards of a CI job are. Two files of PyTorch's own DDP
benchmark are shown side by side in its form, without verdicts.
"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "diff", help="compare one run with another", description=_DESCRIPTION, allow_abbrev=False
    )
    parser.add_argument("base", type=Path, metavar="BASE", help="the earlier report")
    parser.add_argument("now", type=Path, nargs="+", metavar="NOW", help="the later one")
    console.add_threshold(parser)
    console.add_fail_on(parser)
    console.add_k(parser)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write NOW with its verdicts, as --ddp-json does")
    parser.add_argument("--markdown", type=Path, metavar="PATH", help="write it for a pull request, as --ddp-markdown")
    parser.add_argument("--html", type=Path, metavar="PATH", help="write it as a page, as --ddp-html does")
    parser.add_argument(
        "--form",
        choices=("ours", "pytorch"),
        default="ours",
        help="pytorch: the side-by-side form of PyTorch's DDP benchmark (default: ours)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    contents = [(path, json_report.load(path)) for path in (arguments.base, *arguments.now)]
    theirs = [path for path, content in contents if pytorch.is_theirs(content)]
    if len(theirs) == len(contents):
        return _theirs(arguments, contents)
    if theirs:
        raise console.UsageError(f"{theirs[0]} is of PyTorch's benchmark, and cannot be compared with one of ddpperf")
    base, *several = (json_report.report_of(path, content) for path, content in contents)
    base = console.matching(base, arguments.matches)
    now = console.matching(json_report.merged(several), arguments.matches)
    terms = Terms(
        limits=arguments.threshold,
        fail_on=arguments.fail_on or frozenset({"regressed"}),
    )
    if arguments.html is not None:
        page.check("--html")
    compared = compare(base, now, terms)
    _write(arguments, base, compared)
    if arguments.form == "pytorch":
        console.say(pytorch.side_by_side(*pytorch.ours(base, now)))
        console.say(side_by_side.summary_lines(base, compared))
    else:
        console.say(side_by_side.lines(base, compared))
    return _status(compared.outcomes)


def _write(arguments: argparse.Namespace, base: StoredReport, now: StoredReport) -> None:
    """The files that were asked for."""
    messages = [*side_by_side.about(base, now), *side_by_side.remarks(base, now)]
    if arguments.json is not None:
        console.write(arguments.json, codec.dumps(_data(base, now)))
    if arguments.markdown is not None:
        content = markdown.report(
            now.outcomes, count(now.outcomes, *now.runs), messages=messages, only_before=now.only_before
        )
        console.write(arguments.markdown, content, append=markdown.appends(arguments.markdown))
    if arguments.html is not None:
        console.write(arguments.html, page.html(now.outcomes, now.runs, messages=messages, only_before=now.only_before))


def _status(outcomes: Sequence[Outcome]) -> int:
    if any(outcome.fails for outcome in outcomes):
        return console.NAMED_VERDICT
    if not any(outcome.verdict is not None and outcome.verdict.status.compared for outcome in outcomes):
        return _nothing_compared()
    return console.OK


def _nothing_compared() -> int:
    console.complain("nothing was compared")
    return console.NOTHING_IN_COMMON


def _theirs(arguments: argparse.Namespace, contents: Sequence[tuple[Path, dict[str, Any]]]) -> int:
    """Show files of PyTorch's benchmark. They hold one launch each, so there is no verdict."""
    for option in ("threshold", "fail_on", "json", "markdown", "html"):
        if getattr(arguments, option) is not None:
            name = "--" + option.replace("_", "-")
            raise console.UsageError(f"{name}: files of PyTorch's benchmark hold one launch, so there is no verdict")
    if len(contents) > 2:
        raise console.UsageError("files of PyTorch's benchmark are compared by two")
    base, now = (pytorch.matching(pytorch.theirs(*each), arguments.matches) for each in contents)
    console.say(pytorch.side_by_side(base, now))
    return console.OK if pytorch.in_common(base, now) else _nothing_compared()


def _data(base: StoredReport, now: StoredReport) -> dict[str, Any]:
    """Return NOW as a report, with the baseline run."""
    before = {name: getattr(base.run, name) for name in ("created", "version", "commit", "committed")}
    return {
        **json_report.report(now.outcomes, replace(now.run, messages=tuple(side_by_side.remarks(base, now)))),
        "base": {"run_id": base.run.id, **before},
        "only_in_base": codec.encode(now.only_before),
    }
