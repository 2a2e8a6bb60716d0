"""Other methods' 95% intervals, which `benchmarks.coverage` measures on the same simulated sweeps as ours.

A method that sees one model knows nothing of other seeds; the mean over seeds is the truth for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from scipy import special

from benchmarks.simulated import Population
from dpsweep.orchestration.comparison.findings import Findings
from dpsweep.orchestration.comparison.intervals import TAIL, ConfidenceInterval
from dpsweep.orchestration.comparison.settings import Setting
from dpsweep.workers.evaluation.outcomes import AnyOutcomes, Outcomes

Array = npt.NDArray[np.float64]
Ends = tuple[float, float] | None
_DRAWS: Final = 200
_QUANTILES: Final = [TAIL, 1.0 - TAIL]


@dataclass(frozen=True)
class Sweep:
    """A drawn sweep of classes with one test set, and our findings. `settings`: private ones, in the population's
    order.

    `correct`: [R, n] of each setting, whether each run is right about each example.
    """

    population: Population
    found: Findings
    settings: Sequence[Setting]
    first: Sequence[Outcomes]
    correct: Sequence[Array]

    @classmethod
    def of(
        cls, population: Population, found: Findings, settings: Sequence[Setting], outcomes: Mapping[str, AnyOutcomes]
    ) -> Sweep:
        """Return the sweep of these outcomes, which are all of classes."""
        runs = [[_of_classes(outcomes[trial.key]) for trial in setting.trials] for setting in settings]
        correct = [np.array([each.predicted == each.labels for each in of_one], dtype=np.float64) for of_one in runs]
        return cls(population, found, settings, [of_one[0] for of_one in runs], correct)


def _of_classes(found: AnyOutcomes) -> Outcomes:
    if not isinstance(found, Outcomes):
        raise TypeError("other intervals are measured for classification")
    return found


@dataclass(frozen=True)
class Method:
    """How a method bounds the accuracy of a setting, its gap between groups, and a difference; None if it does not."""

    mean: Callable[[Sweep, int], Ends]
    gap: Callable[[Sweep, int], Ends]
    difference: Callable[[Sweep, int, int], Ends]


def _none(_: Sweep, *__: int) -> Ends:
    return None


def _metric_frame(sweep: Sweep, setting: int, of: str) -> Ends:
    """Return the bootstrap of fairlearn's `MetricFrame` for the model of the first seed."""
    from fairlearn.metrics import MetricFrame
    from sklearn.metrics import accuracy_score

    found = sweep.first[setting]
    frame = MetricFrame(
        metrics=accuracy_score,
        y_true=found.labels,
        y_pred=found.predicted,
        sensitive_features=found.groups,
        n_boot=_DRAWS // 2,
        ci_quantiles=_QUANTILES,
        random_state=0,
    )
    low, high = frame.overall_ci if of == "mean" else frame.difference_ci()
    return float(low), float(high)


def _bootstrap(values: Array) -> Ends:
    """Percentiles of the mean of ``values`` [n] over resampled test examples."""
    rows = np.random.default_rng(0).integers(0, len(values), (_DRAWS, len(values)))
    low, high = np.quantile(values[rows].mean(1), _QUANTILES)
    return float(low), float(high)


def _bootstrap_gap(sweep: Sweep, setting: int) -> Ends:
    values, groups = sweep.correct[setting].mean(0), sweep.population.groups
    draw = np.random.default_rng(0)
    gaps = []
    for _ in range(_DRAWS):
        rows = draw.integers(0, len(values), len(values))
        means = np.bincount(groups[rows], values[rows]) / np.bincount(groups[rows])
        gaps.append(means.max() - means.min())
    low, high = np.quantile(gaps, _QUANTILES)
    return float(low), float(high)


def mixed_model(values: Array) -> Ends:
    """Return the bounds on the mean of values [R, n] with crossed random effects of runs and examples; None for one
    run.

    On balanced data the estimates of variance by mean squares equal REML's unless one is negative (Searle, Casella and
    McCulloch 1992, Section 4.7); degrees of freedom by Satterthwaite 1946.
    """
    runs, examples = values.shape
    if runs < 2:
        return None
    of_run, of_example, mean = values.mean(1), values.mean(0), values.mean()
    by_run = examples * float(of_run.var(ddof=1))
    by_example = runs * float(of_example.var(ddof=1))
    rest = values - of_run[:, None] - of_example + mean
    within = float((rest**2).sum()) / ((runs - 1) * (examples - 1))
    total = max(by_run + by_example - within, by_example, 1e-300)
    spent = by_run**2 / (runs - 1) + by_example**2 / (examples - 1) + within**2 / ((runs - 1) * (examples - 1))
    half = float(special.stdtrit(total**2 / max(spent, 1e-300), 1.0 - TAIL)) * math.sqrt(total / (runs * examples))
    return float(mean) - half, float(mean) + half


def _ends(found: ConfidenceInterval | None) -> Ends:
    return None if found is None else (found.low, found.high)


METHODS: Final[Mapping[str, Method]] = {
    "dpsweep": Method(
        lambda sweep, one: _ends(sweep.found.interval(sweep.settings[one], "accuracy")),
        lambda sweep, one: _ends(sweep.found.interval(sweep.settings[one], "accuracy_gap")),
        lambda sweep, one, other: _ends(
            sweep.found.evidence.difference(sweep.settings[one], sweep.settings[other], "accuracy")
        ),
    ),
    "fairlearn": Method(
        lambda sweep, one: _metric_frame(sweep, one, "mean"),
        lambda sweep, one: _metric_frame(sweep, one, "gap"),
        _none,
    ),
    "paired bootstrap": Method(
        lambda sweep, one: _bootstrap(sweep.correct[one].mean(0)),
        _bootstrap_gap,
        lambda sweep, one, other: _bootstrap((sweep.correct[one] - sweep.correct[other]).mean(0)),
    ),
    "mixed model": Method(
        lambda sweep, one: mixed_model(sweep.correct[one]),
        _none,
        lambda sweep, one, other: mixed_model(sweep.correct[one] - sweep.correct[other]),
    ),
}
