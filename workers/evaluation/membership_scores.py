"""Scores of how telling the final model is about single examples, stored for their owners.

Values of single examples without noise: private data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dpsweep.accounting.errors import DataCorruption
from dpsweep.accounting.records.arrow_tables import read_table
from dpsweep.accounting.records.files import exists
from dpsweep.accounting.records.sealed import read_private, write_private

Floats = npt.NDArray[np.float64]
Whole = npt.NDArray[np.int64]

_COLUMNS: Final = {
    "example_id": pa.int64(),
    "group": pa.int32(),
    "is_member": pa.int8(),
    "log_ratio": pa.float64(),
    "gradient_norm": pa.float64(),
}


@dataclass(frozen=True)
class MembershipScores:
    """Scores of training examples, the members, and of test examples; arrays [n].

    `example_ids`: in the source. `log_ratios`: of the likelihood under the attacked model to that under reference
    models. `gradient_norms`: under the attacked model.
    """

    example_ids: Whole
    groups: Whole
    is_member: npt.NDArray[np.bool_]
    log_ratios: Floats
    gradient_norms: Floats


def write_membership(uri: str, scores: MembershipScores) -> None:
    """Store the scores, readable by the owner of the data only."""
    values = (scores.example_ids, scores.groups, scores.is_member, scores.log_ratios, scores.gradient_norms)
    arrays = [
        pa.array(column.astype(kind.to_pandas_dtype())) for column, kind in zip(values, _COLUMNS.values(), strict=True)
    ]
    table, stream = pa.table(arrays, names=list(_COLUMNS)), pa.BufferOutputStream()
    with pa.ipc.new_file(stream, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(table)
    write_private(uri, stream.getvalue().to_pybytes())


def read_membership(uri: str) -> MembershipScores | None:
    """Return the stored scores, or None if there are none. Raises: DataCorruption."""
    if not exists(uri):
        return None
    try:
        table = read_table(read_private(uri))
        columns = [table[name].cast(kind).to_numpy() for name, kind in _COLUMNS.items()]
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        raise DataCorruption(
            f"{uri} is damaged; restore it from a backup, or delete it: owners are told of fewer attacks"
        ) from error
    ids, groups, is_member, ratios, norms = columns
    return MembershipScores(ids.astype(np.int64), groups.astype(np.int64), is_member.astype(np.bool_), ratios, norms)
