"""Training over RPC: PyTorch's "DDP and RPC" benchmark, a parameter server that is pulled from and
pushed to, an agent with many observers (reinforcement learning), a pipeline of two stages that are
replicated each.

The hybrid is of torch/distributed/benchmarks/benchmark_ddp_rpc.py and of the tutorial "Combining
Distributed DataParallel with Distributed RPC Framework": the same tables, layers and varying
batches, and a master that makes the tables. The benchmark refers to them by RRefs, the tutorial by
RemoteModules; both are measured.
"""

import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import Any

import pytest
import torch
import torch.distributed.autograd as dist_autograd
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import rpc
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.nn import RemoteModule  # type: ignore[attr-defined]
from torch.distributed.rpc import RRef
from torch.nn.parallel import DistributedDataParallel

from pytest_ddpperf import Result, RpcBenchmark, RpcContext
from pytest_ddpperf.suite.tables import (
    PERCENTILES,
    Tables,
    describe,
    percentile_cells,
    spread_of,
)
from pytest_ddpperf.suite.workloads import Step, add_hook, read_option, training

# --- DDP and RPC

EMBEDDINGS = 300  # rows of each table
COLUMNS = 64  # of each table
CLASSES = 8
BATCHES = 10  # of an epoch
ORIGINALS = 8  # trainers, and parameter servers

# indices, offsets of the bags, a target for each bag
Batch = tuple[Tensor, Tensor, Tensor]


class HybridModel(nn.Module):
    """Sparse embeddings on parameter servers, then dense layers under DDP."""

    def __init__(self, tables: Sequence[Any], device: torch.device) -> None:
        super().__init__()
        self.tables = tables  # RRefs of EmbeddingBags, or RemoteModules
        self._device = device
        # As in the original, with a single ReLU.
        layers = nn.Sequential(
            nn.Linear(COLUMNS * len(tables), 256),
            nn.Linear(256, 128),
            nn.ReLU(),
            nn.Linear(128, 64),
            nn.Linear(64, 32),
            nn.Linear(32, CLASSES),
        )
        self.dense: nn.Module = DistributedDataParallel(layers.to(device))

    def forward(self, indices: Tensor, offsets: Tensor) -> Tensor:
        """Return the scores: bags x CLASSES."""
        lookups = []
        for table in self.tables:  # one after another
            module = (
                table if isinstance(table, RemoteModule) else table.rpc_sync()
            )
            lookups.append(module.forward(indices, offsets))
        return self.dense(torch.cat(lookups, dim=1).to(self._device))

    def parameter_references(self) -> list[RRef[Any]]:
        """Return references to all parameters, local and remote, for a DistributedOptimizer."""
        references = [RRef(parameter) for parameter in self.dense.parameters()]
        for table in self.tables:
            if isinstance(table, RemoteModule):
                references += table.remote_parameters()
            else:
                references += rpc.rpc_sync(
                    table.owner(), parameters_of, (table,)
                )
        return references


def parameters_of(table: RRef[Any]) -> list[RRef[Any]]:
    """Return references to its parameters. Called on its parameter server."""
    return [RRef(parameter) for parameter in table.local_value().parameters()]


def epoch_of_batches(source: random.Random) -> list[Batch]:
    """Return batches of 20 to 50 indices in bags of 1 to 10."""
    batches = []
    for _ in range(BATCHES):
        count = source.randint(20, 50)
        offsets = [0]
        while (start := offsets[-1] + source.randint(1, 10)) < count:
            offsets.append(start)
        indices = torch.tensor(
            [source.randrange(EMBEDDINGS) for _ in range(count)]
        )
        targets = torch.tensor([source.randrange(CLASSES) for _ in offsets])
        batches.append((indices, torch.tensor(offsets), targets))
    return batches


def hybrid_lines(result: Result) -> Iterator[str]:
    """Yield the table of the original: a row per trainer and one for all; its "epoch/sec" are
    examples per second."""
    yield "---------- Info ---------"
    yield ""
    yield from describe(
        result, heading="---------- nvidia-smi topo -m ---------"
    )
    yield ""
    yield "------------------  PyTorch Distributed Benchmark (DDP and RPC) ---------------------"
    yield ""
    titles = "  sec/epoch  epoch/sec  " * len(PERCENTILES)
    yield f"{'':18}{titles}".rstrip()
    all_steps: list[float] = []
    all_examples = 0.0
    for trainer in range(result.world_size):
        examples = fmean(
            count or 0.0
            for launch in result.recorded["examples"]
            for count in launch[trainer]
        )
        steps = [step for launch in result.samples for step in launch[trainer]]
        yield _row(f"Trainer{trainer}", steps, examples)
        all_steps += steps
        all_examples += examples
    yield _row("All", all_steps, all_examples)


