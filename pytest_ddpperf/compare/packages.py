"""Which installed packages ranks imported, and whether they are the same as another day."""

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from functools import cache
from importlib import metadata

from pytest_ddpperf.compare.rounds import Launches
from pytest_ddpperf.records.samples import Distribution

# What installers and Python itself add to packages: it finds modules, and does nothing in a step.
_OF_THE_INSTALLATION = (
    "__editable__",
    "_sysconfigdata",
    "_virtualenv",
    "sitecustomize",
    "usercustomize",
)


def distributions(launches: Launches) -> dict[str, Distribution]:
    """Return, by name, the distributions that ranks imported from; of a namespace, all that have a
    part of it.

    A module of no distribution, or of one that is installed to be edited, has its own name and no
    digest.
    """
    by_module = _by_module(tuple(sys.path))
    found: dict[str, Distribution] = {}
    for entry in sorted(
        {entry for launch in launches for entry in launch.others}
    ):
        if entry.startswith(_OF_THE_INSTALLATION):
            continue
        module, _, folder = entry.partition("@")
        own = [
            each
            for each in by_module.get(module, ())
            if folder in ("", os.path.realpath(str(each.locate_file(""))))
        ]
        if not own or any(
            module not in _modules_of(each) or _is_editable(each)
            for each in own
        ):
            found[module] = Distribution(version="", digest="")
            continue
        for distribution in own:
            facts = distribution.metadata
            # else it is what a broken installation left
            if "Name" in facts and "Version" in facts:
                found.setdefault(
                    facts["Name"],
                    Distribution(
                        version=facts["Version"], digest=_digest(distribution)
                    ),
                )
    return found


def _is_editable(distribution: metadata.Distribution) -> bool:
    """Whether a distribution is installed to be edited, by any installer: uv writes JSON without
    spaces."""
    try:
        return bool(
            json.loads(distribution.read_text("direct_url.json") or "{}")[
                "dir_info"
            ]["editable"]
        )
    except (ValueError, KeyError, TypeError):
        return False


@cache
def _by_module(
    path: tuple[str, ...],
) -> Mapping[str, list[metadata.Distribution]]:
    """Return the distributions by module. `metadata.packages_distributions` takes five times as
    long, and in Python 3.10 leaves out those without top_level.txt."""
    found: dict[str, list[metadata.Distribution]] = {}
    for distribution in metadata.distributions(path=list(path)):
        for module in (
            distribution.read_text("top_level.txt") or ""
        ).split() or _modules_of(distribution):
            found.setdefault(module, []).append(distribution)
    return found


def _modules_of(distribution: metadata.Distribution) -> set[str]:
    """Return the top-level modules of a distribution's files; an editable install has none."""
    return {
        line.split(",")[0].split("/")[0].split(".")[0]
        for line in _record(distribution)
    }


def _digest(distribution: metadata.Distribution) -> str:
    """Return a digest of a distribution's files that does not depend on where and by what it was
    installed.

    Scripts name the interpreter, files that an installer compiled have no hash, and its own notes
    are in the metadata."""
    lines = [
        line
        for line in _record(distribution)
        if not line.startswith("..")
        and not line.endswith(",,")
        and ".dist-info/" not in line
    ]
    return (
        hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:16]
        if lines
        else ""
    )


def _record(distribution: metadata.Distribution) -> list[str]:
    """Return a line for each file: path, hash and size."""
    return (distribution.read_text("RECORD") or "").splitlines()
