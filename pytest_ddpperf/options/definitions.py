"""The table of settings, one row each, and its registration with pytest. Every pytest run imports
it; `parse` reads values."""

from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    import pytest

# What --ddp-fail-on may name: every verdict but PASS, in lower case, losses that differ, and a gate
# that is weaker than before.
FAIL_ON_NAMES = """
    regressed improved inconclusive no-baseline incomparable not-gated diverged loosened
""".split()


# The source of settings that a test's marker gives.
MARKER = "marker"


class Row(NamedTuple):
    """One setting. Its ini key and its marker argument follow from the option's name."""

    option: str
    help: str
    # as on the command line; None stands for itself
    default: str | bool | None = None
    parser: str = ""  # a function of `parse`; "" for a flag
    allowed: tuple[Any, ...] = ()  # further arguments of the parser
    metavar: str = ""  # "" for a flag
    # pytest's name of the type
    ini: Literal["int", "float", "string", "linelist"] | None = None
    marker: bool = False
    many: bool = False  # may be given more than once; its parser gets the list
    name: str = ""  # of the field of Settings, unless that is `argument`
    # whether it is an option at all; else a marker's argument alone
    of_run: bool = True

    @property
    def key(self) -> str:
        """The ini key, and argparse's destination."""
        return self.option.removeprefix("--").replace("-", "_")

    @property
    def argument(self) -> str:
        """The marker's argument."""
        return self.key.removeprefix("ddp_")

    @property
    def field(self) -> str:
        """The name of the field of Settings."""
        return self.name or self.argument

    def where(self, source: str) -> str:
        """Return the setting's name at its source."""
        if source == MARKER:
            return f"@pytest.mark.ddp({self.argument}=...)"
        return f"ini key {self.key}" if source == "ini" else self.option


# Kinds of rows.
_count = partial(
    Row, parser="count", allowed=(1,), metavar="N", ini="int", marker=True
)
_choice = partial(Row, default="auto", parser="choice", ini="string")
_word = partial(Row, default="auto", parser="word", ini="string", marker=True)
_seconds = partial(Row, parser="seconds", metavar="S", ini="float", marker=True)
_file = partial(Row, parser="file", metavar="PATH")
_folder = partial(Row, parser="folder", metavar="DIR")

