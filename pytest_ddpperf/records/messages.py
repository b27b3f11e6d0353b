"""Messages between processes, sent as JSON: one class for each kind.

First those between pytest and a template (`launch.template`, `rank.template`). Then those between
pytest (`launch.server_client`) and its rank server (`rank.fork_server`), and what a rank reads at
its start. Last those between a leading pytest (`remote`) and a remote one
(`plugin.leader_connection`): orders and events. `ServerRequest`, `ServerAnswer`, `Order` and
`Event` are the unions that a receiver decodes and takes apart by `match`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import Struct, structs

from pytest_ddpperf.records.guard import Judged
from pytest_ddpperf.records.plan import Plan, Variables
from pytest_ddpperf.records.record import record
from pytest_ddpperf.records.samples import (
    Digests,
    Facts,
    LaunchSamples,
    Outputs,
    RankError,
    Verdict,
)

Address = tuple[str, int]  # and port


M = TypeVar("M")

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform

    @dataclass_transform(frozen_default=True)
    class Message:
        """A message, which cannot change; "kind" in its JSON is the name of its class."""

    def changed(message: M, **fields: Any) -> M:
        """Return a message with other values of some fields."""
else:
    changed = structs.replace

    class Message(
        Struct, frozen=True, tag_field="kind", tag=True, omit_defaults=True
    ):
        """A message, which cannot change; "kind" in its JSON is the name of its class."""


# --- between pytest and a template (`rank.template`), from which rank servers are forked


class StartTemplate(Message):
    """The first message to a template: import what all ranks need."""

    sys_path: list[str]
    parent: int  # pytest's pid: the template dies with it


class ForkServer(Message):
    """Fork a rank server. Its end of its connection comes along."""


class ServerEnded(Message):
    """A rank server has ended."""

    pid: int
    status: int  # negative for a signal


# --- between pytest and its rank server


class StartServer(Message):
    """The first message to a rank server: import the modules to `preload`, then serve. The file for
    its output comes along."""

    sys_path: list[str]
    environ: Variables
    cwd: str
    preload: tuple[str, ...]
    # the fields of `wire.source_trees.Trees` if there are two
    trees: dict[str, Any] | None
    folder: str  # removed if pytest goes without a word; "" for none


class BeginLaunch(Message):
    """Ranks find their `RankRequest` in `folder`, which the server removes if pytest cannot."""

    folder: str


class ForkRank(Message):
    """Fork a rank: RankForked. Its end of its channel comes along."""

    rank: int


class HoldStore(Message):
    """Fork a process that holds the store of several nodes. A bound socket comes along."""


class PauseRanks(Message):
    """Send SIGSTOP to the ranks and to all that they started: RanksPaused."""


class ResumeRanks(Message):
    """Send SIGCONT to the ranks and to all that they started."""


class DumpStacks(Message):
    """Resume the ranks and send SIGQUIT to each: faulthandler writes its stacks."""


class EndLaunch(Message):
    """Kill what is left of the launch: LaunchEnded."""


class StopServer(Message):
    """Nothing more will come: pytest ends this server, or itself, in order."""


ServerRequest = (
    BeginLaunch
    | ForkRank
    | HoldStore
    | PauseRanks
    | ResumeRanks
    | DumpStacks
    | EndLaunch
    | StopServer
)


class ServerReady(Message):
    """All modules are imported, in the process `pid`."""

    pid: int


class ServerFailed(Message):
    """A module could not be imported; the server has ended."""

    traceback: str


class RankForked(Message):
    """A rank has started."""

    rank: int
    pid: int


class RankEnded(Message):
    """A process of the launch has ended by itself."""

    pid: int
    status: int  # negative for a signal
    when: float  # seconds of the monotonic clock


class RanksPaused(Message):
    """The signals of PauseRanks were sent."""


class LaunchEnded(Message):
    """No process of the launch is left."""


ServerAnswer = (
    ServerReady
    | ServerFailed
    | RankForked
    | RankEnded
    | RanksPaused
    | LaunchEnded
)


@record
class RankRequest:
    """What the ranks of a launch on this node read at their start, from a file in its folder."""

    plan: Plan
    in_stretches: bool  # whether they pause between stretches of their window
    environ: Variables  # without RANK and LOCAL_RANK
    node: int
    processes: tuple[int, ...]  # those of the plan that this node starts
    store: Address | None  # address and port where the nodes meet
    cwd: str
    sys_path: list[str]
    argv: list[str]
    # process of this node x core; empty where not pinned
    cpus: tuple[tuple[int, ...], ...]
    # By process of this node, the CUDA device that it alone sees, by number or UUID; () where all
    # see all.
    devices: tuple[str, ...]
    threads: int  # of a rank whose environment asks for none; 0: torch's choice
    modules: Mapping[str, str]  # that pytest collected: name -> file
    # the fields of `wire.source_trees.Trees`: report what is used from there
    trees: dict[str, Any] | None


@record
class Resting:
    """What a rank of a paused launch says when it has come to rest."""

    steps: int  # of its window
    step_ns: int  # of each, about; 0 without a warm-up


# --- between a leading pytest and a remote one


@record
class Sources:
    """What a side runs."""

    python: str  # version
    # of the interpreter's environment: virtual ones share an interpreter
    prefix: str
    # those of the user's package that were imported by now: path -> digest
    files: Digests


@record
class StartPytest:
    """The first message to a remote pytest: collect these tests, then do what the leader orders.
    Answer: Hello."""

    sys_path: list[str] | None  # None for the interpreter's own
    # of the plugin; a remote pytest of another one sends Hello and ends
    version: str
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
    variables: Variables = field(default_factory=dict)
    node: int = 0
    nodes: int = 1
    interface: str = ""  # to the other nodes
    # Of a version's pytest that leads those on other nodes: the address by which they reach this
    # one, and a descriptor of the connection to each, by node.
    address: str = ""
    connections: Mapping[int, int] = field(default_factory=dict)
    # that it begins with, as pytest did: a test may have bound that to fewer; () for all
    cores: tuple[int, ...] = ()


# The orders of a leader. The docstring of each names the event that answers it.


class RunTest(Message):
    """Run a test: Ready when it asks for a measurement or a call, TestEnded at its end."""

    nodeid: str


class MeasureAs(Message):
    """Use this plan instead of the one in ReadyToMeasure."""

    plan: Plan


class TakeLaunch(Message):
    """Take one launch of so many steps: Launched or LaunchFailed."""

    steps: int | None  # None: the launch decides by its plan


class PauseLaunch(Message):
    """Start a launch and pause it after its warm-up: Paused or LaunchFailed."""

    steps: int | None  # as in TakeLaunch


class RunStretch(Message):
    """Run so many steps of the paused launch: StretchDone or LaunchFailed."""

    steps: int


class SampleStacks(Message):
    """Take a launch of `plan`, which does not count: Launched or LaunchFailed."""

    plan: Plan


class Deliver(Message):
    """End the paused launch: Launched or LaunchFailed."""


class Drop(Message):
    """End the paused launch, whatever comes of it: Dropped."""


class EndMeasurement(Message):
    """Go on with the test, on several nodes with what the leader got."""

    samples: tuple[LaunchSamples, ...] = ()
    verdict: Verdict | None = None
    fails: bool = False  # whether the test fails by its verdict


class EndCall(Message):
    """Go on with the test that asked for a call."""

    results: tuple[bytes, ...]  # pickled, by rank


class RaiseError(Message):
    """Raise the error of the leader in the test, in place of a measurement or a result."""

    error: str


class LeaveTest(Message):
    """Give up what the test asked for: TestEnded."""


class AcquireLocks(Message):
    """Lock the node's cores or devices: LocksAcquired or LaunchFailed."""


