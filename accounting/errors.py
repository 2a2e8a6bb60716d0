"""Errors a user can act on: each says the value, the bound and the next step."""

from __future__ import annotations


class DpsweepError(Exception):
    """Base class of every error that dpsweep raises on purpose."""


class InvalidInput(DpsweepError, ValueError):
    """A value given by the user is impossible; the message names value, bound and next step."""


class UnsupportedMechanism(DpsweepError, ValueError):
    """An accountant was asked to account for something its theorem does not cover."""


class Unreachable(DpsweepError, ValueError):
    """No parameter value in the allowed range meets the target."""


class DataCorruption(DpsweepError):
    """A stored file is missing, truncated or altered; nothing computed from it can be trusted."""


def require_finite(
    name: str,
    value: float,
    *,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
) -> float:
    """Return ``value`` as a float, or raise `InvalidInput` naming the violated bound.

    NaN fails every bound, because each test is written as ``not value >= bound``.
    """
    value = float(value)
    bounds = (
        (above, "greater than", lambda bound: value > bound),
        (at_least, "at least", lambda bound: value >= bound),
        (below, "less than", lambda bound: value < bound),
        (at_most, "at most", lambda bound: value <= bound),
    )
    if not (float("-inf") < value < float("inf")):
        raise InvalidInput(f"{name} is {value}, but must be a finite number")
    for bound, words, holds in bounds:
        if bound is not None and not holds(bound):
            raise InvalidInput(f"{name} is {value}, but must be {words} {bound}")
    return value
