"""Individual accounting by Renyi DP: a matrix product of step weights and the RDP of each node."""

from __future__ import annotations

import numpy as np

from accounting.contributions import Array, Costs, SampledSteps
from accounting.renyi import ORDERS, pure_rdp, sampled_gaussian_rdp

_TABLE_ERROR = 4e-9
"""Relative error of a table entry, twice that of `accounting.renyi`; subtracted on the way down."""


def rdp_epsilons(costs: Costs, delta: float) -> tuple[Array, Array]:
    """Upper and lower epsilon [rows] at ``delta`` by the improved conversion; covers both directions of add/remove.

    upper bounds exact evaluation from above because RDP is convex in a step's precision (`accounting.contributions`).
    """
    upper, lower = rdp_curves(costs)
    return epsilons_improved(upper, delta), epsilons_improved(lower, delta)


def rdp_curves(costs: Costs) -> tuple[Array, Array]:
    """RDP of every example from above and below, at `ORDERS`; shape [rows, orders]."""
    unsampled = costs.precision[:, None] * (0.5 * ORDERS)
    for epsilon in costs.pure:
        unsampled = unsampled + pure_rdp(epsilon)
    upper, lower = unsampled.copy(), unsampled
    for part in costs.sampled:
        above, below = _node_tables(part)
        upper += part.weights @ above
        lower = lower + part.weights @ below
    return upper, lower


def epsilons_improved(rdp: Array, delta: float) -> Array:
    """Epsilon of each row of RDP values [rows, orders] (Canonne, Kamath and Steinke 2020, Proposition 12).

    0 where delta already covers the total variation distance (Bretagnolle-Huber).
    """
    offsets = np.log1p(-1.0 / ORDERS) - np.log(delta * ORDERS) / (ORDERS - 1.0)
    epsilons = np.maximum(np.min(rdp + offsets, axis=1, initial=np.inf), 0.0)
    return np.where(-np.expm1(-np.min(rdp, axis=1, initial=np.inf)) < delta**2, 0.0, epsilons)


def _node_tables(part: SampledSteps) -> tuple[Array, Array]:
    """RDP at each node, and the same less the most by which linear spreading beside that node can overshoot.

    Between two nodes a convex function lies below its chord and above the extensions of the neighbouring chords, so
    with slopes a <= b <= c the chord overshoots by at most width (b - a) (c - b) / (c - a).
    """
    beyond = 2.0 * part.precisions[-1] - part.precisions[-2]
    nodes = np.append(part.precisions, beyond)
    rows = [sampled_gaussian_rdp(part.sample_rate, float(u**-0.5)) if u > 0.0 else np.zeros_like(ORDERS) for u in nodes]
    above = np.array(rows)
    widths = np.diff(nodes)[:, None]
    slopes = np.vstack([np.zeros_like(ORDERS), np.diff(above, axis=0) / widths])
    rises = np.maximum(np.diff(slopes, axis=0), 0.0)
    before, after = rises[:-1], rises[1:]
    overshoot = widths[:-1] * before * after / np.maximum(before + after, np.finfo(np.float64).tiny)
    beside = np.maximum(np.pad(overshoot, ((1, 0), (0, 0))), np.pad(overshoot, ((0, 1), (0, 0))))
    return above[:-1], np.maximum(above[:-1] * (1.0 - _TABLE_ERROR) - beside, 0.0)
