"""pytest's handle on its rank server: start it, restart it when it must be, ask for ranks; and the
request that ranks read from a file in the folder of their launch, with their environment variables.

The variables are pytest's, without those of an outer launcher, plus those that keep a launch local.
"""

from __future__ import annotations

import errno
import os
import re
import resource
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

from pytest_ddpperf.launch.placement import Placement
from pytest_ddpperf.launch.remote_ranks import Part
from pytest_ddpperf.launch.template import (
    Template,
    Templates,
    read_at_import,
    with_hash_seed,
)
from pytest_ddpperf.records import codec
from pytest_ddpperf.records.errors import DdpPerfError, ServerError
from pytest_ddpperf.records.messages import ServerKind, ServerMessage
from pytest_ddpperf.records.plan import Plan
from pytest_ddpperf.records.samples import Scalar
from pytest_ddpperf.wire import boot, opened
from pytest_ddpperf.wire.channels import Lines, readable
from pytest_ddpperf.wire.source_trees import Trees
from pytest_ddpperf.wire.variables import READ

# The place of a process in another job than ours, by torchrun, Slurm, Open MPI and PMI.
_OUTER = """
    RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE NODE_RANK MASTER_ADDR MASTER_PORT
    GROUP_RANK GROUP_WORLD_SIZE ROLE_NAME ROLE_RANK ROLE_WORLD_SIZE
    SLURM_PROCID SLURM_LOCALID SLURM_NODEID SLURM_NTASKS SLURM_NPROCS SLURM_NNODES
    SLURM_TASKS_PER_NODE SLURM_NTASKS_PER_NODE SLURM_STEP_ID SLURM_STEP_NUM_TASKS
""".split()
_OUTER_PREFIXES = ("TORCHELASTIC_", "OMPI_COMM_WORLD_", "PMI_", "PMIX_")

