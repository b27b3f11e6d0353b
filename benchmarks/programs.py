"""Are programs that own their loop timed as well as a step is? Whole runs of pytest on the recipes
of the docs.

    python benchmarks/programs.py [--runs 3] [--slower 0.15] [--results programs.jsonl]

"same": training steps of many kinds (see _programs.py), each timed as a step and as a loop, one of
them as a script too, in turns; the ratio of p50 of each to that of the step, as the median over
runs with its quartiles. "equal": the same, both sides interleaved by --ddp-against; the change of
p10 with its range, beside the smallest one that this detects. "slower": the same loops and
examples/programs (a script, transformers, Lightning, Accelerate), each next to its last commit
(--ddp-against HEAD), where each step takes longer by a share of p50, and where nothing has changed
but a comment. "often": each of these launched 20 times in a row, and what is left running. Each
measurement is a line of the results file, and a run goes on where the last one ended.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from _common import done, progress, quartiles, table
from _programs import KINDS

EXAMPLES = Path(__file__).parents[1] / "examples/programs"
OPTIONS = (
    "-q",
    "-p",
    "no:randomly",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:benchmark",
    "--ddp-backend=gloo",
)
KINDS_TEST = """
import pytest
from kinds import KINDS, train


@pytest.mark.parametrize("kind", KINDS)
def test_step(ddp_benchmark, kind):
    ddp_benchmark(lambda ctx: KINDS[kind]())


@pytest.mark.parametrize("kind", KINDS)
def test_loop(ddp_benchmark, kind):
    def main(ctx):
        from slower import busy

        train(kind, busy)

    ddp_benchmark.loop(main)


def test_script(ddp_benchmark):
    ddp_benchmark.script("kinds.py", args=["plain"])


@pytest.mark.parametrize("kind", KINDS)
def test_either(ddp_benchmark, kind):
    from way import AS_LOOP

    (test_loop if AS_LOOP else test_step)(ddp_benchmark, kind)
"""
# A loop is compared with a step here, which the plugin refuses otherwise.
ALIKE = """
from pytest_ddpperf.baseline import content

content._MUST_MATCH = tuple(name for name in content._MUST_MATCH if name != "program")
"""
BUSY = """
import time

SECONDS = {seconds}


def busy(*_):
    until = time.perf_counter() + SECONDS
    while SECONDS and time.perf_counter() < until:
        pass
"""
SLOWER_UPDATES = """
from slower import busy
from torch.optim.optimizer import register_optimizer_step_pre_hook

register_optimizer_step_pre_hook(busy)
"""
Row = dict[str, Any]  # of the results file


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--slower", type=float, default=0.15)
    parser.add_argument("--parts", default="same,equal,slower,often")
    parser.add_argument(
        "--results",
        type=Path,
        default=Path("programs.jsonl"),
        help="file to go on with",
    )
    options = parser.parse_args()
    rows, parts = done(options.results), options.parts.split(",")
    with (
        tempfile.TemporaryDirectory() as folder,
        options.results.open("a") as file,
    ):
        project = Path(folder) / "project"
        make(project)
        for number in range(options.runs):
            measured = chain(
                same_step(project, rows, number) if "same" in parts else (),
                equal(project, rows, number) if "equal" in parts else (),
                slower(project, rows, number, options.slower)
                if "slower" in parts
                else (),
            )
            for row in measured:
                rows.append(row)
                file.write(json.dumps(row) + "\n")
                file.flush()
                progress(
                    len(rows),
                    options.runs * (2 * len(KINDS) + 1 + 2 * len(TESTS)),
                    "measurements",
                )
        for row in often(project, rows) if "often" in parts else ():
            rows.append(row)
            file.write(json.dumps(row) + "\n")
            file.flush()
    print(
        table(
            [
                ["launched in a row", "launches", "left running"],
                *often_lines(rows),
            ]
        )
    )
    print(
        table(
            [
                ["same step", "as", "p50 / the step's", "quartiles", "runs"],
                *same_lines(rows),
            ]
        )
    )
    print(
        table(
            [
                [
                    "as a loop",
                    "verdict",
                    "p10 against the step's",
                    "detectable",
                ],
                *equal_lines(rows),
            ]
        )
    )
    print(
        table(
            [
                [
                    "program",
                    "slower by",
                    "runs",
                    "REGRESSED",
                    "PASS",
                    "INCONCLUSIVE",
                    "detectable",
                ],
                *slower_lines(rows),
            ]
        )
    )
    return 0


def same_step(project: Path, rows: Sequence[Row], number: int) -> Iterator[Row]:
    """Time each kind as a step, as a loop, and one as a script, in an order that alternates, unless
    that is done."""
    plant(project, 0.0)
    for kind in KINDS:
        have = [
            row
            for row in rows
            if row["part"] == "same" and row["test"] == f"test_step[{kind}]"
        ]
        if len(have) > number:
            continue
        tests = [
            f"test_step[{kind}]",
            f"test_loop[{kind}]",
            *["test_script"] * (kind == "plain"),
        ]
        for measured in pytest(
            project,
            "--ddp-baseline-missing=warn",
            tests=tests[:: 1 - 2 * (number % 2)],
        ):
            yield {
                "part": "same",
                "test": name_of(measured),
                "p50": p50(measured["measurement"]),
            }


def equal(project: Path, rows: Sequence[Row], number: int) -> Iterator[Row]:
    """Compare each kind as a loop with the last commit's, which is a step, unless that is done."""
    plant(project, 0.0)
    for kind in KINDS:
        if (
            sum(row["part"] == "equal" and row["kind"] == kind for row in rows)
            > number
        ):
            continue
        (project / "way.py").write_text("AS_LOOP = True\n")
        (measured,) = pytest(
            project, "--ddp-against=HEAD", tests=[f"test_either[{kind}]"]
        )
        (project / "way.py").write_text("AS_LOOP = False\n")
        of_p10 = [
            each
            for each in measured["verdict"]["comparisons"]
            if each["limit"]["metric"] == "p10"
        ]
        found = [(each["change"], each["resolution"]) for each in of_p10]
        yield {
            "part": "equal",
            "kind": kind,
            "status": measured["verdict"]["status"],
            "p10": found,
        }


