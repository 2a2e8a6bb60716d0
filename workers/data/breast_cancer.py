"""Breast cancer Wisconsin: the diagnostic set bundled with scikit-learn, and the original one of the UCI repository."""

from __future__ import annotations

import numpy as np
from sklearn.datasets import load_breast_cancer

from workers.data.base import Scaling, Source, make_split

# fmt: off
_PUBLISHED_RANGES = np.array([
    (6.981, 28.11), (9.71, 39.28), (43.79, 188.5), (143.5, 2501.0), (0.053, 0.163),
    (0.019, 0.345), (0.0, 0.427), (0.0, 0.201), (0.106, 0.304), (0.05, 0.097),
    (0.112, 2.873), (0.36, 4.885), (0.757, 21.98), (6.802, 542.2), (0.002, 0.031),
    (0.002, 0.135), (0.0, 0.396), (0.0, 0.053), (0.008, 0.079), (0.001, 0.03),
    (7.93, 36.04), (12.02, 49.54), (50.41, 251.2), (185.2, 4254.0), (0.071, 0.223),
    (0.027, 1.058), (0.0, 1.252), (0.0, 0.291), (0.156, 0.664), (0.055, 0.208),
])
# fmt: on
"""Minimum and maximum of each of the 30 attributes, as the data set's description prints them."""


def breast_cancer() -> Source:
    """569 rows, 30 attributes, each scaled to [0, 1] by its published range; groups are the two diagnoses."""
    bundle = load_breast_cancer()
    low, high = _PUBLISHED_RANGES.T
    rows = np.clip((bundle.data - low) / (high - low), 0.0, 1.0).astype(np.float32)
    names = tuple(str(name) for name in bundle.target_names)
    return Source("breast_cancer", make_split(rows, bundle.target), None, names, names, Scaling())
