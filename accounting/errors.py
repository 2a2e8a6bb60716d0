"""Errors a user can act on, and the part of an error that may be published.

The message of a `DpsweepError` raised by dpsweep itself is public. It names configuration, files, columns and shapes,
and states the value, the bound and the next step; values of the data are kept in its cause, a `PrivateDetail`. Any
other exception may quote the data, so only its type and place are public.
"""

from __future__ import annotations

import math
import operator
import sys
import traceback
from collections.abc import Collection, Iterator
from numbers import Real
from pathlib import PurePath
from types import FrameType
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

T = TypeVar("T")

START_ANEW: Final = "delete the trial's folder and resume, which costs privacy again: what it has shown stays counted"
"""The last advice in messages about damaged files of a trial."""
LARGEST_WHOLE = 2**53
"""Largest accepted count (steps, examples): above it a double cannot represent every whole number."""


class DpsweepError(Exception):
    """Base class of every error that dpsweep raises on purpose; its message never quotes the data."""


class InvalidInput(DpsweepError, ValueError):
    """A value given by the user is not accepted; the message names the value, the bound and the next step."""


class UnfitNode(InvalidInput):
    """The node that was given some work cannot do it, but another one may. node: its id in Ray."""

    def __init__(self, message: str, node: str) -> None:
        super().__init__(message, node)
        self.node = node

    def __str__(self) -> str:
        return str(self.args[0])


class UnsupportedMechanism(DpsweepError, ValueError):
    """The theorem behind an accountant does not cover what it was asked to account for."""


class Unreachable(DpsweepError, ValueError):
    """No parameter value in the allowed range meets the target."""


class DataCorruption(DpsweepError):
    """A stored file is missing, truncated or altered; nothing computed from it can be trusted."""


class StorageError(DpsweepError):
    """The storage refused a write or a read (disk full, no permission, connection lost); nothing was committed."""


class PrivateDetail(Exception):
    """Values of the data, kept as the cause of an error whose own message omits them."""


_OWN: Final = frozenset({"dpsweep"})
_WRAPPERS: Final = frozenset({"collections", "concurrent", "contextlib", "dataclasses", "functools", "pydantic"})
_LIBRARIES: Final = frozenset({"torch", "numpy", "scipy"})
"""Libraries that may call dpsweep's code: its messages then name layers and shapes, but no values of user code."""


def public_text(error: BaseException) -> str:
    """Return the part of a just caught error that may be published.

    For a `DpsweepError` raised by dpsweep's own code: its message, unless user code called that code, because the
    message may quote the caller's values. For any other exception: type and place (function, file name and line).
    """
    if isinstance(error, DpsweepError) and _is_own(error):
        return str(error)
    return f"{type(error).__name__}{_place(error)}"


def private_text(error: BaseException) -> str | None:
    """Return the full message and traceback of an error and its causes; None if `public_text` omits nothing."""
    if all(isinstance(each, DpsweepError) and _is_own(each) for each in _with_causes(error)):
        return None
    return "".join(traceback.format_exception(error))


def full_text(error: BaseException) -> str:
    """Return the messages of an error and of its causes, on one line; only for data that are not private."""
    told = public_text(error)
    for each in _with_causes(error):
        told += "" if str(each) in told else f": {each}"
    return " ".join(told.split())


