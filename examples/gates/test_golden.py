"""Time and memory of a mixture-of-experts layer over all ranks, as a gate of golden values has it.

pytest examples/gates/test_golden.py --ddp-save-baseline     # writes the golden values
pytest examples/gates/test_golden.py                         # red if it is slower or larger
"""

import pytest
import torch
import torch.distributed as dist

WIDTH, TOKENS = 128, 512


@pytest.mark.ddp(threshold="p50:10%,mean:25%,peak_rss.bytes:10%")
def test_experts(ddp_benchmark):
    def setup(ctx):
        torch.manual_seed(ctx.seed)
        router = torch.nn.Linear(WIDTH, ctx.world_size, device=ctx.device)
        expert = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 4 * WIDTH),
            torch.nn.GELU(),
            torch.nn.Linear(4 * WIDTH, WIDTH),
        ).to(ctx.device)
        tokens = torch.randn(TOKENS, WIDTH, device=ctx.device)

        def step():  # each rank has one expert, and equally many tokens of each rank
            scores = router(tokens).softmax(dim=1)
            chosen = scores.topk(TOKENS // ctx.world_size, dim=0)
            sent = tokens[chosen.indices.T].flatten(0, 1)
            received = torch.empty_like(sent)
            dist.all_to_all_single(received, sent)
            answers = expert(received)
            returned = torch.empty_like(answers)
            dist.all_to_all_single(returned, answers.detach())
            loss = (chosen.values.T.flatten()[:, None] * returned).mean()
            (loss + answers.square().mean()).backward()

        return step

    ddp_benchmark(setup, batch_size=TOKENS)
