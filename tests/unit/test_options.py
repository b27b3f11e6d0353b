"""Everything a user can ask for, and everything a user can get wrong; each message is read here."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_ddpperf.options.definitions import (
    MARKER_HELP,
    ROWS,
    Row,
    add_options,
)
from pytest_ddpperf.options.settings import (
    Settings,
    make_plan,
    read_settings,
    with_markers,
)
from pytest_ddpperf.plugin.place import check_limits
from pytest_ddpperf.records.errors import MarkerError, OptionError, short_repr
from pytest_ddpperf.records.plan import Limit

NATIVE_TOML = pytest.mark.skipif(
    pytest.version_tuple < (9,), reason="[tool.pytest] is read since pytest 9"
)


class _Registers:
    pytest_addoption = staticmethod(add_options)


@pytest.fixture
def read(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Settings]:
    """`read_settings` of a pytest called with these arguments, with our options and no plugin's."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    pytester.plugins = [_Registers()]
    return lambda *arguments: read_settings(pytester.parseconfig(*arguments))


@pytest.fixture
def refusal(read: Callable[..., Settings]) -> Callable[..., str]:
    """The message that refuses these arguments, at the latest for a test without markers."""

    def refused(*arguments: str) -> str:
        with pytest.raises(OptionError) as caught:
            check_limits(read(*arguments))
        assert not isinstance(caught.value, MarkerError)
        return str(caught.value)

    return refused


def mark(*args: Any, **kwargs: Any) -> pytest.Mark:
    return (
        pytest.mark.ddp(*args, **kwargs).mark
        if args or kwargs
        else pytest.mark.ddp.mark
    )


