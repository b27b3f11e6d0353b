"""Data parallelism written out, from one all-reduce a gradient to buckets that overlap with the backward pass: what
`DistributedDataParallel` does, in the steps of the paper and of Stanford's CS336.

Each wrapper broadcasts rank 0's parameters, averages gradients over ranks in `finish`, and times what it waits for
communication itself: in calls that block, and in waits for those that do not.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Wrapper(nn.Module):
    """A module with the same parameters on every rank. Call `finish` between backward pass and optimizer."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.seconds_waited = 0.0  # for communication, in all steps so far
        for parameter in module.parameters():
            dist.broadcast(parameter.data, 0)

    def forward(self, *inputs: Tensor) -> Tensor:
        output: Tensor = self.module(*inputs)
        return output

    def finish(self) -> None:
        """Return with averaged gradients."""
        with self._waiting():
            self._communicate()
        for parameter in self.trained:
            assert parameter.grad is not None
            parameter.grad /= dist.get_world_size()

    def _communicate(self) -> None:
        raise NotImplementedError

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        _synchronize(self.trained[0])  # computation is not waited for here
        began = time.perf_counter()
        yield
        _synchronize(self.trained[0])
        self.seconds_waited += time.perf_counter() - began


class Naive(Wrapper):
    """One all-reduce a gradient, after the backward pass."""

    def _communicate(self) -> None:
        for parameter in self.trained:
            dist.all_reduce(parameter.grad)


class Flat(Wrapper):
    """One all-reduce of all gradients, after the backward pass."""

    def _communicate(self) -> None:
        gradients = [parameter.grad for parameter in self.trained]
        flat = flatten(gradients)
        dist.all_reduce(flat)
        unflatten(flat, gradients)


class Overlapped(Wrapper):
    """One all-reduce a gradient, begun as soon as the backward pass has it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._begun: list[dist.Work] = []
        for parameter in self.trained:
            parameter.register_post_accumulate_grad_hook(self._begin)  # type: ignore[no-untyped-call]

    def _begin(self, parameter: Tensor) -> None:
        work = dist.all_reduce(parameter.grad, async_op=True)
        assert work is not None
        self._begun.append(work)

    def _communicate(self) -> None:
        for work in self._begun:
            work.wait()
        self._begun.clear()


class Bucketed(Wrapper):
    """One all-reduce a bucket of gradients, begun as soon as the backward pass has all of them; buckets of at most
    `bucket_mb` megabytes are filled in the order in which gradients are expected, the reverse of the parameters'."""

    def __init__(self, module: nn.Module, bucket_mb: float) -> None:
        super().__init__(module)
        self._begun: list[tuple[dist.Work, Tensor, list[Tensor]]] = []
        for bucket in buckets(self.trained, bucket_mb * 1e6):
            waits = _Bucket(bucket, self._begun)
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(waits.ready)  # type: ignore[no-untyped-call]

    def _communicate(self) -> None:
        for work, flat, gradients in self._begun:
            work.wait()
            unflatten(flat, gradients)
        self._begun.clear()


class _Bucket:
    def __init__(self, parameters: Sequence[Tensor], begun: list[tuple[dist.Work, Tensor, list[Tensor]]]) -> None:
        self._parameters, self._begun, self._missing = parameters, begun, len(parameters)

    def ready(self, parameter: Tensor) -> None:
        """One more gradient is; of the last one the bucket goes."""
        self._missing -= 1
        if self._missing:
            return
        self._missing = len(self._parameters)
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        flat = flatten(gradients)
        work = dist.all_reduce(flat, async_op=True)
        assert work is not None
        self._begun.append((work, flat, gradients))


def buckets(parameters: Sequence[Tensor], most: float) -> list[list[Tensor]]:
    """Of at most so many bytes, or of a single larger parameter; the last parameters first."""
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
    """As DDP fills them by default, and by its own rule: closed once they have 25 MiB, the first once it has one; the
    last parameters first."""
    backwards = list(reversed(parameters))
    closed_at = [dist._DEFAULT_FIRST_BUCKET_BYTES, 25 << 20]  # type: ignore[attr-defined]
    filled, _ = dist._compute_bucket_assignment_by_size(backwards, closed_at)  # type: ignore[attr-defined]
    return [[backwards[place] for place in bucket] for bucket in filled]


def flatten(tensors: Sequence[Tensor | None]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors if tensor is not None])


def unflatten(flat: Tensor, tensors: Sequence[Tensor | None]) -> None:
    """Copy the parts of `flat` back."""
    start = 0
    for tensor in tensors:
        assert tensor is not None
        tensor.copy_(flat[start : start + tensor.numel()].view_as(tensor))
        start += tensor.numel()


def _synchronize(tensor: Tensor) -> None:
    if tensor.device.type != "cpu":
        torch.accelerator.current_stream(tensor.device).synchronize()  # what others still reduce is not waited for
