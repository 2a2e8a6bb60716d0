"""Rounding: of bounds upwards, and of noisy values to a public grid before release."""

from __future__ import annotations

import math
from typing import Final

ROUND_UP: Final = 1.0 + 1e-9
"""Factor on upper bounds, far above the rounding errors of closed forms, bisections and sums of a million positive
terms."""
_SHARE = 2.0**-12


def release_grid(std: float) -> float:
    """Return the spacing of the grid for values with Gaussian noise of ``std`` > 0: 2^-12 times the next power of two.

    Floating-point numbers are denser near 0, so the low-order bits of value + noise leak the size of the noise. They so
    leak the value (Mironov, 2012, "On significance of the least significant bits for differential privacy"). The grid
    depends on the public ``std`` alone. Rounding adds a twelfth of its square, at most 2e-8 of the noise's variance.

        >>> release_grid(20.0) == 32.0 / 4096
        True
    """
    return _SHARE * 2.0 ** math.ceil(math.log2(std))
