"""What a baseline's file holds: text to records and back, whole and sane or not at all. Reads and writes no files.

History of the format ("schema" in every file; a reader stays for every version that was ever released):

1   schema, test, created, commit, measurement = environment (key, must_match, recorded) and samples
    (step_seconds, rank_seconds, cpu_seconds, examples), as in `records`.
2   schema, test, sessions = a list of (created, commit, measurement as before, resolution by metric), oldest first.
3   a measurement has counters, its samples have blocked_seconds.
4   a session has files and distributions: whose code it is.
5   samples have node_seconds and clock_seconds. Those of one node have neither, and are written as 4: nothing is new.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pytest_ddpperf.records import Baseline, Samples
from pytest_ddpperf.records.codec import CodecError, decode, dumps, encode
from pytest_ddpperf.records.errors import BaselineError

SCHEMA = 5
_OF_NODES = ("node_seconds", "clock_seconds")
AGAIN = "restore it with git checkout, or delete it and run with --ddp-save-baseline"


def text(baseline: Baseline) -> str:
    """The file of a baseline; raises CodecError."""
    content: dict[str, Any] = encode(baseline)
    if any(measurement.samples.node_seconds is not None for measurement in baseline.measurements):
        return dumps({"schema": SCHEMA, **content})
    for session in content["sessions"]:
        for name in _OF_NODES:
            del session["measurement"]["samples"][name]
    return dumps({"schema": SCHEMA - 1, **content})


def parse(path: Path, data: bytes) -> Baseline:
    """The baseline in a file; raises BaselineError, which names `path` and the place in the file."""
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
        problem = f"has schema {schema}; this version of pytest-ddpperf reads up to {SCHEMA}"
        raise BaselineError(path, problem, "upgrade pytest-ddpperf, or " + AGAIN)
    try:
        for version in range(schema, SCHEMA):
            content = _TO_NEXT[version](content)
        baseline = decode(Baseline, content)
    except CodecError as error:
        raise BaselineError(path, str(error), AGAIN) from error
    if problem := _problem(baseline):
        raise BaselineError(path, problem, AGAIN)
    return baseline


def _from_schema_1(content: Mapping[str, Any]) -> dict[str, Any]:
    session = {name: value for name, value in content.items() if name != "test"}
    rest = {name: value for name, value in content.items() if name == "test"}
    return {**rest, "sessions": [{**session, "resolution": {}}]}


def _from_schema_2(content: Mapping[str, Any]) -> dict[str, Any]:
    def session(old: Any) -> Any:
        samples = {**old["measurement"]["samples"], "blocked_seconds": None}
        return {**old, "measurement": {**old["measurement"], "samples": samples, "counters": {}}}

    return _with_sessions(content, session)


def _from_schema_3(content: Mapping[str, Any]) -> dict[str, Any]:
    return _with_sessions(content, lambda old: {**old, "files": {}, "distributions": {}})


def _from_schema_4(content: Mapping[str, Any]) -> dict[str, Any]:
    def session(old: Any) -> Any:
        samples = {**old["measurement"]["samples"], **dict.fromkeys(_OF_NODES)}
        return {**old, "measurement": {**old["measurement"], "samples": samples}}

    return _with_sessions(content, session)


def _with_sessions(content: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """What is not as it should be is left to `decode`, which says where."""

    def changed(old: Any) -> Any:
        try:
            return change(old)
        except (KeyError, TypeError):
            return old

    sessions = content.get("sessions")
    return {**content, "sessions": list(map(changed, sessions))} if isinstance(sessions, list) else dict(content)


_TO_NEXT = {1: _from_schema_1, 2: _from_schema_2, 3: _from_schema_3, 4: _from_schema_4}


def _problem(baseline: Baseline) -> str:
    """What makes no sense, with its place; "" where all is well."""
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
    """What no measurement can have brought forth, with its place; "" where all is well.

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
