"""Programs that own their loop, on real Gloo ranks: where their steps end, and what is said of
those that cannot be timed. Steps last as long as a simulated clock says."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_ddpperf import Figure
from pytest_ddpperf.launch import failed_ranks, run
from pytest_ddpperf.records.errors import LaunchError
from pytest_ddpperf.records.plan import MARK, UPDATE, Program
from pytest_ddpperf.records.samples import LaunchSamples
from pytest_ddpperf.records.step_phases import BACKWARD
from tests.launch.conftest import Bench
from tests.own_clock import OWN_CLOCK
from tests.torch_version import NEEDS_RECORDER

# `lasts(5)` takes 5 ms of the clock by which steps are marked.
BEGIN = (
    OWN_CLOCK
    + """
import sys, torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

def lasts(milliseconds):
    clock.time.now += milliseconds * 1_000_000

def begin(**options):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    return DDP(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), **options)

x = torch.ones(2, 4)
"""
)


class Programs:
    """Runs programs in a folder of their own."""

    def __init__(self, bench: Bench, folder: Path) -> None:
        self._bench, self.folder = bench, folder

    def run(
        self,
        text: str,
        *args: str,
        begin: str = BEGIN,
        boundary: str = UPDATE,
        **plan: Any,
    ) -> LaunchSamples:
        """Run a program until it has taken 6 timed steps, after a warm-up of 4."""
        file = self.folder / "train.py"
        file.write_text(begin + text)
        program = Program(
            path=str(file),
            is_module=False,
            args=args,
            cwd=str(self.folder),
            env={},
        )
        return self.launch(program, boundary=boundary, **plan)

    def launch(self, program: object, **plan: Any) -> LaunchSamples:
        return self._bench.measure(
            program, **{"steps": 6, "warmup": 4, "boundary": UPDATE, **plan}
        )

    def fails(
        self,
        text: str,
        *args: str,
        begin: str = BEGIN,
        boundary: str = UPDATE,
        **plan: Any,
    ) -> str:
        with pytest.raises(LaunchError) as raised:
            self.run(text, *args, begin=begin, boundary=boundary, **plan)
        return str(raised.value)


@pytest.fixture
def programs(bench: Bench, tmp_path: Path) -> Programs:
    return Programs(bench, tmp_path)


def milliseconds(samples: LaunchSamples) -> list[int]:
    return [round(seconds * 1000) for seconds in samples.step_seconds]


@NEEDS_RECORDER
def test_a_program_is_timed_by_its_updates(programs: Programs) -> None:
    samples = programs.run(
        """
assert sys.argv[1:] == ["--lr", "0.1"] and __name__ == "__main__" and sys.path[0] == __file__.rpartition("/")[0]
model = begin()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10**9):
    lasts(5)
    model(x).sum().backward()
    optimizer.step()
    lasts(2)
    optimizer.zero_grad()
""",
        "--lr",
        "0.1",
    )
    assert milliseconds(samples) == [7] * 6
    assert samples.counters["all_reduce.count"] == 1
    assert samples.counters["gradient_bytes"] == 2 * (4 * 4 + 4) * 4
    assert samples.phases is not None
    assert samples.notes == ()
    assert samples.unfit == ""


ACCUMULATES = """
model = begin()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(10**9):
    for micro in range(10):
        lasts(1)
        model(x).sum().backward()
        if micro % 4 == 3 or micro == 9:
            optimizer.step()
            optimizer.zero_grad()
"""


@NEEDS_RECORDER
def test_a_step_of_several_backward_passes_ends_with_the_update_and_shorter_ones_are_left_out(
    programs: Programs,
) -> None:
    """Each epoch of ten batches ends with an update of two."""
    samples = programs.run(ACCUMULATES)
    assert milliseconds(samples) == [4] * 6
    assert (
        samples.doubts["left out"]
        == "left out: 3 of 9 steps, which had fewer backward passes"
    )
    assert samples.counters["all_reduce.count"] == 4


def test_of_several_kinds_of_updates_the_rarest_ends_a_step(
    programs: Programs,
) -> None:
    """Of a GAN whose critic has three updates for each of the generator's."""
    samples = programs.run(
        """
critic, generator = begin(), DDP(nn.Linear(4, 4))
optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (critic, generator)]
for step in range(10**9):
    for _ in range(3):
        lasts(1)
        critic(generator(x).detach()).sum().backward()
        optimizers[0].step()
    lasts(10)
    generator(x).sum().backward()
    optimizers[1].step()
""",
        warmup=8,
    )
    assert milliseconds(samples) == [13] * 6


@pytest.mark.parametrize("enabled", [True, False])
def test_a_scaler_that_networks_share_does_not_change_what_a_step_is(
    programs: Programs, *, enabled: bool
) -> None:
    samples = programs.run(
        f"""
critic, generator = begin(), DDP(nn.Linear(4, 4))
optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (critic, generator)]
scaler = torch.amp.GradScaler("cpu", init_scale=2.0, enabled={enabled})
def update(loss, optimizer):
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
for step in range(10**9):
    for _ in range(3):
        lasts(1)
        update(critic(generator(x).detach()).sum(), optimizers[0])
    lasts(10)
    update(generator(x).sum(), optimizers[1])
""",
        warmup=8,
    )
    assert milliseconds(samples) == [13] * 6
    assert samples.unfit == ""


def test_training_one_network_of_two_first_does_not_change_what_a_step_is(
    programs: Programs,
) -> None:
    samples = programs.run(
        """
critic, generator = begin(), DDP(nn.Linear(4, 4))
optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (critic, generator)]
def train(model, optimizer, milliseconds):
    lasts(milliseconds)
    model(x).sum().backward()
    optimizer.step()
for step in range(5):
    train(critic, optimizers[0], 1)
while True:
    train(generator, optimizers[1], 10)
    train(critic, optimizers[0], 1)
""",
        warmup=8,
    )
    assert milliseconds(samples) == [11] * 6
    assert samples.unfit == ""


STAGES = """
stages = [begin(), DDP(nn.Linear(4, 4))]
optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in stages]
for update in range(10**9):
    stage = {}
    lasts(5)
    stages[stage](x).sum().backward()
    optimizers[stage].step()
"""


@NEEDS_RECORDER
@pytest.mark.parametrize("updates", [1, 2, 4, 6, 11])
def test_steps_go_on_with_another_optimizer_in_the_next_stage(
    programs: Programs, updates: int
) -> None:
    """In the first updates, in the warm-up, and within the window."""
    samples = programs.run(STAGES.format(f"update >= {updates}"))
    assert milliseconds(samples) == [5] * 6
    assert samples.unfit == ""
    assert samples.counters["all_reduce.count"] == 1


@NEEDS_RECORDER
def test_counters_and_phases_are_those_of_the_stage_that_is_timed(
    programs: Programs,
) -> None:
    samples = programs.run(
        """
model = begin()
for update in range(10**9):
    if update == 10:
        model = DDP(model.module)
    if update in (0, 10):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).sum().backward()
    if update >= 10:
        dist.all_reduce(torch.zeros(1))
    optimizer.step()
""",
        begin=BEGIN.removeprefix(OWN_CLOCK),
        warmup=20,
    )
    assert samples.counters["all_reduce.count"] == 2
    assert samples.phases is not None
    assert None not in samples.phases.own["forward"]


