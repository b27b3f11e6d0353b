"""A collective as the step that is timed, and the check that it does what it should."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
import torch.distributed as dist

from pytest_ddpperf.rank.context import Context
from pytest_ddpperf.records.collective import Collective
from pytest_ddpperf.records.errors import SetupError, WrongResultError

# Elements that are made and compared at a time: a gigabyte needs no second one.
_CHUNK = 1 << 20
# Values that are sent are 0 to that, less one; of summed ones so few that sums are exact, in int8 too.
_VALUES = 101
_LARGEST_SUM = 127
# Of sums over more ranks than a narrow dtype can count: they are wrong by at least that, or not found to be.
_ROUGH = 0.5


def setup(ctx: Context, asked: Collective) -> Iterator[Callable[[], object]]:
    """Yields the step, as any set-up does. What comes of it is checked before and after the window.

    Timed are zeros, whose sums stay zeros; checked are other values. Raises WrongResultError.
    """
    dtype = getattr(torch, asked.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise SetupError(f"this torch ({torch.__version__}) has no dtype {asked.dtype}")
    buffers = _Buffers(ctx, asked, dtype)
    buffers.check()
    buffers.sent.zero_()
    yield buffers.step
    buffers.check()


def _pass_on(received: torch.Tensor, sent: torch.Tensor) -> None:
    """To the next rank, from the one before."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sides = [
        dist.P2POp(dist.isend, sent, (rank + 1) % ranks),
        dist.P2POp(dist.irecv, received, (rank - 1) % ranks),
    ]
    for work in dist.batch_isend_irecv(sides):
        work.wait()


def _called(name: str, before: str) -> Callable[..., object]:
    """A function of torch's by the name that this torch has for it: some were renamed in 2.13."""
    function: Callable[..., object] = getattr(dist, name, None) or getattr(dist, before)
    return function


# From one buffer into another, and in place.
_MOVES: Mapping[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "all_gather": _called("all_gather_single", "all_gather_into_tensor"),
    "reduce_scatter": _called("reduce_scatter_single", "reduce_scatter_tensor"),
    "all_to_all": dist.all_to_all_single,
    "send_recv": _pass_on,
}
_IN_PLACE: Mapping[str, Callable[..., object]] = {
    "all_reduce": dist.all_reduce,
    "broadcast": partial(dist.broadcast, src=0),
    "reduce": partial(dist.reduce, dst=0),
}


class _Buffers:
    """What this rank sends and receives; one buffer where the operation works in place."""

    def __init__(self, ctx: Context, asked: Collective, dtype: torch.dtype) -> None:
        self._asked, self._rank, self._dtype = asked, ctx.rank, dtype
        block, whole = asked.count, asked.elements
        buffer = partial(torch.zeros, dtype=dtype, device=ctx.device)
        self.sent = buffer(block if asked.op == "all_gather" else whole)
        self.received = self.sent
        self.step = partial(_IN_PLACE[asked.op], self.sent) if asked.op in _IN_PLACE else self._moving(buffer)

    def _moving(self, buffer: Callable[[int], torch.Tensor]) -> Callable[[], object]:
        self.received = buffer(self._asked.count if self._asked.op == "reduce_scatter" else self._asked.elements)
        return partial(_MOVES[self._asked.op], self.received, self.sent)

    def check(self) -> None:
        """Run it on known values; raises WrongResultError on the rank that received others than it should."""
        asked = self._asked
        for start, chunk in _chunks(self.sent):
            chunk.copy_(self._values(self._rank, torch.arange(start, start + len(chunk))))
        self.step()
        if asked.op == "reduce" and self._rank != asked.root:
            return  # what is left there is nobody's
        wrong, first = 0, ""
        for start, chunk in _chunks(self.received):
            found, expected = chunk.to("cpu"), self._expected(torch.arange(start, start + len(chunk)))
            off = self._off(found, expected)
            if not first and off.any():
                place = int(off.nonzero()[0])
                first = f"element {start + place:,} is {found[place].item()} instead of {expected[place].item()}"
            wrong += int(off.sum())
        if wrong:
            raise WrongResultError(f"{asked}: {wrong:,} of {len(self.received):,} elements are wrong: {first}")

    def _off(self, found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
        """Which elements differ."""
        if self._summed and self._asked.ranks > self._exact:
            wide = torch.complex128 if self._dtype.is_complex else torch.float64
            return ~torch.isclose(found.to(wide), expected.to(wide), rtol=_ROUGH, atol=0.0)
        # Byte by byte: there are dtypes that cannot be compared.
        differ = found.view(torch.uint8) != expected.view(torch.uint8)
        return differ.reshape(len(found), -1).any(dim=1)

    @property
    def _summed(self) -> bool:
        return self._asked.redop == "sum"

    @property
    def _exact(self) -> float:
        """Up to there the dtype has every whole number, or wraps around."""
        floating = self._dtype.is_floating_point or self._dtype.is_complex
        return 2 / torch.finfo(self._dtype).eps if floating else math.inf

    def _values(self, rank: torch.Tensor | int, places: torch.Tensor) -> torch.Tensor:
        """What `rank` sends at these places, in an order that differs from rank to rank."""
        largest = min(_LARGEST_SUM, self._exact)
        values = max(2, int(largest // self._asked.ranks)) if self._summed else _VALUES
        return ((places * 31 + rank * 17) % values).to(self._dtype)

    def _expected(self, places: torch.Tensor) -> torch.Tensor:
        """What this rank shall have received at these places."""
        asked, rank, block = self._asked, self._rank, self._asked.count
        if asked.op == "broadcast":
            return self._values(asked.root, places)
        if asked.op == "send_recv":
            return self._values((rank - 1) % asked.ranks, places)
        if asked.op == "all_gather":
            return self._values(places // block, places % block)
        if asked.op == "all_to_all":  # from each rank the block that it had for this one
            return self._values(places // block, places % block + rank * block)
        if asked.op == "reduce_scatter":
            places = places + rank * block
        total = torch.zeros(len(places), dtype=torch.int64)
        for sender in range(asked.ranks):
            total += self._values(sender, places).real.to(torch.int64)
        return total.to(self._dtype)


def _chunks(buffer: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """With the place of the first element of each."""
    for start in range(0, len(buffer), _CHUNK):
        yield start, buffer[start : start + _CHUNK]
