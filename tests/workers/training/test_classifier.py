"""The classifier of scikit-learn: what it cost, and which of scikit-learn's own checks it passes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.utils.estimator_checks import check_estimator
from torch import nn

import dpsweep
from dpsweep import DPClassifier

ROWS = np.random.default_rng(0).normal(size=(300, 4))
NAMES = np.where(ROWS[:, 1] > 0, "yes", "no")


def hidden(features: int, classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(features, 8), nn.Tanh(), nn.Linear(8, classes))


def test_it_learns_within_its_epsilon_and_says_what_that_claims() -> None:
    given: Any = DPClassifier(epsilon=3, delta=1e-4, classes=["no", "yes", "maybe"], model=hidden, epochs=10)
    groups = np.arange(300) % 2
    fitted = clone(given).fit(ROWS, NAMES, groups=None)
    assert (fitted.predict(ROWS) == NAMES).mean() > 0.8
    assert fitted.predict_proba(ROWS[:2]).shape == (2, 3)
    assert (fitted.privacy_.kind, fitted.privacy_.reasons) == ("guarantee", ())
    assert 2.9 < fitted.privacy_.epsilon <= 3.0
    assert fitted.trace_.steps == 50
    clipped = DPClassifier(clipping="dpsgd_f", seed=1, epochs=1).fit(ROWS, NAMES, groups=groups)
    assert clipped.privacy_.reasons == ("known_seed", "classes_from_rows", "groups_from_rows")
    with pytest.raises(dpsweep.InvalidInput, match="some labels are not among the given classes"):
        given.set_params(classes=["no", "never"]).fit(ROWS, NAMES)


def test_it_is_the_same_where_the_default_dtype_of_torch_is_another() -> None:
    found = []
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            found.append(DPClassifier(seed=1, epochs=1, model=hidden).fit(ROWS, NAMES).predict_proba(ROWS))
        finally:
            torch.set_default_dtype(torch.float32)
    np.testing.assert_array_equal(found[0], found[1])


COMPARE_FITS = {"check_supervised_y_2d", "check_classifier_data_not_an_array", "check_fit_idempotent"}


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, None])
@pytest.mark.filterwarnings("ignore")
def test_it_passes_the_checks_of_scikit_learn(seed: int | None) -> None:
    """Without a seed, all but those that compare two fits, whose noise comes from keys of their own."""
    done = check_estimator(DPClassifier(seed=seed, epochs=5), on_fail=None, on_skip=None)
    failed = {check["check_name"] for check in done if check["status"] == "failed"}
    assert failed <= (COMPARE_FITS if seed is None else set())
    assert sum(check["status"] == "passed" for check in done) > 50
