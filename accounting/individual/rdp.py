"""Individual accounting by Renyi DP: the product of step weights and the RDP of each node.

An example's epsilon is a minimum over `ORDERS`. As a function of a real order it falls, then rises
(`dpsweep.accounting.numerics.renyi.improved_terms`, `classic_terms`), so each example is evaluated at a few orders
first, then at those around the best. Any order gives an upper bound.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpsweep.accounting.individual.blocks import block_moments
from dpsweep.accounting.individual.contributions import (
    AllocationBlock,
    Array,
    RecordedContributions,
    StepLaw,
    StepsLaw,
    StepWeights,
    tail_of_blocks,
)
from dpsweep.accounting.individual.kernels import best_orders
from dpsweep.accounting.individual.spreading import near_reached, spread_linearly, stacked, weighted_sums
from dpsweep.accounting.numerics.renyi import (
    ORDERS,
    classic_terms,
    improved_terms,
    mixed_rdp,
    pure_rdp,
    sampled_gaussian_rdp,
    zero_where_free,
)

_LAST = len(ORDERS) - 1
_COARSE = np.unique([*range(0, 128, 32), *range(128, _LAST, 12), _LAST])
"""Indices of the orders evaluated first for every example; denser above order 2, where the best order usually lies."""

_FEW_PLACES = np.unique(np.searchsorted(ORDERS - 1.0, 0.02 * 1.15 ** np.arange(88.0)).clip(0, _LAST))
FEW_ORDERS: Array = ORDERS[_FEW_PLACES]
"""Orders at which `RenyiCosts` gives RDP: alpha - 1 grows by factors of about 1.15."""

_STEEP = 100.0
"""Above this precision `dpsweep.accounting.numerics.renyi` has no sampled RDP at fractional orders: the best may be
missed."""


@dataclass(frozen=True)
class RenyiCosts:
    """Renyi upper bounds: epsilons [rows] at ``delta`` and their best orders [rows]. costs: of the same rows."""

    epsilons: Array
    orders: Array
    delta: float
    costs: StepWeights

    def of(self, rows: NDArray[np.intp]) -> RenyiCosts:
        """Return the Renyi costs of some rows."""
        return RenyiCosts(self.epsilons[rows], self.orders[rows], self.delta, self.costs.of(rows))

    def rdp(self, rows: NDArray[np.intp], places: NDArray[np.intp]) -> Array:
        """Return RDP [rows, places] of some rows at some of `FEW_ORDERS`."""
        columns = _FEW_PLACES[places]
        few, plain = (np.ascontiguousarray(each[:, columns]) for each in (_stacked(self.costs), _plain(self.costs)))
        return weighted_sums(self.costs, few, plain, rows)


def rdp_epsilons(contributions: RecordedContributions, delta: float) -> Array:
    """Return the upper epsilon [rows] at ``delta`` by the improved conversion; covers both directions of add/remove.

    Spreading steps over nodes can only increase it, because RDP is convex in a step's precision
    (`dpsweep.accounting.individual.contributions`).
    """
    return _converted(contributions, delta, improved_terms)


def classic_epsilons(contributions: RecordedContributions, delta: float) -> Array:
    """Return `rdp_epsilons`, but by Mironov's conversion, which papers A and C use; never below `rdp_epsilons`."""
    return _converted(contributions, delta, classic_terms)


def _converted(contributions: RecordedContributions, delta: float, terms: Callable[[float], Array]) -> Array:
    """Return the upper epsilon [rows] where ``terms`` are added to the RDP at each order."""
    tail, left = tail_of_blocks(contributions.trace, delta)
    costs = _on_few_nodes(contributions.costs(spread_linearly, tail))
    return _best_orders(costs, terms(left)).epsilons(left)


@dataclass(frozen=True)
class _Best:
    """The least sum of RDP and a conversion's terms, its place in `ORDERS`, and RDP at the first order; all [rows]."""

    least: Array
    places: NDArray[np.int64]
    first: Array

    def epsilons(self, delta: float) -> Array:
        """Return the upper bounds [rows]."""
        return zero_where_free(self.least, self.first, delta)


def _best_orders(costs: StepWeights, terms: Array) -> _Best:
    """Return the least sums over `ORDERS`, found by evaluating few of them: a sum falls, then rises with the order."""
    table, plain = _stacked(costs), _plain(costs)
    steep = any(part.precisions[-1] > _STEEP for part in costs.sampled)
    places = np.arange(len(ORDERS)) if steep else _COARSE
    coarse, coarse_plain = (np.ascontiguousarray(each[:, places]) for each in (table, plain))
    found = np.empty((3, len(costs.precision)))
    steps = costs.steps
    examples = steps.weights, steps.nodes, steps.ends, costs.precision
    best_orders(*examples, coarse, coarse_plain, places, table, plain, terms, found)
    return _Best(found[0], found[1].astype(np.int64), found[2])


def renyi_costs(costs: StepWeights, delta: float) -> RenyiCosts:
    """Return the bounds of `rdp_epsilons`, with their orders."""
    costs = _on_few_nodes(costs)
    best = _best_orders(costs, improved_terms(delta))
    return RenyiCosts(best.epsilons(delta), ORDERS[best.places], delta, costs)


def _on_few_nodes(costs: StepWeights) -> StepWeights:
    return near_reached(costs, [len(part.precisions) for part in costs.sampled])


def _plain(costs: StepWeights) -> Array:
    """Return RDP of pure releases, and of one unit of precision of unsampled Gaussians; [2, orders]."""
    plain = np.array([np.zeros_like(ORDERS), 0.5 * ORDERS])
    for epsilon in costs.pure:
        plain[0] += pure_rdp(epsilon, ORDERS)
    return plain


def _stacked(costs: StepWeights) -> Array:
    """Return the tables of all laws as one: RDP of a step at each node; [nodes, orders]."""
    return stacked([_table(part.law, part.precisions.tobytes()) for part in costs.sampled], len(ORDERS))


@functools.lru_cache(maxsize=32)
def _table(law: StepsLaw, nodes: bytes) -> Array:
    """Return the table of one law for `_stacked`; cached (up to 4 MB each): all parts of a trial share nodes."""
    if isinstance(law, AllocationBlock):
        both = (block_moments(law, nodes, exponents.tobytes()) for exponents in (ORDERS, 1.0 - ORDERS))
        table = np.maximum(*both) / (ORDERS - 1.0)
    else:
        table = np.array([_node_rdp(law, u) for u in np.frombuffer(nodes).tolist()])
    table.setflags(write=False)
    return table


def _node_rdp(law: StepLaw, precision: float) -> Array:
    if precision == 0.0:
        return np.zeros_like(ORDERS)
    always = sampled_gaussian_rdp(law.sample_rate, precision**-0.5)
    return always if law.chance == 1.0 else mixed_rdp((1.0 - law.chance, law.chance), (np.zeros_like(ORDERS), always))
