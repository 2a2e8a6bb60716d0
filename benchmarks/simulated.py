"""Sweeps whose true accuracies are known: outcomes of test examples drawn from a model, as trials would store them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from dpsweep.orchestration.comparison.evidence import gather
from dpsweep.orchestration.comparison.findings import Findings, findings
from dpsweep.orchestration.store.published import (
    NON_PRIVATE,
    PublishedGroup,
    PublishedPrivacy,
    PublishedQuality,
    PublishedSweep,
    TrialState,
)
from dpsweep.orchestration.store.published import PublishedTrial as Trial
from dpsweep.workers.evaluation.outcomes import AnyOutcomes, Outcomes, ScoredOutcomes
from dpsweep.workers.evaluation.rates import ConfusionCounts, confusion_counts
from dpsweep.workers.evaluation.scores import fairness
from dpsweep.workers.tasks import task_called

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
_NODES, _NODE_WEIGHTS = np.polynomial.hermite_e.hermegauss(80)
"""Gauss-Hermite quadrature, for means over normal effects."""


@dataclass(frozen=True)
class Population:
    """The population that a simulated sweep draws from.

    A model is right about an example with a probability whose logit is the mean of its setting and group, plus normal
    effects. They belong to the example (common to all models), its user, the seed (common to all settings), the run,
    and the split of each setting. The mean of this probability is the true main score of every task: accuracy, R^2 or
    micro F1 (`_DRAWN`).

    `sizes`: [G], test examples of each group.
    `logits`: [S, G], by private setting and group.
    `runs`: seeds of each setting.
    `of_run`: [S] or one number, the standard deviation of the effect of the run.
    `modes`: chances of further effects of a run, such as that training collapses; none by default.
    `positives`: number of test examples of class 1 among the first; the others are of class 0. None: every second
    example.
    `splits`: number of test sets, each with its own seeds. `of_split`: standard deviation of the effect of a split on
    each setting.
    `rows`: examples of each user.
    `baseline`: logit of a non-private setting; None for no baseline.
    `task`: a name in `dpsweep.workers.tasks.TASKS`.
    """

    sizes: tuple[int, ...]
    logits: tuple[tuple[float, ...], ...]
    runs: int
    of_example: float = 1.0
    of_user: float = 0.0
    of_seed: float = 0.1
    of_run: float | tuple[float, ...] = 0.12
    modes: tuple[tuple[float, float], ...] = ((1.0, 0.0),)
    positives: int | None = None
    splits: int = 1
    of_split: float = 0.0
    rows: int = 1
    baseline: float | None = None
    task: str = "classification"

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

    def _spread_with_split(self, setting: int) -> float:
        return math.hypot(self.of_split, self.spread(setting))

    def right(self, setting: int, group: int) -> float:
        """True probability that a model of the setting is right about an example of the group."""
        return self._chance(self.logits[setting][group], self._spread_with_split(setting))

    def _chance(self, logit: float, spread: float) -> float:
        total = math.hypot(self.of_example, self.of_user, self.of_seed, spread)
        of_modes = [chance * (_NODE_WEIGHTS @ _sigmoid(logit + moved + total * _NODES)) for chance, moved in self.modes]
        return float(sum(of_modes) / _NODE_WEIGHTS.sum())

    def without_privacy(self) -> float:
        """True accuracy of the baseline, whose runs have half the spread of the first setting's; NaN without one."""
        spread = math.hypot(self.of_split, 0.5 * self.spread(0))
        return math.nan if self.baseline is None else self._chance(self.baseline, spread)

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
        yield compared(population, drawn(population, np.random.default_rng((seed, number))), resamples)


def compared(population: Population, outcomes: Mapping[str, AnyOutcomes], resamples: int = 300) -> Findings:
    """Compare the settings of one drawn sweep."""
    data = published(population, outcomes)
    return findings(data, gather(data.trials, outcomes, resamples=resamples))


def published(population: Population, outcomes: Mapping[str, AnyOutcomes]) -> PublishedSweep:
    """Return the sweep of these outcomes, as the report takes it."""
    trials = tuple(_trial(key, found, population) for key, found in outcomes.items())
    return PublishedSweep("simulated", trials, 1e-5, worst_group=task_called(population.task).main)


def drawn(population: Population, draw: np.random.Generator) -> dict[str, AnyOutcomes]:
    """Outcomes of every trial of one sweep, by key."""
    logits = np.array(population.logits)
    spreads = [population.spread(setting) for setting in range(len(logits))]
    names = [f"m{setting}" for setting in range(len(logits))]
    if population.baseline is not None:
        logits = np.vstack([logits, np.full(len(population.sizes), population.baseline)])
        spreads, names = [*spreads, 0.5 * population.spread(0)], [*names, "none"]
    size = sum(population.sizes)
    found: dict[str, AnyOutcomes] = {}
    for split in range(population.splits):
        users = np.arange(size) // population.rows
        difficulty = draw.normal(0.0, population.of_example, size) if population.of_example else np.zeros(size)
        difficulty += draw.normal(0.0, population.of_user, users[-1] + 1)[users] if population.of_user else 0.0
        common = draw.normal(0.0, population.of_seed, population.runs)
        tested = _TestSet(population, split, users if population.rows > 1 else None)
        for name, of_groups, spread in zip(names, logits, spreads, strict=True):
            effects = common + draw.normal(0.0, spread, population.runs)
            effects += draw.normal(0.0, population.of_split) if population.of_split else 0.0
            if len(population.modes) > 1:
                likely, moved = zip(*population.modes, strict=True)
                effects += draw.choice(moved, population.runs, p=likely)
            chances = _sigmoid(of_groups[population.groups] + difficulty + effects[:, None])
            for run in range(population.runs):
                found[f"{name}-{split}-{run}"] = _DRAWN[population.task](tested, chances[run], draw)
    return found


