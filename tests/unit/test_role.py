"""The roles of a pytest process: what each does for a call, for its nodes and at the end."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_ddpperf.launch import Observer
from pytest_ddpperf.plugin import judged, remote
from pytest_ddpperf.plugin import role as role_module
from pytest_ddpperf.plugin.role import (
    LEADER,
    Call,
    ComparesStored,
    LeadsVersion,
    PytestRole,
    choose_role,
)
from pytest_ddpperf.records.guard import Kind, Loosened
from pytest_ddpperf.records.messages import EndCall, Order, ReadyToCall
from pytest_ddpperf.records.plan import Plan
from pytest_ddpperf.verdict import guard

PLAN = Plan(world_size=2, backend="gloo", device="cpu")


class Recorder:
    """A launcher that only notes what is asked of it."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def call(
        self, plan: Plan, function: Any, args: Any, observer: Any
    ) -> list[Any]:
        self.asked.append(f"call on {plan.nodes}")
        self.observer = observer
        return [0, 1]

    def call_for_bytes(
        self, plan: Plan, task: bytes, observer: Any
    ) -> tuple[bytes]:
        self.asked.append(f"call on {plan.nodes} for bytes")
        return (pickle.dumps(7),)


def leading(role: PytestRole, nodes: Any) -> PytestRole:
    role.lead(nodes)
    return role


class Nodes:
    """Another node, as the one that leads sees it."""

    count = 2
    reported = ["a connection was dropped"]

    def __init__(self) -> None:
        self.orders: list[Order] = []
        self.ended: list[Any] = []

    @contextmanager
    def together(
        self, nodeid: str, ready: ReadyToCall, nodes: int
    ) -> Iterator[Callable[[Order], None]]:
        assert (nodeid, ready.label, nodes) == ("test_a.py::test_a", "list", 2)
        yield self.orders.append

    def leave(self) -> None:
        self.ended.append("test")

    def failed(self) -> list[str]:
        return ["node 1: not removed"]

    def close(self, status: int) -> None:
        self.ended.append(status)


def run(config: pytest.Config) -> Any:
    return SimpleNamespace(config=config, worker=False)


def test_a_pytest_works_for_its_leader_or_else_alone(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    config = pytester.parseconfig("-p", "no:randomly")
    assert type(choose_role(run(config))) is ComparesStored
    leader = PytestRole()
    leader.relay = Observer()
    config.stash[LEADER] = leader
    role = choose_role(run(config))
    assert role is leader
    assert role.confirms(run(config)) == ""
    launcher: Any = Recorder()
    assert role.call(Call("a", PLAN, list, ()), launcher, Observer()) == [0, 1]
    assert launcher.observer is leader.relay


def test_another_version_is_left_with_each_test_and_closed_at_the_end() -> None:
    ended: list[str] = []
    side: Any = SimpleNamespace(
        trees="trees",
        version="main",
        environ={"A": "1"},
        leave=lambda: ended.append("test"),
        close=lambda: ended.append("run"),
    )
    role = LeadsVersion(side)
    assert role.trees == "trees"
    assert (role.facts(), role.environments()) == (
        {"against": "main"},
        {"main": {"A": "1"}},
    )
    assert (role.end_test(), role.messages()) == ([], [])
    role.close(0)
    assert ended == ["test", "run"]


def test_of_several_pytests_on_a_machine_each_says_that_it_runs_all_tests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes: Any = Nodes()
    side: Any = SimpleNamespace(trees=None)
    alone = ComparesStored(), LeadsVersion(side)
    said = (
        "each of 2 pytests here runs all tests: start pytest without torchrun"
    )
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert [role.messages() for role in alone] == [[], []]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    assert [role.messages() for role in alone] == [[said], [said]]
    # the others of a node end at once
    over_nodes = leading(ComparesStored(), nodes)
    assert over_nodes.messages() == nodes.reported
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert [role.messages() for role in alone] == [[], []]


def test_a_baseline_is_confirmed_on_all_nodes_of_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes: Any = Nodes()
    started: list[Any] = []
    monkeypatch.setattr(
        remote, "start_commit", lambda *all: started.append(all)
    )
    process = SimpleNamespace(worker=False)
    confirms: Any = leading(ComparesStored(), nodes).confirms
    confirms(process)("1a2b", 60.0)
    confirms = ComparesStored().confirms
    confirms(process)("1a2b", 60.0)
    assert started == [
        (process, nodes, "1a2b", 60.0),
        (process, None, "1a2b", 60.0),
    ]


def test_a_worker_of_xdist_confirms_nothing_and_says_why() -> None:
    process: Any = SimpleNamespace(worker=True)
    assert (
        ComparesStored().confirms(process)
        == "not supported under xdist: add -n 0"
    )


def test_a_raised_limit_is_found_over_nodes_but_not_what_a_run_of_one_saved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lost(outcomes: Any, marked: Any, missing: str) -> Any:
        asked.append(missing)
        yield Loosened(kind=Kind.NOT_COMPARED, since="", test="b")

    asked: list[str] = []
    raised = Loosened(kind=Kind.LIMIT, since="", test="a")
    monkeypatch.setattr(
        guard, "since_baseline", lambda outcomes: iter([raised])
    )
    monkeypatch.setattr(role_module, "leaves_tests_out", lambda run: False)
    monkeypatch.setattr(judged, "why_not_judged", lambda run: ())
    process: Any = SimpleNamespace(
        settings=SimpleNamespace(records=False, disable=False, fail_on=()),
        items=["b"],
        exit_status=0,
        failed=set(),
        session=SimpleNamespace(find_lost=lost),
    )
    nodes: Any = Nodes()
    outcomes: Any = ["a"]
    # --session-timeout ends it as failed
    for status in (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.TESTS_FAILED):
        process.exit_status = status
        found = ComparesStored().guard(process, outcomes)[0]
        assert [each.kind for each in found] == [Kind.LIMIT]
    # as of a plugin that runs no further test, and says nothing
    process.exit_status = pytest.ExitCode.OK
    found = ComparesStored().guard(process, outcomes)[0]
    assert [each.kind for each in found] == [Kind.LIMIT, Kind.NOT_COMPARED]
    monkeypatch.setattr(role_module, "leaves_tests_out", lambda run: True)
    assert len(ComparesStored().guard(process, outcomes)[0]) == 2
    assert asked == ["not measured", ""]
    found = leading(ComparesStored(), nodes).guard(process, outcomes)[0]
    assert [each.kind for each in found] == [Kind.LIMIT]


def test_other_nodes_take_part_in_what_has_ranks_on_them() -> None:
    nodes: Any = Nodes()
    role, launcher = leading(ComparesStored(), nodes), Recorder()
    call = Call("test_a.py::test_a", PLAN, list, ())
    asked: Any = launcher
    assert role.call(call, asked, Observer()) == [0, 1]
    assert nodes.orders == []
    call = call._replace(plan=replace(PLAN, nodes=2))
    assert role.call(call, asked, Observer()) == [7]
    assert launcher.asked == ["call on 1", "call on 2 for bytes"]
    (order,) = nodes.orders
    assert isinstance(order, EndCall)
    assert len(order.results) == 1
    assert role.end_test() == ["node 1: not removed"]
    assert role.messages() == ["a connection was dropped"]
    role.close(3)
    assert nodes.ended == ["test", 3]
