"""The state of the pytest process before the user's conftests, and the options that these added."""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import pytest

_LONGEST = 200  # characters of a value that is worth a line of a baseline
_SECRET = (
    r"(token|(api|access|auth|bearer|hf|hub|refresh)[-_]?tokens"  # as against --max-tokens
    r"|(secret|password|passwd|passphrase|(api|access|private)[-_]?key)s?"
    r"|(^|[-_])(pwd|pass|auth|credentials?))([-_](json|value|str|string|header|file))?$"
)


class ProcessSnapshot(NamedTuple):
    """Environment, import path and options before any conftest, and before any other plugin's hook. The pytest of
    another version starts from these; its own conftests set the rest."""

    environ: Mapping[str, str]
    sys_path: tuple[str, ...]
    options: frozenset[str]  # by name in `config.option`


SNAPSHOT = pytest.StashKey[ProcessSnapshot]()


def take_snapshot(config: pytest.Config) -> ProcessSnapshot:
    options = {**vars(config.known_args_namespace), **vars(config.option)}
    return ProcessSnapshot(dict(os.environ), tuple(sys.path), frozenset(options))


def snapshot_of(config: pytest.Config) -> ProcessSnapshot:
    """Return the snapshot; a new one if a conftest's `pytest_plugins` loaded the plugin later."""
    return config.stash.get(SNAPSHOT, None) or take_snapshot(config)


# Set by coverage.py, or pytest-cov before 7, to measure processes that this one starts.
_TRACING = ("COVERAGE_PROCESS_CONFIG", "COV_CORE_DATAFILE")


def traces_one_side(snapshot: ProcessSnapshot) -> bool:
    """Say whether coverage traces the ranks of this pytest. Those of another version, without --cov, are faster."""
    return any(os.environ.get(name) != snapshot.environ.get(name) for name in _TRACING)


def own_options(config: pytest.Config) -> dict[str, str]:
    """Return the options that the user's conftests added, with the `repr` of their values.

    Options that may be secrets are left out, and paths, which mean nothing on another day."""
    return dict(_plain(config, config.stash[SNAPSHOT].options)) if SNAPSHOT in config.stash else {}


def _plain(config: pytest.Config, before: frozenset[str]) -> Iterator[tuple[str, str]]:
    for name, value in sorted(vars(config.option).items()):
        if name not in before and not holds_secret(name):
            text = repr(value)
            if len(text) <= _LONGEST and os.sep not in text and _is_literal(text, value):
                yield "--" + name.replace("_", "-"), text


def holds_secret(option: str) -> bool:
    """Say whether an option's name suggests a secret, which no file and no report may show."""
    return re.search(_SECRET, option, re.IGNORECASE) is not None


def _is_literal(text: str, value: object) -> bool:
    try:
        return bool(ast.literal_eval(text) == value)
    except (ValueError, SyntaxError):
        return False