ROWS = (
    Row(
        "--ddp-world-size",
        name="world_sizes",
        default="2",
        parser="world_sizes",
        ini="linelist",
        metavar="N[,N...]",
        marker=True,
        help="ranks; with several sizes, each test runs once with each",
    ),
    _count(
        "--ddp-nodes",
        metavar="",
        ini=None,
        of_run=False,
        help=(
            "nodes for a test's ranks, if torchrun started several; by default all, or the first"
            " alone if it has as many ranks as the marker asks for"
        ),
    ),
    _count(
        "--ddp-trainers",
        default="2",
        help="trainers of an RPC launch (rpc_benchmark), for which --ddp-world-size has no effect",
    ),
    _count(
        "--ddp-parameter-servers",
        default="2",
        help="parameter servers of an RPC launch (rpc_benchmark)",
    ),
    _word(
        "--ddp-backend",
        metavar="NAME",
        allowed=("auto, gloo, nccl or any torch backend",),
        help=(
            "auto, gloo, nccl or any torch backend, also cpu:gloo,cuda:nccl; auto is nccl if there"
            " are enough CUDA devices, else gloo"
        ),
    ),
    _word(
        "--ddp-device",
        metavar="TYPE",
        allowed=("auto, cuda:0 or a device type: cpu, cuda, ...",),
        help=(
            "auto, cpu, cuda or another device type; auto is the backend's. cuda:0: each rank sees"
            " its own device alone"
        ),
    ),
    _count(
        "--ddp-warmup",
        default="5",
        allowed=(0,),
        help="steps before the timed ones, at least",
    ),
    _count(
        "--ddp-steps", default="30", help="timed steps per launch, at least"
    ),
    _seconds(
        "--ddp-min-time",
        name="min_seconds",
        default="1",
        allowed=(0.0,),
        help="seconds of timed steps per launch, if --ddp-steps take less; 0: exactly --ddp-steps",
    ),
    _count(
        "--ddp-launches",
        default="5",
        help="launches (fresh process groups) before the first look at a measurement",
    ),
    _count(
        "--ddp-max-launches",
        default="20",
        help="launches at most, if the first ones leave the verdict open",
    ),
    Row(
        "--ddp-threshold",
        name="limits",
        default="p10:10%,p50:10%,mean:25%,device:3%",
        parser="limits",
        metavar="LIST",
        ini="linelist",
        marker=True,
        help=(
            "how much worse a metric may get: metric:N% or metric:Nms, comma-separated; replaces"
            " all time limits"
        ),
    ),
    _choice(
        "--ddp-timing",
        allowed=("auto", "free", "step"),
        metavar="MODE",
        marker=True,
        help=(
            "free: steps run ahead; step: synchronise around every step; auto: step on cpu, else"
            " free"
        ),
    ),
    _choice(
        "--ddp-turns",
        allowed=("auto", "stretches", "launches"),
        metavar="MODE",
        marker=True,
        help=(
            "with --ddp-against: stretches: interleave a few steps of each side, both alive;"
            " launches: one launch after the other; auto: stretches on cpu, launches on other"
            " devices, for RPC, for commands and for programs with figures"
        ),
    ),
    _seconds(
        "--ddp-timeout",
        name="timeout_seconds",
        default="300",
        help="seconds for one launch; waiting for a lock does not count",
    ),
    Row(
        "--ddp-preload",
        default="",
        parser="modules",
        metavar="MODULES",
        ini="linelist",
        help="modules to import once, for all ranks, comma-separated",
    ),
    _folder(
        "--ddp-baseline-dir",
        default="baselines",
        ini="string",
        help="where baselines are; in the ini file relative to rootdir",
    ),
    _choice(
        "--ddp-baseline-missing",
        allowed=("auto", "warn", "fail"),
        metavar="ACTION",
        help=(
            "if a test has nothing to be compared with: warn, fail, auto (fail if CI is set, else"
            " warn)"
        ),
    ),
    Row(
        "--ddp-fail-on",
        parser="fail_on",
        metavar="LIST",
        ini="linelist",
        help=f"exactly these fail a test: {', '.join(FAIL_ON_NAMES)}, comma-separated",
    ),
    Row(
        "--ddp-confirm",
        name="confirm_seconds",
        default="auto",
        parser="confirm_seconds",
        metavar="S",
        ini="string",
        help=(
            "seconds of a run for re-measuring tests that look slower than their baseline,"
            " interleaved with the baseline's own code from git; auto: 300; never"
        ),
    ),
    Row(
        "--ddp-save-baseline",
        default=False,
        help="measure, and replace the baselines of the tests that pass",
    ),
    Row(
        "--ddp-extend-baseline",
        default=False,
        help="measure, and add a session to the baselines of the tests that pass",
    ),
    Row(
        "--ddp-reason",
        name="why",
        parser="line",
        allowed=("why baselines are saved, in words",),
        metavar="WHY",
        help=(
            "why baselines are saved, stored in them: ddpperf baseline list and ddpperf history"
            " show it"
        ),
    ),
    Row(
        "--ddp-against",
        parser="word",
        allowed=("a git ref, or self",),
        metavar="REF",
        help=(
            "compare with the code of a git ref, interleaved with the working tree, instead of with"
            " baselines; self: the same code on both sides, to see the noise"
        ),
    ),
    Row(
        "--ddp-against-setup",
        parser="word",
        allowed=("a shell command",),
        metavar="CMD",
        ini="string",
        help="command that builds the code of --ddp-against, run first at the top of its worktree",
    ),
    Row(
        "--ddp-against-python",
        parser="path",
        allowed=("an interpreter",),
        metavar="PATH",
        help="compare with another interpreter, which has pytest-ddpperf too",
    ),
    Row(
        "--ddp-against-env",
        parser="assignments",
        metavar="NAME=VALUE",
        many=True,
        help="compare with another value of a variable; may be repeated",
    ),
    Row(
        "--ddp-against-option",
        parser="arguments",
        metavar="OPTIONS",
        many=True,
        help='compare with more options for pytest: "--my-bucket-mb 1"; may be repeated',
    ),
    Row(
        "--ddp-disable",
        default=False,
        help="run each step once in one launch, compare nothing",
    ),
    _choice(
        "--ddp-suite-size",
        allowed=("auto", "tiny", "small", "full"),
        metavar="SIZE",
        help=(
            "how much the shipped suite (--pyargs pytest_ddpperf.suite) measures: tiny, small or"
            " full; auto: full if each rank has a CUDA device, else small"
        ),
    ),
    _count(
        "--ddp-suite-bucket-mb",
        default="25",
        marker=False,
        help="megabytes of DDP's buckets in the suite's sweep",
    ),
    _folder(
        "--ddp-suite-plots",
        help=(
            "write figures of the suite's results to this folder: pip install"
            " 'pytest-ddpperf[plots]'"
        ),
    ),
    _folder(
        "--ddp-trace",
        name="trace_dir",
        help=(
            "write a Chrome trace of three more steps of each rank, after the timed ones of a"
            " test's first launch"
        ),
    ),
    _file(
        "--ddp-json",
        name="json_path",
        help="write everything measured, raw samples included",
    ),
    _folder(
        "--ddp-history",
        name="history_dir",
        ini="string",
        help="add the run's measurements to the history in this folder: see ddpperf history",
    ),
    _file(
        "--ddp-markdown",
        name="markdown_path",
        help=(
            "write a report for people, at most 60,000 characters of Markdown; appended to the file"
            " that $GITHUB_STEP_SUMMARY names"
        ),
    ),
    _file(
        "--ddp-html",
        name="html_path",
        help="write an HTML page with figures: pip install 'pytest-ddpperf[report]'",
    ),
)
BY_ARGUMENT = {row.argument: row for row in ROWS if row.marker}

MARKER_HELP = (
    f"ddp({', '.join(BY_ARGUMENT)}): settings of a distributed test, by keyword, over --ddp-* and"
    " ini keys"
)


def given(config: "pytest.Config") -> bool:
    """Say whether any setting was given on the command line or in the ini file. If not, none need
    be read."""
    # not above: the command line of reports reads settings without it
    import pytest

    if any(config.getoption(row.key) is not None for row in ROWS if row.of_run):
        return True
    try:
        return any(
            config.getini(row.key) is not None
            for row in ROWS
            if row.ini is not None
        )
    except (TypeError, ValueError, pytest.UsageError):
        # of a type that pytest does not expect
        return True


def add_options(parser: "pytest.Parser") -> None:
    """Register every option and ini key without a default: `read_settings` must see what was
    given, and where."""
    group = parser.getgroup("ddpperf", "distributed performance regression")
    for row in ROWS:
        if not row.of_run:
            continue
        text = row.help
        if row.default:
            text += f" (default: {row.default})"
        # argparse formats its help, addini does not
        escaped = text.replace("%", "%%")
        if row.metavar:
            action = "append" if row.many else "store"
            group.addoption(
                row.option, metavar=row.metavar, help=escaped, action=action
            )
        else:
            group.addoption(
                row.option, action="store_true", default=None, help=escaped
            )
        if row.ini is not None:
            parser.addini(row.key, text, type=row.ini, default=None)
