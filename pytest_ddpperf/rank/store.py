"""Where the ranks of a launch meet: a file where all are on one node, else a process of the launch that holds a store.

The socket was bound before, to one interface and a port that the kernel chose: torch by itself would listen on all of
them, on a port that somebody else may take meanwhile.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from pytest_ddpperf.rank import process

_SCHEME = "ddpperf"


def serve(descriptor: int) -> NoReturn:
    """Hold the store of a launch on a bound socket, until the rank server ends it."""
    server = os.getppid()
    os.setsid()
    process.die_with_parent(server, signal.SIGKILL)
    with socket.socket(fileno=descriptor) as bound:
        host, port = bound.getsockname()[:2]
        bound.detach()
    _held = dist.TCPStore(  # type: ignore[attr-defined]
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor
    )
    while True:
        signal.pause()


def store_of(name: str, size: int, folder: Path, address: tuple[str, int] | None, timeout: timedelta) -> Any:
    """The store of a group of so many ranks in this launch: a file in `folder` or, of several nodes, at `address`."""
    if address is None:
        file = dist.FileStore(str(folder / name), size)  # type: ignore[attr-defined]
        file.set_timeout(timeout)
        return file
    client = dist.TCPStore(*address, is_master=False, wait_for_workers=False, timeout=timeout)  # type: ignore[attr-defined]
    return dist.PrefixStore(name, client)  # type: ignore[attr-defined]


def url_of(name: str, size: int, folder: Path, address: tuple[str, int] | None, timeout: timedelta) -> str:
    """The same for what takes no store but an `init_method` only."""
    if address is None:
        return (folder / name).as_uri()

    def rendezvous(url: str, **_: object) -> Iterator[tuple[Any, int, int]]:
        yield store_of(name, size, folder, address, timeout), -1, size

    dist.register_rendezvous_handler(_SCHEME, rendezvous)  # type: ignore[attr-defined, no-untyped-call]
    return f"{_SCHEME}://{name}"
