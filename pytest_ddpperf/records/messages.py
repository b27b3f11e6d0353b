"""Messages between processes, sent as JSON.

First those between pytest (`launch.server_client`) and its rank server (`rank.fork_server`), then
those between a leading pytest (`remote`) and a remote one (`plugin.leader_connection`): orders
and events. Each is of a kind that says what it means and which fields it has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from typing import Any, Literal

from pytest_ddpperf.records.plan import Plan
from pytest_ddpperf.records.samples import (
    LaunchSamples,
    RankError,
    RankOutput,
    Scalar,
    Verdict,
)

# --- between pytest and its rank server


class ServerKind(Enum):
    """The requests of pytest and the answers to them: first those of a template (`rank.template`),
    from which rank servers are forked, then those of a rank server.

    A comment says what to do or what has happened, and with which fields of `ServerMessage`.
    """

    # The first message to a template: import what all ranks need, with `sys_path` and `parent`
    # (pytest's pid: the template dies with it).
    START_TEMPLATE = "start template"
    # its end of the connection to the rank server comes along
    FORK_SERVER = "fork server"
    SERVER_ENDED = "server ended"  # the rank server `pid` has ended, with `status`

    # The first message to a rank server: import the modules to `preload`, then serve; with
    # `sys_path`, `environ`, `cwd`, `trees` (the fields of `wire.source_trees.Trees` if there are
    # two) and `folder` (removed if pytest goes without a word; "" for none). The file for its
    # output comes along.
    START_SERVER = "start server"
    # ranks find their request in `folder`, which the server removes if pytest cannot
    BEGIN_LAUNCH = "begin launch"
    # fork a `rank`; its end of its channel comes along: RANK_FORKED
    FORK_RANK = "fork rank"
    # fork a process that holds the store of several nodes; a bound socket comes along
    HOLD_STORE = "hold store"
    # send SIGSTOP to the ranks and to all that they started: RANKS_PAUSED
    PAUSE_RANKS = "pause ranks"
    RESUME_RANKS = "resume ranks"  # send SIGCONT to them
    # resume the ranks and send SIGQUIT to each: faulthandler writes its stacks
    DUMP_STACKS = "dump stacks"
    END_LAUNCH = "end launch"  # kill what is left of the launch: LAUNCH_ENDED
    # nothing more will come: pytest ends this server, or itself, in order
    STOP_SERVER = "stop server"

    SERVER_READY = "server ready"  # all modules are imported, in the process `pid`
    # a module could not be imported (`traceback`); the server has ended
    SERVER_FAILED = "server failed"
    RANK_FORKED = "rank forked"  # a `rank` has started as `pid`
    # the process `pid` has ended by itself, with `status`, at `when`
    RANK_ENDED = "rank ended"
    RANKS_PAUSED = "ranks paused"  # the signals were sent
    LAUNCH_ENDED = "launch ended"  # no process of the launch is left


@dataclass(frozen=True, slots=True)
class ServerMessage:
    """A message to or from a template or a rank server. Only the fields that `ServerKind` names for
    its kind have a meaning."""

    kind: ServerKind
    _: KW_ONLY
    sys_path: tuple[str, ...] = ()
    environ: Mapping[str, str] | None = None
    cwd: str = ""
    parent: int = 0
    preload: tuple[str, ...] = ()
    trees: dict[str, Any] | None = None
    folder: str = ""
    rank: int = 0
    pid: int = 0
    status: int = 0  # negative for a signal
    when: float = 0.0  # seconds of the monotonic clock
    traceback: str = ""


# --- between a leading pytest and a remote one


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """What a side runs."""

    python: str  # version
    prefix: str  # of the interpreter's environment: virtual ones share an interpreter
    # those of the user's package that were imported by now: path -> digest
    files: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPytest:
    """The first message to a remote pytest: collect these tests, then do what the leader orders.
    Answer: HELLO."""

    sys_path: list[str] | None  # None for the interpreter's own
    version: str  # of the plugin; a remote pytest of another one sends HELLO and ends
    parent: int  # the pid of the process that started it: it dies with that
    trees: dict[str, Any]  # the fields of `wire.source_trees.Trees`
    # removed by the rank server there if the process that started it cannot
    folder: str
    arguments: list[str]  # of pytest
    argv: list[str]  # sys.argv, as tests see it
    # whether a baseline's code is measured again, with its own tests
    own_tests: bool = False
    # whether there will be RPC launches; None if its tests decide
    rpc: bool | None = None
    # a descriptor: the connection to a rank server of the leader's template
    rank_server: int | None = None
    # under which that has imported torch
    variables: Mapping[str, str] = field(default_factory=dict)
    node: int = 0
    nodes: int = 1
    interface: str = ""  # to the other nodes


class OrderKind(Enum):
    """The orders of a leader: to a remote pytest and, from CHECK_ALIVE on, to the process that runs
    that of a node.

    A comment says what to do, with which fields of `Order`, and by which event it is answered.
    """

    # `nodeid`: READY when it asks for a measurement or a call, TEST_ENDED at its end
    RUN_TEST = "run test"
    MEASURE_AS = "measure as"  # use this `plan` instead of the one in READY
    LAUNCH = "launch"  # take one launch of so many `steps`: LAUNCHED or LAUNCH_FAILED
    # start a launch and pause it after its warm-up: PAUSED or LAUNCH_FAILED
    PAUSE_LAUNCH = "pause launch"
    # run so many `steps` of the paused launch: STRETCH_DONE or LAUNCH_FAILED
    RUN_STRETCH = "run stretch"
    # take a launch of `plan`, which does not count: LAUNCHED or LAUNCH_FAILED
    SAMPLE_STACKS = "sample stacks"
    DELIVER = "deliver"  # end the paused launch: LAUNCHED or LAUNCH_FAILED
    DROP = "drop"  # end the paused launch, whatever comes of it: DROPPED
    # Go on with the test. On several nodes with what the leader got: `samples`, `verdict` and
    # `fails` of a measurement, `results` of a call, or an `error` to raise.
    END_MEASUREMENT = "end measurement"
    LEAVE_TEST = "leave test"  # give up what the test asked for: TEST_ENDED
    # those of the node's cores or devices: LOCKS_ACQUIRED or LAUNCH_FAILED
    ACQUIRE_LOCKS = "acquire locks"
    RELEASE_LOCKS = "release locks"
    # Start this node's ranks of a launch of `plan`, which meet at `store`: RANK_FAILED for each
    # that fails, SHARE_SETTLED when all have delivered, LAUNCH_FAILED if they cannot be started.
    TAKE_SHARE = "take share"
    # let the ranks end, for all nodes have delivered: SHARE_ENDED
    RELEASE_RANKS = "release ranks"
    # end the ranks where they are, perhaps `at_deadline`: SHARE_ENDED
    STOP_RANKS = "stop ranks"

    CHECK_ALIVE = "check alive"  # ALIVE
    SEND_CLOCK = "send clock"  # CLOCK_READY, then the time for each byte that comes
    START_PYTEST = "start pytest"  # with further `arguments`
    GIVE_UP = "give up"  # end the pytest, which was silent for so many `seconds`: DIED
    EXIT = "exit"  # end the pytest, then exit with `status`


NO_PLAN = Plan(world_size=0, backend="", device="")  # of messages without one


@dataclass(frozen=True, slots=True)
class Order:
    """A message of a leader. Only the fields that `OrderKind` names for its kind have a meaning."""

    kind: OrderKind
    _: KW_ONLY
    nodeid: str = ""
    plan: Plan = NO_PLAN
    steps: int | None = None  # None: the launch decides by its plan
    samples: tuple[LaunchSamples, ...] = ()
    verdict: Verdict | None = None
    fails: bool = False  # whether the test fails by its verdict
    results: tuple[bytes, ...] = ()  # pickled, by rank
    error: str | None = None
    store: tuple[str, int] | None = None  # address and port
    at_deadline: bool = False  # whether the time of the launch is over
    arguments: tuple[str, ...] = ()
    seconds: float = 0.0
    status: int = 0  # of the leader's process


class EventKind(Enum):
    """The events that a remote pytest reports to its leader; from NODE_JOINED on the process that
    runs that of a node.

    A comment says what has happened, and which fields of `Event` say more.
    """

    HELLO = "hello"  # the process has started, with this `version` of the plugin
    COLLECTED = "collected"  # `tests`, `sources`, and `file_errors` of collection
    # the rank server has started and found these `facts`
    SERVER_STARTED = "server started"
    # The test asks for a measurement or a call: `asks_for`, `label`, `plan` and, of several nodes,
    # its `number` within the test. Of a measurement `batch_size`, `facts` and `gate`, too.
    READY = "ready"
    LAUNCHED = "launched"  # the launch has ended: `samples` has one item
    LAUNCH_FAILED = "launch failed"  # why: `text`
    # the launch has warmed up: its window has `steps`, each of about `step_seconds`
    PAUSED = "paused"
    STRETCH_DONE = "stretch done"
    DROPPED = "dropped"  # the paused launch has ended
    # what failed: `text`; what failed outside of the test's call, again: `apart`
    TEST_ENDED = "test ended"
    # of the launch under way: the first rank's `phase`, and its `step` of so many
    # `steps`
    PROGRESS = "progress"
    # another process has the lock: `resources` has one item
    WAITING_FOR_LOCK = "waiting for lock"
    LOCKS_ACQUIRED = "locks acquired"  # this node has locked these `resources`
    RANK_FAILED = "rank failed"  # `errors` has one item
    SHARE_SETTLED = "share settled"  # all ranks of this node have delivered `results`
    # All ranks of this node have ended: `errors`, `waiting`, `output`, `notes`, and `results`
    # unless SHARE_SETTLED was sent.
    SHARE_ENDED = "share ended"

    # the first event of a node: its `host`, `lock_order` and `versions`
    NODE_JOINED = "node joined"
    ALIVE = "alive"
    CLOCK_READY = "clock ready"  # what follows is no event, but the time
    DIED = "died"  # the pytest there ended, or could not be started: `text`


@dataclass(frozen=True, slots=True)
class Event:
    """A message to a leader. Only the fields that `EventKind` names for its kind have a meaning."""

    kind: EventKind
    _: KW_ONLY
    version: str = ""
    tests: tuple[str, ...] = ()  # node ids
    file_errors: Mapping[str, str] = field(default_factory=dict)  # by file
    sources: Sources | None = None
    facts: Mapping[str, Scalar] = field(default_factory=dict)
    asks_for: Literal["a measurement", "a call"] = "a measurement"
    label: str = ""  # the name of the measurement or of the function
    plan: Plan = NO_PLAN
    number: int = 0
    batch_size: int | None = None
    gate: bool = False  # whether it is to be compared
    samples: tuple[LaunchSamples, ...] = ()
    text: str = ""
    apart: str = ""
    phase: int = 0  # a `wire.channels.Phase`
    step: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    resources: tuple[str, ...] = ()  # cores or devices, as paths
    errors: tuple[RankError, ...] = ()  # `when` by the clock of the node
    # of ranks that had not failed, but waited for others
    waiting: tuple[RankError, ...] = ()
    output: tuple[RankOutput, ...] = ()
    notes: tuple[str, ...] = ()
    results: Mapping[int, bytes] = field(default_factory=dict)  # by rank
    host: str = ""
    lock_order: str = ""  # the place of the host's locks among those of all hosts
    # of what has to be the same on all nodes
    versions: Mapping[str, str] = field(default_factory=dict)
