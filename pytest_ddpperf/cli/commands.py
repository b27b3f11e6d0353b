"""The short subcommands: `ddpperf run`, `html`, `markdown`, `baseline list` and `doctor`."""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pytest_ddpperf import text
from pytest_ddpperf.baseline import Store
from pytest_ddpperf.cli import console
from pytest_ddpperf.records.errors import BaselineError
from pytest_ddpperf.records.samples import Baseline, TestId
from pytest_ddpperf.report import (
    figures,
    json_report,
    markdown,
    sentences,
    terminal,
)

_SHARDS = (
    "Several reports, the shards of a CI job for example, become one; if several measured the same"
    " on one kind of machine, the run that ended last counts."
)


def add_run(subparsers: Any) -> None:
    """Add `run`."""
    parser = subparsers.add_parser(
        "run",
        help="time a training program",
        description=(
            "Run a training program on several ranks, as torchrun does, and show where the time of"
            " its steps goes. Nothing is stored. Example: ddpperf run --world-size 2 train.py"
            " --batch-size=8"
        ),
        usage="%(prog)s [-h] [--world-size N] [--backend NAME] PROGRAM [ARGUMENT ...]",
    )
    parser.add_argument(
        "--world-size", default="2", metavar="N", help="ranks (default: 2)"
    )
    parser.add_argument(
        "--backend",
        default="auto",
        help="auto, gloo, nccl, or any torch backend (default: auto)",
    )
    parser.add_argument(
        "program",
        nargs=argparse.PARSER,
        metavar="PROGRAM",
        help="a file and its arguments; for a module: -- -m MODULE",
    )
    parser.set_defaults(run=_run)


_PYTEST = f"""
    -m pytest -q --color=no -c {os.devnull} -p no:cacheprovider -p no:benchmark
    --ddp-baseline-missing=warn
""".split()
# For the end of a pytest whose command was killed.
_REMOVES_ITSELF = """\
import atexit, os, shutil
atexit.register(lambda: os.getppid() == {parent} or shutil.rmtree({folder!r}))
"""


def _run(arguments: argparse.Namespace) -> int:
    program = arguments.program
    if program[0] == "--":
        program = program[1:]
    test = test_of(program)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "test_train.py"
        report = Path(folder) / "run.json"
        removes_itself = _REMOVES_ITSELF.format(
            folder=folder, parent=os.getpid()
        )
        # file names may have bytes that are no Unicode: they become escapes of Python
        file.write_text(removes_itself + test, "utf-8", "backslashreplace")
        named = shlex.join(program)
        console.progress(
            f"timing {text.shortened(named, 40)}: it runs several times"
        )
        ended = subprocess.run(
            [
                sys.executable,
                *_PYTEST,
                f"--rootdir={os.getcwd()}",
                f"--ddp-world-size={arguments.world_size}",
                f"--ddp-backend={arguments.backend}",
                f"--ddp-baseline-dir={folder}",
                f"--ddp-json={report}",
                str(file),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
            preexec_fn=console.end_with_us(),
        )
        outcomes = []
        if not ended.returncode:
            stored = json_report.read([report])
            outcomes = [*stored.outcomes]
            # a baseline below our own folder is no concern of the user's
            notes = [note for note in _notes(stored) if folder not in note]
    console.progress("")
    if not outcomes:
        console.say(ended.stdout.splitlines())
        is_usage_error = ended.returncode == console.USAGE_ERROR
        return console.USAGE_ERROR if is_usage_error else console.NAMED_VERDICT
    # below the name of the test, which is ours
    _, _, *lines = terminal.details(outcomes)
    console.say(
        [
            named,
            *lines,
            *(f"note: {note}" for note in notes),
            "",
            "A test that does the same, say tests/perf/test_train.py:",
            "",
            *textwrap.indent(test, "    ").splitlines(),
        ]
    )
    return console.OK


def _notes(stored: json_report.StoredReport) -> Iterator[str]:
    """Yield what else the user should know of a program."""
    for outcome in stored.outcomes:
        yield from sentences.notes(outcome)
    yield from stored.run.messages


def test_of(program: Sequence[str]) -> str:
    """Return a test that times the program; raises UsageError if it is no file."""
    named = 2 if program[0] == "-m" else 1
    if named == 1 and not Path(program[0]).is_file():
        raise console.UsageError(
            f"{program[0]}: there is no such file (a training script is needed; a command such as"
            " torchrun is measured by a test with ddp_benchmark.command)"
        )
    # in double quotes; JSON's escapes of an emoji are not Python's
    quoted = partial(json.dumps, ensure_ascii=False)
    call = list(map(quoted, program[:named]))
    if rest := program[named:]:
        call.append(f"args={quoted(rest)}")
    script = f"ddp_benchmark.script({', '.join(call)})"
    return f"def test_train(ddp_benchmark):\n    {script}\n"


def add_reports(subparsers: Any) -> None:
    """Add `html` and `markdown`."""
    about = (
        "Draw what pytest --ddp-json wrote as one HTML file with figures, which needs no network."
        f" It needs matplotlib and Jinja2: pip install 'pytest-ddpperf[report]'. {_SHARDS}"
    )
    _add_report(subparsers, "html", "draw runs as one HTML file", about, _html)
    about = (
        "Write what pytest --ddp-json wrote as Markdown: the worst 50 measurements first."
        f" {_SHARDS} The file that GITHUB_STEP_SUMMARY names is appended to."
    )
    _add_report(
        subparsers, "markdown", "write runs as Markdown", about, _markdown
    )


def _add_report(
    subparsers: Any,
    name: str,
    short: str,
    description: str,
    run: Callable[[argparse.Namespace], int],
) -> None:
    parser = subparsers.add_parser(name, help=short, description=description)
    console.add_reports(parser)
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        required=True,
        metavar="PATH",
        help="the file to write",
    )
    parser.set_defaults(run=run)


