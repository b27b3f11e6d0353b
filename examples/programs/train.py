"""A training script as many are: argparse, a process group by torchrun's variables, micro-batches,
its own loop."""

import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--micro-batches", type=int, default=4)
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--steps", type=int, default=100_000)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        return x + self.mlp(x)


def main() -> None:
    options = parser.parse_args()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = "cpu"
    if torch.cuda.is_available():
        device = f"cuda:{dist.get_node_local_rank()}"
    torch.manual_seed(dist.get_rank())
    model = DDP(
        nn.Sequential(Block(options.width), Block(options.width)).to(device)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(options.steps):
        for micro in range(options.micro_batches):
            x = torch.randn(
                options.batch_size, 32, options.width, device=device
            )
            last = micro == options.micro_batches - 1
            with nullcontext() if last else model.no_sync():
                loss = (model(x) - x).square().mean() / options.micro_batches
                loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 1000 == 0 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
