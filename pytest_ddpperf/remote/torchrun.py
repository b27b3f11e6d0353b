"""The place of a pytest among those of several nodes, by torchrun's variables; and torchrun's
store, by which they find the first."""

import os
import sys
from collections.abc import Mapping, MutableMapping

from pytest_ddpperf import text
from pytest_ddpperf.launch.request import inherited
from pytest_ddpperf.records.codec import Json
from pytest_ddpperf.records.errors import NodesError
from pytest_ddpperf.records.record import record
from pytest_ddpperf.wire import boot
from pytest_ddpperf.wire.channels import readable


@record
class Role:
    """The place of one pytest among those of several nodes."""

    node: int
    nodes: int
    local_rank: int
    address: str  # MASTER_ADDR
    port: int  # MASTER_PORT, of torchrun's own store
    # whether torchrun holds that store; else the first process is to
    hosted: bool
    run: str  # the id of torchrun's run

    @property
    def leads(self) -> bool:
        """Whether this pytest decides, judges and reports."""
        return self.node == 0 and self.local_rank == 0

    @property
    def follows(self) -> bool:
        """Whether it launches the ranks of its node for the leader."""
        return self.node > 0 and self.local_rank == 0


def role(environ: Mapping[str, str]) -> Role | None:
    """None where torchrun started none, or those of one node. Raises NodesError for what we cannot
    work with."""
    if (
        "TORCHELASTIC_RUN_ID" not in environ
        or environ.get("GROUP_WORLD_SIZE", "1") == "1"
    ):
        return None
    try:
        found = Role(
            node=int(environ["GROUP_RANK"]),
            nodes=int(environ["GROUP_WORLD_SIZE"]),
            local_rank=int(environ["LOCAL_RANK"]),
            address=environ["MASTER_ADDR"],
            port=int(environ["MASTER_PORT"]),
            hosted=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            run=environ["TORCHELASTIC_RUN_ID"],
        )
    except (KeyError, ValueError) as error:
        raise NodesError(
            f"torchrun's variables are incomplete: {type(error).__name__}: {error}"
        ) from None
    if environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        raise NodesError("torchrun --max-restarts is not supported: use 0")
    return found


def join_step(environ: MutableMapping[str, str]) -> None:
    """Give a process that srun started without torchrun the variables that torchrun would; raises
    NodesError."""
    if "TORCHELASTIC_RUN_ID" in environ:
        return
    tasks = environ["SLURM_STEP_NUM_TASKS"]
    nodes = environ.get("SLURM_STEP_NUM_NODES", "1")
    has_meeting = "MASTER_ADDR" in environ and "MASTER_PORT" in environ
    if tasks != nodes or not has_meeting:
        raise NodesError(
            f"srun started {tasks} pytests on {text.several(int(nodes), 'node')}: start one on each"
            " (--ntasks-per-node=1), with MASTER_ADDR, the name of the first node, and MASTER_PORT,"
            " a free port there"
        )
    environ["GROUP_RANK"] = environ["SLURM_NODEID"]
    environ["GROUP_WORLD_SIZE"] = nodes
    environ["LOCAL_RANK"] = environ["SLURM_LOCALID"]
    environ["TORCHELASTIC_RUN_ID"] = environ["SLURM_JOB_ID"]


_END_SECONDS = 5.0
_LONGER_SECONDS = 60.0  # than it was asked for: to import torch, and to say so


class TorchrunStore:
    """torchrun's store, asked by a process of its own, which imports torch; `close` ends it.

    With `reported`, where the first node listens, the process says that to the others until it
    ends; without, it waits for it. An empty one asks them to end, and the process waits until all
    have read it.
    """

    def __init__(
        self, role: Role, seconds: float, reported: Json = None
    ) -> None:
        self._seconds = seconds
        self._name = f"the store at {role.address}:{role.port}"
        self._answer: Json = None
        self._child = boot.Child(
            sys.executable, "pytest_ddpperf.rank.group", inherited(os.environ)
        )
        self._child.lines.send(
            {
                "sys_path": boot.search_path(),
                "parent": os.getpid(),
                "address": role.address,
                "port": role.port,
                "hosts": reported is not None and not role.hosted,
                "key": f"ddpperf/{role.run}",
                "tell": reported,
                "node": role.node,
                "nodes": role.nodes,
                "seconds": seconds,
            }
        )

    def answer(self) -> Json:
        """Wait until it is said, or return what was said; raises NodesError."""
        if self._answer is None:
            messages = None
            if readable(
                [self._child.lines.socket], self._seconds + _LONGER_SECONDS
            ):
                messages = self._child.lines.receive()
            if not messages:
                written = self._child.output()
                raise NodesError(
                    f"{self._name} did not answer\n{written}".rstrip()
                )
            if "error" in messages[0]:
                raise NodesError(f"{self._name}: {messages[0]['error']}")
            self._answer = messages[0]
        return self._answer

    def close(self) -> None:
        """End the process: no node waits any more."""
        self._child.close(_END_SECONDS)