@pytest.mark.parametrize("updates", [1, 2, 3, 5])
def test_an_optimizer_made_anew_each_epoch_goes_on_with_the_steps(
    programs: Programs, updates: int
) -> None:
    samples = programs.run(f"""
model = begin()
while True:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for update in range({updates}):
        lasts(5)
        model(x).sum().backward()
        optimizer.step()
""")
    assert milliseconds(samples) == [5] * 6
    assert samples.unfit == ""


def test_a_further_optimizer_within_the_last_updates_does_not_stop_the_steps(
    programs: Programs,
) -> None:
    samples = programs.run("""
model, other = begin(), nn.Linear(4, 4)
optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (other, model)]
for update in range(10**9):
    lasts(5)
    model(x).sum().backward()
    for optimizer in optimizers[update < 11 :]:
        optimizer.step()
""")
    assert milliseconds(samples) == [5] * 6
    assert samples.unfit == ""


def test_a_stage_that_ends_before_the_window_does_not_stop_the_steps(
    programs: Programs,
) -> None:
    samples = programs.run(STAGES.format("8 <= update < 11"))
    assert milliseconds(samples) == [5] * 6
    assert samples.unfit == ""


def test_a_critic_with_five_updates_for_one_of_the_generator_is_timed_by_the_generators(
    programs: Programs,
) -> None:
    samples = programs.run(STAGES.format("update % 6 == 5"))
    assert milliseconds(samples) == [30] * 6
    assert samples.unfit == ""


@pytest.mark.parametrize("skipped", [0, 1, 3])
def test_parameters_that_change_between_two_passes_of_one_update_end_no_step(
    programs: Programs, skipped: int
) -> None:
    """As those of sharpness-aware minimisation, whose both passes synchronise; also if a scaler
    skips the first updates."""
    samples = programs.run(f"""
model = begin()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
for update in range(10**9):
    lasts(5)
    model(x).sum().backward()
    with torch.no_grad():
        for each in model.parameters():
            each.add_(0.01)
    lasts(3)
    loss = model(x).sum() * (float("inf") if update < {skipped} else 1)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
""")
    assert milliseconds(samples) == [8] * 6
    assert samples.unfit == ""


def test_a_stage_that_comes_again_within_the_window_makes_a_launch_unfit_and_does_not_stop_it(
    programs: Programs,
) -> None:
    samples = programs.run(STAGES.format("14 <= update < 17"))
    assert len(samples.step_seconds) == 6
    # the first reason explains those that follow
    assert samples.unfit == (
        "steps end otherwise than in the warm-up: raise --ddp-warmup, or mark where steps end"
        ' (boundary="mark")'
    )


def test_a_stage_may_form_its_process_group_anew(programs: Programs) -> None:
    samples = programs.run("""
import os
rank, folder = int(os.environ["RANK"]), os.path.dirname(__file__)
for stage, updates in enumerate((8, 10**9)):
    dist.init_process_group("gloo", init_method=f"file://{folder}/stage{stage}", rank=rank, world_size=2)
    model = DDP(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for update in range(updates):
        lasts(5)
        model(x).sum().backward()
        optimizer.step()
    dist.destroy_process_group()
""")
    assert milliseconds(samples) == [5] * 6


def test_the_passes_of_an_optimizer_that_evaluates_a_closure_are_one_step(
    programs: Programs,
) -> None:
    """Of LBFGS, which may have another number of them in each step."""
    samples = programs.run("""
model = begin()
optimizer = torch.optim.LBFGS(model.parameters(), lr=1e-9, tolerance_grad=0, tolerance_change=0)
def closure():
    optimizer.zero_grad()
    loss = model(x).square().sum()
    loss.backward()
    return loss
for step in range(10**9):
    optimizer.param_groups[0]["max_iter"] = 20 + step % 3
    lasts(5)
    optimizer.step(closure)
""")
    assert milliseconds(samples) == [5] * 6
    assert samples.unfit == ""
    assert samples.doubts == {}


@pytest.mark.parametrize(
    "model",
    ["begin()", "torch.compile(begin(), backend='eager')"],
    ids=["eager", "compiled"],
)
def test_an_update_may_have_many_backward_passes_that_synchronise(
    programs: Programs, model: str
) -> None:
    samples = programs.run(f"""
model = {model}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    for micro in range(40):
        lasts(1)
        model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
""")
    assert milliseconds(samples) == [40] * 6
    assert samples.unfit == ""


def test_two_optimizers_of_one_update_end_it_together(
    programs: Programs,
) -> None:
    samples = programs.run("""
model = begin()
halves = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model.module]
for step in range(10**9):
    lasts(5)
    model(x).sum().backward()
    halves[0].step()
    lasts(3)
    halves[1].step()
""")
    assert milliseconds(samples) == [8] * 6


def test_an_optimizer_within_the_backward_pass_ends_with_it(
    programs: Programs,
) -> None:
    samples = programs.run("""
dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
for parameter in model.parameters():
    own = torch.optim.SGD([parameter], lr=0.1)
    def update(parameter, own=own):
        dist.all_reduce(parameter.grad)
        own.step()
        own.zero_grad()
    parameter.register_post_accumulate_grad_hook(update)
for step in range(10**9):
    lasts(5)
    model(x).sum().backward()
""")
    assert milliseconds(samples) == [5] * 6


def test_a_sharded_optimizer_has_one_end(programs: Programs) -> None:
    samples = programs.run("""
from torch.distributed.optim import ZeroRedundancyOptimizer
model = begin()
optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.SGD, lr=0.1)
for step in range(10**9):
    lasts(5)
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
""")
    assert milliseconds(samples) == [5] * 6


@pytest.mark.parametrize(
    "scaler", ["torch.amp", "torch.distributed.fsdp.sharded_grad_scaler"]
)
def test_an_update_that_the_scaler_skips_is_a_step(
    programs: Programs, scaler: str
) -> None:
    name = "GradScaler" if scaler == "torch.amp" else "ShardedGradScaler"
    samples = programs.run(f"""
from {scaler} import {name} as Scaler
model = begin()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = Scaler("cpu", init_scale=2.0, growth_interval=10**6)
for step in range(10**9):
    lasts(5)
    loss = model(x).sum() * (float("inf") if step % 4 == 3 else 1)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    lasts(1)
    scaler.update()
    optimizer.zero_grad()
""")
    assert milliseconds(samples) == [6] * 6


def test_what_a_scaler_steps_may_wrap_an_optimizer(programs: Programs) -> None:
    """It may have no hash, and no weak references."""
    samples = programs.run("""
from dataclasses import dataclass
@dataclass(slots=True)
class Wrapper:
    optimizer: object
    @property
    def param_groups(self):
        return self.optimizer.param_groups
    def step(self):
        self.optimizer.step()
model = begin()
optimizer = Wrapper(torch.optim.SGD(model.parameters(), lr=0.1))
scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=10**6)
for step in range(10**9):
    lasts(5)
    scaler.scale(model(x).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
""")
    assert milliseconds(samples) == [5] * 6


