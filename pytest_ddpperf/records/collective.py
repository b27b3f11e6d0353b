"""A collective that is measured by itself: which, over how much, and what that comes to in nccl-tests' terms.

Definitions are those of nccl-tests, doc/PERFORMANCE.md: `algbw` is the size over the time, `busbw` that times a factor
by which it is, for every number of ranks, what the slowest link carries if nothing is lost.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

_GB = 1e9
# By operation, what of `algbw` crosses a link among n ranks.
_BUS_FACTORS: Mapping[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "reduce": lambda n: 1.0,
    "send_recv": lambda n: 1.0,
}
OPS = tuple(_BUS_FACTORS)
# Whose size is that of the blocks of all ranks together.
_IN_BLOCKS = ("all_gather", "reduce_scatter", "all_to_all")
_REDUCING = ("all_reduce", "reduce_scatter", "reduce")
_ROOTED = ("broadcast", "reduce")
_DTYPE = r"bool|(?:float|bfloat|int|uint|complex)(\d+)(?:_[a-z0-9]+)?"


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One operation over buffers of one size."""

    op: str  #: of OPS; send_recv: every rank sends to the next and receives from the one before
    dtype: str  #: torch's name without "torch."
    ranks: int
    count: int  #: elements: of the buffer, or of the block of each rank where the operation has such

    @property
    def elements(self) -> int:
        """Of the largest buffer of a rank."""
        return self.count * (self.ranks if self.op in _IN_BLOCKS else 1)

    @property
    def size(self) -> int:
        """Of the largest buffer of a rank, in bytes."""
        return self.elements * itemsize(self.dtype)

    @property
    def redop(self) -> str:
        return "sum" if self.op in _REDUCING else "none"

    @property
    def root(self) -> int:
        """-1 where there is none."""
        return 0 if self.op in _ROOTED else -1

    def algbw(self, seconds: float) -> float:
        """In GB/s (1e9 bytes), where one operation takes `seconds`."""
        return self.size / seconds / _GB

    def busbw(self, seconds: float) -> float:
        """In GB/s (1e9 bytes), where one operation takes `seconds`."""
        return self.algbw(seconds) * _BUS_FACTORS[self.op](self.ranks)

    def __str__(self) -> str:
        return f"{self.op} of {in_words(self.size)} {self.dtype}"


def collective(op: str, size: int, dtype: str, ranks: int) -> Collective:
    """Of `size` bytes, or the next size below that divides into elements, and into blocks where the operation has such;
    raises ValueError."""
    if op not in OPS:
        raise ValueError(f"{op!r}: one of {', '.join(OPS)}")
    if op == "send_recv" and ranks < 2:
        raise ValueError("send_recv: from one rank to another, and there is one")
    count = size // itemsize(dtype) // (ranks if op in _IN_BLOCKS else 1)
    if not count:
        each = f" for each of {ranks} ranks" if op in _IN_BLOCKS else ""
        raise ValueError(f"{op} of {in_words(size)}: less than one element of {dtype}{each}")
    return Collective(op=op, dtype=dtype, ranks=ranks, count=count)


def itemsize(dtype: str) -> int:
    """Bytes of an element; raises ValueError for what is no dtype whose name says it."""
    match = re.fullmatch(_DTYPE, dtype)
    if match is None or (match[1] and int(match[1]) % 8):
        raise ValueError(f"{dtype!r}: one of torch's dtypes by name: float32, bfloat16, int8, ...")
    return int(match[1] or 8) // 8


def in_words(size: int) -> str:
    """A number of bytes as nccl-tests is asked for it: "4MiB", "1000B"."""
    for unit in ("B", "KiB", "MiB"):
        if size % 1024 or not size:
            return f"{size}{unit}"
        size //= 1024
    return f"{size}GiB"
