"""Membership inference by a loss threshold, per group (Yu et al. 2023, App. D), and scores on training examples.

The success rate bounds epsilon neither from above nor from below. A low rate proves nothing, because a better attack
may succeed. A high rate is no lower bound on epsilon: an audit that counts correct guesses (Steinke et al. 2023) must
decide by an independent fair coin whether an example is in the training set, whereas here the test set may differ from
the training set by more than membership. `dpsweep.workers.training.one_run_audit` uses such coins.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from torch import nn

from dpsweep.accounting.errors import InvalidInput, PrivateDetail
from dpsweep.workers.data import Dataset
from dpsweep.workers.evaluation.attack_results import GroupAttack
from dpsweep.workers.evaluation.predictions import predict
from dpsweep.workers.tasks.losses import Loss

Losses = npt.NDArray[np.float64]


def attack(model: nn.Module, dataset: Dataset, loss: Loss, seed: int) -> tuple[GroupAttack, ...]:
    """Attack every group: members are training examples, non-members test examples.

    Per group, equally many members and non-members are drawn at random by ``seed``; half of each choose the threshold,
    the other half measure the attack. Groups with fewer than two members or non-members are left out. The result is
    computed from training losses without noise: private data.
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
    """Attack one group, given the losses of its members [m] and non-members [k]. A NaN loss counts as infinite.

    Raises: InvalidInput when there are fewer than two members or non-members.
    """
    half = min(len(members), len(others)) // 2
    if half < 1:
        detail = PrivateDetail(f"{len(members)} members and {len(others)} others")
        raise InvalidInput(f"group {name!r} needs at least 2 members and 2 others; leave it out") from detail
    chosen_members, chosen_others = (
        np.where(np.isnan(losses), math.inf, losses)
        for losses in (generator.permutation(side)[: 2 * half] for side in (members, others))
    )
    threshold = best_threshold(chosen_members[:half], chosen_others[:half])
    correct = np.sum(chosen_members[half:] <= threshold) + np.sum(chosen_others[half:] > threshold)
    return GroupAttack(name, 2 * half, threshold, int(correct))


def best_threshold(members: Losses, others: Losses) -> float:
    """Return the threshold for which "member if loss <= threshold" is most often correct; no loss may be NaN.

    It lies halfway to the next larger loss if that is finite; -inf predicts no members at all.

    >>> best_threshold(np.array([0.25, 0.5, 2.0]), np.array([1.0, 3.0]))
    0.75
    """
    losses = np.concatenate([members, others])
    order = np.argsort(losses, kind="stable")
    gain = np.cumsum(np.where(order < len(members), 1, -1))
    ordered = losses[order]
    last_of_ties = np.flatnonzero(np.append(ordered[1:] != ordered[:-1], True))
    best = last_of_ties[np.argmax(gain[last_of_ties])]
    if gain[best] <= 0:
        return -math.inf
    halfway = float(ordered[best : best + 2].mean())
    return halfway if math.isfinite(halfway) else float(ordered[best])
