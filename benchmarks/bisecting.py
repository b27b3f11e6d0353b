"""Does `ddpperf bisect` find the slower commit? Whole searches in repositories with planted
slowdowns.

    python benchmarks/bisecting.py [--runs 5] [--kinds one,none,...] [--results bisecting.jsonl]

A repository has 40 commits, and a step of DDP on two ranks of about 5 ms. "one" of them makes it
take 15 % longer, each time another one; "none" does; "two" do; "unbuilt": a commit in the middle
cannot be imported; "merge": it is in a branch that was merged; "tests": only the test became
slower; "dependency": not a commit but a distribution, which the baseline has in another version.
"one" is repeated on this machine as it is ("quiet") and next to benchmarks/neighbour.py, the others
are searched for once on each. Each search is a line of the results file, and a run goes on where
the last one ended.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _common import done, progress, quartiles, table
from neighbour import neighbour

TEST = "tests/test_step.py::test_train"
STEP = """
def test_train(ddp_benchmark):
    def setup(ctx):
        import torch
        from net.work import WORK
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
        ddp, x = torch.nn.parallel.DistributedDataParallel(model), torch.randn(32, 256)
        more = torch.randn(16, 256)

        def step():
            with torch.no_grad():
                for _ in range({extra} + WORK):
                    model(more)
            ddp.zero_grad()
            ddp(x).square().mean().backward()

        return step

    ddp_benchmark(setup)
