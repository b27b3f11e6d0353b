"""Reports of another version that was interleaved with the working tree."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_ddpperf.plugin.results import RunResults
from pytest_ddpperf.records.codec import encode
from pytest_ddpperf.records.outcome import (
    BaselineSide,
    Outcome,
    RunInfo,
    Version,
)
from pytest_ddpperf.records.plan import Plan
from pytest_ddpperf.records.samples import Status, TestId
from pytest_ddpperf.report import sentences
from tests.unit.test_report import outcome, verdict

COMMIT = "1a2b3c4d5e6f" + "0" * 28
VERSION = Version(
    ref="origin/main", commit=COMMIT, now="5d6e7f8a9b0c" + "0" * 28
)
BESIDE = BaselineSide(
    version=VERSION, order="bnnb", imported=12, differing=("src/net.py",)
)


@pytest.mark.parametrize(
    ("version", "text"),
    [
        (VERSION, "origin/main (1a2b3c4)"),
        (replace(VERSION, ref=COMMIT), "1a2b3c4"),
        (replace(VERSION, ref="1a2b3c4"), "1a2b3c4"),
        (replace(VERSION, ref="self"), "the same code"),
        (replace(VERSION, ref="", environ=("A=1", "B=")), "A=1, B="),
        (
            replace(
                VERSION, python="/opt/python", option=("--kind", "two words")
            ),
            "origin/main (1a2b3c4), /opt/python, --kind 'two words'",
        ),
    ],
    ids=["ref", "hash", "short hash", "self", "environment", "all"],
)
def test_a_version_is_named_by_what_was_asked(
    version: Version, text: str
) -> None:
    assert str(version) == text


SAME = replace(BESIDE, differing=())


READ = replace(
    BESIDE, read=("src/data.json", "src/net.py", "a_submodule/net.py")
)
UNREAD = "no rank is known to have read what differs in "
BOTH = f"{UNREAD}a_submodule, conf.yaml, src/net.py"


@pytest.mark.parametrize(
    ("sides", "reported", "usage_error"),
    [
        ([READ], f"{UNREAD}conf.yaml", False),
        ([SAME], BOTH, False),
        ([replace(SAME, imported=0)], "", True),
        ([replace(SAME, imported=0, error="it died")], "", False),
        (
            [
                replace(SAME, imported=0),
                replace(SAME, imported=0, error="it died"),
            ],
            "",
            True,
        ),
        ([SAME, READ], f"{UNREAD}conf.yaml", False),
    ],
    ids=[
        "differs",
        "the same",
        "none imported",
        "not measured",
        "one not measured",
        "one differs",
    ],
)
def test_a_run_says_which_files_that_differ_no_rank_is_known_to_have_read(
    sides: list[BaselineSide], reported: str, usage_error: bool
) -> None:
    plan = Plan(world_size=2, backend="gloo", device="cpu")
    test = TestId(module="m", name="t")
    failed = Outcome(
        nodeid="m::t",
        test=test,
        plan=plan,
        launches=5,
        batch_size=None,
        verdict=None,
        fails=False,
    )
    run = RunResults(RunInfo())
    run.take(
        {
            "outcomes": [
                encode(replace(failed, nodeid=f"m::t{n}", baseline_side=s))
                for n, s in enumerate(sides)
            ]
        }
    )
    run.end(changed=("a_submodule", "conf.yaml", "src/net.py"))
    said = "the run fails: no test imported what differs between origin/main (1a2b3c4) and the"
    assert run.messages == [reported] * bool(reported)
    if reported:
        shown = [*run.lines(-1, 80)]
        assert reported in shown, "with -q, too"
        assert reported in run.run.messages
    assert run.usage_error.startswith(said) is usage_error
    assert (
        "install it with pip install -e ." in run.usage_error
    ) is usage_error


@pytest.mark.parametrize(
    ("side", "files"),
    [
        (SAME, "no file that differs was imported or read"),
        (BESIDE, "changed: src/net.py"),
        (replace(SAME, version=replace(VERSION, environ=("A=1",))), ""),
    ],
    ids=["none", "one", "a variable"],
)
def test_a_red_says_which_files_differ_or_that_none_does(
    side: BaselineSide, files: str
) -> None:
    red = outcome(
        verdict(Status.REGRESSED),
        baseline_side=side,
        evidence=("forward +6 ms of +6 ms",),
    )
    why = "; ".join(filter(None, ("forward +6 ms of +6 ms", files)))
    assert f"\nwhy: {why}\n" in sentences.gate_failure(red)
    assert sentences.headline(red).endswith(f": {why}")


def test_what_failed_otherwise_than_by_a_measurement_is_counted() -> None:
    plan = Plan(world_size=2, backend="gloo", device="cpu")
    run = RunResults(RunInfo())
    for name, fails in (("green", False), ("own", False), ("gate", True)):
        measured = Outcome(
            nodeid=f"m::{name}",
            test=TestId(module="m", name=name),
            plan=plan,
            launches=5,
            batch_size=None,
            verdict=None,
            fails=fails,
        )
        run.take({"outcomes": [encode(measured)]})
    of_group = "m::gate@group"  # of xdist's --dist loadgroup
    run.end(["m::own", of_group, "m::typo@group", "test_broken.py"])
    assert run.run.other_failures == 3
    run.end(["m::own", "m::gate", "m::typo", "test_broken.py"])
    assert run.run.other_failures == 3
    assert "3 other failures (" in list(run.lines(0, 100))[-1]
