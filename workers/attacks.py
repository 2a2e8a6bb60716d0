"""Membership inference by a loss threshold, per group (Yu et al. 2023, App. D), and what its success proves."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import brentq
from scipy.stats import binom
from torch import nn

from accounting.errors import InvalidInput, require_finite
from workers.data.base import Dataset
from workers.evaluation import predict
from workers.losses import Loss

Losses = npt.NDArray[np.float64]
MAX_EPSILON = 100.0


@dataclass(frozen=True)
class GroupAttack:
    """Attack on one group, measured on ``examples`` examples, half of them members; 0.5 is what guessing gives.

    threshold: who has at most this loss is called a member; found on examples other than the measured ones.
    """

    name: str
    examples: int
    threshold: float
    success_rate: float

    @property
    def standard_error(self) -> float:
        return math.sqrt(self.success_rate * (1.0 - self.success_rate) / self.examples)

    @property
    def correct(self) -> int:
        return round(self.success_rate * self.examples)


def attack(model: nn.Module, dataset: Dataset, loss: Loss, seed: int) -> tuple[GroupAttack, ...]:
    """Attack every group: members are training examples, non-members test examples.

    Takes as many of either as the smaller side has, at random by ``seed``; half of each finds the threshold, the
    other half measures. Groups with fewer than two members or non-members are left out. The result is derived
    from training examples: treat it as private.
    """
    member_losses = predict(model, dataset.train, dataset, loss).losses
    other_losses = predict(model, dataset.test, dataset, loss).losses
    member_groups, other_groups = dataset.train.groups.numpy(), dataset.test.groups.numpy()
    results = []
    for group, name in enumerate(dataset.group_names):
        members, others = member_losses[member_groups == group], other_losses[other_groups == group]
        if min(len(members), len(others)) >= 2:
            results.append(attack_losses(members, others, name, np.random.default_rng((seed, group))))
    return tuple(results)


def attack_losses(members: Losses, others: Losses, name: str, generator: np.random.Generator) -> GroupAttack:
    """`attack` on one group, given the losses of its members [m] and non-members [k], both of at least two."""
    half = min(len(members), len(others)) // 2
    if half < 1:
        raise InvalidInput(f"group {name!r} has {len(members)} members and {len(others)} others, but needs 2 of each")
    chosen_members = generator.permutation(members)[: 2 * half]
    chosen_others = generator.permutation(others)[: 2 * half]
    threshold = best_threshold(chosen_members[:half], chosen_others[:half])
    correct = np.sum(chosen_members[half:] <= threshold) + np.sum(~(chosen_others[half:] <= threshold))
    return GroupAttack(name, 2 * half, threshold, float(correct) / (2 * half))


def best_threshold(members: Losses, others: Losses) -> float:
    """Where "member if loss <= threshold" is right most often, halfway to the next loss; -inf calls nobody one."""
    losses = np.concatenate([members, others])
    order = np.argsort(losses, kind="stable")
    gain = np.cumsum(np.where(order < len(members), 1, -1))
    ordered = losses[order]
    last_of_ties = np.flatnonzero(np.append(ordered[1:] != ordered[:-1], True))
    best = last_of_ties[np.argmax(gain[last_of_ties])]
    if gain[best] <= 0:
        return -math.inf
    return float(ordered[best : best + 2].mean())


def audited_epsilon(correct: int, guesses: int, delta: float, significance: float = 0.05) -> float:
    """Lower bound on epsilon from ``correct`` of ``guesses`` right guesses of membership (Steinke et al. 2023).

    Guarantee: if every guessed example was put into the training set by its own fair coin, a mechanism that is
    (epsilon, delta)-DP under adding or removing one example makes this many right guesses with probability at most
    ``significance`` for any epsilon below the result (Thm. 5.2, with as many guesses as examples). Where the
    data came split by other means, the result is an indication and no bound.
    """
    require_finite("guesses", guesses, at_least=1)
    require_finite("correct", correct, at_least=0, at_most=guesses)
    require_finite("delta", delta, at_least=0.0, below=1.0)
    require_finite("significance", significance, above=0.0, below=1.0)

    def excess(epsilon: float) -> float:
        return _audit_p_value(correct, guesses, epsilon, delta) - significance

    if excess(0.0) >= 0.0:
        return 0.0
    if excess(MAX_EPSILON) <= 0.0:
        return MAX_EPSILON
    return max(0.0, float(brentq(excess, 0.0, MAX_EPSILON, xtol=1e-6)) - 1e-6)


def _audit_p_value(correct: int, guesses: int, epsilon: float, delta: float) -> float:
    """Largest probability of ``correct`` or more right guesses under (epsilon, delta)-DP."""
    right = 1.0 / (1.0 + math.exp(-epsilon))
    pure = float(binom.sf(correct - 1, guesses, right))
    if delta == 0.0 or correct == 0:
        return pure
    misses = np.arange(1, correct + 1)
    mass = np.cumsum(binom.pmf(correct - misses, guesses, right))
    return min(1.0, pure + 2.0 * guesses * delta * float(np.max(mass / misses)))
