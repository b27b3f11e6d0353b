"""The side-by-side form of PyTorch's DDP benchmark: of its own files, character by character, and
of ours."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from pytest_ddpperf.cli.main import main
from pytest_ddpperf.records.plan import Plan
from pytest_ddpperf.records.samples import Status, TestId
from tests.unit.test_reading import RUN, written
from tests.unit.test_report import FAILED, measurement, outcome, verdict

# What the README of PyTorch's benchmark shows of its diff.py.
EXAMPLE = (Path(__file__).parent / "data" / "pytorch_ddp_diff.txt").read_text()
CELL = re.compile(r"p\d\d: +([\d.]+)s +(\d+)/s +([+-][\d.]+)%")
FACTS = {
    "cuda_version": "10.0",
    "distributed_backend": "nccl",
    "pytorch_version": "1.4.0a0+05140f0",
}


def with_percentiles(p75: float, p95: float) -> list[float]:
    """Ten steps of two ranks, and one more, so that both percentiles are one of them."""
    assert p75 <= p95
    return [p75] * 19 + [p95] * 2


def sides_of(row: str) -> tuple[list[float], list[float]]:
    """Steps of both sides that a row is of, within what its digits leave open."""
    (time75, rate75, change75), (time95, rate95, change95) = (
        map(float, cell) for cell in CELL.findall(row)
    )
    parts = [part / 20 for part in range(20)]
    for part75, part95 in product(parts, parts):
        now = 32 / (rate75 + part75), 32 / (rate95 + part95)
        base = now[0] / (1 - change75 / 100), now[1] / (1 - change95 / 100)
        reported = [f"{seconds:.3f}" for seconds in now] == [
            f"{time:.3f}" for time in (time75, time95)
        ]
        if reported and now[0] <= now[1] and base[0] <= base[1]:
            return with_percentiles(*base), with_percentiles(*now)
    raise AssertionError(f"nothing fits {row}")


def files(folder: Path) -> tuple[str, str]:
    """The two files that the example was made from, with the row that it leaves out."""
    results: tuple[list[Any], list[Any]] = [], []
    for benchmark in EXAMPLE.split("Benchmark: ")[1:]:
        name, *rows = [
            line
            for line in benchmark.splitlines()
            if line and "sec/iter" not in line
        ]
        model = name.removesuffix(" with batch size 32")
        measured = [(int(row.split()[0]), *sides_of(row)) for row in rows]
        for side, of_side in enumerate(results):
            without = {"ranks": [0], "measurements": [0.097] * 10}
            rest = [
                {"ranks": list(range(ranks)), "measurements": sides[side]}
                for ranks, *sides in measured
            ]
            of_side.append(
                {"model": model, "batch_size": 32, "result": [without, *rest]}
            )
    paths = folder / "base.json", folder / "test.json"
    for path, bucket_size, of_side in zip(paths, (25, 1), results, strict=True):
        path.write_text(
            json.dumps(
                {
                    **FACTS,
                    "bucket_size": bucket_size,
                    "benchmark_results": of_side,
                }
            )
        )
    return str(paths[0]), str(paths[1])


def test_its_own_example_is_printed_character_by_character(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", *files(tmp_path)]) == 0
    reported = capsys.readouterr().out
    shown = [line for line in reported.splitlines() if "no ddp" not in line]
    assert "\n".join(shown).rstrip("\n") == EXAMPLE.rstrip("\n")
    rows = [line for line in reported.splitlines() if "no ddp" in line]
    # As the original writes that nothing changed: less is better, and minus nothing is -0.0.
    assert (
        rows
        == [
            "   no ddp:  p75:    0.097s     329/s     -0.0%  p95:    0.097s     329/s     -0.0%"
        ]
        * 4
    )


def changed(path: str, *place: str | int, to: Any) -> None:
    data = inner = json.loads(Path(path).read_text())
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = to
    Path(path).write_text(json.dumps(data))


def test_what_one_side_lacks_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, test = files(tmp_path)
    changed(test, "benchmark_results", 0, "model", to="vgg\x1b[31m")
    changed(
        test, "benchmark_results", 1, "result", 5, "ranks", to=list(range(32))
    )
    changed(test, "rccl", to=7)
    assert main(["diff", base, test]) == 0
    reported = capsys.readouterr().out
    assert (
        "Benchmark: vgg\\x1b[31m with batch size 32\n\n  only in test\n"
        in reported
    )
    assert (
        "Benchmark: resnet50 with batch size 32\n\n  only in baseline\n"
        in reported
    )
    assert " 32 GPUs:  only in test\n" in reported
    assert " 16 GPUs:  only in baseline\n" in reported
    assert (
        "rccl:                                   -  vs                     7\n"
        in reported
    )


@pytest.mark.parametrize(
    "option",
    [
        ["--threshold", "p50:5%"],
        ["--fail-on", "improved"],
        ["--json", "x"],
        ["--write-pytorch", "x"],
    ],
)
def test_there_is_no_verdict_about_one_launch(
    option: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", *files(tmp_path), *option]) == 4
    words = (
        f"{option[0]} is only for reports of ddpperf: those of PyTorch's benchmark hold one "
        "launch"
    )
    assert words in capsys.readouterr().err


def test_two_of_its_files_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, test = files(tmp_path)
    assert main(["diff", base, test, test]) == 4
    assert "compared by two" in capsys.readouterr().err
    assert main(["diff", base, test, "-k", "resnext50"]) == 0
    reported = capsys.readouterr().out
    assert [line for line in reported.splitlines() if "Benchmark" in line] == [
        "Benchmark: resnext50_32x4d with batch size 32"
    ]
    assert main(["diff", base, test, "-k", "vgg"]) == 5


@pytest.mark.parametrize(
    ("place", "value", "problem"),
    [
        ((), 3, "TypeError: "),
        ((0,), 3, "TypeError: "),
        ((0, "result", 1), {}, "KeyError: 'ranks'"),
        (
            (0, "result", 1, "measurements", 3),
            -1,
            "ValueError: measurements are positive numbers",
        ),
    ],
)
def test_what_is_wrong_with_its_file_is_named(
    place: tuple[Any, ...],
    value: Any,
    problem: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    base, test = files(tmp_path)
    changed(test, "benchmark_results", *place, to=value)
    assert main(["diff", base, test]) == 4
    assert capsys.readouterr().err.startswith(
        f"ddpperf: error: {test}: benchmark_results is not as PyTorch's benchmark writes it:"
        f" {problem}"
    )


# --- reports of ours


def at(
    world_size: int, seconds: float, device: str = "cuda", **kwargs: Any
) -> Any:
    plan = Plan(world_size=world_size, backend="nccl", device=device, **kwargs)
    return outcome(
        verdict(Status.PASS), plan=plan, measurement=measurement(seconds)
    )


def rows(text: str) -> Iterator[str]:
    return (line for line in text.splitlines() if "p75" in line)


def test_reports_of_ours_have_the_same_form(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = {
        "torch": "2.13.0",
        "cuda": "12.8",
        "nccl": "2.27.3",
        "device_model": "H100",
        "cpu_model": "EPYC",
    }
    base = written(
        tmp_path / "a.json",
        at(1, 0.1),
        at(8, 0.1001),
        FAILED,
        run=replace(RUN, facts=facts, commit="c0ffee" * 7),
    )
    now = written(
        tmp_path / "b.json",
        at(1, 0.1002),
        at(8, 0.12),
        at(2, 0.0003, "cpu"),
        run=replace(
            RUN,
            facts={**facts, "nccl": "2.28.1"},
            commit="decade" * 7 + "-dirty",
        ),
    )
    assert (
        main(
            [
                "diff",
                str(base),
                str(now),
                "--form",
                "pytorch",
                "--threshold",
                "p50:50%",
            ]
        )
        == 0
    )
    reported = capsys.readouterr().out
    assert reported.startswith("""\
                                 baseline                      test
                     --------------------      --------------------
