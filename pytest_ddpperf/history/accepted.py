"""Steps that somebody looked at and accepted: a small file each, for review. Knows what it holds and is called."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pytest_ddpperf.history import folder
from pytest_ddpperf.records import Interval, Scalar, TestId, codec
from pytest_ddpperf.records.errors import HistoryError

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """A step of one series that is meant to stay."""

    commit: str  # the first one that was measured after it, whole
    test: TestId
    environment: str  # the folder's name
    must_match: Mapping[str, Scalar]
    metric: str
    change: Interval  # relative, with its 95 % interval when it was accepted
    why: str


def write(root: Path, accepted: Accepted) -> Path:
    """Add the file, and say where; raises HistoryError."""
    content = codec.dumps({"schema": SCHEMA, **asdict(accepted)})
    digest = hashlib.sha256(content.encode()).hexdigest()[:8]
    path = root / folder.ACCEPTED / f"{accepted.commit[:12]}-{digest}.json"
    folder.put(path, content)
    return path


def read(root: Path) -> Sequence[Accepted]:
    """All of a history; raises HistoryError."""
    found = []
    for path, data in folder.files(root, folder.ACCEPTED):
        try:
            content = json.loads(data)
            if not isinstance(content, dict) or content.pop("schema", None) != SCHEMA:
                raise HistoryError(path, f"is no accepted step of schema {SCHEMA}")
            found.append(codec.decode(Accepted, content))
        except (ValueError, RecursionError) as error:
            raise HistoryError(path, f"is no accepted step, or not all of it: {error}") from error
    return found
