"""What is weaker: the comparison of what tests are judged by, and its words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_ddpperf.plugin import remote
from pytest_ddpperf.plugin.items import (
    leaves_tests_out,
    selects_tests,
    words_for_all,
)
from pytest_ddpperf.plugin.judged import read_judged, why_not_judged
from pytest_ddpperf.plugin.state import RUN
from pytest_ddpperf.records.guard import (
    ALL_FILES,
    EVERY_SIZE,
    Judged,
    JudgedTest,
    Kind,
    Loosened,
)
from pytest_ddpperf.records.outcome import RunInfo
from pytest_ddpperf.records.plan import TIME_LIMITS, Limit
from pytest_ddpperf.report import guard as words
from pytest_ddpperf.verdict.guard import Guard, raised_limits, since_baseline
from pytest_ddpperf.wire.source_trees import Trees
from tests.reports import Drawn, against_baseline

A = "tests/test_a.py::test_a"


def limit(text: str) -> Limit:
    metric, _, amount = text.partition(":")
    return Limit(metric=metric, value=float(amount[:-1]) / 100, unit="%")


def judged_test(nodeid: str = A, **fields: Any) -> JudgedTest:
    every: dict[str, Any] = {
        "file": nodeid.partition("::")[0],
        "why_not": "",
        "labels": ("",),
        "limits": (limit("p50:10%"),),
        "settings": {"launches": 5, "backend": "auto"},
        "body": "1",
    }
    return JudgedTest(nodeid=nodeid, **{**every, **fields})


BEFORE = judged_test()


def lines(
    now: JudgedTest | None = BEFORE,
    *,
    before: JudgedTest = BEFORE,
    measured: Mapping[str, bool] | None = None,
    others: Sequence[JudgedTest] = (),
    **fields: Any,
) -> list[str]:
    """Return what is told of one test."""
    tests = [*others] if now is None else [now, *others]
    every: dict[str, Any] = {
        "before": Judged(tests=(before,)),
        "now": Judged(tests=tuple(tests)),
        "since": "main",
        "files": (),
        "measured": {} if measured is None else {A: measured},
        **fields,
    }
    found = Guard(**every).find()
    told = words.lines(RunInfo(guard=tuple(found)))
    return [line.removeprefix("guard: ") for line in told]


def not_compared(why: str, name: str = "test_a.py::test_a") -> list[str]:
    return [f"1 test that main compared is not compared now: {name} ({why})"]


def test_nothing_is_told_of_a_test_that_is_the_same() -> None:
    assert lines(measured={"": True}) == []
    assert lines(measured=None) == [], "it did not run, or it failed"


def test_a_test_whose_module_is_broken_is_not_called_removed() -> None:
    broken = lines(None, failed={"tests/test_a.py", "test_b.py::test_b"})
    assert broken == not_compared("its module could not be collected")
    assert lines(None, failed={"test_b.py"}) == not_compared("removed")


@pytest.mark.parametrize(
    "now",
    [
        {"limits": (limit("p50:5%"), limit("p90:10%"))},
        {"settings": {"launches": 6, "backend": "auto"}},
        {"limits": (), "settings": {}},  # its marker is invalid, so it fails
        {"overridden": ()},
    ],
)
def test_what_is_stricter_is_not_told(now: dict[str, Any]) -> None:
    assert lines(judged_test(**now)) == []


@pytest.mark.parametrize(
    ("now", "told"),
    [
        (
            {"limits": (limit("p50:300%"),), "limits_from": "pytest.ini"},
            "limit of test_a.py::test_a raised: p50 10 % -> 300 % (pytest.ini)",
        ),
        (
            {"limits": (limit("p90:1%"),)},
            "limit of test_a.py::test_a raised: p50 10 % -> none",
        ),
        (
            {"limits": (Limit(metric="p50", value=9.0, unit="ms"),)},
            "limit of test_a.py::test_a raised: p50 10 % -> 9000 ms",
        ),
        (
            {"limits": (limit("p50:10%"), limit("all_reduce.bytes:90%"))},
            "limit of test_a.py::test_a raised: all_reduce.bytes 0 % -> 90 %",
        ),
        (
            {"settings": {"launches": 2, "backend": "gloo"}},
            (
                "test_a.py::test_a measured otherwise than in main: launches 5 -> 2, backend"
                " auto -> gloo"
            ),
        ),
        (
            {"settings": {"launches": 3, "ranks": "16"}},
            (
                "test_a.py::test_a measured otherwise than in main: launches 5 -> 3, ranks"
                " 2 -> 16"
            ),
        ),
        (
            {"overridden": ("ddp_benchmark (conftest)",)},
            (
                "a fixture of test_a.py::test_a is not the plugin's now: ddp_benchmark"
                " (conftest)"
            ),
        ),
    ],
)
def test_settings_that_are_weaker_are_told(
    now: dict[str, Any], told: str
) -> None:
    ranks = {**BEFORE.settings, "ranks": "2"}
    before = replace(BEFORE, settings=ranks)
    assert lines(judged_test(**now), before=before) == [told]


@pytest.mark.parametrize(
    "why", ['skipped: "flaky"', 'expected to fail: "slow"']
)
def test_a_mark_that_takes_a_test_out_is_told_with_its_reason(why: str) -> None:
    assert lines(judged_test(why_not=why)) == not_compared(why)
    both = judged_test(why_not=why)
    assert lines(both, before=both) == [], "it was not compared before either"


def test_a_test_that_is_gone_is_told_unless_the_call_selects() -> None:
    assert lines(None) == not_compared("removed")
    assert lines(None, selects=True) == []


def test_a_renamed_test_is_paired_by_its_function_and_parameters() -> None:
    new = judged_test("tests/test_b.py::test_new", limits=(limit("p50:20%"),))
    assert lines(None, others=[new]) == [
        "renamed since main: test_a.py::test_a -> test_b.py::test_new",
        "limit of test_b.py::test_new raised: p50 10 % -> 20 %",
    ]
    assert lines(None, others=[new], selects=True) == []
    for other in (
        replace(new, body="2"),
        replace(new, nodeid=f"{new.nodeid}[4]"),
    ):
        assert lines(None, others=[other]) == not_compared("removed")
    copy = judged_test("tests/test_b.py::test_copy")
    assert lines(BEFORE, others=[copy]) == []


def test_a_test_that_gets_several_numbers_of_ranks_is_the_one_with_as_many() -> (
    None
):
    before = judged_test("tests/test_a.py::test_a[bf16]", settings={"ranks": 2})
    others = [
        judged_test(
            f"tests/test_a.py::test_a[{name}]", settings={"ranks": ranks}
        )
        for name, ranks in (
            ("ws1-bf16", 1),
            ("ws2-bf16", 2),
            ("ws2-fp32", 2),
            ("ws4-bf16", 4),
        )
    ]
    assert lines(None, before=before, others=others) == [
        "renamed since main: test_a.py::test_a[bf16] -> test_a.py::test_a[ws2-bf16]"
    ]


def test_a_limit_on_the_device_is_none_where_all_run_on_the_cpu() -> None:
    before = judged_test(limits=(limit("p50:10%"), limit("device:3%")))
    assert lines(before=before, has_device=False) == []
    assert lines(before=before) == [
        "limit of test_a.py::test_a raised: device 3 % -> none"
    ]


def test_a_test_is_deselected_by_what_differs_not_by_a_plugin_that_shards() -> (
    None
):
    now = judged_test(why_not="deselected")
    assert lines(now) == []
    assert lines(now, files=["tests/test_a.py"]) == [
        "tests/test_a.py differs from main's; both sides ran the current one"
    ]
    told = not_compared("deselected")[0]
    assert told in lines(now, files=["pytest.ini"])
    # --lf and --sw deselect, too
    assert told not in lines(now, files=["pytest.ini"], selects=True)
    assert told in lines(replace(now, marks=("slow",)))


@pytest.mark.parametrize(
    ("labels", "measured", "told"),
    [
        (("", "two"), {"": True, "two": True}, []),
        (
            ("", "two"),
            {"": True},
            not_compared("removed", "test_a.py::test_a (two)"),
        ),
        ((), {"": False}, []),
        (("",), {"": False}, not_compared("gate=False")),
        (("",), {}, not_compared("measures nothing")),
        ((EVERY_SIZE,), {"8KiB": True, "1MiB": True}, []),
        ((EVERY_SIZE,), {"8KiB": False}, not_compared("gate=False")),
    ],
)
def test_measurements_without_a_gate_are_told_where_the_function_differs(
    labels: tuple[str, ...], measured: dict[str, bool], told: list[str]
) -> None:
    before = judged_test(labels=labels)
    now = judged_test(body="2")
    assert lines(now, before=before, measured=measured) == told
    assert lines(before, before=before, measured=measured) == []


@pytest.mark.parametrize(
    ("labels", "told"),
    [
        (None, []),
        (("two", ""), []),
        (("",), not_compared("no gate is left", "test_a.py::test_a (two)")),
        ((), not_compared("no gate is left")),
    ],
)
def test_measurements_that_a_function_lacks_are_told_if_it_did_not_run(
    labels: tuple[str, ...] | None, told: list[str]
) -> None:
    """As where nothing but tests differs, so that nothing is measured."""
    before = judged_test(labels=("", "two"))
    now = judged_test(body="2", labels=labels)
    assert lines(now, before=before) == told
    assert lines(replace(now, body="1"), before=before) == []


def test_of_two_named_collectives_one_that_is_gone_is_told() -> None:
    before = judged_test(labels=("bf16-*", "fp32-*"))
    now = judged_test(body="2")
    odd = judged_test(labels=("fp[16]-*",))
    assert lines(now, before=odd, measured={"fp[16]-8KiB": True}) == []
    sizes = {"bf16-8KiB": True, "bf16-1MiB": True}
    gone = not_compared("removed", "test_a.py::test_a (fp32-*)")
    assert lines(now, before=before, measured=sizes) == gone
    off = not_compared("gate=False", "test_a.py::test_a (fp32-*)")
    measured = {**sizes, "fp32-8KiB": False}
    assert lines(now, before=before, measured=measured) == off
    measured = {**sizes, "fp32-8KiB": True}
    assert lines(now, before=before, measured=measured) == []


def test_a_test_that_needs_more_devices_is_told_if_it_did_not_before() -> None:
    """Else the other version's would have been skipped on this machine, too."""
    edited = judged_test(body="2")
    assert lines(edited, measured={}, lacking={A}) == []
    more = judged_test(settings={"ranks": 1000, "backend": "auto"})
    assert lines(more, measured={}, lacking={A}) == not_compared(
        "measures nothing"
    )


