"""A one-run audit of a trial: guesses which canaries it trained on, and the lower bound on epsilon that they prove.

Canaries are random training examples; or made-up gradients, for which see
`dpsweep.workers.training.gradient_canaries`. Before training, and independently of everything else, a secret fair coin
for each canary decides whether it may join batches. The number of canaries and the privacy claim do not depend on the
coins: batches are drawn from all rows, and the canaries that are left out are then removed. Training thus runs on the
neighbouring data set of the claim: without these rows (add/remove), or with null rows in their place (zero-out).
Preprocessing, released bounds and recorded norms use all rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from torch import nn

from dpsweep.accounting.audits import (
    Guesses,
    StatedRun,
    audited_epsilon,
    best_audited_epsilon,
    f_dp_epsilon,
    gdp_epsilon,
    provable,
    ranks_epsilon,
)
from dpsweep.accounting.errors import InvalidInput, count_of
from dpsweep.workers.data import Dataset
from dpsweep.workers.evaluation.attack_results import AuditResult, AuditTest, GroupAudit
from dpsweep.workers.evaluation.predictions import predict
from dpsweep.workers.noise.gaussian_sources import derive_seed
from dpsweep.workers.sampling.samplers import AUDITABLE, RowDraws, RowNumbers
from dpsweep.workers.spec import AuditSpec, SamplingSpec
from dpsweep.workers.tasks.losses import Loss

CanaryScores = npt.NDArray[np.floating[Any]]
Coins = npt.NDArray[np.bool_]

GUESSED = (1.0, 0.5, 0.25, 0.125)
"""Shares of the canaries that are guessed, the most extreme scores first; the share with the best bound is reported."""


class Canaries:
    """The canaries of a trial and their coins. Private: `state` reveals which were left out."""

    def __init__(self, spec: AuditSpec, dataset_size: int, seed: int, draws: RowDraws) -> None:
        chosen = np.random.default_rng(derive_seed(seed, "canaries")).choice(dataset_size, spec.canaries, replace=False)
        self.rows: RowNumbers = np.sort(chosen).astype(np.int64)
        heads = draws.each(2 * spec.canaries, spec.canaries)  # each with probability 1/2
        self.included: Coins = np.isin(np.arange(spec.canaries), heads)

    @property
    def absent(self) -> RowNumbers:
        """Rows of the canaries that are left out of all batches."""
        left_out: RowNumbers = self.rows[~self.included]
        return left_out

    def state(self) -> dict[str, Any]:
        return {"included": self.included.tolist()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.included = np.array(state["included"], np.bool_)


def check_audit(spec: AuditSpec, sampling: SamplingSpec, dataset_size: int) -> None:
    """Raise InvalidInput for an audit that the sampling or the size of the data does not allow."""
    if sampling.method not in AUDITABLE:
        raise InvalidInput(
            f"sampling.method is {sampling.method!r}, but an audit leaves canaries out of batches, which only "
            f"{' and '.join(AUDITABLE)} are accounted for; choose one of them, or drop the audit"
        )
    if spec.canaries > dataset_size:
        raise InvalidInput(
            f"audit.canaries is {spec.canaries}, but the training set has {count_of(dataset_size, 'example')}; "
            f"choose at most {dataset_size}"
        )


def audit(
    start: nn.Module, model: nn.Module, dataset: Dataset, loss: Loss, canaries: Canaries, spec: AuditSpec, delta: float
) -> AuditResult:
    """Audit a trained model. Score of a canary: its loss under the initial model minus its loss under the trained one.

    The canaries with the highest scores are guessed to be in, and equally many with the lowest scores to be out.
    start: the model before training.
    """
    rows = dataset.train.select(canaries.rows)
    fell = predict(start, rows, dataset, loss).losses - predict(model, rows, dataset, loss).losses
    scores = np.where(np.isnan(fell), -np.inf, fell)
    return audit_scores(scores, canaries.included, rows.groups.numpy(), dataset.group_names, spec.confidence, delta)


def audit_scores(
    scores: CanaryScores,
    included: Coins,
    groups: npt.NDArray[np.integer[Any]],
    group_names: Sequence[str],
    confidence: float,
    delta: float,
) -> AuditResult:
    """Audit by the scores [m] of canaries, whether each was included [m], and its group [m].

    Guarantee: if the trial is (epsilon, delta)-DP, the probability that any bound of the result exceeds epsilon is at
    most 1 - confidence. Half of this error probability is for the bound from all canaries; the groups share the rest.
    """
    error = 1.0 - confidence
    members = [np.flatnonzero(groups == group) for group in range(len(group_names))]
    share = 1.0 - 0.5 * error / max(1, len(group_names))
    everyone = _audit_group("all", scores, included, delta, 1.0 - 0.5 * error)
    return AuditResult(
        delta,
        confidence,
        everyone,
        tuple(
            _audit_group(name, scores[rows], included[rows], delta, share)
            for name, rows in zip(group_names, members, strict=True)
            if len(group_names) > 1 and provable(len(rows), share)
        ),
        (AuditTest("steinke", len(scores), everyone.guesses, everyone.correct, everyone.epsilon),),
    )


_FROM_GUESSES: Final[Mapping[str, Callable[[Guesses, float, float], float]]] = {
    "f_dp": f_dp_epsilon,
    "gdp": gdp_epsilon,
    "steinke": audited_epsilon,
}
"""Tests of guesses, at a delta and a confidence."""
RANKS: Final = "ranks"
SHARES: Final[Mapping[str, float]] = {RANKS: 0.8, "gdp": 0.1, "f_dp": 0.05, "steinke": 0.05}
"""Tests of gradient canaries, with the share of the error that each may use (Bonferroni).

