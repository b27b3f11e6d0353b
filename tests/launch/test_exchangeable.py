"""Launches are exchangeable: what a process draws once is the same for all, or drawn anew in each
launch."""

from __future__ import annotations

import ctypes
import gc
import mmap
import multiprocessing
import os
import re
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_ddpperf.launch import Launcher, Observer
from pytest_ddpperf.launch.template import Templates
from pytest_ddpperf.records.plan import Plan
from pytest_ddpperf.records.samples import GOES_ON
from pytest_ddpperf.wire.source_trees import Trees
from tests.launch.conftest import Bench

ROOT = Path(__file__).parents[2]


def hash_of_a_name(ctx: Any) -> tuple[int, str | None]:
    """Return it as a rank has it, and the variable with which a process that the rank starts gets
    the same."""
    return hash("layer1"), os.environ.get("PYTHONHASHSEED")


def hash_by_seed(seed: str) -> int:
    environ = {**os.environ, "PYTHONHASHSEED": seed}
    return int(
        subprocess.check_output(
            [sys.executable, "-c", "print(hash('layer1'))"], env=environ
        )
    )


def test_the_hash_seed_is_the_same_in_every_session_unless_the_user_chooses_one(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert bench.call(hash_of_a_name) == [(hash_by_seed("0"), "0")] * 2
    assert (
        bench.measure(lambda ctx: lambda: None).facts["env:PYTHONHASHSEED"]
        == "0"
    )
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert bench.call(hash_of_a_name) == [(hash_by_seed("7"), "7")] * 2
    monkeypatch.setenv("PYTHONHASHSEED", "random")
    assert bench.call(hash_of_a_name)[0][1] == "random"


def places(ctx: Any) -> tuple[int, ...]:
    """Return where this process has a block of the heap, a Python object, and a block with a
    mapping of its own; how much of Python's stack its frames take; and the versions of a class and of
    a builtin type."""
    # the first ones fill what others have freed
    objects = [bytes(100) for _ in range(1_000)]
    stack = sum(
        frame.f_code.co_stacksize for frame, _ in traceback.walk_stack(None)
    )
    return (
        torch.empty(1_000).data_ptr(),
        id(objects[-1]),
        torch.empty(1 << 20).data_ptr(),
        stack,
        version_of(type("used", (), {})),
        version_of(bytearray),
    )


# of tp_version_tag in PyTypeObject, where a pointer has 8 bytes
VERSION_OFFSET = 384


def version_of(kind: type) -> int:
    """Return the number that Python gives to a type where it is used for the first time."""
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(kind))
    hasattr(kind, "name")
    return ctypes.c_uint.from_address(id(kind) + VERSION_OFFSET).value


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap")
def test_each_rank_of_each_launch_has_a_heap_and_a_stack_of_its_own(
    bench: Bench,
) -> None:
    drawn = [rank for _ in range(4) for rank in bench.call(places)]
    for kind in zip(*drawn, strict=True):
        assert len({*kind}) > len(kind) / 2


# where its blocks lie in their pages, and the versions of types
IN_A_CHILD = """
import torch
from tests.launch.test_exchangeable import places

tensor, small, *_, version, builtin = places(None)
print(tensor % 4096, small % 4096, version, builtin)
"""


def places_in_a_child(ctx: Any) -> list[str]:
    """Return what `places` returns in an interpreter that a rank starts."""
    command = [sys.executable, "-c", IN_A_CHILD]
    return subprocess.check_output(command, text=True, cwd=ROOT).split()


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap")
def test_each_interpreter_that_a_rank_starts_has_a_heap_of_its_own(
    bench: Bench,
) -> None:
    drawn = [rank for _ in range(2) for rank in bench.call(places_in_a_child)]
    for kind in zip(*drawn, strict=True):
        assert len({*kind}) > 1


