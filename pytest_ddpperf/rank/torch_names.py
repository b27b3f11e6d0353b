"""The private names of torch that this package reads, and all that it replaces, in one table.

A new torch may lack one of them. What needs it is then unknown, and a note says so. Run
tests/unit/test_torch_names.py with that torch: it names each one that is gone.

Attributes that torch gives to objects only (DDP's `reducer`, FSDP2's `_state_ctx`) cannot be asked
of their classes, and are not in the table.
"""

import importlib
from collections.abc import Callable
from typing import Any

import torch

# What runs a backward pass: torch puts the first back from the second. The public functions that
# call it are known to torch.compile, which would compile what stands in their place.
ENGINE = (
    "torch.autograd:_engine_run_backward",
    "torch.autograd.graph:_engine_run_backward",
)
# The names, by what is unknown without them: the module, and within it the attributes. The comment
# next to each, or above it, says what it is used for.
_NAMES = (
    # --- the phases of a step
    *ENGINE,  # see backward passes
    "torch._C._distributed_c10d:Work.wait",  # see waits for collectives
    "torch._C:Future.wait",  # see waits for futures, among them answers of RPC
    "torch.distributed._functional_collectives:wait_tensor",  # see waits for functional collectives
    "torch.distributed:_broadcast_coalesced",  # see waits for buffers
    "torch._C._distributed_c10d:ProcessGroup.send",  # name messages
    "torch._C._distributed_c10d:ProcessGroup.recv",  # name messages
    "torch._C._distributed_c10d:ProcessGroup.recv_anysource",  # name messages
    # --- where the steps of a program end
    "torch.amp:GradScaler.step",  # see updates
    "torch.distributed.fsdp:FSDPModule._get_fsdp_state",  # see which modules synchronise
    "torch:Tensor._version",  # see that parameters change
    # --- whether a program has the right process group
    # let the ranks of a program meet at the store of their launch
    "torch.distributed.distributed_c10d:rendezvous",
    "torch.distributed:rendezvous",
    # --- which implementation a backend's name stands for
    "torch.distributed:ProcessGroup._get_backend",  # record its class
    # see which backends torchcomms has
    "torch.distributed.distributed_c10d:_is_torchcomms_backend",
    # --- what a step sends
    "torch.cuda:CUDAGraph.replay",  # see what hides operations
    "torch.distributed:ProcessGroup.register_pre_hook",  # see all that is sent
    "torch.distributed.distributed_c10d:_world.pg_names",  # find process groups
    "torch._C._distributed_c10d:_dump_fr_trace",  # read the flight recorder
    "torch._C._distributed_c10d:_dump_nccl_trace",  # read NCCL's flight recorder
    "torch.utils._pytree:tree_leaves",  # find an operation's tensors
    # count in compiled code
    "torch.utils._python_dispatch:TorchDispatchMode.ignore_compile_internals",
    # --- the floating-point operations of a step
    "torch.utils.flop_counter:flop_registry",  # find the formula of an operator
    # --- the gradients that a step synchronises, and their buckets
    "torch.distributed:Reducer.get_backward_stats",  # see which modules do
    "torch.nn.parallel:DistributedDataParallel._get_ddp_logging_data",  # read their sizes
    # --- whether DDP has rebuilt its buckets in the warm-up
    "torch.nn.parallel.distributed:logger.info",  # see that it does
    # --- the bytes of parameters
    "torch.distributed.tensor:DTensor._local_tensor",  # find the shard of a rank
    # --- what a step compiles
    "torch._dynamo.utils:curr_frame",  # count compilations
    "torch._dynamo.utils:counters",  # count graph breaks
    # --- what a step sends by RPC
    "torch.distributed.rpc.api:_to_worker_info",  # count requests
    "torch.distributed.rpc.api:_invoke_rpc_python_udf",  # wait for answers
    # count the tensors that leave
    "torch.distributed.rpc.internal:_internal_rpc_pickler.serialize",
    # count the tensors that arrive
    "torch.distributed.rpc.internal:_internal_rpc_pickler.deserialize",
    "torch.distributed.rpc.internal:_run_function",  # see calls of others
    "torch.distributed.rpc:PyRRef.to_here",  # count and time calls
    "torch.distributed.autograd:backward",  # count gradients
    "torch.distributed.autograd:context.__exit__",  # find unseen gradients
    "torch.distributed.autograd:_retrieve_context",  # find hooks of gradients
    "torch.distributed.autograd:_current_context",  # see backwards of others
    "torch._C._distributed_c10d:Work.get_future",  # see waits for collectives
    # --- which functions of a module take long
    "torch.nn:Module._wrapped_call_impl",  # know modules by their callers
    # --- which program is one of RPC
    "torch.distributed.rpc.api:_ALL_WORKER_NAMES",  # say what measures it
    # --- all that torch.jit.script compiles
    "torch.jit._builtins:_get_builtin_table",  # know what is wrapped
    "torch._dynamo.eval_frame:skip_code",  # keep functions of ours from dynamo
    # --- which models torch.jit.load reads
    "torch._C:import_ir_module",  # note their files
    # --- the switches of torch
    "torch.backends.cuda:matmul.fp32_precision",  # record it
    "torch.backends.mkldnn:matmul.fp32_precision",  # record it
    "torch.backends.cudnn:conv.fp32_precision",  # record it
    # --- all: no launch would do without them
    "torch.distributed:ProcessGroupGloo",  # form a group that `destroy_process_group` leaves alone
    "torch.utils._python_dispatch:TorchDispatchMode",  # see operations
)
# which torch has it, if not each that we allow
SINCE = {
    "torch.backends.cuda:matmul.fp32_precision": "2.9",
    "torch.backends.mkldnn:matmul.fp32_precision": "2.9",
    "torch.backends.cudnn:conv.fp32_precision": "2.9",
    "torch._C._distributed_c10d:_dump_fr_trace": "2.8",
    "torch.utils._python_dispatch:TorchDispatchMode.ignore_compile_internals": "2.9",
    "torch.distributed:ProcessGroup.register_pre_hook": "2.14",
    "torch.distributed.distributed_c10d:_is_torchcomms_backend": "2.14",
}
# a torch built without NCCL lacks it
OF_NCCL = ("torch._C._distributed_c10d:_dump_nccl_trace",)

# by name: where torch has it
NAMES = {path: path for path in _NAMES}


def _place(path: str) -> tuple[Any, str]:
    """Return the object that has the last attribute of a name, None if torch lacks it, and the
    name of that attribute."""
    module, _, attributes = NAMES[path].partition(":")
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


def allocator() -> Any:
    """Return the module with the functions of an accelerator's allocator. Before torch 2.9 only
    CUDA has them."""
    if hasattr(torch.accelerator, "memory_stats"):
        return torch.accelerator
    return torch.cuda


def keep_from_compiler(function: Any) -> None:
    """Let torch.compile compile a function only as a part of what calls it: within the function,
    `torch.compiler.is_compiling` says then whether it is compiled."""
    if skip := find("torch._dynamo.eval_frame:skip_code"):
        skip(function.__code__)


def replace(path: str, wrap: Callable[[Any], Any]) -> None:
    """Replace a function of torch, in this process, by what `wrap` makes of it. Raises
    AttributeError if torch lacks it."""
    original = need(path)
    owner, last = _place(path)
    wrapped = wrap(original)
    keep_from_compiler(wrapped)
    # TorchScript knows its built-in functions by their identity
    table = find("torch.jit._builtins:_get_builtin_table")
    if table and (builtin := table().get(id(original))):
        table()[id(wrapped)] = builtin
    setattr(owner, last, wrapped)
