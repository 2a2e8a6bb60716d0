"""A classifier of scikit-learn that is trained privately: `PrivateTraining` behind ``fit`` and ``predict``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import nn

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.mechanism.reasons import weakened
from dpsweep.workers.machine.devices import torch_defaults
from dpsweep.workers.training.private_training import PrivateTraining


class DPClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """Trains a model on rows of numbers with (epsilon, delta)-differential privacy for each row.

    Without ``seed``, two fits differ: noise and batches come from secret keys. Nothing is read off the rows but, unless
    ``classes`` are given, the classes, for which epsilon is an estimate: scale features by ranges that you know.

    `model`: makes the network for a number of features and of classes; by default a linear one. `clipping`, `sampling`:
    as in `PrivateTraining`; batches are at most the data. After ``fit``: ``classes_``, ``model_``, ``trace_`` (what was
    run), ``privacy_`` (what it cost, and what that claims).

    It passes scikit-learn's ``check_estimator`` with a seed; without one, all but the checks that compare two fits.
    """

    def __init__(
        self,
        epsilon: float = 3.0,
        delta: float = 1e-5,
        *,
        classes: Sequence[Any] | None = None,
        model: Callable[[int, int], nn.Module] = nn.Linear,
        clipping: Any = 1.0,
        sampling: int = 64,
        epochs: int = 20,
        learning_rate: float = 0.5,
        seed: int | None = None,
    ) -> None:
        self.epsilon, self.delta, self.classes, self.model = epsilon, delta, classes, model
        self.clipping, self.sampling, self.epochs = clipping, sampling, epochs
        self.learning_rate, self.seed = learning_rate, seed

    @torch_defaults()
    def fit(self, X: npt.ArrayLike, y: npt.ArrayLike, groups: npt.ArrayLike | None = None) -> Self:
        """Train on rows [n, features] and their classes [n]. groups: as in `PrivateTraining`.

        Raises: InvalidInput for labels that are not among ``classes``, and as `PrivateTraining`.
        """
        rows, labels = validate_data(self, X, y, dtype=np.float32)
        check_classification_targets(labels)
        self.classes_ = np.unique(labels if self.classes is None else np.asarray(self.classes))
        places = np.searchsorted(self.classes_, labels).clip(max=len(self.classes_) - 1)
        if (self.classes_[places] != labels).any():
            raise InvalidInput("some labels are not among the given classes; give all classes")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed or 0)
            self.model_ = self.model(rows.shape[1], len(self.classes_))
        engine = PrivateTraining(
            self.model_,
            "cross_entropy",
            {"name": "sgd", "learning_rate": self.learning_rate},
            (rows, places),
            self.clipping,
            sampling=min(self.sampling, len(rows)),
            epochs=self.epochs,
            delta=self.delta,
            target_epsilon=self.epsilon,
            groups=groups,
            norms="off",
            seed=self.seed,
        )
        for batch in engine:
            engine.step(batch)
        self.trace_ = engine.trace
        self.privacy_ = weakened(engine.privacy(), () if self.classes is not None else ("classes_from_rows",))
        return self

    @torch_defaults()
    def predict_proba(self, X: npt.ArrayLike) -> npt.NDArray[np.float32]:
        """Return probabilities [n, classes]."""
        check_is_fitted(self)
        rows = torch.from_numpy(validate_data(self, X, reset=False, dtype=np.float32))
        self.model_.eval()
        with torch.no_grad():
            found: npt.NDArray[np.float32] = self.model_(rows).softmax(1).numpy()
        return found

    def predict(self, X: npt.ArrayLike) -> npt.NDArray[Any]:
        """Return the most probable class of each row, [n]."""
        found = self.predict_proba(X).argmax(1)
        classes: npt.NDArray[Any] = self.classes_[found]
        return classes
