"""Whose shared memory a rank server may remove."""

from __future__ import annotations

import os

import pytest

from pytest_ddpperf.rank import fork_server

HOST = {"ipc": "ipc:[4026531839]", "pid": "pid:[4026531836]"}


@pytest.mark.parametrize(
    ("own", "removed"),
    [
        ([], ["torch_7_*"]),
        (["ipc", "pid"], ["torch_7_*"]),
        (["ipc"], ["torch_7_*"]),
        (["pid"], []),
    ],
    ids=["host", "container", "own memory", "memory of the host"],
)
def test_batches_go_unless_another_container_may_have_the_pid(
    monkeypatch: pytest.MonkeyPatch, own: list[str], removed: list[str]
) -> None:
    def readlink(path: str) -> str:
        name = path.removeprefix("/proc/self/ns/")
        return f"{name}:[4026532201]" if name in own else HOST[name]

    patterns: list[str] = []
    monkeypatch.setattr(os, "readlink", readlink)
    monkeypatch.setattr(fork_server, "_remove_shared", patterns.append)

    fork_server._remove_batches(7)

    assert patterns == removed
