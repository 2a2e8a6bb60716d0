"""Individual accounting by Renyi DP: the product of step weights and the RDP of each node.

An example's epsilon is a minimum over `ORDERS`. As a function of a real order it falls, then rises
(`accounting.renyi.improved_terms`, `classic_terms`), so each example is evaluated at a few orders first, then at those
around the best. Any order gives an upper bound. The lower bound is proven for all orders: see `_best_orders`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from accounting.individual.contributions import (
    Array,
    RecordedContributions,
    StepWeights,
)
from accounting.individual.kernels import best_orders
from accounting.individual.spreading import near_reached, spread_linearly, weighted_sums
from accounting.renyi import ORDERS, classic_terms, improved_terms, pure_rdp, sampled_gaussian_rdp, zero_where_free

_TABLE_ERROR = 4e-9
"""Relative error allowed for a table entry, above that of `accounting.renyi`; subtracted for the lower bound."""

_LAST = len(ORDERS) - 1
_COARSE = np.unique([*range(0, 128, 32), *range(128, _LAST, 12), _LAST])
"""Indices of the orders evaluated first for every example; denser above order 2, where the best order usually lies."""

_FEW_PLACES = np.unique(np.searchsorted(ORDERS - 1.0, 0.02 * 1.15 ** np.arange(88.0)).clip(0, _LAST))
FEW_ORDERS: Array = ORDERS[_FEW_PLACES]
"""Orders at which `RenyiCosts` gives RDP: alpha - 1 grows by factors of about 1.15."""

_STEEP = 100.0
"""Above this precision `accounting.renyi` has no sampled RDP at fractional orders, so the search may miss the best."""


@dataclass(frozen=True)
class RenyiCosts:
    """Renyi upper bounds: epsilons [rows] at ``delta`` and their best orders [rows]. costs: of the same rows."""

    epsilons: Array
    orders: Array
    delta: float
    costs: StepWeights

    def of(self, rows: NDArray[np.intp]) -> RenyiCosts:
        """The Renyi costs of some rows."""
        return RenyiCosts(self.epsilons[rows], self.orders[rows], self.delta, self.costs.of(rows))

    def rdp(self, rows: NDArray[np.intp], places: NDArray[np.intp]) -> Array:
        """RDP [rows, places] of some rows at some of `FEW_ORDERS`."""
        columns = 2 * _FEW_PLACES[places]
        few, plain = (np.ascontiguousarray(each[:, columns]) for each in (_stacked(self.costs), _plain(self.costs)))
        return weighted_sums(self.costs, few, plain, rows)


def rdp_epsilons(contributions: RecordedContributions, delta: float) -> tuple[Array, Array]:
    """Upper and lower epsilon [rows] at ``delta`` by the improved conversion; covers both directions of add/remove.

    Spreading steps over nodes can only increase upper, because RDP is convex in a step's precision
    (`accounting.individual.contributions`).
    """
    return _converted(contributions, delta, improved_terms(ORDERS, delta))


def classic_epsilons(contributions: RecordedContributions, delta: float) -> tuple[Array, Array]:
    """As `rdp_epsilons`, but by Mironov's conversion, which papers A and C use; never below `rdp_epsilons`."""
    return _converted(contributions, delta, classic_terms(ORDERS, delta))


def _converted(contributions: RecordedContributions, delta: float, terms: Array) -> tuple[Array, Array]:
    """Upper and lower epsilon [rows] where ``terms`` are added to the RDP at each order."""
    costs = _on_few_nodes(contributions.costs(spread_linearly))
    best = _best_orders(costs, terms, np.inf if _steep(costs) else 0.0)
    return best.epsilons(delta), best.lower_epsilons(delta)


@dataclass(frozen=True)
class _Best:
    """The least sum of RDP and a conversion's terms, its place in `ORDERS`, and RDP at the first order; all [rows].

    least_below and first_below are the same as least and first, from the table of lower bounds.
    """

    least: Array
    places: NDArray[np.int64]
    first: Array
    first_below: Array
    least_below: Array

    def epsilons(self, delta: float) -> Array:
        """Upper bounds [rows]."""
        return zero_where_free(self.least, self.first, delta)

    def lower_epsilons(self, delta: float) -> Array:
        """Lower bounds [rows] on the Renyi bound in exact arithmetic, over all orders."""
        return zero_where_free(self.least_below, self.first_below, delta)


