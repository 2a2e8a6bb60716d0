"""Membership inference on cases whose answer is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import binom
from torch import nn

from accounting.errors import InvalidInput
from workers.attacks import attack, attack_losses, audited_epsilon, best_threshold
from workers.data import Source, make_split
from workers.data.cuts import cut
from workers.losses import build_loss
from workers.spec import Component, DataSpec


def generator() -> np.random.Generator:
    return np.random.default_rng(0)


def test_separable_losses_are_told_apart() -> None:
    found = attack_losses(np.linspace(0.0, 1.0, 100), np.linspace(1.5, 3.0, 80), "group", generator())
    assert found.success_rate == 1.0
    assert found.examples == 80
    assert found.correct == 80
    assert found.standard_error == 0.0


def test_equal_distributions_are_not() -> None:
    draw = generator()
    found = attack_losses(draw.exponential(size=20_000), draw.exponential(size=20_000), "group", draw)
    assert abs(found.success_rate - 0.5) < 4.0 * found.standard_error + 0.005


def test_known_overlap_has_the_bayes_rate() -> None:
    draw = generator()
    found = attack_losses(draw.normal(0.0, 1.0, 20_000), draw.normal(1.0, 1.0, 20_000), "group", draw)
    bayes = 0.6914624612740131  # Phi(1 / 2)
    assert abs(found.success_rate - bayes) < 4.0 * found.standard_error
    assert found.threshold == pytest.approx(0.5, abs=0.3)


def test_threshold_maximises_right_calls_even_with_ties() -> None:
    members, others = np.array([1.0, 1.0, 2.0, 5.0]), np.array([1.0, 3.0, 4.0, 5.0])
    threshold = best_threshold(members, others)
    candidates = [-math.inf, *np.unique(np.concatenate([members, others]))]
    right = [int((members <= value).sum() + (others > value).sum()) for value in candidates]
    assert int((members <= threshold).sum() + (others > threshold).sum()) == max(right)
    assert best_threshold(others + 10.0, members) == -math.inf


def test_one_example_of_a_side_is_not_enough() -> None:
    with pytest.raises(InvalidInput, match="has 1 members and 5 others"):
        attack_losses(np.ones(1), np.ones(5), "group", generator())


def test_groups_are_attacked_apart() -> None:
    """Members of group a have the logit of their class, non-members the opposite; group b has no difference."""
    group = np.arange(400) % 2
    labels = (np.arange(400) // 2) % 2
    right = np.where(labels == 1, 5.0, -5.0)
    train_rows = np.where(group == 0, right, 0.0).astype(np.float32)[:, None]
    test_rows = np.where(group == 0, -right, 0.0).astype(np.float32)[:, None]
    source = Source(
        "leak",
        make_split(train_rows, labels, group),
        make_split(test_rows, labels, group, first_id=400),
        ("a", "b", "absent"),
        ("no", "yes"),
    )
    dataset = cut(source, DataSpec("leak"))
    found = attack(nn.Identity(), dataset, build_loss(Component("binary_logistic")), seed=0)
    assert [result.name for result in found] == ["a", "b"]
    assert [result.success_rate for result in found] == [1.0, 0.5]
    assert found == attack(nn.Identity(), dataset, build_loss(Component("binary_logistic")), seed=0)


class TestAuditedEpsilon:
    def test_pure_case_inverts_the_binomial_tail(self) -> None:
        epsilon = audited_epsilon(80, 100, delta=0.0)
        assert binom.sf(79, 100, 1.0 / (1.0 + math.exp(-epsilon))) == pytest.approx(0.05, rel=1e-3)

    def test_guessing_shows_nothing(self) -> None:
        assert audited_epsilon(50, 100, delta=1e-5) == 0.0
        assert audited_epsilon(0, 100, delta=1e-5) == 0.0

    def test_delta_and_significance_only_lower_it(self) -> None:
        pure = audited_epsilon(900, 1000, 0.0)
        assert audited_epsilon(900, 1000, 1e-4) < pure
        assert audited_epsilon(900, 1000, 0.0, significance=0.01) < pure

    def test_randomised_response_is_hardly_ever_overestimated(self) -> None:
        """The guesses of randomised response are right with probability e^eps / (1 + e^eps), independently."""
        epsilon, draw = 1.0, generator()
        right = draw.binomial(500, 1.0 / (1.0 + math.exp(-epsilon)), size=400)
        too_high = sum(audited_epsilon(int(count), 500, delta=1e-6) > epsilon for count in right)
        assert too_high <= binom.ppf(0.9999, 400, 0.05)

    @pytest.mark.parametrize(("correct", "delta"), [(101, 0.0), (-1, 0.0), (50, 1.0), (50, float("nan"))])
    def test_impossible_values_are_refused(self, correct: int, delta: float) -> None:
        with pytest.raises(InvalidInput):
            audited_epsilon(correct, 100, delta)
