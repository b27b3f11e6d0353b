"""`ddpperf diff`: compare reports with another one, by the judge of the gate."""

import argparse
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from pytest_ddpperf import text
from pytest_ddpperf.cli import console
from pytest_ddpperf.options import parse
from pytest_ddpperf.options.definitions import FAIL_ON_NAMES
from pytest_ddpperf.records import codec
from pytest_ddpperf.records.figure import figures_of
from pytest_ddpperf.records.outcome import Outcome
from pytest_ddpperf.records.plan import TIME_LIMITS, Limits, limits_for
from pytest_ddpperf.records.samples import Reason, Recording, Status, Verdict
from pytest_ddpperf.report import causes, diff_report, json_report, sentences
from pytest_ddpperf.report.json_report import (
    Entry,
    StoredReport,
    gone_of,
    identity,
)
from pytest_ddpperf.verdict import decision, observed, times


def compare(
    base: StoredReport,
    now: StoredReport,
    limits: Limits | None,
    fail_on: frozenset[str],
) -> StoredReport:
    """Return `now`, each measurement with the verdict against the same test in `base`.

    If `limits` is None, each measurement has those of its own run. `fail_on` names the verdicts
    that fail."""
    partners, gone = _partners(base, now)
    entries = []
    for number, entry in enumerate(now.entries):
        partner = partners.get(number)
        asked = limits or entry.outcome.limits or TIME_LIMITS
        figures = figures_of(
            each.outcome.measured.samples.figures
            for each in (entry, partner)
            if each is not None and each.outcome.measurement is not None
        )
        applying = limits_for(entry.outcome.plan, asked, figures)
        outcome = _with_verdict(entry.outcome, partner, applying)
        if outcome.verdict:
            fails = decision.fails(
                outcome.verdict, fail_on=fail_on, baseline_missing="warn"
            )
            outcome = replace(outcome, fails=fails)
        entries.append(replace(entry, outcome=outcome))
    outcomes = [entry.outcome for entry in entries]
    # Counts and messages of a run as a whole, and what its guard found in another comparison, are
    # not about this one: `-k` may have chosen a part.
    runs = tuple(
        replace(
            run,
            skipped=0,
            never_measured=0,
            other_failures=0,
            problem="",
            messages=(),
            guard=(),
            too_weak="",
        )
        for run in now.runs
    )
    return replace(
        now,
        entries=tuple(entries),
        runs=runs,
        messages=(
            *base.messages,
            *now.messages,
            *diff_report.remarks(outcomes),
            *sentences.unused_limits(limits or (), outcomes),
        ),
        bases=base.runs,
        only_before=tuple(gone_of(entry.outcome) for entry in gone.values()),
    )


def _partners(
    base: StoredReport, now: StoredReport
) -> tuple[dict[int, Entry], dict[int, Entry]]:
    """By the place of a measurement in `now`, that in `base` of the same test with as many ranks;
    where there are several, that on the same kind of machine. And those of `base` that are left."""
    found: dict[int, Entry] = {}
    left = dict(enumerate(base.entries))
    for alike in (
        identity,
        attrgetter("test", "plan.world_size", "plan.roles"),
    ):
        places: dict[Hashable, list[int]] = {}
        for there, entry in left.items():
            places.setdefault(alike(entry.outcome), []).append(there)
        for here, entry in enumerate(now.entries):
            if here not in found and (
                of_it := places.get(alike(entry.outcome))
            ):
                found[here] = left.pop(of_it.pop(0))
    return found, left


def _with_verdict(now: Outcome, other: Entry | None, limits: Limits) -> Outcome:
    """Return a measurement with the new verdict, without traces of the comparison in its own
    run."""
    fresh = replace(
        now,
        limits=limits,
        level=now.level or times.TEST_LEVEL,
        baseline_path="",
        baseline_side=None,
        stored_verdict=None,
        saved=0,
        sessions=(),
        findings=(),
        evidence=(),
        accept="",
        notes=(),
    )
    if now.measurement is None:
        # nothing to compare: it fails as before
        return replace(fresh, verdict=None, notes=now.notes)
    fresh = replace(fresh, error="")  # of what was not saved
    if other is None or other.outcome.measurement is None:
        why = "only in the later run"
        if other:
            why = f"not measured in the earlier run: {text.shortened(other.outcome.error)}"
        return replace(
            fresh,
            verdict=Verdict(
                status=Status.NO_BASELINE, reason=Reason.NO_BASELINE
            ),
            notes=(why,),
        )
    before = Recording(
        measurement=other.outcome.measurement,
        created=other.run.created,
        commit=other.run.commit,
    )
    refused = decision.refused(
        now.measurement,
        before.measurement,
        now=now.verdict,
        then=other.outcome.verdict,
    )
    unfit = now.unfit or other.outcome.unfit
    return _judged(fresh, before, refused, unfit=unfit)


def _judged(
    now: Outcome, before: Recording, refused: Verdict | None, *, unfit: bool
) -> Outcome:
    """Return a measurement with its verdict against an earlier one, that it was `refused` if it
    was. `unfit`: in one of the two, most launches say little of steady training."""
    current, baseline = now.measured, [before.measurement]
    assert now.level is not None
    level = now.level
    verdict = refused or decision.judge(
        current, baseline, now.limits, level=level
    )
    # The gate refuses what cannot be supported before it measures, but for its own limits; here a
    # note must do.
    dropped, notes = [], []
    for each in verdict.dropped_limits:
        if each.limit.default:
            dropped.append(each)
        else:
            notes.append(f"no limit is applied to {each}")
    if unfit:
        verdict = decision.without_steady_windows(verdict)
        notes.append(
            "in one of the two runs, most launches say little of steady training: see its notes"
        )
    verdict = replace(verdict, dropped_limits=tuple(dropped))
    steps = min(current.samples.steps, before.measurement.samples.steps)
    findings, words = causes.explain(
        verdict, now.plan, current, baseline, level
    )
    return replace(
        now,
        verdict=verdict,
        notes=tuple(notes),
        sessions=(observed.in_percentiles(before, steps),),
        findings=findings,
        evidence=words,
    )


