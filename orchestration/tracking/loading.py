"""The loader module that MLmodel files of trials name for ``mlflow.pyfunc``.

It executes stored code only for a model of the user's own, which the logged model carries as it was trained. That goes
by a separate importer, not by MLflow's ``code_paths``, so that models whose modules share names load in one process.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dpsweep.accounting.records.files import read_bytes
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.workers.own_code.own_record import stored_code
from dpsweep.workers.spec import TrialSpec
from dpsweep.workers.trials.trained_model import TrainedModel, load_trained


@dataclass(frozen=True)
class Predictor:
    """The model object of ``mlflow.pyfunc``: maps examples, as the data source stores them, to logits."""

    trained: TrainedModel

    def predict(self, model_input: npt.ArrayLike) -> npt.NDArray[np.float32]:
        """Return logits [n, classes] of examples [n, ...]. Raises: see `TrainedModel.logits`."""
        return self.trained.logits(model_input)


def _load_pyfunc(path: str) -> Predictor:
    """Load the model; MLflow calls this function by its name.

    path: a folder with the files of a trial: spec, weights, input preparation, and the user's own code.
    """
    files = TrialFiles(os.path.realpath(path))
    spec = TrialSpec.from_json(read_bytes(files.spec))
    return Predictor(load_trained(files, spec, stored_code(files, spec)))
