"""The place of this process among those that torchrun started, by torchrun's variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pytest_ddpperf.records.errors import NodesError


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """Of one pytest among those of several nodes."""

    node: int
    nodes: int
    local_rank: int
    address: str  # MASTER_ADDR
    port: int  # MASTER_PORT, of torchrun's own store
    hosted: bool  # whether torchrun holds that store; else the first process is to
    run: str  # the id of torchrun's run

    @property
    def leads(self) -> bool:
        """Whether this pytest decides, judges and reports."""
        return self.node == 0 and self.local_rank == 0

    @property
    def follows(self) -> bool:
        """Whether it launches the ranks of its node when it is told to."""
        return self.node > 0 and self.local_rank == 0


def role(environ: Mapping[str, str]) -> Role | None:
    """None where torchrun started none, or those of one node. Raises NodesError for what we cannot work with."""
    if "TORCHELASTIC_RUN_ID" not in environ or environ.get("GROUP_WORLD_SIZE", "1") == "1":
        return None
    try:
        found = Role(
            node=int(environ["GROUP_RANK"]),
            nodes=int(environ["GROUP_WORLD_SIZE"]),
            local_rank=int(environ["LOCAL_RANK"]),
            address=environ["MASTER_ADDR"],
            port=int(environ["MASTER_PORT"]),
            hosted=environ.get("TORCHELASTIC_USE_AGENT_STORE", "False") == "True",
            run=environ["TORCHELASTIC_RUN_ID"],
        )
    except (KeyError, ValueError) as error:
        raise NodesError(f"torchrun's variables are not whole: {type(error).__name__}: {error}") from None
    if environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        raise NodesError("torchrun --max-restarts: a run that begins again says nothing: leave it out, or say 0")
    if changing := _elastic(environ):
        raise NodesError(f"torchrun --nnodes {changing}: the number of nodes must be fixed: --nnodes {found.nodes}")
    return found


def _elastic(environ: Mapping[str, str]) -> str:
    """The range of nodes that torchrun was asked for, if this can be seen and is one; else ""."""
    least, colon, most = (_asked_of_torchrun() or environ.get("PET_NNODES", "")).partition(":")
    return f"{least}:{most}" if colon and least != most else ""


def _asked_of_torchrun() -> str:
    """The number of nodes on its command line; "" if none is seen there."""
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_text().split("\0")
    except (OSError, UnicodeDecodeError):
        return ""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if len(name) >= len("--nn") and "--nnodes".startswith(name):  # argparse takes what begins no other option
            return value if equals else following
    return ""