class ReleaseLocks(Message):
    """Release the locks of AcquireLocks."""


class TakeShare(Message):
    """Start this node's ranks of a launch of `plan`: RankFailed for each that fails, ShareSettled
    when all have delivered, LaunchFailed if they cannot be started."""

    plan: Plan
    store: Address  # address and port where the ranks of all nodes meet


class SetWindow(Message):
    """Let the ranks of a program wait after their next step until it is known where their windows
    begin, or let them begin there: ShareProgress."""

    begin: int  # as `Board.begin` of rank 0
    steps: int  # of each window


class AskProgress(Message):
    """Say how far the ranks of a program are: ShareProgress, with what they wait for if some ranks
    of the launch have delivered."""

    some_delivered: bool  # on other nodes


class ReleaseRanks(Message):
    """Let the ranks end, for all nodes have delivered: ShareEnded."""


class StopRanks(Message):
    """End the ranks where they are: ShareEnded."""

    # what to say of those that hang at the deadline of the launch; "" before it
    late: str


# To the process that runs the pytest of a node.


class CheckAlive(Message):
    """Give a sign of life: Alive."""


class SendClock(Message):
    """Send ClockReady, then the time for each byte that comes."""


class RunPytest(Message):
    """Start the pytest of the node, with further arguments."""

    arguments: tuple[str, ...]


class ServeVersion(Message):
    """Start a pytest of another version of the code, with a connection of its own: NodeJoined
    there, and Died if this node has no such version."""

    commit: str  # "" if it is no other commit
    # as `Trees.kept`; what is in the repository begins at its top
    kept: tuple[str, ...]
    own_tests: bool  # as `StartPytest` has it
    seconds: float | None  # to check it out; None: as long as it takes
    port: int = 0  # where the leader awaits that connection


class GiveUp(Message):
    """End the pytest, which was silent for so many seconds: Died."""

    seconds: float


