"""Dutch census 2001: does a person have a prestigious occupation? Groups by sex."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.csv as csv

from dpsweep.workers.data.base import Source, make_split
from dpsweep.workers.data.source_files import locate, reading, require_row_count
from dpsweep.workers.data.tabular import (
    Categorical,
    Column,
    choose_groups,
    encoded_columns,
    indices,
    intersected,
    intersected_indices,
    without,
)

_CODES = {
    "age": range(4, 16),
    "household_position": (1110, 1121, 1122, 1131, 1132, 1140, 1210, 1220),
    "household_size": (111, 112, 113, 114, 125, 126),
    "prev_residence_place": (1, 2),
    "citizenship": (1, 2, 3),
    "country_birth": (1, 2, 3),
    "edu_level": range(6),
    "economic_status": (111, 112, 120),
    "cur_eco_activity": (111, 122, 124, *range(131, 140)),
    "marital_status": (1, 2, 3, 4),
}
"""Codes of each attribute in the census; the protected attribute sex is not a feature."""
_COLUMNS: tuple[Column, ...] = tuple(
    Categorical(name, tuple(str(code) for code in codes), closed=True) for name, codes in _CODES.items()
)
_CLASSES = ("0", "1")
_GROUPS = {"sex": ("female", "male"), "occupation": _CLASSES}


def dutch(
    root: str | None = None,
    group: str | Sequence[str] = "sex",
    exclude: Sequence[str] = ("age", "cur_eco_activity"),
) -> Source:
    """Return the 60,420 rows of dutch.csv, with every attribute one-hot.

    `exclude`: attributes left out; by default 35 features remain, as in Xu et al. (2021). `group`: sex or occupation,
    or a list of both, whose intersections are the groups.
    """
    values = choose_groups("dutch", group, _GROUPS)
    columns = without(_COLUMNS, exclude, "dutch")
    path = locate("dutch", ("dutch/dutch.csv", "dutch.csv"), root)
    fields = ("sex", *_CODES, "occupation")
    options = csv.ConvertOptions(column_types=dict.fromkeys(fields, pa.string()), include_columns=fields)
    with reading(path):
        table = csv.read_csv(path, convert_options=options)
    require_row_count(path, table.num_rows, 60_420)
    split = make_split(
        encoded_columns(table, columns),
        indices(table["occupation"], _CLASSES, "occupation"),
        intersected_indices(table, values),
    )
    return Source("dutch", split, None, intersected(values), _CLASSES)
