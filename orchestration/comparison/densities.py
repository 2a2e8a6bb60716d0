"""Two-dimensional histograms of two numbers per training example; they are private data."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from dpsweep.accounting.jobs import CountedEpsilons
from dpsweep.orchestration.records.published import Density

Array = NDArray[np.float64]
_BINS: Final = 40
"""Number of bins along each axis."""


def density(x: Array, y: Array) -> Density | None:
    """Return counts of the points (x, y) in a grid between their extremes; None without points. x, y: [examples]."""
    if len(x) == 0:
        return None
    across, up = _edges(x.min(), x.max()), _edges(y.min(), y.max())
    return _made(_count(x, y, across, up), across, up)


def loss_density(counted: CountedEpsilons) -> Density | None:
    """Return counts of examples by log loss (x) and epsilon_i (y); None if no loss is positive and finite.

    Reads the stored parts again, one after the other. Examples whose loss is not positive and finite are left out.
    """
    paired = counted.summary.everyone.with_loss
    if paired.count == 0:
        return None
    across, up = _edges(paired.low[1], paired.high[1]), _edges(paired.low[0], paired.high[0])
    counts = np.zeros((_BINS, _BINS))
    for part, values in zip(counted.parts, counted.values(), strict=True):
        usable = (part.losses > 0.0) & np.isfinite(part.losses)
        counts += _count(np.log(part.losses[usable].astype(np.float64)), values[usable], across, up)
    return _made(counts, across, up)


def _edges(low: float, high: float) -> Array:
    """Edges of bins of equal width that contain all values from ``low`` to ``high``."""
    margin = 1e-9 * max(abs(low), abs(high), 1.0)
    return np.linspace(low - margin, high + margin, _BINS + 1)


def _count(x: Array, y: Array, across: Array, up: Array) -> Array:
    return np.asarray(np.histogram2d(x, y, bins=(across, up))[0])


def _made(counts: Array, across: Array, up: Array) -> Density:
    rows = counts.astype(np.int64).tolist()
    return Density(tuple(across.tolist()), tuple(up.tolist()), tuple(map(tuple, rows)))
