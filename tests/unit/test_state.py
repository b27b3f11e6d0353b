"""Settings and hooks of tests that are collected, and the timetable of a run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_ddpperf.plugin import items as items_module
from pytest_ddpperf.plugin import state
from pytest_ddpperf.plugin.item_settings import settings_of
from pytest_ddpperf.plugin.items import (
    conftests,
    modules_by_name,
    named_tests,
    with_place,
)
from pytest_ddpperf.plugin.session import Session
from pytest_ddpperf.records.errors import MarkerError

Collect = Callable[..., list[pytest.Item]]


@pytest.fixture
def collect(pytester: pytest.Pytester) -> Collect:
    """The tests that a pytest of its own collects from a file's text."""

    def collect(text: str, *arguments: str) -> list[pytest.Item]:
        pytester.makepyfile(text)
        items, _ = pytester.inline_genitems("-p", "no:randomly", *arguments)
        return items

    return collect


MISTAKES = """
import pytest
@pytest.mark.ddp(wrold_size=4)
def test_typo(ddp_run): ...
@pytest.mark.parametrize("n", [1])
@pytest.mark.ddp(world_size="two")
def test_value(ddp_benchmark, n): ...
@pytest.mark.ddp(steps=2)
def test_few_steps(ddp_benchmark): ...
@pytest.mark.ddp(4)
class TestClass:
    def test_method(self, rpc_benchmark): ...
def test_sound(ddp_run): ...
"""


@pytest.mark.parametrize(
    "asked",
    [
        (),
        ("-m", "not slow"),
        ("test_named.py",),
        ("test_named.py::test_a", "-v"),
    ],
)
def test_tests_are_named_by_the_command_line_alone(
    pytester: pytest.Pytester, asked: tuple[str, ...]
) -> None:
    pytester.makeini("[pytest]\ntestpaths = .\n")
    pytester.makepyfile(test_named="def test_a(ddp_run): ...")
    (item,), _ = pytester.inline_genitems("-p", "no:randomly", *asked)
    assert named_tests(item.config) == tuple(
        word for word in asked if word.startswith("test_named")
    )


def test_of_conftests_by_one_name_all_are_known_and_the_last_is_imported_by_it(
    collect: Collect, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("inner").mkdir()
    for file in ("conftest.py", "inner/conftest.py"):
        Path(file).write_text("")
    Path("inner/test_inner.py").write_text("def test_a(ddp_run): ...")
    (item,) = collect("")
    outer, inner = sorted(
        conftests(item.config), key=lambda module: len(str(module.__file__))
    )
    assert [outer.__file__, inner.__file__] == [
        str(Path.cwd() / "conftest.py"),
        str(Path.cwd() / "inner/conftest.py"),
    ]
    # as it was before the run, in this process, ended
    monkeypatch.setitem(sys.modules, "conftest", inner)
    for found in ([outer, inner], [inner, outer]):
        monkeypatch.setattr(
            items_module, "conftests", lambda config, found=found: found
        )
        assert (
            modules_by_name(item.config, [item])["conftest"] == inner.__file__
        )


@pytest.mark.parametrize(
    "option",
    [
        "--setup-plan",
        "--setup-only",
        "--collect-only",
        "--fixtures-per-test",
    ],
)
def test_what_only_shows_tests_asks_no_rank_and_writes_nothing(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    monkeypatch.setattr(
        Session, "facts", lambda self: pytest.fail("a rank was asked")
    )
    pytester.makepyfile("def test_a(ddp_benchmark): ...")
    result = pytester.runpytest_inprocess(
        "-p", "no:randomly", "-p", "no:benchmark", "--ddp-json=a.json", option
    )
    assert result.ret == 0
    result.stdout.fnmatch_lines(["*test_a*"])
    result.stdout.no_fnmatch_line("*ddpperf: *")
    assert not Path("a.json").exists()


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (
            0,
            (
                "::test_typo (line 2): @pytest.mark.ddp(wrold_size=...): 4: there is no such"
                " argument; there are "
            ),
        ),
        (
            1,
            (
                "::test_value[1] (line 4): @pytest.mark.ddp(world_size=...): 'two': whole numbers"
                " from 1"
            ),
        ),
        (
            2,
            (
                "::test_few_steps (line 7): --ddp-threshold: 'p90:5%': needs at least 29 timed"
                " steps in all"
            ),
        ),
        (
            3,
            (
                "::TestClass::test_method (line 11): @pytest.mark.ddp(...): 4: arguments are given"
                " by keyword"
            ),
        ),
    ],
)
def test_a_mistake_is_shown_with_its_tests_node_id_and_line(
    collect: Collect, number: int, message: str
) -> None:
    item = collect(MISTAKES, "--ddp-threshold=p90:5%")[number]
    with pytest.raises(MarkerError) as refused:
        settings_of(item)
    assert with_place(item, refused.value).startswith(
        f"{item.path.name}{message}"
    )


def test_a_section_is_made_of_lines(pytester: pytest.Pytester) -> None:
    with pytest.raises(
        TypeError,
        match="add_section: lines must be a list of lines, not one text",
    ):
        state.add_section(pytester.parseconfig(), "title", "a line")


def test_a_part_of_the_plugin_cannot_be_disabled(
    pytester: pytest.Pytester,
) -> None:
    """Without it a run would report nothing."""
    part = "no:ddpperf-reporter"
    with pytest.raises(
        pytest.UsageError, match=f"-p {part} is not supported: drop it"
    ):
        pytester.parseconfigure("-p", "no:randomly", "-p", part)
