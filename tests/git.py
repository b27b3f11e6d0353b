"""Repositories of tests. That no variable and no settings of the user's have a part in them is
conftest.py's."""

from __future__ import annotations

import subprocess
from pathlib import Path


def git(folder: Path, *arguments: str | Path) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    # else git goes on in the background and writes there
    alone = ["-c", "gc.auto=0", "-c", "maintenance.auto=false"]
    command = [
        "git",
        "-C",
        str(folder),
        *identity,
        *alone,
        *map(str, arguments),
    ]
    return subprocess.run(
        command, check=True, capture_output=True, text=True
    ).stdout.strip()
