"""Which commit a baseline is recorded at."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

_GIT_SECONDS = 10.0  # a cold cache on a network disk; beyond it the run goes on without the commit


def commit_of(path: Path) -> str:
    """The commit checked out at `path`, with "-dirty" where tracked files differ; "" where git cannot say."""
    command: list[Any] = ["git", "--no-optional-locks", "-C", path, "describe", "--always", "--dirty"]
    command += ["--abbrev=64", "--exclude=*"]  # the whole hash, never a tag
    try:
        result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_GIT_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return ""
    return result.stdout.decode("ascii", "replace").strip() if result.returncode == 0 else ""
