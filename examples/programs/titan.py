"""A training program as torchtitan's is: started by torchrun, with a loop and a log of its own."""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--log-every", type=int, default=10)
parser.add_argument("--tokens", type=int, default=512)  # a rank and step


def main() -> None:
    options = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", dist.get_node_local_rank())
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(
        nn.Embedding(256, 64),
        nn.Linear(64, 256),
        nn.GELU(),
        nn.Linear(256, 256),
    )
    model = DDP(model.to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    began = time.perf_counter()
    for step in range(1, options.steps + 1):
        tokens = torch.randint(256, (options.tokens,), device=device)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens), tokens)
        loss.backward()
        optimizer.step()
        if step % options.log_every == 0:
            said = f"step: {step} loss: {loss.item():.2f}"  # which waits
            ended = time.perf_counter()
            tps = options.log_every * options.tokens / (ended - began)
            began = ended
            if dist.get_rank() == 0:
                print(f"{said} tps: {tps:,.0f}", flush=True)
    dist.barrier()  # over Gloo a rank that ends while others do not may abort
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
