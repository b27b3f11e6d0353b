"""Annotations, read as GitHub's runner reads them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from pytest_ddpperf.records import Outcome, Status
from pytest_ddpperf.report import failure
from pytest_ddpperf.report.ci import annotated
from tests.unit.test_beside import BESIDE
from tests.unit.test_report import FAILED, measurement, outcome, stored, verdict


@dataclass(frozen=True)
class Command:
    name: str
    properties: dict[str, str]
    message: str


def command(line: str) -> Command:
    """As the runner has it: the command up to the next two colons, properties by commas, all escapes undone."""
    assert "\n" not in line
    assert "\r" not in line
    empty, head, message = line.split("::", 2)
    assert not empty
    name, _, properties = head.partition(" ")
    pairs = [pair.partition("=") for pair in properties.split(",")]
    escapes = {"%0D": "\r", "%0A": "\n", "%3A": ":", "%2C": ",", "%25": "%"}

    def undone(value: str, *names: str) -> str:
        for escape in names:
            value = value.replace(escape, escapes[escape])
        return value

    return Command(
        name=name,
        properties={key: undone(value, *escapes) for key, _, value in pairs},
        message=undone(message, "%0D", "%0A", "%25"),
    )


def commands(*outcomes: Outcome) -> list[Command]:
    return [command(line) for line in annotated(outcomes)]


def explained(measured: Outcome) -> Outcome:
    return failure.explained(measured, baseline=stored(measurement(0.1)), accept_command="pytest x --ddp-save-baseline")


PLACE: Any = {"file": "project/tests/test_a.py", "line": 12}
RED = explained(outcome(verdict(Status.REGRESSED, differences=("torch 2.12 -> 2.13",)), **PLACE))


def test_what_fails_is_an_error_at_its_test() -> None:
    assert commands(RED) == [
        Command(
            "error",
            {"title": "REGRESSED: tests/test_a.py::test_step", "file": "project/tests/test_a.py", "line": "12"},
            "REGRESSED: p50 +12.3 % [+8.1 %, +16.7 %] (limit p50:10%)\n"
            "evidence: 2 launches now, 2 in the baseline's 1 session\n"
            "slowest rank: none; every rank's CPU time rose, +100ms of +100ms at p50\n"
            "differs from the baseline's environment: torch 2.12 -> 2.13\n"
            "accept:   pytest x --ddp-save-baseline",
        )
    ]


def test_beside_another_version_it_is_at_the_first_file_that_differs() -> None:
    (shown,) = commands(replace(RED, baseline_side=BESIDE))
    assert shown.properties["file"] == "src/net.py"
    assert "line" not in shown.properties
    (shown,) = commands(replace(RED, baseline_side=replace(BESIDE, differing=())))
    assert (shown.properties["file"], shown.properties["line"]) == ("project/tests/test_a.py", "12")


def test_where_nobody_knows_the_place_the_node_id_tells_the_file() -> None:
    (shown,) = commands(replace(RED, file="", line=0))
    assert shown.properties["file"] == "tests/test_a.py"
    assert "line" not in shown.properties


@pytest.mark.parametrize(
    ("measured", "name", "words"),
    [
        (FAILED, "error", "not measured: launch 1 of 2: rank 1 failed in setup: ValueError: bad"),
        (outcome(verdict(Status.INCONCLUSIVE, "not-significant")), "warning", "differ as much by themselves"),
        (explained(outcome(verdict(Status.NO_BASELINE))), "warning", "record: pytest x --ddp-save-baseline"),
        (outcome(verdict(Status.INCOMPARABLE, differences=("warmup 5 -> 2",))), "warning", "warmup 5 -> 2"),
        (outcome(verdict(Status.NO_BASELINE), fails=True), "error", "NO BASELINE at "),
        (outcome(verdict(Status.IMPROVED)), "notice", "IMPROVED: p50 "),
    ],
)  # fmt: skip
def test_the_rest_are_by_what_they_do_to_the_test(measured: Outcome, name: str, words: str) -> None:
    (shown,) = commands(measured)
    assert shown.name == name
    assert words in shown.message


def test_what_is_well_is_not_annotated() -> None:
    assert commands(outcome(verdict(Status.PASS)), outcome(verdict(Status.NOT_GATED, "gate-off"))) == []


def test_the_worst_ten_are_shown_and_the_last_says_how_many_more() -> None:
    doubts = [outcome(verdict(Status.NO_BASELINE), nodeid=f"test_{i}") for i in range(9)]
    shown = commands(*doubts, RED)
    assert [each.name for each in shown] == ["error", *["warning"] * 9]
    assert "more" not in shown[-1].message
    shown = commands(*doubts, RED, RED)
    assert [each.name for each in shown] == ["error", "error", *["warning"] * 8]
    assert shown[-1].message.endswith("\nand 1 more measurement to look at")
    assert commands(*doubts, RED, RED, RED)[-1].message.endswith("\nand 2 more measurements to look at")
    assert len(commands(*[RED] * 1000)) == 10


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
    hostile = outcome(verdict(Status.REGRESSED, differences=(name,)), nodeid=nodeid, notes=(name,), file=name, line=3)
    hostile = failure.explained(hostile, baseline=stored(measurement(0.1)), accept_command=name)
    for shown in commands(hostile, replace(FAILED, error=name, nodeid=nodeid)):
        assert shown.name == "error"
        assert set(shown.properties) <= {"title", "file", "line"}
        assert shown.properties.get("line") in ("3", None)
        assert len(shown.properties["title"]) <= 255
        assert len(shown.message) < 10_000
        assert all(each.isprintable() or each == "\n" for each in shown.message)
        assert shown.properties["title"].isprintable()