def test_what_made_a_run_red_is_told() -> None:
    guard = Guard(
        before=Judged(red=("no-baseline", "regressed")),
        now=Judged(red=("regressed",)),
        since="main",
        files=("conftest.py",),
        measured={},
    )
    assert [*words.lines(RunInfo(guard=tuple(guard.find())))] == [
        "guard: a run of main is red if no-baseline, this one is not",
        "guard: conftest.py differs from main's; both sides ran the current one",
    ]


def test_what_could_not_be_collected_is_told_with_its_last_line() -> None:
    errors = {"tests/test_a.py": "line 1\nE  boom", ALL_FILES: "it died"}
    guard = Guard(
        before=Judged(file_errors=errors),
        now=Judged(),
        since="main",
        files=(),
        measured={},
    )
    assert [*words.lines(RunInfo(guard=tuple(guard.find())))] == [
        (
            "guard: what main's own tests are judged by is unknown, because they cannot be"
            " collected: tests/test_a.py: boom, it died"
        )
    ]


def test_a_line_names_three_tests() -> None:
    found = [
        Loosened(
            kind=Kind.NOT_COMPARED,
            since="main",
            test=f"test_a.py::test_{number}",
            now="removed",
        )
        for number in range(5)
    ]
    (line,) = words.lines(RunInfo(guard=tuple(found)))
    assert line == (
        "guard: 5 tests that main compared are not compared now: test_a.py::test_0 (removed),"
        " test_a.py::test_1 (removed), test_a.py::test_2 (removed), ..."
    )


