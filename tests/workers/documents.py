"""A source of the user's own whose rows have one to three owners each, from a seed."""

from __future__ import annotations

import numpy as np

from dpsweep.workers.data import Source, make_split
from dpsweep.workers.data.owners import NOBODY

ROWS, AUTHORS, FEATURES = 160, 40, 5


def documents(seed: int = 0) -> Source:
    """The label follows from the features; authors are drawn apart from them."""
    draw = np.random.default_rng(seed)
    rows = draw.normal(size=(ROWS, FEATURES))
    authors = draw.integers(0, AUTHORS, (ROWS, 3))
    authors[:, 1:][draw.random((ROWS, 2)) < 0.7] = NOBODY
    train = make_split(rows.astype(np.float32), rows[:, :3].argmax(1), np.arange(ROWS) % 2, user_ids=authors)
    return Source("documents", train, None, ("even", "odd"), ("a", "b", "c"))