def _row(who: str, steps: Sequence[float], examples: float) -> str:
    taken = torch.tensor(steps, dtype=torch.float64)

    def percentile(q: float) -> float:
        # interpolated linearly, as in the original
        return float(taken.quantile(q / 100))

    return f"{who:>12}:{percentile_cells(percentile, examples)}"


TABLE: tuple[Any, ...] = nn.EmbeddingBag, (EMBEDDINGS, COLUMNS), {"mode": "sum"}


def master(ctx: RpcContext) -> list[Any]:
    """Make a table of embeddings on each parameter server."""
    return [
        rpc.remote(server, *TABLE) for server in ctx.workers["parameter_server"]
    ]


def master_of_modules(ctx: RpcContext) -> list[Any]:
    """Make a RemoteModule on each parameter server, as the tutorial does."""
    return [
        RemoteModule(server, *TABLE)
        for server in ctx.workers["parameter_server"]
    ]


def trainer(ctx: RpcContext, tables: Sequence[Any]) -> Callable[[], int]:
    """Return an epoch of ten batches of this trainer."""
    # its import warns of a deprecation in torch itself
    from torch.distributed.optim import DistributedOptimizer

    torch.manual_seed(ctx.seed)
    model = HybridModel(tables, ctx.device)
    optimizer: Any = DistributedOptimizer(
        torch.optim.SGD, model.parameter_references(), lr=0.05
    )
    batches = epoch_of_batches(random.Random(ctx.rank))

    def epoch() -> int:
        examples = 0
        for indices, offsets, targets in batches:
            with dist_autograd.context() as context:
                loss = F.cross_entropy(
                    model(indices, offsets), targets.to(ctx.device)
                )
                dist_autograd.backward(context, [loss])  # type: ignore[attr-defined]
                optimizer.step(context)
            examples += len(targets)
        ctx.record("examples", examples, better=None)
        return examples

    return epoch


def test_hybrid(
    rpc_benchmark: RpcBenchmark, pytestconfig: Any, tables: Tables
) -> None:
    """Embeddings on parameter servers by RPC, dense layers under DDP: an epoch's time (PyTorch's
    DDP+RPC benchmark); the same with RemoteModules."""
    # As many as in the original if there is a core for each.
    cores = (
        len(os.sched_getaffinity(0))
        if sys.platform == "linux"
        else os.cpu_count()
    )
    roles: dict[str, Any] = {}
    for role in ("trainers", "parameter_servers"):
        if not read_option(pytestconfig, f"ddp_{role}"):
            roles[role] = ORIGINALS if (cores or 1) > 2 * ORIGINALS else 2
    for name, made in ((None, master), ("RemoteModule", master_of_modules)):
        result = rpc_benchmark(trainer, master=made, name=name, **roles)
        tables.add_text(hybrid_lines(result))


# --- others

WIDTH = 256
BATCH = 32  # examples of a trainer
LEARNING_RATE = 0.01
# what goes over RPC is on the CPU
ON_CPU = pytest.mark.ddp(device="cpu", backend="gloo")


def _add_round(
    tables: Tables, workload: str, result: Result, unit: str, count: int
) -> None:
    """Show latency and throughput; `count` is the work of a trainer in a step."""
    rate = count * result.world_size / result.p50
    tables.add(
        "Over RPC (p50 of a step; from the fastest launch to the slowest)",
        {
            "workload": workload,
            "step": spread_of(result),
            "rate": f"{rate:,.0f} {unit}/s",
        },
    )


# --- a parameter server

# the share of a parameter server, by number
layers_here: dict[int, Tensor] = {}
lock = threading.Lock()  # calls are handled on several threads


def pull() -> dict[int, Tensor]:
    """Return the parameters of this server."""
    with lock:
        return {number: layer.clone() for number, layer in layers_here.items()}


def push(gradients: dict[int, Tensor]) -> None:
    """Take a step with a trainer's gradients."""
    with lock:
        for number, gradient in gradients.items():
            layers_here[number] -= LEARNING_RATE * gradient


