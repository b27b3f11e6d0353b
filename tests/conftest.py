"""A neutral environment for the tests of the plugin. The suite and the examples have the user's."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# Properties are tried with the same few examples on every machine, however slow it is.
settings.register_profile(
    "same",
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=25,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("same")

# Prefixes of variables that change what git, torch and its libraries do.
_OF_THE_USER = (
    "GIT_",
    "CUDA_LAUNCH_BLOCKING",
    "GLOO_",
    "KMP_",
    "MKL_",
    "NCCL_",
    "OMP_",
    "TORCH_",
    "TORCHINDUCTOR_",
)


@pytest.fixture(scope="session", autouse=True)
def _no_core_dumps() -> None:
    """Ranks that crash in tests leave no core dumps."""
    resource.setrlimit(
        resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1])
    )


@pytest.fixture(scope="session", autouse=True)
def _ctrl_c_is_handled() -> Iterator[None]:
    """A shell that starts tests in the background ignores Ctrl-C, and their processes would inherit
    that."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def _as_anywhere(request: pytest.FixtureRequest) -> Iterator[None]:
    """Hide devices and settings of the user, so that tests see the same on every machine. Tests
    with the markers `gpu` and `ddp` keep both."""
    with pytest.MonkeyPatch.context() as patch:
        if not any(map(request.node.get_closest_marker, ("gpu", "ddp"))):
            for name in [
                name for name in os.environ if name.startswith(_OF_THE_USER)
            ]:
                patch.delenv(name)
            patch.setenv("CUDA_VISIBLE_DEVICES", "")
            patch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
            patch.setenv("GIT_CONFIG_SYSTEM", os.devnull)
            for module in ("git", "plugin.results"):
                patch.setattr(f"pytest_ddpperf.{module}._GIT_SECONDS", 600.0)
            # xdist sets COLUMNS, by which lines of commands would be wrapped.
            patch.delenv("COLUMNS", raising=False)
        # tests need ranks, not quiet cores: so they may run in parallel
        patch.setenv("DDPPERF_LOCKS", "off")
        yield
