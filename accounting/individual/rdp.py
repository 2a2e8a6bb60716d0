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

_STEEP = 100.0
"""Above this precision `accounting.renyi` has no sampled RDP at fractional orders, so the search may miss the best."""


@dataclass(frozen=True)
class RenyiCosts:
    """Upper bounds of examples: rdp [rows, orders] at `ORDERS`, and epsilons [rows] and the order [rows] of each."""

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
    costs = contributions.costs(spread_linearly)
    coarse = _rdp(costs, _PLACES, _table)
    upper, lower = np.empty(len(coarse)), np.empty(len(coarse))
    for rows, own, window in _windows(costs, coarse, delta):
        values = _rdp(own, window, _table)
        values += improved_terms(ORDERS[window], delta)
        upper[rows] = values.min(axis=1)
        lower[rows] = _lower(own, window, upper[rows], delta)
    return zero_where_free(upper, coarse[:, 0], delta), lower


def _lower(costs: StepWeights, window: NDArray[np.intp], upper: Array, delta: float) -> Array:
    """Lower bound [rows] on the Renyi bound in exact arithmetic, given ``upper``, its upper bound in the window.

    Beyond an end of the window that costs more than ``upper``, everything does. Where an end may not, all orders are
    evaluated. RDP grows with the order, so it is least at the first one.
    """
    values = _rdp(costs, np.append(0, window), _lower_table)
    least, values = values[:, 0], values[:, 1:]
    values += improved_terms(ORDERS[window], delta)
    lower = values.min(axis=1)
    open_ended = np.zeros(len(lower), np.bool_)
    for place, column in ((window[0], values[:, 0]), (window[-1], values[:, -1])):
        open_ended |= (place not in (0, _LAST)) & ~(column > upper)
    if open_ended.any():
        everywhere = np.arange(len(ORDERS))
        again = _rdp(select(costs, np.flatnonzero(open_ended)), everywhere, _lower_table)
        lower[open_ended] = (again + improved_terms(ORDERS, delta)).min(axis=1)
    return zero_where_free(lower, least, delta)


def renyi_costs(costs: StepWeights, delta: float) -> RenyiCosts:
    """The upper bounds of `rdp_epsilons`, with the RDP at every order."""
    rdp = _rdp(costs, np.arange(len(ORDERS)), _table)
    values = rdp + improved_terms(ORDERS, delta)
    best = values.argmin(axis=1)
    least = np.take_along_axis(values, best[:, None], axis=1)[:, 0]
    return RenyiCosts(rdp, zero_where_free(least, rdp.min(axis=1), delta), ORDERS[best])


def _windows(
    costs: StepWeights, coarse: Array, delta: float
) -> Iterator[tuple[NDArray[np.intp], StepWeights, NDArray[np.intp]]]:
    """Rows, their costs, and the places in `ORDERS` among which their best order is."""
    if any(part.precisions[-1] > _STEEP for part in costs.sampled):
        yield np.arange(len(coarse)), costs, np.arange(len(ORDERS))
        return
    nearest = np.argmin(coarse + improved_terms(ORDERS[_PLACES], delta), axis=1)
    for place in np.unique(nearest).tolist():
        rows = np.flatnonzero(nearest == place)
        first, last = _PLACES[max(place - 1, 0)], _PLACES[min(place + 1, len(_PLACES) - 1)]
        yield rows, select(costs, rows), np.arange(first, last + 1)


def _rdp(costs: StepWeights, places: NDArray[np.intp], table_of: Callable[[SampledSteps], Array]) -> Array:
    """RDP [rows, places] at the orders in these places of `ORDERS`."""
    orders, sampled = ORDERS[places], list(costs.sampled)
    first = sampled.pop(0) if sampled else None
    total = _product(first, places, table_of) if first else np.zeros((len(costs.precision), len(places)))
    for part in sampled:
        total += _product(part, places, table_of)
    if costs.precision.any():
        total += costs.precision[:, None] * (0.5 * orders)
    for epsilon in costs.pure:
        total += pure_rdp(epsilon, orders)
    return total


def _product(part: SampledSteps, places: NDArray[np.intp], table_of: Callable[[SampledSteps], Array]) -> Array:
    return np.asarray(part.weights @ np.ascontiguousarray(table_of(part)[:, places]))


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
