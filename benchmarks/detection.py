"""Error rates of gates on recorded noise: ours beside the rules that other tools use, on the same
data.

    python benchmarks/detection.py --traces DIR [--json OUT]
    python benchmarks/detection.py --traces DIR --metrics p25 --assume 0.05,0.5,6
    python benchmarks/detection.py --traces DIR --suspect 0.5
    python benchmarks/detection.py --traces DIR --scopes across,history
    python benchmarks/detection.py --pairs FILE [--trim 0]

--metrics and --assume: what another choice would do. --suspect: what is beyond that share of its
limit. --pairs: interleaved launches, as benchmarks/turns.py recorded them.

Replays recordings (benchmarks/_traces.py says of which form) through the plugin's own `judge` and
its looks, and counts how often a test would have been called regressed: where nothing was injected
these are false alarms, where a slowdown was injected they are detections.

The protocol, fixed beforehand. Only `pinned` recordings; the two sides of a trial share no launch.
"within": both sides from one session, in alternation, identical code at most half of its launches a
side. "across": the baseline is one other session. "history": the baseline is all other sessions, at
least two. "ddpperf, confirmed" is what a run says that has the baseline's own code: a suspicion is
compared with launches of that code in the session at hand, interleaved. Every ordered choice of
sessions is used equally often, where a side begins among a session's launches is drawn with a fixed
seed, and every cell has at least 200 trials. "stretches" and "apart": pairs of one cell of the file
in an order that is drawn anew for each trial, their sides swapped by chance where the code is the
same. "modes": 30 % of the launches of neither side, of both, or of the current one are 25 % slower;
"pairs" are launches of two sessions, each with the one that followed it.

Intervals are of 95 %, by resampling sessions: trials of one session are not independent.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from _common import progress, table
from _traces import Launch, Pairs, Workload, measurement, read, read_pairs

from pytest_ddpperf.compare.rule import (
    Spending,
    ends,
    schedule,
    spending,
)
from pytest_ddpperf.records.plan import Limit
from pytest_ddpperf.records.samples import Verdict
from pytest_ddpperf.verdict import times as observations
from pytest_ddpperf.verdict.decision import confirm, is_suspected, judge
from pytest_ddpperf.verdict.stats import Drift
from pytest_ddpperf.verdict.times import ASSUMED_DRIFT, TEST_LEVEL

LEAST_TRIALS = 200
FIRST_LOOK = 5  # the default of --ddp-launches
MOST_LAUNCHES = (10, 20)
LIMITS = {"default": 0.10, "5%": 0.05}
PAIRED_LIMITS = {"5%": 0.05, "3%": 0.03}
# the default of --ddp-threshold; with a value, whatever the limit is
METRICS = ("p10", "p50", "mean:0.25")
SEED = 20261121
RESAMPLES = 200
SESSION_RESAMPLES = 400
# how many launches are slow, by how much, and on which sides
SLOW_SHARE, SLOWER = 0.3, 1.25
SLOW_SIDES = ("none", "both", "now")

Side = list[Launch]
Rules = dict[str, Callable[["Trial", float, str], str]]


@dataclass(frozen=True, eq=False)
class Trial:
    """What one gate is given; under "within" launch k of both sides were taken one after the
    other."""

    now: Side
    sessions: list[Side]
    drawn_from: tuple[Any, ...] = ()  # the sessions that make it one of many
    # by launch, where both sides took turns within it
    stretches: Sequence[Sequence[int]] = ()
    # Launches of both versions in the session of `now`, which a suspicion is compared by.
    today: tuple[Side, Side] | None = None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--traces", type=Path, metavar="DIR")
    given.add_argument("--pairs", type=Path, metavar="FILE")
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument(
        "--metrics",
        help="ours with limits on these metrics instead of "
        + ",".join(METRICS),
    )
    parser.add_argument(
        "--sessions",
        type=int,
        help="ours with baselines of so many sessions under history",
    )
    parser.add_argument(
        "--assume",
        metavar="FLOOR,SHARE,FREEDOM[,USUAL,STEEP]",
        help="ours with another assumption about drift",
    )
    parser.add_argument(
        "--trim",
        type=float,
        help="the share of pairs left out at either end where stretches count",
    )
    parser.add_argument(
        "--suspect",
        type=float,
        metavar="SHARE",
        help="count what is suspected, not what is regressed",
    )
    parser.add_argument(
        "--scopes",
        type=lambda text: text.split(","),
        default=[scope for scope in SCOPES if scope not in PAIRED],
    )
    options = parser.parse_args()
    if options.trim is not None:
        # where it is used; `observed` defines it
        observations.TRIM = options.trim  # type: ignore[attr-defined]
    rules, others = (
        dict(RULES),
        [
            name
            for name in ("metrics", "assume", "sessions")
            if getattr(options, name)
        ],
    )
    if others:
        metrics = tuple((options.metrics or ",".join(METRICS)).split(","))
        drift = (
            Drift(*map(float, options.assume.split(",")))
            if options.assume
            else ASSUMED_DRIFT
        )
        rules = {
            "ddpperf": partial(ddpperf, metrics=metrics, drift=drift),
            CONFIRMED: partial(confirmed, metrics=metrics, drift=drift),
        }
    if options.suspect is not None:
        rules = {"ddpperf": partial(suspicion, share=options.suspect)}
    began = time.monotonic()
    tasks: list[tuple[Any, ...]]
    if options.pairs is not None:
        rules = {"ddpperf": rules["ddpperf"]}
        tasks = [
            (pairs, pairs.way, max(MOST_LAUNCHES), rules, None)
            for pairs in read_pairs(options.pairs)
        ]
    else:
        tasks = [
            (w, scope, launches, rules, options.sessions)
            for w in read(options.traces)
            for launches in reversed(MOST_LAUNCHES)
            for scope in options.scopes
        ]
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        futures = [pool.submit(cells, *task) for task in tasks]
        for done, future in enumerate(as_completed(futures), 1):
            rows += future.result()
            progress(done, len(futures), "detection")
    rows.sort(
        key=lambda row: [
            str(row[name])
            for name in ("scope", "limit", "rule", "workload", "world_size")
        ]
    )
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    for scope in dict.fromkeys(task[1] for task in tasks):
        for limit in limits_of(scope):
            report(
                [
                    row
                    for row in rows
                    if row["scope"] == scope and row["limit"] == limit
                ],
                list(rules),
                scope,
                limit,
            )
    print(
        f"\n{sum(row['trials'] for row in rows)} trials in {time.monotonic() - began:.0f} s"
    )
    return 0


def limits_of(scope: str) -> dict[str, float]:
    return PAIRED_LIMITS if scope.partition(", ")[0] in PAIRED else LIMITS


def is_interleaved(scope: str) -> bool:
    return scope == "within" or scope.partition(", ")[0] in INTERLEAVED


def cells(
    workload: Any, scope: str, launches: int, rules: Rules, sessions: int | None
) -> list[dict[str, Any]]:
    """All rules and limits on one workload, scope and number of launches."""
    rows = []
    of_modes = scope.startswith("modes")
    if of_modes:
        rules = {"ddpperf": rules["ddpperf"]}
    levels: Sequence[Any] = (
        SLOW_SIDES if of_modes else sorted(workload.injected)
    )
    for injected in levels:
        source = random.Random(f"{SEED} {scope} {workload}")
        trials = list(
            SCOPES[scope.partition(", ")[0]](
                workload, 0.0 if of_modes else injected, launches, source
            )
        )
        if of_modes:
            trials = [with_modes(trial, injected, source) for trial in trials]
        if sessions is not None and scope == "history":
            source = random.Random(SEED)
            trials = [
                Trial(trial.now, source.sample(trial.sessions, sessions))
                for trial in trials
            ]
        for name, rule in rules.items():
            if name == CONFIRMED and scope not in STORED:
                continue
            for limit, value in limits_of(scope).items():
                said = [rule(trial, value, scope) for trial in trials]
                rows.append(
                    {
                        "rule": name,
                        "scope": scope,
                        "limit": limit,
                        "launches": launches,
                        "injected": injected,
                        "workload": workload.name,
                        "world_size": workload.world_size,
                        "trials": len(said),
                        "flagged": said.count("REGRESSED"),
                        "inconclusive": said.count("INCONCLUSIVE"),
                        "by_sessions": by_sessions(trials, said),
                    }
                )
    return rows


def by_sessions(
    trials: Sequence[Trial], said: Sequence[str]
) -> list[tuple[tuple[str, ...], int, int]]:
    """By the sessions that trials were drawn from: how many were flagged, of how many."""
    found: dict[tuple[str, ...], list[str]] = {}
    for trial, status in zip(trials, said, strict=True):
        names = tuple(map(str, trial.drawn_from))
        found.setdefault(names, []).append(status)
    return [
        (names, statuses.count("REGRESSED"), len(statuses))
        for names, statuses in found.items()
    ]


# --- trials


def within(
    workload: Workload, injected: float, most: int, source: random.Random
) -> Iterator[Trial]:
    sessions = {
        name: session
        for name, session in workload.sessions.items()
        if injected in session and 0.0 in session
    }
    for _ in range(math.ceil(LEAST_TRIALS / max(1, len(sessions)))):
        for name, session in sessions.items():
            now, base = of_one_session(session, injected, most, source)
            yield Trial(now, [base], (name,))


def of_one_session(
    session: dict[float, Side],
    injected: float,
    most: int,
    source: random.Random,
) -> tuple[Side, Side]:
    same = session[0.0]
    start = source.randrange(len(same))
    if injected != 0:
        slow = turned(session[injected], start)[:most]
        return slow, turned(same, start)[:most]
    pair = [
        turned(same, start)[side::2][: min(most, len(same) // 2)]
        for side in (0, 1)
    ]
    source.shuffle(pair)
    now, base = pair
    return now[: len(base)], base[: len(now)]


def across(
    workload: Workload, injected: float, most: int, source: random.Random
) -> Iterator[Trial]:
    sessions = {
        name: session
        for name, session in workload.sessions.items()
        if 0.0 in session
    }
    pairs = [
        (now, base)
        for now in sessions
        for base in sessions
        if now != base and injected in sessions[now]
    ]
    later = random.Random(SEED)
    for _ in range(math.ceil(LEAST_TRIALS / max(1, len(pairs)))):
        for now, base in pairs:
            yield Trial(
                drawn(sessions[now][injected], most, source),
                [drawn(sessions[base][0.0], most, source)],
                (now, base),
                today=of_one_session(sessions[now], injected, most, later),
            )


def history(
    workload: Workload, injected: float, most: int, source: random.Random
) -> Iterator[Trial]:
    sessions = {
        name: session
        for name, session in workload.sessions.items()
        if 0.0 in session
    }
    chosen = [name for name, session in sessions.items() if injected in session]
    if len(sessions) < 3:
        return
    later = random.Random(SEED)
    for _ in range(math.ceil(LEAST_TRIALS / max(1, len(chosen)))):
        for now in chosen:
            others = [
                drawn(session[0.0], most, source)
                for name, session in sessions.items()
                if name != now
            ]
            yield Trial(
                drawn(sessions[now][injected], most, source),
                others,
                (now,),
                today=of_one_session(sessions[now], injected, most, later),
            )


def turned(launches: Side, start: int) -> Side:
    return launches[start:] + launches[:start]


def drawn(launches: Side, most: int, source: random.Random) -> Side:
    return turned(launches, source.randrange(len(launches)))[:most]


def paired(
    workload: Pairs, injected: float, most: int, source: random.Random
) -> Iterator[Trial]:
    pairs = workload.pairs[injected]
    for _ in range(LEAST_TRIALS):
        drawn = source.sample(pairs, min(most, len(pairs)))
        sides = [
            source.sample((now, base), 2) if injected == 0 else [now, base]
            for now, base, _ in drawn
        ]
        now, base = ([side[which] for side in sides] for which in (0, 1))
        stretches = [lengths for _, _, lengths in drawn]
        yield Trial(now, [base], stretches=stretches)


def of_two_sessions(
    workload: Workload, injected: float, most: int, source: random.Random
) -> Iterator[Trial]:
    """Pairs of launches that follow each other, as one session has too few of them."""
    pairs = {
        name: list(zip(session[0.0][::2], session[0.0][1::2], strict=False))
        for name, session in workload.sessions.items()
        if 0.0 in session
    }
    names = [(one, other) for one in pairs for other in pairs if one != other]
    for _ in range(math.ceil(LEAST_TRIALS / max(1, len(names)))):
        for one, other in names:
            chosen = [*pairs[one], *pairs[other]]
            source.shuffle(chosen)
            sides = [source.sample(pair, 2) for pair in chosen[:most]]
            now, base = ([pair[which] for pair in sides] for which in (0, 1))
            yield Trial(now, [base], (one, other))


def with_modes(trial: Trial, slow: str, source: random.Random) -> Trial:
    """The trial with a share of slow launches on some sides."""
    now, sessions = trial.now, trial.sessions
    if slow in ("both", "now"):
        now = partly_slow(now, source)
    if slow == "both":
        sessions = [partly_slow(session, source) for session in sessions]
    return Trial(now, sessions, trial.drawn_from)


def partly_slow(launches: Side, source: random.Random) -> Side:
    return [
        slower(launch) if source.random() < SLOW_SHARE else launch
        for launch in launches
    ]


def slower(launch: Launch) -> Launch:
    own, group = launch
    return (
        tuple(tuple(SLOWER * step for step in rank) for rank in own),
        tuple(SLOWER * step for step in group),
    )


SCOPES: dict[
    str, Callable[[Any, float, int, random.Random], Iterator[Trial]]
] = {
    "within": within,
    "across": across,
    "history": history,
    "modes pairs": of_two_sessions,
    "modes across": across,
    "modes history": history,
    "stretches": paired,
    "apart": paired,
}
PAIRED = ("stretches", "apart")
INTERLEAVED = (*PAIRED, "modes pairs")
STORED = ("across", "history")


# --- rules


def ddpperf(
    trial: Trial,
    limit: float,
    scope: str,
    metrics: Sequence[str] = METRICS,
    drift: Drift = ASSUMED_DRIFT,
) -> str:
    """The plugin: a first look at 5 launches and further ones up to the most, a baseline of the
    most."""
    return str(judged(trial, limit, scope, metrics, drift))


CONFIRMED = "ddpperf, confirmed"


def confirmed(
    trial: Trial,
    limit: float,
    scope: str,
    metrics: Sequence[str] = METRICS,
    drift: Drift = ASSUMED_DRIFT,
) -> str:
    """The plugin where the baseline's own code is there: it measures what is suspected again, and
    that code with it."""
    stored = judged(trial, limit, scope, metrics, drift)
    if trial.today is None or not is_suspected(stored):
        return str(stored)
    now, base = trial.today
    found = judged(Trial(now, [base]), limit, "within", metrics, drift)
    return str(confirm(stored, found, ()) or stored)


def suspicion(trial: Trial, limit: float, scope: str, *, share: float) -> str:
    """Whether the plugin would measure the baseline's own code beside the code at hand."""
    return (
        "REGRESSED"
        if is_suspected(
            judged(trial, limit, scope, METRICS, ASSUMED_DRIFT), share
        )
        else "PASS"
    )


