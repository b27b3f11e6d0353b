"""A collective as the step that is timed, and the check that it does what it should."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
import torch.distributed as dist

from pytest_ddpperf.rank.context import Context
from pytest_ddpperf.records.errors import DdpPerfError
from pytest_ddpperf.records.plan import Collective


def setup(ctx: Context, asked: Collective) -> Iterator[Callable[[], object]]:
    """Yield the step, and check its result before and after the window; raises DdpPerfError.

    The timed buffers hold zeros, whose sums stay zero however often they are added.
    """
    dtype = getattr(torch, asked.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise DdpPerfError(
            f"this torch ({torch.__version__}) has no dtype {asked.dtype}"
        )
    buffers = _Buffers(ctx, asked, dtype)
    buffers.check()
    buffers.sent.zero_()
    yield buffers.step
    buffers.check()


def _pass_on(received: torch.Tensor, sent: torch.Tensor) -> None:
    """Send to the next rank and receive from the one before."""
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    operations = [
        dist.P2POp(dist.isend, sent, (rank + 1) % ranks),
        dist.P2POp(dist.irecv, received, (rank - 1) % ranks),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def _find(name: str, old_name: str) -> Callable[..., object]:
    """Return a function of torch.distributed, some of which were renamed in 2.13."""
    function: Callable[..., object] = getattr(dist, name, None) or getattr(
        dist, old_name
    )
    return function


# Operations from one buffer into another, then those in place.
_MOVES: Mapping[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "all_gather": _find("all_gather_single", "all_gather_into_tensor"),
    "reduce_scatter": _find("reduce_scatter_single", "reduce_scatter_tensor"),
    "all_to_all": dist.all_to_all_single,
    "send_recv": _pass_on,
}
_IN_PLACE: Mapping[str, Callable[..., object]] = {
    "all_reduce": dist.all_reduce,
    "broadcast": partial(dist.broadcast, src=0),
    "reduce": partial(dist.reduce, dst=0),
}


class _Buffers:
    """The buffers that this rank sends and receives: the same one if the operation works in
    place."""

    def __init__(
        self, ctx: Context, asked: Collective, dtype: torch.dtype
    ) -> None:
        self._asked = asked
        self._rank = ctx.rank
        self._dtype = dtype
        zeros = partial(torch.zeros, dtype=dtype, device=ctx.device)
        self.sent = zeros(
            asked.count if asked.op == "all_gather" else asked.elements
        )
        if asked.op in _IN_PLACE:
            self.received = self.sent
            self.step = partial(_IN_PLACE[asked.op], self.sent)
        else:
            self.received = zeros(
                asked.count if asked.op == "reduce_scatter" else asked.elements
            )
            self.step = partial(_MOVES[asked.op], self.received, self.sent)

    def check(self) -> None:
        """Run the operation on known values; raises DdpPerfError on the rank that received
        others."""
        asked = self._asked
        self.sent.fill_(self._value(self._rank))
        self.step()
        if asked.op == "reduce" and self._rank != asked.root:
            return  # undefined there
        expected = self._expected()
        wrong = 0
        first = ""
        start = 0
        for block, value in zip(
            self.received.chunk(len(expected)), expected, strict=True
        ):
            right = torch.full(
                (1,), value, dtype=self._dtype, device=block.device
            )
            # Byte by byte: some dtypes cannot be compared.
            differs = (
                block.view(torch.uint8).view(len(block), -1)
                != right.view(torch.uint8)
            ).any(dim=1)
            if not first and differs.any():
                place = int(differs.nonzero()[0])
                first = (
                    f"element {start + place:,} is {block[place].item()} instead of "
                    f"{right.item()}"
                )
            wrong += int(differs.sum())
            start += len(block)
        if wrong:
            raise DdpPerfError(
                f"{asked}: {wrong:,} of {len(self.received):,} elements are wrong: {first}"
            )

    @property
    def _largest(self) -> int:
        """The largest number up to which the dtype has every whole number."""
        if self._dtype == torch.bool:
            return 1
        if self._dtype.is_floating_point or self._dtype.is_complex:
            return int(2 / torch.finfo(self._dtype).eps)
        return torch.iinfo(self._dtype).max

    def _value(self, rank: int) -> int:
        """Return what `rank` sends: rank + 1, begun anew where the dtype is not exact, and 1 from
        where the total of sums would not be."""
        if self._asked.redop == "none":
            return (rank + 1) % (self._largest + 1)
        later = self._asked.ranks - rank - 1  # each sends 1 at least
        if (rank + 1) * (rank + 2) // 2 + later <= self._largest:
            return rank + 1
        return int(rank < self._largest)

    def _expected(self) -> list[int]:
        """Return the value of each block that this rank should receive."""
        ranks = range(self._asked.ranks)
        op = self._asked.op
        if self._asked.redop == "sum":
            return [sum(map(self._value, ranks))]
        if op == "broadcast":
            return [self._value(0)]
        if op == "send_recv":
            return [self._value((self._rank - 1) % len(ranks))]
        return [self._value(rank) for rank in ranks]  # a block of each rank
