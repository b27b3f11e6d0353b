"""An environment like that of any machine, for the tests of the plugin: the suite and examples have the user's."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator

import pytest

# By what they begin with: they say which repository git changes, and how torch and its libraries go about things.
_OF_THE_USER = ("GIT_", "CUDA_LAUNCH_BLOCKING", "GLOO_", "KMP_", "MKL_", "NCCL_", "OMP_", "TORCH_")


@pytest.fixture(scope="session", autouse=True)
def _no_core_dumps() -> None:
    """Of ranks that tests let crash."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


@pytest.fixture(scope="session", autouse=True)
def _ctrl_c_is_heard() -> Iterator[None]:
    """Who starts tests in the background may ignore it, and whom they start would inherit that."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def _as_anywhere(request: pytest.FixtureRequest) -> Iterator[None]:
    """Where ranks are, and what tests find, is the same whatever the machine has and its user has set. Tests of the
    `gpu` marker need both; those of `ddp` run in the session of these, which asks once for devices."""
    with pytest.MonkeyPatch.context() as patch:
        if not any(map(request.node.get_closest_marker, ("gpu", "ddp"))):
            for name in [name for name in os.environ if name.startswith(_OF_THE_USER)]:
                patch.delenv(name)
            patch.setenv("CUDA_VISIBLE_DEVICES", "")
            patch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
            patch.setenv("GIT_CONFIG_SYSTEM", os.devnull)
            patch.setattr("pytest_ddpperf.git._GIT_SECONDS", 600.0)
        patch.setenv("DDPPERF_LOCKS", "off")  # tests need ranks, not quiet cores: so they may run in parallel
        yield