def _html(arguments: argparse.Namespace) -> int:
    from pytest_ddpperf.report import page

    figures.check("ddpperf html")
    console.write(
        arguments.output, page.html(json_report.read(arguments.reports))
    )
    return console.OK


def _markdown(arguments: argparse.Namespace) -> int:
    content = markdown.report(json_report.read(arguments.reports))
    console.write(
        arguments.output, content, append=markdown.appends(arguments.output)
    )
    return console.OK


def add_baseline(subparsers: Any) -> None:
    """Add `baseline list`."""
    parser = subparsers.add_parser("baseline", help="list stored baselines")
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", required=True
    )
    listed = commands.add_parser(
        "list", help="list what is stored, by environment"
    )
    # errors advise the second, which pytest has
    console.add_baseline_dir(listed, "--baseline-dir", "--ddp-baseline-dir")
    console.add_k(listed, "tests and environments")
    listed.set_defaults(run=_list)


def _list(arguments: argparse.Namespace) -> int:
    """List the baselines; one that cannot be read is named, and ends the command with status 4."""
    store = Store(arguments.baseline_dir)
    status = console.OK
    chosen: dict[str, list[Baseline]] = {}
    for path in store.files():
        name = path.relative_to(store.root).parts[0]
        try:
            baseline = store.read_file(path)
        except BaselineError as error:
            console.complain(f"error: {error}")
            status = console.USAGE_ERROR
            continue
        test = baseline.test
        found = f"{name} {test.module}::{test.name} {test.label}"
        if arguments.matches is None or arguments.matches(found):
            chosen.setdefault(name, []).append(baseline)
    marks = "*: uncommitted changes"
    for name, baselines in chosen.items():
        gone = {each.test for each in baselines if _is_gone(each.test)}
        if gone:
            marks = "*: uncommitted changes; ?: not in its file"
        table = terminal.baseline_table(name, baselines, gone)
        console.say(text.wrap_for_terminal((*table, "")))
    stored = text.several(sum(map(len, chosen.values())), "baseline")
    console.say(
        [f"{stored} in {text.several(len(chosen), 'environment')} ({marks})"]
    )
    return status


def _is_gone(test: TestId) -> bool:
    """Whether a test is not in its file, by paths from here. Of an installed module nothing is
    known."""
    file = Path(f"{test.module}.py")
    if "." in test.module or not file.parent.is_dir():
        return False
    function = test.name.partition("[")[0].rpartition("::")[2]
    try:
        return f"def {function}(" not in file.read_text(errors="replace")
    except OSError:
        return True


def add_doctor(subparsers: Any) -> None:
    """Add `doctor`."""
    parser = subparsers.add_parser(
        "doctor",
        help="check what makes measurements on this machine less steady",
        description=(
            "Check cores, clocks, load, memory and GPUs, and print advice where something can be"
            " better. It takes seconds and starts no ranks. The exit status is 0, whatever is"
            " found."
        ),
    )
    parser.set_defaults(run=_doctor)


def _doctor(_: argparse.Namespace) -> int:
    from pytest_ddpperf.doctor import run_checks

    checks = run_checks()
    width = max(len(check.name) for check in checks)
    below = " " * (width + 4)
    lines = []
    with_advice = 0
    for check in checks:
        mark = "!" if check.advice else " "
        lines.append(f"{mark} {check.name.ljust(width)}  {check.fact}")
        if check.advice:
            with_advice += 1
            lines.append(f"{below}-> {check.advice}")
    summary = "nothing to change was found"
    if with_advice:
        summary = f"{with_advice} of {len(checks)} checks have advice"
    for line in (*lines, "", summary):
        console.say(text.wrapped(line, text.terminal_width(), below))
    console.say(
        [
            "smallest change that can be detected here: pytest TESTS --ddp-against self"
        ]
    )
    return console.OK
