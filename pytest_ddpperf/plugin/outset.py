"""How a pytest process began: what it was before the user's conftests, and what these added."""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pytest

_LONGEST = 200  # characters of a value that is worth a line of a baseline
_SECRET = re.compile(
    r"(token|(api|access|auth|bearer|hf|hub|refresh)[-_]?tokens"  # as against --max-tokens
    r"|(secret|password|passwd|passphrase|(api|access|private)[-_]?key)s?"
    r"|(^|[-_])(pwd|pass|auth|credentials?))([-_](json|value|str|string|header|file))?$",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Outset:
    """Before any conftest and any plugin's hook: what these set, the pytest of another version sets by its own."""

    environ: Mapping[str, str]
    sys_path: tuple[str, ...]
    options: frozenset[str]  # by name in `config.option`

    @staticmethod
    def of(config: pytest.Config) -> Outset:
        options = {**vars(config.known_args_namespace), **vars(config.option)}
        return Outset(dict(os.environ), tuple(sys.path), frozenset(options))


OUTSET = pytest.StashKey[Outset]()


def outset_of(config: pytest.Config) -> Outset:
    """How this process began or, where the plugin came in later (by a conftest's `pytest_plugins`), how it is now."""
    return config.stash.get(OUTSET, None) or Outset.of(config)


# With which coverage.py, or pytest-cov before 7, measures what this process starts.
_TRACING = ("COVERAGE_PROCESS_CONFIG", "COV_CORE_DATAFILE")


def traces_one_side(outset: Outset) -> bool:
    """Whether coverage traces the ranks at hand, and not those of another version, whose pytest has no --cov: traced
    code is slower."""
    return any(os.environ.get(name) != outset.environ.get(name) for name in _TRACING)


def own_options(config: pytest.Config) -> dict[str, str]:
    """The options that the user's conftests added, "--hidden": what they hold, as Python writes it. None that may be a
    secret, or a place, which means nothing on another day."""
    return dict(_plain(config, config.stash[OUTSET].options)) if OUTSET in config.stash else {}


def _plain(config: pytest.Config, before: frozenset[str]) -> Iterator[tuple[str, str]]:
    for name, value in sorted(vars(config.option).items()):
        if name not in before and not holds_secret(name):
            text = repr(value)
            if len(text) <= _LONGEST and os.sep not in text and _is_literal(text, value):
                yield "--" + name.replace("_", "-"), text


def holds_secret(option: str) -> bool:
    """Whether it is called so that no file and no report may show what it holds."""
    return _SECRET.search(option) is not None


def _is_literal(text: str, value: object) -> bool:
    try:
        return bool(ast.literal_eval(text) == value)
    except (ValueError, SyntaxError):
        return False
