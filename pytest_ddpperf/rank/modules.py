"""The modules of this process: which synchronise gradients, and the bytes of their parameters."""

import gc
from collections.abc import Iterable, Mapping
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from pytest_ddpperf.rank import torch_names

Figures = dict[str, int | None]  # as Counters, of one rank


# Modules and optimizers that the program has frozen: the collector does not list them any more.
frozen: list[ref[Any]] = []


def find_objects(kind: type | tuple[type, ...]) -> list[Any]:
    """Return the objects of this process that are of a type, or one of several; no code of theirs
    runs."""
    # Do not copy this list: it holds tuples that are half made, and `tuple(step() for ...)` fails
    # after a copy.
    every = gc.get_objects()
    every += [each() for each in frozen]
    found = (each for each in every if issubclass(type(each), kind))
    # those that were unfrozen again are in both lists
    return [*{id(each): each for each in found}.values()]


def watch_freezing() -> None:
    """From now on find also what `gc.freeze` freezes."""
    freeze = gc.freeze

    def noting() -> None:
        kinds = nn.Module, torch.optim.Optimizer
        # with the classes, so that it is never empty
        frozen[:] = map(ref, (*kinds, *find_objects(kinds)))
        freeze()

    gc.freeze = noting


def replicas() -> list[DistributedDataParallel]:
    """Return the DDP modules of this process, without those that were never finished."""
    found = find_objects(DistributedDataParallel)
    return [module for module in found if "reducer" in vars(module)]


def ready_times(found: list[DistributedDataParallel]) -> dict[int, list[int]]:
    """Return, by the id of each of these modules, when each of its gradients was ready in the last
    backward pass that synchronised them."""
    ready = torch_names.need("torch.distributed:Reducer.get_backward_stats")
    return {id(module): ready(module.reducer) for module in found}


def reducing(before: Mapping[int, list[int]]) -> list[Mapping[str, Any]] | None:
    """Return what DDP logs of its modules whose gradients were synchronised since `ready_times`
    was `before`: the copy of a module (an average, a teacher) has a reducer, too. None without a
    DDP module, and under compiled DDP's Python reducer, which notes no times."""
    found = replicas()
    if not found or any(
        vars(module).get("_use_python_reducer") for module in found
    ):
        return None
    log = torch_names.need(
        "torch.nn.parallel:DistributedDataParallel._get_ddp_logging_data"
    )
    after = ready_times(found)
    return [
        log(module)
        for module in found
        if any(ready := after[id(module)]) and ready != before.get(id(module))
    ]


def gradient_sizes(logged: list[Mapping[str, Any]] | None) -> Figures:
    """Return the bytes of the gradients that DDP synchronised, and its buckets, by what `reducing`
    returned. DDP logs the buckets that it rebuilt one forward later."""
    if logged is None:
        return {}
    gradients = 0
    buckets: list[int] = []
    for module in logged:
        gradients += module["total_parameter_size_bytes"]
        sizes = module.get("rebuilt_bucket_sizes") or module["bucket_sizes"]
        buckets.extend(map(int, sizes.split(",")))
    return {
        "gradient_bytes": gradients,
        "buckets": len(buckets),
        "buckets.largest_bytes": max(buckets, default=None),
    }


def parameter_bytes() -> int:
    """Return the bytes of all parameters in this process, of sharded ones the shard. Modules are
    not asked: a RemoteModule refuses it, for its parameters are elsewhere."""
    own: dict[int, Any] = {}
    for module in find_objects(nn.Module):
        own |= {id(p): p for p in vars(module).get("_parameters", {}).values()}
    known = (
        p
        for p in own.values()
        if p is not None and not is_lazy(p) and not p.is_meta
    )
    return bytes_of(getattr(p, "_local_tensor", p) for p in known)


def holds_parameters(module: nn.Module) -> bool:
    """Whether a module, or one within it, has parameters in this process. None is asked."""
    own = vars(module)
    for parameter in own.get("_parameters", {}).values():
        if parameter is not None:
            return True
    below = own.get("_modules", {}).values()
    return any(each is not None and holds_parameters(each) for each in below)


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
