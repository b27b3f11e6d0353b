"""Another version measured beside the code at hand: its worktree, its pytest, the turns that launches take.

Knows git, processes and launches; nothing of pytest but how to call it, nothing of limits.
"""

from pytest_ddpperf.against.proof import Sources
from pytest_ddpperf.against.side import BaseSide, Invocation
from pytest_ddpperf.against.splits import split
from pytest_ddpperf.against.turns import Turns

__all__ = ["BaseSide", "Invocation", "Sources", "Turns", "split"]