def test_without_an_optimizer_that_is_seen_a_synchronising_backward_pass_ends_a_step(
    programs: Programs,
) -> None:
    samples = programs.run("""
from contextlib import nullcontext
model = begin()
for step in range(10**9):
    for micro in range(2):
        lasts(5)
        with model.no_sync() if micro == 0 else nullcontext():
            model(x).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
            parameter.grad = None
""")
    assert milliseconds(samples) == [10] * 6


def test_modules_that_the_program_does_not_use_are_not_asked(
    programs: Programs,
) -> None:
    samples = programs.run("""
class Lookup(nn.Module):
    def __getattr__(self, name):
        return {}[name]

unused, model = Lookup(), begin()
for step in range(10**9):
    lasts(5)
    model(x).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
            parameter.grad = None
""")
    assert milliseconds(samples) == [5] * 6


SHARDED = """
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
for layer in model:
    fully_shard(layer)
fully_shard(model)
"""
PARALLEL = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
parallelize_module(model, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel(), "1": RowwiseParallel()})
"""
COMPILED = """
model = torch.compile(begin(), backend="eager")
"""


@pytest.mark.parametrize(
    "switch", ["set_requires_gradient_sync", "set_requires_all_reduce"]
)
def test_without_an_optimizer_that_is_seen_fsdp2_may_accumulate_gradients(
    programs: Programs, switch: str
) -> None:
    samples = programs.run(
        SHARDED
        + f"""
for step in range(10**9):
    for micro in range(2):
        lasts(5)
        model.{switch}(micro == 1)
        model(x).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
            parameter.grad = None
"""
    )
    assert milliseconds(samples) == [10] * 6


@NEEDS_RECORDER
@pytest.mark.parametrize(
    ("model", "counter"),
    [
        (SHARDED, "reduce_scatter.count"),
        (PARALLEL, "all_reduce.count"),
        (COMPILED, "all_reduce.count"),
    ],
    ids=["fully_shard", "tensor parallel", "compiled"],
)
def test_sharded_and_compiled_models_train_as_they_are(
    programs: Programs, model: str, counter: str
) -> None:
    samples = programs.run(
        model
        + """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10**9):
    lasts(5)
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    )
    assert milliseconds(samples) == [5] * 6
    assert samples.counters[counter]
    assert samples.unfit == ""


def test_an_optimizer_that_is_compiled_is_not_seen(programs: Programs) -> None:
    samples = programs.run("""
model = begin()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
update = torch.compile(optimizer.step, backend="eager")
for step in range(10**9):
    lasts(5)
    model(x).sum().backward()
    update()
    optimizer.zero_grad()
""")
    assert milliseconds(samples) == [5] * 6


@pytest.mark.parametrize(
    "calls", ["loss.backward()", "torch.autograd.backward(loss)"]
)
def test_a_step_that_is_compiled_as_a_whole_is_seen(
    programs: Programs, calls: str
) -> None:
    """torch.compile breaks its graph where the backward pass begins, and would compile what watches
    that."""
    samples = programs.run(
        f"""
model = begin()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
@torch.compile(backend="eager")
def train(x):
    optimizer.zero_grad()
    loss = model(x).sum()
    {calls}
    optimizer.step()
for step in range(10**9):
    train(x)
""",
        begin=BEGIN.removeprefix(OWN_CLOCK),
    )
    assert len(samples.step_seconds) == 6
    assert samples.phases is not None
    assert None not in samples.phases.own[BACKWARD]


def test_a_step_may_be_called_while_a_tuple_is_made(
    programs: Programs,
) -> None:
    """Python shows such a tuple to the garbage collector, and then wants it for itself."""
    samples = programs.run("""
model = begin()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step():
    lasts(5)
    model(x).sum().backward()
    optimizer.step()
    return 1
while True:
    losses = tuple(step() for _ in range(1))
""")
    assert milliseconds(samples) == [5] * 6


def test_a_program_may_mark_its_steps_itself(programs: Programs) -> None:
    text = """
import pytest_ddpperf
model = begin()
def train():
    for _ in range(2):
        lasts(5)
        model(x).sum().backward()
    pytest_ddpperf.step_end()
if __name__ == "__main__":
    for step in range(10**9):
        train()
"""
    assert milliseconds(programs.run(text, boundary=MARK)) == [10] * 6
    done = subprocess.run(
        [sys.executable, "-c", "import pytest_ddpperf as d; d.step_end()"],
        check=False,
    )
    assert done.returncode == 0, "outside of a rank it does nothing"


