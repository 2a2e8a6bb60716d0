"""Statistics of the training examples' epsilons: exact (for the owner of the data) or released with DP."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from accounting.estimates import Kind, PrivacyEstimate, weakest
from accounting.records import Epsilons
from accounting.release import ReleasedStatistics
from orchestration.comparison.statistics import pearson
from orchestration.records.published import GroupEpsilon, Histogram, IndividualStatistics
from orchestration.records.release_modes import EXACT, RELEASED

_QUANTILES = (0.1, 0.3, 0.5, 0.7, 0.9)
_BINS = 30
_LEAST_CORRELATED = 10
"""Minimum number of examples for a correlation; with 10, the 95% interval of r around 0 is about ±0.63."""


def kind_of_capped(epsilons: Epsilons, worst_case: PrivacyEstimate) -> Kind:
    """Kind of statistics over epsilons capped at the worst case: the weaker of the two."""
    kind = worst_case.kind
    return weakest(epsilons.kind, "estimate" if kind == "lower_bound" or kind == "none" else kind)


def exact_statistics(
    epsilons: Epsilons, group_names: tuple[str, ...], worst_case: PrivacyEstimate
) -> IndividualStatistics:
    """Exact statistics of the epsilon_i of all training examples: private data.

    Each epsilon_i is capped at the worst case, which bounds every example as well.
    """
    values = np.minimum(epsilons.upper, worst_case.epsilon)
    counts, edges = np.histogram(values, bins=_BINS, range=(0.0, worst_case.epsilon))
    return IndividualStatistics(
        disclosure=EXACT,
        kind=kind_of_capped(epsilons, worst_case),
        method=epsilons.method,
        mean=float(values.mean()),
        median=float(np.median(values)),
        quantiles={q: float(np.quantile(values, q)) for q in _QUANTILES},
        groups=tuple(
            _group_epsilon(name, values[members], epsilons.losses[members])
            for group, name in enumerate(group_names)
            if np.any(members := epsilons.groups == group)
        ),
        histogram=Histogram(tuple(edges.tolist()), tuple(counts.astype(float).tolist())),
        loss_correlation=loss_correlation(values, epsilons.losses),
    )


def loss_correlation(values: NDArray[np.float64], losses: NDArray[np.float32]) -> float | None:
    """Pearson's r of epsilon_i and the natural log of the loss of example i (paper A, Figure 5): private data.

    values, losses: both [examples]. Examples whose loss is zero or not finite are left out. None with fewer than 10
    examples left, or if either side is constant.
    """
    usable = (losses > 0.0) & np.isfinite(losses)
    if int(usable.sum()) < _LEAST_CORRELATED:
        return None
    return pearson(values[usable], np.log(losses[usable].astype(np.float64)))


def released_statistics(
    released: ReleasedStatistics, group_names: tuple[str, ...], kind: Kind, method: str, cost: float
) -> IndividualStatistics:
    """Statistics released with differential privacy.

    kind, method: of the single epsilon_i. cost: epsilon of the release alone.
    """
    return IndividualStatistics(
        disclosure=RELEASED,
        kind=kind,
        method=method,
        mean=released.mean_epsilon,
        median=released.quantiles.get(0.5),
        quantiles=released.quantiles,
        groups=tuple(
            GroupEpsilon(group_names[group.group], group.mean_epsilon, group.mean_standard_error, group.examples)
            for group in released.groups
        ),
        histogram=Histogram(released.edges, released.histogram),
        release_epsilon=cost,
    )


def _group_epsilon(name: str, values: NDArray[np.float64], losses: NDArray[np.float32]) -> GroupEpsilon:
    deviation = float(values.std(ddof=1)) if len(values) > 1 else 0.0
    return GroupEpsilon(
        name,
        mean=float(values.mean()),
        standard_error=deviation / len(values) ** 0.5,
        examples=float(len(values)),
        loss_correlation=loss_correlation(values, losses),
    )
