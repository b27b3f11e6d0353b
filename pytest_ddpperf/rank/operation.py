"""A collective as the step that is timed, and the check that it does what it should."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial

import torch
import torch.distributed as dist

from pytest_ddpperf.rank.context import Context
from pytest_ddpperf.records.collective import Collective
from pytest_ddpperf.records.errors import SetupError, WrongResultError

# Elements that are made and compared at a time: a gigabyte needs no second one.
_CHUNK = 1 << 20
# Values that are moved are 0 to that, less one; sums are no larger than that, for int8 has no more.
_VALUES = 101
_LARGEST_SUM = 127
# Values begin anew after so many places, so that sums over however many ranks are made once; a prime, for blocks whose
# size it divides would be alike.
_PERIOD = 4099
_MASK = (1 << 32) - 1


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
            # Byte by byte: there are dtypes that cannot be compared.
            differ = found.view(torch.uint8) != expected.view(torch.uint8)
            off = differ.reshape(len(found), -1).any(dim=1)
            if not first and off.any():
                place = int(off.nonzero()[0])
                first = f"element {start + place:,} is {found[place].item()} instead of {expected[place].item()}"
            wrong += int(off.sum())
        if wrong:
            raise WrongResultError(f"{asked}: {wrong:,} of {len(self.received):,} elements are wrong: {first}")

    @property
    def _largest(self) -> int:
        """Up to there the dtype has every whole number."""
        if self._dtype == torch.bool:
            return 1
        floating = self._dtype.is_floating_point or self._dtype.is_complex
        return min(_LARGEST_SUM, int(2 / torch.finfo(self._dtype).eps)) if floating else _LARGEST_SUM

    def _values(self, rank: torch.Tensor | int, places: torch.Tensor) -> torch.Tensor:
        """What `rank` sends at these places."""
        return self._sent.flatten()[rank * _PERIOD + places % _PERIOD].to(self._dtype)

    @cached_property
    def _sent(self) -> torch.Tensor:
        """Rank x place, a byte each: none is larger."""
        values = self._summed if self._asked.redop == "sum" else self._moved
        places = torch.arange(_PERIOD)
        return torch.stack([values(rank, places).to(torch.uint8) for rank in range(self._asked.ranks)])

    @cached_property
    def _sums(self) -> torch.Tensor:
        """Of all ranks, by place."""
        return self._sent.sum(0).to(self._dtype)

    def _moved(self, rank: int, places: torch.Tensor) -> torch.Tensor:
        """As if by chance from place to place; at one place ranks have others in turn, so that no two blocks are alike,
        however small."""
        values = 2 if self._dtype == torch.bool else _VALUES
        return (_chance(rank // values, places) + rank) % values

    def _summed(self, rank: int, places: torch.Tensor) -> torch.Tensor:
        """As if by chance, and so small that the sum over all ranks is exact in the dtype, in whatever order: at each
        place only as many ranks send more than 0 as the dtype can count."""
        apart = -(-self._asked.ranks // self._largest)
        senders = -(-self._asked.ranks // apart)
        return _chance(rank, places) % (self._largest // senders + 1) * ((rank + places) % apart == 0)

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
        return self._sums[places % _PERIOD]


def _chance(rank: int, places: torch.Tensor) -> torch.Tensor:
    """32 bits that look random, alike wherever they are made: Thomas Mueller's integer hash."""
    bits = places + rank * _PERIOD
    for _ in range(2):
        bits = ((bits >> 16) ^ bits) * 0x45D9F3B & _MASK  # below 2**59: nothing overflows
    return (bits >> 16) ^ bits


def _chunks(buffer: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """With the place of the first element of each."""
    for start in range(0, len(buffer), _CHUNK):
        yield start, buffer[start : start + _CHUNK]