def test_a_step_may_end_where_a_function_returns(
    programs: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "engine_of_a_library.py").write_text(
        "class Engine:\n    def step(self, work):\n        work()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    text = """
from engine_of_a_library import Engine
model = begin()
def work():
    lasts(5)
    model(x).sum().backward()
for step in range(10**9):
    Engine().step(work)
"""
    assert (
        milliseconds(
            programs.run(text, boundary="engine_of_a_library:Engine.step")
        )
        == [5] * 6
    )


def test_a_step_may_end_with_a_function_that_others_import_by_name(
    programs: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "named").mkdir()
    (tmp_path / "named/__init__.py").write_text(
        "from named.engine import step\n"
    )
    (tmp_path / "named/engine.py").write_text("def step(work): work()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    text = """
from named import step
model = begin()
def work():
    lasts(5)
    model(x).sum().backward()
while True:
    step(work)
"""
    samples = programs.run(text, boundary="named.engine:step")
    assert milliseconds(samples) == [5] * 6


@pytest.mark.parametrize("name", ["Engine.step", "Engine", "Engine.number"])
def test_a_boundary_that_is_no_function_is_refused(
    programs: Programs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    (tmp_path / "an_engine.py").write_text(
        "class Engine:\n    number = 3\n    @property\n    def step(self): return 1\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    said = programs.fails("import an_engine", boundary=f"an_engine:{name}")
    assert f'boundary="an_engine:{name}" is no function, but <' in said or (
        f'boundary="an_engine:{name}" is no function, but 3' in said
    )


@pytest.mark.parametrize(
    "path", ["{0}/train.py", "{0}/linked/train.py", "train"]
)
def test_a_function_of_the_program_itself_does_not_end_a_step(
    programs: Programs, tmp_path: Path, path: str
) -> None:
    (tmp_path / "train.py").write_text("1 / 0\ndef step(): pass\n")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked/train.py").symlink_to("../train.py")
    program = Program(
        path=path.format(tmp_path),
        is_module=path == "train",
        args=(),
        cwd=str(tmp_path),
        env={},
    )
    with pytest.raises(LaunchError) as raised:
        programs.launch(program, boundary="train:step")
    assert (
        'boundary="train:step" is in the program itself, which runs as __main__: move it to another'
        ' module, or call pytest_ddpperf.step_end() there (boundary="mark")'
    ) in str(raised.value)
    assert "ZeroDivisionError" not in str(raised.value), "it did not run"


def test_a_function_of_the_package_that_runs_as_a_module_may_end_a_step(
    programs: Programs, tmp_path: Path
) -> None:
    """`python -m pkg` runs pkg/__main__.py, and imports pkg."""
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/__init__.py").write_text("def step(work): work()\n")
    (tmp_path / "pkg/__main__.py").write_text(
        BEGIN
        + """
import pkg
model = begin()
def work():
    lasts(5)
    model(x).sum().backward()
while True:
    pkg.step(work)
"""
    )
    program = Program(
        path="pkg", is_module=True, args=(), cwd=str(tmp_path), env={}
    )
    samples = programs.launch(program, boundary="pkg:step")
    assert milliseconds(samples) == [5] * 6


def test_a_program_finds_modules_as_python_does(
    programs: Programs, tmp_path: Path
) -> None:
    """Next to the script, not to a link to it; then in the folders of its PYTHONPATH."""
    for file in ("src/near.py", "lib/far.py"):
        path = tmp_path / file
        path.parent.mkdir()
        path.touch()
    (tmp_path / "src/train.py").write_text(
        BEGIN
        + """
import os, subprocess
import near, far
subprocess.run([sys.executable, "-c", "import far"], check=True)
assert len(os.environ["PYTHONPATH"].split(os.pathsep)) > 1, "ours stays"
model = begin()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    lasts(3)
    model(x).sum().backward()
    optimizer.step()
"""
    )
    link = tmp_path / "train.py"
    link.symlink_to("src/train.py")
    program = Program(
        path=str(link),
        is_module=False,
        args=(),
        cwd=str(tmp_path),
        env={"PYTHONPATH": "lib"},
    )
    assert milliseconds(programs.launch(program)) == [3] * 6


def test_a_module_runs_as_with_python_m_and_a_function_gets_its_context(
    programs: Programs, tmp_path: Path
) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/train.py").write_text(
        BEGIN
        + """
import os
assert os.environ["OURS"] == "1" and __name__ == "__main__" and __package__ == "pkg"
model = begin()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    lasts(3)
    model(x).sum().backward()
    optimizer.step()
"""
    )
    program = Program(
        path="pkg.train",
        is_module=True,
        args=(),
        cwd=str(tmp_path),
        env={"OURS": "1"},
    )
    assert milliseconds(programs.launch(program)) == [3] * 6

    def main(ctx: Any) -> None:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        assert (ctx.rank, ctx.world_size) == (dist.get_rank(), 2)
        weight = torch.ones(3, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1)
        while True:
            weight.sum().backward()
            dist.all_reduce(weight.grad)
            ctx.record("loss", 2.0, better=None)
            optimizer.step()

    samples = programs.launch(main)
    assert len(samples.step_seconds) == 6
    assert samples.recorded["loss"] == ((2.0,) * 6,) * 2


def test_what_a_loop_records_after_the_last_update_of_the_warm_up_is_not_judged(
    programs: Programs,
) -> None:
    """The pause before the window would be in its first time."""

    def main(ctx: Any) -> None:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        weight = torch.ones(3, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for update in itertools.count():
            weight.sum().backward()
            dist.all_reduce(weight.grad)
            optimizer.step()
            ctx.record("update", update, better="lower")

    samples = programs.launch(main)
    (of_each_rank,) = samples.figures["update"].values
    for recorded, judged in zip(
        samples.recorded["update"], of_each_rank, strict=True
    ):
        assert len(recorded) == 6
        assert judged == recorded[1:]


@NEEDS_RECORDER
def test_the_last_update_of_an_epoch_of_a_trainer_is_left_out(
    programs: Programs, tmp_path: Path
) -> None:
    """Of transformers' in bfloat16: ten batches an epoch, four to an update."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    folder = str(tmp_path)

    def main(ctx: Any) -> None:
        import torch
        from transformers import (
            GPT2Config,
            GPT2LMHeadModel,
            Trainer,
            TrainingArguments,
        )

        # ranks x batches x examples
        tokens = torch.randint(64, (2 * 10 * 2, 8))
        Trainer(
            model=GPT2LMHeadModel(
                GPT2Config(
                    n_layer=1, n_head=1, n_embd=8, vocab_size=64, n_positions=8
                )
            ),
            args=TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=2,
                gradient_accumulation_steps=4,
                num_train_epochs=1000,
                bf16=True,
                use_cpu=True,
                ddp_backend="gloo",
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        ).train()

    samples = programs.launch(main, steps=10)
    assert len(samples.step_seconds) == 10
    assert (
        samples.doubts["left out"]
        == "left out: 5 of 15 steps, which had fewer backward passes"
    )
    assert samples.counters["collectives.count"]


def test_steps_that_take_much_longer_are_counted_and_said(
    programs: Programs,
) -> None:
    samples = programs.run("""
model = begin()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10**9):
    lasts(50 if step % 5 == 0 else 5)  # evaluates
    model(x).sum().backward()
    optimizer.step()
""")
    assert sorted(milliseconds(samples))[-1] == 50
    (said,) = samples.doubts.values()
    assert "of 6 steps took more than 3x the median" in said


@pytest.mark.parametrize(
    "init",
    [
        "init_method='file://' + os.path.abspath('meeting'), rank=rank, world_size=2",
        "init_method=f'file://{os.path.abspath(\"meeting\")}?rank={rank}&world_size=2'",
        "init_method='tcp://127.0.0.1:1', rank=rank, world_size=2",
        "rank=int(os.environ.__setitem__('MASTER_PORT', str(1 + rank)) or rank), world_size=2",
    ],
    ids=["file", "file with its query", "port", "variable"],
)
def test_ranks_meet_whatever_place_the_program_names(
    programs: Programs, tmp_path: Path, init: str
) -> None:
    """An earlier launch may have left the file, and nobody listens at the port."""
    (tmp_path / "meeting").write_bytes(b"left")
    samples = programs.run(f"""
import os
rank = int(os.environ["RANK"])
os.chdir(os.path.dirname(__file__))
for again in range(2):
    dist.init_process_group("gloo", {init})
    dist.all_reduce(torch.ones(1))
    if not again:
        dist.destroy_process_group()
model = DDP(nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    lasts(5)
    model(x).sum().backward()
    optimizer.step()
""")
    assert milliseconds(samples) == [5] * 6
    assert (tmp_path / "meeting").read_bytes() == b"left"


# --- children of a rank

FORKS = """
import os
os.chdir(os.path.dirname(__file__))
def fork(step):
    pid = os.fork()
    if not pid:
        {}
    else:
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        open("statuses", "a").write(f"{{status}} ")
    return not pid

model = begin()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10**9):
    lasts(5)
    if step in (0, 2, 9) and fork(step):
        break
    model(x).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("child", "status"),
    [
        ("raise ValueError('no data')", 1),
        ("sys.exit(3)", 3),
        ("sys.exit()", 0),
        ("sys.exit('no data')", 1),
        ("pass", 0),
        (
            (
                "layer = nn.Linear(4, 4); o = torch.optim.SGD(layer.parameters()); "
                "[(lasts(7), layer(x).sum().backward(), i % 2 or o.step()) for i in range(40)]"
            ),
            0,
        ),
        (
            "layer = nn.Linear(4, 4); [layer(x).sum().backward() for i in range(40)]",
            0,
        ),
    ],
    ids=[
        "raises",
        "exits",
        "exits with 0",
        "exits with a text",
        "returns",
        "trains",
        "trains without an optimizer",
    ],
)
def test_what_a_child_of_a_rank_does_is_not_the_ranks(
    programs: Programs, tmp_path: Path, child: str, status: int
) -> None:
    samples = programs.run(FORKS.format(child))
    assert milliseconds(samples) == [5] * 6
    assert (tmp_path / "statuses").read_text().split() == [str(status)] * 6
    assert "no data" not in child or "no data" in samples.output[0].stderr


@pytest.mark.parametrize(
    "start",
    [
        "start(multiprocessing.get_context('fork'))",
        "start(multiprocessing.get_context('spawn'))",
        "torch.multiprocessing.spawn(work, nprocs=2)",
        (
            "subprocess.run([sys.executable, '-m', 'torch.distributed.run', '--nproc-per-node=2',"
            " __file__, 'worker'])"
        ),
    ],
    ids=["fork", "spawn", "mp.spawn", "torchrun"],
)
def test_a_program_whose_children_form_a_group_is_refused(
    programs: Programs, start: str
) -> None:
    """Before it has ended: it would not."""
    text = """
import multiprocessing, os, subprocess, sys, time, torch
import torch.distributed as dist

def work(rank):
    if sys.argv[1:] != ["worker"]:
        os.environ["MASTER_PORT"] = "1"
    dist.init_process_group("gloo", rank=rank, world_size=2)

def start(context):
    for rank in range(2):
        context.Process(target=work, args=(rank,)).start()
    time.sleep(3600)

if sys.argv[1:] == ["worker"]:
    work(int(os.environ["RANK"]))
elif __name__ == "__main__":
    START
"""
    said = programs.fails(text.replace("START", start), begin="", ranks=1)
    assert (
        "the program starts ranks itself, 2 processes that form a group of their own: give the"
        " program of one" in said
    )


def test_a_program_that_its_worker_runs_again_is_told_so(
    programs: Programs,
) -> None:
    """As DataLoader's workers do with Python 3.14, whose default start method is no fork."""
    said = programs.fails(
        """
import time, torch, torch.distributed as dist

dist.init_process_group("gloo")
torch.multiprocessing.get_context("spawn").Process(target=print).start()
time.sleep(3600)
""",
        begin="",
    )
    assert (
        "a process that the program started, a DataLoader's worker for example, ran the program"
        ' again: begin what it does with `if __name__ == "__main__":`'
    ) in said


def test_a_program_whose_children_call_each_other_is_refused(
    programs: Programs,
) -> None:
    said = programs.fails(
        """
import os, torch

def work(rank):
    from torch.distributed import rpc
    os.environ["MASTER_PORT"] = "1"
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=3)

if __name__ == "__main__":
    torch.multiprocessing.spawn(work, nprocs=3)
""",
        begin="",
        ranks=1,
    )
    assert (
        "the program starts ranks itself, 3 processes that form a group of their own: for"
        " torch.distributed.rpc there are rpc_benchmark and ddp_benchmark.command"
        in said
    )


def test_updates_in_changing_threads_are_refused(programs: Programs) -> None:
    said = programs.fails("""
from concurrent.futures import ThreadPoolExecutor
model = begin()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train():
    lasts(1)
    model(x).sum().backward()
    optimizer.step()
first, second = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
while True:
    first.submit(train).result()
    second.submit(train).result()
""")
    assert (
        "steps end in different threads: let the program train in one" in said
    )


@NEEDS_RECORDER
@pytest.mark.parametrize("batches", [13, 15])
def test_a_short_update_behind_the_counted_one_keeps_its_counts(
    programs: Programs, batches: int
) -> None:
    """With 13 batches it is the last of the warm-up."""
    samples = programs.run(f"""
model = begin()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(10**9):
    for batch in range({batches}):
        lasts(1)
        model(x).sum().backward()
        if batch % 2 == 1 or batch == {batches} - 1:
            optimizer.step()
            optimizer.zero_grad()
""")
    assert samples.counters["all_reduce.count"] == 2


def test_two_kinds_of_updates_in_turn_make_a_launch_unfit(
    programs: Programs,
) -> None:
    samples = programs.run("""
model = begin()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10**9):
    lasts(1)
    for task in range(2 - step % 2):
        model(x).sum().backward()
    optimizer.step()
""")
    assert samples.unfit == (
        "6 steps had fewer backward passes: mark where steps end"
        ' (boundary="mark")'
    )


# --- in stretches


def test_a_program_can_be_paused_between_steps(
    programs: Programs, bench: Bench, tmp_path: Path
) -> None:
    file = tmp_path / "train.py"
    file.write_text(BEGIN + ACCUMULATES)
    program = Program(
        path=str(file), is_module=False, args=(), cwd=str(tmp_path), env={}
    )
    with bench.paused(program, steps=6, warmup=4, boundary=UPDATE) as launch:
        for _ in range(2):
            launch.stretch(4)
        samples = launch.deliver()
    assert milliseconds(samples) == [4] * 6
    assert sum(samples.stretches) == 6


SAVES = """
model = begin()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(100):
    lasts(5)
    model(x).sum().backward()
    optimizer.step()
    if step % 4 == 3:
        torch.save(model, f"model{dist.get_rank()}.pt")
"""


def test_a_program_may_save_its_whole_model(
    programs: Programs, tmp_path: Path
) -> None:
    """The file has nothing of ours, and its hooks do nothing."""
    assert milliseconds(programs.run(SAVES)) == [5] * 6
    (file,) = tmp_path.rglob("model0.pt")
    assert b"pytest_ddpperf" not in file.read_bytes()
    loads = """
import sys, torch
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.load(sys.argv[1], weights_only=False)
hooks = [*model._forward_hooks.values(), *model._forward_pre_hooks.values()]
assert len(hooks) == 2
model(torch.ones(2, 4))
"""
    subprocess.run([sys.executable, "-c", loads, file], check=True)


FREEZES = """
import gc
model = begin()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
gc.collect()
gc.freeze()
gc.disable()
for step in range(100):
    lasts(5)
    for batch in range(15):
        with model.no_sync():
            model(x).sum().backward()
    model(x).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("then", ["gc.freeze()", "gc.freeze(); gc.unfreeze()"])
def test_what_a_program_freezes_is_still_seen_once(
    programs: Programs, then: str
) -> None:
    samples = programs.run(FREEZES.replace("gc.freeze()", then))
    assert milliseconds(samples) == [5] * 6
    assert samples.counters["gradient_bytes"] == 160


SCRIPTS = """
class Energy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 1)
    def forward(self, x):
        x.requires_grad_()
        force = torch.autograd.grad([self.net(x).sum()], [x], create_graph=True)[0]
        assert force is not None
        return force

