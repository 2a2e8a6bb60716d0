"""Simple models beside a baseline: right where the answer is known, and absent where they make no sense."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dpsweep.workers.data import Dataset, Split
from dpsweep.workers.evaluation.references import reference_scores


def dataset(features: np.ndarray, labels: np.ndarray, task: str = "classification") -> Dataset:
    rows, kind = torch.from_numpy(features).float(), torch.int64 if task == "classification" else torch.float32
    targets = torch.from_numpy(labels).to(kind)
    half, ids = len(rows) // 2, torch.arange(len(rows))
    groups = torch.zeros(len(rows), dtype=torch.int64)
    train, test = (
        Split(rows[part], targets[part], groups[part], ids[part]) for part in (slice(0, half), slice(half, None))
    )
    return Dataset("made", train, test, None, ("all",), ("a", "b"), task=task)


DRAWN = np.random.default_rng(0).normal(size=(800, 3))


def test_a_rule_on_one_column_and_logistic_regression_score_what_they_can() -> None:
    tip = reference_scores(dataset(DRAWN, np.abs(DRAWN[:, 1]) > 0.3))
    assert tip["the best rule on a single column"] > tip["logistic regression"] - 0.05
    linear = reference_scores(dataset(DRAWN, DRAWN.sum(1) > 0.0))
    assert linear["logistic regression"] > 0.97 > 0.9 > linear["the best rule on a single column"]


def test_a_number_is_explained_by_linear_regression() -> None:
    found = reference_scores(dataset(DRAWN, DRAWN @ [1.0, 2.0, 3.0], "regression"))
    assert found == {"linear regression": pytest.approx(1.0, abs=1e-3)}


def test_pictures_tokens_and_a_single_class_have_no_references() -> None:
    assert reference_scores(dataset(DRAWN.reshape(800, 1, 3), DRAWN[:, 0] > 0.0)) == {}
    assert reference_scores(dataset(DRAWN, np.zeros(800))) == {}
    assert reference_scores(dataset(DRAWN, DRAWN[:, 0] > 0.0, "multi_label")) == {}
