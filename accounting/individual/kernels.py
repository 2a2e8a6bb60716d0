"""Loops over the steps, nodes and orders of single examples, compiled by numba.

Each row is computed alone, in one fixed order, so its bits depend neither on the other rows nor on threads. Nothing is
reassociated (no fastmath). Importing this module loads numba and the machine code, or compiles it: only code that
accounts examples imports it. Functions compiled here call no function and read no value of another module, because
numba's cache would not notice a change there.
"""

from __future__ import annotations

import numpy as np
from numba import boolean, float64, int32, int64, types
from numpy.typing import NDArray

from dpsweep.accounting.machine_code import helper, kernel

Array = NDArray[np.float64]

GIVEN = types.Array(float64, 1, "C", readonly=True)
TABLE = types.Array(float64, 2, "C", readonly=True)
NODES = types.Array(int32, 1, "C", readonly=True)
PLACES = types.Array(int64, 1, "C", readonly=True)
FOUND = types.Array(float64, 1, "C")
FOUND_TABLE = types.Array(float64, 2, "C")

_LANES = 16
"""Number of rows that `split_steps` processes at once."""

_WINDOW = 16
"""Number of neighbouring orders that `best_orders` evaluates at once."""


@kernel(TABLE, TABLE, int64, FOUND, types.Array(int32, 1, "C"), types.Array(int64, 1, "C"))
def split_steps(
    values: Array, stretches: Array, size: int, weights: Array, nodes: NDArray[np.int32], ends: NDArray[np.int64]
) -> None:
    """Split steps between two nodes each; see `dpsweep.accounting.individual.spreading`.

    values [snapshots, rows]. stretches [stretches, 9]: column, steps, slope, offset and side of `Stretch`; then of its
    nodes 1 / spacing, first root / spacing, their number and the index of the first. `size`: number of all nodes.
    Writes weights and nodes, row after row, nodes ascending, zeros left out; and ends[r + 1], where row r ends. Both
    must have room for one entry more than can occur.
    """
    count, rows = len(stretches), values.shape[1]
    cells, above = np.empty((count, _LANES)), np.empty((count, _LANES))
    dense, filled = np.zeros(size), 0
    for start in range(0, rows, _LANES):
        lanes = min(_LANES, rows - start)
        for s in range(count):
            fields = stretches[s]
            own, steps, slope, offset = values[int(fields[0]), start : start + lanes], fields[1], fields[2], fields[3]
            side, per_spacing, origin = fields[4], fields[5], fields[6]
            top, first = fields[7] - 2.0, fields[8]
            for lane in range(lanes):
                root = (min(own[lane], 1.0) + offset) * slope
                if side > 0.0:
                    root = np.sqrt(root * root + side)
                root = root * per_spacing - origin
                cell = min(max(np.floor(root), 0.0), top)  # a loop with whole numbers would not vectorise
                part = min(max(root - cell, 0.0), 1.0)
                twice = 2.0 * cell + 2.0 * origin
                cells[s, lane] = first + cell
                above[s, lane] = (twice + part) * part / (twice + 1.0) * steps
        for lane in range(lanes):
            low, high = size, -1
            for s in range(count):
                cell, part = int(cells[s, lane]), above[s, lane]
                dense[cell] += stretches[s, 1] - part
                dense[cell + 1] += part
                low, high = min(low, cell), max(high, cell + 1)
            for node in range(low, high + 1):
                weights[filled], nodes[filled] = dense[node], node
                filled += dense[node] != 0.0
            dense[low : high + 1] = 0.0
            ends[start + lane + 1] = filled


@kernel(NODES, types.Array(boolean, 1, "C"))
def mark_nodes(nodes: NDArray[np.int32], reached: NDArray[np.bool_]) -> None:
    """Set reached [all nodes] at the given ``nodes``."""
    for i in range(len(nodes)):
        reached[nodes[i]] = True


@kernel(NODES, PLACES, PLACES, types.Array(int64, 2, "C"))
def reach(
    nodes: NDArray[np.int32], ends: NDArray[np.int64], starts: NDArray[np.int64], found: NDArray[np.int64]
) -> None:
    """Write found [parts, rows]: the last node of each row in each part (sampling rate), or 0 if it has none there.

    Nodes are counted from the first of their part; ``starts`` [parts + 1] has the indices of these.
    """
    for row in range(len(ends) - 1):
        i = ends[row]
        for part in range(len(starts) - 1):
            found[part, row] = 0
            while i < ends[row + 1] and nodes[i] < starts[part + 1]:
                found[part, row] = nodes[i] - starts[part]
                i += 1


