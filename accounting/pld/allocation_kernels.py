"""Sums over all pairs of atoms of two laws, compiled by numba.

Only random allocation imports this module, which loads numba and machine code. As in
`dpsweep.accounting.individual.kernels`, nothing is reassociated, and no value of another module is read.
"""

from __future__ import annotations

import numpy as np
from numba import float64, types
from numpy.typing import NDArray

from dpsweep.accounting.machine_code import helper, kernel

Array = NDArray[np.float64]

_GIVEN = types.Array(float64, 1, "C", readonly=True)
_FOUND = types.Array(float64, 1, "C")


@helper
def _place_row(
    value: float,
    mass: float,
    others: Array,
    of_others: Array,
    begin: int,
    times: float,
    first: int,
    points: Array,
    placed: Array,
    sums: Array,
) -> int:
    """Add the sums of one atom and all others from ``begin`` on; return the cell of the first of them.

    The others after the first count ``times`` as much. first: a cell at or below that of the first sum.
    """
    last = len(points)
    own = value + others[begin]
    while first < last and own >= points[first]:
        first += 1
    cell, inside, total = first, 0.0, 0.0
    for right in range(begin, len(others)):
        own = value + others[right]
        if cell < last and own >= points[cell]:
            placed[cell] += inside
            sums[cell] += total
            inside, total = 0.0, 0.0
            cell += 1
            while cell < last and own >= points[cell]:
                cell += 1
        weight = mass * of_others[right]
        if right > begin:
            weight *= times
        inside += weight
        total += weight * own
    placed[cell] += inside
    sums[cell] += total
    return first


@kernel(_GIVEN, _GIVEN, _GIVEN, _FOUND, _FOUND)
def place_own_pairs(values: Array, masses: Array, points: Array, placed: Array, sums: Array) -> None:
    """Add the law of the sum of two independent variables with one law to the cells of a grid.

    values [atoms]: ascending, with ``masses``. points [points]: ascending. placed, sums [points + 1]: masses, and
    masses times values, of sums that are at or above so many points. Each pair of different atoms is met once, and
    counted twice.
    """
    first = 0
    for left in range(len(values)):
        first = _place_row(values[left], masses[left], values, masses, left, 2.0, first, points, placed, sums)


@kernel(_GIVEN, _GIVEN, _GIVEN, _GIVEN, _GIVEN, _FOUND, _FOUND)
def place_pairs(
    values: Array, masses: Array, others: Array, of_others: Array, points: Array, placed: Array, sums: Array
) -> None:
    """Add the law of the sum of two independent variables to the cells of a grid, as `place_own_pairs` does.

    values, others [atoms]: ascending, with masses.
    """
    first = 0
    for left in range(len(values)):
        first = _place_row(values[left], masses[left], others, of_others, 0, 1.0, first, points, placed, sums)
