"""Loads the model of a trial that MLflow keeps: the loader that its MLmodel file names. Executes nothing stored."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from accounting.records import TrialFiles, read_bytes
from workers.spec import TrialSpec
from workers.trained_model import TrainedModel, load_trained


@dataclass(frozen=True)
class Predictor:
    """What ``mlflow.pyfunc`` calls: examples as the data source stores them, to logits."""

    trained: TrainedModel

    def predict(self, model_input: npt.ArrayLike) -> npt.NDArray[np.float32]:
        """Logits [n, classes] of examples [n, ...]. Raises: see `TrainedModel.logits`."""
        return self.trained.logits(model_input)


def _load_pyfunc(path: str) -> Predictor:
    """The name that MLflow calls. path: a folder with the files of a trial: spec, weights, preparation of inputs."""
    files = TrialFiles(path)
    return Predictor(load_trained(files, TrialSpec.from_json(read_bytes(files.spec))))
