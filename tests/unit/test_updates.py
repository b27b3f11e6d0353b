"""Which event ends a step of a program that owns its loop. The tests report each update themselves;
tests/launch/test_loop.py uses real ranks."""

from __future__ import annotations

import gc
import os
from typing import Any, NoReturn
from weakref import ref

import pytest
import torch

from pytest_ddpperf.rank import updates
from pytest_ddpperf.rank.loop import Loop
from pytest_ddpperf.rank.updates import Updates


@pytest.fixture(autouse=True)
def _no_optimizers_of_earlier_tests() -> None:
    """An optimizer may be in a cycle, and would be found, and awaited, until it is collected."""
    gc.collect()


class Optimizer:
    """Nothing but an identity."""


class Training:
    """A program that trains: each call of `update` is a backward pass and optimizers' steps."""

    def __init__(self, *, is_decided: bool = False) -> None:
        self.updates = Updates(self._step_ended, self._learned, self._fail)
        self._backward = self.updates._around(lambda: None)
        self._is_decided = is_decided
        self.learned = 0
        self.done = 0  # updates
        self.ended: list[int] = []  # after which updates steps ended

    def update(self, *optimizers: Optimizer) -> None:
        self._backward()
        self.done += 1
        for optimizer in optimizers:
            self.updates._optimizer_ended(optimizer)

    def _step_ended(self, passes: int) -> None:
        self.ended.append(self.done)

    def _learned(self, ended_ns: list[int]) -> bool:
        self.learned += 1
        return self.learned == 1 or not self._is_decided

    def _fail(self, error: BaseException) -> NoReturn:
        raise error


def test_each_update_of_one_optimizer_ends_a_step_after_three() -> None:
    training, optimizer = Training(), Optimizer()
    for _ in range(6):
        training.update(optimizer)
    assert (training.learned, training.ended) == (1, [4, 5, 6])


def test_the_rarest_of_two_kinds_of_updates_ends_a_step() -> None:
    training, critic, generator = Training(), Optimizer(), Optimizer()
    for _ in range(4):
        for _ in range(3):
            training.update(critic)
        training.update(generator)
    # the critic's first, which were all that there was, then the generator's
    assert training.ended[-2:] == [12, 16]


@pytest.mark.parametrize(("critics", "ends"), [(5, 12), (50, 11)])
def test_an_optimizer_that_took_no_step_yet_is_awaited_for_ten_updates(
    monkeypatch: pytest.MonkeyPatch, critics: int, ends: int
) -> None:
    """A GAN whose generator is updated after so many updates of its critic: the first step that is
    seen to end."""
    training, critic, generator = Training(), Optimizer(), Optimizer()
    found = [ref(critic), ref(generator)]
    monkeypatch.setattr(updates, "_optimizers", lambda: found)
    for _ in range(3):
        for _ in range(critics):
            training.update(critic)
        training.update(generator)
    assert training.ended[0] == ends


def test_optimizers_whose_steps_are_not_seen_are_not_awaited() -> None:
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, wrapped: torch.optim.Optimizer) -> None:
            self.wrapped = wrapped

        def step(self, closure: Any = None) -> None:
            self.wrapped.step()

    inner = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    outer = Wrapper(inner)
    found = updates._optimizers()
    assert ref(inner) in found
    assert ref(outer) not in found


def test_another_optimizer_goes_on_with_the_steps() -> None:
    training = Training()
    for optimizer in (Optimizer(), Optimizer()):
        for _ in range(5):
            training.update(optimizer)
    assert training.ended == [4, 5, 6, 7, 8, 9, 10]


def test_steps_end_as_before_if_it_is_too_late_for_others() -> None:
    training = Training(is_decided=True)
    first = Optimizer()
    second = Optimizer()
    for optimizer in [*[first] * 4, second, first, second, first, first]:
        training.update(optimizer)
    assert training.learned == 2
    assert training.ended == [4, 5, 7]


@pytest.mark.parametrize("kinds", [1, 4])
def test_what_is_kept_of_updates_does_not_grow(
    monkeypatch: pytest.MonkeyPatch, kinds: int
) -> None:
    monkeypatch.setattr(updates, "_KEPT", 50)
    training = Training()
    optimizers = [Optimizer() for _ in range(kinds)]
    for number in range(400):
        training.update(optimizers[number % kinds])
    assert len(training.updates._end._runs) == 50
    assert len(training.updates._first_runs) == 3
    assert len(training.ended) >= 400 // kinds - 5


def test_what_a_child_learns_of_steps_is_not_the_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unused: Any = None
    loop = Loop(unused, unused)
    monkeypatch.setattr(os, "getpid", lambda: 0)
    assert not loop.learned([1, 2])


def test_models_that_a_program_drops_are_not_kept() -> None:
    models = [torch.nn.Linear(2, 2)]
    dropped = ref(models[0])
    unseen = updates.UnseenUpdates()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(updates, "replicas", lambda: [*models])
        unseen.passed()
    models.clear()
    gc.collect()
    assert dropped() is None
