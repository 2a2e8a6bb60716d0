"""The distribution of rows per user, by which a plan compares ways of protecting users: declared, or released once.

It is private data. A sweep file declares it where it is public, or states the noise that it was released with, and
then every private trial of the sweep pays for that release.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from dpsweep.accounting.errors import InvalidInput, require_finite
from dpsweep.accounting.jobs.release import GaussianDraws
from dpsweep.accounting.mechanism.trace import GaussianRelease
from dpsweep.accounting.mechanism.units import LARGEST_UNIT, Unit
from dpsweep.workers.dataset_description import RowsPerUser

RELEASE: Final = "rows per user"
_ENDS: Final = tuple(2**power for power in range((LARGEST_UNIT - 1).bit_length() + 1))
"""Largest numbers of rows of the bins 1, 2, 3 to 4, 5 to 8, ...; the last bin holds everybody above the one before."""
_SEEN: Final = 3.0
"""Least number of noise multipliers at which a released count is kept; smaller ones are mostly noise."""


def release_of(noise_multiplier: float, unit: Unit) -> GaussianRelease:
    """Return the release of `released` in a run with this unit.

    Guarantee: one user changes one count by 1. Accountants let a release count once for each of the ``unit.rows``
    rows of a user, so its noise is stated that many times as large.
    """
    return GaussianRelease(RELEASE, noise_multiplier * unit.rows)


def released(histogram: RowsPerUser, noise_multiplier: float, draws: GaussianDraws) -> RowsPerUser:
    """Return noisy counts of users by the middle of their bin of rows, ascending.

    Guarantee: that of a Gaussian mechanism of sensitivity 1 with this noise multiplier, under adding or removing a
    user, who is in one bin. Bins are public; rounding and leaving out small counts is post-processing.

    Raises: InvalidInput for a noise multiplier below 1.
    """
    noise_multiplier = require_finite("noise multiplier of rows per user", noise_multiplier, at_least=1.0)
    if not histogram:
        raise InvalidInput("the data name no users, so there is no distribution of their rows to release")
    rows, users = np.array(histogram).T
    place = np.minimum(np.searchsorted(_ENDS, rows), len(_ENDS) - 1)
    counts = np.bincount(place, weights=users, minlength=len(_ENDS))
    noisy = np.round(counts + draws.normal(0.0, noise_multiplier, counts.shape)).astype(np.int64)
    middles = [(end + end // 2 + 1) // 2 for end in _ENDS]
    kept = noisy >= _SEEN * noise_multiplier
    return tuple((middle, count) for middle, count, seen in zip(middles, noisy.tolist(), kept, strict=True) if seen)


def median_rows(histogram: RowsPerUser) -> int:
    """Return the median number of rows of a user, the lower one of two.

    >>> median_rows(((1, 5), (2, 1), (9, 3)))
    1
    """
    half, seen = sum(users for _, users in histogram) / 2.0, 0
    for rows, users in histogram:
        seen += users
        if seen >= half:
            return rows
    raise AssertionError("a distribution has users")
