"""Steps of single examples, spread over a few nodes of effective precision.

That this can only increase their Renyi divergence is proven in `accounting.individual.contributions`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from accounting.individual.contributions import Array, SampledNodes, SparseRows, StepWeights, Stretch
from accounting.individual.kernels import mark, spread, sums

NODES = 256
"""Nodes per sampling rate, uniform in sqrt(u). Above a largest sqrt(u) of 1 the number grows in proportion, to 4x."""

_BESIDE = 2
"""Number of neighbours on either side that a node's entries in tables depend on."""

_FEW = 4
"""Only the nodes in use get tables if fewer than one in 4 is; otherwise all do, which other rows can then use."""

_MANY = 256
"""Blocks with at least so many rows use most nodes; no node is left out for them."""

_SEVERAL_PARTS = 1 << 17
"""Beyond so many examples a data set has several parts, whose rows together reach all nodes."""


def spread_linearly(
    sampled: Mapping[float, tuple[Stretch, ...]], values: Array, nodes: int = NODES
) -> tuple[tuple[SampledNodes, ...], SparseRows]:
    """Nodes of each sampling rate, and the weights of its stretches on them: two for each step, beside its u.

    values [snapshots, rows] are contributions; nodes: as `NODES`. Nodes are (x_0 + k h)^2, so a u with root
    x_0 + (k + t) h lies at t (2 (k + x_0 / h) + t) / (2 (k + x_0 / h) + 1) of the way from node k to the next. Rounding
    moves u by 1e-14 of itself, far below `renyi._ROUNDING`.
    """
    parts = tuple(SampledNodes(sample_rate, _nodes(stretches, nodes)) for sample_rate, stretches in sampled.items())
    first, fields = 0, [np.empty((0, 9))]
    for part, stretches in zip(parts, sampled.values(), strict=True):
        fields.append(_fields(stretches, nodes, first))
        first += len(part.precisions)
    stretches_of_all = np.concatenate(fields)
    rows = values.shape[1]
    entries = rows * min(2 * len(stretches_of_all), first) + 1
    weights, places, ends = np.empty(entries), np.empty(entries, np.int32), np.zeros(rows + 1, np.int64)
    spread(values, stretches_of_all, first, weights, places, ends)
    return parts, SparseRows(weights[: ends[-1]], places[: ends[-1]], ends)


@functools.lru_cache(maxsize=16)
def _fields(stretches: tuple[Stretch, ...], nodes: int, first: int) -> Array:
    """What `kernels.spread` takes of each stretch, whose nodes start at number ``first``; shape [stretches, 9]."""
    roots = np.sqrt(_nodes(stretches, nodes))
    spacing = (roots[-1] - roots[0]) / (len(roots) - 1)
    grid = (1.0 / spacing, roots[0] / spacing, len(roots), first)
    return np.array([(part.column, part.steps, part.slope, part.offset, part.side, *grid) for part in stretches])


def weighted_sums(costs: StepWeights, table: Array, plain: Array, rows: NDArray[np.intp] | None = None) -> Array:
    """Sums [rows, columns] of a table [nodes, columns] over the steps of each example, or of some ``rows``.

    plain [2, columns] is added: the first row once, the second for each unit of precision of unsampled Gaussians.
    """
    chosen = np.arange(len(costs.precision)) if rows is None else rows
    found = np.empty((len(chosen), table.shape[1]))
    sums(costs.steps.weights, costs.steps.nodes, costs.steps.ends, costs.precision, table, plain, chosen, found)
    return found


@functools.lru_cache(maxsize=16)
def _nodes(stretches: tuple[Stretch, ...], nodes: int) -> Array:
    """Nodes that cover u for all contributions in [0, 1], so that they do not depend on the block of rows."""
    lowest, highest = _ends(stretches)
    if not highest > lowest * (1.0 + 1e-9):  # nodes in between would coincide
        highest = lowest * (1.0 + 1e-6) + 1e-12
    size = int(nodes * min(max(1.0, np.sqrt(highest)), 4.0))
    found = np.square(np.linspace(np.sqrt(lowest), np.sqrt(highest), size))
    found[0], found[-1] = lowest, highest
    return found


def _ends(stretches: Sequence[Stretch]) -> tuple[float, float]:
    """The least and the largest u of these stretches over contributions in [0, 1]."""
    ends = np.array([part.precisions(np.array([0.0, 1.0])) for part in stretches])
    return float(ends[:, 0].min()), float(ends[:, 1].max())


def near_reached(costs: StepWeights, stops: Sequence[int]) -> StepWeights:
    """The same without nodes that no row reaches: of each rate those from its stop on, and more where rows are few and
    no other part needs the tables.

    What tables say of a node follows from its own u, those of `_BESIDE` nodes on either side, and the largest u. All of
    these stay, so that no bit of what rows cost depends on which nodes are left out.
    """
    if not costs.sampled:
        return costs
    reached, parts = np.zeros(costs.starts[-1], np.bool_), zip(costs.starts, stops, strict=False)
    mark(costs.steps.nodes, reached)
    few = _FEW if costs.examples <= _SEVERAL_PARTS else np.inf
    return costs.on_nodes([_near(np.flatnonzero(reached[start : start + stop]), stop, few) for start, stop in parts])


def of_rows(costs: StepWeights, rows: NDArray[np.intp], stops: Sequence[int]) -> tuple[StepWeights, NDArray[np.intp]]:
    """The costs of some ``rows`` on the nodes that `near_reached` leaves of those before ``stops``, and where they are.

    Rows are copied only where that changes the numbers of their nodes.
    """
    few = len(rows) < _MANY and costs.examples <= _SEVERAL_PARTS
    own = costs.of(rows) if len(costs.sampled) > 1 or few else costs
    if own is costs:
        sampled = tuple(
            replace(p, precisions=p.precisions[:stop]) for p, stop in zip(costs.sampled, stops, strict=True)
        )
        return replace(costs, sampled=sampled), rows
    return near_reached(own, stops), np.arange(len(rows))


def _near(reached: NDArray[np.intp], size: int, few: float) -> NDArray[np.intp]:
    """The places near those ``reached`` where these are less than one in ``few`` of all ``size``; else all of them."""
    around = reached[:, None] + np.arange(-_BESIDE, _BESIDE + 1)
    near = np.union1d(around[(around >= 0) & (around < size)], [size - 2, size - 1])
    return near if len(near) * few <= size else np.arange(size)
