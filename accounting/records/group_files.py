"""Groups of training examples, from a CSV or Parquet file with the columns ``example_id`` and ``group``."""

from __future__ import annotations

import functools
import io
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import csv, parquet

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.records.files import read_bytes
from dpsweep.accounting.records.parquet_schemas import require_shallow_schema

_COLUMNS = ["example_id", "group"]


@dataclass(frozen=True, eq=False)
class GroupFile:
    """The group of each example: example_ids [examples], ascending; labels [examples] into ``names``, sorted."""

    uri: str
    example_ids: NDArray[np.int64]
    labels: NDArray[np.int32]
    names: tuple[str, ...]

    def labels_of(self, example_ids: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the labels of the given examples. Raises: InvalidInput when one of them has no group."""
        at = np.searchsorted(self.example_ids, example_ids)
        if not np.array_equal(self.example_ids[np.minimum(at, len(self.example_ids) - 1)], example_ids):
            raise InvalidInput(f"{self.uri} gives no group to some training examples; add a row for each of them")
        return self.labels[at]


@functools.lru_cache(maxsize=1)
def read_groups(uri: str) -> GroupFile:
    """Read a whole file of groups; cached, because every part of a trial needs it.

    Raises: InvalidInput for a file that is missing, is neither CSV nor Parquet, lacks a column, holds ids that are not
    whole numbers, or names an example twice.
    """
    try:
        data = io.BytesIO(read_bytes(uri))
        if uri.endswith(".parquet"):
            require_shallow_schema(data)
            table = parquet.read_table(data, columns=_COLUMNS)
        else:
            table = csv.read_csv(data, convert_options=csv.ConvertOptions(include_columns=_COLUMNS))
        ids = table.column("example_id").cast(pa.int64()).to_numpy()
        groups = table.column("group").cast(pa.string())
    except FileNotFoundError:
        raise InvalidInput(f"{uri} does not exist; give a CSV or Parquet file of example_id and group") from None
    except (pa.ArrowException, KeyError, OSError, ValueError) as error:
        raise InvalidInput(
            f"{uri} cannot be read as groups; it needs the columns example_id, of whole numbers, and group, as CSV "
            "with a header or as .parquet"
        ) from error
    if groups.null_count or len(ids) == 0 or len(np.unique(ids)) != len(ids):
        raise InvalidInput(f"{uri} names an example twice, leaves a group empty or has no rows; give each example one")
    names, labels = np.unique(groups.to_numpy().astype(str), return_inverse=True)
    order = np.argsort(ids)
    return GroupFile(uri, ids[order], labels[order].astype(np.int32), tuple(names.tolist()))
