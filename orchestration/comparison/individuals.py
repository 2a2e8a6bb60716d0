"""Statistics of the training examples' epsilons: exact ones for the owner of the data, released ones for everybody."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from accounting.estimates import Kind, PrivacyEstimate
from accounting.records.shards import Epsilons
from accounting.release import ReleasedStatistics
from orchestration.records.published import GroupEpsilon, Histogram, IndividualStatistics

_QUANTILES = (0.1, 0.3, 0.5, 0.7, 0.9)
_BINS = 30


def kind_of_capped(epsilons: Epsilons, worst_case: PrivacyEstimate) -> Kind:
    """What statistics of epsilons capped at the worst case may claim: no more than either of the two."""
    return epsilons.kind if worst_case.kind == "guarantee" else "estimate"


def exact_statistics(
    epsilons: Epsilons, group_names: tuple[str, ...], worst_case: PrivacyEstimate
) -> IndividualStatistics:
    """Exact statistics of the epsilon_i of all training examples: private data.

    The worst case holds for every example too, so where it is lower than an example's own bound it takes its place.
    """
    values = np.minimum(epsilons.upper, worst_case.epsilon)
    counts, edges = np.histogram(values, bins=_BINS, range=(0.0, worst_case.epsilon))
    return IndividualStatistics(
        disclosure="raw",
        kind=kind_of_capped(epsilons, worst_case),
        mean=float(values.mean()),
        median=float(np.median(values)),
        quantiles={q: float(np.quantile(values, q)) for q in _QUANTILES},
        groups=tuple(
            _group_epsilon(name, values[epsilons.groups == group])
            for group, name in enumerate(group_names)
            if np.any(epsilons.groups == group)
        ),
        histogram=Histogram(tuple(edges.tolist()), tuple(counts.astype(float).tolist())),
    )


def released_statistics(
    released: ReleasedStatistics, group_names: tuple[str, ...], kind: Kind, cost: float
) -> IndividualStatistics:
    """Statistics released with differential privacy, of which ``cost`` is the epsilon of the release alone."""
    return IndividualStatistics(
        disclosure="private",
        kind=kind,
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


def _group_epsilon(name: str, values: NDArray[np.float64]) -> GroupEpsilon:
    deviation = float(values.std(ddof=1)) if len(values) > 1 else 0.0
    return GroupEpsilon(name, float(values.mean()), deviation / len(values) ** 0.5, float(len(values)))