commit:                      c0ffeec0ffee  vs    decadedecade-dirty
cuda_version:                        12.8  vs                  12.8
device:                              H100  vs            H100, EPYC
distributed_backend:                 nccl  vs                  nccl
nccl_version:                      2.27.3  vs                2.28.1
pytorch_version:                   2.13.0  vs                2.13.0

Benchmark: tests/test_a::test_step with batch size 32

                  sec/iter    ex/sec      diff        sec/iter    ex/sec      diff
   1 GPUs:  p75:    0.100s     319/s     -0.2%  p95:    0.100s     319/s     -0.2%
  2 ranks:  only in test
   8 GPUs:  p75:    0.120s     266/s    -19.9%  p95:    0.120s     266/s    -19.9%
""")
    assert reported.endswith(
        "compared with the base: 2 passed, 1 without baseline (2 of 3 compared)\n"
    )
    twice = written(
        tmp_path / "c.json",
        at(1, 0.1),
        replace(at(1, 0.2), nodeid="again"),
        run=RUN,
    )
    assert main(["diff", str(base), str(twice), "--form", "pytorch"]) == 4
    assert (
        f"{twice}: has tests/test_a::test_step of several machines, which PyTorch's form cannot"
        " show" in capsys.readouterr().err
    )


def test_a_command_whose_steps_are_not_known_has_no_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = at(1, 0.1, command=True)
    command = replace(command, test=TestId(module="a", name="test_command"))
    now = str(written(tmp_path / "a.json", at(8, 0.1), command, run=RUN))
    assert main(["diff", now, now, "--form", "pytorch"]) == 0
    (row,) = rows(capsys.readouterr().out)
    assert row.startswith("   8 GPUs:")


# --- the sweep of the suite


def swept(row: str, ranks: int, seconds: float, bucket_size: int = 25) -> Any:
    """A row of the suite's sweep."""
    facts: dict[str, Any] = {"test:model": "resnet50", "test:row": row}
    if row != "no ddp":
        facts["test:bucket_size"] = bucket_size
    measured = measurement(seconds)
    environment = replace(measured.environment, must_match=facts)
    different = TestId(
        module="suite/test_ddp_sweep", name=f"test_ddp_sweep[{row}]"
    )
    return replace(
        at(ranks, seconds),
        test=different,
        measurement=replace(measured, environment=environment),
    )


