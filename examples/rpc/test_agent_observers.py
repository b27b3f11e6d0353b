"""Gate reinforcement learning over RPC: one agent, many observers that ask it what to do.

The step time is the latency of a round of all observers, the rate its throughput: actions a second.

    pytest examples/rpc/test_agent_observers.py --ddp-parameter-servers 16
"""

import pytest
import torch
import torch.distributed.rpc as rpc

STATE, ACTIONS = 64, 8
ACTIONS_A_ROUND = 5  # of each observer

policy = torch.nn.Sequential(torch.nn.Linear(STATE, 128), torch.nn.ReLU(), torch.nn.Linear(128, ACTIONS))


def select_action(state):
    """Called by the observers, in the agent."""
    with torch.no_grad():
        return int(policy(state).argmax())


def observe(agent):
    """Called by the agent, in an observer: a few steps in its world."""
    state = torch.zeros(STATE)
    for _ in range(ACTIONS_A_ROUND):
        action = rpc.rpc_sync(agent, select_action, (state,))
        state[action] += 1
    return int(state.sum())


@pytest.mark.ddp(warmup=3, threshold="p10:40%,p50:50%")
def test_round_of_all_observers(rpc_benchmark):
    def agent(ctx):
        observers = ctx.workers["parameter_server"]

        def round_of_all():
            rounds = [rpc.rpc_async(observer, observe, (ctx.name,)) for observer in observers]
            return sum(each.wait() for each in rounds)

        return round_of_all

    rpc_benchmark(agent, trainers=1)
