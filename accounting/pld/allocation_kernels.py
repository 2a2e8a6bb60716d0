"""Sums over all pairs of atoms of two laws, compiled by numba.

Only random allocation imports this module, which loads numba and machine code. As in
`dpsweep.accounting.individual.kernels`, nothing is reassociated, and no value of another module is read.
"""

from __future__ import annotations

import numpy as np
from numba import float64, types
from numpy.typing import NDArray

from dpsweep.accounting.machine_code import kernel

Array = NDArray[np.float64]

_GIVEN = types.Array(float64, 1, "C", readonly=True)
_FOUND = types.Array(float64, 1, "C")


@kernel(_GIVEN, _GIVEN, _GIVEN, _FOUND, _FOUND)
def place_means(values: Array, masses: Array, points: Array, placed: Array, sums: Array) -> None:
    """Add the law of the mean of two independent variables with one law to the cells of a grid.

    values [atoms]: ascending, with ``masses``. points [points]: ascending. placed, sums [points + 1]: masses, and
    masses times values, of what is at or above so many points.
    """
    last, first = len(points), 0
    for left in range(len(values)):
        value, mass = values[left], masses[left]
        own = 0.5 * (value + values[left])
        while first < last and own >= points[first]:
            first += 1
        cell, inside, total = first, 0.0, 0.0
        for right in range(left, len(values)):
            own = 0.5 * (value + values[right])
            if cell < last and own >= points[cell]:
                placed[cell] += inside
                sums[cell] += total
                inside, total = 0.0, 0.0
                cell += 1
                while cell < last and own >= points[cell]:
                    cell += 1
            weight = mass * masses[right]
            if right > left:
                weight *= 2.0
            inside += weight
            total += weight * own
        placed[cell] += inside
        sums[cell] += total


@kernel(_GIVEN, _GIVEN, _GIVEN, _GIVEN, _GIVEN, _FOUND, _FOUND)
def place_sums(
    values: Array, masses: Array, others: Array, of_others: Array, points: Array, placed: Array, sums: Array
) -> None:
    """Add the law of the sum of two independent variables to the cells of a grid, as `place_means` does.

    values, others [atoms]: ascending, with masses.
    """
    last, first = len(points), 0
    for left in range(len(values)):
        value, mass = values[left], masses[left]
        own = value + others[0]
        while first < last and own >= points[first]:
            first += 1
        cell, inside, total = first, 0.0, 0.0
        for right in range(len(others)):
            own = value + others[right]
            if cell < last and own >= points[cell]:
                placed[cell] += inside
                sums[cell] += total
                inside, total = 0.0, 0.0
                cell += 1
                while cell < last and own >= points[cell]:
                    cell += 1
            weight = mass * of_others[right]
            inside += weight
            total += weight * own
        placed[cell] += inside
        sums[cell] += total
