"""Whose privacy an epsilon is: that of one row of the data, or of a user with all of their rows.

A user who owns at most m rows of the data that batches are drawn from is a group of m rows. Adding or removing the user
adds or removes up to m rows. A Poisson batch of rows is then a mixture of Gaussians over how many of them it holds
(docs/group-proof.md, Theorem 1). Where users are sampled themselves, a user is one member of that population.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final, Literal, assert_never

from dpsweep.accounting.errors import keep_whole
from dpsweep.accounting.mechanism.samplings import Adjacency

UnitName = Literal["example", "user"]
"""How sweep files and results call a unit."""
LARGEST_UNIT: Final = 10**4
"""Largest accepted number of rows of a user."""


@dataclass(frozen=True)
class Example:
    """One row of the data."""

    name: ClassVar[UnitName] = "example"
    rows: ClassVar[int] = 1

    def of(self, count: int) -> str:
        """Return the unit of a claim about ``count`` examples together.

        >>> Example().of(1), Example().of(2)
        ('example', 'group of 2')
        """
        return self.name if count == 1 else f"group of {count}"


@dataclass(frozen=True)
class User:
    """A user with all of their rows. rows: how many members of the sampled population that is at most."""

    name: ClassVar[UnitName] = "user"
    rows: int = 1

    def __post_init__(self) -> None:
        keep_whole(self, "rows", "rows of a user", at_least=1, at_most=LARGEST_UNIT)

    def of(self, count: int) -> str:
        """Return the unit of a claim about ``count`` users together.

        >>> User(4).of(1), User(4).of(2)
        ('user', 'group of 2 users')
        """
        return self.name if count == 1 else f"group of {count} users"


Unit = Example | User
"""Whose privacy an epsilon is."""
EXAMPLE: Final = Example()
"""The unit of a run that knows no users."""


def protects_users(name: UnitName) -> bool:
    """Return whether the unit of this name is a user."""
    match name:
        case "example":
            return False
        case "user":
            return True
        case _:
            assert_never(name)


def of_records(adjacency: Adjacency) -> Adjacency:
    """Return the adjacency of the group of records that a user is: under ``fixed_graph`` all of them are blanked."""
    match adjacency:
        case "fixed_graph":
            return "zero_out"
        case "add_remove" | "zero_out" | "replace_one":
            return adjacency
        case _:
            assert_never(adjacency)
