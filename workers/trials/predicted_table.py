"""Predictions of a trained model for the rows of another table, in the names and units of the one of its training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from dpsweep.accounting.errors import InvalidInput
from dpsweep.workers.data import NewRows, Pictures, RowReader, parquet_of
from dpsweep.workers.trials.trained_model import TrainedModel

Values = npt.NDArray[Any]
_OF_LIKELIHOOD: Final = ("cross_entropy", "binary_logistic", "binary_cross_entropy")
"""Losses whose outputs are logits of probabilities."""


def predicted_table(trained: TrainedModel, table: str | Path | Any) -> tuple[dict[str, Values], tuple[str, ...]]:
    """Return columns with an entry for each row of the table, in its order, and notes on values.

    table: a data frame, or the path of a .csv, .tsv, .jsonl or .parquet file. No labels are needed. For classes,
    ``prediction`` is the name of one, and ``probability of NAME`` follow. Of several labels, each has a column of 0
    and 1, and its probability. Targets are in the unit of the table. A row that lacks a value has None, or NaN.
    After a loss that is no likelihood, ``output for NAME`` stand for probabilities.

    Raises: InvalidInput where the features are of no table, or are not declared, and for a data frame where the model
    reads pictures; otherwise as `encoded` of the `RowReader`.
    """
    columns = trained.columns
    if columns is None:
        raise InvalidInput(
            f"the data {trained.spec.data.name!r} of the trial are neither a table whose `ranges` and `categories` are "
            "all declared, nor texts with a label, nor pictures of a table, so that no other table can be read alike; "
            "declare those of a table and train again, or give encoded examples to `predict` in Python (docs/python.md)"
        )
    if isinstance(table, str | Path):
        rows = columns.encoded(str(table))
    elif isinstance(columns, Pictures):
        raise InvalidInput(
            f"the model reads pictures, whose files a table names in its column {columns.image!r}; give the path of a "
            "table in the folder where these names start, or encoded pictures to `predict` in Python"
        )
    elif hasattr(table, "to_parquet"):
        _require_columns(table, columns.example)
        with parquet_of(table) as path:
            rows = columns.encoded(path)
    else:
        raise InvalidInput(f"the table is of type {type(table).__name__}; give the path of a file, or a data frame")
    found = _named(trained.logits(rows.features).astype(np.float64), columns, trained.spec.loss.name)
    return {name: _spread(values, rows) for name, values in found.items()}, rows.notes


def _require_columns(frame: Any, needed: Mapping[str, Any]) -> None:
    """Raise InvalidInput for a data frame without rows, or without a column that the model reads."""
    there = {*map(str, frame.columns)}
    for name in needed:
        if name not in there and f"{name}[0]" not in there:
            index = "; it is an index: call reset_index() first" if name in frame.index.names else ""
            raise InvalidInput(f"the data frame has no column {name!r}{index}; the model reads {', '.join(needed)}")
    if not len(frame):
        raise InvalidInput("the data frame has no rows; give one with at least one")


def example_of(
    columns: RowReader | None, loss: str, outputs: int
) -> tuple[dict[str, Any], dict[str, Any]] | tuple[None, None]:
    """Return a row made of declarations, and by name a prediction for outputs of zero; nothing where no data frame can
    hold a row.

    outputs: number of outputs of the model.
    """
    if columns is None or isinstance(columns, Pictures):
        return None, None
    found = _named(np.zeros((1, outputs)), columns, loss)
    return columns.example, {name: values.tolist()[0] for name, values in found.items()}


def _named(outputs: Values, columns: RowReader, loss: str) -> dict[str, Values]:
    """Return what outputs [n, m] say, by name."""
    names = columns.outputs or [f"class {place}" for place in range(max(outputs.shape[1], 2))]
    if columns.task == "regression":
        spans = [columns.targets.get(name, (0.0, 1.0)) for name in names]
        return {
            name: low + (high - low) * each for name, (low, high), each in zip(names, spans, outputs.T, strict=True)
        }
    is_likelihood = loss in _OF_LIKELIHOOD
    if columns.task == "multi_label":
        sure = torch.from_numpy(outputs).sigmoid().numpy() if is_likelihood else outputs
        decided = {name: (each > 0.0).astype(np.int64) for name, each in zip(names, outputs.T, strict=True)}
        return decided | _each(names, sure, is_likelihood)
    logits = np.concatenate((np.zeros_like(outputs), outputs), axis=1) if outputs.shape[1] == 1 else outputs
    sure = torch.from_numpy(logits).softmax(1).numpy() if is_likelihood else logits
    return {"prediction": np.array(names, dtype=object)[logits.argmax(1)]} | _each(names, sure, is_likelihood)


def _each(names: Sequence[str], outputs: Values, is_likelihood: bool) -> dict[str, Values]:
    """Return the columns of outputs [n, m] by name; probabilities, or outputs of another loss."""
    what = "probability of" if is_likelihood else "output for"
    return {f"{what} {name}": each for name, each in zip(names, outputs.T, strict=True)}


def _spread(values: Values, rows: NewRows) -> Values:
    """Return an entry for every row: the values of the complete rows, and missing ones between them."""
    if len(rows.complete) == rows.total:
        return values
    is_text = values.dtype == object
    found = np.full(rows.total, None if is_text else math.nan, dtype=object if is_text else np.float64)
    found[rows.complete] = values
    return found
