"""A data source of the user's own that sweeps of the tests load from this file: people, one of whom may be altered."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dpsweep.workers.data import Source, make_split

ROWS, TEST_ROWS, ALTERED = 60, 40, 7


def store(path: Path, income: float) -> None:
    """Incomes, ages, labels and groups of the people to train on; one of them has this income."""
    random = np.random.default_rng(0)
    incomes, ages = random.uniform(0, 200_000, ROWS), random.uniform(20, 90, ROWS)
    incomes[ALTERED] = income
    np.save(path, np.stack([incomes, ages, random.integers(0, 2, ROWS), random.integers(0, 2, ROWS)], axis=1))


def people(path: str) -> Source:
    """These people, incomes in units of 10,000 and ages of 10; the test set is always the same."""
    stored, random = np.load(path), np.random.default_rng(1)
    test = np.stack([random.uniform(0, 20, TEST_ROWS), random.uniform(2, 9, TEST_ROWS)], axis=1)
    labels, groups = random.integers(0, 2, (2, TEST_ROWS))
    return Source(
        "people",
        make_split((stored[:, :2] / [10_000, 10]).astype(np.float32), stored[:, 2], stored[:, 3]),
        make_split(test.astype(np.float32), labels, groups, first_id=ROWS),
        group_names=("f", "m"),
        class_names=("no", "yes"),
    )