def marker_refusal(settings: Settings, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(MarkerError) as caught:
        with_markers(settings, [mark(*args, **kwargs)])
    return str(caught.value)


def metrics(settings: Settings) -> list[str]:
    return [str(limit) for limit in settings.limits]


# --- what is asked for


def test_without_being_asked_the_settings_are_the_documented_defaults(
    read: Callable[..., Settings], pytester: pytest.Pytester
) -> None:
    settings = read()
    assert (
        settings.world_sizes,
        settings.trainers,
        settings.parameter_servers,
    ) == (
        (2,),
        2,
        2,
    )
    assert (
        settings.warmup,
        settings.steps,
        settings.launches,
        settings.max_launches,
    ) == (5, 30, 5, 20)
    assert (
        settings.min_seconds,
        settings.timeout_seconds,
        settings.confirm_seconds,
    ) == (1.0, 300.0, 300.0)
    assert metrics(settings) == ["p10:10%", "p50:10%", "mean:25%", "device:3%"]
    assert all(limit.default for limit in settings.limits)
    assert (settings.baseline_dir, settings.baseline_missing) == (
        pytester.path / "baselines",
        "warn",
    )
    auto = {
        name for name in settings.sources if getattr(settings, name) == "auto"
    }
    assert auto == {"backend", "device", "timing", "turns", "suite_size"}
    flags = {
        name for name in settings.sources if getattr(settings, name) is False
    }
    assert flags == {"save_baseline", "extend_baseline", "disable"}
    assert {
        name for name in settings.sources if getattr(settings, name) is None
    } == {
        "nodes",
        "fail_on",
        "suite_plots",
        "trace_dir",
        "json_path",
        "history_dir",
        "markdown_path",
        "html_path",
        "why",
        "against",
        "against_setup",
        "against_python",
        "against_env",
        "against_option",
    }
    assert set(settings.sources.values()) == {"default"}
    assert (
        settings.sources.keys()
        == {row.field for row in ROWS}
        == set(Settings.__dataclass_fields__) - {"sources"}
    )


ASKED: dict[str, tuple[str, Any]] = {
    "world_sizes": ("1,2,4", (1, 2, 4)),
    "trainers": ("8", 8),
    "parameter_servers": ("3", 3),
    "backend": ("gloo", "gloo"),
    "device": ("cpu", "cpu"),
    "warmup": ("0", 0),
    "steps": ("50", 50),
    "min_seconds": ("0.5", 0.5),
    "launches": ("7", 7),
    "max_launches": ("14", 14),
    "limits": (
        "p50:5%, p75:2ms,cpu_p10:0.5%",
        (
            Limit(metric="p50", value=0.05, unit="%"),
            Limit(metric="p75", value=0.002, unit="ms"),
            Limit(metric="cpu_p10", value=0.005, unit="%"),
        ),
    ),
    "timing": ("free", "free"),
    "turns": ("launches", "launches"),
    "timeout_seconds": ("1.5", 1.5),
    "preload": ("json,os.path", ("json", "os.path")),
    "baseline_dir": ("figures", Path("figures")),
    "baseline_missing": ("fail", "fail"),
    "fail_on": ("improved,no-baseline", frozenset({"improved", "no-baseline"})),
    "confirm_seconds": ("never", 0.0),
    "against": ("origin/main", "origin/main"),
    "against_setup": ("make build", "make build"),
    "against_python": ("sh", "sh"),
    "against_env": ("OMP_NUM_THREADS=2", ("OMP_NUM_THREADS=2",)),
    "against_option": ("--my-bucket-mb 1", ("--my-bucket-mb", "1")),
    "suite_size": ("tiny", "tiny"),
    "suite_bucket_mb": ("1", 1),
    "suite_plots": ("figures/here", Path("figures/here")),
    "trace_dir": ("traces", Path("traces")),
    "json_path": ("out/all.json", Path("out/all.json")),
    "history_dir": ("out/history", Path("out/history")),
    "markdown_path": ("out/all.md", Path("out/all.md")),
    "html_path": ("out/all.html", Path("out/all.html")),
}
FLAGS = {"disable", "save_baseline", "extend_baseline"}
INI_WORDS = {row.key: ASKED[row.field][0] for row in ROWS if row.ini}


def check_asked(
    settings: Settings, root: Path, fields: set[str], source: str
) -> None:
    asked = {
        field: value for field, (_, value) in ASKED.items() if field in fields
    }
    asked = {
        field: root / value if isinstance(value, Path) else value
        for field, value in asked.items()
    }
    assert {field: getattr(settings, field) for field in fields} == asked
    assert {
        field for field, found in settings.sources.items() if found == source
    } == fields


def test_every_option_is_taken_from_the_command_line(
    read: Callable[..., Settings], pytester: pytest.Pytester
) -> None:
    # which none of these may be given with
    others = FLAGS | {"why"}
    assert {row.field for row in ROWS if row.of_run} == ASKED.keys() | others
    settings = read(
        *(
            f"{row.option}={ASKED[row.field][0]}"
            for row in ROWS
            if row.field in ASKED
        )
    )
    check_asked(settings, pytester.path, set(ASKED), "command line")
    assert not any(getattr(settings, flag) for flag in FLAGS)


@pytest.mark.parametrize(
    "table",
    [
        "pytest",
        "tool.pytest.ini_options",
        pytest.param("tool.pytest", marks=NATIVE_TOML),
    ],
)
def test_every_ini_key_is_taken_from_a_file(
    read: Callable[..., Settings], pytester: pytest.Pytester, table: str
) -> None:
    if table == "pytest":
        pytester.makeini(
            "\n".join(
                [
                    "[pytest]",
                    *(f"{key} = {value}" for key, value in INI_WORDS.items()),
                ]
            )
        )
    else:
        lines = (f'{key} = "{value}"' for key, value in INI_WORDS.items())
        pytester.makepyprojecttoml("\n".join([f"[{table}]", *lines]))
    check_asked(
        read("-Werror"),
        pytester.path,
        {row.field for row in ROWS if row.ini},
        "ini",
    )


def test_the_command_line_wins_over_ini(
    read: Callable[..., Settings], pytester: pytest.Pytester
) -> None:
    pytester.makeini("[pytest]\nddp_steps = 50\nddp_warmup = 9\n")
    assert read("-o", "ddp_steps=60").steps == 60
    settings = read("--ddp-steps=40")
    assert (settings.steps, settings.warmup) == (40, 9)
    assert (settings.sources["steps"], settings.sources["warmup"]) == (
        "command line",
        "ini",
    )


def test_the_last_of_two_options_holds(read: Callable[..., Settings]) -> None:
    assert metrics(
        read("--ddp-threshold=p50:5%", "--ddp-threshold=p75:5%")
    ) == ["p75:5%"]


def test_folders_are_relative_to_where_they_were_named(
    read: Callable[..., Settings],
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytester.makeini("[pytest]\nddp_baseline_dir = figures\n")
    below = pytester.mkdir("below")
    monkeypatch.chdir(below)
    assert read().baseline_dir == pytester.path / "figures"
    settings = read(
        "--ddp-baseline-dir=../mine",
        "--ddp-json=all.json",
        "--ddp-markdown=all.md",
        "--ddp-history=kept",
    )
    assert (settings.baseline_dir, settings.history_dir) == (
        pytester.path / "mine",
        below / "kept",
    )
    assert (settings.json_path, settings.markdown_path) == (
        below / "all.json",
        below / "all.md",
    )


@pytest.mark.parametrize(
    ("ci", "resolved"), [("true", "fail"), ("", "warn"), (None, "warn")]
)
def test_a_missing_baseline_fails_by_default_where_ci_is_set(
    read: Callable[..., Settings],
    monkeypatch: pytest.MonkeyPatch,
    ci: str | None,
    resolved: str,
) -> None:
    if ci is not None:
        monkeypatch.setenv("CI", ci)
    assert read().baseline_missing == resolved
    assert read("--ddp-baseline-missing=warn").baseline_missing == "warn"


@pytest.mark.parametrize(("given", "seconds"), [("60", 60.0), ("never", 0.0)])
def test_confirming_takes_seconds_or_never(
    read: Callable[..., Settings], given: str, seconds: float
) -> None:
    assert read(f"--ddp-confirm={given}").confirm_seconds == seconds


def test_percentiles_that_are_equal_are_one_metric(
    read: Callable[..., Settings],
) -> None:
    assert metrics(read("--ddp-threshold=p50.0:0.50%,p062.50:2.5ms")) == [
        "p50:0.5%",
        "p62.5:2.5ms",
    ]


def test_a_backend_that_torch_may_know_is_not_ours_to_refuse(
    read: Callable[..., Settings],
) -> None:
    assert read("--ddp-backend=glo").backend == "glo"


DOCUMENT = Path(__file__).parents[2] / "docs/options.md"


RECIPES = "pytest_ddpperf/cli/recipes"


@pytest.mark.parametrize(
    "document",
    [
        "README.md",
        "docs/ci.md",
        f"{RECIPES}/github/.github/workflows/perf.yml",
        f"{RECIPES}/github-cpu/.github/workflows/perf.yml",
        f"{RECIPES}/github-main/.github/workflows/perf-main.yml",
        f"{RECIPES}/gitlab/.gitlab/perf.yml",
        f"{RECIPES}/jenkins/Jenkinsfile.perf",
        f"{RECIPES}/kubernetes/perf-job.yaml",
        f"{RECIPES}/slurm/perf.sbatch",
    ],
)
def test_a_recipe_asks_for_nothing_that_there_is_not(document: str) -> None:
    named = set(
        re.findall(
            r"--ddp-[a-z][a-z-]*", (DOCUMENT.parents[1] / document).read_text()
        )
    )
    assert named
    assert named <= {row.option for row in ROWS}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.key)
def test_the_documents_table_has_every_setting_with_its_names_and_default(
    row: Row,
) -> None:
    begins = (
        f"| `{row.option}"
        if row.of_run
        else f"| a marker's alone | | `{row.argument}`"
    )
    lines = [
        line
        for line in DOCUMENT.read_text().splitlines()
        if line.startswith(begins)
    ]
    _, option, key, argument, default, meaning, _ = lines[0].split("|")
    kind = {"int": " (int)", "float": " (float)", "linelist": " (list)"}.get(
        str(row.ini), ""
    )
    assert option.strip() == (
        f"`{row.option} {row.metavar}".strip() + "`"
        if row.of_run
        else "a marker's alone"
    )
    assert key.strip() == (f"`{row.key}`{kind}" if row.ini else "")
    assert argument.strip() == (f"`{row.argument}`" if row.marker else "")
    shown = f"`{row.default}`" if row.default else "none"
    if row.default is False:
        shown = "off"
    assert row.default is None or default.strip() == shown
    assert meaning.strip()


def test_the_documents_ini_files_can_be_read(
    read: Callable[..., Settings], pytester: pytest.Pytester
) -> None:
    blocks = re.findall(
        r"```(ini|toml)\n(.*?)```", DOCUMENT.read_text(), re.DOTALL
    )
    assert len(blocks) == 3
    for kind, text in blocks:
        if "[tool.pytest]" in text and pytest.version_tuple < (9,):
            continue
        with pytest.MonkeyPatch.context() as patch:
            folder = pytester.mkdir(f"{kind}-{len(text)}")
            (
                folder / ("pytest.ini" if kind == "ini" else "pyproject.toml")
            ).write_text(text)
            patch.chdir(folder)
            assert metrics(read()) == ["p10:10%", "p50:5%"]
            assert set(read().sources.values()) == {"ini", "default"}


# --- what is refused


FORM = (
    "metric:N% or metric:Nms, as in p50:5%, p95:2ms, mean:20%, forward:5%, cpu_p50:5%, busbw:5%,"
    " rpc.bytes:0%"
)
SIZES = "whole numbers from 1 to 10,000, separated by commas, none twice: 2 or 1,2,4"
WHOLE = "a whole number from 1 to 1,000,000"
SECONDS = "seconds, a number {} 0 and up to 1000000000"
# an option, values that cannot be, and what is allowed
REFUSED: list[tuple[str, list[str], str]] = [
    (
        "--ddp-world-size",
        ["0", "-1", "two", "1,,2", "2,2", "", ",", "1.5", "1;2", "٢", "9" * 20],
        SIZES,
    ),
    (
        "--ddp-steps",
        ["0", "-3", "many", "", "1.5", "--", "9" * 12, "9" * 5000],
        WHOLE,
    ),
    ("--ddp-launches", ["0"], WHOLE),
    ("--ddp-trainers", ["9" * 20], WHOLE),
    ("--ddp-warmup", ["-1", "9" * 12], "a whole number from 0 to 1,000,000"),
    (
        "--ddp-timeout",
        ["0", "-1", "inf", "nan", "soon", "", "1e10"],
        SECONDS.format("above"),
    ),
    ("--ddp-min-time", ["-1", "inf", "soon"], SECONDS.format("from")),
    (
        "--ddp-threshold",
        ["p50:ten", "p50", "p50:-5%", "mean", "p50:5", "p50:5s", "p50:nan%"],
        f"not {FORM}",
    ),
    ("--ddp-threshold", ["p50:inf%"], f"not {FORM}"),
    (
        "--ddp-threshold",
        ["rpc.bytes:5ms"],
        "a limit on rpc.bytes is a share: rpc.bytes:5%",
    ),
    ("--ddp-threshold", ["p5O:10%"], "unknown metric p5O; did you mean p50?"),
    ("--ddp-threshold", ["P50:2.5ms"], "unknown metric P50; did you mean p50?"),
    (
        "--ddp-threshold",
        ["foward:5%"],
        "unknown metric foward; did you mean forward?",
    ),
    (
        "--ddp-threshold",
        ["all_reduce.byte:0%"],
        "unknown metric all_reduce.byte; did you mean all_reduce.bytes?",
    ),
    ("--ddp-threshold", ["p:5%"], f"unknown metric p: {FORM}"),
    ("--ddp-threshold", ["p99.99999:5%"], f"unknown metric p99.99999: {FORM}"),
    ("--ddp-threshold", [""], f"no limit given: {FORM}, separated by commas"),
    (
        "--ddp-threshold",
        ["p101:5%"],
        "p101 is no percentile: a metric is p1 to p99, decimals allowed (p99.9)",
    ),
    (
        "--ddp-threshold",
        [f"p50:{'9' * 400}%"],
        f"the limit is not finite: {FORM}",
    ),
    (
        "--ddp-threshold",
        ["p50:5%,p50:2ms", "p50:5%,p75:1%,p50.0:5%"],
        "p50 has 2 limits: give each metric one",
    ),
    (
        "--ddp-timing",
        ["fre", "FREE"],
        "one of auto, free, step; did you mean free?",
    ),
    ("--ddp-timing", [""], "one of auto, free, step"),
    ("--ddp-baseline-missing", ["x"], "one of auto, warn, fail"),
    (
        "--ddp-baseline-missing",
        ["wran"],
        "one of auto, warn, fail; did you mean warn?",
    ),
    ("--ddp-backend", [""], "auto, gloo, nccl or any torch backend"),
    ("--ddp-device", [""], "auto, cuda:0 or a device type: cpu, cuda, ..."),
    ("--ddp-baseline-dir", [""], "a folder"),
    ("--ddp-json", [""], "a file"),
    ("--ddp-markdown", [""], "a file"),
    ("--ddp-html", [""], "a file"),
    ("--ddp-against", [""], "a git ref, or self"),
    ("--ddp-against-setup", [""], "a shell command"),
    ("--ddp-against-python", [""], "an interpreter"),
    (
        "--ddp-against-python",
        ["/no/such/python", "no-such-python", "."],
        "there is no such program",
    ),
    (
        "--ddp-against-env",
        ["A", "=1", "", "--", "1A=1", "A B=1", "Ä=1", "A.B=1"],
        "not NAME=VALUE",
    ),
]


def test_a_long_value_is_cut_where_dots_say_so() -> None:
    assert short_repr("a" * 198) == f"'{'a' * 198}'"
    assert short_repr("a" * 199) == f"'{'a' * 196}..."


@pytest.mark.parametrize(
    ("option", "given", "allowed"), REFUSED, ids=lambda value: str(value)[:30]
)
def test_an_invalid_value_is_refused_with_what_is_allowed(
    refusal: Callable[..., str], option: str, given: list[str], allowed: str
) -> None:
    assert [refusal(f"{option}={value}") for value in given] == [
        f"{option}: {short_repr(value)}: {allowed}" for value in given
    ]


def test_a_negative_world_size_is_a_value_not_an_option(
    refusal: Callable[..., str],
) -> None:
    assert refusal("--ddp-world-size", "-1").startswith(
        "--ddp-world-size: '-1': whole numbers from 1"
    )


VERDICTS = "regressed, improved, inconclusive, no-baseline, incomparable, not-gated, diverged, loosened"
NO_REF = (
    "--ddp-against-setup: 'make build': builds the code of a git ref: name it with "
    "--ddp-against"
)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--ddp-fail-on=improved,regresed"],
            f"--ddp-fail-on: 'regresed': not one of {VERDICTS}; did you mean regressed?",
        ),
        (
            ["--ddp-fail-on="],
            f"--ddp-fail-on: '': name at least one of {VERDICTS}",
        ),
        (
            ["--ddp-disable", "--ddp-save-baseline"],
            "--ddp-save-baseline: '--ddp-disable': they exclude each other: use only one",
        ),
        (
            ["--ddp-save-baseline", "--ddp-extend-baseline"],
            "--ddp-save-baseline: '--ddp-extend-baseline': they exclude each other: use only one",
        ),
        (
            ["--ddp-reason=a bigger model"],
            "--ddp-reason: 'a bigger model': says why a baseline is saved: add --ddp-save-baseline",
        ),
        (
            ["--ddp-reason=a bigger model", "--ddp-against=self"],
            "--ddp-reason: 'a bigger model': says why a baseline is saved: add --ddp-save-baseline",
        ),
        (
            ["--ddp-reason= \n", "--ddp-save-baseline"],
            "--ddp-reason: ' \\n': why baselines are saved, in words",
        ),
        (["--ddp-against-setup=make build"], NO_REF),
        (["--ddp-against-setup=make build", "--ddp-against=self"], NO_REF),
        (["--ddp-against-setup=make build", "--ddp-against-env=A=1"], NO_REF),
        (
            ["--ddp-against-option=--name 'a"],
            (
                '--ddp-against-option: ["--name \'a"]: options for pytest, as in a shell: No'
                " closing quotation"
            ),
        ),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(
    refusal: Callable[..., str], arguments: list[str], message: str
) -> None:
    assert refusal(*arguments) == message


