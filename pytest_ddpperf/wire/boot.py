"""How a process of ours begins and ends: what it receives over its socket, and what it asks of the
kernel.

Start-up data goes over a socket because an argument of a command is limited (to 128 KiB on Linux),
which a sys.path or the files of many tests exceed. Standard library only; the kernel's part works
on Linux and does nothing on macOS.
"""

import ctypes
import glob
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from pytest_ddpperf.wire.channels import Lines

# Before sys.path is what it shall be nothing of ours can be imported.
_BOOT = """
import sys
sys.path[:1] = filter(None, sys.path[:1])  # the current folder, which `pytest` has not
import importlib, json, socket
module, descriptor = sys.argv[1], int(sys.argv[2])
channel, line = socket.socket(fileno=descriptor), b""
while not line.endswith(b"\\n"):  # and no byte more: a descriptor may come with it
    seen = channel.recv(1 << 16, socket.MSG_PEEK) or sys.exit(1)
    line += channel.recv(seen.find(b"\\n") + 1 or len(seen))
channel.detach()
start = json.loads(line)
sys.path[:] = start["sys_path"] or sys.path
importlib.import_module(module).main(descriptor, start)
"""


def search_path(entries: Sequence[str] | None = None) -> list[str]:
    """sys.path as imports read it: what is no text in it (a Path) is passed over, and so is an
    entry that it has already. pytest adds those of its ini file in each process once more."""
    given = sys.path if entries is None else entries
    return list(
        dict.fromkeys(entry for entry in given if isinstance(entry, str))
    )


def search_path_of_new() -> list[str]:
    """Return sys.path of a new interpreter, without PYTHONPATH; [] if it cannot start."""
    code = "import sys; print(*sys.path, sep='\\n')"
    return output_of(sys.executable, "-E", "-c", code).splitlines()


def command(python: str, module: str, descriptor: int) -> list[str]:
    """Calls `main(descriptor, start)` of a module: `start` is the first message that came over the
    socket `descriptor`, as `Lines` sends it. Its `sys_path` is None for the interpreter's own. It
    has asserts if this interpreter has: both sides of a comparison run the same code."""
    optimized = ["-O"] * sys.flags.optimize
    return [python, *optimized, "-c", _BOOT, module, str(descriptor)]


class Child:
    """A process of ours in a session of its own, and the connection to it. It ends at the end of
    its stream."""

    def __init__(
        self,
        python: str,
        module: str,
        environ: Mapping[str, str],
        folder: Path | None = None,
        descriptors: Sequence[int] = (),
    ) -> None:
        """Start it (see `command`): what is sent first has its sys.path. It inherits these
        `descriptors`. Raises OSError, with nothing left."""
        with ExitStack() as failing:
            self.log = failing.enter_context(tempfile.TemporaryFile())
            ours, theirs = socket.socketpair()
            self.lines = Lines(failing.enter_context(ours))
            with theirs:
                self.process = subprocess.Popen(
                    command(python, module, theirs.fileno()),
                    env=environ,
                    cwd=folder,
                    pass_fds=[theirs.fileno(), *descriptors],
                    stdin=subprocess.DEVNULL,
                    stdout=self.log,
                    stderr=self.log,
                    start_new_session=True,  # Ctrl-C is pytest's to handle
                )
            failing.pop_all()

    def output(self) -> str:
        """Return what it wrote."""
        self.log.seek(0)
        return self.log.read().decode(errors="replace")

    def kill(self) -> None:
        """End it at once; what it has started dies with it."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def close(self, seconds: float) -> None:
        """Close the connection and give it so many seconds to end by itself."""
        self.lines.socket.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        self.kill()
        self.log.close()


def kernel_numbers(written: str) -> tuple[int, ...]:
    """Return the numbers of a list as the kernel writes it: "0-3,8"."""
    found: list[int] = []
    for part in written.split(","):
        if match := re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip()):
            found += range(int(match[1]), int(match[2] or match[1]) + 1)
    return tuple(found)


def listen(address: str, port: int = 0) -> socket.socket:
    """Listen on one interface, with 0 at a port that the kernel chooses; raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server(
        (address, port), family=family, backlog=socket.SOMAXCONN
    )


def output_of(*command: str) -> str:
    """Return what a tool prints; "" if it is missing or does not answer."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def topology() -> list[str]:
    """Return the lines of nvidia-smi's matrix of what links GPUs, without the escapes that
    underline its header, piped or not; [] if it does not answer."""
    said = _ESCAPES.sub("", output_of("nvidia-smi", "topo", "-m"))
    return said.expandtabs().splitlines()


def nvidia_smi(fields: Sequence[str], *options: str) -> list[list[str]]:
    """Return the cells of each GPU by nvidia-smi, whose table may stand below a warning; [] if it
    does not answer. For a GPU that fell off the bus it prints a sentence instead of a row."""
    said = output_of(
        "nvidia-smi",
        f"--query-gpu={','.join(fields)}",
        "--format=csv,noheader,nounits",
        *options,
    )
    rows = (
        [cell.strip() for cell in line.split(",")] for line in said.splitlines()
    )
    return [row for row in rows if len(row) == len(fields)]


def contents(path: Path) -> str:
    """Return what a file of the kernel holds; "" if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def number_in(cell: str) -> float | None:
    """Return the number that a tool printed; None for "[N/A]" and the like."""
    try:
        return float(cell)
    except ValueError:
        return None


_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent: int, signum: signal.Signals) -> None:
    """Ask for `signum` when the parent's thread that made us ends; ends at once if `parent` is gone
    already."""
    _prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:
        os.kill(os.getpid(), signum)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ended, so that none outlives a
    launch."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children(pid: int | str = "self") -> list[int]:
    """Return the pids of a process's children, zombies included."""
    threads = glob.glob(f"/proc/{pid}/task/*/children")
    return [
        int(child)
        for thread in threads
        for child in contents(Path(thread)).split()
    ]


def _prctl(option: int, value: int) -> None:
    if (
        sys.platform == "linux"
        and ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0
    ):
        raise OSError(ctypes.get_errno(), f"prctl({option})")
