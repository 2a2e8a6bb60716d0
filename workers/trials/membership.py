"""Membership inference per group: by a loss threshold, and by a likelihood ratio with few reference models.

The second is RMIA (Zarifzadeh et al. 2024). The score of an example x is r(x) = Pr(x | attacked model) / Pr(x), where
Pr(x) is the mean of Pr(x | model) over reference models. Half of them were trained with x and half without.
Pr(x | model) is exp(-loss), the probability of the label under cross-entropy. RMIA itself scores x by the number of
population examples z for which r(x) / r(z) exceeds a factor. All x are compared with the same z, so this number orders
examples as r does, and r is used instead.

Reference models are trained as the trial was (clipping and noise included), each on a random half of training and test
data, in pairs with complementary halves. The results are computed from losses of training examples without noise, so
they are private data. They bound epsilon neither from above nor from below, for the reasons given at
`attack`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from scipy.special import logsumexp
from torch import nn

from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.workers.clipping import make_clipping
from dpsweep.workers.data import Dataset, Split
from dpsweep.workers.evaluation.attack_results import (
    GroupAttack,
    MembershipAttack,
    MembershipScores,
    auc_interval,
    write_membership,
)
from dpsweep.workers.evaluation.predictions import predict
from dpsweep.workers.machine.devices import choose_device
from dpsweep.workers.noise.gaussian_sources import derive_seed
from dpsweep.workers.noise.noise_sources import make_noise_source
from dpsweep.workers.own_code.imports import UserCode
from dpsweep.workers.spec import AttackSpec, NormSpec, SamplingSpec, TrialSpec
from dpsweep.workers.tasks.losses import Loss
from dpsweep.workers.training.batch_gradients import LocalGradients, recipe_of
from dpsweep.workers.training.norm_recorder import stored_norms
from dpsweep.workers.training.trainer import Trainer
from dpsweep.workers.training.trial_mechanism import mechanism_of

Floats = npt.NDArray[np.float64]
RowNumbers = npt.NDArray[np.int64]


def attack(model: nn.Module, dataset: Dataset, loss: Loss, seed: int) -> tuple[GroupAttack, ...]:
    """Attack every group by a loss threshold (paper A, App. D): members are training examples, others test examples.

    The success rate bounds epsilon neither from above nor from below. A low rate proves nothing, because a better
    attack may succeed. A high rate is no lower bound on epsilon: the test set may differ from the training set by more
    than membership. An audit that counts correct guesses must decide by an independent fair coin whether an example is
    in the training set (Steinke et al. 2023); `dpsweep.workers.training.one_run_audit` uses such coins.

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


def attack_losses(members: Floats, others: Floats, name: str, generator: np.random.Generator) -> GroupAttack:
    """Attack one group, given the losses of its members [m] and non-members [k], at least two of each.

    A NaN loss counts as infinite.
    """
    half = min(len(members), len(others)) // 2
    chosen_members, chosen_others = (
        np.where(np.isnan(losses), math.inf, losses)
        for losses in (generator.permutation(side)[: 2 * half] for side in (members, others))
    )
    threshold = best_threshold(chosen_members[:half], chosen_others[:half])
    correct = np.sum(chosen_members[half:] <= threshold) + np.sum(chosen_others[half:] > threshold)
    return GroupAttack(name, 2 * half, threshold, int(correct))


def best_threshold(members: Floats, others: Floats) -> float:
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


_LARGEST_LOSS = 700.0
"""Larger, infinite and NaN losses are replaced by this one: exp(-700) is still a positive double."""


def likelihood_ratio_attack(
    model: nn.Module, dataset: Dataset, loss: Loss, spec: TrialSpec, files: TrialFiles, code: UserCode
) -> tuple[MembershipAttack, ...]:
    """Attack every group with at least two members and two non-members; deterministic in ``spec.seed``.

    dataset: what the trial trained on, after its preprocessing. Scores of single examples are written below ``files``,
    for their owners.
    """
    assert spec.attacks.rmia is not None, "the trial asks for it"
    pool, members = joined(dataset.train, dataset.test), np.arange(len(dataset.train) + len(dataset.test))
    is_member = members < len(dataset.train)
    losses = predict(model, pool, dataset, loss).losses
    references = np.stack(
        [
            predict(reference, pool, dataset, loss).losses
            for reference in _reference_models(dataset, pool, spec, files, code)
        ]
    )
    scores = log_ratio(losses, references)
    lengths = _gradient_norms(model, replace(dataset, train=pool), spec, code)
    ids = np.concatenate([dataset.train.example_ids.numpy(), dataset.test.example_ids.numpy()])
    write_membership(files.membership, MembershipScores(ids, pool.groups.numpy(), is_member, scores, lengths))
    results = []
    for group, name in enumerate(dataset.group_names):
        of_group = pool.groups.numpy() == group
        rows = balanced(of_group & is_member, of_group & ~is_member, np.random.default_rng((spec.seed, group)))
        if len(rows) >= 4:
            results.append(attack_result(name, scores[rows], losses[rows], lengths[rows], is_member[rows]))
    return tuple(results)


