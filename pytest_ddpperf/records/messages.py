"""Messages between processes: one dataclass each, sent as JSON with the name of its class.

Here are those between pytest (`launch.server`) and its rank server (`rank.server`): requests, then answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class StartServer:
    """The first message: import the modules to `preload`, then serve. It is sent as its plain fields."""

    sys_path: list[str]
    parent: int  # pytest's pid: the server dies with it
    preload: list[str]
    trees: dict[str, Any] | None  # the fields of `wire.trees.Trees` if there are two
    folder: str  # removed if pytest goes without a word; "" for none


@dataclass(frozen=True, slots=True)
class BeginLaunch:
    """The following ranks find their request in `folder`, which the server removes if pytest cannot."""

    folder: str


@dataclass(frozen=True, slots=True)
class ForkRank:
    """Fork a rank. The rank's end of its channel comes along. Answer: RankForked."""

    rank: int


@dataclass(frozen=True, slots=True)
class HoldStore:
    """Fork a process that holds the store where ranks of several nodes meet. A bound socket comes along."""


@dataclass(frozen=True, slots=True)
class PauseRanks:
    """Send SIGSTOP to the ranks' process groups. Answer: RanksPaused."""


@dataclass(frozen=True, slots=True)
class ResumeRanks:
    """Send SIGCONT to the ranks' process groups."""


@dataclass(frozen=True, slots=True)
class DumpStacks:
    """Resume the ranks and send SIGQUIT to each: faulthandler writes its stacks."""


@dataclass(frozen=True, slots=True)
class EndLaunch:
    """Kill what is left of the launch. Answer: LaunchEnded."""


@dataclass(frozen=True, slots=True)
class StopServer:
    """Nothing more will come: pytest ends this server, or itself, in order."""


@dataclass(frozen=True, slots=True)
class ServerReady:
    """All modules are imported."""


@dataclass(frozen=True, slots=True)
class ServerFailed:
    """A module could not be imported; the server has ended."""

    traceback: str


@dataclass(frozen=True, slots=True)
class RankForked:
    """A rank has started."""

    rank: int
    pid: int


@dataclass(frozen=True, slots=True)
class RanksPaused:
    """The signals of PauseRanks were sent."""


@dataclass(frozen=True, slots=True)
class RankEnded:
    """A rank has ended by itself."""

    pid: int
    status: int  # negative for a signal
    when: float  # seconds of the monotonic clock


@dataclass(frozen=True, slots=True)
class LaunchEnded:
    """No process of the launch is left."""


ServerRequest = BeginLaunch | ForkRank | HoldStore | PauseRanks | ResumeRanks | DumpStacks | EndLaunch | StopServer
ServerAnswer = ServerReady | ServerFailed | RankForked | RanksPaused | RankEnded | LaunchEnded
_MESSAGES: Mapping[str, type] = {
    kind.__name__: kind
    for kind in (
        *(BeginLaunch, ForkRank, HoldStore, PauseRanks, ResumeRanks, DumpStacks, EndLaunch, StopServer),
        *(ServerReady, ServerFailed, RankForked, RanksPaused, RankEnded, LaunchEnded),
    )
}


def encode(message: ServerRequest | ServerAnswer) -> dict[str, Any]:
    """Return the fields for JSON, with the class name as `message`."""
    return {"message": type(message).__name__, **asdict(message)}


def decode(fields: Mapping[str, Any]) -> Any:
    """Return the message that `encode` made these fields from."""
    return _MESSAGES[fields["message"]](**{name: value for name, value in fields.items() if name != "message"})
