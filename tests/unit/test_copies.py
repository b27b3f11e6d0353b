"""What a step copies between the host and a device, counted on tensors of a device without
memory."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch

from pytest_ddpperf.rank.sent import Dispatched


@pytest.mark.parametrize(
    ("step", "counts"),
    [
        ("here.to('meta')", {"h2d.bytes": 8, "host_syncs": 1}),
        ("there.copy_(here)", {"h2d.bytes": 8, "host_syncs": 1}),
        ("here.to('meta', non_blocking=True)", {"h2d.bytes": 8}),
        ("there.copy_(here, non_blocking=True)", {"h2d.bytes": 8}),
        ("there.cpu()", {"d2h.bytes": 8, "host_syncs": 1}),
        ("here.copy_(there)", {"d2h.bytes": 8, "host_syncs": 1}),
        ("here.copy_(there, True)", {"d2h.bytes": 8}),
        ("there.to('cpu', non_blocking=True)", {"d2h.bytes": 8}),
        ("there.sum().item()", {"host_syncs": 1}),
        ("there.nonzero()", {"host_syncs": 1}),
        (
            "there.half(); there.clone(); here.half(); here.copy_(here); here.sum().item()",
            {},
        ),
    ],
)
def test_copies_and_waits_are_counted(
    step: str, counts: dict[str, int]
) -> None:
    there, here = torch.empty(2, device="meta"), torch.empty(2)
    # there is nothing to copy
    with Dispatched([]) as seen, suppress(RuntimeError):
        exec(step, {"there": there, "here": here})
    assert {
        name: count for name, count in seen.copies.items() if count
    } == counts
