"""The rank server: forks a rank whenever pytest asks.

It is forked from a template (`rank.template`), which has imported torch; `launch.server_client`
talks to it over one descriptor. It never touches an accelerator (a CUDA context does not survive a
fork), runs no code of the user's but the imports of --ddp-preload, and dies with pytest, taking
along its ranks, what they started, and their folder; a folder of pytest's own only if pytest went
without a word.

Its requests and answers are in `records.messages`.
"""

import ctypes
import gc
import os
import shutil
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from pytest_ddpperf.records.messages import (
    BeginLaunch,
    DumpStacks,
    EndLaunch,
    ForkRank,
    HoldStore,
    LaunchEnded,
    PauseRanks,
    RankEnded,
    RankForked,
    RanksPaused,
    ResumeRanks,
    ServerFailed,
    ServerReady,
    ServerRequest,
    StartServer,
    StopServer,
)
from pytest_ddpperf.wire import boot
from pytest_ddpperf.wire.channels import Lines, readable
from pytest_ddpperf.wire.source_trees import Trees, install, know_loaded

# Not every torch has them, or NumPy. Runs that use RPC ask for its module; a torch built without
# RPC says so where a launch needs it.
_MAY_LACK = (
    "torch.profiler._cupti_monitor",
    "numpy.random",
    "pytest_ddpperf.rank.rpc",
)

# The host's own namespaces: Linux gives them these numbers (include/linux/proc_ns.h).
_HOST_IPC = "ipc:[4026531839]"
_HOST_PID = "pid:[4026531836]"


def serve(descriptor: int, template: int, failure: str | None) -> NoReturn:
    """Serve over `descriptor` until pytest goes, in a process that the process `template` has
    forked. If there was a `failure` there, only report it."""
    os.setsid()
    known = len(sys.modules)
    # a preload may hang, or ignore SIGTERM
    boot.die_with_parent(template, signal.SIGKILL)
    boot.adopt_orphans()
    control = Lines(socket.socket(fileno=descriptor))
    # a long one comes in parts
    while not (received := control.receive(StartServer)):
        if received is None:
            os._exit(0)
    start: StartServer = received[0]
    log = control.take_descriptor()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.environ.clear()
    os.environ.update(start.environ)
    os.chdir(start.cwd)
    sys.path[:] = start.sys_path
    if start.trees is not None:
        install(Trees(**start.trees))
    failure = failure or import_modules(
        start.preload, asked_by="--ddp-preload: "
    )
    if failure is not None:
        control.send(ServerFailed(failure))
        os._exit(1)
    keep_shared(known)
    server = _Server(control, start.folder)
    # from here on it ends in order
    boot.die_with_parent(template, signal.SIGTERM)
    control.send(ServerReady(os.getpid()))
    server.serve()


def keep_shared(known: int = 0) -> None:
    """Keep what was imported by now in memory that processes forked from this one share; a process
    that this one was forked from has done so for the first `known` modules."""
    know_loaded(known)
    gc.collect()
    # a collection in a rank would otherwise copy every page of torch's objects
    gc.freeze()


def import_modules(names: Sequence[str], *, asked_by: str = "") -> str | None:
    """Import modules for all ranks; return what is wrong, with the traceback, if one of them cannot
    be imported. `asked_by` says who asked for them."""
    # Without it, torch.cuda.is_available() in a preloaded module would initialise CUDA and spoil
    # every fork.
    nvml = os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    for name in names:
        asked = asked_by if name not in _MAY_LACK else ""
        try:
            # not by importlib, whose frames would only be noise
            __import__(name)
        except BaseException as error:
            if name in _MAY_LACK and isinstance(error, ImportError):
                continue
            theirs = error.__traceback__ and error.__traceback__.tb_next
            text = "".join(
                traceback.format_exception(error.with_traceback(theirs))
            )
            return f"{asked}importing {name}:\n{text}"
        if _is_cuda_initialised():
            return f"{asked}importing {name} initialised CUDA, which does not survive a fork"
    if nvml == "1":
        os.environ.pop("PYTORCH_NVML_BASED_CUDA_CHECK")
    return None


# what a driver that is not initialised, or not a real one, does not return
_CUDA_SUCCESS = 0


