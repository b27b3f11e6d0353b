"""What all tests share: pytest's `pytester`, the `gpu` marker, and a process with many open
files."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

pytest_plugins = ["pytester"]


@pytest.hookimpl(tryfirst=True)  # before any fixture of the test
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        # here, so that a run without such tests stays free of torch
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """More open files than `select.select` can tell of: what is opened from now on has a number
    from 1,024 on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2048
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"this process may have {hard} open files only")
    with ExitStack() as opened:
        if soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            opened.callback(
                resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard)
            )
        descriptor = -1
        while descriptor < 1024:
            descriptor = os.open(os.devnull, os.O_RDONLY)
            opened.callback(os.close, descriptor)
        yield
