"""The forum thread "Node-to-node communication traffic in Distributed Data Parallel & RPC Model
Parallel": which bytes depend on the batch size, as equalities; and the bytes that each algorithm
sends over the network."""

from collections.abc import Callable
from pathlib import Path
from statistics import median

import pytest
import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from torch import Tensor, nn
from torch.distributed import rpc
from torch.nn.parallel import DistributedDataParallel

from pytest_ddpperf import (
    CollectiveBenchmark,
    Context,
    DdpBenchmark,
    DdpRun,
    Result,
    RpcBenchmark,
    RpcContext,
    node_count,
)
from pytest_ddpperf.suite.tables import Tables
from pytest_ddpperf.suite.workloads import Size, Step, training

BATCHES = (1, 4, 16)
CHANNELS = 8  # of what goes over the boundary
PIXELS = 12  # of its edge
FLOAT = 4  # bytes
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda net: torch.optim.SGD(net.parameters(), lr=0.1),
    "Adam": lambda net: torch.optim.Adam(net.parameters()),
}

second_part: list[nn.Module] = []  # on a parameter server


def _add_traffic(
    tables: Tables, trained: str, batch: int, way: str, count: int
) -> None:
    tables.add(
        "Bytes of tensors that a step sends, by batch size",
        {"trained": trained, "batch": batch, "way": way, "bytes": f"{count:,}"},
    )


def counted(result: Result, counter: str) -> int:
    """Return a counter; skip the test if it is unknown, as without warm-up."""
    count = result.counters.get(counter)
    if count is None:
        pytest.skip(f"{counter} could not be counted")
    return count


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("batch", BATCHES)
def test_ddp_traffic(
    ddp_benchmark: DdpBenchmark, batch: int, optimizer: str, tables: Tables
) -> None:
    """DDP reduces as many bytes as there are gradients, whatever the batch size and the
    optimizer."""

    def setup(ctx: Context) -> Step:
        layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
        net = DistributedDataParallel(layers.to(ctx.device))
        inputs = torch.randn(batch, 64, device=ctx.device)
        return training(
            net, lambda net: net(inputs).sum(), OPTIMIZERS[optimizer](net)
        )

    result = ddp_benchmark(setup)
    gradients = (64 * 64 + 64 + 64 * 8 + 8) * FLOAT
    sent = counted(result, "all_reduce.bytes")
    assert sent == result.counters["gradient_bytes"] == gradients
    _add_traffic(tables, f"DDP, {optimizer}", batch, "all-reduce", sent)


def run_second_part(values: Tensor, uses: int) -> Tensor:
    """Use the values so often. Called by a trainer."""
    outputs = [second_part[0](values) for _ in range(uses)]
    return torch.stack(outputs).sum(0)


@pytest.mark.ddp(trainers=1, parameter_servers=1, nodes=1)
@pytest.mark.parametrize("call", ["rpc_sync", "to_here"])
@pytest.mark.parametrize("uses", [1, 3])
@pytest.mark.parametrize("batch", BATCHES)
def test_rpc_traffic(
    rpc_benchmark: RpcBenchmark,
    batch: int,
    uses: int,
    call: str,
    tables: Tables,
) -> None:
    """B x C x W x H go over an RPC boundary each way, by a call or by an RRef's `to_here`; a tensor
    that is used three times sends one gradient. Between CUDA devices where there are any."""

    def parameter_server(ctx: RpcContext) -> None:
        second_part.append(
            nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, device=ctx.device)
        )

    def trainer(ctx: RpcContext) -> Step:
        first_part = nn.Conv2d(3, CHANNELS, 3, padding=1, device=ctx.device)
        images = torch.randn(batch, 3, PIXELS, PIXELS, device=ctx.device)
        (server,) = ctx.workers["parameter_server"]

        def step() -> None:
            with dist_autograd.context() as context:
                arguments = first_part(images), uses
                if call == "rpc_sync":
                    values = rpc.rpc_sync(server, run_second_part, arguments)
                else:
                    values = rpc.remote(
                        server, run_second_part, arguments
                    ).to_here()
                dist_autograd.backward(context, [values.sum()])  # type: ignore[attr-defined]

        return step

    result = rpc_benchmark(trainer, parameter_server=parameter_server)
    boundary = batch * CHANNELS * PIXELS * PIXELS * FLOAT
    # once in each direction, however often it is used
    for way in ("forward", "backward"):
        sent = counted(result, f"rpc.bytes.{way}")
        assert sent == 2 * boundary
        trained = f"RPC by {call}"
        if uses > 1:
            trained += f", used {uses} times"
        _add_traffic(tables, trained, batch, way, sent)


# --- on the wire

# The least that all ranks together send, as multiples of the buffer, for each rank but one.
RINGS = {
    "all_reduce": 2.0,
    "all_gather": 1.0,
    "reduce_scatter": 1.0,
    "broadcast": 1.0,
    "DDP": 2.0,
}


def bytes_sent(*, loopback: bool) -> int | None:
    """Return the bytes that all processes of this network namespace have sent, over loopback or
    over all other interfaces; None if unknown."""
    try:
        lines = Path("/proc/net/dev").read_text().splitlines()
    except OSError:
        return None
    sent = 0
    for line in lines:
        name, is_interface, counts = line.partition(":")
        if is_interface and (name.strip() == "lo") == loopback:
            sent += int(counts.split()[8])
    return sent


