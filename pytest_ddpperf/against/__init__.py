"""Another version as a process: its worktree, its pytest, the proof that it is another.

Knows git, processes and launches; nothing of pytest but how to call it, nothing of limits.
"""

from pytest_ddpperf.against.invocation import Invocation
from pytest_ddpperf.against.side import BaseSide

__all__ = ["BaseSide", "Invocation"]
