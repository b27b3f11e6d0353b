"""Annotations, read as GitHub's runner reads them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from pytest_ddpperf.records.outcome import Outcome
from pytest_ddpperf.records.samples import FactChange, Status
from pytest_ddpperf.records.step_phases import Finding
from pytest_ddpperf.report.summary import annotated
from tests import reports
from tests.git import git
from tests.unit.test_baseline_side import BESIDE
from tests.unit.test_report import FAILED, measurement, outcome, verdict

Command = tuple[str, dict[str, str], str]  # name, properties, message


def command(line: str) -> Command:
    """Read a line as the runner does: the command up to the next two colons, properties by
    commas."""
    assert line.isprintable()
    empty, head, message = line.split("::", 2)
    assert not empty
    name, _, properties = head.partition(" ")
    pairs = (pair.partition("=") for pair in properties.split(","))
    return (
        name,
        {key: unquote(value) for key, _, value in pairs},
        unquote(message),
    )


def commands(*outcomes: Outcome) -> list[Command]:
    return [command(line) for line in annotated(outcomes)]


PLACE: Any = {"file": "project/tests/test_a.py", "line": 12}
RED = reports.explained(
    outcome(verdict(Status.REGRESSED, facts=(reports.NEWER_TORCH,)), **PLACE),
    [measurement(0.1)],
    "pytest x --ddp-save-baseline",
)


def test_what_fails_is_an_error_at_its_test() -> None:
    assert commands(RED) == [
        (
            "error",
            {
                "title": "REGRESSED: tests/test_a.py::test_step",
                "file": "project/tests/test_a.py",
                "line": "12",
            },
            (
                "REGRESSED p50 +12 % (limit 10 %): every rank computes longer: CPU time +100 ms"
                " (the step: +100 ms); torch 2.12 -> 2.13\naccept: pytest x --ddp-save-baseline"
            ),
        )
    ]


@pytest.mark.parametrize(
    ("measured", "place"),
    [
        # the first file that differs
        (replace(RED, baseline_side=BESIDE), {"file": "src/net.py"}),
        (
            replace(
                RED,
                baseline_side=BESIDE,
                findings=(Finding(phases=(), file="src/b.py"),),
            ),
            {"file": "src/b.py"},
        ),
        (replace(RED, baseline_side=replace(BESIDE, differing=())), PLACE),
        (replace(RED, file="", line=0), {"file": "tests/test_a.py"}),
    ],
)
def test_the_place_is_what_differs_or_the_test(
    measured: Outcome, place: dict[str, Any]
) -> None:
    ((_, properties, _),) = commands(measured)
    assert properties == {
        "title": properties["title"],
        **{key: str(value) for key, value in place.items()},
    }


def test_code_that_differs_is_annotated_at_its_first_changed_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "src").mkdir()
    net = tmp_path / "src" / "net.py"
    net.write_text("import torch\n\nwidth = 8\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "src")
    git(tmp_path, "commit", "-qm", "1")
    net.write_text("import torch\n\nwidth = 9\n")
    version = replace(BESIDE.version, commit=git(tmp_path, "rev-parse", "HEAD"))
    ((_, properties, _),) = commands(
        replace(RED, baseline_side=replace(BESIDE, version=version))
    )
    assert (properties["file"], properties["line"]) == ("src/net.py", "3")


@pytest.mark.parametrize(
    ("measured", "name", "words"),
    [
        (
            FAILED,
            "error",
            "not measured: launch 1 of 2: rank 1 failed in setup: ValueError: bad",
        ),
        (
            outcome(verdict(Status.INCONCLUSIVE, "not-significant")),
            "warning",
            "differ by as much",
        ),
        (
            outcome(verdict(Status.NO_BASELINE), accept="pytest x"),
            "warning",
            "record: pytest x",
        ),
        (
            outcome(verdict(Status.INCOMPARABLE, details=("warmup 5 -> 2",))),
            "warning",
            "warmup 5 -> 2",
        ),
        (
            outcome(verdict(Status.NO_BASELINE), fails=True),
            "error",
            "NO BASELINE: record one",
        ),
        (outcome(verdict(Status.IMPROVED)), "notice", "IMPROVED p50 "),
    ],
)
def test_the_rest_are_by_what_they_do_to_the_test(
    measured: Outcome, name: str, words: str
) -> None:
    ((shown, _, message),) = commands(measured)
    assert shown == name
    assert words in message


def test_the_worst_ten_are_shown_and_the_last_says_how_many_more() -> None:
    doubts = [
        outcome(verdict(Status.NO_BASELINE), nodeid=f"test_{i}")
        for i in range(9)
    ]
    shown = commands(*doubts, RED)
    assert [name for name, _, _ in shown] == ["error", *["warning"] * 9]
    assert "more" not in shown[-1][-1]
    assert commands(*doubts, RED, RED)[-1][-1].endswith(
        "\nand 1 more measurement to look at"
    )
    assert commands(*doubts, RED, RED, RED)[-1][-1].endswith(
        "\nand 2 more measurements to look at"
    )
    assert len(commands(*[RED] * 1000)) == 10
    assert (
        commands(
            outcome(verdict(Status.PASS)),
            outcome(verdict(Status.NOT_GATED, "gate-off")),
        )
        == []
    )


@pytest.mark.parametrize(
    "name",
    [
        "a\n::error file=x::smuggled",
        "a\r::stop-commands::token",
        "a%0A::warning::smuggled%25",
        "a::b,line=99,file=c::d",
        "\x1b[31m\u2028::error::x",
        "x" * 10_000,
        "<script>alert(1)</script>",
    ],
)
def test_a_hostile_name_is_neither_a_command_nor_a_property(name: str) -> None:
    nodeid = f"tests/test_a.py::test_step[{name}]"
    hostile = outcome(
        verdict(
            Status.REGRESSED,
            facts=(FactChange(name=name, before="0", now="1"),),
        ),
        nodeid=nodeid,
        notes=(name,),
        file=name,
        line=3,
    )
    hostile = reports.explained(hostile, [measurement(0.1)], name)
    for command, properties, message in commands(
        hostile, replace(FAILED, error=name, nodeid=nodeid)
    ):
        assert command == "error"
        assert set(properties) <= {"title", "file", "line"}
        assert properties.get("line") in ("3", None)
        assert len(properties["title"]) <= 255
        assert len(message) < 10_000
        assert all(each.isprintable() or each == "\n" for each in message)
        assert properties["title"].isprintable()