def slower(
    project: Path, rows: Sequence[Row], number: int, share: float
) -> Iterator[Row]:
    """Compare each program with a slower one and with itself, unless that is done."""
    for test in TESTS:
        have = [
            row
            for row in rows
            if row["part"] == "slower" and row["test"] == test
        ]
        if len(have) > 2 * number:
            continue
        plant(project, 0.0)
        usual = p50(
            pytest(project, "--ddp-baseline-missing=warn", tests=[test])[0][
                "measurement"
            ]
        )
        for change in (0.0, share):
            plant(project, change * usual)
            (measured,) = pytest(project, "--ddp-against=HEAD", tests=[test])
            status = (
                measured["verdict"]["status"]
                if measured["verdict"]
                else measured["error"]
            )
            comparisons = (
                measured["verdict"]["comparisons"]
                if measured["verdict"]
                else []
            )
            found = {c["limit"]["metric"]: c["resolution"] for c in comparisons}
            yield {
                "part": "slower",
                "test": test,
                "change": change,
                "status": status,
                "resolution": found,
            }


def often(project: Path, rows: Sequence[Row]) -> Iterator[Row]:
    """Launch each program 20 times in a row, unless that is done; note what is left running."""
    few = (
        "--ddp-launches=20",
        "--ddp-max-launches=40",
        "--ddp-steps=5",
        "--ddp-min-time=0",
    )
    plant(project, 0.0)
    for test in TESTS:
        if any(row["part"] == "often" and row["test"] == test for row in rows):
            continue
        (measured,) = pytest(
            project, "--ddp-baseline-missing=warn", *few, tests=[test]
        )
        launches = len(measured["measurement"]["samples"]["step_seconds"])
        folders = (
            Path(os.path.realpath(link))
            for link in Path("/proc").glob("[0-9]*/cwd")
        )
        left = [folder for folder in folders if folder.is_relative_to(project)]
        yield {
            "part": "often",
            "test": test,
            "launches": launches,
            "left": len(left),
        }


RECIPES = (
    *(
        "test_script",
        "test_transformers[1]",
        "test_transformers[4]",
        "test_lightning[True]",
        "test_lightning[False]",
    ),
    "test_accelerate",
)
TESTS = (
    *(f"tests/test_programs.py::{test}" for test in RECIPES),
    *(f"test_loop[{kind}]" for kind in KINDS),
)