@pytest.mark.parametrize(
    ("red_before", "red_now", "kind", "compared", "why"),
    [
        ((), (), Kind.LIMIT, 1, ""),
        ((), ("loosened",), Kind.LIMIT, 1, "--ddp-fail-on loosened"),
        (("loosened",), (), Kind.NOT_RED, 1, "--ddp-fail-on loosened"),
        ((), ("loosened",), Kind.MEASURED_LESS, 1, "--ddp-fail-on loosened"),
        ((), ("loosened",), Kind.FIXTURE, 1, "--ddp-fail-on loosened"),
        ((), ("loosened",), Kind.FILE, 1, ""),
        ((), ("loosened",), Kind.NOT_COLLECTED, 1, ""),
        ((), ("loosened",), Kind.RENAMED, 1, ""),
        ((), ("no-baseline",), Kind.NOT_COMPARED, 1, ""),
        (
            (),
            ("no-baseline",),
            Kind.NOT_COMPARED,
            0,
            "nothing is compared any more",
        ),
        (
            ("no-baseline",),
            (),
            Kind.NOT_COMPARED,
            0,
            "nothing is compared any more",
        ),
        ((), (), Kind.NOT_COMPARED, 0, ""),
        ((), ("no-baseline",), Kind.LIMIT, 0, ""),
    ],
)
def test_a_run_is_red_by_the_settings_of_either_side(
    red_before: tuple[str, ...],
    red_now: tuple[str, ...],
    kind: Kind,
    compared: int,
    why: str,
) -> None:
    guard = Guard(
        before=Judged(tests=(BEFORE,), red=red_before),
        now=Judged(red=red_now),
        since="main",
        files=(),
        measured={},
    )
    found = [Loosened(kind=kind, since="main", test=A)]
    assert guard.why_red(found, compared=compared) == why
    info = RunInfo(guard=tuple(found), too_weak=why)
    assert (f"guard: the run fails: {why}" in words.lines(info)) is bool(why)