@pytest.mark.parametrize(
    "saving", ["--ddp-save-baseline", "--ddp-extend-baseline"]
)
def test_a_reason_is_one_line_of_printable_text(
    read: Callable[..., Settings], saving: str
) -> None:
    settings = read(
        saving, "--ddp-reason=Clip gradients\n\n  (#12)\x1b[2J \udcff"
    )
    assert settings.why == r"Clip gradients (#12)\x1b[2J \udcff"
    assert read(saving).why is None


@pytest.mark.parametrize(
    "option", ["--ddp-json", "--ddp-markdown", "--ddp-html"]
)
def test_a_folder_cannot_take_a_report(
    refusal: Callable[..., str], pytester: pytest.Pytester, option: str
) -> None:
    folder = pytester.mkdir("out")
    assert (
        refusal(f"{option}=out")
        == f"{option}: {str(folder)!r}: is a folder: name the file to write"
    )


@pytest.mark.parametrize(
    "option", ["--ddp-history", "--ddp-trace", "--ddp-baseline-dir"]
)
def test_a_file_cannot_take_what_needs_a_folder(
    refusal: Callable[..., str], pytester: pytest.Pytester, option: str
) -> None:
    file = pytester.path / "taken"
    file.touch()
    assert (
        refusal(f"{option}=taken")
        == f"{option}: {str(file)!r}: is a file: name a folder"
    )


