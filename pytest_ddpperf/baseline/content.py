"""The file format of a baseline: text to records and back. Reads and writes no files.

A file has "schema", the version of the format, and the fields of `records.Baseline`.
"""

from __future__ import annotations

import json
from pathlib import Path

from pytest_ddpperf.records import Baseline, Samples
from pytest_ddpperf.records.codec import CodecError, decode, dumps, encode
from pytest_ddpperf.records.errors import BaselineError

SCHEMA = 1
AGAIN = "restore it with git checkout, or delete it and run with --ddp-save-baseline"


def text(baseline: Baseline) -> str:
    """Return the file of a baseline; raises CodecError."""
    return dumps({"schema": SCHEMA, **encode(baseline)})


def parse(path: Path, data: bytes) -> Baseline:
    """Return the baseline in a file; raises BaselineError, which names `path` and the place in the file."""
    if not data.strip():
        raise BaselineError(path, "the file is empty", AGAIN)
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BaselineError(path, f"is not JSON, or not all of it: {error}", AGAIN) from error
    schema = content.pop("schema", None) if isinstance(content, dict) else None
    if type(schema) is not int or schema < 1:
        raise BaselineError(path, f"is not a baseline: its schema is {schema!r}, not a version number", AGAIN)
    if schema > SCHEMA:
        problem = f"has schema {schema}; this version of pytest-ddpperf reads schema {SCHEMA}"
        raise BaselineError(path, problem, "upgrade pytest-ddpperf, or " + AGAIN)
    try:
        baseline = decode(Baseline, content)
    except CodecError as error:
        raise BaselineError(path, str(error), AGAIN) from error
    if problem := _problem(baseline):
        raise BaselineError(path, problem, AGAIN)
    return baseline


def _problem(baseline: Baseline) -> str:
    """Return what is wrong, with its place; "" if nothing is."""
    if not baseline.sessions:
        return "sessions: none"
    first = baseline.measurements[0].environment
    for number, measurement in enumerate(baseline.measurements):
        place = f"sessions[{number}].measurement"
        if measurement.samples.launches == 1:
            return f"{place}.samples.step_seconds: a single launch, with which nothing can be compared"
        if wrong := nonsense(measurement.samples):
            return f"{place}.samples.{wrong}"
        environment = measurement.environment
        if (environment.key, environment.must_match) != (first.key, first.must_match):
            return f"{place}.environment: is not that of the first session"
    return ""


def nonsense(samples: Samples) -> str:
    """Return what no measurement can have produced, with its place; "" if nothing is wrong.

    Only the group's step times must be positive. A rank's own may be 0 where it had nothing to do within the
    resolution of an accelerator's events, and so may the CPU time of one that waited.
    """
    launches, steps = len(samples.step_seconds), len(next(iter(samples.step_seconds), ()))
    if not steps:
        return "step_seconds: no steps"
    for launch, times in enumerate(samples.step_seconds):
        if len(times) != steps:
            return f"step_seconds[{launch}]: {len(times)} steps, but {steps} in the first launch"
        if min(times) <= 0:
            place = f"step_seconds[{launch}][{times.index(min(times))}]"
            return f"{place}: {min(times)!r} is not a positive duration"
    own = samples.node_seconds
    if own is not None and [len(times) for times in own] != [steps] * launches:
        return f"node_seconds: not {steps} steps of {launches} launches, as in step_seconds"
    if own is not None and min(map(min, own)) <= 0:
        return f"node_seconds: {min(map(min, own))!r} is not a positive duration"
    if len(samples.clock_seconds or (0.0,) * launches) != launches:
        return f"clock_seconds: not of {launches} launches, as in step_seconds"
    ranks = len(next(iter(samples.rank_seconds), ()))
    tables: dict[str, tuple[tuple[tuple[float, ...], ...], ...] | None] = {
        "rank_seconds": samples.rank_seconds,
        "cpu_seconds": samples.cpu_seconds,
        "examples": samples.examples,
        "blocked_seconds": samples.blocked_seconds,
    }
    for name, table in tables.items():
        if table is None:
            continue
        if len(table) != launches:
            return f"{name}: {len(table)} launches, but {launches} in step_seconds"
        for launch, rows in enumerate(table):
            if len(rows) != ranks or not ranks:
                return f"{name}[{launch}]: {len(rows)} ranks, but {ranks or 'at least one'} expected"
            for rank, row in enumerate(rows):
                if len(row) != steps:
                    return f"{name}[{launch}][{rank}]: {len(row)} steps, but {steps} in step_seconds"
                if min(row) < 0:
                    return f"{name}[{launch}][{rank}]: {min(row)!r} is negative"
    return ""
