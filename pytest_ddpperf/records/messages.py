"""Messages between processes, sent as JSON: a dataclass each, or a member of an enumeration.

Here are those between pytest (`launch.server_client`) and its rank server (`rank.fork_server`): requests, then answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class StartServer:
    """The first message: import the modules to `preload`, then serve."""

    sys_path: list[str]
    parent: int  # pytest's pid: the server dies with it
    preload: list[str]
    trees: dict[str, Any] | None  # the fields of `wire.source_trees.Trees` if there are two
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
class ServerFailed:
    """A module could not be imported; the server has ended."""

    traceback: str


@dataclass(frozen=True, slots=True)
class RankForked:
    """A rank has started."""

    rank: int
    pid: int


@dataclass(frozen=True, slots=True)
class RankEnded:
    """A rank has ended by itself."""

    pid: int
    status: int  # negative for a signal
    when: float  # seconds of the monotonic clock


class Request(Enum):
    """Requests that need nothing further."""

    HOLD_STORE = "hold store"  # fork a process that holds the store of several nodes; a bound socket comes along
    PAUSE_RANKS = "pause ranks"  # send SIGSTOP to the ranks' process groups; answered by RANKS_PAUSED
    RESUME_RANKS = "resume ranks"  # send SIGCONT to them
    DUMP_STACKS = "dump stacks"  # resume the ranks and send SIGQUIT to each: faulthandler writes its stacks
    END_LAUNCH = "end launch"  # kill what is left of the launch; answered by LAUNCH_ENDED
    STOP_SERVER = "stop server"  # nothing more will come: pytest ends this server, or itself, in order


class Answer(Enum):
    """Answers that say nothing further."""

    SERVER_READY = "server ready"  # all modules are imported
    RANKS_PAUSED = "ranks paused"  # the signals were sent
    LAUNCH_ENDED = "launch ended"  # no process of the launch is left


ServerRequest = StartServer | BeginLaunch | ForkRank | Request
ServerAnswer = ServerFailed | RankForked | RankEnded | Answer
_WITH_FIELDS = {
    kind.__name__: kind for kind in (StartServer, BeginLaunch, ForkRank, ServerFailed, RankForked, RankEnded)
}
_WITHOUT = {str(message.value): message for kind in (Request, Answer) for message in kind}


def encode(message: ServerRequest | ServerAnswer) -> dict[str, Any]:
    """Return the fields for JSON, with the name of the message as `message`."""
    if isinstance(message, Enum):
        return {"message": message.value}
    return {"message": type(message).__name__, **asdict(message)}


def decode(fields: Mapping[str, Any]) -> Any:
    """Return the message that `encode` made these fields from."""
    name = fields["message"]
    if name in _WITHOUT:
        return _WITHOUT[name]
    return _WITH_FIELDS[name](**{key: value for key, value in fields.items() if key != "message"})
