"""Which warnings the user's code may give in a rank: by the filters that pytest has for the test."""

from __future__ import annotations

import pkgutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pytest_ddpperf.records.errors import SetupError


def install(filters: Sequence[str]) -> None:
    """Apply `Plan.warning_filters`, from here to the end of this process: what the user's code adds comes before."""
    for text in filters:
        action, message, category, module, line = text.split(":")
        try:
            kind = pkgutil.resolve_name(category)
        except (ImportError, AttributeError) as error:
            raise SetupError(f"pytest's warning filter {text} does not work in a rank: {error}") from None
        warnings.filterwarnings(action, message, kind, module, int(line))  # type: ignore[arg-type]


@contextmanager
def unheard() -> Iterator[None]:
    """Around what is ours: a filter that makes errors is meant for the user's code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