def make(project: Path) -> None:
    """A repository with the recipes, whose updates can be made slower, and the kinds of steps."""
    shutil.copytree(EXAMPLES, project)
    (project / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    (project / ".gitignore").write_text("__pycache__/\n")
    (project / "slower_updates.py").write_text(SLOWER_UPDATES)
    train, tests = project / "train.py", project / "tests/test_programs.py"
    train.write_text(
        train.read_text().replace(
            "import argparse\n", "import argparse\nimport slower_updates\n"
        )
    )
    main_of_test = "def main(ctx: Any) -> None:\n"
    tests.write_text(
        tests.read_text().replace(
            main_of_test, f"{main_of_test}        import slower_updates\n"
        )
    )
    (project / "kinds.py").write_text(
        Path(__file__).with_name("_programs.py").read_text()
    )
    (project / "test_kinds.py").write_text(KINDS_TEST)
    (project / "way.py").write_text("AS_LOOP = False\n")
    (project / "conftest.py").write_text(ALIKE)
    plant(project, 0.0)
    identity = (
        "-c",
        "user.name=a",
        "-c",
        "user.email=a@b",
        "-c",
        "commit.gpgsign=false",
    )
    for command in (
        ("init", "--quiet"),
        ("add", "--all"),
        (*identity, "commit", "--quiet", "-m", "A commit"),
    ):
        subprocess.run(
            ["git", "-C", project, *command], check=True, capture_output=True
        )


def plant(project: Path, seconds: float) -> None:
    # --ddp-against refuses to compare two trees that are the same.
    (project / "slower.py").write_text(
        f"{BUSY.format(seconds=seconds)}\n# {time.time()}\n"
    )


def pytest(project: Path, *arguments: str, tests: Sequence[str]) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        paths = [
            test if "::" in test else f"test_kinds.py::{test}" for test in tests
        ]
        command = [
            str(Path(sys.executable).with_name("pytest")),
            *OPTIONS,
            f"--ddp-json={report}",
            *arguments,
            *paths,
        ]
        environ = {
            name: value for name, value in os.environ.items() if name != "CI"
        }
        ended = subprocess.run(
            command, cwd=project, env=environ, capture_output=True, text=True
        )
        measured = (
            list(json.loads(report.read_text())["measurements"])
            if report.exists()
            else []
        )
        if not measured or any(
            each["measurement"] is None for each in measured
        ):
            raise SystemExit(ended.stdout + ended.stderr)
        return measured


def name_of(measured: Row) -> str:
    return str(measured["test"]["name"])


def p50(measurement: Row) -> float:
    launches = measurement["samples"]["step_seconds"]
    return quartiles([quartiles(launch).median for launch in launches]).median


def same_lines(rows: Sequence[Row]) -> Iterator[list[str]]:
    chosen = [row for row in rows if row["part"] == "same"]
    for kind, test in [
        *((kind, f"test_loop[{kind}]") for kind in KINDS),
        ("plain", "test_script"),
    ]:
        taken, steps = (
            [row["p50"] for row in chosen if row["test"] == each]
            for each in (test, f"test_step[{kind}]")
        )
        ratios = [
            other / step for other, step in zip(taken, steps, strict=False)
        ]
        if ratios:
            first, median, third = quartiles(ratios)
            way = "script" if test == "test_script" else "loop"
            yield [
                kind,
                way,
                f"{median:.3f}",
                f"{first:.3f} to {third:.3f}",
                str(len(ratios)),
            ]


def equal_lines(rows: Sequence[Row]) -> Iterator[list[str]]:
    for row in rows:
        for change, resolution in row["p10"] if row["part"] == "equal" else ():
            shown = f"{change['estimate']:+.1%} ({change['low']:+.1%} to {change['high']:+.1%})"
            yield [
                row["kind"],
                row["status"],
                shown,
                f"{resolution:.1%}" if resolution is not None else "-",
            ]


def often_lines(rows: Sequence[Row]) -> Iterator[list[str]]:
    for row in rows:
        if row["part"] == "often":
            yield [
                row["test"].rpartition("::")[2],
                str(row["launches"]),
                str(row["left"]),
            ]


def slower_lines(rows: Sequence[Row]) -> Iterator[list[str]]:
    for test in TESTS:
        for change in sorted(
            {row["change"] for row in rows if row["part"] == "slower"}
        ):
            chosen = [
                row
                for row in rows
                if row["part"] == "slower"
                and (row["test"], row["change"]) == (test, change)
            ]
            if chosen:
                counts = [
                    str(sum(row["status"] == status for row in chosen))
                    for status in ("REGRESSED", "PASS", "INCONCLUSIVE")
                ]
                found = [
                    row["resolution"]["p10"]
                    for row in chosen
                    if row["resolution"].get("p10") is not None
                ]
                detectable = f"{quartiles(found).median:.1%}" if found else "-"
                yield [
                    test.rpartition("::")[2],
                    f"{change:.0%}",
                    str(len(chosen)),
                    *counts,
                    detectable,
                ]


if __name__ == "__main__":
    sys.exit(main())
