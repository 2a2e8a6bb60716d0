"""Loops over the steps, nodes and orders of single examples, compiled by numba.

Each row is computed alone, in one fixed order, so its bits depend neither on the other rows nor on threads. Nothing is
reassociated (no fastmath). Importing this module loads numba and the machine code, or compiles it: only code that
accounts examples imports it. Functions compiled here call nothing that is defined elsewhere and read no value of
another module, because numba would not notice that these changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numba import boolean, float64, int32, int64, types
from numpy.typing import NDArray

Array = NDArray[np.float64]
Function = TypeVar("Function", bound=Callable[..., Any])

GIVEN = types.Array(float64, 1, "C", readonly=True)
TABLE = types.Array(float64, 2, "C", readonly=True)
NODES = types.Array(int32, 1, "C", readonly=True)
PLACES = types.Array(int64, 1, "C", readonly=True)
FOUND = types.Array(float64, 1, "C")
FOUND_TABLE = types.Array(float64, 2, "C")

_LANES = 16
"""Rows that are spread at once."""


def helper(function: Function) -> Function:
    """Compiled into each of its callers. Division by zero gives infinities and NaN, as numpy does."""
    return cast(Function, numba.njit(error_model="numpy", nogil=True)(function))


def kernel(*arguments: types.Type) -> Callable[[Function], Function]:
    """Compiled once per machine for arguments of these types, without the lock of the interpreter.

    The code is stored beside this file, or else in the user's cache folder. Where neither can be written, each process
    compiles anew. One type per function: with several, two processes could store one's code under the other's name.
    """

    def compiled(function: Function) -> Function:
        signature = [types.void(*arguments)]
        try:
            return cast(Function, numba.njit(signature, error_model="numpy", nogil=True, cache=True)(function))
        except RuntimeError as error:
            if "no locator" not in str(error):
                raise
            return cast(Function, numba.njit(signature, error_model="numpy", nogil=True)(function))

    return compiled


@kernel(TABLE, TABLE, int64, FOUND, types.Array(int32, 1, "C"), types.Array(int64, 1, "C"))
def spread(
    values: Array, stretches: Array, size: int, weights: Array, nodes: NDArray[np.int32], ends: NDArray[np.int64]
) -> None:
    """Split steps between two nodes each; see `accounting.individual.spreading`.

    values [snapshots, rows]. stretches [stretches, 9]: the column, steps, slope, offset and side of `Stretch`, and of
    its nodes 1 / spacing, the first root / spacing, how many there are and the number of the first. size: all nodes.
    Written: weights and nodes, the rows one after the other without zeros in the order of the nodes; ends[r + 1], where
    row r ends. weights and nodes have room for one more entry than there can be.
    """
    count, rows = len(stretches), values.shape[1]
    cells, above = np.empty((count, _LANES), np.int32), np.empty((count, _LANES))
    dense, filled = np.zeros(size), 0
    for start in range(0, rows, _LANES):
        lanes = min(_LANES, rows - start)
        for s in range(count):
            fields = stretches[s]
            own, steps, slope, offset = values[int(fields[0]), start : start + lanes], fields[1], fields[2], fields[3]
            side, per_spacing, origin = fields[4], fields[5], fields[6]
            top, first = int(fields[7]) - 2, int(fields[8])
            for lane in range(lanes):
                root = (min(own[lane], 1.0) + offset) * slope
                if side > 0.0:
                    root = np.sqrt(root * root + side)
                root = root * per_spacing - origin
                cell = min(max(int(root), 0), top)
                part = min(max(root - cell, 0.0), 1.0)
                twice = 2.0 * cell + 2.0 * origin
                cells[s, lane] = first + cell
                above[s, lane] = (twice + part) * part / (twice + 1.0) * steps
        for lane in range(lanes):
            low, high = size, -1
            for s in range(count):
                cell, part = cells[s, lane], above[s, lane]
                dense[cell] += stretches[s, 1] - part
                dense[cell + 1] += part
                low, high = min(low, cell), max(high, cell + 1)
            for node in range(low, high + 1):
                weights[filled], nodes[filled] = dense[node], node
                filled += dense[node] != 0.0
                dense[node] = 0.0
            ends[start + lane + 1] = filled


@kernel(NODES, types.Array(boolean, 1, "C"))
def mark(nodes: NDArray[np.int32], reached: NDArray[np.bool_]) -> None:
    """Set reached [all nodes] at the given ``nodes``."""
    for i in range(len(nodes)):
        reached[nodes[i]] = True


@kernel(NODES, PLACES, PLACES, types.Array(int64, 2, "C"))
def reach(
    nodes: NDArray[np.int32], ends: NDArray[np.int64], starts: NDArray[np.int64], found: NDArray[np.int64]
) -> None:
    """Write found [parts, rows]: the last node of each row in each part, counted from ``starts`` [parts + 1], or 0."""
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
    """Write into ``total`` the sums of one row in its columns of the table from ``first`` on."""
    fixed, gaussian = plain[0, first:], plain[1, first:]
    for j in range(len(total)):
        total[j] = fixed[j] + precision * gaussian[j]
    whole = len(weights) - len(weights) % 4
    for i in range(0, whole, 4):
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
    """Write into found [rows, columns] plain[0] + precision plain[1] + weights @ table for these ``rows``.

    weights and nodes: the entries of all rows, row r from ends[r] to ends[r + 1]; precision [all rows]; table [nodes,
    columns], plain [2, columns].
    """
    for i in range(len(rows)):
        at = slice(ends[rows[i]], ends[rows[i] + 1])
        _sums(weights[at], nodes[at], precision[rows[i]], table, plain, 0, found[i])


@kernel(GIVEN, NODES, PLACES, GIVEN, TABLE, TABLE, TABLE, TABLE, GIVEN, int64, FOUND_TABLE)
def best_orders(
    weights: Array,
    nodes: NDArray[np.int32],
    ends: NDArray[np.int64],
    precision: Array,
    coarse: Array,
    coarse_plain: Array,
    table: Array,
    plain: Array,
    terms: Array,
    stride: int,
    found: Array,
) -> None:
    """Write found [4, rows]: the least of sum + terms, its place, and the first and the last of the coarse sums.

    Sums as in `sums`, over orders: table [nodes, orders], plain [2, orders], terms [orders]. coarse and coarse_plain
    are their columns 0, stride, 2 stride, ..., and the last one, and then one that is not searched. Searched are these
    orders and those around the best of them.
    """
    last, few = table.shape[1] - 1, coarse.shape[1] - 1
    several, window = np.empty(few + 1), np.empty(2 * stride + 1)
    for row in range(len(ends) - 1):
        at = slice(ends[row], ends[row + 1])
        _sums(weights[at], nodes[at], precision[row], coarse, coarse_plain, 0, several)
        best, nearest = np.inf, 0
        for k in range(few):
            value = several[k] + terms[min(k * stride, last)]
            if value < best:
                best, nearest = value, k
        start, stop = max((nearest - 1) * stride, 0), min((nearest + 1) * stride, last)
        total = window[: stop - start + 1]
        _sums(weights[at], nodes[at], precision[row], table, plain, start, total)
        best, place = np.inf, start
        for k in range(len(total)):
            value = total[k] + terms[start + k]
            if value < best:
                best, place = value, start + k
        found[0, row], found[1, row], found[2, row], found[3, row] = best, place, several[0], several[few]


@helper
def _least_until(total: Array, terms: Array, first: int, step: int, ceiling: float) -> tuple[float, bool]:
    """The least of total + terms from the ``first`` place on until one exceeds the ceiling, and whether one did."""
    least, k = np.inf, first
    while 0 <= k < len(total):
        value = total[k] + terms[k]
        least = min(least, value)
        if value > ceiling:
            return least, True
        k += step
    return least, False


@kernel(GIVEN, NODES, PLACES, GIVEN, TABLE, TABLE, GIVEN, PLACES, GIVEN, int64, FOUND)
def least_sums(
    weights: Array,
    nodes: NDArray[np.int32],
    ends: NDArray[np.int64],
    precision: Array,
    table: Array,
    plain: Array,
    terms: Array,
    place: NDArray[np.int64],
    ceiling: Array,
    width: int,
    found: Array,
) -> None:
    """Write found [rows]: the least of sum + terms in a window of orders.

    The window of a row reaches from its ``place`` to the first order on either side where sum + terms exceeds the row's
    ``ceiling``, or to the outermost order. ``width`` orders are evaluated on either side, and then as many at once.
    """
    orders, total = table.shape[1], np.empty(2 * width)
    for row in range(len(ends) - 1):
        at, most = slice(ends[row], ends[row + 1]), ceiling[row]
        left, right = max(place[row] - width, 0), min(place[row] + width, orders)
        own = total[: right - left]
        _sums(weights[at], nodes[at], precision[row], table, plain, left, own)
        least, above = _least_until(own, terms[left:], place[row] - left, 1, most)
        more, below = _least_until(own, terms[left:], place[row] - left - 1, -1, most)
        least = min(least, more)
        while right < orders and not above:
            start, right = right, min(right + width, orders)
            own = total[: right - start]
            _sums(weights[at], nodes[at], precision[row], table, plain, start, own)
            more, above = _least_until(own, terms[start:], 0, 1, most)
            least = min(least, more)
        while left > 0 and not below:
            stop, left = left, max(left - width, 0)
            own = total[: stop - left]
            _sums(weights[at], nodes[at], precision[row], table, plain, left, own)
            more, below = _least_until(own, terms[left:], len(own) - 1, -1, most)
            least = min(least, more)
        found[row] = least
