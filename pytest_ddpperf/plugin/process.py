"""What roles and remote pytests need to know of the pytest process that they are in."""

from typing import TYPE_CHECKING, Protocol

import pytest

if TYPE_CHECKING:
    from pytest_ddpperf.launch.template import Templates
    from pytest_ddpperf.options.settings import Settings
    from pytest_ddpperf.plugin.session import Session


class PytestProcess(Protocol):
    """A pytest process: the part of `state.Run` that does not depend on its role."""

    config: pytest.Config
    worker: bool  # whether another process reports
    items: list[pytest.Item]  # distributed tests
    deselected: list[pytest.Item]  # distributed tests, too
    # node ids of tests, as `Run` has them
    failed: set[str]
    begun: set[str]
    lacking: set[str]

    @property
    def settings(self) -> "Settings": ...

    @property
    def exit_status(self) -> int: ...

    @property
    def rpc(self) -> bool: ...

    @property
    def templates(self) -> "Templates": ...

    @property
    def session(self) -> "Session": ...
