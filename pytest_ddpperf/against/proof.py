"""Whether two sides are two: what each imported of the user's package, and with what."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from pytest_ddpperf.led.sources import Sources, differing


def nothing_differs(
    hand: Sources, base: Sources, environ: Mapping[str, str], option: Sequence[str], changed: Collection[str]
) -> bool:
    """Whether both sides run the same, as far as can be told before anything ran: `environ` and `option` are what
    was asked to be otherwise, `changed` are files that differ between the trees. Those may yet be imported in a rank,
    or compiled or read there, unless they are mere text for people."""
    if (hand.python, hand.prefix) != (base.python, base.prefix) or option:
        return False
    if any(os.environ.get(name) != value for name, value in environ.items()):
        return False
    return not differing(hand.files, base.files) and all(map(for_people, changed))


def for_people(file: str) -> bool:
    """Whether a file is mere text for them, which no step reads."""
    path = Path(file)
    hidden = any(part.startswith(".") for part in path.parts)  # of git, of CI, of editors
    return hidden or path.suffix in ("", ".md", ".rst", ".txt")
