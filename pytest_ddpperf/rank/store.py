"""The stores in which ranks and nodes meet.

The ranks of a launch meet in a file or, on several nodes, in a process of the launch that holds a store on a socket
which was bound before: torch by itself would listen on all interfaces, on a port that another process may take. The
pytest processes of several nodes meet in torchrun's own store, which `main` asks (see `nodes.rendezvous`).
"""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from pytest_ddpperf.wire import boot
from pytest_ddpperf.wire.channels import Lines, Message

_SCHEME = "ddpperf"


def serve(descriptor: int) -> NoReturn:
    """Hold the store of a launch on a bound socket, until the rank server ends it."""
    server = os.getppid()
    os.setsid()
    boot.die_with_parent(server, signal.SIGKILL)
    with socket.socket(fileno=descriptor) as bound:
        host, port = bound.getsockname()[:2]
        bound.detach()
    _owned = dist.TCPStore(  # type: ignore[attr-defined]
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor
    )
    while True:
        signal.pause()


def store_of(name: str, size: int, folder: Path, address: tuple[str, int] | None, timeout: timedelta) -> Any:
    """Return the store of a group of so many ranks: a file in `folder` or, on several nodes, at `address`."""
    if address is None:
        file = dist.FileStore(str(folder / name), size)  # type: ignore[attr-defined]
        file.set_timeout(timeout)
        return file
    client = dist.TCPStore(*address, is_master=False, wait_for_workers=False, timeout=timeout)  # type: ignore[attr-defined]
    return dist.PrefixStore(name, client)  # type: ignore[attr-defined]


def url_of(name: str, size: int, folder: Path, address: tuple[str, int] | None, timeout: timedelta) -> str:
    """Return the URL of such a store, for what takes an `init_method` only."""
    if address is None:
        return (folder / name).as_uri()

    def rendezvous(url: str, **_: object) -> Iterator[tuple[Any, int, int]]:
        yield store_of(name, size, folder, address, timeout), -1, size

    dist.register_rendezvous_handler(_SCHEME, rendezvous)  # type: ignore[attr-defined, no-untyped-call]
    return f"{_SCHEME}://{name}"


def main(descriptor: int, start: Message) -> NoReturn:
    """Publish a value or wait for it; then stay until pytest closes the connection: this process may own the store."""
    boot.die_with_parent(start["parent"], signal.SIGKILL)
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
        store = _own_store(start["tell"]["address"], start["port"], timeout)
    else:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            start["address"], start["port"], is_master=False, wait_for_workers=False, timeout=timeout
        )
    if start["tell"] is not None:
        store.set(start["key"], json.dumps(start["tell"]))
        return store, {"event": "told"}
    store.wait([start["key"]], timeout)
    return store, {"event": "found", "found": json.loads(store.get(start["key"]))}


def _own_store(address: str, port: int, timeout: timedelta) -> Any:
    """Own the store, on one interface: torch by itself would listen on all of them."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    descriptor = socket.create_server((address, port), family=family).detach()
    return dist.TCPStore(  # type: ignore[attr-defined]
        address, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=descriptor
    )
