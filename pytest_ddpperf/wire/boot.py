"""How a process of ours begins: it is told over its socket what it needs, for an argument of a command has a limit (of
128 KiB, on Linux) that a sys.path or the files of many tests exceed. Standard library only."""

from __future__ import annotations

import sys
from collections.abc import Sequence

# Before sys.path is what it shall be nothing of ours can be imported.
_BOOT = """
import sys
sys.path[:1] = filter(None, sys.path[:1])  # the current folder, which `pytest` has not
import importlib, json
module, descriptor = sys.argv[1], int(sys.argv[2])
with open(descriptor, "rb", closefd=False) as lines:
    start = json.loads(lines.readline())
sys.path[:] = start["sys_path"] or sys.path
importlib.import_module(module).main(descriptor, start)
"""


def search_path(entries: Sequence[str] | None = None) -> list[str]:
    """sys.path as imports read it: what is no text in it (a Path) is passed over."""
    return [entry for entry in (sys.path if entries is None else entries) if isinstance(entry, str)]


def command(python: str, module: str, descriptor: int) -> list[str]:
    """Calls `main(descriptor, start)` of a module: `start` is the first message that came over the socket `descriptor`,
    as `Lines` sends it, and none may follow before it is answered. Its `sys_path` is None for the interpreter's own."""
    return [python, "-c", _BOOT, module, str(descriptor)]