@pytest.mark.parametrize("option", ["--ddp-json", "--ddp-baseline-dir"])
def test_a_path_that_cannot_be_looked_at_is_refused_when_it_is_used(
    read: Callable[..., Settings], option: str
) -> None:
    assert read(None, f"{option}={'a' * 300}")


COMPARISONS = [
    ("--ddp-against", "HEAD"),
    ("--ddp-against", "self"),
    ("--ddp-against-python", "sh"),
    ("--ddp-against-env", "A=1"),
    ("--ddp-against-option", "-v"),
]


@pytest.mark.parametrize(
    "other", ["--ddp-save-baseline", "--ddp-extend-baseline", "--ddp-disable"]
)
@pytest.mark.parametrize(("option", "value"), COMPARISONS)
def test_a_comparison_with_another_version_neither_saves_nor_is_disabled(
    refusal: Callable[..., str], option: str, value: str, other: str
) -> None:
    assert (
        refusal(f"{option}={value}", other)
        == f"{option}: {other!r}: they exclude each other: use only one"
    )


@pytest.mark.parametrize(("option", "value"), COMPARISONS[2:])
def test_the_same_code_is_not_to_be_otherwise(
    refusal: Callable[..., str], option: str, value: str
) -> None:
    assert (
        refusal("--ddp-against=self", f"{option}={value}")
        == f"--ddp-against: 'self': has the same code on both sides, {option} does not: use"
        " only one"
    )


