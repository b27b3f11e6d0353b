"""Command line + ini + marker -> one frozen Settings; nothing else reads pytest's config.

Knows what may be asked, not what this machine has: whether a backend or a device exists,
`plugin.place` finds out.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pytest_ddpperf.options import parse
from pytest_ddpperf.options.definitions import BY_ARGUMENT, MARKER, ROWS, Row
from pytest_ddpperf.records.errors import MarkerError, OptionError
from pytest_ddpperf.records.plan import Limits, Plan
from pytest_ddpperf.records.record import record

if TYPE_CHECKING:
    import pytest


@record
class Settings:
    """The settings of a run or, with its markers, of one test."""

    world_sizes: tuple[int, ...]
    # None: as many as there are, or one where that has ranks enough
    nodes: int | None
    trainers: int  # of an RPC launch
    parameter_servers: int
    backend: str  # "auto" or a torch backend
    device: str  # "auto" or a device type
    warmup: int  # steps, at least
    steps: int  # timed, a launch, at least
    # of a launch's timed steps, about; 0 for exactly `steps`
    min_seconds: float
    launches: int  # before the first look
    max_launches: int  # at least `launches`
    limits: Limits
    timing: Literal["auto", "free", "step"]
    turns: Literal["auto", "stretches", "launches"]
    timeout_seconds: float  # for one launch
    preload: tuple[str, ...]  # modules
    baseline_dir: Path  # absolute
    baseline_missing: Literal["warn", "fail"]
    # None: the verdict and `baseline_missing` decide
    fail_on: frozenset[str] | None
    # of a run, to re-measure suspicions next to the baseline's code; 0: never
    confirm_seconds: float
    save_baseline: bool
    extend_baseline: bool
    why: str | None  # baselines are saved
    against: str | None  # a git ref, or "self"
    against_setup: str | None  # a shell command
    against_python: str | None  # a path
    against_env: tuple[str, ...] | None  # "NAME=VALUE"
    against_option: tuple[str, ...] | None
    disable: bool
    # the suite's own, which reads it by pytest's words
    suite_size: Literal["auto", "tiny", "small", "full"]
    suite_bucket_mb: int
    suite_plots: Path | None  # absolute
    trace_dir: Path | None  # absolute
    json_path: Path | None  # absolute
    history_dir: Path | None  # absolute
    markdown_path: Path | None  # absolute
    html_path: Path | None  # absolute
    # name of a field -> a marker's, "command line", "ini" or "default"
    sources: Mapping[str, str]

    @property
    def records(self) -> str:
        """Return the option that makes this run write baselines; "" for none."""
        if self.save_baseline:
            return "--ddp-save-baseline"
        return "--ddp-extend-baseline" if self.extend_baseline else ""

    def in_stretches(self, plan: Plan) -> bool:
        """Say whether launches of both sides are interleaved while both are alive, which needs all
        ranks on one node."""
        return plan.nodes == 1 and self.wants_stretches(plan)

    def wants_stretches(self, plan: Plan) -> bool:
        """Say whether they would be, however many nodes there are."""
        # Rates that a program computes by the clock would count its pauses.
        if plan.rpc or self.disable or plan.figures or plan.command:
            return False
        if self.turns == "auto":
            return plan.device == "cpu"
        return self.turns == "stretches"

    @property
    def comparison_option(self) -> str:
        """Return the option that compares with another version in this run; "" for none."""
        return next(
            (option for field, option in _COMPARISONS if getattr(self, field)),
            "",
        )


_COMPARISONS = (
    ("against", "--ddp-against"),
    ("against_python", "--ddp-against-python"),
    ("against_env", "--ddp-against-env"),
    ("against_option", "--ddp-against-option"),
)


def read_settings(config: pytest.Config) -> Settings:
    """Return the settings of a run; raises OptionError."""
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for row in ROWS:
        value, source = _written(config, row)
        if value is not None:
            value = _parsed(row, value, source)
            if row.parser in ("file", "folder"):
                value = _resolved(config, row, value, source)
        values[row.field], sources[row.field] = value, source
    # dropped if the asked steps and launches cannot support them
    if sources["limits"] == "default":
        values["limits"] = tuple(
            replace(limit, default=True) for limit in values["limits"]
        )
    if values["baseline_missing"] == "auto":
        values["baseline_missing"] = "fail" if os.environ.get("CI") else "warn"
    settings = Settings(**values, sources=sources)
    _check_contradictions(settings)
    return _checked(settings)


def _resolved(config: pytest.Config, row: Row, value: str, source: str) -> Path:
    """Return an absolute path: on the command line relative to the current directory, elsewhere to
    rootdir."""
    anchor = config.rootpath
    if source == "command line":
        anchor = config.invocation_params.dir
    path = Path(os.path.abspath(anchor / value))
    # other problems of a path are noted when it is written
    problem = ""
    if row.parser == "file" and os.path.isdir(path):
        problem = "is a folder: name the file to write"
    if row.parser == "folder" and os.path.isfile(path):
        problem = "is a file: name a folder"
    if problem:
        raise OptionError(row.where(source), str(path), problem)
    return path


def _check_contradictions(settings: Settings) -> None:
    """Refuse options that contradict themselves or each other."""
    given = {
        settings.comparison_option: bool(settings.comparison_option),
        "--ddp-save-baseline": settings.save_baseline,
        "--ddp-extend-baseline": settings.extend_baseline,
        "--ddp-disable": settings.disable,
    }
    asked = [option for option, is_given in given.items() if is_given]
    if len(asked) > 1:
        raise OptionError(
            asked[0], asked[1], "they exclude each other: use only one"
        )
    if settings.records and settings.launches == 1:
        allowed = f"at least 2 with {settings.records}: nothing is compared with a single launch"
        raise OptionError(where(settings, "launches"), 1, allowed)
    if settings.why is not None and not settings.records:
        raise OptionError(
            "--ddp-reason",
            settings.why,
            "says why a baseline is saved: add --ddp-save-baseline",
        )
    has_setup = settings.sources["against_setup"] == "command line"
    if has_setup and settings.against in (None, "self"):
        raise OptionError(
            "--ddp-against-setup",
            settings.against_setup,
            "builds the code of a git ref: name it with --ddp-against",
        )
    for word in settings.against_option or ():
        if word.startswith("--ddp-against"):
            allowed = (
                "options that choose the other side cannot be passed to it"
            )
            raise OptionError("--ddp-against-option", word, allowed)
    if settings.against == "self":
        for field, option in _COMPARISONS[1:]:
            if getattr(settings, field):
                allowed = f"has the same code on both sides, {option} does not: use only one"
                raise OptionError("--ddp-against", "self", allowed)
    python = settings.against_python
    if python is not None and shutil.which(python) is None:
        raise OptionError(
            "--ddp-against-python", python, "there is no such program"
        )


def _parsed(row: Row, value: object, source: str) -> Any:
    if not row.parser:
        return value
    try:
        return getattr(parse, row.parser)(value, *row.allowed)
    except ValueError as error:
        refused = error.item if isinstance(error, parse.Refused) else value
        raise OptionError(row.where(source), refused, str(error)) from None


def _written(config: pytest.Config, row: Row) -> tuple[object, str]:
    """Return a value as it was given, and its source."""
    if row.of_run and (value := config.getoption(row.key)) is not None:
        return _as_written(value), "command line"
    if (
        row.ini is not None
        and (value := _from_ini(config, row.key)) is not None
    ):
        return value, "ini"
    return row.default, "default"


def _as_written(value: object) -> object:
    """Restore the `--` of `--option=--`, of which argparse before Python 3.13 leaves an empty
    list."""
    if isinstance(value, list):
        return [_as_written(each) for each in value] or "--"
    return value


def _from_ini(config: pytest.Config, key: str) -> object:
    import pytest  # not above: `ddpperf` reads limits without it

    try:
        return config.getini(key)
    except (TypeError, ValueError, pytest.UsageError):
        # pytest is stricter than our parsers (a list written as `2` or "1,2,4" in a native TOML
        # file) and may not say which key is wrong (`two` for a number). So they judge what was
        # written, -o over the file: pytest 8 keeps the two apart. pytest 9 deprecates `inicfg`, but
        # there is no other way.
        pairs = config.getoption("override_ini") or ()
        overrides = dict(pair.split("=", 1) for pair in pairs)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            written = {**config.inicfg, **overrides}[key]
        # pytest 9.0 wraps what the file says
        return getattr(written, "value", written)


def with_markers(
    settings: Settings, markers: Iterable[pytest.Mark]
) -> Settings:
    """Return the settings of one test: its `ddp` markers, closest first, over those of the run.
    Raises MarkerError."""
    try:
        values = _arguments_of(markers)
        if not values:
            return settings
        sources = {**settings.sources, **dict.fromkeys(values, MARKER)}
        return _checked(replace(settings, **values, sources=sources))
    except OptionError as error:
        raise MarkerError(error.where, error.value, error.allowed) from None


def _arguments_of(marks: Iterable[pytest.Mark]) -> dict[str, Any]:
    """Return what markers ask for, by the field of Settings."""
    values: dict[str, Any] = {}
    for mark in marks:
        if mark.args:
            allowed = (
                f"arguments are given by keyword: {', '.join(BY_ARGUMENT)}"
            )
            raise OptionError("@pytest.mark.ddp(...)", mark.args[0], allowed)
        for name, value in mark.kwargs.items():
            if name not in BY_ARGUMENT:
                allowed = f"there is no such argument; there are {parse.near(name, BY_ARGUMENT)}"
                raise OptionError(
                    f"@pytest.mark.ddp({name}=...)", value, allowed
                )
            row = BY_ARGUMENT[name]
            if row.field not in values:
                values[row.field] = _parsed(row, value, MARKER)
    return values


def _checked(settings: Settings) -> Settings:
    """Refuse contradictory launches."""
    if settings.disable:
        return replace(settings, warmup=0, steps=1, min_seconds=0.0, launches=1)
    if settings.sources["max_launches"] == "default":
        # not that of the run, which may ask for more launches than a marker
        least = int(BY_ARGUMENT["max_launches"].default or 0)
        most = max(least, 2 * settings.launches)
        settings = replace(settings, max_launches=most)
    elif settings.max_launches < settings.launches:
        name = where(settings, "max_launches")
        allowed = f"at least {where(settings, 'launches')}, which is {settings.launches}"
        raise OptionError(name, settings.max_launches, allowed)
    return settings


def where(settings: Settings, field: str) -> str:
    """Return the name of a setting where it was made, for a message."""
    return next(row for row in ROWS if row.field == field).where(
        settings.sources[field]
    )


# Launches x ranks x steps to which windows may be lengthened, for a baseline keeps them all: on CPU
# two figures of each rank's step and one of the group's, 13 bytes a figure. 20 launches of 2 ranks
# come to 150 steps and 200 KB.
_MOST_TIMED = 6000


def make_plan(
    settings: Settings,
    *,
    world_size: int,
    backend: str,
    device: str,
    **others: Any,
) -> Plan:
    """Return the plan of a test's launches; backend and device are names that torch knows, no
    longer "auto". `others` are further fields of the plan."""
    timing = settings.timing
    if timing == "auto":
        timing = "step" if device == "cpu" else "free"
    return Plan(
        world_size=world_size,
        backend=backend,
        device=device,
        warmup=settings.warmup,
        steps=settings.steps,
        min_seconds=settings.min_seconds,
        most_steps=_MOST_TIMED // (settings.max_launches * world_size),
        timing=timing,
        timeout_seconds=settings.timeout_seconds,
        timeout_setting=where(settings, "timeout_seconds"),
        preload=settings.preload,
        **others,
    )