dist.init_process_group("gloo")
model = DDP(torch.jit.script(Energy()), find_unused_parameters=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(100):
    lasts(5)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""


def test_a_program_may_script_what_calls_autograd(programs: Programs) -> None:
    assert milliseconds(programs.run(SCRIPTS)) == [5] * 6


LOADS = """
from torch.utils.data import DataLoader
torch.multiprocessing.set_sharing_strategy("file_system")
model = begin()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(torch.ones(10000, 4), batch_size=2, num_workers=1,
    multiprocessing_context="fork")
for batch in loader:
    lasts(5)
    model(batch).sum().backward()
    optimizer.step()
"""


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="Linux has it there")
def test_batches_in_shared_memory_go_with_the_launch(
    programs: Programs,
) -> None:
    before = {*Path("/dev/shm").glob("torch_*")}
    assert milliseconds(programs.run(LOADS)) == [5] * 6
    assert {*Path("/dev/shm").glob("torch_*")} <= before


SHARES = """
from multiprocessing.shared_memory import SharedMemory
model = begin()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
shared = SharedMemory(create=True, size=100)
print("named", shared.name, file=sys.stderr)
while True:
    lasts(5)
    model(x).sum().backward()
    optimizer.step()
"""


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="Linux has it there")
def test_shared_memory_goes_with_the_launch(programs: Programs) -> None:
    samples = programs.run(SHARES)
    assert milliseconds(samples) == [5] * 6
    for output in samples.output:
        (name,) = re.findall(r"named (\S+)", output.stderr)
        assert not Path("/dev/shm", name).exists()


