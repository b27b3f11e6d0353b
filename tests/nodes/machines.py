"""Two nodes on one machine: network namespaces that are joined by a pair of links, with a core
each, and on the second a monotonic clock that is 1,000 seconds ahead."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

AHEAD_SECONDS = 1000
ADDRESSES = ("10.77.0.1", "10.77.0.2")
_PORT = 29500  # of namespaces that nothing else is in

SOON_SECONDS = 600.0  # for what ends by itself, on a machine however slow

SMALL = (
    "--ddp-steps=10",
    "--ddp-min-time=0",
    "--ddp-launches=2",
    "--ddp-max-launches=4",
    "--ddp-warmup=2",
)

# A conftest for tests that are not about torchrun's store: on each node a process that imports
# torch would ask it.
MEET_IN_A_FILE = """
import json, os, tempfile, time
from pathlib import Path
from pytest_ddpperf.plugin import remote
from pytest_ddpperf.remote import nodes

class FileStore:
    path = Path(tempfile.gettempdir(), "store.json")

    def __init__(self, role, seconds, reported=None):
        if reported is not None:
            self.path.with_suffix(".new").write_text(json.dumps(reported))
            os.replace(self.path.with_suffix(".new"), self.path)

    def answer(self):
        while not self.path.exists():
            time.sleep(0.05)
        return {"found": json.loads(self.path.read_text())}

    def close(self):
        pass

remote.TorchrunStore = nodes.TorchrunStore = FileStore
"""


def missing() -> str:
    """Why there can be no nodes here; "" where there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs root on Linux"
    if len(os.sched_getaffinity(0)) < len(ADDRESSES):
        return "needs a core a node"
    lacking = [
        name
        for name in ("ip", "unshare", "taskset")
        if shutil.which(name) is None
    ]
    if lacking:
        return f"needs {' and '.join(lacking)}"
    tried = subprocess.run(
        ["unshare", "--net", "--time", "--monotonic", "1", "true"],
        capture_output=True,
        text=True,
    )
    return f"namespaces: {tried.stderr.strip()}" if tried.returncode else ""


@dataclass
class Node:
    """A pytest on one of the nodes, by torchrun or as it would start it."""

    process: subprocess.Popen[bytes]
    log: IO[bytes]

    def wait(self) -> int:
        return self.process.wait(SOON_SECONDS)

    @property
    def output(self) -> str:
        self.log.seek(0)
        return self.log.read().decode(errors="replace")


