"""Mistakes people make: each names the value and what is allowed, and exits as pytest users
expect."""

from __future__ import annotations

import json

import pytest

from tests.integration.conftest import STEP, Run, last_line

NOTHING = "def test_nothing(): pass"
RUNS = "def test_a(ddp_run): ddp_run(print)"
SIZED = f"import pytest\n@pytest.mark.ddp(world_size=2)\n{RUNS}"


@pytest.mark.parametrize(
    ("test", "arguments", "words"),
    [
        (
            NOTHING,
            ["--ddp-threshold=p50:ten"],
            "--ddp-threshold: 'p50:ten': not metric:N%",
        ),
        (
            NOTHING,
            ["--ddp-threshold=busbw:5ms"],
            "--ddp-threshold: 'busbw:5ms': a limit on busbw is a share: busbw:5%",
        ),
        (NOTHING, ["--ddp-timing=fre", "-n", "2"], "did you mean free?"),
        (NOTHING, ["-o", "ddp_steps=many"], "ini key ddp_steps: 'many'"),
        (
            NOTHING,
            ["--ddp-wolrd-size=2"],
            "unrecognized arguments: --ddp-wolrd-size=2",
        ),
        (
            NOTHING,
            ["--ddp-save-baseline", "-n", "2"],
            "--ddp-save-baseline is not supported under xdist: add -n 0",
        ),
        (RUNS, ["--ddp-backend=glo"], "did you mean gloo?"),
        (
            RUNS,
            ["--ddp-device=cuda"],
            "--ddp-device: 'cuda': no accelerator here",
        ),
        (
            SIZED,
            ["--ddp-device=cuda"],
            "--ddp-device: 'cuda': no accelerator here",
        ),
        (
            NOTHING,
            ["--ddp-launches=5", "--ddp-max-launches=4"],
            "--ddp-max-launches: 4: at least --ddp-launches, which is 5",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_an_invalid_option_is_a_usage_error(
    pytester: pytest.Pytester,
    run: Run,
    test: str,
    arguments: list[str],
    words: str,
) -> None:
    if (
        "--ddp-device=cuda" in arguments
        and pytest.importorskip("torch").cuda.is_available()
    ):
        pytest.skip("there is a GPU")
    pytester.makepyfile(test)
    result = run(*arguments, small=False)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert words in result.stderr.str()
    assert "Traceback" not in result.stderr.str()


@pytest.mark.parametrize("workers", [[], ["-n", "1"]], ids=["alone", "xdist"])
def test_tests_in_processes_of_their_own_are_a_usage_error(
    pytester: pytest.Pytester, run: Run, workers: list[str]
) -> None:
    """As pytest-forked has them, whose option is `--forked`."""
    pytester.makeconftest(
        "def pytest_addoption(parser): parser.addoption('--forked', action='store_true')"
    )
    pytester.makepyfile(test_a=RUNS, test_b=NOTHING)
    assert run("--forked", "test_b.py").ret == 0
    result = run("--forked", "test_a.py", *workers)
    assert result.ret == (
        pytest.ExitCode.TESTS_FAILED if workers else pytest.ExitCode.USAGE_ERROR
    )
    said = "--forked is not supported: drop it, ranks are processes of their own anyway"
    assert said in (result.stdout if workers else result.stderr).str()


def test_what_the_machine_lacks_matters_only_to_distributed_tests_that_run(
    pytester: pytest.Pytester, run: Run
) -> None:
    pytester.makepyfile(test_a=RUNS, test_b=NOTHING)
    assert run("--ddp-backend=glo", "test_b.py").ret == 0
    # this starts no rank
    assert run("--ddp-backend=glo", "test_a.py", "--collect-only").ret == 0
    result = run("--ddp-backend=glo", "test_a.py", "-n", "1")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stdout.fnmatch_lines(
        ["usage error: --ddp-backend: 'glo': this torch*"]
    )


LACKING = """
import pytest
@pytest.mark.ddp(world_size=4, device="xpu")
def test_a(ddp_run): assert False
@pytest.mark.ddp(device="xpu")
class TestMethods:
    @pytest.fixture
    def device(self): assert False
    def test_b(self, device, ddp_benchmark): pass
    def test_plain(self): pass
"""


def test_a_test_is_skipped_before_it_runs_into_what_is_missing(
    pytester: pytest.Pytester, run: Run
) -> None:
    pytester.makepyfile(LACKING)
    result = run("-rs")
    result.assert_outcomes(passed=1, skipped=2)
    result.stdout.fnmatch_lines(
        [
            "2 skipped (0 of 0 compared)",
            "*@pytest.mark.ddp(device=...): xpu: *",
        ]
    )


MISTAKEN = """
import pytest, unittest
@pytest.mark.ddp(wrld_size=2)
def test_typo(ddp_benchmark): pass
@pytest.mark.ddp(steps=2)
def test_few_steps(ddp_benchmark): pass
@pytest.mark.ddp(world_size="four")
class TestMethods:
    def test_a(self, rpc_benchmark): pass
    def test_plain(self): pass
@pytest.mark.ddp(2)
class TestCase(unittest.TestCase):
    @pytest.fixture(autouse=True)
    def ranks(self, ddp_run): pass
    def test_b(self): pass
@pytest.mark.skip
@pytest.mark.ddp(wrld_size=2)
def test_skipped(ddp_run): pass
"""


def test_a_mistake_that_a_marker_has_a_part_in_is_its_tests_alone(
    pytester: pytest.Pytester, run: Run
) -> None:
    pytester.makepyfile(
        test_mistaken=MISTAKEN,
        test_module=(
            "import pytest\npytestmark = pytest.mark.ddp(step=9)\ndef test_c(ddp_run): pass"
        ),
    )
    result = run("--ddp-threshold=p90:300%", "--ddp-json=run.json", "-n", "1")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(passed=1, errors=5, skipped=1)
    assert (
        json.loads((pytester.path / "run.json").read_text())["summary"][
            "other_failures"
        ]
        == 5
    )
    # a worker has wrapped its lines
    text = result.stdout.str().replace("\n  ", " ")
    for message in (
        (
            "test_mistaken.py::test_typo (line 2): @pytest.mark.ddp(wrld_size=...): 2: there is no"
            " such argument; "
        ),
        (
            "test_mistaken.py::test_few_steps (line 4): --ddp-threshold: 'p90:300%': needs at least"
            " 29 timed steps"
        ),
        (
            "test_mistaken.py::TestMethods::test_a (line 8): @pytest.mark.ddp(world_size=...):"
            " 'four': whole numbers"
        ),
        (
            "test_mistaken.py::TestCase::test_b (line 14): @pytest.mark.ddp(...): 2: arguments are"
            " given by keyword"
        ),
        "test_module.py::test_c (line 3): @pytest.mark.ddp(step=...): 9: there is no such argument",
    ):
        assert text.count("\n" + message) == 1
    assert "Traceback" not in text


def test_how_xdist_would_distribute_tests_matters_only_if_it_does(
    pytester: pytest.Pytester, run: Run
) -> None:
    """`--dist` is often in `addopts`, and `-n` on the command line."""
    pytester.makepyfile(test_a=NOTHING)
    result = run("--ddp-save-baseline", "--dist=loadfile")
    assert result.ret == 0
    result = run("--ddp-save-baseline", "--dist=loadfile", "-n1")
    assert result.ret == pytest.ExitCode.USAGE_ERROR


def test_a_marker_that_a_conftest_adds_is_not_said_to_win_over_several_sizes(
    pytester: pytest.Pytester, run: Run
) -> None:
    pytester.makeconftest("""
        import pytest

        def pytest_collection_modifyitems(items):
            for item in items:
                item.add_marker(pytest.mark.ddp(world_size=3))
        """)
    pytester.makepyfile(
        "def test_a(ddp_benchmark): ddp_benchmark(lambda ctx: int)"
    )
    result = run("-v", "--ddp-world-size=1,2")
    result.assert_outcomes(passed=2)
    result.stdout.no_fnmatch_line("*the marker's world_size*")


def test_a_marker_that_asks_for_more_than_there_is_skips_and_counts(
    pytester: pytest.Pytester, run: Run
) -> None:
    pytester.makepyfile(
        STEP
        + """
@pytest.mark.ddp(device="cuda", world_size=4096)
def test_devices(ddp_run):
    ddp_run(print)

@pytest.mark.ddp(backend="glo")
def test_mistaken(ddp_run):
    ddp_run(print)

def test_sound(ddp_run):
    assert ddp_run(lambda ctx: ctx.rank) == [0, 1]

@pytest.mark.ddp(backend="nccl", world_size=4096)
def test_backend(ddp_benchmark):
    ddp_benchmark(lasting)

@pytest.mark.ddp(world_size=1, warmup=0, steps=5, launches=2, timeout=200)
def test_marker_wins(ddp_benchmark):
    result = ddp_benchmark(lasting)
    assert (result.world_size, len(result.step_seconds), len(result.step_seconds[0])) == (1, 2, 5)

@pytest.fixture
def by_another(rpc_benchmark): pass

def test_forgets(by_another): pass

def test_skips_before_it_measures(ddp_benchmark): pytest.skip("later")

@pytest.mark.xfail
def test_fails_before_it_measures(ddp_benchmark): assert False

def test_needs_no_measurement(ddp_run): pass
"""
    )
    pytester.makeini("[pytest]\nddp_launches = 4\nddp_world_size = 2\n")
    result = run("-rs", "-v")
    result.assert_outcomes(skipped=3, passed=4, failed=1, xfailed=1)
    result.stdout.fnmatch_lines(
        [
            "SKIPPED*@pytest.mark.ddp(device=...): cuda: *",
            "SKIPPED*(backend=...): nccl: *",
        ]
    )
    assert (
        last_line(result)
        == "1 without baseline, 3 skipped, 1 never measured, 1 other failure (0 of 1 compared)"
    )
    assert [text for text in result.outlines if "never measured: " in text] == [
        "test_a_marker_that_asks_for_more_than_there_is_skips_and_counts.py::test_forgets: never"
        " measured: it does not call its fixture"
    ]
    result.stdout.fnmatch_lines(
        [
            "*::test_mistaken (line *): @pytest.mark.ddp(backend=...): 'glo': this torch*"
        ]
    )
    result.stdout.fnmatch_lines(
        ["*test_marker_wins: the marker's world_size=1 is used, not 2"]
    )


def test_a_unittest_class_cannot_have_several_world_sizes(
    pytester: pytest.Pytester, run: Run
) -> None:
    pytester.makepyfile("""
import unittest, pytest
class TestA(unittest.TestCase):
    @pytest.fixture(autouse=True)
    def ranks(self, ddp_run):
        self.ddp_run = ddp_run
    def test_a(self):
        def function(ctx):
            self.assertEqual(ctx.world_size, 2)
            return ctx.rank
        self.assertEqual(self.ddp_run(function), [0, 1])
""")
    run().assert_outcomes(passed=1)
    result = run("--ddp-world-size=1,2")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        [
            "world sizes 1,2: a unittest.TestCase or a single parameter cannot have several*"
        ]
    )


def test_world_sizes_of_all_parameters_replace_those_of_the_command_line(
    pytester: pytest.Pytester, run: Run
) -> None:
    pytester.makepyfile("""
import pytest
def ranks(ctx): return ctx.world_size
def of(size, *marks): return pytest.param(size, marks=[pytest.mark.ddp(world_size=size), *marks])
@pytest.mark.parametrize("size", [of(1), of(3)])
def test_marked(ddp_run, size): assert ddp_run(ranks) == [size] * size
@pytest.mark.parametrize("size", [of(1), 3])
def test_one_is_marked(ddp_run, size): ddp_run(ranks)
@pytest.mark.parametrize("ddp_world_size", [1, 3])
def test_given(ddp_run, ddp_world_size): assert len(ddp_run(ranks)) == ddp_world_size
""")
    result = run("--ddp-world-size=1,2")
    result.assert_outcomes(passed=5, errors=1)
    result.stdout.fnmatch_lines(
        [
            "world sizes 1,2: a unittest.TestCase or a single parameter cannot have several; *"
        ]
    )


WORLD_SIZES = """
import pytest
def ranks(ctx): return ctx.world_size
@pytest.mark.parametrize("ddp_world_size", ["2", 2.0, 0])
def test_odd(ddp_run): ddp_run(ranks)
@pytest.mark.parametrize("ddp_world_size", [1, 3], indirect=True)
def test_asked(ddp_run, ddp_world_size):
    assert ddp_run(ranks) == [ddp_world_size] * ddp_world_size
class TestOwn:
    @pytest.fixture(params=["one"])
    def ddp_world_size(self, request): return {"one": 1}[request.param]
    def test_own(self, ddp_run): assert ddp_run(ranks) == [1]
"""


def test_world_sizes_of_a_parametrization_and_of_a_fixture_of_ones_own(
    pytester: pytest.Pytester, run: Run
) -> None:
    pytester.makepyfile(WORLD_SIZES)
    result = run()
    result.assert_outcomes(passed=3, errors=3)
    for value in ("'2'", "2.0", "0"):
        result.stdout.fnmatch_lines(
            [f"ddp_world_size is {value}: must be a number of ranks"]
        )


def test_a_run_without_the_terminal_plugin_ends_as_usual(
    pytester: pytest.Pytester, run: Run
) -> None:
    pytester.makepyfile("def test_a(): pass")
    assert run("-p", "no:terminal", benchmark=True).ret == 0


def test_under_xdist_a_limit_of_the_run_is_a_usage_error_too(
    pytester: pytest.Pytester, run: Run
) -> None:
    """The main process has no tests, so workers find it."""
    pytester.makepyfile(
        test_plain="def test_step(ddp_benchmark):\n    ddp_benchmark(lambda ctx: int)\n"
    )
    result = run("--ddp-threshold=p99:20%", "-n1")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        ["--ddp-threshold: 'p99:20%': needs at least 299 timed steps *"]
    )
