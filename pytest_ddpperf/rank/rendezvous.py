"""torchrun's own store, asked by a process that has nothing else to do: see `nodes.rendezvous`, which starts it."""

from __future__ import annotations

import json
import os
import signal
import socket
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist

from pytest_ddpperf.rank import process
from pytest_ddpperf.wire.channels import Lines, Message


def main(descriptor: int, start: Message) -> NoReturn:
    """Tell, or wait to be told; then stay until pytest closes the connection, for this process may hold the store."""
    process.die_with_parent(start["parent"], signal.SIGKILL)
    control = Lines(socket.socket(fileno=descriptor))
    try:
        store, answered = _asked(start)
        control.send(answered)
    except Exception as error:
        control.send({"event": "failed", "text": f"{type(error).__name__}: {error}"})
        store = None
    while control.receive() is not None:
        pass
    if start["tell"] is not None and store is not None:
        with suppress(Exception):  # it may be gone, and nobody asks
            store.delete_key(start["key"])  # a second pytest of the same run would find the first one
    os._exit(0)


def _asked(start: Message) -> tuple[Any, Message]:
    timeout = timedelta(seconds=start["seconds"])
    if start["hosts"]:
        store = _held(start["tell"]["address"], start["port"], timeout)
    else:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            start["address"], start["port"], is_master=False, wait_for_workers=False, timeout=timeout
        )
    if start["tell"] is not None:
        store.set(start["key"], json.dumps(start["tell"]))
        return store, {"event": "told"}
    store.wait([start["key"]], timeout)
    return store, {"event": "found", "found": json.loads(store.get(start["key"]))}


def _held(address: str, port: int, timeout: timedelta) -> Any:
    """The store itself, on one interface: torch by itself would listen on all of them."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    descriptor = socket.create_server((address, port), family=family).detach()
    return dist.TCPStore(  # type: ignore[attr-defined]
        address, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=descriptor
    )
