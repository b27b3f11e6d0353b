"""What pytest's own marks say of a test. Only pytest can tell, in ways that are not public."""

from __future__ import annotations

from contextlib import suppress

import pytest
from _pytest.skipping import evaluate_skip_marks, evaluate_xfail_marks


def keep_from_running(item: pytest.Item) -> bool:
    """Whether they do: skip, skipif, xfail(run=False). A test whose marks cannot be told is one that runs."""
    if not item.config.pluginmanager.hasplugin("skipping"):
        return False
    with suppress(Exception, pytest.fail.Exception):
        if evaluate_skip_marks(item) is not None:
            return True
        expected = evaluate_xfail_marks(item)
        return expected is not None and not expected.run and not item.config.getoption("runxfail")
    return False