COMPILES = """
graphs = []
def backend(graph, inputs):
    graphs.append(graph)
    return graph.forward
weight = torch.ones(3, requires_grad=True)
@torch.compile(backend=backend)
def penalty(x):
    energy = (weight * x).pow(2).sum()
    (force,) = torch.autograd.grad(energy, x, create_graph=True)
    return (force * force).sum() + energy
penalty(torch.ones(3, requires_grad=True))
"""
TRAINS_ON = """
model = begin()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
print(len(graphs), "graphs", file=sys.stderr)
while True:
    lasts(5)
    model(x).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("is_first", [True, False])
def test_what_calls_autograd_is_compiled_as_in_training(
    programs: Programs, is_first: bool
) -> None:
    """A process group that begins lets torch.compile forget which functions it knows."""
    alone: dict[str, Any] = {"torch": torch}
    exec(COMPILES, alone)
    begin, rest = TRAINS_ON.split("\n", 2)[1:]
    text = COMPILES + TRAINS_ON if is_first else f"{begin}\n{COMPILES}{rest}"
    samples = programs.run(text)
    assert f"{len(alone['graphs'])} graphs" in samples.output[0].stderr


# After some steps, nothing may be compiled once more.
STRICT = """
model = begin()
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
    def forward(self, x):
        return torch.relu(self.layer(x))
net = Net()
optimizer = torch.optim.SGD([*model.parameters(), *net.parameters()], lr=0.1)
compiled = torch.compile(net, backend="eager")
for step in range(10**9):
    lasts(5)
    if step == 3:
        torch.compiler.set_stance("fail_on_recompile")
    compiled(model(x)).sum().backward()
    optimizer.step()
"""


def test_what_watches_a_step_is_not_compiled(programs: Programs) -> None:
    assert milliseconds(programs.run(STRICT)) == [5] * 6


def test_the_boundary_may_be_a_function_that_the_program_compiles(
    programs: Programs,
) -> None:
    (programs.folder / "mine.py").write_text(
        "def loss_of(model, x):\n    return model(x).sum()\n"
    )
    samples = programs.run(
        """
import mine
model = begin()
net = nn.Linear(4, 4)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
compiled = torch.compile(mine.loss_of, backend="eager", fullgraph=True)
for step in range(10**9):
    lasts(5)
    compiled(net, x).backward()
    optimizer.step()
""",
        boundary="mine:loss_of",
    )
    assert milliseconds(samples) == [5] * 6


# --- errors

TRAINS = """
model = begin()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range({}):
    lasts(1)
    model(x).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            TRAINS.format(9),
            (
                "the program ended after 2 of 6 timed steps: let it take 4 more steps (more where"
                " steps are faster), or ask for fewer"
            ),
        ),
        (
            TRAINS.format(6),
            "failed in warm-up step 7 (4 asked): the program ended in step 7 of the warm-up: let it"
            " take 17 steps or more",
        ),
        (
            TRAINS.format(2),
            "the program ended before its steps were recognized: let it take 17",
        ),
        (
            "import torch.distributed as dist\ndist.init_process_group('gloo')\ndist.barrier()",
            "the program ended before its steps were recognized: it made no backward pass: its"
            ' output may say why; if it trains, mark where steps end (boundary="mark")',
        ),
        (
            "import os\n"
            "from torch.distributed import rpc\n"
            "rank = int(os.environ['RANK'])\n"
            "os.environ['MASTER_PORT'] = '1'  # nobody listens there\n"
            "if rank == 0:\n"
            "    import torch.distributed as dist\n"
            "    dist.init_process_group('gloo', rank=0, world_size=1)\n"
            "rpc.init_rpc(f'worker{rank}', rank=rank, world_size=2)\n"
            "rpc.shutdown()",
            "the program ended before its steps were recognized: it uses torch.distributed.rpc, for"
            " which there are rpc_benchmark and ddp_benchmark.command",
        ),
        (
            TRAINS.format(2)
            + "print('bad sample', file=sys.stderr)\nprint('╰──╯', file=sys.stderr)\nsys.exit(1)",
            "the program called sys.exit(1) in train.py:36: bad sample",
        ),
        (
            "print('no data', file=sys.stderr)\\nsys.exit('give it two ranks')",
            "the program called sys.exit('give it two ranks') in train.py:28\n",
        ),
        (
            "raise ValueError('no data')",
            "failed in the program's first steps: ValueError: no data",
        ),
        (
            (
                "model = nn.Linear(4, 4)\\noptimizer = torch.optim.SGD(model.parameters(),"
                " lr=0.1)\\nwhile True:\\n    model(x).sum().backward()\\n    optimizer.step()"
            ),
            "the program trains without a process group: it has to call init_process_group()",
        ),
        (
            "import os\n"
            "from torch.distributed import rpc\n"
            "rank = int(os.environ['RANK'])\n"
            "rpc.init_rpc(f'worker{rank}', rank=rank, world_size=2)\n"
            "model = nn.Linear(4, 4)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
            "while True:\n    model(x).sum().backward()\n    optimizer.step()",
            "the program trains without a process group: it uses torch.distributed.rpc, for which",
        ),
        (
            (
                "dist.init_process_group('gloo')\\nmodel = nn.Linear(4, 4)\\nwhile True:\\n   "
                " model(x).sum().backward()"
            ),
            "10 backward passes without an optimizer's update",
        ),
        (
            TRAINS.format(1000).replace("    optimizer.step()\n", ""),
            (
                "256 backward passes without an optimizer's update: if it accumulates gradients"
                " over as many, or its optimizer cannot be seen, say where a step ends"
                ' (boundary="mark")'
            ),
        ),
        (
            "import argparse\\nargparse.ArgumentParser('train.py').parse_args(['--batch', '8'])",
            "the program called sys.exit(2) in train.py:28: train.py: error: unrecognized arguments:"
            " --batch 8",
        ),
    ],
)
def test_what_cannot_be_timed_is_said(
    programs: Programs, text: str, said: str
) -> None:
    assert said in programs.fails(text.replace("\\n", "\n"))