"""
# A venv that has all of this one, and "dep" in some version, which makes the step slow from 2.0 on.
BUILD = """
import sys, venv
from pathlib import Path
folder, requirement = sys.argv[1:]
version = requirement.partition("==")[2]
venv.create(folder, symlinks=True)
(site,) = Path(folder).glob("lib/python*/site-packages")
(site / "all.pth").write_text("import site; site.addsitedir({site!r})\\n")
(site / "dep.py").write_text(f"SLOWER = {{int(version[0]) > 1}}\\n")
info = site / f"dep-{{version}}.dist-info"
info.mkdir(exist_ok=True)
(info / "METADATA").write_text(f"Metadata-Version: 2.1\\nName: dep\\nVersion: {{version}}\\n")
(info / "RECORD").write_text("dep.py,,\\n")
"""
COMMITS = 40
# of these parts a step has, besides as much as 10 of DDP: 15 % more in all
WORK, SLOWER = 30, 36
OPTIONS = (
    "-p",
    "no:randomly",
    "-p",
    "no:benchmark",
    "--ddp-world-size=2",
    "--ddp-backend=gloo",
)
Row = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--runs",
        type=int,
        default=5,
        help="of 'one' on each machine; the others once on each",
    )
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument(
        "--results",
        type=Path,
        default=Path("bisecting.jsonl"),
        help="file to go on with",
    )
    options = parser.parse_args()
    rows = done(options.results)
    asked = [
        (kind, machine, number)
        for kind in options.kinds.split(",")
        for number in range(options.runs if kind == "one" else 1)
        for machine in ("quiet", "neighbour")
    ]
    missing = [
        each
        for each in asked
        if list(each)
        not in [[row["kind"], row["machine"], row["run"]] for row in rows]
    ]
    with options.results.open("a") as file:
        for kind, machine, number in missing:
            with (
                tempfile.TemporaryDirectory() as folder,
                neighbour(None if machine == "quiet" else number),
            ):
                found = KINDS[kind](
                    Project(Path(folder)),
                    random.Random(f"{kind} {machine} {number}"),
                )
            rows.append(
                {"kind": kind, "machine": machine, "run": number, **found}
            )
            file.write(json.dumps(rows[-1]) + "\n")
            file.flush()
            progress(len(rows), len(asked), "searches")
    print(
        table(
            [
                TITLES,
                *(
                    line(kind, rows)
                    for kind in KINDS
                    if any(row["kind"] == kind for row in rows)
                ),
            ]
        )
    )
    return 0


class Project:
    """A repository with a test."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.top = folder, folder / "project"
        for name in ("net", "tests"):
            (self.top / name).mkdir(parents=True)
        self.write("net/__init__.py", "")
        self.write("tests/test_step.py", STEP.format(extra=0))
        self.write("pytest.ini", "[pytest]\npythonpath = .\n")
        self.write(".gitignore", "__pycache__\n.pytest_cache\nbaselines\n")
        self.git("init", "--quiet", "--initial-branch=main")
        self.commits: list[str] = []

    def write(self, name: str, text: str) -> None:
        (self.top / name).write_text(text)

    def git(self, *arguments: str) -> str:
        identity = (
            "-c",
            "user.name=a",
            "-c",
            "user.email=a@b",
            "-c",
            "commit.gpgsign=false",
        )
        command = ["git", "-C", str(self.top), *identity, *arguments]
        return subprocess.run(
            command, check=True, capture_output=True, text=True
        ).stdout.strip()

    def commit(self, work: object) -> str:
        """Commit a step of so much work, and return the hash."""
        self.write("net/work.py", f"# {len(self.commits)}\nWORK = {work}\n")
        self.git("add", "--all")
        self.git(
            "commit", "--quiet", "--message", f"Commit {len(self.commits)}"
        )
        self.commits.append(self.git("rev-parse", "HEAD"))
        return self.commits[-1]

    def run(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
        environ = {
            name: value for name, value in os.environ.items() if name != "CI"
        }
        environ["XDG_CACHE_HOME"] = str(self.folder / "cache")
        return subprocess.run(
            command, cwd=self.top, env=environ, capture_output=True, text=True
        )

    def bisect(
        self, *arguments: str, python: Path | str = sys.executable
    ) -> Row:
        """Search, and return the answer, the output and the seconds."""
        answer, began = self.folder / "answer.json", time.monotonic()
        command = (
            python,
            "-m",
            "pytest_ddpperf",
            "bisect",
            TEST,
            "--json",
            answer,
            *arguments,
            "--",
            *OPTIONS,
        )
        ended = self.run(*command)
        if not answer.exists():
            raise SystemExit(ended.stdout + ended.stderr)
        seconds = time.monotonic() - began
        comparisons = ended.stdout.rpartition("; ")[2].partition(" ")[0]
        return {
            "status": ended.returncode,
            "answer": json.loads(answer.read_text()),
            "output": ended.stdout,
            "seconds": seconds,
            "comparisons": int(comparisons) if comparisons.isdecimal() else 1,
        }

    def named(self, expected: list[str], *arguments: str) -> Row:
        """Search for these commits between the first and the last one."""
        found = self.bisect("--good", self.commits[0], *arguments)
        named = [each["commit"] for each in found["answer"]["found"]]
        return {**found, "right": named == expected}


def one(project: Project, source: random.Random) -> Row:
    slower = source.randrange(1, COMMITS)
    for number in range(COMMITS):
        project.commit(SLOWER if number >= slower else WORK)
    return project.named([project.commits[slower]])


def none(project: Project, source: random.Random) -> Row:
    for _ in range(COMMITS):
        project.commit(WORK)
    return project.named([])


def two(project: Project, source: random.Random) -> Row:
    first, second = sorted(source.sample(range(1, COMMITS), 2))
    for number in range(COMMITS):
        project.commit(
            WORK + (SLOWER - WORK) * ((number >= first) + (number >= second))
        )
    return project.named([project.commits[first], project.commits[second]])


def unbuilt(project: Project, source: random.Random) -> Row:
    slower = source.randrange(COMMITS // 4, COMMITS // 2)
    for number in range(COMMITS):
        is_whole = number != COMMITS // 2
        project.commit(
            (SLOWER if number >= slower else WORK) if is_whole else "1 +"
        )
    return project.named([project.commits[slower]])


def merge(project: Project, source: random.Random) -> Row:
    for _ in range(COMMITS // 2):
        project.commit(WORK)
    project.git("switch", "--quiet", "--create", "branch")
    project.commit(WORK)
    project.commit(SLOWER)
    project.git("switch", "--quiet", "main")
    project.write("other", "")
    project.git("add", "--all")
    project.git("commit", "--quiet", "--message", "Another")
    project.git("merge", "--quiet", "--no-ff", "--message", "Merge", "branch")
    merged = project.git("rev-parse", "HEAD")
    for _ in range(COMMITS // 2):
        project.commit(SLOWER)
    return project.named([merged])


def tests(project: Project, source: random.Random) -> Row:
    for _ in range(COMMITS // 2):
        project.commit(WORK)
    project.write("tests/test_step.py", STEP.format(extra=SLOWER - WORK))
    project.commit(WORK)
    return project.named([])


def dependency(project: Project, source: random.Random) -> Row:
    site = next(path for path in sys.path if path.endswith("site-packages"))
    project.write("build.py", BUILD.format(site=site))
    project.commit(f"__import__('dep').SLOWER * {SLOWER - WORK} + {WORK}")
    pythons = []
    for version in ("1.0", "2.0"):
        venv = project.folder / version
        project.run(sys.executable, "build.py", venv, f"dep=={version}")
        pythons.append(venv / "bin" / "python")
    project.run(
        pythons[0], "-m", "pytest", *OPTIONS, "--ddp-save-baseline", TEST
    )
    found = project.bisect(
        "--facts",
        "--build",
        f"{sys.executable} build.py {{venv}} {{requirements}}",
        python=pythons[1],
    )
    facts = {each["fact"]: each["verdict"] for each in found["answer"]["facts"]}
    return {**found, "right": facts == {"dep": "REGRESSED"}}


KINDS: dict[str, Callable[[Project, random.Random], Row]] = {
    each.__name__: each
    for each in (one, none, two, unbuilt, merge, tests, dependency)
}
TITLES = (
    "slower",
    "right",
    "comparisons",
    "seconds: median [quartiles]",
    "longest",
)


def line(kind: str, rows: list[Row]) -> tuple[str, ...]:
    chosen = [row for row in rows if row["kind"] == kind]
    first, median, third = quartiles([row["seconds"] for row in chosen])
    counts = [row["comparisons"] for row in chosen]
    return (
        kind,
        f"{sum(row['right'] for row in chosen)} of {len(chosen)}",
        f"{min(counts)} to {max(counts)}",
        f"{median:.0f} [{first:.0f}, {third:.0f}]",
        f"{max(row['seconds'] for row in chosen):.0f}",
    )


if __name__ == "__main__":
    sys.exit(main())