@pytest.mark.parametrize(
    "given",
    ["", " ", "--", "-v --", "--ddp-against=HEAD", "-v --ddp-against-env=A=1"],
)
def test_what_says_nothing_to_the_other_side_is_refused(
    refusal: Callable[..., str], given: str
) -> None:
    assert refusal(f"--ddp-against-option={given}").startswith(
        "--ddp-against-option: "
    )


def test_phases_and_the_wait_of_ranks_may_be_limited(
    read: Callable[..., Settings],
) -> None:
    limits = ["forward:5%", "rank_wait:1ms", "cpu_p50:10%"]
    assert metrics(read(f"--ddp-threshold={','.join(limits)}")) == limits


def test_a_limit_that_the_asked_steps_cannot_support_says_what_it_needs(
    refusal: Callable[..., str], read: Callable[..., Settings]
) -> None:
    asked = "--ddp-steps=10", "--ddp-launches=2"
    assert refusal("--ddp-threshold=p50:5%,p99:5%", *asked).startswith(
        "--ddp-threshold: 'p99:5%': needs at least 299 timed steps"
    )
    assert metrics(
        read("--ddp-threshold=p99:5%", "--ddp-steps=150", "--ddp-launches=2")
    ) == ["p99:5%"]


def test_a_limit_needs_the_steps_that_a_marker_asks_for(
    read: Callable[..., Settings],
) -> None:
    """They may be more than those of the run, or fewer."""
    settings = read("--ddp-threshold=p99:20%")
    check_limits(with_markers(settings, [mark(steps=100)]))
    with pytest.raises(MarkerError, match="needs at least 299 timed steps"):
        check_limits(with_markers(settings, [mark(steps=10)]))
    with pytest.raises(OptionError, match="30 x 5 = 150 were asked") as caught:
        check_limits(with_markers(settings, [mark(world_size=4)]))
    assert not isinstance(caught.value, MarkerError)
    settings = read("--ddp-threshold=p50:5%")
    with pytest.raises(MarkerError, match="a limit needs at least 2 launches"):
        check_limits(with_markers(settings, [mark(launches=1)]))


