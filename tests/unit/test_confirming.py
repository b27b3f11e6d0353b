"""How a run spends its time on suspicions, without any ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pytest_ddpperf.against.origin import Origin
from pytest_ddpperf.measuring.circumstances import Held, had_others
from pytest_ddpperf.measuring.confirming import Code, Confirming

from pytest_ddpperf.baseline import Store
from pytest_ddpperf.measuring import circumstances, confirming
from pytest_ddpperf.measuring.benchmark import Job, Measured
from pytest_ddpperf.records import (
    BaselineSide,
    Distribution,
    Environment,
    Limit,
    Phases,
    RankError,
    Scalar,
    Status,
    Version,
)
from pytest_ddpperf.records.errors import AgainstError, BaseSideError, LaunchError
from pytest_ddpperf.wire.trees import Trees
from tests.unit.test_benchmark import PROGRESS, carried_out, job, lasting
from tests.unit.test_launches import LAUNCH

Facts = dict[str, Scalar]
Pairs = tuple[Any, ...]

SLOWER = replace(LAUNCH, phases=Phases(start=0.0, group=0.0, setup=0.0, warmup=0.0, steps=0.35, end=0.0))
BESIDE = BaselineSide(
    version=Version(ref="1" * 40, commit="1" * 40, now="2" * 40), seed=1, order="bn", differing=("net.py",)
)
LIMITS = (Limit(metric="p50", value=0.1, unit="%"),)


class Run:
    """A run with a clock of its own: a side is ready after 5 s, and turns take 7."""

    def __init__(self, seconds: float, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.asked: list[tuple[Code, float]] = []  # sides, and the seconds that they were given
        self.left: list[str] = []  # what was ended, in its order
        self.turned: list[str] = []  # how turns were asked for
        self.seconds: list[float] = []  # that they were given
        self.confirming = Confirming(seconds, folder, self.side_of)
        store = Store(folder)
        store.write(carried_out(lasting(0.02), store, save_baseline=True).candidate)
        slower = carried_out(lambda plan: replace(lasting(0.04)(plan), phases=SLOWER.phases), store, limits=LIMITS)
        self.suspected = slower
        self.in_turns = slower.outcome
        self.there = slower.result.environment  # of the launches of the baseline's code
        self.store = store
        monkeypatch.setattr(confirming, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(confirming, "origin_of", lambda *_, builds: Origin(commit="1" * 40))
        monkeypatch.setattr(confirming.benchmark, "carry_out", self.turns)
        self.failing: Callable[[], None] = lambda: None

    def side_of(self, code: Code, seconds: float) -> Any:
        self.asked.append((code, seconds))
        self.now += 5
        return SimpleNamespace(
            why_missing=lambda nodeid: "",
            again=lambda file, seconds: self.asked.append((Code(commit="again", file=file), seconds)),
            tree=Trees(hand="/hand", base="/base", kept=()),
            dead=False,
            leave=lambda: self.left.append("leave"),
            close=lambda: self.left.append("close"),
        )

    def turns(self, asked: Job, *rest: Any) -> Measured:
        assert asked.settles
        assert asked.steps == len(self.suspected.shown[0].step_seconds), "what grows is not acquitted by fewer"
        self.turned.append(asked.settings.turns)
        self.seconds.append(asked.settings.max_seconds)
        self.failing()
        self.now += 7
        there = replace(self.suspected.candidate.sessions[0].measurement, environment=self.there)
        return replace(self.suspected, outcome=replace(self.in_turns, baseline_side=replace(BESIDE, measurement=there)))

    def settle(self, nodeid: str = "m.py::t") -> Measured:
        return self.confirming.settle(replace(job(), nodeid=nodeid), self.suspected, None, self.store, PROGRESS)  # type: ignore[arg-type]


def test_a_run_of_many_suspicions_keeps_to_its_time_and_tells_what_it_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(60.0, tmp_path, monkeypatch)
    settled = [run.settle() for _ in range(30)]
    reasons = [measured.outcome.verdict.reason for measured in settled if measured.outcome.verdict is not None]
    assert reasons == ["confirmed"] * 7 + ["beyond-limit"] * 23, "5 + 7 x 7 = 54 s"
    assert run.now <= 60
    assert settled[-1].outcome.notes[-1] == (
        "not confirmed on the baseline's own code: it takes about 7 s, and 6 of the 60 s of --ddp-confirm are left"
    )
    assert list(run.confirming.told()) == [
        "the 60 s of --ddp-confirm did not suffice: 23 measurements that looked slower stayed with what the baselines "
        "say"
    ]


def test_there_is_one_side_for_all_tests_of_a_file_and_one_tree_for_all_files_of_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(100.0, tmp_path, monkeypatch)
    for nodeid in ("a.py::first", "a.py::second", "b.py::third"):
        run.settle(nodeid)
    assert run.asked == [(Code(commit="1" * 40, file="a.py"), 100.0), (Code(commit="again", file="b.py"), 81.0)]
    assert run.left == ["leave"] * 3
    run.confirming.close()
    assert run.left[3:] == ["close"]


def test_a_side_that_cannot_be_had_is_not_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(100.0, tmp_path, monkeypatch)

    def none(code: Code, seconds: float) -> Any:
        run.asked.append((code, seconds))
        raise AgainstError("--ddp-against-setup", "'make' exited with status 2")

    run.confirming = Confirming(100.0, tmp_path, none)
    notes = {run.settle().outcome.notes[-1] for _ in range(3)}
    assert notes == {"not confirmed on the baseline's own code: 'make' exited with status 2"}
    assert len(run.asked) == 1


def test_what_ends_the_run_waits_for_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(100.0, tmp_path, monkeypatch)

    def interrupted() -> None:
        raise KeyboardInterrupt

    def failed() -> None:
        raise BaseSideError("E   ImportError: no such thing\nmore")

    run.failing = failed
    assert run.settle().outcome.notes[-1].endswith("own code: ImportError: no such thing")
    assert run.left == ["leave"]
    run.failing = interrupted
    with pytest.raises(KeyboardInterrupt):
        run.settle()
    assert run.left == ["leave", "close"], "it may be anywhere"
    assert [seconds for _, seconds in run.asked] == [100.0]
    run.failing = lambda: None
    run.settle()
    assert [seconds for _, seconds in run.asked] == [100.0, 95.0], "what it took is spent"


def test_a_side_that_took_all_the_time_to_be_ready_settles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(11.0, tmp_path, monkeypatch)
    note = run.settle().outcome.notes[-1]
    assert note.endswith("it takes about 7 s, and 6 of the 11 s of --ddp-confirm are left")
    assert run.now == 5


def test_a_launch_of_the_code_at_hand_that_fails_is_red(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(100.0, tmp_path, monkeypatch)

    def failed() -> None:
        raise LaunchError(RankError(rank=0, phase="step 3", summary="killed by SIGKILL", when=0.0), (), ())

    run.failing = failed
    with pytest.raises(LaunchError, match="killed by SIGKILL"):
        run.settle()
    assert run.turned == ["auto", "launches"], "beside the other it may fail for that alone"


def test_what_fails_beside_the_other_alone_is_measured_launch_by_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(100.0, tmp_path, monkeypatch)

    def failed() -> None:
        if run.turned[-1] != "launches":
            raise LaunchError(RankError(rank=0, phase="step 30", summary="StopIteration", when=0.0), (), ())

    run.failing = failed
    settled = run.settle().outcome
    verdict = settled.verdict
    assert verdict is not None
    assert verdict.reason == "confirmed"
    assert run.left == ["leave", "leave"]
    assert any("none by itself: rank 0 failed in step 30: StopIteration" in note for note in settled.notes)


@pytest.mark.parametrize(
    ("rebuilt", "status", "reason"),
    [
        ("1", "INCONCLUSIVE", "machine-drifted"),
        ("2", "REGRESSED", "beyond-limit"),
    ],
)
def test_what_is_built_anew_acquits_only_if_it_is_what_the_baseline_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rebuilt: str, status: str, reason: str
) -> None:
    run = Run(100.0, tmp_path, monkeypatch)
    baseline = run.suspected.baseline
    assert baseline is not None
    (session,) = baseline.sessions
    session = replace(session, files={"extension.so": "1"})
    run.suspected = replace(run.suspected, baseline=replace(baseline, sessions=(session,)))
    run.in_turns = carried_out(lasting(0.02), run.store, limits=LIMITS).outcome
    monkeypatch.setattr(confirming, "origin_of", lambda *_, builds: Origin(commit="1" * 40, built=("extension.so",)))
    monkeypatch.setattr(confirming, "digests", lambda top, files: dict.fromkeys(files, rebuilt))
    outcome = run.settle().outcome
    verdict = outcome.verdict
    assert verdict is not None
    assert (verdict.status.name, verdict.reason) == (status, reason)
    assert any("nobody knows what extension.so held then" in note for note in outcome.notes) is (rebuilt == "2")


def test_a_launch_that_failed_beside_the_other_is_told_though_nothing_was_settled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(100.0, tmp_path, monkeypatch)
    run.there = replace(run.there, recorded={**run.there.recorded, "env:OMP_NUM_THREADS": "64"})

    def failed() -> None:
        if run.turned[-1] != "launches":
            run.now += 20
            raise LaunchError(RankError(rank=0, phase="step 30", summary="StopIteration", when=0.0), (), ())

    run.failing = failed
    note = run.settle().outcome.notes[-1]
    assert "not confirmed on the baseline's own code: it ran with OMP_NUM_THREADS 64" in note
    assert "none by itself: rank 0 failed in step 30: StopIteration" in note
    first, second = run.seconds
    assert second == first - 20


@pytest.mark.parametrize("status", ["INCONCLUSIVE", "PASS"])
def test_both_sides_failures_are_told_where_one_fails_beside_the_other_and_the_other_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    """Of a verdict, too, that nobody doubted but the run itself."""
    run = Run(100.0, tmp_path, monkeypatch)
    verdict = run.suspected.outcome.verdict
    assert verdict is not None
    doubted = replace(verdict, status=Status(status))
    run.suspected = replace(run.suspected, outcome=replace(run.suspected.outcome, verdict=doubted))

    def failed() -> None:
        if run.turned[-1] == "launches":
            raise BaseSideError("it died there\nand its traceback")
        raise LaunchError(RankError(rank=0, phase="step 30", summary="StopIteration", when=0.0), (), ())

    run.failing = failed
    settled = run.settle().outcome
    assert settled.verdict is doubted
    note = settled.notes[-1]
    assert "not confirmed on the baseline's own code: it died there" in note
    assert "none by itself: rank 0 failed in step 30: StopIteration" in note


def test_a_place_below_a_worktree_is_no_other_setting() -> None:
    then = now = {"env:TORCH_HOME": "/repo/.cache", "env:OMP_NUM_THREADS": "1", "env:LD_PRELOAD": "/lib/malloc.so"}
    there = {"env:TORCH_HOME": "/tmp/ddpperf/tree/.cache", "env:OMP_NUM_THREADS": "2"}
    trees = Trees(hand="/repo", base="/tmp/ddpperf/tree", kept=())
    others = had_others(there, now, then, held=Held(), trees=trees)
    assert others == ("LD_PRELOAD unset", "OMP_NUM_THREADS 2")


@pytest.mark.parametrize(
    ("then", "now", "there", "told"),
    [
        ("2.5", None, None, ["flash_attn 2.5 -> not there"]),
        ("2.5", None, "2.5", []),  # the code at hand does without it
        (None, "2.5", "2.5", ["flash_attn not there -> 2.5"]),
        (None, "2.5", None, []),  # the code at hand began to use it
        ("2.5", "2.6", "2.6", ["flash_attn 2.5 -> 2.6"]),
        ("2.5", "2.5", None, []),
    ],
)
def test_a_distribution_that_came_or_went_is_the_environments_where_the_baselines_code_misses_it_too(
    then: str | None, now: str | None, there: str | None, told: list[str]
) -> None:
    def installed(version: str | None) -> dict[str, Distribution]:
        return {"flash_attn": Distribution(version=version, digest=version)} if version is not None else {}

    assert list(circumstances._installed(installed(now), installed(then), installed(there))) == told


def test_what_its_tests_set_back_is_not_what_it_was_held_to() -> None:
    then, now = {"env:NCCL_ALGO": "Ring", "--hidden": "1024"}, {"env:NCCL_ALGO": "Tree", "--hidden": "2048"}
    trees = Trees(hand="/repo", base="/tmp/ddpperf/tree", kept=())
    held = Held(variables=("NCCL_ALGO=Ring",), options=(("--hidden", "1024"),), told=("NCCL_ALGO Ring -> Tree",))
    assert had_others(then, now, then, held=held, trees=trees) == ()
    assert had_others(now, now, then, held=held, trees=trees) == ("--hidden 2048", "NCCL_ALGO Tree")
    assert had_others(now, now, then, held=Held(), trees=trees) == ()


def test_of_files_that_no_rank_imported_those_are_named_that_a_step_may_read(tmp_path: Path) -> None:
    changed = [".ci/run", "README.md", "a.cu", "baselines/a.json", "baselines/b/c.json", "net.yaml", "vocab.txt"]
    side: Any = SimpleNamespace(changed=lambda: changed, trees=SimpleNamespace(hand=str(tmp_path)))
    told = list(confirming._of_files(side, (), tmp_path / "baselines"))
    assert told == ["files that no rank imported and that differ: a.cu, net.yaml, .ci/run, README.md, vocab.txt"]
    side.changed = lambda: ["baselines/a.json"]
    assert list(confirming._of_files(side, (), tmp_path / "baselines")) == []
    assert list(confirming._of_files(side, ("net.py",), tmp_path)) == []


@pytest.mark.parametrize(
    ("then", "now", "assignments", "options"),
    [
        ({}, {"env:OMP_NUM_THREADS": "4"}, ("OMP_NUM_THREADS",), ()),
        ({"env:OMP_NUM_THREADS": "1"}, {"env:OMP_NUM_THREADS": "4"}, ("OMP_NUM_THREADS=1",), ()),
        ({"env:OMP_NUM_THREADS": "1", "torch": "2.12"}, {"torch": "2.13"}, (), ()),  # which is looked at first
        ({"env:TORCH_HOME": "/home/a"}, {"env:TORCH_HOME": "/home/b"}, (), ()),  # which is not here any more
        ({"--hidden": "1024"}, {"--hidden": "2048"}, (), (("--hidden", "1024"),)),
        ({}, {"--hidden": "2048"}, (), ()),  # which its conftests did not know
    ],
)
def test_variables_and_options_are_those_of_the_baseline_where_they_can_be_and_nothing_else_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: Facts, now: Facts, assignments: Pairs, options: Pairs
) -> None:
    run = Run(100.0, tmp_path, monkeypatch)
    baseline = run.suspected.baseline
    assert baseline is not None
    (session,) = baseline.sessions

    def with_facts(environment: Environment, facts: Facts) -> Environment:
        return replace(environment, recorded={**environment.recorded, **facts})

    stored = replace(session.measurement, environment=with_facts(session.measurement.environment, then))
    result = replace(run.suspected.result, environment=with_facts(run.suspected.result.environment, now))
    session = replace(session, measurement=stored)
    run.suspected = replace(run.suspected, baseline=replace(baseline, sessions=(session,)), result=result)
    run.there = stored.environment
    run.settle()
    assert [code.assignments for code, _ in run.asked] == [assignments]
    assert [code.options for code, _ in run.asked] == [options]
    run.there = with_facts(stored.environment, {"env:OMP_NUM_THREADS": "64"})
    held = bool(assignments or options)
    wanted = "not what was recorded" if held else "neither what was recorded nor what is here"
    assert run.settle().outcome.notes[-1].endswith(f"it ran with OMP_NUM_THREADS 64, which is {wanted}")
