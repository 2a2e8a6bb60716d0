"""Zeros are those of scipy's root finder, bit by bit, without what else its package imports."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import brentq

from dpsweep.accounting.numerics import roots
from dpsweep.accounting.numerics.roots import beginning, root

FORMS: dict[str, Callable[[float], float]] = {
    "line": lambda x: x,
    "steep": lambda x: math.expm1(min(20.0 * x, 700.0)),
    "jump": lambda x: -1.0 if x < 0.0 else 2.0,
}


@pytest.mark.parametrize("form", FORMS)
@given(
    zero=st.floats(-50.0, 50.0),
    below=st.floats(1e-9, 1e3),
    above=st.floats(1e-9, 1e3),
    absolute=st.sampled_from([1e-12, 1e-3]),
)
def test_they_are_the_same_numbers(form: str, zero: float, below: float, above: float, absolute: float) -> None:
    def function(x: float) -> float:
        return FORMS[form](x - zero)

    low, high = zero - below, zero + above
    assert root(function, low, high, absolute=absolute) == brentq(function, low, high, xtol=absolute)


def test_they_are_so_where_scipy_has_moved_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roots, "_brentq", lambda: None)
    assert root(math.cos, 0.0, 2.0, absolute=1e-9) == brentq(math.cos, 0.0, 2.0, xtol=1e-9)


@pytest.mark.parametrize("function", [lambda x: x, lambda x: math.nan])
def test_what_has_no_zero_is_refused(function: Callable[[float], float]) -> None:
    with pytest.raises(ValueError, match=r"different signs|not a number"):
        root(function, 1.0, 2.0)


@given(border=st.fractions(0, 8), halvings=st.integers(0, 40))
def test_a_condition_fails_at_the_first_number_and_holds_at_the_second(border: Fraction, halvings: int) -> None:
    """Numbers that halving reaches are no rounding away from the exact ones."""
    low, high = beginning(lambda number: Fraction(number) > border, 0.0, 8.0, halvings)
    assert Fraction(low) <= border
    assert Fraction(high) > border or high == 8.0
    assert high - low == 8.0 / 2**halvings


def test_nothing_else_is_imported() -> None:
    code = """
import sys
from dpsweep.accounting.numerics.gaussian import gaussian_epsilon
print(gaussian_epsilon(1.0, 1e-5)[0] > 0.0, "scipy.optimize" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True False\n"