def _is_cuda_initialised() -> bool:
    """Ask the driver, where there is one: torch knows only what it initialised itself."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        # ROCm
        return "torch" in sys.modules and bool(
            sys.modules["torch"].cuda.is_initialized()
        )
    return bool(
        driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == _CUDA_SUCCESS
    )


def fork(run: Callable[[], NoReturn]) -> int:
    """Fork a child that does nothing but `run`; return its pid."""
    with warnings.catch_warnings():
        # The import of NumPy may leave idle BLAS threads, which are safe to fork around.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            run()
        except BaseException:
            # to the child's own log, if it has come that far
            traceback.print_exc()
        finally:
            os._exit(70)  # EX_SOFTWARE
    return pid


class Signals:
    """SIGCHLD and SIGTERM as bytes of a pipe, so that a process can wait for them and for
    channels."""

    _NUMBERS = (signal.SIGCHLD, signal.SIGTERM)

    def __init__(self) -> None:
        # whoever started pytest may have blocked what wakes us
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        self.descriptor, self._write = os.pipe()
        os.set_blocking(self.descriptor, False)
        os.set_blocking(self._write, False)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in self._NUMBERS:
            signal.signal(number, lambda number, frame: None)

    def arrived(self) -> bytes:
        """Return the numbers of the signals that have arrived."""
        try:
            return os.read(self.descriptor, 4096)
        except BlockingIOError:
            return b""

    def close(self) -> None:
        """Let the signals do what they do by default, in a child."""
        signal.set_wakeup_fd(-1)
        for number in self._NUMBERS:
            signal.signal(number, signal.SIG_DFL)
        os.close(self.descriptor)
        os.close(self._write)


def fork_to_serve(
    control: Lines, signals: Signals, run: Callable[[int], NoReturn]
) -> int:
    """Fork a child that does nothing but `run`, with the descriptor that came along; return its
    pid."""
    descriptor = control.take_descriptor()

    def child() -> NoReturn:
        # What belongs to this process alone.
        signals.close()
        control.socket.close()
        run(descriptor)

    pid = fork(child)
    os.close(descriptor)
    return pid


class _Server:
    def __init__(self, control: Lines, folder: str) -> None:
        self._control = control
        # of pytest's own, to be removed if it is killed; "" for none
        self._folder = folder
        # Pids of ranks and of processes that hold a store; each leads a session and a process group
        # of its own.
        self._ranks: set[int] = set()
        self._dir = ""  # of the last launch, to be removed if pytest cannot
        # of modules that are preloaded: launches may need them
        self._spared = set(boot.children())
        self._signals = Signals()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # for ranks that are asked for stacks before they can write any
        signal.signal(signal.SIGQUIT, signal.SIG_IGN)

    def serve(self) -> NoReturn:
        status = 1
        try:
            with suppress(ConnectionError):  # pytest is gone
                self._serve()
            status = 0
        except BaseException:
            traceback.print_exc()  # to the log that pytest shows
            self._folder = ""  # pytest goes on, in it
        finally:
            # pytest is gone, or we are broken: either way no process may stay
            self._exit(status)

    def _serve(self) -> None:
        while True:
            ready = readable([self._control.socket, self._signals.descriptor])
            signals = self._signals.arrived()
            self._reap()
            if self._control.socket in ready:
                received = self._control.receive(ServerRequest)
                if received is None:
                    return
                for request in received:
                    self._carry_out(request)
            # after what pytest had said before it ended
            if signal.SIGTERM in signals:
                return

    def _carry_out(self, request: ServerRequest) -> None:
        match request:
            case BeginLaunch(folder):
                self._dir = folder
            case ForkRank(rank):
                pid = self._fork(
                    lambda channel: self._become_rank(rank, channel)
                )
                self._control.send(RankForked(rank, pid))
            case HoldStore():
                from pytest_ddpperf.rank import group

                self._fork(group.serve)
            case PauseRanks():
                self._signal_all(signal.SIGSTOP)
                self._control.send(RanksPaused())
            case ResumeRanks():
                self._signal_all(signal.SIGCONT)
            case DumpStacks():
                self._signal_groups(signal.SIGCONT)
                for pid in self._ranks:
                    # not reaped yet, so still ours
                    os.kill(pid, signal.SIGQUIT)
            case EndLaunch():
                self._end()
                self._control.send(LaunchEnded())
            case StopServer():
                self._folder = ""

    def _become_rank(self, rank: int, channel: int) -> NoReturn:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        from pytest_ddpperf.rank import lifecycle

        lifecycle.run(rank, self._dir, socket.socket(fileno=channel))

    def _fork(self, run: Callable[[int], NoReturn]) -> int:
        """Fork a child that does nothing but `run`, with the descriptor that came along; returns
        its pid."""
        pid = fork_to_serve(self._control, self._signals, run)
        self._ranks.add(pid)
        return pid

    def _reap(self) -> None:
        """Report ended ranks."""
        while True:
            try:
                pid, status = self._ended()
            except ChildProcessError:
                return
            if not pid:
                return
            if pid in self._ranks:
                self._ranks.remove(pid)
                code = os.waitstatus_to_exitcode(status)
                self._control.send(RankEnded(pid, code, time.monotonic()))

    def _ended(self) -> tuple[int, int]:
        """Return the pid and status of a child that has ended; 0 if there is none.

        The rest of a rank's process group is killed before its pid is free."""
        # macOS before Python 3.13; there a group keeps its number while it has members
        if not hasattr(os, "waitid"):
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid in self._ranks:
                _signal_group(pid, signal.SIGKILL)
            return pid, status
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return 0, 0
        if ended.si_pid in self._ranks:
            _signal_group(ended.si_pid, signal.SIGKILL)
        _remove_batches(ended.si_pid)
        return os.waitpid(ended.si_pid, 0)

    def _signal_groups(self, signum: signal.Signals) -> None:
        for pid in self._ranks:
            _signal_group(pid, signum)

    def _signal_all(self, signum: signal.Signals) -> None:
        """Send a signal to the ranks' groups and to all else below them: a child may lead a session
        of its own."""
        self._signal_groups(signum)
        below = self._started()
        while below:
            pid = below.pop()
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signum)
            below += boot.children(pid)  # once stopped, it has no more

    def _end(self) -> None:
        """Kill what is left of the launch: ranks, their groups, its store, and orphans that left
        their group."""
        self._signal_groups(signal.SIGKILL)
        while pids := self._started() or list(self._ranks):
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            for pid in pids:
                os.waitpid(pid, 0)
                self._ranks.discard(pid)
                _remove_batches(pid)
        if self._dir:
            _remove_shared(f"*{Path(self._dir).name}-*")

    def _started(self) -> list[int]:
        """Return the pids of all children that a launch started."""
        return [pid for pid in boot.children() if pid not in self._spared]

    def _exit(self, status: int) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            self._spared.clear()
            self._end()
            for folder in filter(None, (self._dir, self._folder)):
                _forget_worktree(folder)
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os._exit(status)


