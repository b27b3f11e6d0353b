"""What the ranks of a launch are told, by a file in its folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from pytest_ddpperf.launch import environ
from pytest_ddpperf.launch.cores import Placement
from pytest_ddpperf.launch.elsewhere import Part
from pytest_ddpperf.records import Plan, codec
from pytest_ddpperf.wire import boot
from pytest_ddpperf.wire.trees import Trees


def request(
    plan: Plan, part: Part, placement: Placement, modules: Mapping[str, str], trees: Trees | None, *, held: bool
) -> dict[str, Any]:
    """As `rank.worker` reads it; with this process's environment, folder and search path as they are now."""
    return {
        "plan": codec.encode(plan),
        "held": held,
        "environ": environ.for_ranks(os.environ, plan.processes, part),
        "node": part.node,
        "processes": part.processes,
        "store": part.store,
        "cwd": os.getcwd(),
        "sys_path": boot.search_path(),
        "argv": sys.argv,
        "cpus": placement.cpus if plan.device == "cpu" else ((),) * len(part.processes),
        "threads": placement.own_threads if plan.device == "cpu" else 0,
        "modules": dict(modules),
        "trees": asdict(trees) if trees is not None else None,
    }
