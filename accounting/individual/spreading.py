"""Spreads the steps of single examples over a few nodes of effective precision.

This can only increase their Renyi divergence; `dpsweep.accounting.individual.contributions` has the proof.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from dpsweep.accounting.individual.contributions import Array, SampledNodes, SparseRows, StepsLaw, StepWeights, Stretch
from dpsweep.accounting.individual.kernels import mark_nodes, split_steps, sums

NODES = 256
"""Nodes per sampling rate, uniform in sqrt(u). If the largest sqrt(u) is above 1, times that, up to 4 times as many."""

_BESIDE = 2
"""Number of neighbours on either side that a node's table entries depend on."""

_FEW = 4
"""Tables cover only the nodes in use if fewer than one in 4 is; else all nodes, so that other rows can use them."""

_MANY = 256
"""Blocks with at least this many rows use most nodes, so no node is left out for them."""

_SEVERAL_PARTS = 1 << 17
"""A data set with more examples has several parts, whose rows together use all nodes."""


def spread_linearly(
    sampled: Mapping[StepsLaw, tuple[Stretch, ...]], values: Array, nodes: int = NODES
) -> tuple[tuple[SampledNodes, ...], SparseRows]:
    """Return the nodes of each sampling rate, and the weights on them: each step is split between the two nodes beside
    its u.

    values [snapshots, rows]: contributions. `nodes`: number of nodes, as `NODES`. Nodes are (x_0 + k h)^2, so a u with
    root x_0 + (k + t) h lies at t (2 (k + x_0 / h) + t) / (2 (k + x_0 / h) + 1) of the way from node k to the next.
    Rounding moves u by 1e-14 of itself, far below `ROUND_UP`.
    """
    parts = tuple(SampledNodes(law, _nodes(stretches, nodes)) for law, stretches in sampled.items())
    first, fields = 0, [np.empty((0, 9))]
    for part, stretches in zip(parts, sampled.values(), strict=True):
        fields.append(_fields(stretches, nodes, first))
        first += len(part.precisions)
    stretches_of_all = np.concatenate(fields)
    rows = values.shape[1]
    entries = rows * min(2 * len(stretches_of_all), first) + 1
    weights, places, ends = np.empty(entries), np.empty(entries, np.int32), np.zeros(rows + 1, np.int64)
    split_steps(values, stretches_of_all, first, weights, places, ends)
    return parts, SparseRows(weights[: ends[-1]], places[: ends[-1]], ends)


@functools.lru_cache(maxsize=16)
def _fields(stretches: tuple[Stretch, ...], nodes: int, first: int) -> Array:
    """Return the argument ``stretches`` [stretches, 9] of `kernels.split_steps` for nodes from index ``first`` on."""
    roots = np.sqrt(_nodes(stretches, nodes))
    spacing = (roots[-1] - roots[0]) / (len(roots) - 1)
    grid = (1.0 / spacing, roots[0] / spacing, len(roots), first)
    return np.array([(part.column, part.steps, part.slope, part.offset, part.side, *grid) for part in stretches])


def weighted_sums(costs: StepWeights, table: Array, plain: Array, rows: NDArray[np.intp] | None = None) -> Array:
    """Return the sums [rows, columns] of a table [nodes, columns] over the steps of each example, or of some ``rows``.

    plain [2, columns] is added: the first row once, the second row times the precision of unsampled Gaussians.
    """
    chosen = np.arange(len(costs.precision)) if rows is None else rows
    found = np.empty((len(chosen), table.shape[1]))
    sums(costs.steps.weights, costs.steps.nodes, costs.steps.ends, costs.precision, table, plain, chosen, found)
    return found


def stacked(tables: Sequence[Array], columns: int) -> Array:
    """Return the tables [nodes, columns] of all laws, one after the other, as `weighted_sums` takes them."""
    return np.ascontiguousarray(tables[0] if len(tables) == 1 else np.concatenate([np.empty((0, columns)), *tables]))


@functools.lru_cache(maxsize=16)
def _nodes(stretches: tuple[Stretch, ...], nodes: int) -> Array:
    """Return nodes that cover u for all contributions in [0, 1], so that they do not depend on the block of rows."""
    lowest, highest = _ends(stretches)
    if not highest > lowest * (1.0 + 1e-9):  # nodes in between would coincide
        highest = lowest * (1.0 + 1e-6) + 1e-12
    size = int(nodes * min(max(1.0, np.sqrt(highest)), 4.0))
    found = np.square(np.linspace(np.sqrt(lowest), np.sqrt(highest), size))
    found[0], found[-1] = lowest, highest
    return found


def _ends(stretches: Sequence[Stretch]) -> tuple[float, float]:
    """Return the least and the largest u of these stretches over contributions in [0, 1]."""
    ends = np.array([part.precisions(np.array([0.0, 1.0])) for part in stretches])
    return float(ends[:, 0].min()), float(ends[:, 1].max())


def near_reached(costs: StepWeights, stops: Sequence[int]) -> StepWeights:
    """Return the step weights without unused nodes: of each rate those from its stop on, and more if rows are few.

    More are left out only if no other part of the data set needs the tables.
    A node's table entries depend on its own u, on the u of `_BESIDE` nodes on either side, and on the largest u. All of
    these are kept, so no bit of the rows' costs depends on which nodes are left out.
    """
    if not costs.sampled:
        return costs
    reached, parts = np.zeros(costs.starts[-1], np.bool_), zip(costs.starts, stops, strict=False)
    mark_nodes(costs.steps.nodes, reached)
    few = _FEW if costs.examples <= _SEVERAL_PARTS else np.inf
    return costs.on_nodes([_near(np.flatnonzero(reached[start : start + stop]), stop, few) for start, stop in parts])


def of_rows(costs: StepWeights, rows: NDArray[np.intp], stops: Sequence[int]) -> tuple[StepWeights, NDArray[np.intp]]:
    """Return the costs of some ``rows`` on the nodes before ``stops`` that `near_reached` keeps, and the rows' places
    in them.

    Rows are copied only if their nodes are renumbered.
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
    """Return indices near those ``reached``, and the last two, if at most one in ``few`` of ``size`` are; or all."""
    around = reached[:, None] + np.arange(-_BESIDE, _BESIDE + 1)
    near = np.union1d(around[(around >= 0) & (around < size)], [size - 2, size - 1])
    return near if len(near) * few <= size else np.arange(size)