@NEEDS_RECORDER
def test_a_program_that_never_reaches_its_boundary_is_not_called_a_deadlock(
    programs: Programs, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = replace(
        bench.plan(steps=6, warmup=4, boundary=MARK), timeout_seconds=8
    )
    monkeypatch.setattr(bench, "plan", lambda **_: plan)
    said = programs.fails(TRAINS.format(10**9))
    assert (
        'failed in the program, which has not reached boundary="mark": did not end within 8 s'
        in said
    )
    assert "never entered" not in said


def test_a_program_that_starts_one_rank_is_told_so_at_the_deadline(
    programs: Programs, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = replace(
        bench.plan(ranks=1, steps=6, warmup=4, boundary=UPDATE),
        timeout_seconds=300,
    )
    monkeypatch.setattr(bench, "plan", lambda **_: plan)
    with bench.over_once(arrived=1):
        said = programs.fails(
            """
import torch, torch.distributed as dist
from tests.launch.conftest import hang

def work(rank):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    hang()

if __name__ == "__main__":
    torch.multiprocessing.spawn(work, nprocs=1)
""",
            begin="",
            ranks=1,
        )
    assert (
        "did not end within 300 s (--ddp-timeout); a process that the program started formed a"
        " group of its own: give the program of one rank"
    ) in " ".join(said.split())


@NEEDS_RECORDER
def test_a_program_without_updates_is_told_to_mark_its_steps(
    programs: Programs, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = replace(
        bench.plan(steps=6, warmup=4, boundary=UPDATE), timeout_seconds=8
    )
    monkeypatch.setattr(bench, "plan", lambda **_: plan)
    said = programs.fails(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "while True:\n"
        "    dist.all_reduce(torch.ones(8))\n"
    )
    assert (
        "did not end within 8 s (--ddp-timeout); it goes on, but too few of its updates were seen:"
        ' raise --ddp-timeout, or mark where steps end (boundary="mark")'
    ) in " ".join(said.split())


@NEEDS_RECORDER
def test_a_boundary_that_one_rank_reaches_more_often_is_named(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failed_ranks, "_PROGRESS_SECONDS", 0.5)
    text = (
        "import pytest_ddpperf\n"
        + TRAINS.format(10**9)
        + "    if dist.get_rank() == 0:\n        pytest_ddpperf.step_end()\n"
    )
    said = programs.fails(text, boundary=MARK)
    assert re.search(
        r'boundary="mark" was reached by rank 0 \d+ times, rank 1 0 times: name what all ranks'
        r" reach equally often",
        said,
    )


def test_an_error_that_a_program_handles_by_its_end_is_shown(
    programs: Programs,
) -> None:
    """As Hydra does. What argparse handles so is no such error: its last line says more."""
    text = """
def main():
    raise ValueError("bad sample")
try:
    main()
except Exception:
    sys.exit(1)
"""
    interrupted = text.replace("ValueError", "KeyboardInterrupt")
    interrupted = interrupted.replace("Exception", "BaseException")
    assert "KeyboardInterrupt: bad sample" in programs.fails(interrupted)
    said = programs.fails(text)
    assert "ValueError: bad sample" in said
    assert 'raise ValueError("bad sample")' in said
    assert "sys.exit(1)" not in said


@pytest.mark.parametrize("text", ["x = (1,", "import no_such_module_here"])
def test_an_error_without_a_frame_of_the_program_shows_none_of_ours(
    programs: Programs, text: str
) -> None:
    said = programs.fails(text, begin="")
    assert "train.py" in said
    assert "lifecycle" not in said


def test_a_traceback_begins_in_the_program(programs: Programs) -> None:
    said = programs.fails("raise ValueError('no data')")
    assert "train.py" in said
    assert "runpy" not in said


def test_another_group_than_the_asked_one_is_an_error(
    programs: Programs,
) -> None:
    alone = """
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    model(x).sum().backward()
    optimizer.step()
"""
    assert (
        "the program's process group has size 1 instead of 2: call init_process_group()"
        in programs.fails(alone)
    )
    larger = "import os" + alone.replace(
        "store=dist.HashStore(), rank=0, world_size=1",
        "rank=int(os.environ['RANK']), world_size=4",
    )
    assert (
        "the program's process group has size 4 instead of 2"
        in programs.fails(larger)
    )
    of_fake = alone.replace(
        '"gloo", store=dist.HashStore(), rank=0, world_size=1',
        '"fake", rank=0, world_size=2',
    )
    of_fake = (
        "from torch.testing._internal.distributed import fake_pg\n"
        + of_fake.replace("rank=0", "store=fake_pg.FakeStore(), rank=0")
    )
    assert (
        "the program's process group uses fake, and gloo was asked for"
        in programs.fails(of_fake)
    )


def test_a_group_without_a_backend_for_the_device_is_an_error(
    programs: Programs,
) -> None:
    text = """
dist.init_process_group("cuda:gloo")
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    model(x).sum().backward()
    optimizer.step()
"""
    assert (
        "the program's process group uses no backend for cpu, and gloo was asked for"
        in programs.fails(text)
    )


@pytest.mark.parametrize("slower", [0, 1])
def test_ranks_that_average_their_models_now_and_then_need_not_keep_together(
    programs: Programs, slower: int
) -> None:
    samples = programs.run(
        f"""
dist.init_process_group("gloo")
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for update in range(10**9):
    if dist.get_rank() == {slower}:
        time.sleep(0.01)
    lasts(5)
    model(x).sum().backward()
    optimizer.step()
    if update % 64 == 63:
        lasts(50)
        for parameter in model.parameters():
            dist.all_reduce(parameter.data)
""",
        steps=100,
    )
    assert sorted(milliseconds(samples))[:98] == [5] * 98
    assert samples.unfit == ""


@NEEDS_RECORDER
def test_a_program_that_sends_nothing_at_all_has_counts_of_0(
    programs: Programs,
) -> None:
    samples = programs.run(
        """
dist.init_process_group("gloo")
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    model(x).sum().backward()
    optimizer.step()
    lasts(5)
""",
        ranks=1,
    )
    assert (
        samples.counters["all_reduce.count"],
        samples.counters["collectives.count"],
    ) == (0, 0)
    assert samples.counters["gradient_bytes"] is None


UNEVEN = """
model = begin()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    with model.join():
        for batch in range(3 - dist.get_rank()):
            model(x).sum().backward()
            optimizer.step()
"""


@NEEDS_RECORDER
def test_ranks_with_different_numbers_of_updates_are_refused(
    programs: Programs,
    bench: Bench,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At once, both in a window without a pause and between stretches."""
    monkeypatch.setattr(failed_ranks, "_PROGRESS_SECONDS", 0.5)
    said = programs.fails(UNEVEN, steps=30)
    assert re.search(
        r"rank 1 failed in step \d+ of 30: ranks take different numbers of updates: rank 0 took"
        r" \d+, rank 1 took \d+ "
        r"\(give all ranks equally many batches, or call pytest_ddpperf.step_end\(\) where steps"
        r" end, with boundary=\"mark\": at the end of an epoch, or of each iteration if one rank has"
        r" another optimizer\);"
        r" rank 0 never entered \w+ \d+ \([\d,]+ bytes\); rank 1"
        r" waits for it",
        said,
    )
    assert (
        "rank 0 in the end: had delivered its result and waited for the others"
        in said
    )
    program = Program(
        path=str(tmp_path / "train.py"),
        is_module=False,
        args=(),
        cwd=str(tmp_path),
        env={},
    )

    def in_stretches() -> None:
        with bench.paused(
            program, steps=60, warmup=4, boundary=UPDATE
        ) as launch:
            for _ in range(10):
                launch.stretch(6)

    with pytest.raises(
        LaunchError,
        match="ranks take different numbers of updates: rank 0 took",
    ):
        in_stretches()


@NEEDS_RECORDER
@pytest.mark.parametrize(
    ("end", "said"),
    [
        (
            "sys.exit(0)",
            "the program called sys.exit(0) in train.py:{} after 2 of 6 timed steps",
        ),
        (
            "exit()",
            "the program called sys.exit(0) in train.py:{} after 2 of 6 timed steps",
        ),
        ("break", "the program ended after 2 of 6 timed steps"),
    ],
)
def test_of_a_rank_that_ends_alone_the_place_is_said(
    programs: Programs, monkeypatch: pytest.MonkeyPatch, end: str, said: str
) -> None:
    monkeypatch.setattr(
        run, "_GRACE_SECONDS", 3.0
    )  # the other rank, which will never say anything, is in its next step
    text = TRAINS.format(100).replace(
        "    lasts(1)",
        f"    if step == 9 and dist.get_rank() == 1:\n        {end}",
    )
    line = (BEGIN + text).splitlines().index(f"        {end}") + 1
    found = programs.fails(text)
    cause = (
        f"rank 1 failed in step 3 of 6: {said.format(line)}, while other ranks went on; rank 1"
        " never entered"
    )
    assert cause in found
    assert "rank 0 waits for it" in found
    assert "more steps" not in found


def test_steps_that_come_to_have_more_backward_passes_make_a_launch_unfit(
    programs: Programs,
) -> None:
    samples = programs.run("""
model = begin()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10**9):
    for _ in range(1 if step < 10 else 2 + (step > 10)):
        lasts(1)
        model(x).sum().backward()
    optimizer.step()
""")
    assert re.fullmatch(
        r"update \d+ had 2 backward passes, and most before it 1: raise --ddp-warmup, or mark where"
        r' steps end \(boundary="mark"\)',
        samples.unfit,
    )


def test_what_the_program_would_do_after_the_last_step_does_not_run(
    programs: Programs, tmp_path: Path
) -> None:
    programs.run(
        TRAINS.format("10**9")
        .replace("for step", "try:\n  for step")
        .replace("\n    ", "\n      ")
        + "finally:\n  open('after', 'w')\n"
    )
    assert not (tmp_path / "after").exists()


WRITING = """
import json
model = begin()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
log = open("log.jsonl", "a", buffering=1)
for step in range(1, 100):
    model(x).sum().backward()
    optimizer.step()
    if dist.get_rank() == 0:
        print(f"step {step} tps: {1000 + step:,}", flush=True)
        print(json.dumps({"step": step}), file=log)
    print(f"rank {dist.get_rank()}", file=sys.stderr)
"""


def test_figures_are_read_of_what_a_program_writes_in_its_timed_steps(
    programs: Programs, bench: Bench, tmp_path: Path
) -> None:
    figures = {
        "tps": Figure(pattern=r"tps: ([\d,]+)", better="higher"),
        "step": Figure(file="log.jsonl", key="step", better="lower"),
        "rank": Figure(pattern=r"rank (\d)", better="lower", skip=2),
        "gone": Figure(pattern=r"gone: (\d+)", better="lower"),
    }
    (tmp_path / "log.jsonl").write_text('{"step": -1}\n')
    (tmp_path / "train.py").write_text(BEGIN + WRITING)
    program = Program(
        path=str(tmp_path / "train.py"),
        is_module=False,
        args=(),
        cwd=str(tmp_path),
        env={},
    )
    plan = bench.plan(steps=6, warmup=4, boundary=UPDATE)
    samples = bench.launch(replace(plan, figures=figures), program)
    found = {name: each.values for name, each in samples.figures.items()}
    steps, nothing = found["step"][0]
    # what follows the last step does not run, and the first line is that of the last step before
    assert len(steps) == 6
    assert steps == tuple(steps[0] + number for number in range(6))
    assert steps[0] > 4
    assert nothing == (), "files are read once"
    assert found["tps"] == ((tuple(1000 + each for each in steps), ()),)
    assert found["rank"] == (((0.0,) * 4, (1.0,) * 4),)
    assert found["gone"] == (((), ()),)
    assert {each.figure for each in samples.figures.values()} == {
        *figures.values()
    }


def test_what_is_no_number_is_red_also_in_a_program(
    bench: Bench, tmp_path: Path
) -> None:
    figures = {"tps": Figure(pattern="tps: (.+)", better="higher")}

    def main(ctx: Any) -> None:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        weight = torch.ones(3, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1)
        while True:
            weight.sum().backward()
            dist.all_reduce(weight.grad)
            optimizer.step()
            print("tps: nan")

    plan = bench.plan(steps=6, warmup=4, boundary=UPDATE)
    with pytest.raises(LaunchError) as caught:
        bench.launch(replace(plan, figures=figures), main)
    assert caught.value.cause.summary == "tps is 'nan', not a finite number"


def test_a_figure_that_is_both_recorded_and_written_is_red(
    bench: Bench,
) -> None:
    figures = {"tps": Figure(pattern="tps: (.+)", better="higher")}

    def main(ctx: Any) -> None:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        weight = torch.ones(3, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1)
        while True:
            weight.sum().backward()
            dist.all_reduce(weight.grad)
            ctx.record("tps", 5.0, better="higher")
            optimizer.step()

    plan = bench.plan(steps=6, warmup=4, boundary=UPDATE)
    with pytest.raises(LaunchError) as caught:
        bench.launch(replace(plan, figures=figures), main)
    assert caught.value.cause.summary == (
        "tps is recorded by steps, and written by the program: give one another name"
    )
