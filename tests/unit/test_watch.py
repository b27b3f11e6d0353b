"""Reports of a wait for another process, in pytest's output and on a terminal."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_ddpperf.plugin import watch
from pytest_ddpperf.plugin.state import RUN
from pytest_ddpperf.wire.channels import Phase
from tests.processes import on_terminal

# Waits for 25 seconds and, for another launch, for 11, by a clock of its own.
WAITING = """
from pathlib import Path
from pytest_ddpperf.plugin import watch

def test_first():
    pass

def test_waits(request, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(watch.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(watch.placement, "holder", lambda resource: 4321 if resource.name else None)
    watcher = watch.Watcher(request.config, warmup=1)
    for launch, resource, seconds in ((0, "/cpu0", 25), (1, "/", 11)):
        watcher.begin(launch, 2)
        for second in range(seconds + 1):
            print("captured")
            watcher.waiting(Path(resource))
            clock[0] += 1
    assert watcher.took == watch.Took(seconds=38.0, waited_seconds=36.0)
    monkeypatch.undo()
    watcher.erase()

def test_next():
    pass
"""
ARGUMENTS = (
    "-p",
    "no:randomly",
    "-p",
    "no:benchmark",
    "-p",
    "no:cacheprovider",
)
WAIT = "waiting for another timed run"
REPORTED = [
    f"{WAIT} (pid 4321) to release its cores, {seconds} s"
    for seconds in (10, 20)
]


@pytest.mark.parametrize(
    ("option", "tests"),
    [
        ("-q", ["..*100%*"]),
        (
            "-v",
            [
                "test_waits.py::test_waits PASSED*",
                "test_waits.py::test_next PASSED*",
            ],
        ),
    ],
)
def test_a_long_wait_is_reported_rarely_and_on_lines_of_its_own(
    pytester: pytest.Pytester, option: str, tests: list[str]
) -> None:
    pytester.makepyfile(test_waits=WAITING)
    result = pytester.runpytest_subprocess(*ARGUMENTS, option)
    result.stdout.fnmatch_lines([*REPORTED, *tests])
    assert [
        text for text in result.outlines if text.startswith("waiting")
    ] == REPORTED
    assert "captured" not in result.stdout.str()


def test_a_wait_that_is_seen_late_is_reported_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, reported = [100.0], list[str]()
    monkeypatch.setattr(watch.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(watch.placement, "holder", lambda resource: 4321)
    plugins = SimpleNamespace(get_plugin=lambda name: None)
    config: Any = SimpleNamespace(
        pluginmanager=plugins,
        getoption=lambda *_: "fd",
        get_terminal_writer=lambda: None,
    )
    watcher = watch.Watcher(config, warmup=1)
    monkeypatch.setattr(watcher, "_report", reported.append)
    watcher.begin(0, 2)
    watcher.waiting(Path("/cpu0"))
    for clock[0] in (178.0, 179.0, 180.0, 256.0, 257.0):
        watcher.waiting(Path("/cpu0"))
    assert reported == [
        f"{WAIT} (pid 4321) to release its cores, {seconds} s"
        for seconds in (78, 156)
    ]


def test_in_a_worker_of_xdist_nothing_is_reported(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile(test_waits=WAITING)
    result = pytester.runpytest_subprocess(*ARGUMENTS, "-n1")
    result.assert_outcomes(passed=3)
    assert "waiting" not in result.stdout.str()


# Twelve launches of 25 seconds each.
MEASURES = """
from pytest_ddpperf.plugin import watch

def test_measures(request, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(watch.time, "monotonic", lambda: clock[0])
    watcher = watch.Watcher(request.config, warmup=1)
    if WAITED:  # for another run, before the first launch
        watcher._waits[clock[0]] = WAITED
        clock[0] += WAITED
    for launch in range(12):
        watcher.begin(launch, LAUNCHES)
        clock[0] += 25
    monkeypatch.undo()
"""


def test_without_a_terminal_a_long_measurement_says_rarely_how_far_it_is(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile(
        test_measures=MEASURES.replace("WAITED", "0").replace("LAUNCHES", "12")
    )
    result = pytester.runpytest_subprocess(*ARGUMENTS)
    assert [text for text in result.outlines if "launch" in text] == [
        "75 s so far: launch 4 of 12 begins, about 225 s left, more if the verdict is open then",
        "150 s so far: launch 7 of 12 begins, about 150 s left, more if the verdict is open then",
    ]


def test_the_last_launch_is_never_said_to_take_no_time(
    pytester: pytest.Pytester,
) -> None:
    source = MEASURES.replace("WAITED", "0").replace("LAUNCHES", "launch + 1")
    pytester.makepyfile(test_measures=source.replace("+= 25", "+= 7"))
    result = pytester.runpytest_subprocess(*ARGUMENTS)
    assert [text for text in result.outlines if "launch 10" in text] == [
        "63 s so far: launch 10 of 10 begins, about 7 s left, more if the verdict is open then",
    ]


def test_a_wait_for_other_runs_is_no_part_of_what_is_left(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile(
        test_measures=MEASURES.replace("WAITED", "300").replace(
            "LAUNCHES", "12"
        )
    )
    result = pytester.runpytest_subprocess(*ARGUMENTS)
    first, *_ = [text for text in result.outlines if "launch" in text]
    assert first.startswith(
        "325 s so far: launch 2 of 12 begins, about 275 s left"
    )


def test_launches_that_confirm_are_counted_anew(
    pytester: pytest.Pytester,
) -> None:
    again = "    for launch in (0, 1):\n        watcher.begin(launch, 5)\n"
    source = MEASURES.replace("WAITED", "0").replace("LAUNCHES", "12")
    source = source.replace(
        "    monkeypatch.undo()",
        again + "        clock[0] += 25\n    monkeypatch.undo()",
    )
    pytester.makepyfile(test_measures=source.replace("range(12)", "range(11)"))
    result = pytester.runpytest_subprocess(*ARGUMENTS)
    assert [text for text in result.outlines if "launch 2 of 5" in text] == [
        "300 s so far: launch 2 of 5 begins, about 100 s left, more if the verdict is open then"
    ]


@pytest.mark.parametrize("terminal", ["xterm", "dumb"])
def test_a_terminal_shows_a_wait_while_it_lasts_and_a_dumb_one_in_lines(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, terminal: str
) -> None:
    pytester.makepyfile(test_waits=WAITING)
    monkeypatch.setenv("TERM", terminal)
    monkeypatch.setenv("COLUMNS", "80")
    status, output = on_terminal(*ARGUMENTS)
    lines = [line for line in output.splitlines() if line.startswith("waiting")]
    assert (status, lines) == (0, REPORTED if terminal == "dumb" else [])
    for text in (
        " (pid 4321) to release its c, 25 s",
        " to release its cores, 1 s",
    ):
        assert (f"\x1b7 {WAIT}{text}\x1b[K\x1b8" in output) is (
            terminal == "xterm"
        )


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (30.0, ", 8 min left (fewer --ddp-steps shorten it)"),
        (3.0, ""),
        (0.0, ""),
    ],
)
def test_a_long_test_says_how_long_it_still_takes_and_what_shortens_it(
    monkeypatch: pytest.MonkeyPatch, seconds: float, shown: str
) -> None:
    clock, drawn = [100.0], list[str]()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(watch.time, "monotonic", lambda: clock[0])
    config: Any = SimpleNamespace(
        getoption=lambda *asked: "fd",
        pluginmanager=SimpleNamespace(
            get_plugin=lambda name: SimpleNamespace(isatty=True)
        ),
        get_terminal_writer=lambda: SimpleNamespace(),
        stash={RUN: SimpleNamespace(begun=[1], items=[1])},
    )
    watcher = watch.Watcher(config, warmup=5)
    monkeypatch.setattr(
        watcher, "_draw", lambda line, end="": drawn.append(end)
    )
    watcher.begin(0, 5)
    clock[0] += 60
    watcher.waiting(Path("/cpu0"))  # which says nothing of the launch
    clock[0] += seconds
    drawn.clear()
    # 10 of 35 steps, in the first of 5 launches
    watcher.progress(Phase.STEPS, 5, 30, ())
    assert drawn == [shown]
