"""Sweeps whose true accuracies are known: outcomes of test examples drawn from a model, as trials would store them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from orchestration.comparison.evidence import gather
from orchestration.comparison.findings import Findings, findings
from orchestration.records.published import PublishedGroup, PublishedPrivacy, PublishedQuality, PublishedSweep
from orchestration.records.published import PublishedTrial as Trial
from orchestration.records.states import TrialState
from workers.evaluation import fairness
from workers.outcomes import Outcomes
from workers.rates import ConfusionCounts, confusion_counts

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Population:
    """What a simulated sweep draws from.

    A model is right about an example with a probability whose logit is the mean of its setting and group, plus normal
    effects of the example (common to all models), of its user, of the seed (common to all settings), and of the run.

    sizes: [G], test examples of each group. logits: [S, G], by private setting and group. runs: seeds of each setting.
    of_run: [S] or one number, the standard deviation of the effect of the run. positives: number of test examples of
    class 1 among the first; the others are of class 0. None: every second example. splits: number of test sets, each
    with its own seeds. rows: examples of each user. baseline: logit of a non-private setting; None for no baseline.
    """

    sizes: tuple[int, ...]
    logits: tuple[tuple[float, ...], ...]
    runs: int
    of_example: float = 1.0
    of_user: float = 0.0
    of_seed: float = 0.1
    of_run: float | tuple[float, ...] = 0.12
    positives: int | None = None
    splits: int = 1
    rows: int = 1
    baseline: float | None = None

    @property
    def groups(self) -> npt.NDArray[np.int64]:
        """[n]: group of each test example."""
        return np.repeat(np.arange(len(self.sizes)), self.sizes)

    @property
    def labels(self) -> npt.NDArray[np.int64]:
        """[n]: class of each test example."""
        places = np.arange(sum(self.sizes))
        return (places % 2 if self.positives is None else places < self.positives).astype(np.int64)

    def spread(self, setting: int) -> float:
        """Standard deviation of the effects of all runs of a private setting."""
        return self.of_run if isinstance(self.of_run, float) else self.of_run[setting]

    def right(self, setting: int, group: int) -> float:
        """True probability that a model of the setting is right about an example of the group."""
        total = math.hypot(self.of_example, self.of_user, self.of_seed, self.spread(setting))
        nodes, weights = np.polynomial.hermite_e.hermegauss(80)
        values = _sigmoid(self.logits[setting][group] + total * nodes)
        return float(weights @ values / weights.sum())

    def accuracy(self, setting: int) -> float:
        """True accuracy of a private setting."""
        return float(np.average([self.right(setting, group) for group in range(len(self.sizes))], weights=self.sizes))

    def worst(self, setting: int) -> float:
        """True accuracy of the worst-served group of a private setting."""
        return min(self.right(setting, group) for group in range(len(self.sizes)))

    def gap(self, setting: int) -> float:
        """True gap between the accuracies of groups of a private setting."""
        return max(self.right(setting, group) for group in range(len(self.sizes))) - self.worst(setting)


def simulated(population: Population, sweeps: int, seed: int = 0, resamples: int = 300) -> Iterator[Findings]:
    """Draw sweeps and compare their settings, which are called ``m0``, ``m1``, ... in the order of the population."""
    for number in range(sweeps):
        outcomes = drawn(population, np.random.default_rng((seed, number)))
        trials = [_trial(key, found, population) for key, found in outcomes.items()]
        yield findings(PublishedSweep("simulated", tuple(trials), 1e-5), gather(trials, outcomes, resamples=resamples))


def drawn(population: Population, draw: np.random.Generator) -> dict[str, Outcomes]:
    """Outcomes of every trial of one sweep, by key."""
    logits = np.array(population.logits)
    spreads = [population.spread(setting) for setting in range(len(logits))]
    names = [f"m{setting}" for setting in range(len(logits))]
    if population.baseline is not None:
        logits = np.vstack([logits, np.full(len(population.sizes), population.baseline)])
        spreads, names = [*spreads, 0.5 * spreads[0]], [*names, "none"]
    size, found = sum(population.sizes), {}
    for split in range(population.splits):
        users = np.arange(size) // population.rows
        difficulty = draw.normal(0.0, population.of_example, size) if population.of_example else np.zeros(size)
        difficulty += draw.normal(0.0, population.of_user, users[-1] + 1)[users] if population.of_user else 0.0
        common = draw.normal(0.0, population.of_seed, population.runs)
        for name, of_groups, spread in zip(names, logits, spreads, strict=True):
            effects = common + draw.normal(0.0, spread, population.runs)
            chances = _sigmoid(of_groups[population.groups] + difficulty + effects[:, None])
            correct = draw.random(chances.shape) < chances
            for run in range(population.runs):
                key = f"{name}-{split}-{run}"
                found[key] = _outcomes(population, correct[run], split, users)
    return found


def _outcomes(
    population: Population, correct: npt.NDArray[np.bool_], split: int, users: npt.NDArray[np.int64]
) -> Outcomes:
    labels, groups = population.labels, population.groups
    predicted, confidences = np.where(correct, labels, 1 - labels), np.full(len(labels), 0.8)
    losses = np.where(correct, -math.log(0.8), -math.log(0.2))
    names = tuple(f"g{group}" for group in range(len(population.sizes)))
    ids = np.arange(len(labels)) + 10**6 * split
    return Outcomes(
        ids, labels, groups, predicted, losses, confidences, names, 2, users if population.rows > 1 else None
    )


def _trial(key: str, found: Outcomes, population: Population) -> Trial:
    """The published trial of these outcomes."""
    method, split, run = key.split("-")
    private, counts = (
        method != "none",
        confusion_counts(found.labels, found.predicted, found.groups, (len(found.group_names), 2)),
    )
    shares = np.trace(counts, axis1=1, axis2=2) / counts.sum((1, 2))
    whole = counts.sum(0)
    accuracy = float(np.trace(whole) / whole.sum())
    return Trial(
        key=key,
        labels={
            "clipping": method,
            "schedule": "constant" if private else "none",
            "seed": int(run),
            **({"split_seed": int(split)} if population.splits > 1 else {}),
        },
        state=TrialState.FINISHED,
        privacy=PublishedPrivacy(3.0 if private else math.inf, 1e-5, "pld"),
        quality=PublishedQuality(
            accuracy,
            1.0 - accuracy,
            groups=tuple(
                PublishedGroup(name, size, float(share), counts=_counted(of_group))
                for name, size, share, of_group in zip(found.group_names, population.sizes, shares, counts, strict=True)
            ),
            fairness=fairness(counts),
            counts=_counted(whole),
        ),
        tags={"baseline": f"none-{split}-{run}" if private and population.baseline is not None else ""},
    )


def _counted(counts: npt.NDArray[np.int64]) -> ConfusionCounts:
    accuracy = float(np.trace(counts) / counts.sum())
    return ConfusionCounts(tuple(map(tuple, counts.tolist())), 1.6 - 1.4 * accuracy, abs(accuracy - 0.8))


def _sigmoid(values: npt.ArrayLike) -> Array:
    return np.asarray(1.0 / (1.0 + np.exp(-np.asarray(values))))


def named(found: Findings) -> Mapping[str, object]:
    """The settings of a simulated sweep by the name of their method."""
    return {setting.clipping: setting for setting in found.settings}
