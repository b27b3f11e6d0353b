"""The private names of torch that this package reads, and all that it replaces, in one table.

A new torch may lack one of them. What needs it is then unknown, and a note says so. Run
tests/unit/test_torch_names.py with that torch: it names each one that is gone.

Attributes that torch gives to objects only (DDP's `reducer`, FSDP2's `_state_ctx`) cannot be asked
of their classes, and are not in the table.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch


class TorchName(NamedTuple):
    path: str  # the module, and within it the attributes: "torch.amp:GradScaler.update"
    used_for: str
    unknown: str  # without it
    since: str = "2.11"  # which torch has it: the lowest that we allow, or a later one
    needs_nccl: bool = False  # a torch built without NCCL lacks it


_C10D = "torch._C._distributed_c10d"
_RPC = "torch.distributed.rpc"
_AUTOGRAD = "torch.distributed.autograd"
_PHASES = "the phases of a step"
_STEPS = "where the steps of a program end"
_SENT = "what a step sends"
_COMPILED = "what a step compiles"
_GRADIENTS = "the gradients that a step synchronises, and their buckets"
_RPC_COUNTERS = "the counters of RPC"
_SWITCHES = "the switches of torch"

NAMES = {
    name.path: name
    for name in (
        # Replaced.
        TorchName("torch.autograd:backward", "see backward passes", _PHASES),
        TorchName("torch.autograd:grad", "see backward passes", _PHASES),
        TorchName(f"{_C10D}:Work.wait", "see waits for collectives", _PHASES),
        TorchName(
            "torch.distributed._functional_collectives:wait_tensor",
            "see waits for functional collectives",
            _PHASES,
        ),
        TorchName(f"{_C10D}:ProcessGroup.send", "name messages", _PHASES),
        TorchName(f"{_C10D}:ProcessGroup.recv", "name messages", _PHASES),
        TorchName(f"{_C10D}:ProcessGroup.recv_anysource", "name messages", _PHASES),
        TorchName("torch.amp:GradScaler.update", "see updates", _STEPS),
        TorchName("torch.cuda:CUDAGraph.replay", "see what hides operations", _SENT),
        TorchName(
            "torch.nn.parallel.distributed:logger.info",
            "see that DDP rebuilds its buckets",
            "whether DDP has rebuilt its buckets in the warm-up",
        ),
        TorchName(
            "torch.distributed.distributed_c10d:rendezvous",
            "let the ranks of a program meet at the store of their launch",
            "programs that own their loop",
        ),
        TorchName(f"{_RPC}.api:_to_worker_info", "count requests", _RPC_COUNTERS),
        TorchName(
            f"{_RPC}.api:_invoke_rpc_python_udf", "wait for answers", _RPC_COUNTERS
        ),
        TorchName(
            f"{_RPC}.internal:_internal_rpc_pickler.serialize",
            "count the tensors that leave",
            _RPC_COUNTERS,
        ),
        TorchName(
            f"{_RPC}.internal:_internal_rpc_pickler.deserialize",
            "count the tensors that arrive",
            _RPC_COUNTERS,
        ),
        TorchName(
            f"{_RPC}.internal:_run_function", "see calls of others", _RPC_COUNTERS
        ),
        TorchName(f"{_AUTOGRAD}:backward", "count gradients", _RPC_COUNTERS),
        TorchName(
            f"{_AUTOGRAD}:context.__exit__", "find unseen gradients", _RPC_COUNTERS
        ),
        TorchName("torch._C:Future.wait", "time waits for RPC", _RPC_COUNTERS),
        TorchName(f"{_RPC}:PyRRef.to_here", "count and time calls", _RPC_COUNTERS),
        TorchName(
            f"{_C10D}:Work.get_future",
            "tell waits for collectives from those for RPC",
            _RPC_COUNTERS,
        ),
        # Read.
        TorchName(
            f"{_AUTOGRAD}:_retrieve_context", "find hooks of gradients", _RPC_COUNTERS
        ),
        TorchName(
            f"{_AUTOGRAD}:_current_context", "see backwards of others", _RPC_COUNTERS
        ),
        TorchName(
            "torch.distributed:ProcessGroup._get_backend",
            "refuse another backend than the asked one",
            "the backend of a program",
        ),
        TorchName(
            "torch.distributed:ProcessGroup.register_pre_hook",
            "see all that is sent",
            "what futures' callbacks send",
            since="2.14",
        ),
        TorchName(
            "torch.distributed.distributed_c10d:_world.pg_names",
            "find all process groups",
            _SENT,
        ),
        TorchName(
            "torch.distributed:ProcessGroupGloo",
            "form a group that `destroy_process_group` leaves alone",
            "all launches",
        ),
        TorchName(f"{_C10D}:_dump_fr_trace", "read the flight recorder", _SENT),
        TorchName(
            f"{_C10D}:_dump_nccl_trace",
            "read NCCL's flight recorder",
            _SENT,
            needs_nccl=True,
        ),
        TorchName(
            "torch.utils._python_dispatch:TorchDispatchMode",
            "see operations",
            "all launches",
        ),
        TorchName(
            "torch.utils._pytree:tree_leaves", "find an operation's tensors", _SENT
        ),
        TorchName(
            "torch.distributed:Reducer.get_backward_stats",
            "see which modules synchronise",
            _GRADIENTS,
        ),
        TorchName(
            "torch.nn.parallel:DistributedDataParallel._get_ddp_logging_data",
            "read buckets and gradients",
            _GRADIENTS,
        ),
        TorchName(
            "torch.distributed.fsdp:FSDPModule._get_fsdp_state",
            "see which modules synchronise",
            _STEPS,
        ),
        TorchName("torch:Tensor._version", "see that parameters change", _STEPS),
        TorchName(
            "torch.distributed.tensor:DTensor._local_tensor",
            "find the shard of a rank",
            "the bytes of parameters",
        ),
        TorchName("torch._dynamo.utils:curr_frame", "count compilations", _COMPILED),
        TorchName("torch._dynamo.utils:counters", "count graph breaks", _COMPILED),
        TorchName(
            "torch.nn:Module._wrapped_call_impl",
            "know modules by their callers on a stack",
            "which functions of a module take long",
        ),
        TorchName("torch.backends.cuda:matmul.fp32_precision", "record it", _SWITCHES),
        TorchName(
            "torch.backends.mkldnn:matmul.fp32_precision", "record it", _SWITCHES
        ),
        TorchName("torch.backends.cudnn:conv.fp32_precision", "record it", _SWITCHES),
    )
}


@cache
def _place(path: str) -> tuple[Any, str]:
    """Return the object that has the last attribute of a name, None if torch lacks it, and the
    name of that attribute."""
    module, _, attributes = NAMES[path].path.partition(":")
    *owners, last = attributes.split(".")
    try:
        owner: Any = importlib.import_module(module)
    except ImportError:
        return None, last
    for attribute in owners:
        owner = getattr(owner, attribute, None)
    return owner, last


def find(path: str) -> Any:
    """Return what torch has under a name of the table; None if it lacks it."""
    owner, last = _place(path)
    return getattr(owner, last, None)


def need(path: str) -> Any:
    """Return what torch has under a name of the table; raises AttributeError if it lacks it."""
    found = find(path)
    if found is None:
        raise AttributeError(f"torch {torch.__version__} has no {path}")
    return found


def replace(path: str, wrap: Callable[[Any], Any]) -> None:
    """Replace a function of torch, in this process, by what `wrap` makes of it. Raises
    AttributeError if torch lacks it."""
    original = need(path)
    owner, last = _place(path)
    setattr(owner, last, wrap(original))
