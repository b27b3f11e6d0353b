"""Messages between processes: what arrives is what was sent."""

from __future__ import annotations

import json
import math
import re
import socket
from dataclasses import replace
from typing import Any, get_args

import pytest

from pytest_ddpperf import __version__
from pytest_ddpperf.plugin import remote_worker
from pytest_ddpperf.records import codec
from pytest_ddpperf.records.messages import (
    Alive,
    EndMeasurement,
    Event,
    Hello,
    LaunchFailed,
    NodeJoined,
    Order,
    RankEnded,
    RankRequest,
    ReadyToCall,
    ReadyToMeasure,
    ServerAnswer,
    ServerRequest,
    ShareEnded,
    ShareProgress,
    ShareSettled,
    TakeLaunch,
    TakeShare,
)
from pytest_ddpperf.records.plan import Plan
from pytest_ddpperf.records.reason import Reason
from pytest_ddpperf.records.samples import (
    RankError,
    RankOutput,
    Status,
    Verdict,
)
from pytest_ddpperf.wire.channels import Lines
from tests.unit.test_launches import LAUNCH

PLAN = Plan(world_size=2, nodes=2, backend="gloo", device="cpu", preload=("a",))
FAILED = RankError(
    rank=1, when=math.inf, phase="setup", summary="ValueError: x"
)


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        (
            Order,
            EndMeasurement(
                samples=(LAUNCH, replace(LAUNCH, cpu_seconds=None)),
                verdict=Verdict(status=Status.PASS, reason=Reason.WITHIN_LIMIT),
                fails=True,
            ),
        ),
        (Order, TakeLaunch(steps=None)),
        (Order, TakeShare(PLAN, ("::1", 29500))),
        (
            Event,
            ShareProgress(
                {0: 7, 11: 0}, (11,), {11: {"0": [(8, "all_reduce", 4)]}}
            ),
        ),
        (
            Event,
            ShareEnded(
                errors=(FAILED,),
                waiting=(FAILED, replace(FAILED, when=1.5)),
                output=(
                    RankOutput(rank=1, name="rank 1", stdout="a\n", stderr="ö"),
                ),
                results={0: b"", 11: b"\x00\xff"},
            ),
        ),
        (
            Event,
            ReadyToMeasure(
                "a label",
                PLAN,
                batch_size=0,
                facts={
                    "cores": 2,
                    "share": 0.5,
                    "driver": None,
                    "pinned": True,
                },
            ),
        ),
        (Event, ReadyToCall("", PLAN, number=2)),
        (Event, NodeJoined("a", "b", {"pytest": "9.2"})),
        (ServerAnswer, RankEnded(pid=7, status=-9, when=1.25)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_message_arrives_as_it_was_sent(kinds: Any, message: Any) -> None:
    assert codec.decode(kinds, json.loads(codec.to_json(message))) == message


@pytest.mark.parametrize("kinds", [Order, Event, ServerRequest, ServerAnswer])
def test_each_kind_of_a_union_has_a_name_of_its_own(kinds: Any) -> None:
    names = [kind.__name__ for kind in get_args(kinds)]
    assert len(names) == len(set(names)) > 5


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"kind": "Dance"}, "kind: invalid value 'Dance'"),
        ({"kind": "LaunchFailed"}, "object missing required field `why`"),
        ({"kind": "LaunchFailed", "why": 3}, "why: expected `str`, got `int`"),
        ({"why": "x"}, "object missing required field `kind`"),
    ],
)
def test_what_is_no_message_is_an_error_that_says_where(
    fields: dict[str, Any], problem: str
) -> None:
    with pytest.raises(codec.CodecError, match=f"^{re.escape(problem)}$"):
        codec.decode(Event, fields)


def test_fields_that_only_the_other_side_knows_are_ignored() -> None:
    order = codec.decode(
        Order, {"kind": "TakeLaunch", "steps": 3, "speed": "high"}
    )
    assert order == TakeLaunch(steps=3)


def test_a_message_has_what_it_needs_only() -> None:
    assert codec.encode(Alive()) == {"kind": "Alive"}
    assert codec.encode(ShareSettled({})) == {
        "kind": "ShareSettled",
        "results": {},
    }
    assert codec.encode(LaunchFailed("")) == {"kind": "LaunchFailed", "why": ""}


def test_the_request_of_ranks_arrives_as_it_was_written() -> None:
    request = RankRequest(
        plan=PLAN,
        in_stretches=True,
        environ={"A": "\udcff"},
        node=1,
        processes=(2, 3),
        store=("10.0.0.1", 1),
        cwd="/",
        sys_path=["", "/a"],
        argv=["pytest"],
        cpus=((0, 2), ()),
        devices=("GPU-8932f937", "1"),
        threads=0,
        modules={"test_a": "/a/test_a.py"},
        trees=None,
    )
    assert codec.from_json(RankRequest, codec.to_json(request)) == request


def test_a_remote_pytest_of_another_version_says_so_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it says next may mean something else to the leader, and what the leader says to it."""
    monkeypatch.setattr(
        remote_worker.faulthandler, "register", lambda *_, **__: None
    )
    ours, theirs = socket.socketpair()
    with ours:
        with pytest.raises(SystemExit):
            remote_worker.main(
                theirs.detach(),
                {
                    "sys_path": None,
                    "version": "0.0",
                    "trees": "of another kind",
                },
            )
        leader = Lines(ours)
        assert leader.receive(Event) == [Hello(__version__)]