def test_a_marker_may_ask_for_one_launch_where_baselines_are_saved(
    read: Callable[..., Settings], refusal: Callable[..., str]
) -> None:
    """It may have no gate, and then nothing of it is saved."""
    settings = read("--ddp-save-baseline")
    assert with_markers(settings, [mark(launches=1)]).launches == 1
    assert "at least 2 with --ddp-save-baseline" in refusal(
        "--ddp-save-baseline", "--ddp-launches=1"
    )


def test_a_limit_needs_more_than_one_launch(
    refusal: Callable[..., str], pytester: pytest.Pytester
) -> None:
    pytester.makeini("[pytest]\nddp_threshold = p50:5%\n")
    assert (
        refusal("--ddp-launches=1")
        == "ini key ddp_threshold: 'p50:5%': a limit needs at least 2 launches, 1 was asked"
    )


def test_a_default_limit_without_support_is_not_refused(
    read: Callable[..., Settings],
) -> None:
    assert metrics(read("--ddp-launches=1", "--ddp-steps=1")) == [
        "p10:10%",
        "p50:10%",
        "mean:25%",
        "device:3%",
    ]


def test_a_disabled_run_needs_no_support_for_its_limits(
    read: Callable[..., Settings],
) -> None:
    settings = read(
        "--ddp-disable", "--ddp-threshold=p99:5%", "--ddp-launches=1"
    )
    assert with_markers(settings, [mark(steps=1)]).disable


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("ddp_steps = two", f"ini key ddp_steps: 'two': {WHOLE}"),
        ("ddp_steps = 0", f"ini key ddp_steps: 0: {WHOLE}"),
        ("ddp_steps =", f"ini key ddp_steps: '': {WHOLE}"),
        (
            "ddp_timeout = soon",
            "ini key ddp_timeout: 'soon': seconds, a number above 0 and up to 1000000000",
        ),
        (
            "ddp_timing = fre",
            "ini key ddp_timing: 'fre': one of auto, free, step; did you mean free?",
        ),
    ],
)
def test_a_wrong_ini_value_names_its_key(
    refusal: Callable[..., str],
    pytester: pytest.Pytester,
    line: str,
    message: str,
) -> None:
    pytester.makeini(f"[pytest]\n{line}\n")
    assert refusal() == message


