"""What the ranks of a launch read at their start: the request, with their environment variables;
and which variables belong to a measurement.

The variables are pytest's, without those of an outer launcher, plus those that keep a launch local.
"""

import os
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from pytest_ddpperf import text
from pytest_ddpperf.launch.placement import place
from pytest_ddpperf.launch.remote_ranks import Part
from pytest_ddpperf.launch.template import with_hash_seed
from pytest_ddpperf.records import codec
from pytest_ddpperf.records.errors import DdpPerfError
from pytest_ddpperf.records.messages import Address, RankRequest
from pytest_ddpperf.records.plan import Plan, Variables
from pytest_ddpperf.records.samples import FoundFacts
from pytest_ddpperf.wire import boot, opened
from pytest_ddpperf.wire.source_trees import Trees
from pytest_ddpperf.wire.variables import READ, concealed

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
_RECORDED = tuple(
    """
    NCCL_ TORCH_ PYTORCH_ TORCHINDUCTOR_ TORCHDYNAMO_ GLOO_ OMP_ GOMP_ MKL_ KMP_ GLIBC_ MALLOC_
    ATEN_CPU_CAPABILITY ONEDNN_ DNNL_ OPENBLAS_ CUBLAS_ LD_LIBRARY_PATH LD_PRELOAD PYTHONHASHSEED
    PYTHONMALLOC PYTHONOPTIMIZE PYTHONDEVMODE CUDA_LAUNCH_BLOCKING CUDA_DEVICE_MAX_CONNECTIONS
    CUDA_MODULE_LOADING CUDNN_ NVIDIA_TF32 TRITON_
    """.split()
)
# The place of a cache changes no figure, an address may hold a password, and torchrun sets how NCCL
# ends after an error.
_NOT_RECORDED = re.compile("REDIS|URL|_DIR$|ASYNC_ERROR_HANDLING$")

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def inherited(environ: Variables) -> dict[str, str]:
    """Return `environ` without what an outer launcher set for another job than ours."""
    return {
        name: value
        for name, value in environ.items()
        if name not in _OUTER and not name.startswith(_OUTER_PREFIXES)
    }


def for_ranks(
    environ: Variables, world_size: int, part: Part
) -> dict[str, str]:
    """Return the variables of all ranks of this node: torchrun's, without RANK and LOCAL_RANK, and
    the interface.

    Unless the user chose one, that is loopback on a single node, else the interface to the other
    nodes (but not for NCCL, which may have a better one)."""
    interface, libraries = LOOPBACK, ["GLOO", "TP", "NCCL"]
    if part.store is not None:
        interface, libraries = part.interface, ["GLOO", "TP"]
    local = {f"{library}_SOCKET_IFNAME": interface for library in libraries}
    return {
        **(local if interface else {}),
        **inherited(with_hash_seed(environ)),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(len(part.processes)),
        "NODE_RANK": str(part.node),
        "GROUP_RANK": str(part.node),
    }


def for_command(environ: Variables) -> dict[str, str]:
    """Return the variables of a command that starts ranks itself. Programs are found as in the
    active virtual environment of pytest's interpreter."""
    folders = environ.get("PATH", os.defpath).split(os.pathsep)
    scripts = os.path.dirname(sys.executable)
    if scripts not in folders:
        folders.insert(0, scripts)
    path = os.pathsep.join(folders)
    return {**inherited(with_hash_seed(environ)), "PATH": path}


def _torchruns(plan: Plan, address: str, port: int) -> dict[str, str]:
    """Return further variables of torchrun, with which a program forms its process group over a
    store that is there."""
    return {
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "GROUP_WORLD_SIZE": str(plan.nodes),
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": str(plan.world_size),
        "TORCHELASTIC_RUN_ID": "ddpperf",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }


def recorded(environ: Variables) -> FoundFacts:
    """Return the user's variables that belong to a measurement, as "env:NAME"."""
    return {
        f"env:{name}": concealed(name, value)
        for name, value in environ.items()
        if name.startswith(_RECORDED) and not _NOT_RECORDED.search(name)
    }


def read_by(processes: Iterable[Variables]) -> FoundFacts:
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


def visible_devices(environ: Variables) -> tuple[str, ...]:
    """Return what CUDA_VISIBLE_DEVICES lists, numbers or UUIDs; () if it is not set."""
    listed = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return tuple(name for each in listed if (name := each.strip()))


def own_devices(environ: Variables, ranks: int) -> tuple[str, ...]:
    """Return the device of each of so many ranks as its own CUDA_VISIBLE_DEVICES; raises
    DdpPerfError."""
    visible = visible_devices(environ) or tuple(map(str, range(ranks)))
    if len(visible) < ranks:
        raise DdpPerfError(
            f"CUDA_VISIBLE_DEVICES has {text.several(len(visible), 'device')} for {ranks} ranks"
        )
    return visible[:ranks]


def rank_request(
    folder: Path,
    plan: Plan,
    part: Part,
    *,
    modules: Mapping[str, str],
    trees: Trees | None = None,
    master: Address | None = None,
    in_stretches: bool = False,
) -> RankRequest:
    """Return what the ranks of a launch of `plan` read in its `folder`, with this process's
    environment, current folder and search path.

    `part` is what this node starts. `modules` are those that pytest collected: name -> file. The
    ranks and their children report what they use from `trees`. `master`: address and port of the
    store where the ranks of a program, or those of several nodes, meet."""
    placement = place(len(part.processes), os.environ)
    on_cpu = plan.device == "cpu"
    # Compiled code stays for the next launch; else each would compile anew. Before torch 2.13, it
    # may be for another number of threads.
    user = os.environ.get("USER", os.geteuid())
    cache = os.path.join(tempfile.gettempdir(), f"torchinductor_{user}")
    if on_cpu:
        threads = os.environ.get("OMP_NUM_THREADS", placement.own_threads)
        cache += f"/threads-{threads}"
    own = for_ranks(os.environ, plan.processes, part)
    if plan.command:
        own = for_command(os.environ)
    environ = {
        "TORCHINDUCTOR_CACHE_DIR": cache,
        # Else the current side alone would run what numba keeps next to the sources, which may be
        # out of date.
        "NUMBA_CACHE_DIR": str(folder / "tmp"),
        **own,
        # In the folder of the launch, with which it is removed: a rank ends hard, so nobody else
        # would remove them.
        "TMPDIR": str(folder / "tmp"),
    }
    if plan.boundary and master is not None:
        environ |= _torchruns(plan, *master)
    environ |= opened.for_children(environ, folder)
    return RankRequest(
        plan=plan,
        in_stretches=in_stretches,
        environ=environ,
        node=part.node,
        processes=part.processes,
        store=part.store,
        cwd=os.getcwd(),
        # At the end for what makes a PYTHONPATH of it, as torch.compile does for its workers.
        sys_path=[*boot.search_path(), opened.CHILDREN],
        argv=sys.argv,
        cpus=placement.cpus if on_cpu else ((),) * len(part.processes),
        devices=own_devices(os.environ, len(part.processes))
        if plan.sees_one_device
        else (),
        threads=placement.own_threads,
        modules=modules,
        trees=codec.encode(trees),
    )
