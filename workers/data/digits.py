"""Handwritten digits bundled with scikit-learn: 1797 images of 8 x 8 pixels, no download."""

from __future__ import annotations

import numpy as np

from workers.data.base import Scaling, Source, make_split


def digits() -> Source:
    """1797 real images, pixel values 0..16 scaled to 0..1; groups are the ten digits."""
    from sklearn.datasets import load_digits  # late: importing sklearn takes a second

    bundle = load_digits()
    images = bundle.images.astype(np.uint8)[:, None]
    names = tuple(str(digit) for digit in range(10))
    return Source("digits", make_split(images, bundle.target), None, names, names, Scaling(scale=(16.0,)))
