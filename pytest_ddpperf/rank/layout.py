"""The heap of a rank: drawn anew in each launch, so that launches are exchangeable.

Processes that are forked from one share its heap, and where glibc puts the next block, and when it gives memory back to
the system, depends on it: the same step may have 8,000 page faults in all launches of one side, and none in those of
the other. So holes of the template's heap are filled, and each rank makes holes of its own. Compare C. Curtsinger and
E. D. Berger, "STABILIZER: statistically sound performance evaluation", ASPLOS 2013.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import sys
from typing import Any

# Sizes of blocks, in bytes: those below glibc's threshold for blocks with a mapping of their own (128 KiB).
_LARGEST_HOLE = 1 << 16
# Of a rank: enough that the sizes which a step asks for find holes in some launches and none in others, and no more
# than 2 MiB in the mean.
_BLOCKS = 500
_SMALLEST, _LARGEST = 16, 1 << 15
# Python's own allocator has a pool for each multiple of 16 bytes up to 512: so many objects shift each of them.
_OBJECTS = 64
# Pages: mappings are shifted by up to 8 MiB, more than a huge page.
_PAGES = 2048

# What a rank has drawn, as long as it lives.
_kept: list[Any] = []


def fill_holes() -> None:
    """Fill the free blocks of this process's heap but the last one, which is its top. Nothing without glibc 2.33."""
    libc = _glibc()
    if libc is None or not hasattr(libc, "mallinfo2"):
        return
    libc.mallinfo2.restype = _MallInfo
    size = _LARGEST_HOLE
    while size >= _SMALLEST:
        before = libc.mallinfo2()
        # As many as there is room for, unless one is taken from the top. Nothing where another allocator is in use.
        for _ in range((before.fordblks - before.keepcost) // size):
            libc.malloc(size)
            if libc.mallinfo2().keepcost != before.keepcost:
                break
        size //= 2


def draw() -> None:
    """Give this rank a heap of its own: blocks of random sizes, a random share of which are free; and random offsets of
    Python's small objects and of mappings."""
    source = random.Random(os.urandom(16))
    libc = _glibc()
    if libc is not None:
        share = source.random()
        blocks = [libc.malloc(int(_SMALLEST * (_LARGEST / _SMALLEST) ** source.random())) for _ in range(_BLOCKS)]
        for block in blocks:
            if source.random() < share:
                libc.free(block)
    for size in range(1, 480, 16):
        _kept.append([bytes(size) for _ in range(source.randrange(_OBJECTS))])
    _kept.append(mmap.mmap(-1, mmap.PAGESIZE * source.randint(1, _PAGES), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


class _MallInfo(ctypes.Structure):
    """What glibc's `mallinfo2` returns; `keepcost` is the size of the top of the heap."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    ]


def _glibc() -> Any:
    """Return the C library, or None on another system than Linux."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    libc.malloc.argtypes, libc.malloc.restype = (ctypes.c_size_t,), ctypes.c_void_p
    libc.free.argtypes, libc.free.restype = (ctypes.c_void_p,), None
    return libc
