"""A data source for regression: made-up rents of flats in two districts."""

import numpy as np

from dpsweep.workers.data import Source, make_split


def flats(count: int = 900) -> Source:
    """One row per flat. The target is its rent, in units of 1000; the district is the group."""
    draw = np.random.default_rng(7)
    district = (draw.random(count) < 0.3).astype(int)
    size, age = draw.uniform(20, 140, count), draw.uniform(0, 100, count)
    rent = 0.2 + 0.012 * size - 0.003 * age + 0.25 * district + draw.normal(0.0, 0.1, count)
    rows = np.stack([size / 140, age / 100, district], axis=1)  # scale by constants, not by statistics of the rows
    return Source(
        "flats",
        train=make_split(rows.astype(np.float32), labels=rent[:, None], groups=district),
        test=None,
        group_names=("suburb", "centre"),
        class_names=("rent",),
        task="regression",
    )
