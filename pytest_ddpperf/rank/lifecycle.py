"""A rank, from the fork to its end. Its order is what makes failures whole:

own session, death with the server, output to its log; then, inside the error handler, environment,
pinning, unpickling, process group, the user's code; the result or the error leaves before any
teardown; then it exits hard, because Gloo's and NCCL's destructors can hang.
"""

import faulthandler
import json
import multiprocessing
import os
import random
import re
import resource
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from multiprocessing import shared_memory
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from pytest_ddpperf.rank import (
    command,
    context,
    counters,
    environment,
    group,
    modules,
    operation,
    recorder,
    sampling,
    sent,
    torch_names,
)
from pytest_ddpperf.rank.context import Context, RpcContext
from pytest_ddpperf.rank.process import Rank, flush
from pytest_ddpperf.rank.timed_rank import TimedRank
from pytest_ddpperf.records import codec
from pytest_ddpperf.records.errors import (
    DdpPerfError,
    EndedEarly,
    short_repr,
    where_limited,
)
from pytest_ddpperf.records.messages import RankRequest
from pytest_ddpperf.records.metric import KERNELS
from pytest_ddpperf.records.plan import Program
from pytest_ddpperf.records.samples import RankError, StackSamples, Window
from pytest_ddpperf.wire import boot, layout, opened, payload, variables
from pytest_ddpperf.wire.channels import Board, Kind, Phase, send_frame
from pytest_ddpperf.wire.source_trees import Trees

# What calls the user's code, in tracebacks: this package, and Python's own runner of programs.
_OURS = (str(Path(__file__).parent), "<frozen runpy>")
# How peers' ends show in a rank: Gloo's and NCCL's words, and the store's. A rank that says so is
# rarely the cause.
_LOST = re.compile(
    r"connection (closed by peer|reset by peer|refused)|broken pipe|socket closed"
    r"|pair closure|\beof\b"
    r"|remote process exited|ncclRemoteError|communicator was aborted"
    r"|connectFullMesh failed|timed out waiting",
    re.IGNORECASE,
)


def run(rank: int, directory: str, channel: socket.socket) -> NoReturn:
    """Be rank `rank` of the launch described in `directory`; results and errors go to `channel`."""
    server = os.getppid()
    os.setsid()
    # whatever socket.setdefaulttimeout says, here or in pytest
    channel.setblocking(True)
    boot.die_with_parent(server, signal.SIGKILL)
    # A crash leaves its stacks; a core file of a process that uses CUDA has gigabytes.
    resource.setrlimit(
        resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1])
    )
    folder = Path(directory)
    stacks = _redirect(folder, rank)
    request = codec.from_json(
        RankRequest, (folder / "request.json").read_bytes()
    )
    # A rank ends hard, so multiprocessing (DataLoader's workers) must leave its sockets where they
    # are removed, and give its semaphores and shared memory a name by which they are.
    multiprocessing.current_process()._config.update(  # type: ignore[attr-defined]
        tempdir=directory, semprefix=f"/{folder.name}"
    )
    shared_memory._SHM_NAME_PREFIX = f"/{folder.name}-"  # type: ignore[attr-defined]
    shared_memory._SHM_SAFE_NAME_LENGTH = 30  # type: ignore[attr-defined]
    plan = request.plan
    board = Board(folder / "board", plan.processes, plan.room)
    trees = Trees(**request.trees) if request.trees is not None else None
    this = Rank(rank, plan, board, channel, trees, request.in_stretches)
    status = 0
    try:
        if plan.command:
            window = command.run(this, folder, request.environ)
            this.deliver(codec.to_json(window))
            this.end()
        else:
            _call_from_random_frame(_work, this, folder, request)
        flush()
        # that everybody's results are there: an early end would look like a lost
        # connection
        this.await_word()
    except BaseException as error:
        this.end_child(error)
        status = 1
        try:
            _report(error, this)
        except BaseException:
            # an error that cannot be reported: its log is what is left
            traceback.print_exc()
        flush()
        if isinstance(error, EndedEarly):
            # or pytest's end: those that went on are asked what they wait for
            this.await_word()
    finally:
        del stacks
        os._exit(status)


