"""Where noisy values are rounded to before anybody sees them."""

from __future__ import annotations

import math

_SHARE = 2.0**-12


def release_grid(std: float) -> float:
    """Spacing of the multiples that a value with Gaussian noise of ``std`` > 0 is rounded to: a power of two near it.

    Floating-point numbers are denser around 0, so the last bits of value + noise tell how small the noise was, and with
    it the value (Mironov, 2012, "On significance of the least significant bits for differential privacy"). The grid
    depends on the public ``std`` alone and adds nothing to speak of: a twelfth of its square, 5e-9 of the variance.
    """
    return _SHARE * 2.0 ** math.ceil(math.log2(std))
