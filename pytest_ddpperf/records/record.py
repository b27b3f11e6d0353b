"""What most values here are: immutable, and made by the names of their fields."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

T = TypeVar("T")

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform

    @dataclass_transform(
        frozen_default=True, kw_only_default=True, field_specifiers=(field,)
    )
    def record(made: type[T]) -> type[T]:
        """Make a class a dataclass whose fields cannot change, and are given by name."""
else:
    record = dataclass(frozen=True, slots=True, kw_only=True)
