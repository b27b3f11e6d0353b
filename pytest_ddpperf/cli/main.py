"""The command line of `ddpperf`: which subcommand was asked for, and what becomes of its errors."""

import argparse
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

from pytest_ddpperf.cli import bisect, commands, console, diff, history, init
from pytest_ddpperf.records import errors
from pytest_ddpperf.version import __version__

_USERS = (
    console.UsageError,
    errors.BaselineError,
    errors.FileError,
    errors.GitError,
    errors.MissingExtraError,
    errors.NodesError,
    errors.OptionError,
)

_STATUSES = """\
exit status:
  0    all is well
  1    a verdict that --fail-on names (default: regressed), or a failed measurement
       (history: a test became slower; run: the program failed; bisect: none was found)
  3    an error of ddpperf's own
  4    an invalid command, or a file that cannot be read or written
  5    no measurement could be compared
  130  it was interrupted
"""


class _Parser(argparse.ArgumentParser):
    """argparse's, but for its exit status of 2, and without shortened options."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        self.color = False  # Python 3.14 has colors where stdout is a terminal
        console.warn([self.format_usage().rstrip()])
        raise console.UsageError(message)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, `sys.argv`'s if nothing is said, and return its exit status. `--help` and
    `--version` raise SystemExit(0), as argparse has it."""
    words = list(sys.argv[1:] if argv is None else argv)
    options: list[str] = []
    if words[:1] == ["bisect"] and "--" in words:  # what follows is pytest's
        at = words.index("--")
        words, options = words[:at], words[at + 1 :]
    if words[:1] == ["history"] and words[1:2] not in history.COMMANDS:
        words.insert(1, "show")  # argparse has no default subcommand
    try:
        arguments = _parser().parse_args(
            words, argparse.Namespace(options=options)
        )
        return int(arguments.run(arguments))
    except errors.DdpPerfError as error:
        console.complain(f"error: {error}")
        if isinstance(error, _USERS):
            return console.USAGE_ERROR
        return console.INTERNAL_ERROR
    except KeyboardInterrupt:
        return 130  # as a shell has it
    except Exception:
        console.warn([traceback.format_exc().rstrip()])
        console.complain("this is an error of pytest-ddpperf's own")
        return console.INTERNAL_ERROR


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="ddpperf",
        description=(
            "Write a first test, time a training program, compare and show reports of pytest"
            " --ddp-json, find change points in a history and slower commits, list baselines, and"
            " check this machine."
        ),
        epilog=_STATUSES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version", action="version", version=f"pytest-ddpperf {__version__}"
    )
    subparsers = parser.add_subparsers(
        title="commands", metavar="COMMAND", required=True
    )
    for add in (
        diff.add_parser,
        history.add_parser,
        bisect.add_parser,
        init.add_parser,
        commands.add_run,
        commands.add_reports,
        commands.add_baseline,
        commands.add_doctor,
    ):
        add(subparsers)
    return parser
