"""Which torch the tests run with, and what marks a test that needs a newer one."""

from __future__ import annotations

from importlib import metadata

import pytest
from packaging.version import Version


def release_of(version: str) -> tuple[int, int]:
    """Return major and minor version; a development build, "2.14.0a0+x", counts as its release."""
    major, minor, *_ = Version(version).release
    return major, minor


TORCH = release_of(metadata.version("torch"))


def needs_torch(release: str, why: str) -> pytest.MarkDecorator:
    """Return the mark of a test that is skipped with a torch older than `release`."""
    return pytest.mark.skipif(
        release_of(release) > TORCH, reason=f"needs torch {release}: {why}"
    )


NEEDS_RECORDER = needs_torch("2.8", "Gloo has no flight recorder in 2.7")
RECORDS_BY_DEFAULT = needs_torch(
    "2.11", "the flight recorder is off by default in 2.10"
)
COUNTS_IN_COMPILED_CODE = needs_torch("2.9", "else counting ends compiling")
COMPILES_ONCE = pytest.mark.skipif(
    TORCH == (2, 9), reason="torch 2.9 compiles anew what is counted"
)
PIPELINES_WORK = pytest.mark.skipif(
    TORCH == (2, 9), reason="a pipeline over Gloo aborts by itself in 2.9"
)
QUIET_GLOO = needs_torch(
    "2.11", "Gloo prints its connections to stdout in 2.10"
)
