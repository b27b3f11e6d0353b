"""What a pytest process is started with: environment, import path and options, and what the
user's conftests add to the options."""

import os
import sys
from collections.abc import Mapping
from typing import NamedTuple

import pytest

_PLAIN = (bool, int, float, str, list, tuple, dict, type(None))
_LONGEST = 200  # characters of a value that is worth a line of a baseline


class ProcessSnapshot(NamedTuple):
    """Environment, import path, options and cores before any conftest, and before any other
    plugin's hook. The pytest of another version starts from these; its own conftests set the
    rest."""

    environ: Mapping[str, str]
    sys_path: tuple[str, ...]
    options: frozenset[str]  # by name in `config.option`
    # that pytest may run on; () where the system does not say (macOS)
    cores: tuple[int, ...]


SNAPSHOT = pytest.StashKey[ProcessSnapshot]()


def take_snapshot(config: pytest.Config) -> ProcessSnapshot:
    """Return the snapshot, which the first call takes."""
    if SNAPSHOT not in config.stash:
        options = frozenset(
            {**vars(config.known_args_namespace), **vars(config.option)}
        )
        cores = getattr(os, "sched_getaffinity", lambda pid: ())
        config.stash[SNAPSHOT] = ProcessSnapshot(
            dict(os.environ), tuple(sys.path), options, tuple(cores(0))
        )
    return config.stash[SNAPSHOT]


def own_options(config: pytest.Config) -> dict[str, str]:
    """Return the options that the user's conftests added, with the `repr` of their values.

    Options that may be secrets are left out, and paths, which mean nothing on another day."""
    # which a run without distributed tests does not need
    from pytest_ddpperf.wire.variables import is_secret

    before = take_snapshot(config).options
    found: dict[str, str] = {}
    for name, value in sorted(vars(config.option).items()):
        # xdist adds an option of its own to its workers.
        if name in before or name == "loadgroup":
            continue
        text = repr(value)
        is_short = (
            len(text) <= _LONGEST and os.sep not in text and "<" not in text
        )
        if isinstance(value, _PLAIN) and is_short and not is_secret(name):
            found["--" + name.replace("_", "-")] = text
    return found


# Set by coverage.py, by pytest-cov before 7, or by the user, to measure processes that this one
# starts.
_TRACING = (
    "COVERAGE_PROCESS_CONFIG",
    "COV_CORE_DATAFILE",
    "COVERAGE_PROCESS_START",
)


def why_not_compared() -> str:
    """Return why ranks are not compared with those of another version: coverage traces them, and it
    may trace one side only, by --cov or by the folder of the sources. "" if it does not."""
    if not any(map(os.environ.get, _TRACING)):
        return ""
    return "not supported with coverage in ranks: add --no-cov, or run pytest without coverage"
