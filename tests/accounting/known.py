"""Lower bounds that a test expects to be given."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


def known(bound: T | None) -> T:
    """The bound, which must be there."""
    assert bound is not None, "no lower bound is given"
    return bound