@helper
def _sums(
    weights: Array, nodes: NDArray[np.int32], precision: float, table: Array, plain: Array, first: int, total: Array
) -> None:
    """Write the sums of one row into ``total``, for the table's columns from ``first`` on."""
    fixed, gaussian = plain[0, first:], plain[1, first:]
    for j in range(len(total)):
        total[j] = fixed[j] + precision * gaussian[j]
    eights, whole = len(weights) - len(weights) % 8, len(weights) - len(weights) % 4
    for i in range(0, eights, 8):
        w0, w1, w2, w3 = weights[i], weights[i + 1], weights[i + 2], weights[i + 3]
        w4, w5, w6, w7 = weights[i + 4], weights[i + 5], weights[i + 6], weights[i + 7]
        t0, t1 = table[nodes[i], first:], table[nodes[i + 1], first:]
        t2, t3 = table[nodes[i + 2], first:], table[nodes[i + 3], first:]
        t4, t5 = table[nodes[i + 4], first:], table[nodes[i + 5], first:]
        t6, t7 = table[nodes[i + 6], first:], table[nodes[i + 7], first:]
        for j in range(len(total)):
            total[j] = (total[j] + (w0 * t0[j] + w1 * t1[j] + w2 * t2[j] + w3 * t3[j])) + (
                w4 * t4[j] + w5 * t5[j] + w6 * t6[j] + w7 * t7[j]
            )
    for i in range(eights, whole, 4):
        w0, w1, w2, w3 = weights[i], weights[i + 1], weights[i + 2], weights[i + 3]
        t0, t1 = table[nodes[i], first:], table[nodes[i + 1], first:]
        t2, t3 = table[nodes[i + 2], first:], table[nodes[i + 3], first:]
        for j in range(len(total)):
            total[j] += w0 * t0[j] + w1 * t1[j] + w2 * t2[j] + w3 * t3[j]
    for i in range(whole, len(weights)):
        weight, own = weights[i], table[nodes[i], first:]
        for j in range(len(total)):
            total[j] += weight * own[j]


@kernel(GIVEN, NODES, PLACES, GIVEN, TABLE, TABLE, PLACES, FOUND_TABLE)
def sums(
    weights: Array,
    nodes: NDArray[np.int32],
    ends: NDArray[np.int64],
    precision: Array,
    table: Array,
    plain: Array,
    rows: NDArray[np.int64],
    found: Array,
) -> None:
    """Write found [rows, columns]: plain[0] + precision plain[1] + weights @ table for these ``rows``. ``weights`` and
    ``nodes``: the entries of all rows, row r from ends[r] to ends[r + 1]; precision [all rows]; table [nodes, columns],
    plain [2, columns].
    """
    for i in range(len(rows)):
        at = slice(ends[rows[i]], ends[rows[i] + 1])
        _sums(weights[at], nodes[at], precision[rows[i]], table, plain, 0, found[i])


@helper
def _least(
    weights: Array,
    nodes: NDArray[np.int32],
    precision: float,
    table: Array,
    plain: Array,
    terms: Array,
    best: float,
    place: int,
    total: Array,
) -> tuple[float, int]:
    """Return the least sum + term of one row and its order, sought around the order ``place``, whose value is ``best``.

    The window of orders grows until the least lies inside it or at the first or last order. ``total`` is overwritten.
    """
    orders = len(terms)
    left = right = min(max(place - _WINDOW // 2 + 1, 0), orders - _WINDOW)
    while left == right or (place == left and left > 0) or (place == right - 1 and right < orders):
        falls_to_left = place == left and left < right
        start = max(left - _WINDOW, 0) if falls_to_left else right
        stop = left if falls_to_left else min(right + _WINDOW, orders)
        _sums(weights, nodes, precision, table, plain, start, total[start:stop])
        left, right = min(left, start), max(right, stop)
        for k in range(start, stop):
            value = total[k] + terms[k]
            if value < best:
                best, place = value, k
    return best, place


@kernel(GIVEN, NODES, PLACES, GIVEN, TABLE, TABLE, PLACES, TABLE, TABLE, GIVEN, FOUND_TABLE)
def best_orders(
    weights: Array,
    nodes: NDArray[np.int32],
    ends: NDArray[np.int64],
    precision: Array,
    coarse: Array,
    coarse_plain: Array,
    places: NDArray[np.int64],
    table: Array,
    plain: Array,
    terms: Array,
    found: Array,
) -> None:
    """Find the best Renyi order of each row.

    Writes found [3, rows]: the least of sum + terms; its index; the sum at the first order. Sums are as in `sums`, one
    per order: table [nodes, orders], plain [2, orders], terms [orders]. coarse and coarse_plain have the entries of the
    orders with indices ``places``, the first of them 0.

    The least sum is sought among the coarse orders, then around the best of them until it falls no further on either
    side.
    """
    orders, few = len(terms), len(places)
    several, sums_of, at_few = np.empty(few), np.empty(orders), terms[places]
    for row in range(len(ends) - 1):
        at = slice(ends[row], ends[row + 1])
        own, own_nodes, own_precision = weights[at], nodes[at], precision[row]
        _sums(own, own_nodes, own_precision, coarse, coarse_plain, 0, several)
        best, place = np.inf, 0
        for k in range(few):
            value = several[k] + at_few[k]
            if value < best:
                best, place = value, places[k]
        best, place = _least(own, own_nodes, own_precision, table, plain, terms, best, place, sums_of)
        found[0, row], found[1, row], found[2, row] = best, place, several[0]
