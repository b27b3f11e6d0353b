"""pytest's fixtures, as it lists them. What they adapt is imported when a distributed test needs it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

from pytest_ddpperf.plugin import state

if TYPE_CHECKING:
    from pytest_ddpperf.plugin.fixtures import CollectiveBenchmark, DdpBenchmark, DdpRun, RpcBenchmark
    from pytest_ddpperf.plugin.watch import Replay


def register(plugins: pytest.PytestPluginManager) -> None:
    """Let pytest know of them."""
    plugins.register(sys.modules[__name__], "ddpperf-fixtures")
    plugins.register(_ReplayToBenchmark() if has_benchmark(plugins) else _NoReplay(), "ddpperf-replay")


def has_benchmark(plugins: pytest.PytestPluginManager) -> bool:
    """Whether pytest-benchmark is there, by its entry point or by `-p pytest_benchmark.plugin`."""
    return any(map(plugins.hasplugin, ("benchmark", "pytest_benchmark.plugin")))


@pytest.fixture
def _ddp_world_size(request: pytest.FixtureRequest) -> int:
    """The world size of this test, where it is not parametrised with several."""
    settings = state.own_settings(request.node)
    if len(settings.world_sizes) > 1:
        sizes = ",".join(map(str, settings.world_sizes))
        pytest.fail(
            f"world sizes {sizes}: neither a unittest.TestCase nor a single parameter can have several; "
            "give it @pytest.mark.ddp(world_size=N), or the test one list",
            pytrace=False,
        )
    return settings.world_sizes[0]


@pytest.fixture
def ddp_run(request: pytest.FixtureRequest, _ddp_world_size: int) -> DdpRun:
    """Call `ddp_run(fn, *args)`: `fn(ctx, *args)` on every rank of a fresh process group; the results by rank."""
    from pytest_ddpperf.plugin.fixtures import DdpRun

    return DdpRun(request, _ddp_world_size)


@pytest.fixture
def ddp_benchmark(request: pytest.FixtureRequest, _ddp_world_size: int, _ddp_replay: Replay | None) -> DdpBenchmark:
    """Call `ddp_benchmark(setup, batch_size=...)`: time a distributed training step on real ranks and gate it."""
    from pytest_ddpperf.plugin.fixtures import DdpBenchmark

    return DdpBenchmark(request, _ddp_world_size, _ddp_replay)


@pytest.fixture
def rpc_benchmark(request: pytest.FixtureRequest, _ddp_replay: Replay | None) -> RpcBenchmark:
    """Call `rpc_benchmark(trainer, master=..., parameter_server=...)`: time trainers that call others by RPC."""
    from pytest_ddpperf.plugin.fixtures import RpcBenchmark

    return RpcBenchmark(request, _ddp_replay)


@pytest.fixture
def collective_benchmark(
    request: pytest.FixtureRequest, _ddp_world_size: int, _ddp_replay: Replay | None
) -> CollectiveBenchmark:
    """Call `collective_benchmark(op, sizes, dtype=...)`: time and check one collective over several sizes."""
    from pytest_ddpperf.plugin.fixtures import CollectiveBenchmark

    return CollectiveBenchmark(request, _ddp_world_size, _ddp_replay)


class _NoReplay:
    """Without pytest-benchmark."""

    @pytest.fixture
    def _ddp_replay(self) -> None:
        return None


class _ReplayToBenchmark:
    """With pytest-benchmark: its fixture is among those of a test, so that --benchmark-only and -skip see the test."""

    @pytest.fixture
    def _ddp_replay(self, request: pytest.FixtureRequest, benchmark: Any) -> Replay:
        from pytest_ddpperf.plugin.watch import Replay

        return Replay(benchmark, request.node)
