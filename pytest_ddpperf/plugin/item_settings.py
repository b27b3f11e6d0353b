"""The settings of one test, its markers included, and the failure for a mistake in them."""

from typing import TYPE_CHECKING

import pytest

from pytest_ddpperf.plugin.items import (
    RPC,
    WORLD_SIZE,
    marked_settings,
    measures,
    uses,
    with_place,
)
from pytest_ddpperf.plugin.state import RUN

if TYPE_CHECKING:
    from _pytest.outcomes import Failed

    from pytest_ddpperf.options.settings import Settings


def settings_of(item: pytest.Item) -> "Settings":
    """Return the settings of one test, its markers included. Raises MarkerError, and OptionError
    for a limit that no marker is part of."""
    from pytest_ddpperf.plugin.place import check_limits

    settings = marked_settings(item, item.config.stash[RUN].settings)
    if measures(item):
        check_limits(settings)
    return settings


def own_settings(item: pytest.Item) -> "Settings":
    """Return the settings of a test that runs; a mistake in its marker fails the test. Under xdist,
    whose main process has no tests, one of the run does, too."""
    from pytest_ddpperf.records.errors import OptionError

    try:
        return settings_of(item)
    except OptionError as error:
        raise plain_failure(with_place(item, error)) from None


def check_place(item: pytest.Item) -> None:
    """Check that a test can run here. Raises MarkerError and what `Places.find` raises."""
    places, settings = item.config.stash[RUN].places, settings_of(item)
    if uses(item, {RPC}):
        places.find(
            settings,
            settings.trainers,
            settings.parameter_servers,
            certain=settings.sources["trainers"] != "default",
        )
    if uses(item, {WORLD_SIZE}):
        # The one world size of a test that is parametrised with several. It may be of another
        # fixture of that name.
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        own_size = parameters.get(WORLD_SIZE)
        sizes = settings.world_sizes
        if type(own_size) is int and own_size > 0:
            sizes = (own_size,)
        for world_size in sizes:
            places.find(settings, world_size)


def plain_failure(problem: str) -> "Failed":
    """Return an ordinary test failure without a traceback of ours."""
    from pytest_ddpperf import text

    lines = text.wrap_text(problem, text.terminal_width())
    return pytest.fail.Exception("\n".join(lines), pytrace=False)
