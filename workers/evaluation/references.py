"""Simple models without privacy, trained beside a baseline (``reference: true``): a baseline below one of them says
nothing about what privacy costs. No noise protects these models, like the baseline."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from dpsweep.workers.data import Dataset, Split

_MOST_ROWS: Final = 20_000
_MOST_COLUMNS: Final = 2_000
"""A model of more numbers is no trivial one, and would take longer than the trial; of more rows, the first are used."""


def reference_scores(dataset: Dataset) -> dict[str, float]:
    """Return the score of each reference on the test data, by its name: accuracy for classes, R² for numbers.

    For classification the best rule on a single column and logistic regression, for regression of one number linear
    regression; each learns from the training data. Empty for other tasks and for features that are no table.
    """
    features = dataset.train.features
    if (
        features.ndim != 2
        or features.is_sparse
        or features.shape[1] > _MOST_COLUMNS
        or not features.is_floating_point()
    ):
        return {}
    match dataset.task:
        case "classification":
            return _of_classes(dataset)
        case "regression" if dataset.train.labels.ndim == 1 or dataset.train.labels.shape[1] == 1:
            return _of_numbers(dataset)
    return {}


def _of_classes(dataset: Dataset) -> dict[str, float]:
    from sklearn.linear_model import LogisticRegression  # late: importing it takes a second
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from sklearn.tree import DecisionTreeClassifier

    rows, labels = _table(dataset.train)
    if len(np.unique(labels)) < 2:
        return {}
    models = {
        "the best rule on a single column": DecisionTreeClassifier(max_depth=1, random_state=0),
        "logistic regression": make_pipeline(StandardScaler(), LogisticRegression(max_iter=300)),
    }
    return {name: float(model.fit(rows, labels).score(*_table(dataset.test))) for name, model in models.items()}


def _of_numbers(dataset: Dataset) -> dict[str, float]:
    from sklearn.linear_model import Ridge  # late: importing it takes a second
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    rows, labels = _table(dataset.train)
    model = make_pipeline(StandardScaler(), Ridge(1.0)).fit(rows, labels)
    return {"linear regression": float(model.score(*_table(dataset.test)))}


def _table(split: Split) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.generic]]:
    rows = split.features[:_MOST_ROWS].double().numpy()
    return rows, split.labels[:_MOST_ROWS].reshape(len(rows)).numpy()