@ON_CPU
def test_parameter_server(rpc_benchmark: RpcBenchmark, tables: Tables) -> None:
    """Parameters are pulled from parameter servers, gradients pushed: a step of all trainers."""
    layers = 4

    def parameter_server(ctx: RpcContext) -> None:
        torch.manual_seed(ctx.seed)
        for number in range(ctx.rank, layers, ctx.world_size):
            layers_here[number] = torch.randn(WIDTH, WIDTH) / WIDTH**0.5

    def trainer(ctx: RpcContext) -> Step:
        torch.manual_seed(ctx.seed + ctx.rank)
        servers = ctx.workers["parameter_server"]
        inputs = torch.randn(BATCH, WIDTH)
        targets = torch.randn(BATCH, WIDTH)

        def step() -> None:
            pulled = [rpc.rpc_async(server, pull) for server in servers]
            shares = [future.wait() for future in pulled]
            parameters: dict[int, Tensor] = {}
            for share in shares:
                parameters |= share
            values = inputs
            for number in range(layers):
                values = torch.tanh(
                    values @ parameters[number].requires_grad_()
                )
            F.mse_loss(values, targets).backward()
            pushed = []
            for server, share in zip(servers, shares, strict=True):
                gradients = {
                    number: layer.grad for number, layer in share.items()
                }
                pushed.append(rpc.rpc_async(server, push, (gradients,)))
            for future in pushed:
                future.wait()

        return step

    result = rpc_benchmark(
        trainer, parameter_server=parameter_server, batch_size=BATCH
    )
    _add_round(tables, "parameter server", result, "examples", BATCH)


# --- a server of gradients

ROWS = 1000  # of an embedding
SEQUENCE = 16  # words of a sentence

# by bucket
_arrived: dict[int, tuple[list[Tensor], torch.futures.Future[Tensor]]] = {}


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def average_when_all_arrived(
    bucket: int, gradient: Tensor, trainers: int
) -> torch.futures.Future[Tensor]:
    """Return the mean of all trainers' gradients; the answer to each waits for the last. Called by
    a trainer."""
    with lock:
        gradients, answer = _arrived.setdefault(
            bucket, ([], torch.futures.Future())
        )
        gradients.append(gradient)
        if len(gradients) == trainers:
            del _arrived[bucket]
            answer.set_result(sum(gradients[1:], gradients[0]) / trainers)
    return answer


def average_on_request(bucket: int, gradient: Tensor, trainers: int) -> Tensor:
    """As `average_when_all_arrived`, but a thread of the server waits for each gradient; a server
    has 16 threads."""
    return average_when_all_arrived(bucket, gradient, trainers).wait()


SERVERS = {
    "batched": average_when_all_arrived,
    "by request": average_on_request,
}
# Which gradients go to a server: sparse ones (True), dense ones (False).
TO_SERVER = {
    "all-reduce": (),
    "sparse by RPC": (True,),
    "all by RPC": (True, False),
}


@ON_CPU
@pytest.mark.parametrize(
    ("sent", "gradients", "server"),
    [
        ("all-reduce", "dense", "batched"),  # which has nothing to do
        ("all-reduce", "sparse", "batched"),
        ("sparse by RPC", "sparse", "batched"),
        ("all by RPC", "dense", "batched"),
        ("all by RPC", "sparse", "by request"),
    ],
)
def test_gradient_server(
    rpc_benchmark: RpcBenchmark,
    sent: str,
    gradients: str,
    server: str,
    pytestconfig: Any,
    tables: Tables,
) -> None:
    """An embedding and a dense layer under DDP; a parameter server averages their gradients, or an
    all-reduce does (PyTorch's parameter server benchmark)."""
    if (
        server == "by request"
        and int(read_option(pytestconfig, "ddp_trainers") or 2) > 8
    ):
        pytest.skip(
            "needs at most 8 trainers: each of their two buckets takes a thread of a server"
        )

    def trainer(ctx: RpcContext) -> Step:
        torch.manual_seed(ctx.seed)
        net = nn.Sequential(
            nn.EmbeddingBag(ROWS, 16, sparse=gradients == "sparse", mode="sum"),
            nn.Linear(16, 8),
        )
        # a bucket for the sparse gradient, and one for the others
        ddp = DistributedDataParallel(net)
        servers = ctx.workers["parameter_server"]

        def reduce(group: Any, bucket: Any) -> torch.futures.Future[Tensor]:
            gradient = bucket.buffer()
            if gradient.is_sparse not in TO_SERVER[sent]:
                return default_hooks.allreduce_hook(group, bucket)
            number = bucket.index()
            return rpc.rpc_async(
                servers[number % len(servers)],
                SERVERS[server],
                (number, gradient, ctx.world_size),
            )

        add_hook(ddp, reduce)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        words = torch.randint(ROWS, (BATCH, SEQUENCE))
        targets = torch.randint(8, (BATCH,))
        return training(
            ddp, lambda net: F.cross_entropy(net(words), targets), optimizer
        )

    result = rpc_benchmark(trainer, batch_size=BATCH)
    workload = f"{gradients} gradients, {sent}"
    if TO_SERVER[sent]:
        workload += f", {server}"
    _add_round(tables, workload, result, "examples", BATCH)


# --- an agent and its observers

