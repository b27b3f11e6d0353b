"""The temporary folder, where what the processes of a launch share has its files."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pytest_ddpperf.records.errors import SpaceError


@contextmanager
def writing() -> Iterator[None]:
    """While files are made there; raises SpaceError where it, or this user's share of it, is full."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise SpaceError(Path(tempfile.gettempdir())) from None
