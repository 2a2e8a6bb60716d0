"""Errors a user can act on: each says the value, the bound and the next step."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Collection
from numbers import Real
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

T = TypeVar("T")

LARGEST_WHOLE = 2**53
"""Of what is counted (steps, examples): beyond it a double no longer tells neighbouring whole numbers apart."""


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
    """Return ``value``, a number of Python or numpy, as a float, or raise `InvalidInput` naming the violated bound.

    NaN fails every bound, because each test is written as ``not value >= bound``.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InvalidInput(f"{name} is {value!r}, but must be a number")
    try:
        number = float(value)
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


def require_whole(name: str, value: float, *, at_least: int, at_most: int = LARGEST_WHOLE) -> int:
    """Return ``value`` as an int, or raise `InvalidInput` when it is fractional, not finite or out of bounds."""
    number = require_finite(name, value, at_least=at_least, at_most=at_most)
    if number != math.floor(number):
        raise InvalidInput(f"{name} is {value}, but must be a whole number")
    return int(value)


def keep_whole(component: object, field: str, name: str, *, at_least: int, at_most: int = LARGEST_WHOLE) -> None:
    """Check a field of a frozen dataclass and hold it as an int: 5.0 is whole, but nothing to count or index by."""
    whole = require_whole(name, getattr(component, field), at_least=at_least, at_most=at_most)
    object.__setattr__(component, field, whole)


def keep_finite(component: object, field: str, name: str, **bounds: float) -> None:
    """Check a field of a frozen dataclass by `require_finite` and hold it as a float."""
    object.__setattr__(component, field, require_finite(name, getattr(component, field), **bounds))


def require_choice(name: str, value: T, valid: Collection[T]) -> T:
    """Return ``value``, or raise `InvalidInput` unless it is one of ``valid``."""
    if not any(type(value) is type(choice) and value == choice for choice in valid):
        raise InvalidInput(f"{name} is {value!r}, but must be one of {', '.join(map(repr, valid))}")
    return value


def require_numbers(name: str, values: npt.ArrayLike, dimensions: int) -> npt.NDArray[Any]:
    """Return ``values``, an array or nested lists of numbers, as a numpy array, or raise `InvalidInput`.

    Integers and floats keep their type; what has no elements counts as float64. Values are not checked further.
    """
    try:
        array = np.asarray(values)
    except (TypeError, ValueError):  # ragged lists
        raise InvalidInput(f"{name} must be numbers in an array of {dimensions} dimensions, not ragged lists") from None
    if array.size == 0 and array.dtype.kind == "O":
        array = array.astype(np.float64)
    if array.dtype.kind not in "iuf" or array.ndim != dimensions:
        raise InvalidInput(
            f"{name} has shape {array.shape} and type {array.dtype}, but must be numbers in an array of "
            f"{dimensions} dimensions"
        )
    return array
