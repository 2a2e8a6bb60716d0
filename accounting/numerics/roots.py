"""Zeros of functions of one number, by scipy's root finder, and where conditions begin to hold.

The rest of `scipy.optimize` takes 20 MB and a third of a second of every process. The root finder is a separate
module of C.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import sys
from collections.abc import Callable
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any, Final

import scipy

_ROUNDING: Final = 4.0 * sys.float_info.epsilon
_MOST_STEPS: Final = 100


def root(
    function: Callable[[float], float],
    low: float,
    high: float,
    *,
    absolute: float = 2e-12,
    relative: float = _ROUNDING,
) -> float:
    """Return ``scipy.optimize.brentq(function, low, high, xtol=absolute, rtol=relative)``, with the same bits.

    Raises: ValueError for ends of one sign, and where the function is not a number.
    """

    def number(x: float) -> float:
        found = function(x)
        if math.isnan(found):
            raise ValueError(f"the function at {x} is not a number")
        return found

    in_c = _brentq()
    if in_c is None:
        from scipy.optimize import brentq

        return float(brentq(number, low, high, xtol=absolute, rtol=relative))
    return float(in_c(number, low, high, absolute, relative, _MOST_STEPS, (), False, True))


def beginning(holds: Callable[[float], bool], low: float, high: float, halvings: int = 60) -> tuple[float, float]:
    """Return numbers (fails, holds) around the one from which a condition ``holds``, by halving.

    Callers take the end that errs on their safe side. The condition is not asked at ``low``, where it counts as
    failing, and at ``high``, where it counts as holding.
    """
    for _ in range(halvings):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if holds(middle) else (middle, high)
    return low, high


@functools.cache
def _brentq() -> Callable[..., Any] | None:
    """Return the function of scipy's module of C; None where this scipy has no such module."""
    for suffix in EXTENSION_SUFFIXES:
        file = Path(scipy.__file__).parent / "optimize" / f"_zeros{suffix}"
        spec = importlib.util.spec_from_file_location("_zeros", file) if file.is_file() else None
        if spec is not None and spec.loader is not None:
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return getattr(module, "_brentq", None)
    return None
