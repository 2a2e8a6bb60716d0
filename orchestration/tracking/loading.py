"""The loader module that MLmodel files of trials name for ``mlflow.pyfunc``. It executes no stored code."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from accounting.records import TrialFiles, read_bytes
from workers.spec import TrialSpec
from workers.trained_model import TrainedModel, load_trained


@dataclass(frozen=True)
class Predictor:
    """The model object of ``mlflow.pyfunc``: maps examples, as the data source stores them, to logits."""

    trained: TrainedModel

    def predict(self, model_input: npt.ArrayLike) -> npt.NDArray[np.float32]:
        """Logits [n, classes] of examples [n, ...]. Raises: see `TrainedModel.logits`."""
        return self.trained.logits(model_input)


def _load_pyfunc(path: str) -> Predictor:
    """Load the model; MLflow calls this function by its name.

    path: a folder with the files of a trial: spec, weights, and input preparation.
    """
    files = TrialFiles(path)
    return Predictor(load_trained(files, TrialSpec.from_json(read_bytes(files.spec))))