STATE = 64
ACTIONS = 8
ACTIONS_A_ROUND = 5  # of each observer

# in the agent
policy = nn.Sequential(
    nn.Linear(STATE, 128), nn.ReLU(), nn.Linear(128, ACTIONS)
)


def select_action(state: Tensor) -> int:
    """Return the agent's action. Called by the observers."""
    with torch.no_grad():
        return int(policy(state).argmax())


def observe(agent: str) -> int:
    """Make a few steps in the world of an observer. Called by the agent."""
    state = torch.zeros(STATE)
    for _ in range(ACTIONS_A_ROUND):
        state[rpc.rpc_sync(agent, select_action, (state,))] += 1
    return int(state.sum())


@ON_CPU
@pytest.mark.ddp(nodes=1)
def test_agent_and_observers(
    rpc_benchmark: RpcBenchmark, pytestconfig: Any, tables: Tables
) -> None:
    """One agent, many observers that ask it what to do: a round of all of them, and the actions a
    second."""
    observers = int(read_option(pytestconfig, "ddp_parameter_servers") or 2)

    def agent(ctx: RpcContext) -> Step:
        def round_of_all() -> None:
            rounds = [
                rpc.rpc_async(observer, observe, (ctx.name,))
                for observer in ctx.workers["parameter_server"]
            ]
            assert sum(each.wait() for each in rounds) == ACTIONS_A_ROUND * len(
                rounds
            )

        return round_of_all

    result = rpc_benchmark(agent, trainers=1, parameter_servers=observers)
    _add_round(
        tables,
        f"agent, {observers} observers",
        result,
        "actions",
        ACTIONS_A_ROUND * observers,
    )


# --- a pipeline

second_stage: list[DistributedDataParallel] = []  # of a parameter server


def run_second_stage(values: Tensor) -> Tensor:
    with lock:  # of several micro-batches, one after the other
        return second_stage[0](values)


def _mean_share(result: Result) -> float:
    """Return the mean of the bubble over launches, ranks and steps."""
    return fmean(
        share or 0.0
        for launch in result.recorded["bubble"]
        for of_rank in launch
        for share in of_rank
    )


def second_stage_parameters() -> list[Any]:
    return [rpc.RRef(parameter) for parameter in second_stage[0].parameters()]


@ON_CPU
@pytest.mark.parametrize("parts", [1, 4])
def test_pipeline(
    rpc_benchmark: RpcBenchmark, parts: int, pytestconfig: Any, tables: Tables
) -> None:
    """Two stages, trainers and as many parameter servers, each stage replicated by DDP: a step of
    the whole, in so many micro-batches. All go forward, then all backward, as in GPipe."""
    pipelines = int(read_option(pytestconfig, "ddp_trainers") or 2)

    def parameter_server(ctx: RpcContext) -> None:
        torch.manual_seed(ctx.seed)
        stage = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10)
        )
        # over the parameter servers, who have a group too
        second_stage.append(DistributedDataParallel(stage))

    def trainer(ctx: RpcContext) -> Step:
        from torch.distributed.optim import DistributedOptimizer

        torch.manual_seed(ctx.seed)
        next_stage = ctx.workers["parameter_server"][ctx.rank]
        layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
        first_stage = DistributedDataParallel(layers)
        parameters = rpc.rpc_sync(next_stage, second_stage_parameters)
        parameters += [rpc.RRef(each) for each in first_stage.parameters()]
        sgd = torch.optim.SGD
        optimizer: Any = DistributedOptimizer(sgd, parameters, lr=0.05)
        inputs = torch.randn(parts, BATCH // parts, WIDTH)
        targets = torch.randint(10, (BATCH,))

        def step() -> None:
            with dist_autograd.context() as context:
                began = time.perf_counter()
                scores = [
                    rpc.rpc_async(
                        next_stage, run_second_stage, (first_stage(part),)
                    )
                    for part in inputs
                ]
                computed = time.perf_counter()
                received = torch.cat([future.wait() for future in scores])
                end = time.perf_counter()
                loss = F.cross_entropy(received, targets)
                dist_autograd.backward(context, [loss])  # type: ignore[attr-defined]
                optimizer.step(context)
            ctx.record("bubble", (end - computed) / (end - began), better=None)

        return step

    result = rpc_benchmark(
        trainer,
        parameter_server=parameter_server,
        trainers=pipelines,
        parameter_servers=pipelines,
        batch_size=BATCH,
    )
    share = _mean_share(result)
    bubble = f"bubble {share:.0%} of forward (ideal {1 / (parts + 1):.0%})"
    workload = f"pipeline, {parts} part{'s' if parts > 1 else ''}, {bubble}"
    _add_round(tables, workload, result, "examples", BATCH)