# The others are about a run, not about two.
_VERDICTS = [name for name in FAIL_ON_NAMES if name != "loosened"]
_DESCRIPTION = """\
Compares reports of pytest --ddp-json with another, test by test, with the plugin's judge: BASE
counts as a stored baseline of one session. Several NOW are one report, as the shards of a CI job
are. Two files of PyTorch's own DDP benchmark, or one and a report of --ddp-json, are shown side by
side in its form, without verdicts.
"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "diff", help="compare one run with another", description=_DESCRIPTION
    )
    parser.add_argument(
        "base", type=Path, metavar="BASE", help="the earlier report"
    )
    parser.add_argument(
        "now", type=Path, nargs="+", metavar="NOW", help="the later one"
    )
    parser.add_argument(
        "--threshold",
        type=console.read_as(parse.limits),
        metavar="LIST",
        help="how much worse a metric may get, as p10:5%%,p50:2ms (default: the tests' own limits)",
    )
    parser.add_argument(
        "--fail-on",
        type=console.read_as(partial(parse.fail_on, allowed=_VERDICTS)),
        metavar="LIST",
        help=(
            f"exactly these verdicts end with status 1: {', '.join(_VERDICTS)} (default: "
            "regressed)"
        ),
    )
    console.add_k(parser)
    console.add_path(
        parser,
        "--json",
        "write NOW with its verdicts, as --ddp-json does; ddpperf html and markdown read it",
    )
    parser.add_argument(
        "--form",
        choices=("ours", "pytorch"),
        default="ours",
        help="pytorch: the side-by-side form of PyTorch's DDP benchmark (default: ours)",
    )
    console.add_path(
        parser,
        "--write-pytorch",
        "write the suite's sweep of NOW as PyTorch's DDP benchmark writes it",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    contents = [
        (path, json_report.load(path))
        for path in (arguments.base, *arguments.now)
    ]
    if any(diff_report.is_theirs(content) for _, content in contents):
        return _theirs(arguments, contents)
    base, *several = (
        json_report.report_of(path, content) for path, content in contents
    )
    base = console.matching(base, arguments.matches)
    now = console.matching(json_report.merged(several), arguments.matches)
    compared = compare(
        base,
        now,
        arguments.threshold,
        arguments.fail_on or frozenset({"regressed"}),
    )
    if arguments.json is not None:
        before = {
            name: getattr(base.run, name)
            for name in "created version commit committed".split()
        }
        data = {
            **json_report.report(
                compared.outcomes,
                replace(compared.run, messages=compared.messages),
            ),
            "base": {"run_id": base.run.id, **before},
            "only_in_base": codec.encode(compared.only_before),
        }
        console.write(arguments.json, codec.dumps(data))
    if arguments.write_pytorch is not None:
        console.write(
            arguments.write_pytorch,
            codec.dumps(diff_report.in_form_of_pytorch(compared)),
        )
    is_compared = any(
        outcome.verdict and outcome.verdict.status.compared
        for outcome in compared.outcomes
    )
    if arguments.form == "pytorch":
        sweeps = diff_report.ours(base), diff_report.ours(now)
        console.say(diff_report.side_by_side(*sweeps))
        console.say(diff_report.summary_lines(compared))
        is_compared |= diff_report.in_common(*sweeps)
    else:
        console.say(text.wrap_for_terminal(diff_report.lines(base, compared)))
    if any(outcome.fails for outcome in compared.outcomes):
        return console.NAMED_VERDICT
    return _status(is_compared)


def _status(is_compared: bool) -> int:
    if is_compared:
        return console.OK
    console.complain("nothing was compared")
    return console.NOTHING_IN_COMMON


def _theirs(
    arguments: argparse.Namespace,
    contents: Sequence[tuple[Path, dict[str, Any]]],
) -> int:
    """Show files of PyTorch's benchmark, next to each other or to a report of ours. They hold one
    launch each, so there is no verdict."""
    for option in "threshold fail_on json write_pytorch".split():
        if getattr(arguments, option) is not None:
            name = option.replace("_", "-")
            raise console.UsageError(
                f"--{name} is only for reports of ddpperf: those of PyTorch's benchmark hold one"
                " launch"
            )
    if len(contents) > 2:
        raise console.UsageError(
            "files of PyTorch's benchmark are compared by two"
        )
    sweeps, failed = [], list[Outcome]()
    for path, content in contents:
        if diff_report.is_theirs(content):
            sweeps.append(diff_report.theirs(path, content, arguments.matches))
        else:
            report = console.matching(
                json_report.report_of(path, content), arguments.matches
            )
            sweeps.append(diff_report.ours(report))
            failed += [
                outcome
                for outcome in report.outcomes
                if outcome.measurement is None
            ]
    console.say(diff_report.side_by_side(*sweeps))
    console.say(
        f"{text.name(outcome)}: failed: {text.shortened(outcome.error)}"
        for outcome in failed
    )
    return (
        console.NAMED_VERDICT
        if failed
        else _status(diff_report.in_common(*sweeps))
    )
