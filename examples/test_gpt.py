"""Gate a training step of a small GPT: `pytest examples --ddp-save-baseline` once, then `pytest
examples`."""

import os

import pytest
import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from pytest_ddpperf.suite.models import GPT, GPTConfig

# A regression to try: DDP_BUCKET_CAP_MB=0.001 gives every gradient a bucket of its own.
BUCKET_CAP_MB = (
    float(os.environ["DDP_BUCKET_CAP_MB"])
    if "DDP_BUCKET_CAP_MB" in os.environ
    else None
)


# Its steps are short, so that two ranks on two shared cores are noisy: wide limits, yet buckets
# that are far too small cost +150 % there. On accelerators, use far closer limits.
@pytest.mark.ddp(warmup=3, steps=20, threshold="p10:40%,p50:50%")
def test_gpt_training_step(ddp_benchmark):
    config = GPTConfig()
    batch_size = 2  # sequences

    def setup(ctx):  # in every rank
        # each rank draws data of its own; DDP copies rank 0's weights
        torch.manual_seed(ctx.seed + ctx.rank)
        text = torch.randint(
            config.vocabulary,
            (batch_size, config.context + 1),
            device=ctx.device,
        )
        # every token's target is the next one
        tokens, targets = text[:, :-1], text[:, 1:].flatten()
        model = DDP(GPT(config).to(ctx.device), bucket_cap_mb=BUCKET_CAP_MB)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

        def step():  # what is timed
            optimizer.zero_grad()
            F.cross_entropy(model(tokens).flatten(0, 1), targets).backward()
            optimizer.step()

        return step

    ddp_benchmark(setup, batch_size=batch_size)
