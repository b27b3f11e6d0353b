"""What a history keeps of a run: a small file an environment, with launch percentiles and counters and no samples.

Knows what such a file holds and is called, not where it is. It is never rewritten: two branches that each add some
merge without a conflict.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from functools import lru_cache
from pathlib import Path
from typing import Any

from pytest_ddpperf.baseline.naming import environment_name
from pytest_ddpperf.records import Counters, Outcome, Run, Scalar, TestId, codec
from pytest_ddpperf.records.errors import HistoryError
from pytest_ddpperf.verdict.stats import launch_quantiles

SCHEMA = 1
METRICS = ("p10", "p50", "p90")
# With three percentiles of so many launches, and facts that no other measurement of the run shares, one stays below
# 1 KB; further launches, which a verdict that was open took, are left out.
MOST_LAUNCHES = 16
_DIGITS = 5  # significant ones: a tenth of what the quietest machine tells apart
# Of what is recorded of an environment: what may explain a step. The rest is in the run's JSON.
_RECORDED = ("python", "torch", "cuda", "hip", "nccl", "driver", "host")
_VARIABLE = "env:"
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """One measurement."""

    test: TestId
    must_match: Mapping[str, Scalar]  # with the number of steps that the percentiles are of
    recorded: Mapping[str, Scalar]
    launch_seconds: Mapping[str, Sequence[float]]  # by METRICS: of each launch
    counters: Counters
    sized: bool = False  # whether pytest's name of the test has the world size, which `test` has not


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What one run measured in one environment."""

    run: Run
    key: Mapping[str, Scalar]
    measurements: tuple[Kept, ...]
    environment: str = ""  # the folder that it is in
    file: Path = field(default=Path(), compare=False)


def unfit(run: Run) -> str:
    """Why a run has no place in a history, which is one of commits; "" where it has."""
    if not run.commit or not run.committed:
        return "what was measured is no commit of a git repository"
    if run.commit.endswith("-dirty"):
        return f"the working tree differs from commit {run.commit[:12]}: commit what is measured"
    return _wrong(run)


def _wrong(run: Run) -> str:
    """The field that is not what git and this plugin write; "" where all are. Files are named and ordered by them."""
    if not _COMMIT.fullmatch(run.commit):
        return f"commit: {run.commit!r:.80} is no hash of a commit"
    for name in ("committed", "created"):
        when = getattr(run, name)
        try:
            in_utc = datetime.fromisoformat(when).utcoffset() == timedelta(0)
        except ValueError:
            in_utc = False
        if not in_utc:
            return f"{name}: {when!r:.80} is no time in UTC, as ISO 8601 has it"
    return ""


def order(run: Run) -> tuple[str, str, str]:
    """That of commits. Many can have one second, those of a rebased branch say: they were measured in their order, if
    in any."""
    return run.committed, run.created, run.commit


def entries(outcomes: Iterable[Outcome], run: Run) -> list[Entry]:
    """One an environment, of the measurements that say how fast the commit is by itself."""
    by_key: dict[str, tuple[Mapping[str, Scalar], list[Kept]]] = {}
    for outcome in outcomes:
        if outcome.measurement is None or _is_beside_the_point(outcome):
            continue
        environment = outcome.measurement.environment
        samples = outcome.measurement.samples
        # As many as were asked for at least, the first ones: how many a window has beyond them depends on how long they
        # take, and percentiles of few steps lie elsewhere than those of many.
        steps = min(outcome.plan.steps, samples.steps)
        launches = [launch[:steps] for launch in samples.step_seconds[:MOST_LAUNCHES]]
        kept = Kept(
            test=outcome.test,
            must_match={**environment.must_match, "steps": steps},
            recorded={
                name: value
                for name, value in environment.recorded.items()
                if name in _RECORDED or name.startswith(_VARIABLE)
            },
            launch_seconds={
                metric: tuple(float(f"{q:.{_DIGITS}g}") for q in launch_quantiles(launches, float(metric[1:])))
                for metric in METRICS
            },
            counters={name: count for name, count in outcome.measurement.counters.items() if count is not None},
            sized=outcome.nodeid.partition("::")[2] != outcome.test.name,
        )
        by_key.setdefault(environment_name(environment), (environment.key, []))[1].append(kept)
    return [
        Entry(run=run, key=key, measurements=tuple(sorted(kept, key=_place)), environment=name)
        for name, (key, kept) in sorted(by_key.items())
    ]


def _is_beside_the_point(outcome: Outcome) -> bool:
    """Measured in turns with another version from the beginning, by each step once, or with what slows steps down."""
    in_turns = outcome.beside is not None and outcome.stored is None
    return in_turns or (outcome.verdict is not None and outcome.verdict.reason in ("disabled", "debugging-variable"))


