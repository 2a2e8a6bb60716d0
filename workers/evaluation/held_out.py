"""Number of wrong predictions of a candidate on held-out examples, by which it is chosen. Private data."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np

from dpsweep.accounting.errors import DataCorruption
from dpsweep.accounting.records.json_text import parsed_json
from dpsweep.accounting.records.sealed import read_private, write_private

if TYPE_CHECKING:  # these modules load torch
    from dpsweep.workers.data import Split
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