def test_a_wrong_override_is_not_covered_up_by_the_ini_file(
    refusal: Callable[..., str], pytester: pytest.Pytester
) -> None:
    pytester.makeini("[pytest]\nddp_steps = 50\n")
    assert (
        refusal("-o", "ddp_steps=two") == f"ini key ddp_steps: 'two': {WHOLE}"
    )


# --- markers

ARGUMENTS = (
    "world_size, nodes, trainers, parameter_servers, backend, device, warmup, steps, min_time,"
    " launches, max_launches, threshold, timing, turns, timeout"
)


def test_a_marker_wins_over_everything(
    read: Callable[..., Settings], pytester: pytest.Pytester
) -> None:
    pytester.makeini("[pytest]\nddp_steps = 60\n")
    run = read("--ddp-world-size=1,4", "--ddp-warmup=9")
    settings = with_markers(
        run,
        [
            mark(
                world_size=4,
                backend="gloo",
                threshold="p50:5%",
                steps=50,
                launches=6,
                warmup=4,
                timeout=120,
                device="cpu",
                timing="free",
                turns="launches",
                max_launches=12,
                trainers=4,
                parameter_servers=1,
                min_time=3,
                nodes=2,
            )
        ],
    )
    assert settings.world_sizes == (4,)
    assert (settings.backend, settings.device) == ("gloo", "cpu")
    assert (settings.timing, settings.turns) == ("free", "launches")
    assert (
        settings.steps,
        settings.min_seconds,
        settings.launches,
        settings.warmup,
    ) == (50, 3.0, 6, 4)
    assert settings.limits == (Limit(metric="p50", value=0.05, unit="%"),)
    assert settings.timeout_seconds == 120.0
    plans = [
        make_plan(of, world_size=4, backend="gloo", device="cpu")
        for of in (settings, run)
    ]
    assert [plan.timeout_setting for plan in plans] == [
        "@pytest.mark.ddp(timeout=...)",
        "--ddp-timeout",
    ]
    from_marker = {
        name for name, source in settings.sources.items() if source == "marker"
    }
    assert from_marker == {row.field for row in ROWS if row.marker}
    assert run.sources["world_sizes"] == "command line", (
        "the run's own settings stay"
    )


