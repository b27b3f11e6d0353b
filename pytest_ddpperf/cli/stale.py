"""Which baselines belong to no test any more, as far as the test's file tells: no test is collected for it."""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone
from pathlib import Path

from pytest_ddpperf.records import Baseline, TestId

# What makes tests when a file is imported, under names that no line of it may have: `vars()[...] =`, `exec`, torch's
# instantiate_device_type_tests. Not `monkeypatch.setattr` and `model.eval`.
_MADE = re.compile(
    r"(?<!\.)\b(globals|locals|vars|setattr|exec|eval)\s*\(|\b(__dict__|parameterized_class|instantiate_\w+_tests)\b"
)


def why_gone(test: TestId, rootdir: Path) -> str:
    """Why there is no such test below `rootdir`; "" where there may be one.

    Only what leaves no doubt counts: its file is not there, or does not have its name in it. A module that is known
    by its import name is outside rootdir, where nobody knows what there is. Methods may be inherited, so of those
    only the class is looked for; so may what a file imports as a whole, and what it makes when it is imported.
    """
    file = rootdir / f"{test.module}.py"
    if not file.is_file():
        return f"there is no {test.module}.py" if "/" in test.module else ""
    try:
        code = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    name = re.split(r"::|\[", test.name)[0]
    if re.search(rf"\b{re.escape(name)}\b", code) or re.search(r"\bimport\s+\*", code) or _MADE.search(code):
        return ""
    return f"{test.module}.py has no {name}"


def last_recorded(baseline: Baseline) -> datetime | None:
    """When its last session was saved; None where nobody knows."""
    try:
        created = datetime.fromisoformat(
            baseline.sessions[-1].created.replace("Z", "+00:00")
        )  # which 3.10 does not take
    except ValueError:
        return None
    return created if created.tzinfo is not None else created.replace(tzinfo=timezone.utc)


def is_older(baseline: Baseline, days: float) -> bool:
    """Whether nothing was recorded for so long."""
    recorded = last_recorded(baseline)
    return recorded is not None and datetime.now(timezone.utc) - recorded > timedelta(days=days)
