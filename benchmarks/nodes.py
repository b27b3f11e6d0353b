"""What it costs to lead many nodes: a launch of up to 1,024 ranks on 16 nodes, led and reported.

    python benchmarks/nodes.py [--ranks-per-node 64] [--steps 100] [--launches 5]

No rank is real: a process of its own plays all nodes, each over a TCP connection of its own on loopback, and delivers
marks that were prepared. Everything that leads is: the connections with their proofs, the clocks, the store of each
launch, the samples, the verdict against a baseline of as many ranks, the table with a line a rank, the JSON.

Each row is a process of its own. "lead" is the CPU time of the leading process for one launch, "judge" that of a
comparison, "report" that of table and JSON; "messages" are those it received for a launch, "MB in" their size, "MB" by
how much the peak of its memory rose.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from _common import progress, table, verdict

from pytest_ddpperf.baseline import environment
from pytest_ddpperf.launch import Launcher, Observer
from pytest_ddpperf.measuring.launches import measurement
from pytest_ddpperf.records import codec
from pytest_ddpperf.records.messages import Event, EventKind, Order, OrderKind
from pytest_ddpperf.records.outcome import Outcome
from pytest_ddpperf.records.plan import Limit, Plan
from pytest_ddpperf.records.samples import TestId, Window
from pytest_ddpperf.remote import handshake
from pytest_ddpperf.remote.node import CLOCK, CURRENT, EXCHANGES, Node
from pytest_ddpperf.remote.node_launch import Side
from pytest_ddpperf.remote.nodes import describe_node
from pytest_ddpperf.remote.worktree import one_tree
from pytest_ddpperf.report import terminal
from pytest_ddpperf.verdict.times import judge_times
from pytest_ddpperf.wire.channels import Lines

KEY = b"of nobody"
VERSIONS: dict[str, str] = {}  # none is compared
NODES = (1, 2, 4, 8, 16)
MOST_A_RANK = 1.5  # of what one costs among few: no more than linear


def window(rank: int, steps: int) -> bytes:
    """What a rank delivers."""
    source = random.Random(rank)
    marks = [time.monotonic_ns()]
    for _ in range(steps):
        marks.append(marks[-1] + int(1e7 * source.uniform(1.0, 1.2)))
    made = Window(
        marks_ns=(tuple(marks),),
        cpu_ns=(9_000_000,) * steps,
        examples=None,
        blocked_ns=(0,) * steps,
        counters={},
        compiled_at=0,
        unsettled="",
        warmup=5,
        facts={"host": "nobody's", "cpu_model": "none"} if rank == 0 else {},
    )
    return json.dumps(codec.encode(made)).encode()


def play(number: int, port: int, steps: int) -> None:
    """One node, until its connection ends."""
    lines = handshake.connect_to_leader("127.0.0.1", port, KEY, number)
    lines.send(codec.encode_message(describe_node(VERSIONS)))
    while (messages := lines.receive()) is not None:
        for message in messages:
            answer(lines, number - 1, codec.decode(Order, message), steps)


def answer(lines: Lines, node: int, order: Order, steps: int) -> None:
    def send(kind: EventKind, side: str = CURRENT, **fields: Any) -> None:
        lines.send(codec.encode_message(Event(kind, side=side, **fields)))

    if order.kind is OrderKind.ACQUIRE_LOCKS:
        send(EventKind.LOCKS_ACQUIRED)
    elif order.kind is OrderKind.SEND_CLOCK:
        send(EventKind.CLOCK_READY, side="")
        for _ in range(EXCHANGES):
            lines.socket.recv(1)
            lines.socket.send(CLOCK.pack(time.monotonic_ns()))
    elif order.kind is OrderKind.TAKE_SHARE:
        send(EventKind.SHARE_SETTLED, results={rank: window(rank, steps) for rank in order.plan.part(node)})
    elif order.kind is OrderKind.RELEASE_RANKS:
        send(EventKind.SHARE_ENDED)


def one(nodes: int, ranks_per_node: int, steps: int, launches: int) -> dict[str, float]:
    """The figures of one row."""
    with handshake.listening("127.0.0.1", nodes) as listening:
        port = listening.getsockname()[1]
        players = os.fork()
        if not players:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            threads = [threading.Thread(target=play, args=(node + 1, port, steps)) for node in range(nodes)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            os._exit(0)
        came = handshake.admit(listening, KEY, range(1, nodes + 1), time.monotonic() + 60, print)
    heard = {"messages": 0, "bytes": 0}
    members = []
    for number, lines in sorted(came.items()):
        count(lines, heard)
        member = Node(number, lines, 60.0).current
        member.node = number - 1
        members.append(member)
    hosts = [f"host{node}" for node in range(nodes)]
    side = Side(members, address="127.0.0.1", interface="lo", hosts=hosts, order="", facts={"hosts": ", ".join(hosts)})
    world_size = nodes * ranks_per_node
    plan = Plan(world_size=world_size, nodes=nodes, backend="gloo", device="cpu", warmup=5, steps=steps)
    launcher, trees = Launcher(dict), one_tree(Path.cwd())
    try:
        launcher.lead(plan, side, Observer(), trees, os.environ)  # starts the rank server
        before, memory = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        heard.update(messages=0, bytes=0)
        taken = [launcher.lead(plan, side, Observer(), trees, os.environ) for _ in range(launches)]
        remote_pytest = time.process_time()
        where = environment(taken[0].facts, plan, batch_size=None)
        made = measurement(taken, where)
        judgement = judge_times(made, [made], (Limit(metric="p50", value=0.1, unit="%"),), level=0.05)
        judged = time.process_time()
        outcome = Outcome(
            nodeid="test_a.py::test_a",
            test=TestId(module="test_a", name="test_a"),
            plan=plan,
            launches=launches,
            batch_size=None,
            verdict=judgement,
            fails=False,
            measurement=made,
            costs=tuple(launch.cost for launch in taken),
        )
        lines = list(terminal.details([outcome]))
        text = json.dumps(codec.encode(outcome))
        reported = time.process_time()
        assert min(len(lines), len(text)) > world_size
    finally:
        launcher.close()
        for connection in came.values():
            connection.socket.close()
        os.waitpid(players, 0)
    return {
        "ranks": world_size,
        "messages": heard["messages"] / launches,
        "MB in": heard["bytes"] / launches / 1e6,
        "lead": (remote_pytest - before) / launches,
        "judge": judged - remote_pytest,
        "report": reported - judged,
        "MB": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) / 1e3,
    }


def count(lines: Lines, heard: dict[str, int]) -> None:
    """Let all that is received be counted."""
    receive = lines.receive

    def counted() -> list[dict[str, Any]] | None:
        messages = receive()
        heard["messages"] += len(messages or ())
        heard["bytes"] += sum(len(json.dumps(message)) for message in messages or ())
        return messages

    lines.receive = counted  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks-per-node", type=int, default=64)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--launches", type=int, default=5)
    parser.add_argument("--nodes", type=int, help="one row, as JSON")
    asked = parser.parse_args()
    if asked.nodes:
        print(json.dumps(one(asked.nodes, asked.ranks_per_node, asked.steps, asked.launches)))
        return
    rows = [["ranks on nodes", "messages", "MB in", "lead", "judge", "report", "MB"]]
    found: list[dict[str, float]] = []
    for done, nodes in enumerate(NODES, 1):
        command = [sys.executable, __file__, "--nodes", str(nodes), *sys.argv[1:]]
        found.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
        row = found[-1]
        costs = (f"{row[name]:.3f} s" for name in ("lead", "judge", "report"))
        ranks, messages = f"{row['ranks']:.0f} on {nodes}", f"{row['messages']:.0f}"
        rows.append([ranks, messages, f"{row['MB in']:.2f}", *costs, f"{row['MB']:.0f}"])
        progress(done, len(NODES), "nodes")
    print(table(rows))
    few, many = found[1], found[-1]
    times = many["ranks"] / few["ranks"]
    grows = {name: many[name] / few[name] / times for name in ("messages", "MB in", "lead", "report", "MB")}
    where = f"a rank on {NODES[-1]} nodes as on {NODES[1]}"
    paused = [(f"{name}: {grown:.2g} times as much {where}", grown <= MOST_A_RANK) for name, grown in grows.items()]
    sys.exit(verdict(paused))


if __name__ == "__main__":
    main()
