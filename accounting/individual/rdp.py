"""Individual accounting by Renyi DP: the product of step weights and the RDP of each node."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from accounting.individual.contributions import Array, RecordedContributions, SampledSteps, StepWeights, spread_linearly
from accounting.renyi import ORDERS, epsilon_improved, pure_rdp, sampled_gaussian_rdp

_TABLE_ERROR = 4e-9
"""Relative error allowed for a table entry, above that of `accounting.renyi`; subtracted for the lower bound."""


def rdp_epsilons(contributions: RecordedContributions, delta: float) -> tuple[Array, Array]:
    """Upper and lower epsilon [rows] at ``delta`` by the improved conversion; covers both directions of add/remove.

    Spreading steps over nodes can only increase upper, because RDP is convex in a step's precision
    (`accounting.individual.contributions`).
    """
    costs = contributions.costs(spread_linearly)
    upper = _rdp(costs, [_table(part) for part in costs.sampled])
    lower = _rdp(costs, [_lower_table(part) for part in costs.sampled])
    return epsilon_improved(upper, delta), epsilon_improved(lower, delta)


def rdp_upper(costs: StepWeights) -> Array:
    """Upper bound on the RDP of every example at `ORDERS`; shape [rows, orders]."""
    return _rdp(costs, [_table(part) for part in costs.sampled])


def _rdp(costs: StepWeights, tables: Sequence[Array]) -> Array:
    total = costs.precision[:, None] * (0.5 * ORDERS)
    for epsilon in costs.pure:
        total += pure_rdp(epsilon)
    for part, table in zip(costs.sampled, tables, strict=True):
        total += part.weights @ table
    return total


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
