"""Messages between a leading pytest and a remote one: what arrives is what was sent."""

from __future__ import annotations

import json
import math
import socket
from dataclasses import replace
from typing import Any

import pytest

from pytest_ddpperf import __version__
from pytest_ddpperf.plugin import remote_worker
from pytest_ddpperf.records import codec
from pytest_ddpperf.records.messages import Event, EventKind, Order, OrderKind, Sources
from pytest_ddpperf.records.plan import Plan
from pytest_ddpperf.records.reason import Reason
from pytest_ddpperf.records.samples import RankError, RankOutput, Status, Verdict
from pytest_ddpperf.wire.channels import Lines
from tests.unit.test_launches import LAUNCH

PLAN = Plan(world_size=2, nodes=2, backend="gloo", device="cpu", preload=("a",))
FAILED = RankError(rank=1, when=math.inf, phase="setup", summary="ValueError: x")


def sent(message: Order | Event) -> Any:
    """Return a message as it arrives, from JSON."""
    return codec.decode(
        type(message), json.loads(json.dumps(codec.encode_message(message)))
    )


@pytest.mark.parametrize(
    "message",
    [*map(Order, OrderKind), *map(Event, EventKind)],
    ids=lambda message: message.kind,
)
def test_a_message_of_each_kind_arrives(message: Order | Event) -> None:
    assert sent(message) == message


def test_all_records_of_an_order_arrive() -> None:
    order = Order(
        OrderKind.END_MEASUREMENT,
        plan=PLAN,
        steps=0,
        samples=(LAUNCH, LAUNCH),
        verdict=Verdict(status=Status.PASS, reason=Reason.WITHIN_LIMIT),
        fails=True,
        results=(b"\xff\n", b""),
        error="",
        store=("::1", 29500),
    )
    assert sent(order) == order


def test_all_records_of_an_event_arrive() -> None:
    event = Event(
        EventKind.SHARE_ENDED,
        sources=Sources(python="3.12.1", prefix="/venv", files={"a.py": "1"}),
        facts={"cores": 2, "share": 0.5, "driver": None, "pinned": True},
        plan=PLAN,
        samples=(replace(LAUNCH, cpu_seconds=None),),
        errors=(FAILED,),
        waiting=(FAILED, replace(FAILED, when=1.5)),
        output=(RankOutput(rank=1, name="rank 1", stdout="a\n", stderr="ö"),),
        results={0: b"", 11: b"\x00\xff"},
        versions={"pytest": "9.2"},
    )
    assert sent(event) == event


def test_fields_that_only_the_other_side_knows_are_ignored() -> None:
    order = codec.decode(Order, {"kind": "launch", "steps": 3, "speed": "high"})
    assert order == Order(OrderKind.LAUNCH, steps=3)


def test_a_remote_pytest_of_another_version_says_so_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it says next may mean something else to the leader, and what the leader says to it."""
    monkeypatch.setattr(remote_worker.faulthandler, "register", lambda *_, **__: None)
    ours, theirs = socket.socketpair()
    with ours:
        with pytest.raises(SystemExit):
            remote_worker.main(
                theirs.detach(),
                {"sys_path": None, "version": "0.0", "trees": "of another kind"},
            )
        leader = Lines(ours)
        messages = leader.receive()
        assert messages is not None
        assert [codec.decode(Event, message) for message in messages] == [
            Event(EventKind.HELLO, version=__version__)
        ]
