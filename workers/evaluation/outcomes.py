"""Predictions of a final model for each test example, stored for intervals and paired comparisons of trials.

For classification these are the label and the prediction; for other tasks, the terms whose sums give the scores. They
are values of single test examples, which no epsilon covers, so they are in the private folder of the trial.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dpsweep.accounting.errors import DataCorruption
from dpsweep.accounting.records.arrow_tables import encode_table, read_table
from dpsweep.accounting.records.files import exists
from dpsweep.accounting.records.json_text import parsed_json
from dpsweep.accounting.records.sealed import read_private, write_private
from dpsweep.workers.tasks import TASKS, task_called

if TYPE_CHECKING:
    from dpsweep.workers.data import Dataset, Split
    from dpsweep.workers.evaluation.predictions import Predictions


def write_wrong(uri: str, predictions: Predictions, held_out: Split) -> None:
    """Store the number of wrong predictions. Raises: StorageError."""
    wrong = int(np.count_nonzero(predictions.classes != held_out.labels.numpy()))
    write_private(uri, json.dumps({"wrong": wrong}).encode())


def read_wrong(uri: str) -> int:
    """Return the stored number of wrong predictions. Raises: FileNotFoundError, DataCorruption."""
    try:
        found = parsed_json(read_private(uri))["wrong"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataCorruption(f"{uri} is damaged; run the sweep in another folder") from error
    if not isinstance(found, int) or found < 0:
        raise DataCorruption(f"{uri} is damaged; run the sweep in another folder")
    return found


UserNumbers = npt.NDArray[np.int64]
_USER: Final = "user"
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
    """Test examples of one classification trial, each array [n]: id in the source, label, group, and `Predictions`.

    `group_names`, `num_classes`: of the data set. `users`: [n], id of the owner of each example, or of those who share
    examples with its owners (`dpsweep.workers.data.owners.dependent_rows`); None if the data name none.
    """

    example_ids: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    groups: npt.NDArray[np.int64]
    predicted: npt.NDArray[np.int64]
    log_losses: npt.NDArray[np.float64]
    confidences: npt.NDArray[np.float64]
    group_names: tuple[str, ...]
    num_classes: int
    users: UserNumbers | None = None

    @classmethod
    def of(cls, found: Predictions, split: Split, dataset: Dataset) -> Outcomes:
        """Return the outcomes of predictions ``found`` for ``split``."""
        rows = split.example_ids.numpy(), split.labels.numpy(), split.groups.numpy()
        names = dataset.group_names
        numbers = found.classes, found.log_losses, found.confidences
        return cls(*rows, *numbers, names, dataset.num_classes, _users(split))

    @property
    def test_set(self) -> str:
        """Digest of the test examples; equal for trials with the same test set."""
        digest = hashlib.sha256("\0".join(self.group_names).encode())
        for column in (self.example_ids, self.labels, self.groups):
            digest.update(column.tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class ScoredOutcomes:
    """Test examples of one trial with a task other than classification.

    `example_ids`, `groups`: [n], id in the source and group.
    `kept`: [n, m], values of `Task.kept`.
    `task`: name of the task.
    `labels`: digest of the labels.
    `users`: as in `Outcomes`.
    """

    example_ids: npt.NDArray[np.int64]
    groups: npt.NDArray[np.int64]
    kept: npt.NDArray[np.float64]
    group_names: tuple[str, ...]
    task: str
    labels: str
    users: UserNumbers | None = None

    @classmethod
    def of(cls, found: Predictions, split: Split, dataset: Dataset) -> ScoredOutcomes:
        """Return the outcomes of predictions ``found`` for ``split``."""
        labels = hashlib.sha256(np.ascontiguousarray(split.labels.numpy()).data).hexdigest()
        rows = split.example_ids.numpy(), split.groups.numpy()
        return cls(*rows, found.kept, dataset.group_names, dataset.task, labels, _users(split))

    @property
    def test_set(self) -> str:
        """As `Outcomes.test_set`."""
        digest = hashlib.sha256("\0".join((self.task, self.labels, *self.group_names)).encode())
        for column in (self.example_ids, self.groups):
            digest.update(column.tobytes())
        return digest.hexdigest()


def _users(split: Split) -> UserNumbers | None:
    from dpsweep.workers.data import dependent_rows  # loads torch, as whoever has a split has done

    return None if split.user_ids is None else dependent_rows(split.user_ids)


AnyOutcomes = Outcomes | ScoredOutcomes


def outcomes_of(found: Predictions, split: Split, dataset: Dataset) -> AnyOutcomes:
    """Return the outcomes of predictions ``found`` for ``split``, of the kind that the task of the data set has."""
    return (ScoredOutcomes if task_called(dataset.task).scores else Outcomes).of(found, split, dataset)


def write_outcomes(uri: str, outcomes: AnyOutcomes) -> None:
    """Store the outcomes, readable by the owner only."""
    table = _table(outcomes) if isinstance(outcomes, Outcomes) else _scored_table(outcomes)
    if outcomes.users is not None:
        table = table.append_column(_USER, pa.array(outcomes.users))
    write_private(uri, encode_table(table))


def _scored_table(outcomes: ScoredOutcomes) -> pa.Table:
    rows = [pa.array(outcomes.example_ids), pa.array(outcomes.groups.astype(np.int32))]
    columns = [pa.array(np.ascontiguousarray(column)) for column in outcomes.kept.T]
    names = ["example_id", "group", *(f"kept_{place}" for place in range(len(columns)))]
    facts = {"task": outcomes.task, "labels": outcomes.labels, "groups": json.dumps(outcomes.group_names)}
    return pa.table([*rows, *columns], names=names).replace_schema_metadata(facts)


def _table(outcomes: Outcomes) -> pa.Table:
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
    return pa.table(arrays, names=list(_COLUMNS)).replace_schema_metadata(facts)


def read_outcomes(uri: str) -> AnyOutcomes | None:
    """Return the stored outcomes, or None if there are none. Raises: DataCorruption."""
    if not exists(uri):
        return None
    stored = read_private(uri)
    try:
        table = read_table(stored)
        if not all(pa.types.is_integer(kind) or pa.types.is_floating(kind) for kind in table.schema.types):
            raise ValueError("a column of other values than numbers")
        facts = table.schema.metadata or {}
        names = tuple(map(str, parsed_json(facts[b"groups"])))
        users = table[_USER].to_numpy().astype(np.int64) if _USER in table.column_names else None
        made = _scored_outcomes if b"task" in facts else _classified_outcomes
        found = made(table, facts, names, users)
        _require_places(found.groups, len(names))
    except (pa.ArrowException, OSError, IndexError, TypeError, ValueError, KeyError) as error:
        raise DataCorruption(
            f"{uri} is damaged; restore it from a backup, or delete it: intervals go missing"
        ) from error
    return found


def _require_places(found: npt.NDArray[np.int64], count: int) -> None:
    """Raise ValueError unless there are some places, all of them among ``count`` ones."""
    if not 0 <= found.min() <= found.max() < count:
        raise ValueError("a place that is none")


def _classified_outcomes(
    table: pa.Table, facts: Mapping[bytes, bytes], names: tuple[str, ...], users: UserNumbers | None
) -> Outcomes:
    columns, classes = [table[name].to_numpy() for name in _COLUMNS], int(facts[b"classes"])
    ids, labels, groups, predicted = (column.astype(np.int64) for column in columns[:4])
    log_losses, confidences = (column.astype(np.float64) for column in columns[4:])
    for found in (labels, predicted):
        _require_places(found, classes)
    return Outcomes(ids, labels, groups, predicted, log_losses, confidences, names, classes, users)


def _scored_outcomes(
    table: pa.Table, facts: Mapping[bytes, bytes], names: tuple[str, ...], users: UserNumbers | None
) -> ScoredOutcomes:
    task = facts[b"task"].decode()
    if task not in TASKS:
        raise ValueError("another task")
    ids, groups = (table[name].to_numpy().astype(np.int64) for name in ("example_id", "group"))
    count = sum(name.startswith("kept_") for name in table.column_names)
    kept = np.stack([table[f"kept_{place}"].to_numpy() for place in range(count)], 1)
    with np.errstate(all="ignore"):
        for score in TASKS[task].scores:
            score.of(kept[:1])  # an IndexError or ValueError for another number of values
    return ScoredOutcomes(ids, groups, kept.astype(np.float64), names, task, facts[b"labels"].decode(), users)
