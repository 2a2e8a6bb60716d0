"""The description of a data set in a plan. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from dpsweep.accounting.mechanism.reasons import Reason

RowsPerUser = tuple[tuple[int, int], ...]
"""How many users have how many rows: (rows, users), ascending by rows."""

RowsKept = tuple[tuple[int, int], ...]
"""How many rows remain if each user keeps at most so many: (most, rows), ascending."""

NO_GROUPS: Final = ("all",)
"""Names of the groups of data that name none."""


@dataclass(frozen=True)
class DatasetDescription:
    """Sizes, names, notes and reasons of a data set, for planning.

    group_sizes, test_group_sizes: training and test examples by group.
    notes, reasons: as in `Source`.
    rows_per_user: of the training examples; empty if the data name no users.
    rows_kept: None unless rows may have several owners.
    test_users: number of users of the test examples, and by group test_group_users; None if these name no users. Users
    who share test rows count as one.
    shared_users: how many own training and test examples.
    rows_per_user and shared_users are private.
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
    rows_per_user: RowsPerUser = field(default=(), repr=False)
    rows_kept: RowsKept | None = field(default=None, repr=False)
    test_users: int | None = None
    test_group_users: tuple[int, ...] = ()
    shared_users: int = field(default=0, repr=False)