# Worth recording: what changes the figures and holds no secrets (the whole environment would end up
# in git).
_RECORDED = (
    *(
        "NCCL_",
        "TORCH_",
        "PYTORCH_",
        "TORCHINDUCTOR_",
        "TORCHDYNAMO_",
        "GLOO_",
        "OMP_",
        "MKL_",
        "KMP_",
        "MALLOC_",
    ),
    *(
        "ATEN_CPU_CAPABILITY",
        "ONEDNN_",
        "DNNL_",
        "OPENBLAS_",
        "CUBLAS_",
        "LD_LIBRARY_PATH",
        "LD_PRELOAD",
    ),
    "PYTHONHASHSEED",
    *(
        "CUDA_LAUNCH_BLOCKING",
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "CUDA_MODULE_LOADING",
        "CUDNN_",
        "NVIDIA_TF32",
        "TRITON_",
    ),
)
# The place of a cache changes no figure, and an address may hold a password.
_NOT_RECORDED = re.compile("REDIS|URL|_DIR$")

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` without what an outer launcher set for another job than ours."""
    return {
        name: value
        for name, value in environ.items()
        if name not in _OUTER and not name.startswith(_OUTER_PREFIXES)
    }


def for_ranks(
    environ: Mapping[str, str], world_size: int, part: Part
) -> dict[str, str]:
    """Return the variables of all ranks of this node: torchrun's, without RANK and LOCAL_RANK, and
    the interface.

    Unless the user chose one, that is loopback on a single node, else the interface to the other
    nodes (but not for NCCL, which may have a better one)."""
    local = {f"{library}_SOCKET_IFNAME": LOOPBACK for library in ("GLOO", "TP", "NCCL")}
    if part.store is not None:
        local = {
            f"{library}_SOCKET_IFNAME": part.interface
            for library in ("GLOO", "TP")
            if part.interface
        }
    return (
        local
        | inherited(with_hash_seed(environ))
        | {
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(len(part.processes)),
            "NODE_RANK": str(part.node),
            "GROUP_RANK": str(part.node),
        }
    )


def _torchruns(world_size: int, address: str, port: int) -> dict[str, str]:
    """Return further variables of torchrun, with which a program forms its process group over a
    store that is there."""
    return {
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": str(world_size),
        "TORCHELASTIC_RUN_ID": "ddpperf",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }


def recorded(environ: Mapping[str, str]) -> dict[str, Scalar]:
    """Return the user's variables that belong to a measurement, as "env:NAME"."""
    return {
        f"env:{name}": value
        for name, value in environ.items()
        if name.startswith(_RECORDED) and not _NOT_RECORDED.search(name)
    }


def read_by(processes: Iterable[Mapping[str, str]]) -> dict[str, Scalar]:
    """Return the digests of the variables that processes read, as "read:NAME"; without those that
    are recorded with their value, those that differ by process or run, and CI, which is often not
    set where a baseline is saved."""
    merged: dict[str, str] = {}
    for read in processes:
        merged = {**read, **merged}
    return {
        f"{READ}{name}": value
        for name, value in sorted(merged.items())
        if inherited({name: value})
        and not recorded({name: value})
        and not re.match("(CI|TMPDIR)$|PYTEST_", name)
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """A launch of `plan`: the pickled task, the modules that pytest collected, and the part that
    this node starts."""

    plan: Plan
    payload: bytes
    modules: Mapping[str, str]  # name -> file
    placement: Placement
    part: Part
    # address and port of the store for a program's own process group
    master: tuple[str, int] | None = None
    # the ranks and their children report what they use from there
    trees: Trees | None = None

    def fields(self, folder: Path, *, in_stretches: bool) -> dict[str, Any]:
        """Return what `rank.lifecycle` reads in the launch's `folder`, with this process's
        environment, current folder and search path."""
        plan, part, on_cpu = self.plan, self.part, self.plan.device == "cpu"
        # Compiled code stays for the next launch; else each would compile anew.
        cache = os.path.join(
            tempfile.gettempdir(),
            f"torchinductor_{os.environ.get('USER', os.geteuid())}",
        )
        environ = {"TORCHINDUCTOR_CACHE_DIR": cache} | for_ranks(
            os.environ, plan.processes, part
        )
        # In the folder of the launch, with which it is removed: a rank ends hard, so nobody else
        # would remove them.
        environ["TMPDIR"] = str(folder / "tmp")
        if self.master is not None:
            environ |= _torchruns(plan.world_size, *self.master)
        if self.trees is not None or plan.boundary:
            environ |= opened.for_children(environ, folder)
        return {
            "plan": codec.encode(plan),
            "in_stretches": in_stretches,
            "environ": environ,
            "node": part.node,
            "processes": part.processes,
            "store": part.store,
            "cwd": os.getcwd(),
            # At the end for what makes a PYTHONPATH of it, as torch.compile does for its workers.
            "sys_path": [
                *boot.search_path(),
                *([opened.CHILDREN] if self.trees is not None else []),
            ],
            "argv": sys.argv,
            "cpus": self.placement.cpus if on_cpu else ((),) * len(part.processes),
            "threads": self.placement.own_threads,
            "modules": dict(self.modules),
            "trees": asdict(self.trees) if self.trees is not None else None,
        }


def limits() -> str:
    """Return the end of a message: where to look if `ulimit` limits memory or files; "" if it does
    not."""
    of_memory, of_files = resource.RLIMIT_AS, resource.RLIMIT_FSIZE
    is_limited = any(
        resource.getrlimit(each)[0] != resource.RLIM_INFINITY
        for each in (of_memory, of_files)
    )
    return "; see the limits of ulimit -v and -f" if is_limited else ""


@contextmanager
def writing_temporary_files() -> Iterator[None]:
    """Raise DdpPerfError if files cannot be written. It says so if the temporary folder, or the
    quota of this user there, is full."""
    try:
        yield
    except OSError as error:
        problem = f"{error}{limits()}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            problem = f"no space in {tempfile.gettempdir()}; set TMPDIR to a folder that has some"
        raise DdpPerfError(problem) from None


# For importing torch and the preloaded modules, from a cold network disk too. No launch has begun,
# so it is not of the time that --ddp-timeout gives one.
_START_SECONDS = 300.0
# For a server to end, and its template to report it, after it closed its connection or was stopped.
_END_SECONDS = 5.0


class RankServer:
    """One server process at a time. Not for threads: its template is started from the main one,
    with which it dies."""

    def __init__(
        self, templates: Templates, trees: Trees | None = None, folder: str = ""
    ) -> None:
        """`trees`: where to import from, if there are two. `folder`: removed by the server if
        pytest is killed."""
        self._templates, self._trees, self._folder = templates, trees, folder
        # that it was forked from, if this pytest started that
        self._template: Template | None = None
        self._lines: Lines | None = None
        self._log: IO[bytes] | None = None
        self._made_for: tuple[object, ...] = ()
        self.pid = 0

    def ensure(self, variables: Mapping[str, str], preload: Sequence[str]) -> None:
        """Start a server that has imported its modules under these variables, unless there is one.

        Importing torch takes seconds, once; variables that libraries read at import need a new
        template. Raises ServerError, and DdpPerfError if there is no space.
        """
        wanted = (read_at_import(variables), tuple(preload))
        # Without its template it is about to end.
        is_alive = self._lines is not None and (
            self._template is None or self._template.is_alive
        )
        if is_alive and wanted == self._made_for and not self._has_ended(0):
            return
        self.stop()
        with writing_temporary_files():
            self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `stop`
            connection, self._template = self._templates.fork_server(variables)
        self._lines = Lines(connection)
        start = ServerMessage(
            ServerKind.START_SERVER,
            sys_path=tuple(boot.search_path()),
            environ=with_hash_seed(variables),
            cwd=os.getcwd(),
            preload=tuple(preload),
            trees=asdict(self._trees) if self._trees is not None else None,
            folder=self._folder,
        )
        self.send(start, self._log.fileno())
        answers: list[ServerMessage] = []
        while not answers:  # a long traceback comes in parts
            answers = self.receive(_START_SECONDS)
        if answers[0].kind is ServerKind.SERVER_FAILED:
            self.stop()
            raise ServerError(f"did not start{limits()}", answers[0].traceback)
        self.pid, self._made_for = answers[0].pid, wanted

    @property
    def socket(self) -> socket.socket:
        return self._connected().socket

    def send(self, request: ServerMessage, descriptor: int | None = None) -> None:
        """Send a request, with a file descriptor if it needs one; raises ServerError if the server
        is gone."""
        try:
            self._connected().send(codec.encode_message(request), descriptor)
        except OSError:
            self._raise_dead()

    def receive(self, timeout: float | None = None) -> list[ServerMessage]:
        """Return what has arrived, or wait for it; raises ServerError if the server is gone or does
        not answer."""
        lines = self._connected()
        lines.socket.settimeout(timeout)
        received = lines.receive()
        lines.socket.settimeout(None)
        if received is None:
            self._raise_dead()
        return [codec.decode(ServerMessage, fields) for fields in received or ()]

    def stop(self) -> None:
        """End the server and, with it, whatever it still runs."""
        # first: one that is only half ended, or half started, is not to be used
        self._made_for = ()
        if self._lines is not None:
            with suppress(OSError):
                self._lines.send(
                    codec.encode_message(ServerMessage(ServerKind.STOP_SERVER))
                )
                self._lines.socket.shutdown(socket.SHUT_WR)
            # one that has not started yet hears nothing
            if self.pid and not self._has_ended(_END_SECONDS):
                with suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGKILL)  # its ranks die with it
            self._lines.socket.close()
            self._lines = None
        self.pid = 0
        if self._log is not None:
            self._log.close()
            self._log = None

    def _has_ended(self, seconds: float) -> bool:
        """Whether the connection ends within so many seconds; drops what arrives."""
        channel, until = self._connected().socket, time.monotonic() + seconds
        with suppress(ConnectionError):
            while readable([channel], max(0.0, until - time.monotonic())):
                if not channel.recv(1 << 16):
                    return True
            return False
        return True

    def _connected(self) -> Lines:
        if self._lines is None:  # ensure() comes first, and it has not ended since
            raise ServerError("is not running", "")
        return self._lines

    def _raise_dead(self) -> NoReturn:
        assert self._log is not None
        problem = "died" if self._has_ended(_END_SECONDS) else "does not answer"
        self._log.seek(0)
        output = self._log.read().decode(errors="replace")
        if self._template is not None:
            output += self._template.output()
            for news in self._template.news(_END_SECONDS):
                if news.pid == self.pid:
                    problem += f" (status {news.status})"
        self.stop()
        raise ServerError(problem, output[-10_000:])
