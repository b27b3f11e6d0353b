"""Mistakes people make: each names the value and what is allowed, and exits as pytest users expect."""

from __future__ import annotations

import json

import pytest

from tests.integration.conftest import STEP, Run, line

NOTHING = "def test_nothing(): pass"


@pytest.mark.parametrize("xdist", [(), ("-n", "2")], ids=["alone", "xdist"])
@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--ddp-threshold=p50:ten", "--ddp-threshold: 'p50:ten': not metric:N%"),
        ("--ddp-world-size=0", "--ddp-world-size: '0': whole numbers from 1"),
        ("--ddp-timing=fre", "did you mean free?"),
        ("--ddp-steps=three", "--ddp-steps: 'three': a whole number from 1"),
        ("--ddp-threshold=p99:5%", "needs at least 299 timed steps"),
        ("--ddp-wolrd-size=2", "unrecognized arguments: --ddp-wolrd-size=2"),
    ],
    ids=lambda value: value if value.startswith("--") else "",
)
def test_an_option_that_cannot_be(
    pytester: pytest.Pytester, run: Run, option: str, words: str, xdist: tuple[str, ...]
) -> None:
    pytester.makepyfile(NOTHING)
    result = run(option, *xdist, small=False)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert words in result.stderr.str()
    assert "Traceback" not in result.stderr.str()


def test_a_bad_ini_value_names_its_key(pytester: pytest.Pytester, run: Run) -> None:
    pytester.makepyfile(NOTHING)
    pytester.makeini("[pytest]\nddp_steps = many\n")
    result = run(small=False)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "ini key ddp_steps: 'many'" in result.stderr.str()


def test_what_the_machine_lacks_matters_only_to_distributed_tests(pytester: pytest.Pytester, run: Run) -> None:
    pytester.makepyfile(NOTHING)
    assert run("--ddp-backend=glo").ret == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--ddp-backend=glo"], "did you mean gloo?"),
        (["--ddp-device=cuda"], "--ddp-device: 'cuda': no accelerator here"),
    ],
)
def test_what_the_machine_lacks_is_refused_after_collection(
    pytester: pytest.Pytester, run: Run, options: list[str], words: str
) -> None:
    if "cuda" in options[0]:
        torch = pytest.importorskip("torch")
        if torch.cuda.is_available():
            pytest.skip("there is a GPU")
    pytester.makepyfile("def test_a(ddp_run): ddp_run(print)")
    result = run(*options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert words in result.stderr.str()
    assert run(*options, "--collect-only").ret == 0  # which starts no rank


def test_what_the_machine_lacks_is_a_usage_error_under_xdist_too(pytester: pytest.Pytester, run: Run) -> None:
    pytester.makepyfile("def test_a(ddp_run): ddp_run(print)")
    result = run("--ddp-backend=glo", "-n", "1")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stdout.fnmatch_lines(["usage error: --ddp-backend: 'glo': this torch*"])


def test_saving_with_several_workers_is_refused(pytester: pytest.Pytester, run: Run) -> None:
    pytester.makepyfile(NOTHING)
    result = run("--ddp-save-baseline", "-n", "2")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "--ddp-save-baseline with 2 xdist workers" in result.stderr.str()


MISTAKEN = """
import pytest, unittest
@pytest.mark.ddp(wrld_size=2)
def test_typo(ddp_benchmark): pass
@pytest.mark.ddp(steps=2)
def test_few_steps(ddp_benchmark): pass
@pytest.mark.ddp(backend="glo")
def test_backend(ddp_run): ddp_run(print)
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
def test_sound(ddp_run): assert ddp_run(lambda ctx: ctx.rank) == [0, 1]
"""


@pytest.mark.parametrize("xdist", [(), ("-n", "1")], ids=["alone", "xdist"])
def test_a_mistake_that_a_marker_has_a_part_in_is_its_tests_alone(
    pytester: pytest.Pytester, run: Run, xdist: tuple[str, ...]
) -> None:
    pytester.makepyfile(
        test_mistaken=MISTAKEN,
        test_module="import pytest\npytestmark = pytest.mark.ddp(step=9)\ndef test_c(ddp_run): pass",
    )
    result = run("--ddp-threshold=p90:300%", "--ddp-json=told.json", *xdist)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(passed=2, failed=1, errors=5, skipped=1)
    assert json.loads((pytester.path / "told.json").read_text())["summary"]["other_failures"] == 6
    text = result.stdout.str()
    for told in (
        "test_mistaken.py:2: test_typo: @pytest.mark.ddp(wrld_size=...): 2: there is no such argument; there are ",
        "test_mistaken.py:4: test_few_steps: --ddp-threshold: 'p90:300%': needs at least 29 timed steps",
        "test_mistaken.py:6: test_backend: @pytest.mark.ddp(backend=...): 'glo': this torch",
        "test_mistaken.py:10: TestMethods.test_a: @pytest.mark.ddp(world_size=...): 'four': whole numbers",
        "test_mistaken.py:16: TestCase.test_b: @pytest.mark.ddp(...): 2: arguments are given by keyword",
        "test_module.py:3: test_c: @pytest.mark.ddp(step=...): 9: there is no such argument",
    ):
        assert text.count("\n" + told) == 1
    assert "Traceback" not in text


def test_a_marker_that_asks_for_more_than_there_is_skips_and_counts(pytester: pytest.Pytester, run: Run) -> None:
    pytester.makepyfile(
        STEP
        + """
@pytest.mark.ddp(device="cuda", world_size=4096)
def test_devices(ddp_run):
    ddp_run(print)

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
    result.assert_outcomes(skipped=3, passed=3, xfailed=1)
    result.stdout.fnmatch_lines(["SKIPPED*@pytest.mark.ddp(device=...): cuda: *", "SKIPPED*(backend=...): nccl: *"])
    assert line(result, "ddpperf:") == "ddpperf: 0 of 1 compared: 1 without baseline; 3 skipped, 1 never measured"
    assert [told for told in result.outlines if "never measured: " in told] == [
        "test_a_marker_that_asks_for_more_than_there_is_skips_and_counts.py::test_forgets: never measured: it does not "
        "call the fixture that it asks for"
    ]
    result.stdout.fnmatch_lines(["*test_marker_wins: the marker's world_size=1 is used, not 2"])


def test_a_unittest_class_cannot_have_several_world_sizes(pytester: pytest.Pytester, run: Run) -> None:
    pytester.makepyfile(
        """
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
"""
    )
    run().assert_outcomes(passed=1)
    result = run("--ddp-world-size=1,2")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        ["world sizes 1,2: neither a unittest.TestCase nor a single parameter can have several*"]
    )