def _redirect(folder: Path, rank: int) -> Any:
    """Output to the rank's own files, and Python stacks to a third, on SIGQUIT and on a crash in
    C."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    for descriptor, name in ((1, "out"), (2, "err")):
        log = os.open(
            folder / f"rank{rank}.{name}",
            os.O_WRONLY | os.O_CREAT | os.O_APPEND,
            0o600,
        )
        os.dup2(log, descriptor)
        os.close(log)
    # New objects: pytest's capture does not reach here, and buffers of the server must not be
    # written twice.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    write = partial(open, mode="w", buffering=1, errors="backslashreplace")
    sys.stdout = write(1, closefd=False)
    sys.stderr = write(2, closefd=False)
    stacks = open(folder / f"rank{rank}.stacks", "w")  # noqa: SIM115  # open as long as the rank lives
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGQUIT, stacks, all_threads=True)
    return stacks


def _call_from_random_frame(function: Callable[..., None], *args: Any) -> None:
    """Call a function from a frame of random size: so its own frames lie elsewhere on Python's
    stack in each rank."""

    def call() -> None:
        function(*args)

    # Python (3.11 and later) keeps frames in chunks of 2,048 words. A call that begins a new chunk
    # costs microseconds each time, and which call of a step does so depends on the sizes of all
    # frames below it.
    code = call.__code__
    call.__code__ = code.replace(
        co_stacksize=code.co_stacksize + random.randrange(2048)
    )
    call()


CleanUp = Callable[[], None]


def _work(rank: Rank, folder: Path, request: RankRequest) -> None:
    rank.enter(Phase.START)
    index = request.processes.index(rank.number)
    _set_environment(request, rank.number, index)
    tempfile.tempdir = None  # what the rank server found
    os.chdir(request.cwd)
    sys.path[:] = request.sys_path
    sys.argv[:] = request.argv
    cpus = request.cpus[index]
    if cpus:
        os.sched_setaffinity(0, cpus)
    layout.draw()
    variables.watch()
    if rank.trees is not None:
        opened.watch(str(folder), rank.trees)
        with suppress(AttributeError):  # a later torch has it no more
            torch_names.replace(
                "torch._C:import_ir_module", opened.noting_first
            )
    payload.install(request.modules)
    if rank.plan.device == "cuda":
        sent.watch_graphs()
    if rank.plan.rpc:
        # before the user's code is imported and this process joins the RPC world
        _rpc().meter.install()
    if rank.plan.boundary:
        group.meet_at_launch(str(folder))
    modules.watch_freezing()  # the file of the test may freeze, too
    task, function, args = payload.loads((folder / "payload").read_bytes())
    if rank.plan.boundary:
        os.environ["ROLE_RANK"] = str(rank.number)
        if isinstance(function, Program):
            os.environ.update(opened.with_own(os.environ, function.env))
    rank.enter(Phase.GROUP)
    place = group.ProcessPlace(
        number=rank.number,
        index=index,
        node=request.node,
        folder=folder,
        store=request.store,
        threads=request.threads,
    )
    ctx: Context = (_rpc() if rank.plan.rpc else group).start(rank.plan, place)
    rank = replace(rank, pinned_to=group.cores())
    if (
        task == "measure"
        and rank.number < rank.plan.world_size
        and not rank.plan.boundary
    ):
        rank = replace(rank, own_group=group.OwnGroup(rank.plan, place, ctx))
    threading.Thread(
        target=_tell_started, args=(folder, rank), daemon=True
    ).start()
    rank.enter(Phase.SETUP)
    clean_up = _TASKS[task](rank, ctx, function, *args)
    rank.enter(Phase.CLEANUP)
    if clean_up is not None:
        clean_up()
    rank.end()


def _set_environment(request: RankRequest, number: int, index: int) -> None:
    """Give this process the variables of its rank, which is the `index`-th of its node."""
    os.environ.clear()
    os.environ.update(
        {
            **recorder.size(),
            **request.environ,
            "RANK": str(number),
            "LOCAL_RANK": str(index),
        }
    )
    if request.devices:
        os.environ["CUDA_VISIBLE_DEVICES"] = request.devices[index]


def _tell_started(folder: Path, rank: Rank) -> None:
    """Write which collectives this rank has started, whenever pytest opens the pipe: something
    hangs."""
    pipe = folder / f"rank{rank.number}.ask"
    os.mkfifo(pipe, 0o600)
    path = folder / f"rank{rank.number}.started"
    while True:
        pipe.read_bytes()
        path.with_suffix(".part").write_text(
            json.dumps(recorder.started(rank.own_group))
        )
        path.with_suffix(".part").rename(path)


def _rpc() -> Any:
    """Import the module for RPC launches."""
    import torch.distributed.rpc

    if not torch.distributed.rpc.is_available():
        raise DdpPerfError(
            f"this torch ({torch.__version__}) was built without torch.distributed.rpc"
        )
    from pytest_ddpperf.rank import rpc

    return rpc


def _measure(
    rank: Rank, ctx: Context, setup: Any, *others: Any
) -> CleanUp | None:
    if isinstance(ctx, RpcContext):
        return _measure_rpc(rank, ctx, setup, *others)
    if rank.plan.boundary:
        _run_program(rank, ctx, setup)
    asked = rank.plan.collective
    made = (
        sampling.Prepared(setup, ctx)
        if asked is None
        else sampling.Prepared(operation.setup, ctx, asked)
    )
    return _timed(rank, ctx, made, counters.Meter())


def _measure_rpc(
    rank: Rank,
    ctx: RpcContext,
    trainer: Any,
    master: Any,
    parameter_server: Any,
) -> CleanUp | None:
    rpc = _rpc()
    if ctx.role == "trainer":
        return _timed(rank, ctx, rpc.prepared(ctx, trainer, master), rpc.meter)
    setup = master if ctx.role == "master" else parameter_server
    made = rpc.served(ctx, setup)
    rank.enter(Phase.LEADER)
    try:
        rpc.announce(ctx, made)
    except BaseException:
        rank.enter(Phase.SETUP)  # which made what cannot be pickled
        raise
    rank.await_word()  # that the trainers have ended
    rank.deliver(codec.to_json(rank.imported()))
    return made.clean_up if made is not None else None


def _timed(
    rank: Rank, ctx: Context, prepared: sampling.Prepared, meter: counters.Meter
) -> CleanUp:
    timed = _timed_rank(rank, ctx, meter)
    with ExitStack() as observed:
        samples = _sample_stacks(rank, observed)
        window = sampling.measure(prepared.step, timed)
    if rank.plan.has_device_time:
        window = _with_device(prepared, window, timed)
    notes = window.notes
    if rank.plan.trace:
        from pytest_ddpperf.rank import tracing

        problem = tracing.trace(prepared.step, timed)
        if problem:
            notes = (*notes, problem)
    # its closing check is part of the result
    if rank.plan.collective is not None:
        rank.enter(Phase.CLEANUP)
        prepared.clean_up()
    window = replace(
        window, notes=notes, stacks=samples(), imported=rank.imported()
    )
    rank.deliver(codec.to_json(window))
    return prepared.clean_up


def _with_device(
    prepared: sampling.Prepared, window: Window, timed: TimedRank
) -> Window:
    from pytest_ddpperf.rank.device import measure_device

    found, notes = measure_device(prepared.step, window, timed)
    counts = window.counters
    if found is not None:
        counts = {**counts, KERNELS: found.count}
    return replace(
        window, device=found, counters=counts, notes=(*window.notes, *notes)
    )


def _timed_rank(rank: Rank, ctx: Context, meter: counters.Meter) -> TimedRank:
    return TimedRank(
        plan=rank.plan,
        ctx=ctx,
        board=rank.board,
        meter=meter,
        own=rank.own_group,
        pinned_to=rank.pinned_to,
        stretches=rank.stretches if rank.in_stretches else None,
    )


def _sample_stacks(
    rank: Rank, observed: ExitStack
) -> Callable[[], StackSamples | None]:
    """Sample stacks from here on, if that is asked; return what returns the samples."""
    if not rank.plan.stacks or rank.trees is None:
        return lambda: None
    from pytest_ddpperf.rank.tracing import StackSampler

    sampler = observed.enter_context(
        StackSampler(
            rank.trees, lambda: rank.board.phase(rank.number) is Phase.STEPS
        )
    )
    return lambda: sampler.samples


def _run_program(rank: Rank, ctx: Context, program: Any) -> NoReturn:
    from pytest_ddpperf.rank import loop

    samples = _sample_stacks(rank, ExitStack())

    def deliver(window: Window) -> NoReturn:
        window = replace(window, stacks=samples(), imported=rank.imported())
        rank.deliver(codec.to_json(window))
        rank.end()
        flush()
        rank.await_word()
        os._exit(0)

    def fail(error: BaseException) -> None:
        if os.getpid() == rank.pid:  # a child may train otherwise
            _report(error, rank)
            flush()
            os._exit(1)

    timed = _timed_rank(rank, ctx, counters.Meter())
    if rank.plan.figures:
        timed.written = loop.figure_reader(rank.plan, program, rank.number)
    loop.run(timed, program, deliver, fail, rank.end_child)


def _call(rank: Rank, ctx: Context, function: Any, *args: Any) -> None:
    rank.enter(Phase.STEPS)
    made = context.call_keeping_locals(function, ctx, *args)
    if kind := context.describe_not_run(made):
        raise DdpPerfError(
            f"the function returned {kind}, which did not run: it must be one without yield or"
            " async"
        )
    rank.deliver(context.dump_result(made))


def _probe(rank: Rank, ctx: Context, function: None) -> None:
    rank.deliver(codec.to_json(environment.probe()))


_TASKS: dict[str, Callable[..., CleanUp | None]] = {
    "measure": _measure,
    "call": _call,
    "probe": _probe,
}


_HALF = 5_000  # characters, of what is written of an error


def _report(error: BaseException, rank: Rank) -> None:
    when = time.monotonic()
    _drop_our_frames(error, set())
    plan = rank.plan
    written = ""
    # An error of ours says in its text what is wrong; its frames are ours too.
    if not isinstance(error, DdpPerfError):
        written = _bounded("".join(traceback.format_exception(error)))
    report = RankError(
        rank=rank.number,
        name=plan.name(rank.number),
        when=when,
        phase=rank.board.describe(rank.number, plan),
        summary=_summary(error),
        traceback=written,
        lost_connection=is_lost_connection(error),
        advice=getattr(error, "advice", ""),
    )
    send_frame(rank.channel, Kind.ERROR, codec.to_json(report))


def _summary(error: BaseException) -> str:
    if isinstance(error, DdpPerfError):
        return str(error)
    if isinstance(error, SystemExit):
        return f"sys.exit({short_repr(error.code)}) was called"
    first = next(iter(_words(error).splitlines()), type(error).__name__)
    return f"{_bounded(first)}{where_limited(first)}"


def _bounded(words: str) -> str:
    """Return what is written of an error; of a long text, its beginning and its end."""
    left_out = len(words) - 2 * _HALF
    if left_out <= 0:
        return words
    return (
        f"{words[:_HALF]}\n... ({left_out:,} characters) ...\n{words[-_HALF:]}"
    )


def _words(error: BaseException) -> str:
    """Return the type and message of an error, without notes; its own __str__ may fail."""
    formatted = traceback.TracebackException(type(error), error, None)
    formatted.__notes__ = None  # type: ignore[attr-defined]  # since Python 3.11, which come last
    *_, last = formatted.format_exception_only()
    return last.strip()


def is_lost_connection(error: BaseException) -> bool:
    """Judge whether the error says that another rank went away: then it is hardly the first
    cause."""
    return (
        isinstance(error, RuntimeError | ConnectionError)
        and _LOST.search(_words(error)) is not None
    )


def _drop_our_frames(error: BaseException, seen: set[int]) -> None:
    """Let the traceback show the code of others only, in the causes and contexts too."""
    seen.add(id(error))
    frame = error.__traceback__
    kept: TracebackType | None = None
    while frame is not None:
        after = frame.tb_next
        if not frame.tb_frame.f_code.co_filename.startswith(_OURS):
            if kept is None:
                error.__traceback__ = frame
            else:
                kept.tb_next = frame
            kept = frame
        frame = after
    if kept is not None:
        kept.tb_next = None
    elif isinstance(error, SyntaxError | ImportError):
        error.__traceback__ = None  # it names the program's line itself
    for linked in (error.__cause__, error.__context__):
        if linked is not None and id(linked) not in seen:
            _drop_our_frames(linked, seen)