def without_locals(error: DpsweepError) -> DpsweepError:
    """Return the error without the local variables of its traceback and of its causes, which may hold data rows."""
    for each in _with_causes(error):
        traceback.clear_frames(each.__traceback__)
    return error


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and its causes, each once: an error may be raised from itself."""
    found: BaseException | None = error
    seen: list[BaseException] = []
    while found is not None and not any(found is each for each in seen):
        seen.append(found)
        found = found.__cause__
    yield from seen


def _is_own(error: BaseException) -> bool:
    """Return whether dpsweep's own code raised the error and was not called by user code; calls by a library are
    fine.
    """
    callers = (_package(frame) for frame, _ in _frames(error))
    return next((name for name in callers if name not in _OWN | _WRAPPERS), "torch") in _LIBRARIES


def _place(error: BaseException) -> str:
    """Return the innermost place in user code, or in dpsweep's if no user code ran."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({PurePath(error.filename).name}:{error.lineno})"
    frames = list(_frames(error))
    beyond = (_OWN | _WRAPPERS | _LIBRARIES, _WRAPPERS | _LIBRARIES, frozenset[str]())
    found = (at for passed in beyond for at in frames if _package(at[0]) not in passed)
    if (place := next(found, None)) is None:
        return ""
    frame, line = place
    return f" in {frame.f_code.co_name} ({PurePath(frame.f_code.co_filename).name}:{line})"


def _frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """Yield the frames of the traceback with their line numbers, innermost first."""
    return reversed(list(traceback.walk_tb(error.__traceback__)))


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def require_finite(
    name: str,
    value: float,
    *,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
) -> float:
    """Return ``value``, a Python or numpy number, as a float, or raise `InvalidInput` naming the violated bound.

    NaN fails every bound, because each test is written as ``not value >= bound``.
    """
    if type(value) is not float and (isinstance(value, bool) or not isinstance(value, Real)):  # an ABC is slow to ask
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
    """Return ``value`` as an int, or raise `InvalidInput` if it is fractional, not finite or out of bounds.

    >>> require_whole("epochs", 5.0, at_least=1)
    5
    """
    number = require_finite(name, value, at_least=at_least, at_most=at_most)
    if number != math.floor(number):
        raise InvalidInput(f"{name} is {value}, but must be a whole number")
    return int(value)


def keep_whole(component: object, field: str, name: str, *, at_least: int, at_most: int = LARGEST_WHOLE) -> None:
    """Check a field of a frozen dataclass by `require_whole` and store it as an int: 5.0 becomes 5."""
    whole = require_whole(name, getattr(component, field), at_least=at_least, at_most=at_most)
    object.__setattr__(component, field, whole)


def keep_finite(component: object, field: str, name: str, **bounds: float) -> None:
    """Check a field of a frozen dataclass by `require_finite` and store it as a float."""
    object.__setattr__(component, field, require_finite(name, getattr(component, field), **bounds))


def count_of(number: int, one: str, several: str = "") -> str:
    """Return a number of things in words. several: the words for other numbers than 1; by default ``one`` with an s.

    >>> count_of(1, "trial"), count_of(2000, "trial"), count_of(0, "trial has", "trials have")
    ('1 trial', '2,000 trials', '0 trials have')
    """
    return f"{number:,} {one if number == 1 else several or f'{one}s'}"


def require_choice(name: str, value: T, valid: Collection[T]) -> T:
    """Return ``value``, or raise `InvalidInput` unless it is one of ``valid``."""
    if not any(type(value) is type(choice) and value == choice for choice in valid):
        raise InvalidInput(f"{name} is {value!r}, but must be one of {', '.join(map(repr, valid))}")
    return value


def require_numbers(name: str, values: npt.ArrayLike, dimensions: int) -> npt.NDArray[Any]:
    """Return ``values``, an array or nested lists of numbers, as a numpy array, or raise `InvalidInput`.

    Integers and floats keep their type; an empty list becomes float64. NaN and infinities are accepted.
    """
    try:
        array = np.asarray(values)
    except (TypeError, ValueError):  # ragged lists
        raise InvalidInput(
            f"{name} must be numbers in an array of {count_of(dimensions, 'dimension')}, not ragged lists"
        ) from None
    if array.size == 0 and array.dtype.kind == "O":
        array = array.astype(np.float64)
    if array.dtype.kind not in "iuf" or array.ndim != dimensions:
        raise InvalidInput(
            f"{name} has shape {array.shape} and type {array.dtype}, but must be numbers in an array of "
            + count_of(dimensions, "dimension")
        )
    return array