def libraries(ctx: Any) -> list[str]:
    """Return where the libraries of this process lie, and its stack."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [
        line.split()[0] for line in lines if ".so" in line and "r-xp" in line
    ]


@pytest.mark.skipif(
    not Path("/proc/self/maps").exists(),
    reason="only Linux says where libraries lie",
)
def test_rank_servers_of_one_template_have_one_layout(bench: Bench) -> None:
    ours, theirs = bench.templates(), Templates()
    theirs.add(ours.fork_server(os.environ)[0].detach(), os.environ)
    plan = Plan(world_size=1, backend="gloo", device="cpu")
    launchers = [
        Launcher(dict, templates=templates)
        for templates in (ours, theirs, Templates())
    ]
    try:
        one, same, other = (
            launcher.call(plan, libraries, (), Observer())
            for launcher in launchers
        )
    finally:
        for launcher in launchers:
            launcher.close()
    assert one == same
    if Path("/proc/sys/kernel/randomize_va_space").read_text().strip() != "0":
        assert one != other, "that of a template of its own is another"


@pytest.mark.skipif(
    not Path("/proc/self/smaps_rollup").exists(),
    reason="only Linux says which memory is a process's own",
)
def test_a_rank_server_has_little_memory_that_its_template_lacks(
    bench: Bench,
) -> None:
    """Its ranks share that, and those of the other side have other pages."""
    launcher = Launcher(dict, templates=bench.templates())
    try:
        launcher.ready_for(Plan(world_size=1, backend="gloo", device="cpu"))
        pid = launcher._server.pid
        memory = Path(f"/proc/{pid}/smaps_rollup").read_text()
    finally:
        launcher.close()
    (own,) = re.findall(r"Private_Dirty: +(\d+) kB", memory)
    assert int(own) < 10_000


FINDERS = "import sys; print([type(each).__name__ for each in sys.meta_path])"


def finders(ctx: Any) -> list[str]:
    """Return the types of what imports ask, in a rank and in an interpreter that it starts."""
    command = [sys.executable, "-c", FINDERS]
    child = subprocess.check_output(command, text=True)
    return [*(type(each).__name__ for each in sys.meta_path), child]


def test_an_import_asks_the_same_finders_on_both_sides(
    bench: Bench, tmp_path: Path
) -> None:
    current, base = str(tmp_path / "current"), str(tmp_path / "base")
    plan = Plan(world_size=1, backend="gloo", device="cpu")
    found = []
    for top in (current, base):
        trees = Trees(current=current, base=top, kept=())
        launcher = Launcher(dict, trees=trees, templates=bench.templates())
        try:
            found += launcher.call(plan, finders, (), Observer())
        finally:
            launcher.close()
    assert found[0] == found[1]
    assert "Trees" in found[0]
    assert "Trees" in found[0][-1]


def test_a_template_that_is_killed_is_replaced(bench: Bench) -> None:
    template = next(iter(bench.launcher.templates._templates.values()))
    assert bench.call(lambda ctx: ctx.rank) == [0, 1]
    template._child.kill()
    assert bench.call(lambda ctx: ctx.rank) == [0, 1]
    assert template not in bench.launcher.templates._templates.values()
    assert template._child.lines.socket.fileno() == -1, "closed"


def test_page_faults_of_steps_are_counted(bench: Bench) -> None:
    def setup(ctx: Any) -> Any:
        pages = 300 if ctx.rank == 1 else 0

        def step() -> None:
            with mmap.mmap(-1, mmap.PAGESIZE * 301) as mapped:
                if hasattr(mmap, "MADV_NOHUGEPAGE"):
                    # else a fault may bring several pages
                    mapped.madvise(mmap.MADV_NOHUGEPAGE)
                for page in range(pages):
                    mapped[page * mmap.PAGESIZE] = 1

        return step

    few, many = bench.measure(setup, steps=10).page_faults or ()
    assert few < 100
    assert 300 <= many < few + 400


def looked_through(
    bench: Bench, *, collects: bool, freezes: bool = False
) -> float:
    """Through how many objects Python's garbage collector looks in a step of the window."""

    def setup(ctx: Any) -> Any:
        if freezes:
            gc.freeze()

        def step() -> None:
            if collects:
                gc.collect()
            ctx.record("objects", len(gc.get_objects()), better=None)

        return step

    measured = bench.measure(setup, ranks=1, steps=3, warmup=3)
    (counted,) = measured.recorded["objects"]
    return min(filter(None, counted))


def test_a_step_that_collects_looks_through_as_much_as_in_training(
    bench: Bench,
) -> None:
    """Also through what was imported before the fork, which a rank otherwise does not touch."""
    most = looked_through(bench, collects=True)
    least = looked_through(bench, collects=False)
    assert 0 < least < most / 5
    frozen = looked_through(bench, collects=True, freezes=True)
    assert 0 < frozen < most / 5, "as the code has asked for"


def test_the_garbage_collector_is_as_the_code_has_set_it(bench: Bench) -> None:
    def setup(ctx: Any) -> Any:
        if ctx.rank == 0:
            gc.disable()

        def step() -> None:
            for _ in range(2000):
                cycle: list[Any] = []
                cycle.append(cycle)
            assert gc.isenabled() == (ctx.rank == 1)

        return step

    off, on = bench.measure(setup, steps=10).collector_seconds or ()
    assert off == 0
    assert on > 0


def compute() -> None:
    until = time.thread_time() + 0.2
    while time.thread_time() < until:
        pass


COMPUTE = """
import time
while time.thread_time() < 0.3: pass
"""


class Program:
    """A program that does what `target` does."""

    def __init__(self, target: Any) -> None:
        assert target is compute

    def start(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-S", "-c", COMPUTE])

    def join(self) -> None:
        self.process.wait()


@pytest.mark.parametrize(
    "kind",
    [threading.Thread, multiprocessing.get_context("fork").Process, Program],
)
@pytest.mark.parametrize("awaits", [True, False])
def test_work_that_steps_leave_to_a_thread_or_a_child_is_seen(
    bench: Bench, kind: Any, awaits: bool
) -> None:
    def setup(ctx: Any) -> Any:
        def step() -> None:
            worker = kind(target=compute)
            worker.start()
            if awaits:
                worker.join()

        return step

    doubts = bench.measure(setup, steps=3).doubts
    assert doubts.get(GOES_ON, "").startswith(
        "" if awaits else "threads or children of a rank still work"
    )
    assert (GOES_ON in doubts) is not awaits
