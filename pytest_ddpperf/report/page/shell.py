"""What every page stands in: one file, offline, without script. Knows nothing of what it says."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from pytest_ddpperf.records.errors import MissingExtraError
from pytest_ddpperf.report import text


def check(what: str) -> None:
    """Raises MissingExtraError, about `what` was asked for, where a page could not be made here."""
    needed = {"matplotlib": "matplotlib", "jinja2": "Jinja2"}
    missing = tuple(name for module, name in needed.items() if find_spec(module) is None)
    if missing:
        raise MissingExtraError(what, missing, "report")


def rendered(template: str, **content: Any) -> str:
    """A page, by a template of this folder. Whatever `content` holds is escaped, but for what a template calls safe,
    and what moves a cursor or turns the direction of writing around is spelt out."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("pytest_ddpperf.report.page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_printable,
    )
    return environment.get_template(template).render(**content)


def _printable(value: Any) -> Any:
    return text.printable(value) if type(value) is str else value  # not of Markup, which is safe
