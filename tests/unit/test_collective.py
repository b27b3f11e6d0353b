"""The arithmetic of collectives, held against nccl-tests' by hand."""

from __future__ import annotations

import pytest

from pytest_ddpperf.records.plan import (
    Collective,
    collective,
    in_bytes,
    in_words,
)


@pytest.mark.parametrize(
    ("op", "count", "redop", "root", "busbw"),
    [
        # 64 MiB of float32 over 4 ranks in 10 ms: 6.7108864 GB/s, times the factor of
        # doc/PERFORMANCE.md.
        ("all_reduce", 16777216, "sum", -1, 10.0663296),
        ("all_gather", 4194304, "none", -1, 5.0331648),
        ("reduce_scatter", 4194304, "sum", -1, 5.0331648),
        ("all_to_all", 4194304, "none", -1, 5.0331648),
        ("broadcast", 16777216, "none", 0, 6.7108864),
        ("reduce", 16777216, "sum", 0, 6.7108864),
        ("send_recv", 16777216, "none", -1, 6.7108864),
    ],
)
def test_figures_are_nccl_tests(
    op: str, count: int, redop: str, root: int, busbw: float
) -> None:
    asked = collective(op, 64 << 20, "float32", 4)
    assert (asked.count, asked.redop, asked.root, asked.size) == (
        count,
        redop,
        root,
        64 << 20,
    )
    assert asked.algbw(0.01) == pytest.approx(6.7108864)
    assert asked.busbw(0.01) == pytest.approx(busbw)


def test_a_single_rank_sends_nothing_over_a_link() -> None:
    assert collective("all_reduce", 1024, "float32", 1).busbw(1.0) == 0.0


@pytest.mark.parametrize(
    "dtype", ["float", "float4_e2m1fn_x2x", "int4", "Float32", "float32 ", ""]
)
def test_what_is_no_dtype_is_refused(dtype: str) -> None:
    with pytest.raises(ValueError, match="one of torch's dtypes by name"):
        collective("all_reduce", 1024, dtype, 2)


@pytest.mark.parametrize(
    ("op", "size", "ranks", "words"),
    [
        ("allreduce", 8, 2, "'allreduce': one of all_reduce, all_gather, "),
        (
            "all_reduce",
            -8,
            2,
            "all_reduce of -8B: less than one element of float32",
        ),
        (
            "all_reduce",
            3,
            2,
            "all_reduce of 3B: less than one element of float32",
        ),
        (
            "all_gather",
            8,
            4,
            "all_gather of 8B: less than one element of float32 for each of 4 ranks",
        ),
        ("send_recv", 8, 1, "send_recv needs at least two ranks"),
    ],
)
def test_what_cannot_be_is_refused(
    op: str, size: int, ranks: int, words: str
) -> None:
    with pytest.raises(ValueError) as caught:
        collective(op, size, "float32", ranks)
    assert str(caught.value).startswith(words)


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (1, "1B"),
        (1000, "1000B"),
        (1024, "1KiB"),
        (1536, "1536B"),
        (4 << 20, "4MiB"),
        (1 << 30, "1GiB"),
        (0, "0B"),
    ],
)
def test_a_size_in_words(size: int, words: str) -> None:
    assert in_words(size) == words


@pytest.mark.parametrize(
    ("written", "size"),
    [
        (1000, 1000),
        ("1000", 1000),
        ("8K", 8 << 10),
        ("8k", 8 << 10),
        ("1M", 1 << 20),
        ("1MiB", 1 << 20),
        ("64kib", 64 << 10),
        ("1000B", 1000),
        ("2G", 2 << 30),
    ],
)
def test_a_size_is_read_as_nccl_tests_and_our_names_write_it(
    written: object, size: int
) -> None:
    assert in_bytes(written) == size


@pytest.mark.parametrize(
    "written",
    [
        "big",
        "1.5M",
        "-8",
        "8T",
        "",
        "9" * 20,
        -8,
        1e6,
        True,
        None,
        [8],
        lambda: 8,
    ],
)
def test_what_is_no_size_is_refused(written: object) -> None:
    with pytest.raises(
        ValueError,
        match='a size is a number of bytes, or a text like "8K" or "1MiB"',
    ):
        in_bytes(written)


def test_it_is_told_in_words() -> None:
    assert (
        str(Collective(op="reduce", dtype="int8", ranks=2, count=2048))
        == "reduce of 2KiB int8"
    )
