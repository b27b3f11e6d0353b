"""What pytest's own marks and options say of a test. Only pytest can tell, in ways that are not public."""

from __future__ import annotations

from contextlib import suppress

import pytest
from _pytest.config import parse_warning_filter


def warning_filters(item: pytest.Item) -> tuple[str, ...]:
    """Those of ini file, command line and marks, as `Plan` has them; pytest has applied them to the test, too."""
    config = item.config
    if not config.pluginmanager.hasplugin("warnings"):
        return ()
    asked = [(text, False) for text in config.getini("filterwarnings")]
    asked += [(text, True) for text in config.getoption("pythonwarnings") or ()]
    asked += [(text, False) for mark in item.iter_markers("filterwarnings") for text in mark.args]
    filters = []
    for text, escape in asked:
        with suppress(ImportError):  # of the category, which pytest has told
            action, message, category, module, line = parse_warning_filter(text, escape=escape)
            filters.append(f"{action}:{message}:{category.__module__}.{category.__qualname__}:{module}:{line}")
    return tuple(filters)
