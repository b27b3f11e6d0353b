"""How code travels, within one process; tests/integration has the import modes."""

from __future__ import annotations

import sys
import threading
import unittest
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from pytest_ddpperf.records.errors import DdpPerfError
from pytest_ddpperf.wire import payload


def there(function: Callable[..., Any], *args: Any) -> Any:
    """What a rank would return."""
    task, arrived, arrived_args = payload.loads(
        payload.dumps("call", function, args)
    )
    assert task == "call"
    return arrived(*arrived_args)


def module_level(value: int) -> int:
    return value + 1


def test_functions_go_by_name_and_closures_by_value() -> None:
    assert (
        payload.loads(payload.dumps("call", module_level, ()))[1]
        is module_level
    )
    captured = [1, 2]
    assert there(lambda: captured) == [1, 2]
    assert there(lambda: captured) is not captured
    assert there(partial(module_level, 3)) == 4


def test_a_closure_may_refer_to_itself_and_to_later_names() -> None:
    def factorial(n: int) -> int:
        return 1 if n < 2 else n * factorial(n - 1)

    def first() -> int:
        return second() + 1

    def second() -> int:
        return 1

    assert there(factorial, 5) == 120
    assert there(first) == 2


@pytest.mark.skipif(
    sys.version_info < (3, 14), reason="annotations are evaluated at once"
)
def test_a_closure_travels_whose_annotations_only_type_checkers_know() -> None:
    text = """
def make():
    captured = 3
    def setup(ctx: OnlyForTypeCheckers):
        return captured
    return setup
"""
    names: dict[str, Any] = {}
    exec(compile(text, __file__, "exec", dont_inherit=True), globals(), names)
    assert there(names["make"](), None) == 3


def test_what_cannot_be_pickled_is_named() -> None:
    lock = threading.Lock()

    def setup() -> Any:
        return lock

    with pytest.raises(DdpPerfError, match="variable 'lock', which setup uses"):
        payload.dumps("call", setup, ())
    with pytest.raises(DdpPerfError, match="variable 'lock', which setup uses"):
        payload.dumps("measure", module_level, (None, setup))
    with pytest.raises(DdpPerfError, match="argument 2 of module_level"):
        payload.dumps("call", module_level, (1, lock))


class Case(unittest.TestCase):
    value = 3

    def test_nothing(self) -> None:
        self.kept = 4


def test_a_test_case_travels_without_pytests_own_objects() -> None:
    case = Case("test_nothing")
    case._outcome = threading.Lock()  # type: ignore[attr-defined]
    # as a case that runs coroutines has it
    case._asyncioRunner = threading.Lock()  # type: ignore[attr-defined]
    case.test_nothing()
    arrived = there(lambda: vars(case))
    assert arrived["kept"] == 4
    assert {"_outcome", "_asyncioRunner"}.isdisjoint(arrived)


def test_a_fixture_that_starts_ranks_stays_in_pytest() -> None:
    with pytest.raises(
        RuntimeError, match="ddp_run starts ranks: call it in the test"
    ):
        payload.make_refusal("ddp_run")()
