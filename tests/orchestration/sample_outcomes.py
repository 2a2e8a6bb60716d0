"""Made-up predictions of test examples, and trials that were evaluated on them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from dpsweep.orchestration.store.published import (
    Label,
    PublishedGroup,
    PublishedPrivacy,
    PublishedQuality,
    PublishedTrial,
    TrialState,
)
from dpsweep.workers.evaluation.outcomes import Outcomes
from dpsweep.workers.evaluation.rates import ConfusionCounts, calibration_error, confusion_counts, mean_by_group
from dpsweep.workers.evaluation.scores import fairness

NAMES = ("many", "few")
SIZES = (3000, 1000)
_DRAW = np.random.default_rng(3)
GROUPS = np.repeat([0, 1], SIZES)
LABELS = (_DRAW.random(len(GROUPS)) < 0.4).astype(np.int64)
LUCK = _DRAW.random(len(GROUPS))
"""How hard a test example is: a model predicts the easiest ones right."""


def outcomes(right: Sequence[float], seed: int = 0) -> Outcomes:
    """A model that is right for a share of each group: mostly of the same examples, whatever the model and seed."""
    score, correct = LUCK + 0.3 * np.random.default_rng(seed).random(len(GROUPS)), np.zeros(len(GROUPS), dtype=bool)
    for group, share in enumerate(right):
        mine = group == GROUPS
        correct[mine] = score[mine] <= np.quantile(score[mine], share)
    return of_predictions(np.where(correct, LABELS, 1 - LABELS))


def of_predictions(predicted: npt.NDArray[np.int64]) -> Outcomes:
    confidence = np.full(len(GROUPS), 0.8)
    losses = -np.log(np.where(predicted == LABELS, confidence, 1.0 - confidence))
    return Outcomes(np.arange(len(GROUPS)), LABELS, GROUPS, predicted, losses, confidence, NAMES, 2)


def trial(found: Outcomes, clipping: str, seed: int = 0, epsilon: float = 3.0, **labels: Label) -> PublishedTrial:
    """The trial of a model with these outcomes; clipping ``none`` is a baseline."""
    counts = confusion_counts(found.labels, found.predicted, found.groups, (len(NAMES), 2))
    correct, one = found.predicted == found.labels, np.zeros_like(found.groups)
    accuracies = np.trace(counts, axis1=1, axis2=2) / counts.sum((1, 2))
    total = float((found.predicted == found.labels).mean())
    private = clipping != "none"
    return PublishedTrial(
        key="-".join(map(str, (clipping, *labels.values(), seed))),
        labels={"clipping": clipping, "schedule": "constant" if private else "none", "seed": seed, **labels},
        state=TrialState.FINISHED,
        privacy=PublishedPrivacy(epsilon if private else math.inf, 1e-5, "pld"),
        quality=PublishedQuality(
            total,
            1.0 - total,
            groups=tuple(
                PublishedGroup(name, size, float(share), counts=_counts(of_group, loss, error))
                for name, size, share, of_group, loss, error in zip(
                    NAMES,
                    SIZES,
                    accuracies,
                    counts,
                    mean_by_group(found.log_losses, found.groups, len(NAMES)),
                    calibration_error(found.confidences, correct, found.groups, len(NAMES)),
                    strict=True,
                )
            ),
            fairness=fairness(counts),
            counts=_counts(
                counts.sum(0), found.log_losses.mean(), calibration_error(found.confidences, correct, one, 1)[0]
            ),
        ),
        tags={"baseline": f"none-{seed}" if private else ""},
    )


def _counts(counts: npt.NDArray[np.int64], log_loss: float, error: float) -> ConfusionCounts:
    return ConfusionCounts(tuple(map(tuple, counts.tolist())), float(log_loss), float(error))


def sweep_of(shares: Mapping[str, Sequence[float]], seeds: int = 5) -> tuple[list[PublishedTrial], dict[str, Outcomes]]:
    """Trials of several clipping methods with these shares of right predictions by group, and their outcomes."""
    trials, found = [], {}
    for place, (clipping, right) in enumerate(shares.items()):
        for seed in range(seeds):
            shift = 0.004 * math.sin(7.0 * seed + 3.0 * place)
            own = outcomes([share + shift for share in right], 100 * place + seed)
            trials.append(trial(own, clipping, seed))
            found[trials[-1].key] = own
    return trials, found