def judged(
    trial: Trial, limit: float, scope: str, metrics: Sequence[str], drift: Drift
) -> Verdict:
    named = (metric.partition(":") for metric in metrics)
    limits = tuple(
        Limit(
            metric=name,
            value=float(value or limit),
            unit="%",
            default=bool(value),
        )
        for name, _, value in named
    )
    interleaved = is_interleaved(scope)
    stored = [measurement(session) for session in trial.sessions]

    def verdict(launches: int, spends: Spending) -> Verdict:
        return judge(
            measurement(trial.now[:launches]),
            [measurement(trial.sessions[0][:launches])]
            if interleaved
            else stored,
            limits,
            level=spends.level,
            share=spends.share,
            interleaved=interleaved,
            stretches=trial.stretches[:launches],
            assumed=drift,
        )

    looks = schedule(min(FIRST_LOOK, len(trial.now) // 2), len(trial.now))
    for look in looks:
        said = verdict(look, spending(look, looks, TEST_LEVEL))
        if ends(said):
            break
    return said


def steps(launches: Sequence[Launch]) -> list[float]:
    return [step for _, group in launches for step in group]


def both(trial: Trial) -> tuple[list[float], list[float]]:
    return steps(trial.now), [
        step for session in trial.sessions for step in steps(session)
    ]


def ratio_rule(
    trial: Trial,
    limit: float,
    scope: str,
    *,
    of: Callable[[Sequence[float]], float],
    tolerance: float | None = None,
) -> str:
    """Regressed where a summary of all steps rose by more than the limit, or by default a tolerance
    of the tool's."""
    now, base = both(trial)
    own = (
        tolerance
        if tolerance is not None and limit == LIMITS["default"]
        else limit
    )
    return "REGRESSED" if of(now) > of(base) * (1 + own) else "PASS"


def mann_whitney(trial: Trial, limit: float, scope: str) -> str:
    """Regressed where the steps are larger than the baseline's times 1 + limit, one-sided, at 5
    %."""
    now, base = both(trial)
    base = [step * (1 + limit) for step in base]
    order = sorted([(step, 1) for step in now] + [(step, 0) for step in base])
    rank_sum = math.fsum(
        rank for rank, (_, side) in enumerate(order, 1) if side
    )
    above = rank_sum - len(now) * (len(now) + 1) / 2
    mean = len(now) * len(base) / 2
    deviation = math.sqrt(mean * (len(now) + len(base) + 1) / 6)
    return (
        "REGRESSED"
        if (above - mean) / deviation > statistics.NormalDist().inv_cdf(0.95)
        else "PASS"
    )


def criterion(trial: Trial, limit: float, scope: str) -> str:
    """Regressed where the 95 % bootstrap interval of the change of the mean step lies above the
    noise threshold."""
    return "REGRESSED" if bootstrapped(trial) > limit else "PASS"


@lru_cache(2 * LEAST_TRIALS)
def bootstrapped(trial: Trial) -> float:
    """The lower end of the interval; criterion itself draws more resamples, which moves it by
    little."""
    import numpy as np

    generator = np.random.default_rng(SEED)
    means = []
    for side in both(trial):
        values = np.asarray(side)
        means.append(
            values[
                generator.integers(
                    0,
                    len(values),
                    size=(RESAMPLES, len(values)),
                    dtype=np.uint16,
                )
            ].mean(axis=1)
        )
    return float(np.quantile(means[0] / means[1] - 1, 0.025))


RULES: Rules = {
    "ddpperf": ddpperf,
    CONFIRMED: confirmed,
    "pytest-benchmark median": partial(ratio_rule, of=statistics.median),
    "ratio of minima": partial(ratio_rule, of=min),
    "Megatron": partial(ratio_rule, of=statistics.fmean, tolerance=0.05),
    "Mann-Whitney, pooled": mann_whitney,
    "criterion bootstrap": criterion,
}


# --- the table


def report(
    rows: list[dict[str, Any]], rules: list[str], scope: str, limit: str
) -> None:
    """Rates by rule, over all workloads, at the most launches; ours by workload too."""
    rows = [row for row in rows if row["launches"] == max(MOST_LAUNCHES)]
    if not any(row["trials"] for row in rows):
        print(f"\n{scope}, limit {limit}: no trials (too few sessions)")
        return
    slowdowns = sorted({row["injected"] for row in rows})
    lines = [
        [
            "rule",
            "workload",
            *map(titled, slowdowns),
        ]
    ]
    for name in rules:
        lines.append(
            [
                name,
                "all",
                *(
                    rate([row for row in rows if row["rule"] == name], s)
                    for s in slowdowns
                ),
            ]
        )
    for workload, size in sorted(
        {(row["workload"], row["world_size"]) for row in rows}
    ):
        own = [
            row
            for row in rows
            if (row["rule"], row["workload"], row["world_size"])
            == ("ddpperf", workload, size)
        ]
        lines.append(
            [
                "ddpperf",
                f"{workload} x {size}",
                *(rate(own, s) for s in slowdowns),
            ]
        )
    print(
        f"\n{scope}, limit {limit}, at most {max(MOST_LAUNCHES)} launches a side: flagged"
        " [95 % interval] (inconclusive)"
    )
    print(table(lines))


def titled(injected: float | str) -> str:
    if isinstance(injected, str):
        return f"slow launches: {injected}"
    return f"+{injected:.0%}" if injected else "false alarms"


def session_interval(rows: list[dict[str, Any]]) -> str:
    """The 95 % interval of the rate that is flagged, by drawing sessions anew: " [0.0, 1.2]"."""
    groups = [group for row in rows for group in row["by_sessions"]]
    names = sorted({name for group in groups for name in group[0]})
    source = random.Random(SEED)
    found = []
    for _ in range(SESSION_RESAMPLES if names else 0):
        times = Counter(source.choices(names, k=len(names)))
        weights = [
            math.prod(times[name] for name in drawn) for drawn, _, _ in groups
        ]
        trials = sum(
            weight * count
            for weight, (_, _, count) in zip(weights, groups, strict=True)
        )
        flagged = sum(
            weight * count
            for weight, (_, count, _) in zip(weights, groups, strict=True)
        )
        if trials:
            found.append(100 * flagged / trials)
    if not found:
        return ""
    ends = statistics.quantiles(found, n=40)
    return f" [{ends[0]:.1f}, {ends[-1]:.1f}]"


def rate(rows: list[dict[str, Any]], injected: float | str) -> str:
    chosen = [row for row in rows if row["injected"] == injected]
    trials = sum(row["trials"] for row in chosen)
    if not trials:
        return "-"
    flagged = sum(row["flagged"] for row in chosen) / trials
    inconclusive = sum(row["inconclusive"] for row in chosen) / trials
    shown = f"{flagged:.1%}{session_interval(chosen)}"
    return shown + (f" ({inconclusive:.0%})" if inconclusive else "")


if __name__ == "__main__":
    sys.exit(main())
