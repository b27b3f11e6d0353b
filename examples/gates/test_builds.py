"""Two builds of a communication library, in turns within one allocation.

    pytest examples/gates/test_builds.py --ddp-world-size 8 --ddp-backend nccl \
        --ddp-against-env LD_PRELOAD=/opt/nccl-old/lib/libnccl.so.2

The current side loads the library that is installed, the other side the one of that variable. Each
size has its own verdict; together they have the error rate of one test.
"""

import pytest

SIZES = ["64KiB", "1MiB", "16MiB"]


@pytest.mark.ddp(threshold="busbw:5%")
@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter"])
def test_build(collective_benchmark, op):
    collective_benchmark(op, sizes=SIZES)