class Machines:
    """The two of them; `start` runs a command on one."""

    def __init__(
        self,
        folder: Path,
        closing: ExitStack,
        *,
        ahead_seconds: int = AHEAD_SECONDS,
    ) -> None:
        self.folder, self._closing, self._ahead = folder, closing, ahead_seconds
        # whether RPC takes them for two machines, and sends tensors over the network
        self.own_pids = False
        self._names = [
            f"ddpperf-{os.getpid()}-{node}" for node in range(len(ADDRESSES))
        ]
        self._links = links = [
            f"dp{os.getpid() % 100000}n{node}" for node in range(len(ADDRESSES))
        ]
        for name in self._names:
            _ip("netns", "add", name)
            closing.callback(_ip, "netns", "del", name)
        _ip("link", "add", links[0], "type", "veth", "peer", "name", links[1])
        for name, link, address in zip(
            self._names, links, ADDRESSES, strict=True
        ):
            _ip("link", "set", link, "netns", name)
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
            for up in ("lo", link):
                _ip("-n", name, "link", "set", up, "up")

    def unplug(self, node: int) -> None:
        """Cut a node off."""
        _ip("-n", self._names[node], "link", "set", self._links[node], "down")

    def start(
        self,
        node: int,
        command: Sequence[str],
        variables: Mapping[str, str] | None = None,
        folder: Path | None = None,
        log: str = "",
    ) -> Node:
        """Ends with the test. The processes of a node are its process group's and those of its
        namespace. `log`: what it writes has this name, the node's if nothing is said."""
        core = sorted(os.sched_getaffinity(0))[node]
        ahead = ["--time", "--monotonic", str(self._ahead)] if node else []
        apart = ["--pid", "--mount-proc"] if self.own_pids else []
        written = self._closing.enter_context(
            (self.folder / f"{log or f'node{node}'}.log").open("w+b")
        )
        process = subprocess.Popen(
            [
                *(
                    "ip",
                    "netns",
                    "exec",
                    self._names[node],
                    "taskset",
                    "--cpu-list",
                    str(core),
                ),
                *(
                    "unshare",
                    *ahead,
                    *apart,
                    "--fork",
                    "--kill-child",
                    "--",
                    *command,
                ),
            ],
            cwd=folder or self.folder,
            env={**os.environ, **(variables or {})},
            stdin=subprocess.DEVNULL,
            stdout=written,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._closing.callback(_end, process)
        return Node(process, written)

    def torchrun(
        self,
        node: int,
        *arguments: str,
        module: Sequence[str] = ("pytest", *SMALL),
        variables: Mapping[str, str] | None = None,
    ) -> Node:
        static = (
            "--node-rank",
            str(node),
            "--master-addr",
            ADDRESSES[0],
            "--master-port",
            str(_PORT),
        )
        launcher = (
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes",
            "2",
            "--nproc-per-node",
            "1",
        )
        command = [*launcher, *static, "-m", *module, *arguments]
        return self.start(node, command, variables)

    def pytest(
        self,
        node: int,
        *arguments: str,
        variables: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> Node:
        """As torchrun would start it that lets the first worker hold its store: some seconds
        sooner."""
        place = {
            "RANK": str(node),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "1",
            "GROUP_RANK": str(node),
            "GROUP_WORLD_SIZE": "2",
            "MASTER_ADDR": ADDRESSES[0],
            "MASTER_PORT": str(_PORT),
            "TORCHELASTIC_RUN_ID": "test",
            "TORCHELASTIC_USE_AGENT_STORE": "False",
        }
        command = [sys.executable, "-m", "pytest", *SMALL, *arguments]
        return self.start(
            node, command, {**place, **(variables or {})}, folder, f"node{node}"
        )

    def srun(self, node: int, *arguments: str) -> Node:
        """As `srun --ntasks-per-node=1` starts it."""
        place = {
            "SLURM_JOB_ID": "7",
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_STEP_NUM_NODES": "2",
            "SLURM_NODEID": str(node),
            "SLURM_LOCALID": "0",
            "SLURM_PROCID": str(node),
            "MASTER_ADDR": ADDRESSES[0],
            "MASTER_PORT": str(_PORT),
        }
        command = [sys.executable, "-m", "pytest", *SMALL, *arguments]
        return self.start(node, command, place)

    def both(
        self, start: Callable[..., Node], *arguments: str
    ) -> tuple[Node, Node]:
        """On both nodes, until both have ended."""
        nodes = start(0, *arguments), start(1, *arguments)
        for node in nodes:
            node.wait()
        return nodes

    def left(self) -> list[str]:
        """The commands of processes that are in the namespaces."""
        return [
            command
            for node in range(len(ADDRESSES))
            for command in self._commands(node).values()
        ]

    def find(self, node: int, part: str) -> int:
        """The pid of the process of a node whose command has that part; waits until there is
        one."""
        until = time.monotonic() + SOON_SECONDS
        while time.monotonic() < until:
            for pid, command in self._commands(node).items():
                if part in command and command.startswith(sys.executable):
                    return pid
            time.sleep(0.05)
        raise AssertionError(f"no {part} on node {node}")

    def _commands(self, node: int) -> dict[int, str]:
        name = self._names[node]
        pids = subprocess.run(
            ["ip", "netns", "pids", name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        return {
            int(pid): command
            for pid in pids.split()
            if (command := _command(int(pid)))
        }


def _command(pid: int) -> str:
    try:
        return (
            Path(f"/proc/{pid}/cmdline")
            .read_bytes()
            .replace(b"\0", b" ")
            .decode(errors="replace")
        )
    except OSError:
        return ""


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
