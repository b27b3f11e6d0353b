"""What ends after one launch because a change cannot reach it, and what is compared all the same."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_ddpperf.compare.unreached import take_unreached
from pytest_ddpperf.launch import Observer
from pytest_ddpperf.records.outcome import Version
from pytest_ddpperf.records.plan import Plan
from tests.unit.test_benchmark import job, lasting

VERSION = Version(ref="main", commit="", now="")
READ = {"src/net.py": "1", "src/data.json": "2"}


def taken(
    *,
    is_used: tuple[bool, bool] = (False, False),
    files: dict[str, str] = READ,
    lacking: str = "",
    facts: dict[str, Any] | None = None,
    **asked: Any,
) -> tuple[Any, int]:
    """Return what came of it, and how many launches there were. `is_used`: whether a file that
    differs was, before the launch and after it."""
    launches = []
    used = iter(is_used)

    def measure(plan: Plan, *_: Any) -> Any:
        launches.append(plan)
        samples = lasting(0.02)(plan)
        own = {**samples.facts, **(facts or {})}
        return replace(samples, files=files, facts=own)

    passed_over: list[str] = []
    base: Any = SimpleNamespace(
        version=VERSION,
        is_unreached=lambda nodeid, imports: not next(used),
        checkout=SimpleNamespace(changed=("src/slow.py",)),
        lacking=lambda files, own: lacking,
        pass_over=passed_over.append,
    )
    launcher: Any = SimpleNamespace(measure=measure)
    found = take_unreached(job(**asked), launcher, base, set, Observer())
    assert passed_over == [""] * (found is not None)
    return found, len(launches)


def test_what_opened_no_file_that_differs_passes_after_one_launch() -> None:
    found, launches = taken()
    assert (found.verdict, found.verdict.reason) == ("PASS", "unreached")
    assert (found.fails, launches) == (False, 1)
    said = "none of the files that it reads (2) differs from main"
    assert said in found.further_notes
    side = found.baseline_side
    assert (side.read, side.differing) == (("src/data.json", "src/net.py"), ())
    assert len(found.result.step_seconds) == 1


@pytest.mark.parametrize(
    ("asked", "launches"),
    [
        ({"is_used": (True, True)}, 0),
        ({"gate": False}, 0),
        ({"preload": ("json",)}, 0),
        ({"is_used": (False, True)}, 1),
        ({"files": {"src/data.json": "2"}}, 1),  # it may be installed
        ({"files": {"src/slow.py": "1"}}, 1),
        ({"lacking": "it lacks src/fast.so"}, 1),
        ({"facts": {"env:CUDA_LAUNCH_BLOCKING": "1"}}, 1),
    ],
    ids=str,
)
def test_all_else_is_compared(asked: dict[str, Any], launches: int) -> None:
    assert taken(**asked) == (None, launches)


@pytest.mark.parametrize("of_plan", [{"command": True}, {"nodes": 2}], ids=str)
def test_what_is_not_all_known_to_be_read_is_compared(
    of_plan: dict[str, Any],
) -> None:
    own = job()
    own = replace(own, plan=replace(own.plan, **of_plan))
    base: Any = SimpleNamespace(is_unreached=lambda *_: True)
    unused: Any = None
    assert take_unreached(own, unused, base, set, Observer()) is None
