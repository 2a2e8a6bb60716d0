"""A data source of your own: customers of two shops, and whether they bought something."""

import numpy as np

from dpsweep.workers.data import Source, make_split


def shops(customers: int = 400) -> Source:
    """One row per customer. The shop is the group by which accuracy and privacy are compared."""
    random = np.random.default_rng(0)
    shop = (random.random(customers) < 0.2).astype(np.int64)  # one customer in five belongs to the small shop
    visits, minutes = random.poisson(3.0, customers), random.exponential(10.0, customers)
    bought = (visits + minutes / 10.0 + shop + random.normal(size=customers) > 4.5).astype(np.int64)
    # Scale by constants: a mean computed from the rows would not be covered by any privacy guarantee.
    rows = np.stack([visits / 3.0 - 1.0, minutes / 10.0 - 1.0, shop], axis=1).astype(np.float32)
    return Source(
        name="shops",
        train=make_split(rows, labels=bought, groups=shop),
        test=None,  # held out from the training rows by the sweep's test_fraction
        group_names=("large shop", "small shop"),
        class_names=("left", "bought"),
    )