def test_the_closest_marker_wins_argument_by_argument(
    read: Callable[..., Settings],
) -> None:
    settings = with_markers(
        read("--ddp-launches=8"), [mark(steps=50), mark(steps=60, warmup=7)]
    )
    assert (settings.steps, settings.warmup, settings.launches) == (50, 7, 8)
    few = with_markers(read("--ddp-launches=30"), [mark(launches=5)])
    assert (few.launches, few.max_launches) == (5, 20)
    assert settings.sources["launches"] == "command line"


def test_a_marker_may_list_its_limits(read: Callable[..., Settings]) -> None:
    assert metrics(
        with_markers(read(), [mark(threshold=["p50:5%", "p75:2ms"])])
    ) == [
        "p50:5%",
        "p75:2ms",
    ]


def test_a_marker_takes_keywords_only(read: Callable[..., Settings]) -> None:
    assert (
        marker_refusal(read(), 4)
        == f"@pytest.mark.ddp(...): 4: arguments are given by keyword: {ARGUMENTS}"
    )


def test_a_misspelt_argument_gets_the_nearest_name(
    read: Callable[..., Settings],
) -> None:
    assert (
        marker_refusal(read(), wrld_size=4)
        == "@pytest.mark.ddp(wrld_size=...): 4: there is no such argument; there are "
        f"{ARGUMENTS}; did you mean world_size?"
    )


def test_the_help_of_the_marker_has_all_arguments() -> None:
    words = (
        f"ddp({ARGUMENTS}): settings of a distributed test, by keyword, over --ddp-* and ini "
        "keys"
    )
    assert words == MARKER_HELP


# --- plans


@pytest.mark.parametrize(
    ("device", "timing"), [("cpu", "step"), ("cuda", "free"), ("xpu", "free")]
)
def test_steps_run_ahead_on_an_accelerator_unless_asked_otherwise(
    read: Callable[..., Settings], device: str, timing: str
) -> None:
    assert (
        make_plan(read(), world_size=2, backend="gloo", device=device).timing
        == timing
    )
    asked = read("--ddp-timing=step")
    assert (
        make_plan(asked, world_size=2, backend="gloo", device=device).timing
        == "step"
    )


def test_disabled_is_one_launch_of_one_step_whatever_a_marker_asks(
    read: Callable[..., Settings],
) -> None:
    settings = with_markers(
        read("--ddp-disable"), [mark(steps=50, launches=7, warmup=9)]
    )
    plan = make_plan(settings, world_size=2, backend="gloo", device="cpu")
    assert (plan.warmup, plan.steps, plan.min_seconds, settings.launches) == (
        0,
        1,
        0.0,
        1,
    )