def sweep(path: Path, *, bucket_size: int = 25, factor: float = 1.0) -> str:
    taken = [
        ("2M/8G", 16, 0.107),
        ("1M/2G", 2, 0.103),
        ("no ddp", 1, 0.097),
        ("1M/1G", 1, 0.101),
    ]
    rows = [
        swept(row, ranks, factor * seconds, bucket_size)
        for row, ranks, seconds in taken
    ]
    return str(
        written(
            path,
            *rows,
            run=replace(RUN, facts={"torch": "2.13.0", "device_model": "V100"}),
        )
    )


def test_two_runs_of_the_suite_are_shown_as_the_original_shows_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, now = (
        sweep(tmp_path / "a.json"),
        sweep(tmp_path / "b.json", bucket_size=1, factor=1.01),
    )
    assert main(["diff", base, now, "--form", "pytorch"]) == 0
    reported = capsys.readouterr().out
    assert (
        "bucket_size:                           25  vs                     1\n"
        in reported
    )
    assert "Benchmark: resnet50 with batch size 32\n" in reported
    assert [line.partition("p75")[0].strip() for line in rows(reported)] == [
        "no ddp:",
        "1 GPUs:",
        "2 GPUs:",
        "16 GPUs:",
    ]
    assert reported.count("-1.0%") == 2 * 4
    assert "bucket_size 25 -> 1" in reported, "which makes them incomparable"


def test_a_run_of_the_suite_is_compared_with_a_file_of_the_original(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, _ = files(tmp_path)
    ours = sweep(tmp_path / "ours.json")
    assert main(["diff", base, ours]) == 0
    reported = capsys.readouterr().out
    assert "1.4.0a0+05140f0  vs                2.13.0\n" in reported
    assert len([*rows(reported)]) == 4
    assert "  4 GPUs:  only in baseline\n" in reported
    failed = str(
        written(tmp_path / "failed.json", swept("1M/2G", 2, 0.1), FAILED)
    )
    assert main(["diff", base, failed]) == 1
    assert (
        "tests/test_a.py::test_step: failed: launch 1 of 2: rank 1 failed in setup"
        in capsys.readouterr().out
    )


def test_rows_of_other_roles_are_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, now = (
        str(
            written(
                tmp_path / f"{servers}.json",
                at(2, 0.1, parameter_servers=servers),
            )
        )
        for servers in (2, 4)
    )
    main(["diff", base, now, "--form", "pytorch"])
    reported = capsys.readouterr().out
    assert "2 trainers 2 ps:  only in baseline\n" in reported
    assert "2 trainers 4 ps:  only in test\n" in reported


def test_a_run_of_the_suite_is_written_for_the_original(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, out = sweep(tmp_path / "a.json"), tmp_path / "out.json"
    assert main(["diff", base, base, "--write-pytorch", str(out)]) == 0
    data = json.loads(out.read_text())
    assert (
        data["bucket_size"],
        data["pytorch_version"],
        data["distributed_backend"],
    ) == ("25", "2.13.0", "nccl")
    (benchmark,) = data["benchmark_results"]
    assert (benchmark["model"], benchmark["batch_size"]) == ("resnet50", 32)
    assert [len(row["ranks"]) for row in benchmark["result"]] == [1, 1, 2, 16]
    assert benchmark["result"][0]["measurements"] == [0.097] * 12, (
        "launches x ranks x steps"
    )
    capsys.readouterr()
    assert main(["diff", str(out), str(out)]) == 0
    assert "   no ddp:  p75:    0.097s     329/s" in capsys.readouterr().out
    for outcomes, said in (
        (
            [at(2, 0.1)],
            "has no measurement of the suite's sweep, as PyTorch's benchmark writes it",
        ),
        (
            [swept("1M/1G", 1, 0.1)],
            "has no row of resnet50 without DDP, with which PyTorch's benchmark begins",
        ),
    ):
        other = str(written(tmp_path / "b.json", *outcomes))
        assert (
            main(
                [
                    "diff",
                    other,
                    other,
                    "--write-pytorch",
                    str(tmp_path / "new.json"),
                ]
            )
            == 4
        )
        assert said in capsys.readouterr().err
        assert not (tmp_path / "new.json").exists()
