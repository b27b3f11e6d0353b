"""Data parallelism written out, as in the DDP paper and Stanford's CS336: from one all-reduce per
gradient to buckets that overlap with the backward pass, which is what `DistributedDataParallel`
does.

Each wrapper broadcasts rank 0's parameters, averages gradients over ranks in `finish`, and measures
how long it waits for communication.
"""

import time
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Wrapper(nn.Module):
    """A module with the same parameters on every rank. Call `finish` between the backward pass and
    the optimizer."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.trained = [
            parameter
            for parameter in module.parameters()
            if parameter.requires_grad
        ]
        self.seconds_waited = 0.0  # for communication, in all steps so far
        for parameter in module.parameters():
            dist.broadcast(parameter.data, 0)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.module(*inputs)

    def finish(self) -> None:
        """Average the gradients over ranks."""
        # the time that computation takes is not counted
        _synchronize(self.trained[0])
        began = time.perf_counter()
        self._communicate()
        _synchronize(self.trained[0])
        self.seconds_waited += time.perf_counter() - began
        for parameter in self.trained:
            assert parameter.grad is not None
            parameter.grad /= dist.get_world_size()

    def _communicate(self) -> None:
        raise NotImplementedError


class Blocking(Wrapper):
    """One all-reduce per gradient (naive), or one of all gradients (flat), after the backward
    pass."""

    def __init__(self, module: nn.Module, *, flat: bool) -> None:
        super().__init__(module)
        self._flat = flat

    def _communicate(self) -> None:
        gradients = [parameter.grad for parameter in self.trained]
        if self._flat:
            flat = flatten(gradients)
            dist.all_reduce(flat)
            unflatten(flat, gradients)
            return
        for gradient in gradients:
            dist.all_reduce(gradient)


class Bucketed(Wrapper):
    """One all-reduce per bucket of gradients, started as soon as the backward pass has all of them.

    Buckets of at most `bucket_mb` megabytes, with 0 of a gradient each, are filled in the order in
    which gradients are expected: the reverse of the parameters'.
    """

    def __init__(self, module: nn.Module, bucket_mb: float) -> None:
        super().__init__(module)
        self._started: list[tuple[dist.Work, Tensor, list[Tensor]]] = []
        for bucket in buckets(self.trained, bucket_mb * 1e6):
            missing = {id(parameter) for parameter in bucket}
            hook = partial(self._count_down, bucket, missing)
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(hook)

    def _count_down(
        self, bucket: Sequence[Tensor], missing: set[int], parameter: Tensor
    ) -> None:
        """Start the all-reduce of a bucket when its last gradient is ready."""
        missing.discard(id(parameter))
        if missing:
            return
        missing.update(map(id, bucket))
        gradients = [each.grad for each in bucket if each.grad is not None]
        flat = flatten(gradients) if len(gradients) > 1 else gradients[0]
        work = dist.all_reduce(flat, async_op=True)
        assert work is not None
        self._started.append((work, flat, gradients))

    def _communicate(self) -> None:
        for work, flat, gradients in self._started:
            work.wait()
            if len(gradients) > 1:
                unflatten(flat, gradients)
        self._started.clear()


def buckets(parameters: Sequence[Tensor], most: float) -> list[list[Tensor]]:
    """Return buckets of at most so many bytes, or of a single larger parameter; the last parameters
    first."""
    buckets: list[list[Tensor]] = [[]]
    size = 0
    for parameter in reversed(parameters):
        if buckets[-1] and size + parameter.nbytes > most:
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += parameter.nbytes
    return buckets


def ddps_buckets(parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return the buckets that DDP fills by default, by its own rule: a bucket is closed once it has
    25 MiB, the first once it has one; the last parameters first."""
    backwards = list(reversed(parameters))
    closed_at = [dist._DEFAULT_FIRST_BUCKET_BYTES, 25 << 20]  # type: ignore[attr-defined]
    filled, _ = dist._compute_bucket_assignment_by_size(backwards, closed_at)  # type: ignore[attr-defined]
    return [[backwards[place] for place in bucket] for bucket in filled]


def flatten(tensors: Sequence[Tensor | None]) -> Tensor:
    return torch.cat(
        [tensor.flatten() for tensor in tensors if tensor is not None]
    )


def unflatten(flat: Tensor, tensors: Sequence[Tensor | None]) -> None:
    """Copy the parts of `flat` back."""
    start = 0
    for tensor in tensors:
        assert tensor is not None
        tensor.copy_(flat[start : start + tensor.numel()].view_as(tensor))
        start += tensor.numel()


def _synchronize(tensor: Tensor) -> None:
    if tensor.device.type != "cpu":
        # other streams may still reduce
        torch.accelerator.current_stream(tensor.device).synchronize()
