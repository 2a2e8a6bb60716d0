"""Errors a user can act on: each says the value, the bound and the next step."""

from __future__ import annotations

import math
import operator
import sys


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


class StorageError(DpsweepError):
    """The storage refused a write or a read (disk full, no permission, connection lost); nothing was committed."""


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
    if isinstance(value, str | bool):  # float would take both
        raise InvalidInput(f"{name} is {value!r}, but must be a number")
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise InvalidInput(f"{name} is {value!r}, but must be a number") from None
    except OverflowError:
        raise InvalidInput(f"{name} has too many digits, but must be at most {sys.float_info.max:.2g}") from None
    if not math.isfinite(number):
        raise InvalidInput(f"{name} is {value}, but must be a finite number")
    violated = [
        f"{words} {bound}"
        for bound, words, holds in (
            (above, "greater than", operator.gt),
            (at_least, "at least", operator.ge),
            (below, "less than", operator.lt),
            (at_most, "at most", operator.le),
        )
        if bound is not None and not holds(number, bound)
    ]
    if violated:
        raise InvalidInput(f"{name} is {value}, but must be {' and '.join(violated)}")
    return number