class Exit(Message):
    """End the pytest, then exit with the status of the leader's process."""

    status: int


Order = (
    RunTest
    | MeasureAs
    | TakeLaunch
    | PauseLaunch
    | RunStretch
    | SampleStacks
    | Deliver
    | Drop
    | EndMeasurement
    | EndCall
    | RaiseError
    | LeaveTest
    | AcquireLocks
    | ReleaseLocks
    | TakeShare
    | SetWindow
    | AskProgress
    | ReleaseRanks
    | StopRanks
    | CheckAlive
    | SendClock
    | RunPytest
    | ServeVersion
    | GiveUp
    | Exit
)


# The events that a remote pytest reports to its leader.


class Hello(Message):
    """The process has started, with this version of the plugin."""

    version: str


class Collected(Message):
    """The tests are collected."""

    tests: tuple[str, ...]  # node ids
    file_errors: Mapping[str, str]  # of collection, by file
    sources: Sources  # what it runs
    judged: Judged


class ConftestFailed(Message):
    """A conftest at the root of what is collected cannot be loaded: the process ends."""


class ServerStarted(Message):
    """The rank server has started and found these facts. In its place LaunchFailed: another node
    cannot be used."""

    facts: Facts


class ReadyToCall(Message):
    """The test asks for a call of the function `label`."""

    label: str
    plan: Plan
    number: int = 0  # of several nodes: of what the test asked for, from 1 on


class ReadyToMeasure(Message):
    """The test asks for the measurement `label`."""

    label: str
    plan: Plan
    number: int = 0  # as in ReadyToCall
    batch_size: int | None = None
    facts: Facts = {}


Ready = ReadyToCall | ReadyToMeasure


class Launched(Message):
    """The launch has ended."""

    samples: LaunchSamples


class LaunchFailed(Message):
    """What was ordered failed."""

    why: str


class Paused(Message):
    """The launch has warmed up: its window has `steps`."""

    steps: int
    step_seconds: float  # of each, about
    helpers: int  # processes that each rank has started


class StretchDone(Message):
    """All ranks rest again."""


class Dropped(Message):
    """The paused launch has ended."""


class TestEnded(Message):
    """The test has ended."""

    __test__ = False  # it is no test of pytest's

    why: str = ""  # what failed
    apart: str = ""  # what failed outside of the test's call, again


class Progress(Message):
    """Where the first rank of the launch under way is."""

    phase: int  # a `wire.channels.Phase`
    step: int
    steps: int


class WaitingForLock(Message):
    """Another process has the lock."""

    resource: str  # a core or a device, as a path


class LocksAcquired(Message):
    """This node has locked these cores or devices."""

    resources: tuple[str, ...]  # paths


# By process group, what `recorder.started` returns: the number, name and bytes of each collective
# that a rank has started.
Started = Mapping[str, Sequence[tuple[int, str, int]]]


class RankFailed(Message):
    """A rank of this node has failed."""

    # `when` is by the clock of the node, as in ShareEnded: the leader takes the time of arrival
    error: RankError


class ShareProgress(Message):
    """How far the ranks of this node are in a program."""

    updates: Mapping[int, int]  # by rank
    waiting: tuple[int, ...] = ()  # those that have not delivered
    started: Mapping[int, Started] = {}  # by rank


class ShareSettled(Message):
    """All ranks of this node have delivered."""

    results: Mapping[int, bytes]  # by rank


class ShareEnded(Message):
    """All ranks of this node have ended."""

    errors: tuple[RankError, ...] = ()
    # of ranks that had not failed, but waited for others
    waiting: tuple[RankError, ...] = ()
    output: Outputs = ()
    notes: tuple[str, ...] = ()
    results: Mapping[int, bytes] = {}  # by rank, unless ShareSettled was sent
    started: Mapping[int, Started] = {}  # by rank, after StopRanks
    # digests of what they opened of the repository, as `Opened.digests`
    files: Digests = {}


# Of the process that runs the pytest of a node.


class NodeJoined(Message):
    """The first event of a node."""

    host: str
    lock_order: str  # the place of the host's locks among those of all hosts
    versions: Mapping[str, str]  # of what has to be the same on all nodes


class Alive(Message):
    """The sign of life of CheckAlive."""


class ClockReady(Message):
    """What follows is no event, but the time."""


class Died(Message):
    """The pytest there ended, or could not be started."""

    why: str


Event = (
    Hello
    | Collected
    | ConftestFailed
    | ServerStarted
    | Ready
    | Launched
    | LaunchFailed
    | Paused
    | StretchDone
    | Dropped
    | TestEnded
    | Progress
    | WaitingForLock
    | LocksAcquired
    | RankFailed
    | ShareProgress
    | ShareSettled
    | ShareEnded
    | NodeJoined
    | Alive
    | ClockReady
    | Died
)
