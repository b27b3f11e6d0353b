"""What else is trained over RPC: a parameter server that is pulled from and pushed to, an agent with many observers
(reinforcement learning), a pipeline of two stages that are replicated each."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pytest_ddpperf import Result, RpcBenchmark, RpcContext
from pytest_ddpperf.suite.latencies import over_launches
from pytest_ddpperf.suite.sizes import asked
from pytest_ddpperf.suite.tables import Table, Tables
from pytest_ddpperf.suite.workloads import Step

WIDTH = 256
BATCH = 32  # examples of a trainer
LEARNING_RATE = 0.01
ON_CPU = pytest.mark.ddp(device="cpu", backend="gloo")  # as these are: what goes over RPC is on the CPU anyway


class Rounds(Table):
    """Latency and throughput."""

    def __init__(self) -> None:
        self._rows: list[tuple[str, Result, int, str]] = []

    def add(self, workload: str, result: Result, count: int, of: str) -> None:
        """`count` is what a step of all trainers comes to."""
        self._rows.append((workload, result, count, of))

    def lines(self) -> Iterator[str]:
        yield "Over RPC (p50 of a step; from the fastest launch to the slowest)"
        for workload, result, count, of in self._rows:
            yield f"  {workload:>28}:  {over_launches(result)}  {count / result.p50:12,.0f} {of}/s"


# --- a parameter server

held: dict[int, Tensor] = {}  # a parameter server's share of the layers, by their number
lock = threading.Lock()  # calls are handled on several threads


def pull() -> dict[int, Tensor]:
    """The parameters that this server holds."""
    with lock:
        return {number: layer.clone() for number, layer in held.items()}


def push(gradients: dict[int, Tensor]) -> None:
    """Take a step with a trainer's gradients."""
    with lock:
        for number, gradient in gradients.items():
            held[number] -= LEARNING_RATE * gradient


@ON_CPU
def test_parameter_server(rpc_benchmark: RpcBenchmark, tables: Tables) -> None:
    """Parameters are pulled from parameter servers, gradients pushed: a step of all trainers."""
    layers = 4

    def parameter_server(ctx: RpcContext) -> None:
        torch.manual_seed(ctx.seed)
        for number in range(ctx.rank, layers, ctx.world_size):
            held[number] = torch.randn(WIDTH, WIDTH) / WIDTH**0.5

    def trainer(ctx: RpcContext) -> Step:
        from torch.distributed import rpc

        torch.manual_seed(ctx.seed + ctx.rank)
        servers = ctx.workers["parameter_server"]
        inputs, targets = torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)

        def step() -> None:
            pulled = [rpc.rpc_async(server, pull) for server in servers]
            shares = [future.wait() for future in pulled]
            parameters = {number: layer.requires_grad_() for share in shares for number, layer in share.items()}
            values = inputs
            for number in range(layers):
                values = torch.tanh(values @ parameters[number])
            F.mse_loss(values, targets).backward()  # type: ignore[no-untyped-call]
            pushed = [
                rpc.rpc_async(server, push, ({number: parameters[number].grad for number in share},))
                for server, share in zip(servers, shares, strict=True)
            ]
            for future in pushed:
                future.wait()

        return step

    result = rpc_benchmark(trainer, parameter_server=parameter_server, batch_size=BATCH)
    tables.of(Rounds).add("parameter server", result, BATCH * len(result.samples[0]), "examples")


# --- an agent and its observers

STATE, ACTIONS = 64, 8
ACTIONS_A_ROUND = 5  # of each observer

policy = nn.Sequential(nn.Linear(STATE, 128), nn.ReLU(), nn.Linear(128, ACTIONS))  # in the agent


def select_action(state: Tensor) -> int:
    """Called by the observers, in the agent."""
    with torch.no_grad():
        return int(policy(state).argmax())


def observe(agent: str) -> int:
    """Called by the agent, in an observer: a few steps in its world."""
    from torch.distributed import rpc

    state = torch.zeros(STATE)
    for _ in range(ACTIONS_A_ROUND):
        state[rpc.rpc_sync(agent, select_action, (state,))] += 1
    return int(state.sum())


@ON_CPU
@pytest.mark.ddp(nodes=1)
def test_agent_and_observers(rpc_benchmark: RpcBenchmark, pytestconfig: Any, tables: Tables) -> None:
    """One agent, many observers that ask it what to do: a round of all of them, and the actions a second."""
    observers = int(asked(pytestconfig, "ddp_parameter_servers", 2))

    def agent(ctx: RpcContext) -> Step:
        from torch.distributed import rpc

        def round_of_all() -> None:
            rounds = [rpc.rpc_async(observer, observe, (ctx.name,)) for observer in ctx.workers["parameter_server"]]
            assert sum(each.wait() for each in rounds) == ACTIONS_A_ROUND * len(rounds)

        return round_of_all

    result = rpc_benchmark(agent, trainers=1, parameter_servers=observers)
    tables.of(Rounds).add(f"agent, {observers} observers", result, ACTIONS_A_ROUND * observers, "actions")


# --- a pipeline

second_stage: list[DistributedDataParallel] = []  # of a parameter server


def run_second_stage(values: Tensor) -> Tensor:
    return torch.as_tensor(second_stage[0](values))


def second_stage_parameters() -> list[Any]:
    from torch.distributed import rpc

    return [rpc.RRef(parameter) for parameter in second_stage[0].parameters()]


@ON_CPU
def test_pipeline(rpc_benchmark: RpcBenchmark, pytestconfig: Any, tables: Tables) -> None:
    """Two stages, trainers and as many parameter servers, each stage replicated by DDP: a step of the whole."""
    pipelines = int(asked(pytestconfig, "ddp_trainers", 2))

    def parameter_server(ctx: RpcContext) -> None:
        torch.manual_seed(ctx.seed)
        stage = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))
        second_stage.append(DistributedDataParallel(stage))  # over the parameter servers, who have a group too

    def trainer(ctx: RpcContext) -> Step:
        import torch.distributed.autograd as dist_autograd
        from torch.distributed import rpc
        from torch.distributed.optim import DistributedOptimizer

        torch.manual_seed(ctx.seed)
        next_stage = ctx.workers["parameter_server"][ctx.rank]
        first_stage = DistributedDataParallel(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()))
        parameters = rpc.rpc_sync(next_stage, second_stage_parameters)
        parameters += [rpc.RRef(parameter) for parameter in first_stage.parameters()]
        optimizer: Any = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.05)  # type: ignore[no-untyped-call]
        inputs, targets = torch.randn(BATCH, WIDTH), torch.randint(10, (BATCH,))

        def step() -> None:
            with dist_autograd.context() as context:
                scores = rpc.rpc_sync(next_stage, run_second_stage, (first_stage(inputs),))
                dist_autograd.backward(context, [F.cross_entropy(scores, targets)])  # type: ignore[attr-defined]
                optimizer.step(context)

        return step

    result = rpc_benchmark(
        trainer, parameter_server=parameter_server, trainers=pipelines, parameter_servers=pipelines, batch_size=BATCH
    )
    tables.of(Rounds).add("pipeline of two stages", result, BATCH * pipelines, "examples")
