"""The template of rank servers: imports torch once. Rank servers are forked from it, those of both
sides of a comparison: so what a process draws when it starts (its hash seed, its layout, its heap)
is the same on both.

`launch.template` starts it as a process of its own. It dies with pytest, and ends its rank servers.
"""

import os
import signal
import socket
import traceback
from functools import partial
from typing import NoReturn

from pytest_ddpperf.rank import fork_server
from pytest_ddpperf.records import codec
from pytest_ddpperf.records.messages import (
    ForkServer,
    ServerEnded,
    StartTemplate,
)
from pytest_ddpperf.wire import boot
from pytest_ddpperf.wire.channels import Lines, readable

# DDP's constructor imports torch._dynamo lazily, one more second in every rank; test modules import
# pytest, and their payload comes by cloudpickle; the first forward pass imports the profiler's
# monitor, and seeding NumPy.
PRELOAD = """
    torch torch.distributed torch._dynamo torch.nn.parallel.distributed torch.utils.data
    cloudpickle pytest pytest_ddpperf.rank.lifecycle torch.profiler._cupti_monitor numpy.random
""".split()


def main(descriptor: int, fields: codec.Json) -> NoReturn:
    """Serve until pytest goes; `fields` are those of a StartTemplate."""
    start = codec.decode(StartTemplate, fields)
    boot.die_with_parent(start.parent, signal.SIGTERM)
    control = Lines(socket.socket(fileno=descriptor))
    failure = fork_server.import_modules(PRELOAD)
    fork_server.keep_shared()
    signals = fork_server.Signals()
    # for each rank server; if the imports failed, it only reports that
    serve = partial(fork_server.serve, template=os.getpid(), failure=failure)
    servers: set[int] = set()  # pids
    try:
        while signal.SIGTERM not in signals.arrived():
            _report_ended(servers, control)
            ready = readable([control.socket, signals.descriptor])
            received = (
                control.receive(ForkServer) if control.socket in ready else []
            )
            if received is None:
                break
            for _ in received:
                servers.add(fork_server.fork_to_serve(control, signals, serve))
        for pid in servers:
            os.kill(pid, signal.SIGTERM)  # which ends its ranks, then itself
            os.waitpid(pid, 0)
        os._exit(0)
    except BaseException:
        traceback.print_exc()  # to the log that pytest shows
    finally:
        os._exit(1)


def _report_ended(servers: set[int], control: Lines) -> None:
    for pid in list(servers):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            servers.remove(pid)
        if status:
            control.send(ServerEnded(pid, os.waitstatus_to_exitcode(status)))
