"""The loader module that MLmodel files of trials name for ``mlflow.pyfunc``.

It executes stored code only for a model of the user's own, which the logged model carries as it was trained. That goes
by a separate importer, not by MLflow's ``code_paths``, so that models whose modules share names load in one process.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from mlflow.exceptions import MlflowException

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.records.files import read_bytes
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.workers.own_code.own_record import stored_code
from dpsweep.workers.spec import TrialSpec
from dpsweep.workers.trials.predicted_table import predicted_table
from dpsweep.workers.trials.trained_model import TrainedModel, load_trained


@dataclass(frozen=True)
class Predictor:
    """The model object of ``mlflow.pyfunc``: maps rows of a table to predictions, or encoded examples to logits."""

    trained: TrainedModel

    def predict(
        self, model_input: pd.DataFrame | dict[str, Any] | list[Any] | npt.NDArray[Any]
    ) -> pd.DataFrame | npt.NDArray[np.float32]:
        """Return a data frame with a prediction for each row of a table, or logits [n, classes] of examples [n, ...].

        model_input: a data frame, its columns or its rows, as of `predicted_table`; or an array, as of
        `TrainedModel.logits`, each example as the data source stores it. Raises: MlflowException with the text of an
        InvalidInput.
        """
        try:
            if (frame := _frame(model_input)) is not None:
                found, notes = predicted_table(self.trained, frame)
                for note in notes:
                    warnings.warn(note, stacklevel=4)  # the caller of MLflow's `predict`
                return pd.DataFrame(found)
            return self.trained.logits(np.asarray(model_input))
        except InvalidInput as error:
            raise MlflowException.invalid_parameter_value(str(error)) from error


def _frame(given: object) -> pd.DataFrame | None:
    """Return a data frame, or the one that its columns or rows make; None for anything else."""
    match given:
        case pd.DataFrame():
            return given
        case dict():
            try:
                return pd.DataFrame(given)
            except ValueError as error:
                raise InvalidInput("the columns do not make a table; give lists of the same length") from error
        case [dict(), *_]:
            return pd.DataFrame(given)
    return None


def _load_pyfunc(path: str) -> Predictor:
    """Load the model; MLflow calls this function by its name.

    path: a folder with the files of a trial: spec, weights, input preparation, and the user's own code.
    """
    files = TrialFiles(os.path.realpath(path))
    spec = TrialSpec.from_json(read_bytes(files.spec))
    return Predictor(load_trained(files, spec, stored_code(files, spec)))
