"""Handwritten digits bundled with scikit-learn: 1797 images of 8 x 8 pixels, no download."""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from dpsweep.workers.data.base import Scaling, Source, make_split
from dpsweep.workers.data.source_files import bundled


def digits() -> Source:
    """Return 1797 real images, pixel values 0..16 scaled to 0..1; groups are the ten digits."""
    images, labels = _read()
    names = tuple(str(digit) for digit in range(10))
    return Source("digits", make_split(images.copy(), labels.copy()), None, names, names, Scaling(scale=(16.0,)))


@functools.cache
def _read() -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Images and labels, cached for all trials of a process, because parsing the text file takes long."""
    table = bundled("digits.csv.gz").astype(np.int64)
    return table[:, :-1].astype(np.uint8).reshape(-1, 1, 8, 8), table[:, -1]
