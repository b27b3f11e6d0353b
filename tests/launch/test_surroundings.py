"""What surrounds ranks: their environment, their sockets, their server. Pytest's own end is told in
whole runs."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from getpass import getuser
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.rpc

from pytest_ddpperf.launch import Launcher, placement
from pytest_ddpperf.rank import lifecycle
from pytest_ddpperf.records.errors import DdpPerfError, ServerError
from tests.launch.conftest import Bench, listeners


def environment(*names: str) -> Any:
    return lambda ctx: [os.environ.get(name) for name in names]


def test_changes_of_the_environment_are_seen_deletions_too(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OURS", "yes")
    monkeypatch.delenv("HOME", raising=False)
    assert bench.call(environment("OURS", "HOME")) == [["yes", None]] * 2


def test_ranks_have_torchruns_variables_and_none_of_an_outer_launcher(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MASTER_ADDR", "SLURM_PROCID", "WORLD_SIZE", "RANK"):
        monkeypatch.setenv(name, "99")
    assert (
        bench.call(environment("MASTER_ADDR", "SLURM_PROCID"))
        == [[None] * 2] * 2
    )
    ours = bench.call(
        environment("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    )
    assert ours == [["0", "0", "2", "2"], ["1", "1", "2", "2"]]


def test_ranks_stand_where_pytest_stands(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "helper_of_test.py").write_text("value = 5")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def function(ctx: Any) -> Any:
        import helper_of_test  # type: ignore[import-not-found]

        return os.getcwd(), helper_of_test.value, sys.stdin.read()

    assert bench.call(function) == [(str(tmp_path), 5, "")] * 2


def test_ranks_are_pinned_and_seeded_alike(bench: Bench) -> None:
    def function(ctx: Any) -> Any:
        return sorted(os.sched_getaffinity(0)), torch.rand(1).item()

    (first, seed), (second, same_seed) = bench.call(function)
    assert seed == same_seed
    if len(os.sched_getaffinity(0)) >= 2:
        assert not set(first) & set(second)


@pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="one core has no smaller share"
)
def test_under_a_quota_ranks_are_on_all_cores_with_threads_for_their_share(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    usable = os.sched_getaffinity(0)
    monkeypatch.setattr(
        placement, "quota_cores", lambda root: len(usable) - 0.5
    )

    def function(ctx: Any) -> Any:
        return os.sched_getaffinity(0), torch.get_num_threads()

    assert bench.call(function, ranks=1) == [(usable, len(usable) - 1)]


@pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="one core has no smaller share"
)
@pytest.mark.parametrize("warmup", [0, 3])
def test_a_rank_that_begins_its_window_on_other_cores_than_its_own_is_noted(
    bench: Bench, warmup: int
) -> None:
    usable = os.sched_getaffinity(0)

    def setup(ctx: Any) -> Any:
        if ctx.rank == 1:
            os.sched_setaffinity(0, usable)
        return lambda: dist.all_reduce(torch.ones(1))

    (note,) = (
        note
        for note in bench.measure(setup, warmup=warmup).notes
        if "cores" in note
    )
    assert note == (
        "rank 1 has left its cores: its code or a library pinned it to"
        f" {len(usable)} cores, and it had {len(usable) // 2}"
    )


def test_a_composite_backend_forms_a_group_and_its_class_is_a_fact(
    bench: Bench,
) -> None:
    def setup(ctx: Any) -> Any:
        assert ctx.backend == "cpu:gloo"
        return lambda: dist.all_reduce(torch.ones(4))

    plan = replace(bench.plan(warmup=3), backend="cpu:gloo")
    samples = bench.launch(plan, setup)
    assert samples.facts["implementation"] == "ProcessGroupGloo"
    plain = bench.measure(setup_of_all_reduce, warmup=3)
    assert plain.facts["implementation"] == "ProcessGroupGloo"
    assert samples.counters == plain.counters | {
        "peak_rss.bytes": samples.counters["peak_rss.bytes"]
    }


def setup_of_all_reduce(ctx: Any) -> Any:
    return lambda: dist.all_reduce(torch.ones(4))


def test_a_torch_without_rpc_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed.rpc, "is_available", lambda: False)
    with pytest.raises(
        DdpPerfError, match=r"was built without torch\.distributed\.rpc"
    ):
        lifecycle._rpc()


LOOPBACK = "0100007F"


def seen_listening(bench: Bench) -> set[str]:
    def function(ctx: Any) -> Any:
        dist.all_reduce(torch.ones(1))
        found = listeners([os.getpid()])
        dist.barrier()
        return found

    return set().union(*bench.call(function))


def test_no_rank_listens_beyond_loopback(bench: Bench) -> None:
    assert seen_listening(bench) == {LOOPBACK}


def test_temporary_files_of_a_launch_end_with_it(bench: Bench) -> None:
    def function(ctx: Any) -> Any:
        before = os.listdir(tempfile.gettempdir())
        Path(tempfile.gettempdir(), "always-the-same").touch()
        subprocess.run(
            [sys.executable, "-c", "import tempfile; tempfile.mkdtemp()"],
            check=True,
        )
        return (
            before,
            tempfile.mkdtemp(),
            len(os.listdir(tempfile.gettempdir())),
            os.environ["TORCHINDUCTOR_CACHE_DIR"],
            os.environ["NUMBA_CACHE_DIR"] == tempfile.gettempdir(),
        )

    ((before, first, entries, cache, is_own),) = bench.call(function, ranks=1)
    ((again, second, *_),) = bench.call(function, ranks=1)
    assert is_own
    # but for the link to what Inductor precompiled, if it did
    assert before == again
    assert {*before} <= {f"torchinductor_{getuser()}"}
    assert entries == 3 + len(before)
    assert first != second
    assert len(first) == len(second)
    assert first.startswith(str(bench.tmp))
    assert not Path(first).exists()
    assert bench.tmp in Path(cache).parents, "it stays"


def test_what_inductor_compiled_is_of_as_many_threads(bench: Bench) -> None:
    """Before torch 2.13, its cache does not tell kernels for one thread from those for two."""

    def cache(ctx: Any) -> str:
        return os.environ["TORCHINDUCTOR_CACHE_DIR"]

    (kept,) = bench.call(cache, ranks=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "97")
        (other,) = bench.call(cache, ranks=1)
    assert Path(kept).parent == Path(other).parent
    assert kept != other


def test_what_inductor_precompiles_stays(bench: Bench) -> None:
    def default_cache(ctx: Any) -> str:
        from torch._inductor.runtime.runtime_utils import default_cache_dir

        return os.path.realpath(default_cache_dir())

    def cache(ctx: Any) -> str:
        return os.environ["TORCHINDUCTOR_CACHE_DIR"]

    (kept,) = bench.call(cache, ranks=1)
    os.makedirs(kept, exist_ok=True)
    assert bench.call(default_cache, ranks=1) == [kept]


@pytest.mark.skipif(
    not Path("/dev/shm").is_dir(), reason="semaphores have no folder here"
)
def test_the_semaphores_of_a_rank_end_with_its_launch(
    bench: Bench, tmp_path: Path
) -> None:
    """A worker is alive to the end: until then Python's resource tracker removes nothing."""

    def setup(ctx: Any) -> Any:
        context = multiprocessing.get_context("forkserver")
        lock = context.Lock()
        (tmp_path / str(ctx.rank)).write_text(lock._semlock.name)
        context.Process(target=time.sleep, args=(3600,)).start()
        return lambda: lock.acquire() and lock.release()

    bench.measure(setup)
    names = [path.read_text() for path in tmp_path.iterdir()]
    assert len(names) == 2
    assert [
        name
        for name in names
        if Path(f"/dev/shm/sem.{name.removeprefix('/')}").exists()
    ] == []


