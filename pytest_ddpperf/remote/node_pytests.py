"""The pytests that a node runs for the first one: of the current code, and of another version."""

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pytest_ddpperf.launch.template import Templates, read_at_import
from pytest_ddpperf.options.settings import Settings
from pytest_ddpperf.records.errors import (
    AgainstError,
    BaseSideError,
    DdpPerfError,
    NodesError,
)
from pytest_ddpperf.records.messages import ServeVersion
from pytest_ddpperf.remote.node_worker import NodeWorker
from pytest_ddpperf.remote.process import RemotePytest
from pytest_ddpperf.remote.version import BaseSide, Invocation
from pytest_ddpperf.remote.worktree import one_tree
from pytest_ddpperf.wire import boot
from pytest_ddpperf.wire.channels import Lines

_Start = Callable[[Sequence[str]], RemotePytest]
# Longer than a pytest takes that tears its fixtures down.
_END_SECONDS = 45.0


@dataclass
class NodePytests:
    """What starts them. `close` ends those of other versions, with what they left."""

    _settings: Settings
    _invocation: Invocation
    _place: Mapping[str, Any]  # the fields of StartPytest about this node
    _folder: Path  # for the pytest of the current code
    # returns a connection to the leader at a port; raises NodesError and OSError
    _connect: Callable[[int], Lines]
    # of both sides, as on the first node
    _templates: Templates = field(default_factory=Templates)
    _further: tuple[str, ...] = ()  # arguments that the leader gave
    _threads: list[threading.Thread] = field(default_factory=list)
    _connections: list[socket.socket] = field(default_factory=list)
    _is_over: bool = False

    def __post_init__(self) -> None:
        self._top = one_tree(self._invocation.rootdir)

    def start(self, further: Sequence[str]) -> RemotePytest:
        """Start the pytest of the current code, with `further` arguments; raises OSError."""
        self._further = tuple(further)
        called = self._invocation
        variables = {**(called.environ or {})}
        # its words are among the arguments
        variables.pop("PYTEST_ADDOPTS", None)
        # to launch as the first node does
        disabled = ["--ddp-disable"] if self._settings.disable else []
        message = called.start(self._top, [*further, *disabled], self._folder)
        with self._templates.fork_server(os.environ)[0] as rank_server:
            number = rank_server.fileno()
            remote_pytest = RemotePytest(
                f"node {self._place['node']}",
                sys.executable,
                variables,
                called.folder,
                [number],
            )
        remote_pytest.send(
            replace(
                message,
                rank_server=number,
                variables=read_at_import(os.environ),
                **self._place,
            )
        )
        return remote_pytest

    def serve_version(self, order: ServeVersion) -> None:
        """Begin to serve with a pytest of another version. In a thread: the leader goes on to ask
        for the current code, and a checkout may take minutes."""
        thread = threading.Thread(target=self._serve, args=[order])
        self._threads.append(thread)
        thread.start()

    def _serve(self, order: ServeVersion) -> None:
        with ExitStack() as closing:
            start = self._prepare(order, closing)
            try:
                lines = self._connect(order.port)
            except (NodesError, OSError):
                return  # the leader has given up
            closing.callback(lines.socket.close)
            self._connections.append(lines.socket)
            if not self._is_over:
                worker = NodeWorker(lines, start)
                worker.start(self._further)
                worker.run()

    def _prepare(self, order: ServeVersion, closing: ExitStack) -> _Start:
        """Check the version out; return what starts its pytest, or raises why there is none."""
        try:
            side = self._side(order)
            closing.callback(side.close)
            side.make_tree()
        except (OSError, DdpPerfError) as error:
            problem = BaseSideError(_without_option(error))

            def fail(_: Sequence[str]) -> RemotePytest:
                raise problem

            return fail
        return lambda _: side.start_pytest(**self._place)

    def _side(self, order: ServeVersion) -> BaseSide:
        """Return the version that the leader compares with; raises AgainstError."""
        settings, called = self._settings, self._invocation
        if order.commit:
            settings = replace(settings, against=order.commit)
        called = replace(
            called,
            arguments=(*called.arguments, *self._further),
            kept=tuple(
                os.path.join(self._top.current, path) for path in order.kept
            ),
            own_tests=order.own_tests,
        )
        return BaseSide(
            settings, called, self._templates, seconds=order.seconds
        )

    def close(self) -> None:
        self._is_over = True
        for connected in self._connections:
            with suppress(OSError):  # the leader has closed it
                connected.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(_END_SECONDS)
            if thread.is_alive():
                # git or a set-up, which then fails
                for pid in boot.children():
                    with suppress(ProcessLookupError, PermissionError):
                        os.killpg(pid, signal.SIGKILL)
            thread.join()
        self._templates.close()


def _without_option(error: Exception) -> str:
    """Return what an error says, without the option that the leader names."""
    if isinstance(error, AgainstError):
        return "\n".join(filter(None, (error.problem, error.remedy)))
    return str(error)
