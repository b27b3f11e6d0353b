"""The heap of a rank, and of an interpreter that it starts: drawn anew in each launch, so that
launches are exchangeable.

Processes that are forked from one share its heap, and where glibc puts the next block, and when it
gives memory back to the system, depends on it: the same step may have 8,000 page faults in all
launches of one side, and none in those of the other. So each process makes holes of its own.
Compare T. Mytkowicz et al., "Producing wrong data without doing anything obviously wrong", ASPLOS
2009, and C. Curtsinger and E. D. Berger, "STABILIZER: statistically sound performance evaluation",
ASPLOS 2013.
"""

import ctypes
import mmap
import os
import random
import sys
from collections.abc import Sequence
from contextlib import suppress

# Blocks: enough that the sizes which a step asks for find holes in some launches and none in
# others, and no more than 2 MiB in the mean. Sizes in bytes, below glibc's threshold for blocks
# with a mapping of their own (128 KiB).
_BLOCKS = 500
_SMALLEST = 16
_LARGEST = 1 << 15
# Python's own allocator has a pool for each multiple of 16 bytes up to 512: so many objects shift
# most of them.
_OBJECTS = 64
# Bytes: the arenas of Python's allocator, of 1 MiB since 3.10, are full up to anywhere. A step that
# makes and drops more small objects than fit maps one or two in each step, or none.
_ARENA = 1 << 20
_LARGEST_OBJECT = 512
# Bytes: mappings are shifted by up to 4 GiB of addresses, which takes no memory. Much more than a
# huge page: glibc aligns the heap of each thread to 64 MiB, and what lies below it depends on how
# many of these the shift is.
_SHIFT = 1 << 32
# Python finds attributes of types in a cache of so many cells. Which one depends on where the name
# lies, and on a number that types get in the order of their first use. One more class in the code,
# and other lookups share a cell in each step: each of them then searches the type and its bases.
_CELLS = 1 << 12
# They share the numbers: Python 3.13 gives no type more than 1,000. From 3.12 on, types like these
# have numbers of their own.
_BUILTIN = (
    zip,
    map,
    filter,
    enumerate,
    reversed,
    slice,
    super,
    staticmethod,
    property,
)

# What this process has drawn, as long as it lives.
_kept: list[object] = []


def draw() -> None:
    """Give this process a heap of its own: blocks of random sizes, a random number of which are
    free; and random offsets of Python's small objects, of mappings, and of versions of types."""
    source = random.Random(os.urandom(16))
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.malloc.argtypes = (ctypes.c_size_t,)
        libc.malloc.restype = ctypes.c_void_p
        libc.free.argtypes = (ctypes.c_void_p,)
        blocks = [
            libc.malloc(
                int(_SMALLEST * (_LARGEST / _SMALLEST) ** source.random())
            )
            for _ in range(_BLOCKS)
        ]
        for block in source.sample(blocks, source.randrange(_BLOCKS)):
            libc.free(block)
    for size in range(1, 480, 16):  # each with 33 bytes more
        _kept.append([bytes(size) for _ in range(source.randrange(_OBJECTS))])
    filling = source.randrange(_ARENA // _LARGEST_OBJECT)
    size = _LARGEST_OBJECT - sys.getsizeof(b"")
    _kept.append([bytes(size) for _ in range(filling)])
    # where addresses are limited (ulimit -v), mappings stay where they are
    with suppress(OSError):
        _kept.append(
            mmap.mmap(
                -1,
                source.randint(1, _SHIFT),
                mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
                mmap.PROT_READ,
            )
        )
    classes = [type("changed", (), {}) for _ in _BUILTIN]
    for kinds in (_BUILTIN, classes):
        _skip_versions(kinds, source.randrange(_CELLS))


def _skip_versions(kinds: Sequence[type], count: int) -> None:
    """Let Python give later versions to the types that it uses for the first time from here on."""
    modified = ctypes.pythonapi.PyType_Modified
    modified.argtypes = (ctypes.py_object,)
    for number in range(count):
        kind = kinds[number % len(kinds)]
        modified(kind)  # it has no version any more
        hasattr(kind, "number")  # and gets the next one
