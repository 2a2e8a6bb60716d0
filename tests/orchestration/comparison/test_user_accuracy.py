"""Accuracy over users counts everybody once, and its interval resamples people."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dpsweep.orchestration.comparison.evidence import gather
from dpsweep.orchestration.comparison.settings import finished_settings
from dpsweep.workers.evaluation.rates import shares_of_users
from tests.known import known
from tests.orchestration.sample_outcomes import GROUPS, LABELS, of_predictions, trial

RIGHT = np.random.default_rng(0).random(len(GROUPS)) < 0.8


def test_a_prolific_user_counts_as_much_as_any_other() -> None:
    """One user owns half of all rows, all of them wrong; everybody else owns one."""
    users, right = np.arange(len(GROUPS)), RIGHT.copy()
    users[: len(users) // 2], right[: len(users) // 2] = 0, False
    outcomes = replace(of_predictions(np.where(right, LABELS, 1 - LABELS)), users=users)
    published = trial(outcomes, "flat")
    evidence = gather([published], {published.key: outcomes}, resamples=200)
    (setting,) = finished_settings([published])
    by_user = np.bincount(users, right) / np.maximum(np.bincount(users), 1)
    owners = np.unique(users)
    over_users, over_rows = (known(evidence.interval(setting, name)) for name in ("user_accuracy", "accuracy"))
    assert over_users.value == pytest.approx(by_user[owners].mean(), abs=1e-6)
    assert over_users.low < over_users.value < over_users.high
    assert over_users.high - over_users.low < 0.05 < over_rows.high - over_rows.low, "the row mean hangs on one user"
    of_groups = [by_user[np.unique(users[group == GROUPS])].mean() for group in (0, 1)]
    gap = known(evidence.interval(setting, "user_accuracy_gap"))
    worst = known(evidence.interval(setting, "worst_group_user_accuracy"))
    assert gap.value == pytest.approx(abs(of_groups[0] - of_groups[1]), abs=1e-6)
    assert worst.value == pytest.approx(min(of_groups), abs=1e-6)


def test_without_users_nothing_is_measured_over_them() -> None:
    outcomes = of_predictions(np.where(RIGHT, LABELS, 1 - LABELS))
    published = trial(outcomes, "flat")
    (setting,) = finished_settings([published])
    assert gather([published], {published.key: outcomes}, resamples=50).interval(setting, "user_accuracy") is None


def test_a_user_in_several_groups_counts_once_in_each() -> None:
    users, groups = np.array([5, 5, 5, 9, 9]), np.array([0, 0, 1, 1, 1])
    assert shares_of_users(users, groups).tolist() == [0.5, 0.5, 1.0, 0.5, 0.5]
