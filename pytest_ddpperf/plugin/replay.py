"""What pytest-benchmark gets: the step times of distributed tests, as rows of its own reports.

Imported by every run that has pytest-benchmark.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pytest_ddpperf.compare.result import Measured

    StoreSamples = Callable[[Measured], None]

# The options of pytest-benchmark that ask for its reports.
_THEIR_REPORTS = "json save autosave compare histogram cprofile only".split()
_Groups = list[tuple[Any, list[Any]]]


class ReplayToBenchmark:
    """Replays to pytest-benchmark. Its fixture is among those of a test, so that --benchmark-only
    and -skip see it.

    Its rows of distributed tests are shown if the user asked for its reports, or at -v."""

    def __init__(self, config: pytest.Config) -> None:
        asked = (
            config.getoption(f"benchmark_{name}", None)
            for name in _THEIR_REPORTS
        )
        self._shows = config.getoption("verbose", 0) > 0 or any(asked)

    @pytest.hookimpl(wrapper=True)
    def pytest_benchmark_group_stats(self) -> Generator[None, _Groups, _Groups]:
        groups = yield
        if self._shows:
            return groups
        theirs: _Groups = []
        for name, rows in groups:
            kept = [row for row in rows if "ddpperf" not in row["extra_info"]]
            if kept:
                theirs.append((name, kept))
        return theirs

    @pytest.fixture
    def _ddp_replay(
        self, request: pytest.FixtureRequest, benchmark: Any
    ) -> Generator[StoreSamples | None]:
        yield store_into(benchmark, request.node)
        # Else pytest-benchmark warns if nothing was replayed, also after Ctrl-C: an error under -W
        # error.
        benchmark.skipped = True


class Replay:
    """A timer for pytest-benchmark: it replays the step times of a distributed test under the
    test's name.

    It reads 0.0 when a round of `benchmark.pedantic` starts, and the next sample when the round
    ends.
    """

    def __init__(self) -> None:
        self._pending: list[float] = []
        self._now = 0.0
        self._used = False

    def __call__(self) -> float:
        now, self._now = self._now, 0.0
        return now

    def _advance(self) -> None:
        if self._pending:  # --benchmark-cprofile calls once more
            self._now = self._pending.pop()

    def store(self, benchmark: Any, measured: Measured) -> None:
        """Replay the first measurement of a test that did not fail: `benchmark` takes one, and
        saves it to be compared with the next run."""
        if self._used:
            return
        self._used = True
        result, other = measured.result, measured.other
        self._pending = [
            seconds for launch in result.step_seconds for seconds in launch
        ][::-1]
        extra = {
            "verdict": str(result.verdict),
            "reason": result.verdict.reason,
            "world_size": result.world_size,
            "backend": result.backend,
        }
        for q in (10, 50, 75, 90, 95):
            extra[f"p{q}"] = result.percentile(q)
        if other is not None:
            extra["against"] = str(other.version)
            extra["against_commit"] = other.version.commit
        benchmark.extra_info["ddpperf"] = extra
        benchmark.pedantic(
            self._advance, rounds=len(self._pending), iterations=1
        )


def mark_with_timer(item: pytest.Item) -> None:
    """Give the test a `Replay` as pytest-benchmark's timer, next to what else its marker says."""
    function = getattr(item, "function", None)
    if function is not None and "benchmark" in signature(function).parameters:
        return  # the test measures something else with it
    theirs = item.get_closest_marker("benchmark")
    kwargs = theirs.kwargs if theirs is not None else {}
    item.add_marker(
        pytest.mark.benchmark(**{**kwargs, "timer": Replay()}), append=False
    )


def store_into(benchmark: Any, item: pytest.Item) -> StoreSamples | None:
    """Return what stores a test's measurement in its `benchmark` fixture; None if that is disabled
    or not theirs (CodSpeed puts its own in place)."""
    marker = item.get_closest_marker("benchmark")
    timer = marker.kwargs.get("timer") if marker is not None else None
    is_theirs = type(benchmark).__module__.startswith("pytest_benchmark")
    if not isinstance(timer, Replay) or not is_theirs or benchmark.disabled:
        return None
    return partial(timer.store, benchmark)