def test_a_server_that_is_killed_is_an_error_and_the_next_launch_has_another(
    bench: Bench,
) -> None:
    server = bench.server

    def function(ctx: Any) -> None:
        if ctx.rank == 0:
            os.kill(server, signal.SIGKILL)
        time.sleep(3600)

    with pytest.raises(
        ServerError, match=r"the rank server died \(status -9\)"
    ):
        bench.call(function)


def test_a_variable_read_at_import_restarts_the_server(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = bench.server
    bench.call(environment())
    assert bench.server == before
    cores = os.sched_getaffinity(0)
    # a pinned rank would have half the cores, and as many
    monkeypatch.setenv("OMP_NUM_THREADS", str(len(cores) + 1))
    share = max(1, len(cores) // 2)
    for threads, affinity in bench.call(
        lambda ctx: (torch.get_num_threads(), os.sched_getaffinity(0))
    ):
        assert threads > share or len(cores) == 1
        assert affinity == cores
    assert bench.server != before
    facts = bench.measure(lambda ctx: lambda: None).facts
    assert (facts["cores"], facts["cores_per_rank"], facts["pinned"]) == (
        len(cores),
        0,
        False,
    )


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder of 16 pages and few files, on a file system of its own."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = [
        "mount",
        "-t",
        "tmpfs",
        "-o",
        f"size={16 * mmap.PAGESIZE},nr_inodes=8",
        "ddpperf",
        folder,
    ]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this user may not mount a file system")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.parametrize("pages", [0, 1, 2])
def test_a_temporary_folder_without_space_is_told_and_nothing_is_left(
    bench: Bench, small: Path, pages: int
) -> None:
    (small / "full").write_bytes(bytes((16 - pages) * mmap.PAGESIZE))
    with pytest.raises(DdpPerfError) as caught:
        bench.call(lambda ctx: None)
    assert (
        str(caught.value)
        == f"no space in {small}; set TMPDIR to a folder that has some"
    )
    assert list(small.iterdir()) == [small / "full"]


def test_a_limit_on_the_size_of_files_is_named(bench: Bench) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    try:
        with pytest.raises(DdpPerfError) as caught:
            bench.call(lambda ctx: None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (
        str(caught.value)
        == "[Errno 27] File too large; see the limits of ulimit -v and -f"
    )


def test_a_limit_on_memory_is_named() -> None:
    limited = """
import resource
from pytest_ddpperf.launch import Launcher
from pytest_ddpperf.records.errors import ServerError
resource.setrlimit(resource.RLIMIT_AS, (300_000_000,) * 2)
try:
    Launcher(dict).probe((), 300.0)
except ServerError as error:
    print(error)
"""
    said = subprocess.run(
        [sys.executable, "-c", limited],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert said.startswith(
        "the rank server did not start; see the limits of ulimit -v and -f\nimporting torch:\n"
    )


def test_of_a_module_to_preload_that_ends_the_server_its_status_is_told(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ending_preload.py").write_text("import os\nos._exit(7)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    launcher = Launcher(dict, templates=bench.templates())
    with pytest.raises(ServerError, match=r"died \(status 7\)"):
        launcher.probe(("ending_preload",), 300.0)
    launcher.close()


def test_a_module_to_preload_that_fails_is_named(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "no such kernel, " * 20_000
    (tmp_path / "broken_preload.py").write_text(f"raise ImportError({words!r})")
    monkeypatch.syspath_prepend(str(tmp_path))
    launcher = Launcher(dict, templates=bench.templates())
    with pytest.raises(ServerError) as caught:
        launcher.probe(("broken_preload",), 300.0)
    reported = caught.value.output
    assert reported.startswith(
        "--ddp-preload: importing broken_preload:\nTraceback"
    )
    assert reported.rstrip().endswith(words.rstrip())
    assert reported.count("File ") == 1, "theirs"
    launcher.close()


def test_ctrl_c_leaves_nothing(bench: Bench) -> None:
    def function(ctx: Any) -> None:
        if ctx.rank == 0:
            os.kill(pytest_pid, signal.SIGINT)
        time.sleep(3600)

    pytest_pid = os.getpid()
    with pytest.raises(KeyboardInterrupt):
        bench.call(function)


class Tee:
    """A stream that can do nothing but write."""

    def write(self, text: str) -> int:
        return len(text)


def test_ranks_may_replace_their_output_or_have_none(bench: Bench) -> None:
    def setup(ctx: Any) -> Any:
        output: Any = None if ctx.rank else Tee()
        sys.stdout = output
        return lambda: print("a step")

    samples = bench.measure(setup, steps=3)
    assert len(samples.step_seconds) == 3
