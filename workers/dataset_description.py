"""The description of a data set in a plan. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass

from dpsweep.accounting.reasons import Reason

RowsPerUser = tuple[tuple[int, int], ...]
"""How many users have how many rows: (rows, users), ascending by rows."""


@dataclass(frozen=True)
class DatasetDescription:
    """Sizes, names, notes and reasons of a data set, for planning.

    group_sizes, test_group_sizes: training and test examples by group. notes, reasons: as in `Source`. rows_per_user:
    of the training examples; empty if the data name no users.
    """

    name: str
    train_size: int
    test_size: int
    public_size: int
    group_names: tuple[str, ...]
    group_sizes: tuple[int, ...]
    test_group_sizes: tuple[int, ...]
    class_names: tuple[str, ...]
    feature_shape: tuple[int, ...]
    notes: tuple[str, ...]
    task: str = "classification"
    reasons: tuple[Reason, ...] = ()
    rows_per_user: RowsPerUser = ()
