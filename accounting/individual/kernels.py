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

_WINDOW = 4
"""Orders that are evaluated at once for a lower bound."""


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


@helper
def _least_until(total: Array, terms: Array, first: int, step: int, ceiling: float) -> tuple[float, bool]:
    """The least of the odd entries of total + terms from place ``first`` on until one exceeds the ceiling.

    And whether one did. total has two entries for each of terms.
    """
    least, k = np.inf, first
    while 0 <= 2 * k < len(total):
        value = total[2 * k + 1] + terms[k]
        least = min(least, value)
        if value > ceiling:
            return least, True
        k += step
    return least, False


@kernel(GIVEN, NODES, PLACES, GIVEN, TABLE, TABLE, TABLE, TABLE, GIVEN, int64, float64, FOUND_TABLE)
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
    slack: float,
    found: Array,
) -> None:
    """Write found [5, rows]: the least of upper sum + terms, its place, the first upper and lower sum, and the least of
    lower sum + terms.

    Sums as in `sums`, over orders: table [nodes, 2 orders] and plain [2, 2 orders] with the upper and the lower entry
    of each order side by side, terms [orders]. coarse and coarse_plain are the upper entries of the orders 0, stride,
    2 stride, ..., and the last one, and then the lower entry of order 0. The least upper sum is sought among these
    orders and those around the best of them; the least lower sum from there to the first order on either side where it
    exceeds the least upper one by ``slack``, or to the outermost order.
    """
    orders, few = len(terms), coarse.shape[1] - 1
    several, window = np.empty(few + 1), np.empty(2 * max(2 * stride + 1, _WINDOW))
    for row in range(len(ends) - 1):
        at = slice(ends[row], ends[row + 1])
        _sums(weights[at], nodes[at], precision[row], coarse, coarse_plain, 0, several)
        best, nearest = np.inf, 0
        for k in range(few):
            value = several[k] + terms[min(k * stride, orders - 1)]
            if value < best:
                best, nearest = value, k
        left, right = max((nearest - 1) * stride, 0), min((nearest + 1) * stride + 1, orders)
        own = window[: 2 * (right - left)]
        _sums(weights[at], nodes[at], precision[row], table, plain, 2 * left, own)
        best, place = np.inf, left
        for k in range(right - left):
            value = own[2 * k] + terms[left + k]
            if value < best:
                best, place = value, left + k
        ceiling = best + slack
        least, above = _least_until(own, terms[left:], place - left, 1, ceiling)
        more, below = _least_until(own, terms[left:], place - left - 1, -1, ceiling)
        least = min(least, more)
        while right < orders and not above:
            start, right = right, min(right + _WINDOW, orders)
            own = window[: 2 * (right - start)]
            _sums(weights[at], nodes[at], precision[row], table, plain, 2 * start, own)
            more, above = _least_until(own, terms[start:], 0, 1, ceiling)
            least = min(least, more)
        while left > 0 and not below:
            stop, left = left, max(left - _WINDOW, 0)
            own = window[: 2 * (stop - left)]
            _sums(weights[at], nodes[at], precision[row], table, plain, 2 * left, own)
            more, below = _least_until(own, terms[left:], stop - left - 1, -1, ceiling)
            least = min(least, more)
        found[0, row], found[1, row], found[2, row], found[3, row] = best, place, several[0], several[few]
        found[4, row] = least
