"""What is known of tests before they run, by collecting some."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pytest_ddpperf.plugin import state
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


def test_tests_with_a_mistake_are_collected_under_bare_names(collect: Collect) -> None:
    items = collect(MISTAKES, "--ddp-world-size=1,2", "--ddp-threshold=p90:5%")
    names = ["test_typo", "test_value[1]", "test_few_steps", "test_method", "test_sound[ws1]", "test_sound[ws2]"]
    assert [item.name for item in items] == names


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (0, ":2: test_typo: @pytest.mark.ddp(wrold_size=...): 4: there is no such argument; there are "),
        (1, ":4: test_value[1]: @pytest.mark.ddp(world_size=...): 'two': whole numbers from 1"),
        (2, ":7: test_few_steps: --ddp-threshold: 'p90:5%': needs at least 29 timed steps in all"),
        (3, ":11: TestClass.test_method: @pytest.mark.ddp(...): 4: arguments are given by keyword"),
    ],
)
def test_a_mistake_is_told_with_its_test_and_place(collect: Collect, number: int, told: str) -> None:
    item = collect(MISTAKES, "--ddp-threshold=p90:5%")[number]
    with pytest.raises(MarkerError) as refused:
        state.settings_of(item)
    assert state.of_test(item, refused.value).startswith(f"{item.path.name}{told}")
