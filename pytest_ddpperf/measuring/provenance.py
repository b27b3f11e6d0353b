"""Whose code a session measured: files of the repository and installed distributions, by what they held."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from importlib import metadata

from pytest_ddpperf.records import Distribution

# What installers and Python itself put beside packages: it finds modules, and does nothing in a step.
_OF_THE_INSTALLATION = ("__editable__", "_sysconfigdata", "_virtualenv", "sitecustomize", "usercustomize")


def files(launches: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """The files of all launches of a session; "" for one that changed meanwhile."""
    found: dict[str, str] = {}
    for launch in launches:
        for file, digest in launch.items():
            found[file] = digest if found.get(file, digest) == digest else ""
    return found


def distributions(modules: Collection[str]) -> dict[str, Distribution]:
    """By name, the distributions that brought these top-level modules; of a namespace, all that have a part in it."""
    brought = _by_module(tuple(sys.path))
    found: dict[str, Distribution] = {}
    for distribution in dict.fromkeys(each for module in sorted(modules) for each in brought.get(module, ())):
        said = distribution.metadata
        if "Name" in said and "Version" in said:  # else it is what an installation left that was broken off
            found.setdefault(said["Name"], Distribution(version=said["Version"], digest=_digest(distribution)))
    return found


def unaccounted(modules: Collection[str]) -> tuple[str, ...]:
    """Those of top-level modules from outside the repository of which no digest says what they hold: they are of no
    distribution, or of one that is installed to be edited."""
    brought = _by_module(tuple(sys.path))

    def known(module: str) -> bool:
        return module in brought and all(module in _brings(each) and not _editable(each) for each in brought[module])

    asked = (module for module in sorted(modules) if not module.startswith(_OF_THE_INSTALLATION))
    return tuple(module for module in asked if not known(module))


def _editable(distribution: metadata.Distribution) -> bool:
    """Whatever installed it: uv writes JSON without spaces."""
    try:
        return bool(json.loads(distribution.read_text("direct_url.json") or "{}")["dir_info"]["editable"])
    except (ValueError, KeyError, TypeError):
        return False


@cache
def _by_module(path: tuple[str, ...]) -> Mapping[str, list[metadata.Distribution]]:
    """As `metadata.packages_distributions`, which takes five times as long, and in Python 3.10 knows nothing of those
    without top_level.txt."""
    found: dict[str, list[metadata.Distribution]] = {}
    for distribution in metadata.distributions(path=list(path)):
        for module in (distribution.read_text("top_level.txt") or "").split() or _brings(distribution):
            found.setdefault(module, []).append(distribution)
    return found


def _brings(distribution: metadata.Distribution) -> set[str]:
    """The top-level modules that its files are of: none of what an editable install merely leads to."""
    return {line.split(",")[0].split("/")[0].split(".")[0] for line in _record(distribution)}


def _digest(distribution: metadata.Distribution) -> str:
    """The same wherever and by whatever it was installed: scripts name the interpreter, what an installer compiled has
    no hash, and what it tells of itself is beside the metadata."""
    lines = [
        line
        for line in _record(distribution)
        if not line.startswith("..") and not line.endswith(",,") and ".dist-info/" not in line
    ]
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:16] if lines else ""


def _record(distribution: metadata.Distribution) -> list[str]:
    """A line a file: path, hash and size."""
    return (distribution.read_text("RECORD") or "").splitlines()