def test_a_run_that_lost_all_measurements_with_names_is_red() -> None:
    test = replace(BEFORE, labels=("fwd", "bwd"))
    guard = Guard(
        before=Judged(tests=(test,)),
        now=Judged(red=("no-baseline",)),
        since="main",
        files=(),
        measured={},
    )
    lost = [
        Loosened(kind=Kind.NOT_COMPARED, since="main", test=f"{A} ({label})")
        for label in test.labels
    ]
    assert guard.why_red(lost, compared=0) == "nothing is compared any more"
    assert guard.why_red(lost[:1], compared=0) == ""


@pytest.mark.parametrize(
    ("arguments", "selects"),
    [
        ((), False),
        (("--lf",), True),
        (("--stepwise",), True),
        (("--sw-skip",), True),
        (("-o", "addopts=--lf"), False),
        (("test_a.py::test_a",), True),
        (("test_a.py",), False),
    ],
)
def test_the_last_run_selects_tests_if_the_call_says_so(
    arguments: tuple[str, ...], selects: bool
) -> None:
    """What the ini file says holds for everybody."""
    config: Any = SimpleNamespace(
        args=[each for each in arguments if each.startswith("test_a")],
        ArgsSource=pytest.Config.ArgsSource,
        args_source=pytest.Config.ArgsSource.ARGS,
        invocation_params=SimpleNamespace(args=arguments, dir=Path()),
        getini=lambda name: [],
        pluginmanager=pytest.PytestPluginManager(),
    )
    assert selects_tests(config) is selects