def _best_orders(costs: StepWeights, terms: Array, slack: float) -> _Best:
    """The least sums over `ORDERS`, found by evaluating few of them: a sum falls, then rises with the order.

    All orders beyond one whose sum exceeds the upper bound exceed it, too. So the least lower bound is sought from the
    best order to the first one on either side that is proven to cost more by ``slack``.
    """
    table, plain = _stacked(costs), _plain(costs)
    places = np.arange(len(ORDERS)) if _steep(costs) else _COARSE
    coarse = np.append(2 * places, 1)
    found = np.empty((5, len(costs.precision)))
    best_orders(
        *_entries(costs),
        np.ascontiguousarray(table[:, coarse]),
        np.ascontiguousarray(plain[:, coarse]),
        places,
        table,
        plain,
        terms,
        slack,
        found,
    )
    return _Best(found[0], found[1].astype(np.int64), *found[2:])


def renyi_costs(costs: StepWeights, delta: float) -> RenyiCosts:
    """The upper bounds of `rdp_epsilons`, with their orders."""
    costs = _on_few_nodes(costs)
    best = _best_orders(costs, improved_terms(ORDERS, delta), -np.inf)
    return RenyiCosts(best.epsilons(delta), ORDERS[best.places], delta, costs)


def _on_few_nodes(costs: StepWeights) -> StepWeights:
    return near_reached(costs, [len(part.precisions) for part in costs.sampled])


def _steep(costs: StepWeights) -> bool:
    """Whether every order is to be evaluated: see `_STEEP`."""
    return any(part.precisions[-1] > _STEEP for part in costs.sampled)


def _plain(costs: StepWeights) -> Array:
    """RDP of pure releases, and of one unit of precision of unsampled Gaussians; [2, 2 orders], as in `_stacked`."""
    plain = np.array([np.zeros_like(ORDERS), 0.5 * ORDERS])
    for epsilon in costs.pure:
        plain[0] += pure_rdp(epsilon, ORDERS)
    return np.repeat(plain, 2, axis=1)


def _stacked(costs: StepWeights) -> Array:
    """The tables of all sampling rates as one: RDP of a step at each node, and its lower bound by `_below`.

    Shape [nodes, 2 orders], with both entries of an order side by side.
    """
    tables = [_table(part.sample_rate, part.precisions.tobytes()) for part in costs.sampled]
    return tables[0] if len(tables) == 1 else np.concatenate([np.empty((0, 2 * len(ORDERS))), *tables])


def _entries(costs: StepWeights) -> tuple[Array, NDArray[np.int32], NDArray[np.int64], Array]:
    """The arguments of `best_orders` that describe the examples."""
    return costs.steps.weights, costs.steps.nodes, costs.steps.ends, costs.precision


@functools.lru_cache(maxsize=32)
def _table(sample_rate: float, nodes: bytes) -> Array:
    """The table of one sampling rate for `_stacked`; cached (up to 8 MB each): all parts of a trial share nodes."""
    precisions = np.frombuffer(nodes)
    upper = np.array([_node_rdp(sample_rate, u) for u in precisions.tolist()])
    table = np.stack([upper, _below(sample_rate, precisions, upper)], axis=2).reshape(len(upper), -1)
    table.setflags(write=False)
    return table


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
    inexact = (precisions > _STEEP)[:, None] & (np.floor(ORDERS) != ORDERS)
    exact = values[:-1] * (1.0 - _TABLE_ERROR) - beside
    steep = _below_steep(sample_rate, precisions) * (1.0 - _TABLE_ERROR)
    return np.asarray(np.maximum(np.where(inexact, steep, exact), 0.0))


def _below_steep(sample_rate: float, precisions: Array) -> Array:
    """Lower bounds at nodes u above `_STEEP`, where `accounting.renyi` has none; shape [nodes, orders].

    A_alpha >= q^alpha exp(alpha (alpha - 1) u / 2), the moment of the second measure's part alone, and it grows with u.
    So each node has the larger of that bound at the node before it and of the RDP at the last node up to `_STEEP`;
    both are below the RDP of every u between these nodes.
    """
    before = np.concatenate([np.zeros(1), precisions[:-1]])[:, None]
    gentle = precisions[precisions <= _STEEP]
    least = _node_rdp(sample_rate, float(gentle[-1]) if len(gentle) else _STEEP)
    return np.asarray(np.maximum(least, ORDERS * (0.5 * before + np.log(sample_rate) / (ORDERS - 1.0))))