def log_ratio(losses: Floats, references: Floats) -> Floats:
    """Return log r [n]. losses: [n], under the attacked model. references: [models, n], under reference models."""
    own, others = (np.minimum(np.nan_to_num(each, nan=math.inf), _LARGEST_LOSS) for each in (losses, references))
    return np.asarray(-own - logsumexp(-others, axis=0) + math.log(len(others)))


def _gradient_norms(model: nn.Module, pool: Dataset, spec: TrialSpec, code: UserCode) -> Floats:
    """Return the norm of the gradient of each training example of ``pool`` under the attacked model."""
    recipe = recipe_of(spec, make_clipping(spec.clipping, code), pool, code)
    local = LocalGradients(replace(spec, users=None), pool, recipe)
    local.model.load_state_dict(model.state_dict())
    norms = local.norms(torch.arange(len(pool.train), device=local.data.device)).norms
    return np.asarray(norms.double().cpu().numpy())


def attack_result(
    name: str, scores: Floats, losses: Floats, lengths: Floats, is_member: npt.NDArray[np.bool_]
) -> MembershipAttack:
    """Return the result for equally many members and others, by the score, loss and gradient norm of each [n]."""
    auc, *others = (
        area(each, is_member) for each in (scores, *(-np.nan_to_num(each, nan=math.inf) for each in (losses, lengths)))
    )
    return MembershipAttack(name, len(scores), auc, *auc_interval(auc, len(scores) // 2), *others)


def area(scores: Floats, is_member: npt.NDArray[np.bool_]) -> float:
    """Return the area under the ROC curve: the Mann-Whitney statistic divided by the number of pairs.

    >>> area(np.array([3.0, 2.0, 2.0, 1.0]), np.array([True, True, False, False]))
    0.875
    """
    from scipy.stats import rankdata  # late: importing it takes half a second

    count = int(is_member.sum())
    above = rankdata(scores)[is_member].sum() - count * (count + 1) / 2.0
    return float(above / (count * (len(scores) - count)))


def balanced(
    members: npt.NDArray[np.bool_], others: npt.NDArray[np.bool_], generator: np.random.Generator
) -> RowNumbers:
    """Return the rows of equally many members and non-members, drawn at random."""
    sides = [generator.permutation(np.flatnonzero(side)) for side in (members, others)]
    count = min(map(len, sides))
    return np.concatenate([side[:count] for side in sides])


def joined(first: Split, second: Split) -> Split:
    """Return the examples of both, with new ids."""
    columns = [torch.cat([getattr(first, name), getattr(second, name)]) for name in ("features", "labels", "groups")]
    features, labels, groups = columns
    return Split(features, labels, groups, torch.arange(len(first) + len(second)))


def halves(examples: int, models: int, seed: int) -> Iterator[RowNumbers]:
    """Yield the rows on which each reference model trains: for models 2 k and 2 k + 1 complementary halves."""
    generator = np.random.default_rng(derive_seed(seed, "reference models"))
    for _ in range(models // 2):
        order = generator.permutation(examples)
        yield np.sort(order[: examples // 2])
        yield np.sort(order[examples // 2 :])


def _fitting(sampling: SamplingSpec, size: int) -> SamplingSpec:
    """Return the sampling with batches of at most all of ``size`` examples, and epochs that fall into its blocks."""
    most = None if sampling.max_batch_size is None else min(sampling.max_batch_size, size)
    if sampling.batch_size == "full":
        return replace(sampling, max_batch_size=most)
    blocks = sampling.per_epoch or 1
    largest = min(sampling.batch_size, max(size // (blocks * (sampling.cycle_length or 1)), 1))
    fitting = (each for each in range(largest, 0, -1) if -(-size // each) % blocks == 0)
    return replace(sampling, batch_size=next(fitting, largest), max_batch_size=most)


def _reference_models(
    dataset: Dataset, pool: Split, spec: TrialSpec, files: TrialFiles, code: UserCode
) -> Iterator[nn.Module]:
    """Models trained as the trial was, each on other rows and with another seed, which is not secret."""
    assert spec.attacks.rmia is not None, "the trial asks for it"
    for number, rows in enumerate(halves(len(pool), spec.attacks.rmia.reference_models, spec.seed)):
        reference = replace(
            spec,
            seed=derive_seed(spec.seed, f"reference model {number}"),
            sampling=_fitting(spec.sampling, len(rows)),
            norms=spec.norms if spec.norms.are_off else NormSpec(refreshes_per_epoch=1e-9),
            attacks=AttackSpec(),
            audit=None,
            noise_source="seeded",
        )
        method = make_clipping(reference.clipping, code)
        mechanism = mechanism_of(reference, method, len(rows))
        noise = make_noise_source("seeded", reference.seed, choose_device(spec.execution.device))
        half = replace(dataset, train=pool.select(rows))
        recipe = recipe_of(reference, method, half, code)
        trainer = Trainer(reference, mechanism, half, noise, stored_norms(files, reference.norms), recipe)
        yield _train(trainer)


def _train(trainer: Trainer) -> nn.Module:
    """Return the model after all steps. Norms are taken at step 0 only and never stored."""
    trainer.begin()
    while trainer.may_continue():
        trainer.step()
        if trainer.at_epoch_end:
            trainer.end_epoch()
    return trainer.released_model()