@pytest.mark.parametrize(
    ("plugin", "option", "words"),
    [
        ("pytest-split", "splits", ["--splits=1", "--group=1"]),
        (
            "test-groups",
            "test-group",
            ["--test-group-count=1", "--test-group=1"],
        ),
        ("pytest-testmon", "testmon", ["--no-testmon"]),
    ],
)
def test_a_call_that_a_plugin_gives_a_part_of_all_tests_selects_tests(
    plugin: str, option: str, words: list[str]
) -> None:
    """Wherever its option is set."""
    plugins, given = pytest.PytestPluginManager(), {option: 2}
    config: Any = SimpleNamespace(
        args=[],
        ArgsSource=pytest.Config.ArgsSource,
        args_source=pytest.Config.ArgsSource.TESTPATHS,
        invocation_params=SimpleNamespace(args=(), dir=Path()),
        getini=lambda name: [],
        getoption=given.get,
        pluginmanager=plugins,
    )
    assert not selects_tests(config), "the option is another plugin's"
    plugins.register(object(), plugin)
    assert selects_tests(config)
    assert [*words_for_all(config)] == words
    given.clear()
    assert not selects_tests(config)


@pytest.mark.parametrize("by_ini", ["test_a.py::test_a", "@perf.txt"])
@pytest.mark.parametrize(
    ("arguments", "selects"),
    [((), False), (("tests",), False), (("test_a.py::test_a",), True)],
)
def test_a_test_that_the_ini_file_names_is_not_selected_by_the_call(
    pytester: pytest.Pytester,
    arguments: tuple[str, ...],
    selects: bool,
    by_ini: str,
) -> None:
    """pytest takes words of `addopts` for words of the command line."""
    pytester.mkdir("tests")
    (pytester.path / "perf.txt").write_text("test_a.py::test_a\n")
    pytester.makeini(f"[pytest]\naddopts = {by_ini} -q")
    config = pytester.parseconfig(*arguments)
    assert "test_a.py::test_a" in config.args
    assert selects_tests(config) is selects


