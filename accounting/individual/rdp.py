"""Individual accounting by Renyi DP: the product of step weights and the RDP of each node.

An example's epsilon is a minimum over `ORDERS`. Over real orders that function falls, then rises
(`accounting.renyi.improved_terms`), so each example is evaluated at few of them first, and then at those around the
best of these. Any order gives an upper bound. The lower bound is proven for all orders: see `_lower`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from accounting.individual.contributions import (
    Array,
    RecordedContributions,
    SampledSteps,
    StepWeights,
    near_reached,
    select,
    spread_linearly,
)
from accounting.renyi import ORDERS, improved_terms, pure_rdp, sampled_gaussian_rdp, zero_where_free

_TABLE_ERROR = 4e-9
"""Relative error allowed for a table entry, above that of `accounting.renyi`; subtracted for the lower bound."""

_STRIDE = 8
_LAST = len(ORDERS) - 1
_PLACES = np.unique([*range(0, len(ORDERS), _STRIDE), _LAST])
"""Places in `ORDERS` at which every example is evaluated."""

_FEW_PLACES = np.unique(np.searchsorted(ORDERS - 1.0, 0.02 * 1.15 ** np.arange(88.0)).clip(0, _LAST))
FEW_ORDERS: Array = ORDERS[_FEW_PLACES]
"""Orders at which `RenyiCosts` has RDP: alpha - 1 grows by factors of about 1.15."""

_STEEP = 100.0
"""Above this precision `accounting.renyi` has no sampled RDP at fractional orders, so the search may miss the best."""


@dataclass(frozen=True)
class RenyiCosts:
    """Upper bounds of examples: rdp [rows, orders] at `FEW_ORDERS`, epsilons [rows], and the order [rows] of each."""

    rdp: Array
    epsilons: Array
    orders: Array

    def of(self, rows: NDArray[np.intp]) -> RenyiCosts:
        """Those of some rows."""
        return RenyiCosts(self.rdp[rows], self.epsilons[rows], self.orders[rows])


def rdp_epsilons(contributions: RecordedContributions, delta: float) -> tuple[Array, Array]:
    """Upper and lower epsilon [rows] at ``delta`` by the improved conversion; covers both directions of add/remove.

    Spreading steps over nodes can only increase upper, because RDP is convex in a step's precision
    (`accounting.individual.contributions`).
    """
    costs = near_reached(contributions.costs(spread_linearly))
    (coarse,) = _rdp(costs, _PLACES, _table)
    upper, lower = np.empty(len(coarse)), np.empty(len(coarse))
    for rows, own, window in _windows(costs, coarse, _PLACES, delta):
        rdp, below = _rdp(own, np.append(0, window), _table, _lower_table)
        upper[rows] = (rdp[:, 1:] + improved_terms(ORDERS[window], delta)).min(axis=1)
        lower[rows] = _lower(own, window, below, upper[rows], delta)
    return zero_where_free(upper, coarse[:, 0], delta), lower


def _lower(costs: StepWeights, window: NDArray[np.intp], rdp: Array, upper: Array, delta: float) -> Array:
    """Lower bound [rows] on the Renyi bound in exact arithmetic, given ``upper``, its upper bound in the window.

    rdp: lower bounds [rows, 1 + places] at the first order, where RDP is least, and in the window. Beyond an end of the
    window that costs more than ``upper``, everything does. Where an end may not, all orders are evaluated.
    """
    values = rdp[:, 1:] + improved_terms(ORDERS[window], delta)
    lower = values.min(axis=1)
    open_ended = np.zeros(len(lower), np.bool_)
    for place, column in ((window[0], values[:, 0]), (window[-1], values[:, -1])):
        open_ended |= (place not in (0, _LAST)) & ~(column > upper)
    if open_ended.any():
        everywhere = np.arange(len(ORDERS))
        (again,) = _rdp(select(costs, np.flatnonzero(open_ended)), everywhere, _lower_table)
        lower[open_ended] = (again + improved_terms(ORDERS, delta)).min(axis=1)
    return zero_where_free(lower, rdp[:, 0], delta)


def renyi_costs(costs: StepWeights, delta: float) -> RenyiCosts:
    """The upper bounds of `rdp_epsilons`."""
    costs = near_reached(costs)
    (coarse,) = _rdp(costs, _FEW_PLACES, _table)
    epsilons, orders = np.empty(len(coarse)), np.empty(len(coarse))
    for rows, own, window in _windows(costs, coarse, _FEW_PLACES, delta):
        values = _rdp(own, window, _table)[0] + improved_terms(ORDERS[window], delta)
        epsilons[rows], orders[rows] = values.min(axis=1), ORDERS[window][values.argmin(axis=1)]
    return RenyiCosts(coarse, zero_where_free(epsilons, coarse[:, 0], delta), orders)


def _windows(
    costs: StepWeights, coarse: Array, places: NDArray[np.intp], delta: float
) -> Iterator[tuple[NDArray[np.intp], StepWeights, NDArray[np.intp]]]:
    """Rows, their costs, and the places in `ORDERS` among which their best order is, given RDP in some ``places``."""
    if any(part.precisions[-1] > _STEEP for part in costs.sampled):
        yield np.arange(len(coarse)), costs, np.arange(len(ORDERS))
        return
    nearest = np.argmin(coarse + improved_terms(ORDERS[places], delta), axis=1)
    for place in np.unique(nearest).tolist():
        rows = np.flatnonzero(nearest == place)
        first, last = places[max(place - 1, 0)], places[min(place + 1, len(places) - 1)]
        yield rows, select(costs, rows), np.arange(first, last + 1)


def _rdp(costs: StepWeights, places: NDArray[np.intp], *tables: Callable[[SampledSteps], Array]) -> list[Array]:
    """By each kind of table, RDP [rows, places] at the orders in these places of `ORDERS`."""
    orders = ORDERS[places]
    plain = costs.precision[:, None] * (0.5 * orders)
    for epsilon in costs.pure:
        plain += pure_rdp(epsilon, orders)
    total = np.hstack([plain] * len(tables))
    for part in costs.sampled:
        total += part.weights @ np.hstack([table(part)[:, places] for table in tables])
    return np.split(total, len(tables), axis=1)


def _table(part: SampledSteps) -> Array:
    """RDP of one step at each node; shape [nodes, orders]."""
    return _tables(part.sample_rate, part.precisions.tobytes())[0]


def _lower_table(part: SampledSteps) -> Array:
    """`_table` minus the largest overshoot of linear spreading beside each node; shape [nodes, orders]."""
    return _tables(part.sample_rate, part.precisions.tobytes())[1]


@functools.lru_cache(maxsize=32)
def _tables(sample_rate: float, nodes: bytes) -> tuple[Array, Array]:
    """Both tables, kept because all parts of a trial share their nodes: up to 4 MB each."""
    precisions = np.frombuffer(nodes)
    upper = np.array([_node_rdp(sample_rate, u) for u in precisions.tolist()])
    lower = _below(sample_rate, precisions, upper)
    for table in (upper, lower):
        table.setflags(write=False)
    return upper, lower


def _node_rdp(sample_rate: float, precision: float) -> Array:
    return sampled_gaussian_rdp(sample_rate, precision**-0.5) if precision > 0.0 else np.zeros_like(ORDERS)


def _below(sample_rate: float, precisions: Array, upper: Array) -> Array:
    """The table ``upper`` minus the largest overshoot of linear spreading beside each node; shape [nodes, orders].

    Between two nodes a convex function lies below its chord and above the extensions of the neighbouring chords, so
    with slopes a <= b <= c the chord overshoots by at most width (b - a) (c - b) / (c - a).
    """
    beyond = 2.0 * precisions[-1] - precisions[-2]
    values = np.vstack([upper, _node_rdp(sample_rate, float(beyond))])
    widths = np.diff(np.append(precisions, beyond))[:, None]
    slopes = np.vstack([np.zeros_like(ORDERS), np.diff(values, axis=0) / widths])
    rises = np.maximum(np.diff(slopes, axis=0), 0.0)
    before, after = rises[:-1], rises[1:]
    overshoot = widths[:-1] * before * after / np.maximum(before + after, np.finfo(np.float64).tiny)
    beside = np.maximum(np.pad(overshoot, ((1, 0), (0, 0))), np.pad(overshoot, ((0, 1), (0, 0))))
    return np.asarray(np.maximum(values[:-1] * (1.0 - _TABLE_ERROR) - beside, 0.0))
