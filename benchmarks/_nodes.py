"""Several nodes on one machine: network namespaces on one bridge, each with a core, process numbers
and a monotonic clock of its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, NamedTuple

AHEAD_SECONDS = (
    1000  # of each node's clock, compared with that of the node before
)
_PORT = 29500  # of torchrun's store; nothing else is in the namespaces
_RUN_SECONDS = 1800.0  # for one pytest over all nodes, however slow
_END_SECONDS = 60.0  # for processes that were killed


def missing() -> str:
    """Return why there can be no nodes here; "" where there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs root on Linux"
    if len(os.sched_getaffinity(0)) < 2:
        return "needs two cores"
    programs = ("ip", "unshare", "taskset")
    lacking = [name for name in programs if shutil.which(name) is None]
    if lacking:
        return f"needs {' and '.join(lacking)}"
    tried = subprocess.run(
        ["unshare", "--net", "--time", "--monotonic", "1", "true"],
        capture_output=True,
        text=True,
    )
    return f"namespaces: {tried.stderr.strip()}" if tried.returncode else ""


class Ended(NamedTuple):
    """How a command ended on one node; without a status it had to be killed."""

    status: int | None
    output: str


class Nodes:
    """The namespaces; `run` starts a process on each of them, by torchrun's agents."""

    def __init__(self, folder: Path, names: list[str], ahead_seconds: int):
        self._folder, self._names = folder, names
        self._ahead = ahead_seconds

    def pytest(self, *arguments: str, cwd: Path) -> list[Ended]:
        """Run pytest over all nodes, and return how it ended on each."""
        without = ("randomly", "benchmark", "cacheprovider")
        options = [f"-pno:{name}" for name in without]
        return self.run("pytest", *options, *arguments, cwd=cwd)

    def run(self, *arguments: str, cwd: Path) -> list[Ended]:
        """Run a module over all nodes, and return how it ended on each."""
        with ExitStack() as closing:
            # the processes end before their logs are closed
            logs = [
                closing.enter_context(
                    (self._folder / f"node{node}.log").open("w+b")
                )
                for node in range(len(self._names))
            ]
            closing.callback(self._end)
            started = []
            for node, log in enumerate(logs):
                process = self._start(node, arguments, cwd, log)
                closing.callback(_kill, process)
                started.append(process)
            until = time.monotonic() + _RUN_SECONDS
            statuses = [_status(process, until) for process in started]
            return [
                Ended(status, _read(log))
                for status, log in zip(statuses, logs, strict=True)
            ]

    def _start(
        self, node: int, arguments: tuple[str, ...], cwd: Path, log: IO[bytes]
    ) -> subprocess.Popen[bytes]:
        # with more nodes than cores, some share one
        cores = sorted(os.sched_getaffinity(0))
        core = cores[node % len(cores)]
        # all of a node ends with its first process, torchrun's agent, which ends with `unshare`
        apart = ["--pid", "--mount-proc", "--fork", "--kill-child"]
        clock = ["--time", "--monotonic", str(self._ahead * node)]
        agent = [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", str(len(self._names)), "--nproc-per-node", "1"),
            *("--node-rank", str(node), "--master-addr", _address(0)),
            *("--master-port", str(_PORT), "-m", *arguments),
        ]
        return subprocess.Popen(
            [
                *("ip", "netns", "exec", self._names[node]),
                *("taskset", "--cpu-list", str(core)),
                *("unshare", *clock, *apart, "--", *agent),
            ],
            cwd=cwd,
            env=self._environ(node),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # Ctrl-C is for the benchmark, which ends the nodes
            start_new_session=True,
        )

    def _environ(self, node: int) -> dict[str, str]:
        """Return the variables of a node, with a folder of its own for temporary files."""
        temporary = self._folder / f"temporary{node}"
        temporary.mkdir(exist_ok=True)
        environ = {**os.environ, "TMPDIR": str(temporary)}
        environ["OMP_NUM_THREADS"] = "1"
        environ["XDG_CACHE_HOME"] = str(temporary / "cache")
        environ.pop("CI", None)
        return environ

    def _end(self) -> None:
        """Wait until the processes of all nodes, which were killed, are gone."""
        until = time.monotonic() + _END_SECONDS
        while left := [pid for name in self._names for pid in _pids(name)]:
            if time.monotonic() > until:
                raise RuntimeError(f"processes do not end: {' '.join(left)}")
            time.sleep(0.05)


@contextmanager
def nodes(
    folder: Path, count: int, ahead_seconds: int = AHEAD_SECONDS
) -> Iterator[Nodes]:
    """So many nodes, which end with the block. `folder` is for their logs and temporary files."""
    bridge, *names = (
        f"ddpperf-nodes-{os.getpid()}-{each}" for each in ("net", *range(count))
    )
    with ExitStack() as closing:
        for name in (bridge, *names):
            _ip("netns", "add", name)
            closing.callback(_ip, "netns", "del", name)
        _ip("-n", bridge, "link", "add", "bridge", "type", "bridge")
        _ip("-n", bridge, "link", "set", "bridge", "up")
        for node, name in enumerate(names):
            port = f"node{node}"
            pair = ("type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("-n", bridge, "link", "add", port, *pair)
            _ip("-n", bridge, "link", "set", port, "master", "bridge", "up")
            _ip(
                "-n", name, "addr", "add", f"{_address(node)}/24", "dev", "eth0"
            )
            for link in ("lo", "eth0"):
                _ip("-n", name, "link", "set", link, "up")
        yield Nodes(folder, names, ahead_seconds)


def _address(node: int) -> str:
    return f"10.77.0.{node + 1}"


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _pids(name: str) -> list[str]:
    listed = subprocess.run(
        ["ip", "netns", "pids", name],
        check=True,
        capture_output=True,
        text=True,
    )
    return listed.stdout.split()


def _status(process: subprocess.Popen[bytes], until: float) -> int | None:
    try:
        return process.wait(max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read(log: IO[bytes]) -> str:
    log.seek(0)
    return log.read().decode(errors="replace")
