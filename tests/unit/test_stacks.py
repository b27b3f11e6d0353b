"""Stacks are sampled: which function of the repository counts."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from pytest_ddpperf.rank.tracing import StackSampler, _stack_of
from pytest_ddpperf.wire.source_trees import Trees

CODE = """
import copy
import torch
from torch import nn

class Net(nn.Module):
    def forward(self, x):
        return use(x)

class Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1
    @staticmethod
    def backward(ctx, gradient):
        use(None)
        return gradient

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 1
    def __getitem__(self, index):
        use(None)
        return 0

def use(x):
    look()
    return x

def step_of_a_model():
    Net()(torch.zeros(1))

def step_of_a_model_from_elsewhere():
    nn.Sequential(Looks())(torch.zeros(1))

def step_with_a_backward_pass():
    Times.apply(torch.zeros(1, requires_grad=True)).sum().backward()

def step_within_a_backward_pass():
    x = torch.zeros(1, requires_grad=True)
    x.register_hook(lambda gradient: look())
    x.sum().backward()

def step_that_loads():
    for _ in torch.utils.data.DataLoader(Data()):
        pass

def step_that_loads_what_another_package_reads():
    for _ in torch.utils.data.DataLoader([LooksAsItem(a=1)]):
        pass

def step_that_collates():
    torch.utils.data.default_collate([LooksAsItem(a=1)])

def step_that_copies():
    x = torch.zeros(1)
    x.note = LooksAsItem()
    copy.deepcopy(x)

def step_that_saves():
    Looks().state_dict()

def step_of_an_optimizer():
    torch.optim.SGD(nn.Linear(1, 1).parameters()).step(Looks().look)

def step_that_looks():
    look()

def step_in_generated_code():
    exec("def generated():\\n    look()\\ngenerated()", {"look": look})
"""


class Looks(nn.Module):
    """Of a file outside of the repository."""

    def __init__(self, look: Callable[[], None]) -> None:
        super().__init__()
        self.look = look

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.look()
        return x

    def get_extra_state(self) -> int:
        self.look()
        return 0


class LooksAsItem(dict[str, int]):
    """An item of a data set, of a file outside of the repository."""

    look: Callable[[], None]

    def __getitem__(self, name: str) -> int:
        self.look()
        return 1

    def __deepcopy__(self, memo: object) -> object:
        self.look()
        return self


@pytest.fixture
def module(tmp_path: Path) -> ModuleType:
    """A module of a repository; its `look` takes one sample."""
    file = tmp_path / "net.py"
    file.write_text(CODE)
    made = ModuleType("net_that_is_sampled")
    exec(compile(CODE, str(file), "exec"), made.__dict__)
    return made


def seen(
    module: ModuleType, step: str, top: Path
) -> list[tuple[str, str, str]]:
    sampler = StackSampler(
        Trees(current=str(top), base=str(top), kept=()), lambda: True
    )

    def look() -> None:
        sampler._count(_stack_of(threading.get_ident())[2:])

    made: Any = module
    made.look, made.Looks = look, lambda: Looks(look)
    made.LooksAsItem = type(
        "LooksAsItem", (LooksAsItem,), {"look": staticmethod(look)}
    )
    getattr(module, step)()
    assert sampler.samples.taken == 1
    functions = sampler.samples.functions
    found = []
    for (innermost, *callers), _ in functions:
        file, _, function = innermost.partition(":")
        caller = re.split("[.:]", callers[0])[-1] if callers else ""
        found.append((file, function.rpartition(".")[2], caller))
    return found


@pytest.mark.parametrize(
    ("step", "found"),
    [
        ("step_that_looks", [("net.py", "step_that_looks", "")]),
        ("step_in_generated_code", [("net.py", "step_in_generated_code", "")]),
        ("step_of_a_model", [("net.py", "use", "forward")]),
        ("step_of_a_model_from_elsewhere", []),
        ("step_with_a_backward_pass", [("net.py", "use", "backward")]),
        (
            "step_within_a_backward_pass",
            [("net.py", "<lambda>", "step_within_a_backward_pass")],
        ),
        ("step_that_loads", [("net.py", "use", "__getitem__")]),
        ("step_that_loads_what_another_package_reads", []),
        ("step_that_collates", [("net.py", "step_that_collates", "")]),
        ("step_that_copies", [("net.py", "step_that_copies", "")]),
        ("step_that_saves", [("net.py", "step_that_saves", "")]),
        ("step_of_an_optimizer", []),
    ],
)
def test_the_innermost_function_of_the_repository_counts(
    module: ModuleType,
    tmp_path: Path,
    step: str,
    found: list[tuple[str, str, str]],
) -> None:
    assert seen(module, step, tmp_path) == found


def test_a_thread_that_waits_in_torch_counts_for_no_function(
    tmp_path: Path,
) -> None:
    """A backward pass in C++ may be that of any module, and a wait is another rank's time."""
    code = compile(
        "def backward(look):\n    look()",
        str(tmp_path / "elsewhere.py"),
        "exec",
    )
    outside: dict[str, Any] = {"__name__": "torch.autograd"}
    exec(code, outside)
    top = str(Path(__file__).parents[2])
    sampler = StackSampler(Trees(current=top, base=top, kept=()), lambda: True)
    # of this test, which is of the repository
    outside["backward"](
        lambda: sampler._count(_stack_of(threading.get_ident())[2:])
    )
    assert (sampler.samples.taken, sampler.samples.functions) == (1, ())


def test_only_the_steps_of_the_window_are_sampled() -> None:
    timed = threading.Event()
    top = str(Path(__file__).parents[2])
    with StackSampler(
        Trees(current=top, base=top, kept=()), timed.is_set
    ) as sampler:
        time.sleep(0.05)
        assert sampler.samples.taken == 0
        timed.set()
        while sampler.samples.taken < 3:
            time.sleep(0.001)
    (((innermost, *_), count), *_) = sampler.samples.functions
    assert innermost == (
        "tests/unit/test_stacks.py:test_only_the_steps_of_the_window_are_sampled"
    )
    assert count == sampler.samples.taken
