"""`collective_benchmark`: a result a size, nccl-tests' table, limits on time and on bandwidth."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.integration.conftest import STEP, Run

# Every all-reduce of a megabyte lasts as long as LASTS says, others 5 ms.
SLOW = (
    STEP
    + """
from pytest_ddpperf.rank import operation

clock = OwnClock()
real = operation._IN_PLACE["all_reduce"]

def lasting(sent):
    real(sent)
    clock.go_on(None if sent.nbytes == 1 << 20 else 5.0)

operation._IN_PLACE["all_reduce"] = lasting
"""
)

TESTS = """
import pytest, torch

def test_all_reduce(collective_benchmark):
    small, large = collective_benchmark("all_reduce", sizes=(1030, 1 << 20), dtype=torch.float32)
    assert (small.size, large.size, large.collective.count) == (1028, 1 << 20, 1 << 18)
    assert small.p50 == pytest.approx(0.005)
    assert small.algbw == small.busbw == pytest.approx(1028 / 0.005 / 1e9)
    assert large.algbw == large.busbw == pytest.approx((1 << 20) / large.p50 / 1e9)
"""

OPTIONS = ("--ddp-preload=slow", "--ddp-threshold=busbw:70%,p10:9900%")


def test_save_pass_regress(
    pytester: pytest.Pytester, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.syspathinsert()
    pytester.makepyfile(slow=SLOW, test_c=TESTS)
    assert run(*OPTIONS, "--ddp-save-baseline").ret == 0
    stored = sorted(
        path.name for path in Path(pytester.path / "baselines").rglob("*.json")
    )
    assert stored == ["test_all_reduce+1030b.json", "test_all_reduce+1mib.json"]

    result = run(*OPTIONS, "-v")
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        [
            "  op * size * count * type * redop * root * time * algbw * busbw * #wrong",
            "  * (B) * (elements) * (us) * (GB/s) * (GB/s)",
            "  all_reduce * 1028 * 257 * float32 * sum * -1 * 5000 * 0.000206 * 0.000206 * 0",
            "  all_reduce * 1048576 * 262144 * float32 * sum * -1 * 5000 * 0.21 * 0.21 * 0",
            "compared with *: 2 passed (2 of 2 compared)*",
        ]
    )
    assert re.search(
        r"smallest detectable change: \S+ % \(busbw\)", result.stdout.str()
    )

    monkeypatch.setenv("LASTS", "60")
    result = run(*OPTIONS, "--ddp-json=report.json")
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        [
            "REGRESSED: busbw 0.21 -> 0.0175 GB/s, -92 % * (limit 70 %)",
            "  busbw * 0.21 * 0.0175 GB/s * -92 % [[]-9*, -9*[]] *70 %",
            "compared with *: 1 regressed, 1 passed (2 of 2 compared)*",
        ]
    )
    measured = {
        m["test"]["label"]: m
        for m in json.loads((pytester.path / "report.json").read_text())[
            "measurements"
        ]
    }
    assert measured["1mib"]["plan"]["collective"] == {
        "op": "all_reduce",
        "dtype": "float32",
        "ranks": 2,
        "count": 1 << 18,
    }
    (busbw,) = (
        c
        for c in measured["1mib"]["verdict"]["comparisons"]
        if c["limit"]["metric"] == "busbw"
    )
    # of the time
    assert busbw["change"]["estimate"] == pytest.approx(11, abs=0.01)

    result = run(*OPTIONS, "--reruns=1")
    result.stdout.fnmatch_lines(
        [
            "A rerun does not measure again: noise must not turn red into green.",
            "* 1 failed*1 rerun *",
        ]
    )


REFUSED = """
import pytest

@pytest.mark.parametrize(("op", "sizes", "dtype", "words"), [
    ("all_reduce", (), "float32", "collective_benchmark('all_reduce'): no size was given"),
    ("all_reduce", (0,), "float32", "all_reduce of 0B: less than one element of float32"),
    ("all_reduce", (1e6,), "float32", '1000000.0: a size is a number of bytes, or a text like "8K" or "1MiB"'),
    ("all_reduce", "8K", "float32", "sizes='8K': give a list: "),
    ("all_reduce", 1024, "float32", "sizes=1024: give a list: "),
    ("all_reduce", None, "float32", "sizes=None: give a list: "),
    (None, (8,), "float32", "None: one of all_reduce, all_gather, "),
    ("all_reduce", (8,), None, "'None': one of torch's dtypes by name"),
    ("all_reduce", (8, 16, 8), "float32", "collective_benchmark: name='8b' is taken in this test"),
    ("allreduce", (8,), "float32", "'allreduce': one of all_reduce, all_gather, "),
])
def test_refused(collective_benchmark, op, sizes, dtype, words):
    with pytest.raises(ValueError) as caught:
        collective_benchmark(op, sizes, dtype=dtype)
    assert str(caught.value).startswith(words)

def test_named(collective_benchmark):
    (result,) = collective_benchmark("all_reduce", ["64B"], gate=False)
    assert result.verdict == "NOT GATED"
    collective_benchmark("broadcast", [64], name="b")
    with pytest.raises(ValueError, match="name='b-64b' is taken in this test: give each"):
        collective_benchmark("broadcast", [64], name="b")

@pytest.mark.ddp(threshold="busbw:5%")
def test_bandwidth_of_no_collective(ddp_benchmark):
    result = ddp_benchmark(lambda ctx: lambda: None)
    assert (result.verdict.status, result.verdict.reason) == ("NO BASELINE", "no-baseline")
"""


def test_what_cannot_be_is_refused_before_anything_runs(
    pytester: pytest.Pytester, run: Run
) -> None:
    pytester.makepyfile(REFUSED)
    result = run()
    result.assert_outcomes(passed=12)
    result.stdout.fnmatch_lines(
        [
            "2 without baseline, 1 not gated, 9 never measured (0 of 3 compared)*: record *"
        ]
    )
    assert run("--ddp-threshold=busbw:100%").ret == pytest.ExitCode.USAGE_ERROR
