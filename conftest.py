"""What all tests share: pytest's `pytester`, and the `gpu` marker."""

from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]


@pytest.hookimpl(tryfirst=True)  # before any fixture of the test
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch  # here, so that a run without such tests stays free of torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
