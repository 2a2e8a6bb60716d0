"""Whose privacy an epsilon is: that of one row of the data, or of a user with all of their rows.

A user who owns at most m rows of the data that batches are drawn from is a group of m rows. Adding or removing the user
adds or removes up to m rows. A Poisson batch of rows is then a mixture of Gaussians over how many of them it holds
(docs/group-proof.md, Theorem 1). Where users are sampled themselves, a user is one member of that population.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

from dpsweep.accounting.errors import InvalidInput, keep_whole, require_choice

UnitName = Literal["example", "user"]
LARGEST_UNIT: Final = 10**4
"""Largest accepted number of rows of a user."""


@dataclass(frozen=True)
class Unit:
    """Whose privacy an epsilon is. rows: how many members of the sampled population one unit is at most."""

    name: UnitName = "example"
    rows: int = 1

    def __post_init__(self) -> None:
        require_choice("unit", self.name, get_args(UnitName))
        keep_whole(self, "rows", "rows of a unit", at_least=1, at_most=LARGEST_UNIT)
        if self.name == "example" and self.rows > 1:
            raise InvalidInput(f"an example is one row, not {self.rows}; name the unit 'user'")

    def of(self, count: int) -> str:
        """Return the unit of a claim about ``count`` such units together.

        >>> Unit().of(1), Unit().of(2), Unit("user", 4).of(1), Unit("user", 4).of(2)
        ('example', 'group of 2', 'user', 'group of 2 users')
        """
        if count == 1:
            return self.name
        return f"group of {count}" if self == EXAMPLE else f"group of {count} {self.name}s"


EXAMPLE: Final = Unit()
"""The unit of a run that knows no users."""