def _place(kept: Kept) -> tuple[str, str, str]:
    return kept.test.module, kept.test.name, kept.test.label


def text(entry: Entry) -> str:
    """JSON of a line a measurement; facts that all of them share stand once."""
    shared = {
        name: _shared([getattr(kept, name) for kept in entry.measurements]) for name in ("must_match", "recorded")
    }
    head = {
        "schema": SCHEMA,
        "run": {
            "id": entry.run.id,
            "created": entry.run.created,
            "version": entry.run.version,
            "commit": entry.run.commit,
            "committed": entry.run.committed,
        },
        "key": dict(entry.key),
        **shared,
    }
    lines = [f"{json.dumps(name)}: {_line(value)},\n" for name, value in head.items()]
    rows = (_line(_row(kept, shared)) for kept in entry.measurements)
    return "{\n" + "".join(lines) + '"measurements": [\n' + ",\n".join(rows) + "\n]\n}\n"


def _shared(facts: Sequence[Mapping[str, Scalar]]) -> dict[str, Scalar]:
    first = facts[0] if facts else {}
    return {name: value for name, value in first.items() if all(name in each and each[name] == value for each in facts)}


def _row(kept: Kept, shared: Mapping[str, Mapping[str, Scalar]]) -> dict[str, Any]:
    test = {"module": kept.test.module, "name": kept.test.name, "label": kept.test.label}
    row: dict[str, Any] = {"test": {name: value for name, value in test.items() if value}}
    row["launch_seconds"] = kept.launch_seconds
    row["counters"] = kept.counters
    row["sized"] = kept.sized
    for name in ("must_match", "recorded"):
        row[name] = {fact: value for fact, value in getattr(kept, name).items() if fact not in shared[name]}
    return {name: value for name, value in row.items() if value}


def _line(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def file_name(entry: Entry, content: str) -> str:
    """`20260102T030405Z-89b609e12345-1f2e3d4c.json`: names in the order of commits, and no two runs share one."""
    committed = datetime.fromisoformat(entry.run.committed).astimezone(timezone.utc)
    digest = hashlib.sha256(content.encode()).hexdigest()[:8]
    return f"{committed:%Y%m%dT%H%M%SZ}-{entry.run.commit[:12]}-{digest}.json"


def parse(path: Path, data: bytes) -> Entry:
    """What `text` wrote; raises HistoryError, which names `path`."""
    try:
        content = json.loads(data)
        if not isinstance(content, dict) or type(content.get("schema")) is not int:
            raise HistoryError(path, "is no file of a history: it has no schema")
        if content["schema"] > SCHEMA:
            problem = f"has schema {content['schema']}; this version of pytest-ddpperf reads up to {SCHEMA}: upgrade it"
            raise HistoryError(path, problem)
        run = codec.decode(Run, content["run"], of_another_version=True)
        if wrong := _wrong(run):
            raise HistoryError(path, f"run.{wrong}")
        shared = content["must_match"], content["recorded"]
        return Entry(
            run=run,
            key=dict(content["key"]),
            measurements=tuple(_read(path, content["measurements"], *shared)),
            environment=path.parent.name,
            file=path,
        )
    except KeyError as error:
        raise HistoryError(path, f"lacks {error}") from error
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise HistoryError(path, f"is no file of a history, or not all of it: {error}") from error


def _read(
    path: Path, rows: list[Any], must_match: Mapping[str, Scalar], recorded: Mapping[str, Scalar]
) -> Iterator[Kept]:
    """By hand, for there are a hundred thousand of them."""
    for row in rows:
        of = row["test"]
        test = _test(of["module"], of["name"], of.get("label", ""))
        for metric in METRICS:
            seconds = row["launch_seconds"][metric]
            if not (seconds and min(seconds) > 0 and sum(seconds) < math.inf):  # neither holds of NaN
                raise HistoryError(path, f"{test}: launch_seconds.{metric} are no durations: {seconds}")
        yield Kept(
            test=test,
            must_match={**must_match, **row["must_match"]} if "must_match" in row else must_match,
            recorded={**recorded, **row["recorded"]} if "recorded" in row else recorded,
            launch_seconds=row["launch_seconds"],
            counters=row.get("counters", {}),
            sized=row.get("sized", False),
        )


@lru_cache(maxsize=10_000)
def _test(module: str, name: str, label: str) -> TestId:
    """The same object for the same test: a history names few tests, many times."""
    return TestId(module=module, name=name, label=label)
