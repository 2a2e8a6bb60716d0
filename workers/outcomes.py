"""What a final model predicts of each test example, stored for intervals and paired comparisons of trials.

Values of single test examples, which no epsilon covers: they lie in the private folder of the trial.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from accounting.errors import DataCorruption
from accounting.records import exists, read_private, read_table, write_private
from workers.data import Dataset, Split
from workers.evaluation import Predictions

_COLUMNS: Final = {
    "example_id": pa.int64(),
    "label": pa.int32(),
    "group": pa.int32(),
    "predicted": pa.int32(),
    "log_loss": pa.float32(),
    "confidence": pa.float32(),
}


@dataclass(frozen=True)
class Outcomes:
    """Test examples of one trial, each array [n]: id in the source, label, group, and what `Predictions` says of each.

    group_names, num_classes: of the data set.
    """

    example_ids: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    groups: npt.NDArray[np.int64]
    predicted: npt.NDArray[np.int64]
    log_losses: npt.NDArray[np.float64]
    confidences: npt.NDArray[np.float64]
    group_names: tuple[str, ...]
    num_classes: int

    @classmethod
    def of(cls, found: Predictions, split: Split, dataset: Dataset) -> Outcomes:
        """The outcomes of predictions of ``split``."""
        rows = split.example_ids.numpy(), split.labels.numpy(), split.groups.numpy()
        names = dataset.group_names
        return cls(*rows, found.classes, found.log_losses, found.confidences, names, dataset.num_classes)

    @property
    def test_set(self) -> str:
        """Digest of the examples: trials with equal ones were tested on the same."""
        digest = hashlib.sha256("\0".join(self.group_names).encode())
        for column in (self.example_ids, self.labels, self.groups):
            digest.update(column.tobytes())
        return digest.hexdigest()


def write_outcomes(uri: str, outcomes: Outcomes) -> None:
    """Store the outcomes, readable by the owner only."""
    values = (
        outcomes.example_ids,
        outcomes.labels,
        outcomes.groups,
        outcomes.predicted,
        outcomes.log_losses,
        outcomes.confidences,
    )
    arrays = [pa.array(column, kind) for column, kind in zip(values, _COLUMNS.values(), strict=True)]
    facts = {"classes": str(outcomes.num_classes), "groups": json.dumps(outcomes.group_names)}
    table = pa.table(arrays, names=list(_COLUMNS)).replace_schema_metadata(facts)
    stream = pa.BufferOutputStream()
    with pa.ipc.new_file(stream, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(table)
    write_private(uri, stream.getvalue().to_pybytes())


def read_outcomes(uri: str) -> Outcomes | None:
    """The stored outcomes; None where there are none, as of older versions. Raises: DataCorruption for damage."""
    if not exists(uri):
        return None
    stored = read_private(uri)
    try:
        table = read_table(stored)
        columns = [table[name].to_numpy() for name in _COLUMNS]
        facts = table.schema.metadata or {}
        names, classes = json.loads(facts[b"groups"]), int(facts[b"classes"])
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        raise DataCorruption(
            f"{uri} is damaged; restore it from a backup, or delete it: intervals go missing"
        ) from error
    ids, labels, groups, predicted = (column.astype(np.int64) for column in columns[:4])
    log_losses, confidences = (column.astype(np.float64) for column in columns[4:])
    return Outcomes(ids, labels, groups, predicted, log_losses, confidences, tuple(names), classes)