@dataclass(frozen=True)
class _TestSet:
    """One test set of a population. users: [n]; None if every example has a separate user."""

    population: Population
    split: int
    users: Ints | None

    @property
    def ids(self) -> Ints:
        return np.arange(sum(self.population.sizes)) + 10**6 * self.split

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"g{group}" for group in range(len(self.population.sizes)))

    def scored(self, kept: Array) -> ScoredOutcomes:
        return ScoredOutcomes(
            self.ids, self.population.groups, kept, self.names, self.population.task, "simulated", self.users
        )


def _classes(tested: _TestSet, chances: Array, draw: np.random.Generator) -> Outcomes:
    """Return one of two classes, right with its chance."""
    correct, labels = draw.random(chances.shape) < chances, tested.population.labels
    losses = np.where(correct, -math.log(0.8), -math.log(0.2))
    predicted, confidences = np.where(correct, labels, 1 - labels), np.full(len(labels), 0.8)
    return Outcomes(
        tested.ids, labels, tested.population.groups, predicted, losses, confidences, tested.names, 2, tested.users
    )


_LABELS: Final = 4


def _label_sets(tested: _TestSet, chances: Array, draw: np.random.Generator) -> ScoredOutcomes:
    """Four labels, two of them present, each right with the chance p: micro F1 is 2 p / (2 p + (1 - p) + (1 - p))."""
    has = (np.arange(len(chances))[:, None] + np.arange(_LABELS)) % 2 == 0
    right = draw.random(has.shape) < chances[:, None]
    columns = (right.all(1, keepdims=True), has & right, ~has & ~right, has & ~right)
    return tested.scored(np.concatenate((np.ones((len(has), 1)), *columns), axis=1))


def _numbers(tested: _TestSet, chances: Array, draw: np.random.Generator) -> ScoredOutcomes:
    """Return a target of variance 1, with an error of variance 1 - p: R^2 is p."""
    targets = np.random.default_rng(tested.ids[0]).normal(size=(len(chances), 1))
    errors = np.sqrt(1.0 - chances)[:, None] * draw.normal(size=(len(chances), 1))
    return tested.scored(
        np.concatenate((np.ones_like(targets), errors**2, np.abs(errors), targets, targets**2), axis=1)
    )


_DRAWN: Final[Mapping[str, Callable[[_TestSet, Array, np.random.Generator], AnyOutcomes]]] = {
    "classification": _classes,
    "multi_label": _label_sets,
    "regression": _numbers,
}
"""Functions that draw the outcomes of a test set from chances [n] of being right, by task."""


def _trial(key: str, found: AnyOutcomes, population: Population) -> Trial:
    """Return the published trial of these outcomes."""
    method, split, run = key.split("-")
    private = method != "none"
    return Trial(
        key=key,
        labels={
            "clipping": method if private else NON_PRIVATE,
            "schedule": "constant" if private else "none",
            "seed": int(run),
            **({"split_seed": int(split)} if population.splits > 1 else {}),
        },
        state=TrialState.FINISHED,
        privacy=PublishedPrivacy(3.0 if private else math.inf, 1e-5, "pld"),
        quality=_of_classes(found, population) if isinstance(found, Outcomes) else _of_scores(found, population),
        tags={"baseline": f"none-{split}-{run}" if private and population.baseline is not None else ""},
    )


def _of_classes(found: Outcomes, population: Population) -> PublishedQuality:
    counts = confusion_counts(found.labels, found.predicted, found.groups, (len(found.group_names), 2))
    shares = np.trace(counts, axis1=1, axis2=2) / counts.sum((1, 2))
    whole = counts.sum(0)
    accuracy = float(np.trace(whole) / whole.sum())
    return PublishedQuality(
        accuracy,
        1.0 - accuracy,
        groups=tuple(
            PublishedGroup(name, size, float(share), counts=_counted(of_group))
            for name, size, share, of_group in zip(found.group_names, population.sizes, shares, counts, strict=True)
        ),
        fairness=fairness(counts),
        counts=_counted(whole),
    )


def _of_scores(found: ScoredOutcomes, population: Population) -> PublishedQuality:
    def scores(kept: Array) -> dict[str, float]:
        return {score.name: float(score.of(kept.sum(0))) for score in task_called(population.task).scores}

    groups = tuple(
        PublishedGroup(name, size, None, scores=scores(found.kept[found.groups == place]))
        for place, (name, size) in enumerate(zip(found.group_names, population.sizes, strict=True))
    )
    return PublishedQuality(None, 0.5, groups=groups, task=population.task, scores=scores(found.kept))


def _counted(counts: npt.NDArray[np.int64]) -> ConfusionCounts:
    accuracy = float(np.trace(counts) / counts.sum())
    return ConfusionCounts(tuple(map(tuple, counts.tolist())), 1.6 - 1.4 * accuracy, abs(accuracy - 0.8))


def _sigmoid(values: npt.ArrayLike) -> Array:
    return np.asarray(1.0 / (1.0 + np.exp(-np.asarray(values))))
