"""`ddpperf doctor`: what this machine can run, how steady it is, and what would make it steadier."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from pytest_ddpperf import __version__
from pytest_ddpperf.cli import asked, console
from pytest_ddpperf.records import codec
from pytest_ddpperf.records.doctor import Diagnosis
from pytest_ddpperf.records.errors import OptionError

_SCHEMA = 1
_REDRAW_SECONDS = 0.25
_TOLD_SECONDS = 10.0  # a wait beyond that is told where there is no line to redraw


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "doctor",
        help="tell what this machine can run, how steady it is and what to change",
        description="Tell what this machine can run, measure for two minutes at most how far launches of the same code "
        "differ here, and say what is the smallest slowdown that a gate can tell, and what to change for steadier "
        "results. What it finds is no error: it ends with 0.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--world-size",
        type=asked.positive,
        default=2,
        metavar="N",
        help="ranks to measure with, as --ddp-world-size (default: 2)",
    )
    parser.add_argument(
        "--backend", default="auto", metavar="NAME", help="over which, as --ddp-backend (default: auto)"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="all of it as JSON, too")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from pytest_ddpperf import options
    from pytest_ddpperf.doctor.visit import Visit, diagnosis
    from pytest_ddpperf.report import doctor as words

    watch = Watch()
    try:
        settings = options.without_pytest(world_sizes=str(arguments.world_size), backend=arguments.backend)
        with Visit(settings) as visit:
            survey = visit.survey()
            console.say(words.about(survey))
            try:
                noise = visit.measure(survey, watch, watch.told)
            finally:
                watch.erase()
    except OptionError as error:  # by the name that it has here
        raise OptionError(error.where.replace("--ddp-", "--"), error.value, error.allowed) from None
    found = diagnosis(survey, noise)
    console.say(words.rest(found))
    if arguments.json is not None:
        console.write(arguments.json, codec.dumps(_data(found)))
    return console.OK


def _data(found: Diagnosis) -> dict[str, Any]:
    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {"schema": _SCHEMA, "created": created, "version": __version__, **codec.encode(found)}


class Watch:
    """Shows on a terminal how far the measurement is; elsewhere only that it waits for long."""

    streams = False

    def __init__(self) -> None:
        self._live = sys.stderr is not None and sys.stderr.isatty()
        self._done, self._of = 0, 0
        self._began = time.monotonic()
        self._drawn = 0.0
        self._waits_since = 0.0

    def told(self, done: int, of: int) -> None:
        self._done, self._of, self._waits_since = done, of, 0.0

    def waiting(self, resource: Path) -> None:
        from pytest_ddpperf.launch import locks
        from pytest_ddpperf.report import progress

        now = time.monotonic()
        self._waits_since = self._waits_since or now
        due = self._drawn + _REDRAW_SECONDS if self._live else max(self._drawn, self._waits_since) + _TOLD_SECONDS
        if now >= due:
            self._draw(progress.waiting(resource.name, locks.holder(resource), now - self._waits_since))

    def progress(self, phase: object, step: int, steps: int, marks_ns: Sequence[int]) -> None:
        from pytest_ddpperf.report import progress

        now = time.monotonic()
        if self._live and now - self._drawn >= _REDRAW_SECONDS:
            self._draw(progress.bar(self._done, self._of, now - self._began))

    def output(self, name: str, stream: str, line: str) -> None:
        pass

    def erase(self) -> None:
        if self._live and self._drawn:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def _draw(self, line: str) -> None:
        self._drawn = time.monotonic()
        if self._live:
            print(f"\r{line}\x1b[K", end="", file=sys.stderr, flush=True)
        else:
            console.complain(line)