def on_the_wire(ctx: Context, op: str) -> tuple[int, float] | str:
    """Return the bytes of a buffer and those that all ranks together send for the operation (the
    median of five), over loopback or, of several nodes, between them; or why they are unknown."""
    is_one_node = ctx.local_world_size == ctx.world_size
    if ctx.device.type != "cpu":
        return "devices exchange by links, shared memory or RDMA, which are not counted"
    if bytes_sent(loopback=is_one_node) is None:
        return "there is no /proc/net/dev"
    payload = ctx.world_size * 1_000_000
    whole = torch.zeros(payload // FLOAT)
    parts = list(whole.chunk(ctx.world_size))
    layer = DistributedDataParallel(nn.Linear(payload // FLOAT, 1, bias=False))
    call: Callable[[], object] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather(parts, parts[ctx.rank].clone()),
        "reduce_scatter": lambda: dist.reduce_scatter(
            parts[ctx.rank].clone(), parts
        ),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "DDP": lambda: layer(whole).sum().backward(),
    }[op]
    taken = []
    for _ in range(5):
        dist.barrier()
        before = bytes_sent(loopback=is_one_node) or 0
        dist.barrier()
        call()
        dist.barrier()
        counted = torch.tensor((bytes_sent(loopback=is_one_node) or 0) - before)
        if ctx.local_rank:  # one rank counts for each node
            counted.zero_()
        dist.all_reduce(counted)
        taken.append(int(counted))
    return payload, median(taken)


@pytest.mark.parametrize("op", RINGS)
def test_wire(
    ddp_run: DdpRun, op: str, tables: Tables, pytestconfig: pytest.Config
) -> None:
    """The bytes that a collective and a step of DDP send over the network, by algorithm and as the
    system counts them: over loopback, or between several nodes."""
    nodes = node_count(pytestconfig)
    counts = ddp_run(on_the_wire, op)
    if isinstance(counts[0], str):
        pytest.skip(counts[0])
    ranks = len(counts)
    payload, sent = counts[0]
    senders = ranks
    where = "over loopback"
    if nodes > 1:
        if not sent:
            pytest.skip("nothing went over an interface but loopback")
        senders = nodes  # between nodes, a node is as one rank
        where = f"between {nodes} nodes"
    least = RINGS[op] * (senders - 1) * payload
    tables.add(
        f"Bytes that all ranks send {where}: the least of a ring, and what the system counts",
        {
            "sent by": op,
            "ranks": ranks,
            "payload": f"{payload:,}",
            "ring": f"{least:,.0f}",
            "counted": f"{sent:,.0f}",
            "share": f"{sent / payload:.2f} x payload",
        },
    )
    assert sent >= least


@pytest.mark.ddp(device="cpu", backend="gloo")
def test_wire_of_rpc(
    rpc_benchmark: RpcBenchmark, tables: Tables, pytestconfig: pytest.Config
) -> None:
    """The bytes that an RPC with a tensor there and back sends from the last node to the first, and
    from there."""
    nodes = node_count(pytestconfig)
    if nodes == 1:
        pytest.skip("on one machine RPC goes through shared memory")
    payload = 1_000_000

    def trainer(ctx: RpcContext) -> Step:
        (server,) = ctx.workers["parameter_server"]
        values = torch.zeros(payload // FLOAT)

        def count() -> int:
            there = rpc.rpc_sync(server, bytes_sent, kwargs={"loopback": False})
            return (bytes_sent(loopback=False) or 0) + (there or 0)

        def step() -> None:
            if ctx.node_rank == nodes - 1:
                before = count()
                rpc.rpc_sync(server, torch.neg, (values,))
                ctx.record("sent_bytes", count() - before, better=None)

        return step

    result = rpc_benchmark(
        trainer, trainers=nodes, parameter_servers=1, gate=False
    )
    sent = median(
        count or 0
        for launch in result.recorded["sent_bytes"]
        for count in launch[-1]
    )
    if sent < payload:
        pytest.skip("the nodes share memory: the tensor went over no interface")
    tables.add(
        f"Bytes that an RPC with a tensor there and back sends between {nodes} nodes",
        {
            "tensor": f"{payload:,}",
            "counted": f"{sent:,.0f}",
            "share": f"{sent / payload:.2f} x tensor",
        },
    )
    assert sent >= 2 * payload


@pytest.mark.ddp(backend="nccl")
@pytest.mark.parametrize(
    ("variable", "value"),
    # NCCL before 2.5 has NCCL_TREE_THRESHOLD instead, and uses trees up to so many bytes.
    [
        ("NCCL_ALGO", "Ring"),
        ("NCCL_ALGO", "Tree"),
        ("NCCL_TREE_THRESHOLD", "0"),
        ("NCCL_TREE_THRESHOLD", "4294967296"),
    ],
)
def test_nccl_algorithm(
    collective_benchmark: CollectiveBenchmark,
    variable: str,
    value: str,
    size: Size,
    tables: Tables,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An all-reduce by NCCL's rings and by its trees: as many bytes, in more steps or fewer."""
    monkeypatch.setenv(variable, value)
    sizes = [
        1 << power for power in (10, 20, 25) if 1 << power <= size.most_bytes
    ]
    for result in collective_benchmark("all_reduce", sizes, dtype="float32"):
        wire = RINGS["all_reduce"] * (result.world_size - 1) * result.size
        tables.add(
            "All-reduce by NCCL's algorithm (p50; on the wire: of all ranks, by arithmetic)",
            {
                "algorithm": f"{variable}={value}",
                "bytes": f"{result.size:,}",
                "on the wire": f"{wire:,.0f}",
                "step": f"{result.p50:.6f}s",
                "busbw": f"{result.busbw:.2f} GB/s",
            },
        )
