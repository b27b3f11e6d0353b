"""What a test's report shows of its launches, and what becomes of a verdict. Measurements are made
up."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_ddpperf.compare.job import Job
from pytest_ddpperf.compare.result import Measured, Result
from pytest_ddpperf.compare.rounds import Round, combine
from pytest_ddpperf.plugin.items import name_of, nodeid_of
from pytest_ddpperf.plugin.role import PytestRole
from pytest_ddpperf.plugin.session import Session
from pytest_ddpperf.records.errors import DdpPerfError
from pytest_ddpperf.records.outcome import Outcome
from pytest_ddpperf.records.samples import Environment, Status
from pytest_ddpperf.text import last_lines
from tests.unit.test_launches import LAUNCH
from tests.unit.test_machine import CPU
from tests.unit.test_report import verdict


@pytest.mark.parametrize(
    ("texts", "shown"),
    [
        (["a\nb\n"], "a\nb"),
        (
            ["a\nb\nc\n"],
            "(of the last launch, at most 2 lines: -v shows more)\nb\nc",
        ),
        (
            ["a\n", "b\n", ""],
            "(of the last launch, at most 2 lines: -v shows more)\nb",
        ),
        (["a" * 1001], f"{'a' * 333}...{'a' * 664}"),
    ],
)
def test_the_last_lines_of_one_launch_are_shown(
    texts: list[str], shown: str
) -> None:
    assert last_lines(texts, 2) == shown


@pytest.mark.parametrize("group", ["", "@gpu"])
def test_a_group_of_xdists_is_no_part_of_a_tests_name(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, group: str
) -> None:
    pytester.makepyfile(
        test_a="""
        import pytest
        class TestA:
            class TestB:
                @pytest.mark.parametrize("n", ["a::b", "c"])
                def test_step(self, ddp_benchmark, n): ...
        def test_sizes(ddp_benchmark): ...
        """
    )
    items, _ = pytester.inline_genitems(
        "-p", "no:randomly", "--ddp-world-size=2,4"
    )
    plain = [item.nodeid for item in items]
    names = (
        ["TestA::TestB::test_step[a::b]"] * 2
        + ["TestA::TestB::test_step[c]"] * 2
        + ["test_sizes"] * 2
    )
    as_collected: Any = pytest.Item.nodeid
    named = property(
        lambda item: as_collected.__get__(item) + group * (item in items)
    )
    monkeypatch.setattr(pytest.Function, "nodeid", named)
    assert [item.nodeid for item in items] == [
        nodeid + group for nodeid in plain
    ]
    assert [nodeid_of(item) for item in items] == plain
    assert [name_of(item) for item in items] == names


# --- verdicts of measurements that are made up

TESTS = """
import pytest
def test_step(ddp_benchmark):
    ddp_benchmark(lambda ctx: lambda: None, name="first")
    ddp_benchmark(lambda ctx: lambda: None)
"""
# As pytest-rerunfailures before 16.6.1: the report of the teardown of what is run again is never
# logged.
RERUNS = """
from _pytest.runner import runtestprotocol
def pytest_runtest_protocol(item, nextitem):
    for attempt in range(2):
        for report in runtestprotocol(item, nextitem=nextitem, log=False):
            again = report.failed and not attempt
            report.outcome = "rerun" if again else report.outcome
            item.ihook.pytest_runtest_logreport(report=report)
            if again:
                break
        else:
            break
    return True
"""
Run = Callable[..., "tuple[pytest.RunResult, list[Outcome], list[str]]"]


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run whose measurements come to these verdicts, None for a launch that failed: what pytest
    prints, outcomes by the JSON, and labels in the order they were measured."""

    def run(text: str, *statuses: Status | None, plugin: str = "") -> Any:
        labels: list[str] = []

        def carry_out(
            role: PytestRole, job: Job, session: Session, progress: object
        ) -> Measured:
            status = statuses[len(labels)]
            labels.append(job.test.label)
            if status is None:
                raise DdpPerfError("rank 1 failed in setup: ValueError: bad")
            return measured(job, status)

        monkeypatch.setattr(Session, "facts", lambda session: CPU)
        monkeypatch.setattr(PytestRole, "carry_out", carry_out)
        pytester.makepyfile(test_a=text)
        pytester.makeconftest(plugin)
        monkeypatch.setenv("GITHUB_ACTIONS", "true")
        off = [
            f"-pno:{name}"
            for name in (
                "randomly",
                "benchmark",
                "rerunfailures",
                "cacheprovider",
            )
        ]
        result = pytester.runpytest_inprocess(
            *off, "--ddp-json=a.json", "--junitxml=a.xml", "--ddp-markdown=a.md"
        )
        report = json.loads(Path("a.json").read_text())["measurements"]
        return result, report, labels

    return run


def measured(job: Job, status: Status) -> Measured:
    return Measured(
        job=job,
        verdict=verdict(status),
        fails=status is Status.REGRESSED,
        rounds=(Round(LAUNCH),) * 2,
        measurement=combine((LAUNCH, LAUNCH), Environment()),
    )


def summary(report: list[Any]) -> list[tuple[str, str, bool, list[str]]]:
    return [
        (
            each["test"]["label"],
            each["verdict"]["status"],
            each["fails"],
            each["notes"],
        )
        for each in report
    ]


def test_a_gate_that_failed_is_reported_though_a_rerun_drops_the_report_of_its_attempt(
    run: Run,
) -> None:
    result, report, labels = run(
        TESTS, Status.PASS, Status.REGRESSED, Status.IMPROVED, plugin=RERUNS
    )
    assert labels == ["first", "", "first"], (
        "a rerun does not measure again what was red"
    )
    assert summary(report) == [
        ("first", "IMPROVED", False, []),
        ("", "REGRESSED", True, []),
    ]
    result.stdout.fnmatch_lines(
        ["*A rerun does not measure again*", "::error *", "*(2 of 2 compared)"]
    )


@pytest.mark.parametrize("status", [Status.REGRESSED, None])
def test_what_is_expected_to_fail_is_reported_as_that(
    run: Run, status: Status | None
) -> None:
    text = TESTS.replace("def", "@pytest.mark.xfail\ndef")
    result, report, _ = run(text, Status.PASS, status)
    result.assert_outcomes(xfailed=1)
    assert [(each["fails"], each["notes"]) for each in report] == [
        (False, []),
        (False, ["expected to fail"]),
    ]
    assert "::error" not in result.stdout.str()
    result.stdout.fnmatch_lines(["::warning *", "test_step: expected to fail"])
    assert "**" not in Path("a.md").read_text()


@pytest.mark.parametrize(
    "mark", ["xfail(raises=OSError)", "xfail(False, reason='here')"]
)
def test_what_fails_otherwise_than_expected_fails(run: Run, mark: str) -> None:
    result, report, _ = run(
        TESTS.replace("def", f"@pytest.mark.{mark}\ndef"),
        Status.PASS,
        Status.REGRESSED,
    )
    result.assert_outcomes(failed=1)
    assert summary(report) == [
        ("first", "PASS", False, []),
        ("", "REGRESSED", True, []),
    ]


def test_a_result_is_short_in_the_message_of_an_assertion() -> None:
    result = Result(
        step_seconds=((0.005,) * 300,) * 5,
        samples=(((0.005,) * 300,) * 2,) * 5,
        world_size=2,
        backend="gloo",
        verdict=verdict(Status.PASS, 0.0),
        environment=CPU,
        counters={},
        recorded={},
        figures={},
        rank_phases=(),
    )
    assert repr(result) == "<Result p50=5.00 ms PASS on 2 ranks>"