def _remove_batches(pid: int) -> None:
    """Remove the tensors that a process which has ended shared as files.

    In a container that has the host's memory (`--ipc=host`), they stay: a process of another
    container may have the same pid.
    """
    with suppress(OSError):  # only Linux has them
        own_memory = os.readlink("/proc/self/ns/ipc") != _HOST_IPC
        if own_memory or os.readlink("/proc/self/ns/pid") == _HOST_PID:
            _remove_shared(f"torch_{pid}_*")


def _remove_shared(pattern: str) -> None:
    """Remove the shared memory of processes that have ended. What usually removes it is killed with
    the launch."""
    for left in Path("/dev/shm").glob(pattern):
        left.unlink(missing_ok=True)


def _forget_worktree(folder: str) -> None:
    """Remove what git keeps in a repository of a worktree in this folder, as `git worktree prune`
    would."""
    for link in Path(folder).glob("*/.git"):
        with suppress(OSError):
            entry = Path(link.read_text().removeprefix("gitdir: ").strip())
            if entry.parent.name == "worktrees":
                shutil.rmtree(entry)
                entry.parent.rmdir()  # if it is the last


def _signal_group(pid: int, signum: signal.Signals) -> None:
    # Not yet the leader of a group (who kills does so with the rank itself, too), or only zombies
    # are left of it.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signum)
