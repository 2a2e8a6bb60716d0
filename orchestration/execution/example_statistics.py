"""Compute statistics of the training examples' epsilons: exact ones, for the owner of the data, or released with DP."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from dpsweep.accounting.jobs.release import ReleasedStatistics
from dpsweep.accounting.jobs.summaries import CountedEpsilons, Members, PointMoments
from dpsweep.accounting.mechanism.estimates import Claim, Kind, PrivacyEstimate, weakest
from dpsweep.accounting.mechanism.reasons import Reason, union
from dpsweep.orchestration.store.published import Density, EpsilonHistogram, GroupEpsilon, IndividualStatistics
from dpsweep.orchestration.store.release_modes import EXACT, RELEASED

Array = NDArray[np.float64]
_BINS: Final = 40
"""Number of bins along each axis."""


def density(x: Array, y: Array) -> Density | None:
    """Return counts of the points (x, y) in a grid between their extremes; None without points. x, y: [examples]."""
    if len(x) == 0:
        return None
    across, up = _edges(x.min(), x.max()), _edges(y.min(), y.max())
    return _made(_count(x, y, across, up), across, up)


def loss_density(counted: CountedEpsilons) -> Density | None:
    """Return counts of examples by log loss (x) and epsilon_i (y); None if no loss is positive and finite.

    Reads the stored parts again, one after the other. Examples whose loss is not positive and finite are left out.
    """
    paired = counted.summary.everyone.with_loss
    if paired.count == 0:
        return None
    across, up = _edges(paired.low[1], paired.high[1]), _edges(paired.low[0], paired.high[0])
    counts = np.zeros((_BINS, _BINS))
    for part, values in zip(counted.parts, counted.values(), strict=True):
        usable = (part.losses > 0.0) & np.isfinite(part.losses)
        counts += _count(np.log(part.losses[usable].astype(np.float64)), values[usable], across, up)
    return _made(counts, across, up)


def _edges(low: float, high: float) -> Array:
    """Edges of bins of equal width that contain all values from ``low`` to ``high``."""
    margin = 1e-9 * max(abs(low), abs(high), 1.0)
    return np.linspace(low - margin, high + margin, _BINS + 1)


def _count(x: Array, y: Array, across: Array, up: Array) -> Array:
    return np.asarray(np.histogram2d(x, y, bins=(across, up))[0])


def _made(counts: Array, across: Array, up: Array) -> Density:
    rows = counts.astype(np.int64).tolist()
    return Density(tuple(across.tolist()), tuple(up.tolist()), tuple(map(tuple, rows)))


_QUANTILES = (0.1, 0.3, 0.5, 0.7, 0.9)
_LEAST_CORRELATED = 10
"""Minimum number of examples for a correlation; with 10, the 95% interval of r around 0 is about ±0.63."""


def kind_of_capped(own: Claim, worst_case: PrivacyEstimate) -> Kind:
    """Kind of statistics over epsilons of kind ``own``, capped at the worst case: the weaker of the two kinds.

    A worst case that is a lower bound or not private counts as an estimate.
    """
    kind = worst_case.kind
    return weakest(own, "estimate" if kind == "lower_bound" or kind == "none" else kind)


def exact_statistics(
    counted: CountedEpsilons,
    group_names: tuple[str, ...],
    worst_case: PrivacyEstimate,
    reasons: tuple[Reason, ...] = (),
) -> IndividualStatistics:
    """Return exact statistics of the epsilon_i of all training examples: private data.

    reasons: why the uncapped epsilon_i are estimates (`dpsweep.accounting.individual.individual_reasons`). Each
    epsilon_i was capped at the worst case, which also bounds every example. Quantiles are exact, computed by reading
    the stored parts again.
    """
    summary = counted.summary
    values = counted.quantiles((0.5, *_QUANTILES))
    return IndividualStatistics(
        disclosure=EXACT,
        kind=kind_of_capped(summary.kind, worst_case),
        method=summary.method,
        mean=float(summary.everyone.epsilons.mean[0]),
        median=values[0],
        quantiles=dict(zip(_QUANTILES, values[1:], strict=True)),
        groups=tuple(
            _group_epsilon(name, summary.groups[group])
            for group, name in enumerate(group_names)
            if group in summary.groups
        ),
        histogram=EpsilonHistogram(tuple(summary.counting.edges.tolist()), tuple(summary.shown.astype(float).tolist())),
        loss_correlation=loss_correlation(summary.everyone.with_loss),
        loss_density=loss_density(counted),
        reasons=union((worst_case.reasons, reasons)),
    )


def loss_correlation(moments: PointMoments) -> float | None:
    """Return Pearson's r of epsilon_i and the natural log of the loss of example i (paper A, Figure 5): private data.

    `moments`: joint moments of the two, without examples whose loss is zero or not finite. None with fewer than 10
    examples left, or if either side is constant.
    """
    return moments.correlation if moments.count >= _LEAST_CORRELATED else None


def released_statistics(
    released: ReleasedStatistics, group_names: tuple[str, ...], exact: IndividualStatistics, cost: float
) -> IndividualStatistics:
    """Return statistics released with differential privacy.

    exact: statistics of the same epsilon_i, for the kind of each claim. cost: epsilon of the release alone.
    """
    return IndividualStatistics(
        disclosure=RELEASED,
        kind=exact.kind,
        method=exact.method,
        mean=released.mean_epsilon,
        median=released.quantiles.get(0.5),
        quantiles=released.quantiles,
        groups=tuple(
            GroupEpsilon(group_names[group.group], group.mean_epsilon, group.mean_standard_error, group.examples)
            for group in released.groups
        ),
        histogram=EpsilonHistogram(released.edges, released.histogram),
        release_epsilon=cost,
        reasons=exact.reasons,
    )


def _group_epsilon(name: str, members: Members) -> GroupEpsilon:
    moments = members.epsilons
    return GroupEpsilon(
        name,
        mean=float(moments.mean[0]),
        standard_error=moments.deviation / moments.count**0.5,
        examples=float(moments.count),
        loss_correlation=loss_correlation(members.with_loss),
    )