@pytest.mark.parametrize(
    "given",
    ["--lf", "-k fast", "--shard-id 0"],
)
def test_what_the_variable_selects_the_call_does(
    monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    """Also where the ini file selects, too."""
    config: Any = SimpleNamespace(
        args=[],
        ArgsSource=pytest.Config.ArgsSource,
        args_source=pytest.Config.ArgsSource.TESTPATHS,
        invocation_params=SimpleNamespace(args=(), dir=Path()),
        getini=lambda name: ["-m", "not slow"],
        pluginmanager=pytest.PytestPluginManager(),
    )
    run: Any = SimpleNamespace(config=config, deselected=["a"])
    monkeypatch.setenv("PYTEST_ADDOPTS", "--ignore-unknown-dependency")
    assert not leaves_tests_out(run)
    monkeypatch.setenv("PYTEST_ADDOPTS", given)
    assert leaves_tests_out(run)


def test_what_a_file_of_the_ini_file_selects_the_call_does_not(
    tmp_path: Path,
) -> None:
    config: Any = SimpleNamespace(
        args=[],
        ArgsSource=pytest.Config.ArgsSource,
        args_source=pytest.Config.ArgsSource.TESTPATHS,
        invocation_params=SimpleNamespace(args=(), dir=tmp_path),
        getini=lambda name: ["@perf.txt"],
        pluginmanager=pytest.PytestPluginManager(),
    )
    run: Any = SimpleNamespace(config=config, deselected=["a"])
    (tmp_path / "perf.txt").write_text("-k\nsecond\n")
    assert not leaves_tests_out(run)
    (tmp_path / "perf.txt").write_text("-q\n")
    assert leaves_tests_out(run), "something else has deselected it"


def test_a_fixture_that_was_overridden_before_is_no_change() -> None:
    both = judged_test(overridden=("ddp_benchmark (conftest)",))
    assert lines(both, before=both) == []


def test_fewer_launches_than_the_newest_session_has_are_told() -> None:
    outcome = against_baseline("test_a", Drawn(seed=1), Drawn(seed=100))
    session, *_ = outcome.sessions
    sessions = replace(session, launches=2), replace(session, launches=5)
    outcome = replace(outcome, launches=2, sessions=sessions)
    found = [
        each
        for each in since_baseline([outcome])
        if each.kind is Kind.MEASURED_LESS
    ]
    (line,) = words.lines(RunInfo(guard=tuple(found)))
    assert line.endswith(
        "measured otherwise than for the baseline: launches 5 -> 2"
    )


def test_the_annotation_of_a_red_run_is_an_error() -> None:
    found = Loosened(kind=Kind.FILE, since="main", name="conftest.py")
    for why, level in (("", "warning"), ("--ddp-fail-on loosened", "error")):
        (command,) = words.annotated(RunInfo(guard=(found,), too_weak=why))
        assert command.startswith(f"::{level} title=guard::")


def test_limits_that_hold_unless_they_are_named_can_be_raised() -> None:
    now = limit("p50:10%"), limit("wall:500%"), limit("tps:90%")
    assert [*raised_limits((now[0],), now)] == [
        ("wall", "10 %", "500 %"),
        ("tps", "10 %", "90 %"),
    ]


def test_a_limit_on_the_wall_time_is_gone_where_only_another_is_named() -> None:
    default = limit("wall:10%"), limit("tps:10%")
    named = (limit("tps:5%"),)
    assert [*raised_limits(default, named)] == [("wall", "10 %", "none")]
    # a command has the default ones unless any is named
    unnamed = tuple(replace(each, default=True) for each in TIME_LIMITS)
    assert [*raised_limits(default[:1], unnamed)] == []
    strict = limit("wall:5%"), *unnamed
    assert [*raised_limits(strict, unnamed)] == [("wall", "5 %", "10 %")]


def test_a_baseline_had_a_limit_on_each_figure_that_it_has() -> None:
    now = limit("p50:10%"), limit("wall:500%"), limit("tps:90%")
    assert [*raised_limits(now[:1], now, all_known=True)] == []
    had = limit("p50:10%"), limit("tps:50%")
    assert [*raised_limits(had, now, all_known=True)] == [
        ("tps", "50 %", "90 %")
    ]


def test_nothing_is_known_of_limits_that_were_not_kept() -> None:
    assert [*raised_limits((), (limit("p50:10%"),))] == []


# --- what is read from collected tests


@pytest.fixture
def judged(pytester: pytest.Pytester) -> Callable[..., dict[str, JudgedTest]]:
    """What the tests of a file are judged by, by name."""

    def read(text: str, *arguments: str) -> dict[str, JudgedTest]:
        file = pytester.makepyfile(text)
        items, recorder = pytester.inline_genitems(
            "-p", "no:randomly", *arguments
        )
        top = str(pytester.path)
        del file, recorder
        run = items[0].config.stash[RUN]
        trees = Trees(current=top, base=top, kept=())
        found = read_judged(run, trees)
        return {test.nodeid.partition("::")[2]: test for test in found.tests}

    return read


TESTS = """
import pytest

def test_plain(ddp_benchmark):
    ddp_benchmark(None)

def test_named(ddp_benchmark):
    for _ in range(1):
        ddp_benchmark.script("train.py", name="one")
    ddp_benchmark(None, gate=True, name="two")
    ddp_benchmark(None, gate=False, name="three")

def test_dynamic_name(ddp_benchmark):
    ddp_benchmark(None, name=f"size {1}")

NAMES = pytest

def test_attribute(ddp_benchmark):
    ddp_benchmark(None, name=NAMES.__name__)

def test_passed_on(ddp_benchmark):
    ddp_benchmark(None)
    print(ddp_benchmark)

def test_keywords(ddp_benchmark):
    ddp_benchmark(None, **{})

def test_sizes(collective_benchmark):
    collective_benchmark("all_reduce", [1])

def test_named_sizes(collective_benchmark):
    collective_benchmark("all_reduce", [1], name="bf16")

@pytest.fixture
def measure(ddp_benchmark):
    return ddp_benchmark

def test_by_a_fixture(measure, ddp_run):
    measure(None)

def test_by_keyword(*, ddp_benchmark):
    ddp_benchmark(None, name="one")

async def test_async(ddp_benchmark):
    def setup(ctx): ...
    ddp_benchmark(setup)

@pytest.mark.skipif(True, reason="flaky")
def test_skipped(ddp_benchmark):
    ddp_benchmark(None)

@pytest.mark.xfail(reason="slow")
@pytest.mark.ddp(world_size=(2, 4), backend="gloo", launches=7, threshold="p50:5%")
def test_expected(ddp_benchmark):
    ddp_benchmark(None)

@pytest.mark.ddp(wrold_size=1)
def test_typo(ddp_benchmark):
    ddp_benchmark(None)

@pytest.mark.parametrize("n", [1])
def test_expected_body(ddp_benchmark, n):
    ddp_benchmark(None)

class TestClass:
    @pytest.fixture
    def rpc_benchmark(self):
        return None

    def test_rpc(self, rpc_benchmark):
        rpc_benchmark(None)

    def test_text(self, ddp_benchmark):
        ddp_benchmark('''
a line at the margin
''')

def test_reference(ddp_benchmark):
    ddp_benchmark(None, reference=None)

def test_only_measured(ddp_benchmark):
    ddp_benchmark(None, gate=False)

def test_run(ddp_run):
    pass
"""


def test_a_measurement_that_has_a_reference_now_is_not_compared() -> None:
    now = judged_test(body="2")
    both = {"measured": {"": True}, "references": {(A, "")}}
    assert lines(now, **both) == not_compared("it has a reference")
    was_so = replace(BEFORE, labels=())
    assert lines(now, before=was_so, **both) == []


def test_a_condition_skips_a_test_by_the_name_of_its_baselines(
    pytester: pytest.Pytester,
) -> None:
    """Whatever world sizes the run has."""
    pytester.makepyfile(
        test_it="""
        import pytest
        @pytest.mark.ddp(world_size=(4, 8))
        @pytest.mark.skipif(True, reason="no")
        def test_a(ddp_benchmark): ...
        def test_b(ddp_benchmark): ...
        @pytest.mark.skipif(False, reason="no")
        @pytest.mark.skip("flaky")
        def test_c(ddp_benchmark): ...
        @pytest.mark.skipif(False, reason="no")
        @pytest.mark.xfail(run=False)
        def test_d(ddp_benchmark): ...
        """
    )
    items, _ = pytester.inline_genitems("-p", "no:randomly")
    run = items[0].config.stash[RUN]
    run.items = items
    assert dict(why_not_judged(run)) == {
        ("test_it", "test_a"): "",
        ("test_it", "test_c"): 'skipped: "flaky"',
        ("test_it", "test_d"): 'expected to fail: ""',
    }


def test_limits_of_the_ini_file_have_its_name(
    pytester: pytest.Pytester, judged: Callable[..., dict[str, JudgedTest]]
) -> None:
    pytester.makeini("[pytest]\nddp_threshold = p50:7%\n")
    (test,) = judged("def test_a(ddp_benchmark): ddp_benchmark(None)").values()
    assert (test.limits, test.limits_from) == ((limit("p50:7%"),), "tox.ini")


def test_variables_that_the_ini_file_sets_by_a_plugin_are_a_part_of_it(
    pytester: pytest.Pytester,
) -> None:
    pytester.makeconftest(
        "def pytest_addoption(parser): parser.addini('env', '', 'linelist')"
    )
    pytester.makepyfile("def test_a(ddp_benchmark): ddp_benchmark(None)")
    top = str(pytester.path)
    trees = Trees(current=top, base=top, kept=())
    found = []
    for value in "112":
        pytester.makeini(f"[pytest]\nenv = N={value}\n")
        items, _ = pytester.inline_genitems("-p", "no:randomly")
        found.append(read_judged(items[0].config.stash[RUN], trees).ini)
    assert found[0] == found[1] != found[2]


def test_limits_on_what_a_test_lacks_leave_it_the_default_ones(
    pytester: pytest.Pytester, judged: Callable[..., dict[str, JudgedTest]]
) -> None:
    pytester.makeini("[pytest]\nddp_threshold = busbw:5%,rpc.bytes:1%\n")
    found = judged(
        "def test_a(ddp_benchmark): ddp_benchmark(None)\n"
        "def test_b(collective_benchmark): collective_benchmark('all_reduce')\n"
        "def test_c(rpc_benchmark): rpc_benchmark(None)\n"
    )
    metrics = {
        name: [each.metric for each in test.limits]
        for name, test in found.items()
    }
    assert metrics == {
        "test_a": [each.metric for each in TIME_LIMITS],
        "test_b": ["busbw"],
        "test_c": ["rpc.bytes"],
    }


def test_a_test_shows_what_it_is_judged_by(
    judged: Callable[..., dict[str, JudgedTest]],
) -> None:
    found = judged(TESTS)
    assert {name: test.labels for name, test in found.items()} == {
        "test_plain": ("",),
        "test_named": ("two", "one"),
        "test_dynamic_name": None,
        "test_attribute": None,
        "test_passed_on": None,
        "test_keywords": None,
        "test_sizes": ("*",),
        "test_named_sizes": ("bf16-*",),
        "test_by_a_fixture": None,
        "test_by_keyword": ("one",),
        "test_async": ("",),
        "TestClass::test_text": ("",),
        "test_skipped": ("",),
        "test_expected[ws2]": ("",),
        "test_expected[ws4]": ("",),
        "test_typo": ("",),
        "test_expected_body[1]": ("",),
        "TestClass::test_rpc": ("",),
        "test_reference": (),
        "test_only_measured": (),
    }
    expected = found["test_expected[ws4]"]
    assert expected.why_not == 'expected to fail: "slow"'
    assert expected.settings == {
        "ranks": "4",
        "parameter-servers": "0",
        "launches": 7,
        "max-launches": 20,
        "steps": 30,
        "min-time": 1.0,
        "backend": "gloo",
        "device": "auto",
        "timing": "auto",
        "turns": "auto",
        "warmup": "5",
    }
    assert (expected.limits, expected.limits_from) == (
        (limit("p50:5%"),),
        "marker",
    )
    assert expected.marks == ("ddp", "xfail")
    assert expected.nodes is None
    assert found["test_skipped"].why_not == 'skipped: "flaky"'
    assert found["test_typo"].settings == {}
    rpc = found["TestClass::test_rpc"].settings
    assert (rpc["ranks"], rpc["parameter-servers"]) == ("2", "2")
    (overridden,) = found["TestClass::test_rpc"].overridden
    assert overridden.startswith("rpc_benchmark (test_a_test_shows")
    for name in ("test_plain", "test_expected[ws2]"):
        assert found[name].overridden == ()
    body = found["test_plain"].body
    assert body == found["test_skipped"].body == expected.body
    assert body != found["test_expected_body[1]"].body


def test_a_folder_with_a_package_below_it_holds_more_than_tests(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "src"
    folder.mkdir()
    (folder / "conftest.py").touch()
    assert remote._holds_tests_only(folder)
    # of a namespace
    package = folder / "acme/net"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    assert not remote._holds_tests_only(folder)


def test_what_wraps_a_function_is_a_part_of_it_but_its_marks_are_not(
    judged: Callable[..., dict[str, JudgedTest]],
) -> None:
    """`unittest.skip` measures nothing; marks are compared by themselves."""
    plain, marked, wrapped = (
        judged(
            f"import pytest, unittest\n{decorator}\n"
            "def test_a(ddp_benchmark): ddp_benchmark(None)"
        )["test_a"].body
        for decorator in (
            "",
            "@pytest.mark.ddp(steps=9)",
            "@unittest.skip('flaky')",
        )
    )
    assert plain == marked != wrapped


def test_a_figures_name_may_begin_like_another_metric(
    judged: Callable[..., dict[str, JudgedTest]],
) -> None:
    asked = "busbw_net:5%", "rpc.latency:5%"
    (test,) = judged(
        "import pytest\n"
        f"@pytest.mark.ddp(threshold={','.join(asked)!r})\n"
        "def test_a(ddp_benchmark): ddp_benchmark(None)"
    ).values()
    assert test.limits == tuple(map(limit, asked))


def test_a_test_that_wants_nodes_which_a_machine_lacks_is_lost() -> None:
    now = judged_test(nodes=2)
    guard = Guard(
        before=Judged(tests=(BEFORE,)),
        now=Judged(tests=(now,)),
        since="main",
        files=(),
        measured={A: {}},
        lacking=(A,),
    )
    (lost,) = guard.find()
    assert (lost.kind, lost.now) == (Kind.NOT_COMPARED, "measures nothing")
