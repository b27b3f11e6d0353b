"""The planted regression of the examples: `--bucket-cap-mb 0.001` gives every gradient a bucket of its own."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--bucket-cap-mb",
        type=float,
        metavar="MB",
        help="size of DDP's gradient buckets in the examples (default: DDP's own, 25 MiB)",
    )


@pytest.fixture
def bucket_cap_mb(request: pytest.FixtureRequest) -> float | None:
    """What to hand to `DistributedDataParallel(bucket_cap_mb=...)`; None leaves DDP its default."""
    return request.config.getoption("--bucket-cap-mb")