The first two assume independent scores. From the iterates, the evidence about each canary is independent of the others:
noise is isotropic and the directions are orthogonal. Of the last model, see `canary_evidence.OwnParameters`.
"""
_CHOOSES: Final = 0.1
"""Share of the canaries that choose a threshold, and do not count."""
_GUESSED: Final = 0.2
"""Share of the others that is guessed, except by the test ``gdp``, which guesses all."""


def audit_gradient_scores(
    scores: CanaryScores, included: Coins, spec: AuditSpec, run: StatedRun, seed: int
) -> AuditResult:
    """Audit by scores of gradient canaries, and whether each was included.

    Both are of the canaries and of references after them, which take no part. A canary is guessed to be in if its score
    is above a threshold, the middle between the mean scores of those in and out. That is chosen by a random tenth of
    the canaries, on which no bound rests. The test ``ranks`` takes everybody.

    Guarantee: under the assumptions of each test, the probability that any bound of the result exceeds epsilon is at
    most 1 - confidence. The bound of the result is the best of them.
    """
    known = np.nan_to_num(np.asarray(scores, np.float64))
    inside, outside = known[included], known[~included]
    known, included = known[: spec.canaries], included[: spec.canaries]
    order = np.random.default_rng(derive_seed(seed, "canaries that choose")).permutation(len(included))
    chooses, counts = np.split(order, [math.ceil(_CHOOSES * len(order))])
    margins = known - _middle(known, included, chooses)
    right = (margins >= 0.0) == included

    def tested(name: str, share: float) -> AuditTest:
        confidence = 1.0 - share * (1.0 - spec.confidence)
        if name == RANKS:
            bound = ranks_epsilon(inside, outside, run, confidence, derive_seed(seed, "simulated runs"))
            return AuditTest(name, len(included), 0, 0, bound)
        made = len(counts) if name == "gdp" else int(_GUESSED * len(counts))
        sure = counts[np.argsort(-np.abs(margins[counts]), kind="stable")[:made]]
        guesses = Guesses(len(counts), made, int(right[sure].sum()))
        return AuditTest(name, len(counts), made, guesses.correct, _FROM_GUESSES[name](guesses, run.delta, confidence))

    found = tuple(tested(name, share) for name, share in SHARES.items())
    best = max(found, key=lambda each: each.lower_bound)
    everyone = GroupAudit("all", len(included), best.guesses, best.correct, best.lower_bound)
    return AuditResult(run.delta, spec.confidence, everyone, (), found, spec.kind, spec.transcript, run.of_canary)


def _middle(scores: CanaryScores, included: Coins, chooses: npt.NDArray[np.int64]) -> float:
    """Return the middle between the mean scores of those in and out among ``chooses``; the median if all are alike."""
    joined, out = scores[chooses[included[chooses]]], scores[chooses[~included[chooses]]]
    return float(np.mean([joined.mean(), out.mean()]) if len(joined) and len(out) else np.median(scores))


def _audit_group(name: str, scores: CanaryScores, included: Coins, delta: float, confidence: float) -> GroupAudit:
    order = np.argsort(scores, kind="stable")
    ways = [_guesses(included[order], int(share * len(order)) // 2) for share in GUESSED]
    epsilon, guesses = best_audited_epsilon(ways, delta, confidence)
    return GroupAudit(name, guesses.canaries, guesses.made, guesses.correct, epsilon)


def _guesses(included: Coins, each_side: int) -> Guesses:
    """Guess the first ``each_side`` canaries to be out and the last to be in. included: [m], ascending by score."""
    out, joined = included[:each_side], included[len(included) - each_side :]
    return Guesses(len(included), 2 * each_side, int(np.sum(~out) + np.sum(joined)))
