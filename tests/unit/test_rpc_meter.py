"""What a step sends by RPC, where ranks cannot show it."""

from __future__ import annotations

from typing import Any

from pytest_ddpperf.rank.rpc_meter import RpcMeter


def test_a_request_may_be_under_way_when_the_counted_step_is_over() -> None:
    """A thread of the program sends it."""
    meter = RpcMeter()
    meter.begin()
    answer: Any = object()

    def original() -> Any:
        meter.close()
        return answer

    assert meter._invoke(original) is answer
    assert meter._invoke(lambda: answer) is answer
    assert meter._answers == [], "nothing that an answer holds stays"
