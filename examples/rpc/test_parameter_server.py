"""Gate training with parameter servers: parameters are pulled, gradients pushed."""

import threading

import pytest
import torch
import torch.distributed.rpc as rpc

SIZE = 256
LEARNING_RATE = 0.01

# A parameter server's share of the layers, by their number.
held: dict[int, torch.Tensor] = {}
lock = threading.Lock()  # handlers run on several threads


def pull():
    """The parameters that this server holds."""
    with lock:
        return {number: layer.clone() for number, layer in held.items()}


def push(gradients):
    """Take a step with a trainer's gradients."""
    with lock:
        for number, gradient in gradients.items():
            held[number] -= LEARNING_RATE * gradient


@pytest.mark.ddp(warmup=3, threshold="p10:40%,p50:50%")
def test_pull_compute_push(rpc_benchmark):
    layers, batch_size = 4, 32

    def parameter_server(ctx):
        torch.manual_seed(ctx.seed)
        for number in range(ctx.rank, layers, ctx.world_size):
            held[number] = torch.randn(SIZE, SIZE) / SIZE**0.5

    def trainer(ctx):
        torch.manual_seed(ctx.seed + ctx.rank)
        servers = ctx.workers["parameter_server"]
        inputs, targets = torch.randn(batch_size, SIZE), torch.randn(batch_size, SIZE)

        def step():
            pulled = [rpc.rpc_async(server, pull) for server in servers]
            shares = [future.wait() for future in pulled]
            parameters = {n: layer.requires_grad_() for share in shares for n, layer in share.items()}
            values = inputs
            for number in range(layers):
                values = torch.tanh(values @ parameters[number])
            torch.nn.functional.mse_loss(values, targets).backward()
            pushed = [
                rpc.rpc_async(server, push, ({n: parameters[n].grad for n in share},))
                for server, share in zip(servers, shares)  # noqa: B905
            ]
            for future in pushed:
                future.wait()

        return step

    rpc_benchmark(trainer, parameter_server=parameter_server, batch_size=batch_size)
