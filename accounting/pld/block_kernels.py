"""Sums of two laws on grids of blocks, compiled by numba: see `dpsweep.accounting.pld.allocation_blocks`.

Only random allocation imports this module, which loads numba and machine code. Nothing is reassociated.
"""

from __future__ import annotations

import numpy as np
from numba import boolean, float64, int64, types
from numpy.typing import NDArray

from dpsweep.accounting.machine_code import helper, kernel

Array = NDArray[np.float64]
Tables = NDArray[np.float64]

_GIVEN = types.Array(float64, 1, "C", readonly=True)
_FOUND = types.Array(float64, 1, "C")
_TABLES = types.Array(float64, 2, "C")
_STEPS = 2.0 ** np.arange(128)
"""Distances of points in blocks, in units; a table takes less time than powers."""
_AT_ONCE = 4
"""Points of one law that `_add_products` pairs with all of the other at a time, to load and store sums less often."""
_NEAREST = 8
"""Most points whose mass is pooled with that of one cell."""
_MOST = 0.99
"""Largest share of a point's mass that is pooled with another cell, so that what is left keeps its digits."""

_SURELY = 1.0 - 1e-9
"""Factor on a mass that must suffice after rounding, too."""


@helper
def _from_below(masses: Array, offsets: Array, gaps: Array, at: int) -> bool:
    """Pool a cell whose mean is above its point with mass of the cell below; return whether that has enough."""
    below = masses[at - 1] if at > 0 else 0.0
    if not below > 0.0:
        return False
    needed = offsets[at] / (gaps[at - 1] - offsets[at - 1] / below)
    if not needed <= _MOST * below:
        return False
    masses[at - 1] -= needed
    offsets[at - 1] *= 1.0 - needed / below
    masses[at] += needed
    offsets[at] = 0.0
    return True


@helper
def _from_above(masses: Array, offsets: Array, gaps: Array, at: int) -> bool:
    """Pool a cell whose mean is below its point with mass on the next points above; return whether they have enough."""
    last, left, distance = min(at + _NEAREST, len(masses) - 1), -offsets[at], 0.0
    for other in range(at + 1, last + 1):
        distance += gaps[other - 1]
        left -= _MOST * masses[other] * distance
        if left <= 0.0:
            break
    if left > 0.0:
        return False
    left, distance = -offsets[at], 0.0
    for other in range(at + 1, last + 1):
        distance += gaps[other - 1]
        taken = min(left / distance, _MOST * masses[other])
        masses[other] -= taken
        masses[at] += taken
        left -= taken * distance
        if left <= 0.0:
            break
    offsets[at] = 0.0
    return True


@helper
def _share_below(masses: Array, offsets: Array, gaps: Array, at: int) -> float:
    """Return the share of a cell that may be merged into the one below, so that mass below that suffices to pool it."""
    room = -offsets[at - 1]
    if at > 1 and masses[at - 2] > 0.0:
        room += _MOST * (masses[at - 2] * gaps[at - 2] - offsets[at - 2])
    return float(min(1.0, _SURELY * max(room, 0.0) / (offsets[at] + masses[at] * gaps[at - 1])))


@kernel(_FOUND, _FOUND, _GIVEN, boolean)
def pool(masses: Array, offsets: Array, gaps: Array, rises: bool) -> None:
    """Pool the mass of each cell with mass of a neighbour, so that all of it lies on the cell's point.

    Offsets [points] are mass times the distance of its mean above the point, gaps [points - 1] lie between points.
    First the means above their points are pooled with mass from below, wherever that lies as yet. Then the others are
    pooled with mass on points above. A cell whose neighbours have too little is merged with the other neighbour, or
    dropped. If mass ``rises``, it may also be moved up: then as much as finds no place below stays on its point.
    """
    last = len(masses) - 1
    for at in range(last + 1):
        if offsets[at] > 0.0 and not _from_below(masses, offsets, gaps, at):
            if at < last:
                masses[at + 1] += masses[at]
                offsets[at + 1] += offsets[at] - masses[at] * gaps[at]
            masses[at] = offsets[at] = 0.0
    for at in range(last, -1, -1):
        if offsets[at] > 0.0 and not _from_below(masses, offsets, gaps, at):
            masses[at] = offsets[at] = 0.0
        if offsets[at] < 0.0 and not _from_above(masses, offsets, gaps, at):
            merged = 1.0
            if rises:
                merged = _share_below(masses, offsets, gaps, at) if at > 0 else 0.0
            if at > 0:
                masses[at - 1] += merged * masses[at]
                offsets[at - 1] += merged * (offsets[at] + masses[at] * gaps[at - 1])
            masses[at] *= 1.0 - merged
            offsets[at] = 0.0


@kernel(_FOUND, _GIVEN, _FOUND)
def absorb(masses: Array, sizes: Array, left: Array) -> None:
    """Move negative masses outwards onto positive ones, so that mass and mean stay, until none is negative.

    masses [points]: of ascending losses of a pair, under its first measure. sizes [points]: multiples of exp(-loss),
    whose mean is the mass under the other one. Each negative mass takes from the nearest positive ones on either side,
    or above alone where there is none below. Where there is none above it is left out, and put into left [points].
    """
    count = len(masses)
    below, depth = np.zeros(count, np.int64), 0
    right = 0
    for at in range(count):
        if masses[at] > 0.0:
            below[depth] = at
            depth += 1
            continue
        missing = -masses[at]
        masses[at] = 0.0
        right = max(right, at + 1)
        while missing > 0.0:
            while right < count and not masses[right] > 0.0:
                right += 1
            if right == count:
                left[at] = missing
                break
            if depth == 0:
                taken = min(missing, masses[right])
                masses[right] -= taken
                missing -= taken
                continue
            under = below[depth - 1]
            whole = sizes[under] - sizes[right]
            from_under, from_right = (sizes[at] - sizes[right]) / whole, (sizes[under] - sizes[at]) / whole
            of_under, of_right = masses[under] / from_under, masses[right] / from_right
            taken = min(missing, min(of_under, of_right))
            masses[under] = 0.0 if taken == of_under else max(masses[under] - taken * from_under, 0.0)
            masses[right] = 0.0 if taken == of_right else max(masses[right] - taken * from_right, 0.0)
            missing -= taken
            if not masses[under] > 0.0:
                depth -= 1


@helper
def _place(
    distances: Array, weights: Array, half: int, below: int, masses: Array, offsets: Array, beyond: Array
) -> None:
    """Do as `place`. It is called for many weights at a time, as a call takes longer than a weight."""
    size, above, level = 2 * half, len(masses) - 1 - below, 0
    for each in range(len(distances)):
        weight, distance = weights[each], distances[each]
        if not weight > 0.0:
            continue
        far = abs(distance)
        while level > 0 and far <= size * _STEPS[level - 1]:
            level -= 1
        while far > size * _STEPS[level]:
            level += 1
        place_of = far * (1.0 / _STEPS[level])
        nearer = int(place_of)
        share = place_of - nearer
        at = nearer + level * half
        if distance >= 0.0:
            if at > above or (at == above and share > 0.0):
                beyond[0] += weight
                beyond[1] += weight * distance
                continue
            near, sign = below + at, 1
        else:
            if at >= below:
                at, share = below, 0.0
            near, sign = below - at, -1
        masses[near] += weight * (1.0 - share)
        if share > 0.0:
            moved = weight * share * (1.0 - share) * _STEPS[level] * sign
            masses[near + sign] += weight * share
            offsets[near] += moved
            offsets[near + sign] -= moved


@kernel(_GIVEN, _GIVEN, int64, int64, _FOUND, _FOUND, _FOUND)
def place(
    distances: Array, weights: Array, half: int, below: int, masses: Array, offsets: Array, beyond: Array
) -> None:
    """Split each weight between the two points of a grid of blocks beside it, so that its mean stays.

    Distances [weights] are from the centre, in units. There are half points of a block on either side, below points
    below the centre. Masses and offsets [points] are added to. Offsets are mass times its distance above the point.
    Beyond [2] receives weight above the last point, and the same times its distance. A distance below the first point
    by rounding counts as the first.
    """
    _place(distances, weights, half, below, masses, offsets, beyond)


@kernel(_TABLES, _TABLES, float64, float64, int64, int64, _FOUND, _FOUND, _FOUND)
def place_sums(
    sums: Tables,
    moved: Tables,
    centre: float,
    unit: float,
    half: int,
    below: int,
    masses: Array,
    offsets: Array,
    beyond: Array,
) -> None:
    """Do as `place` for the sums and offsets that `add_blocks` has found; each mass is at its mean.

    The centre of the sums is a distance from the grid's centre, their unit a multiple of its unit.
    """
    step, distances = unit, np.zeros(sums.shape[1])
    for row in range(len(sums)):
        for each in range(len(distances)):
            place_of = float(each - 4 * half)
            if len(moved) > 0 and sums[row, each] > 0.0:
                place_of += moved[row, each] / sums[row, each]
            distances[each] = centre + place_of * step
        _place(distances, sums[row], half, below, masses, offsets, beyond)
        step *= 2.0


@helper
def _table(masses: Array, below: int, half: int, level: int, table: Array) -> None:
    """Fill the table [4 half + 4] of a level with masses of its own points, from -2 half to 2 half steps away."""
    size, above = 2 * half, len(masses) - 1 - below
    table[:] = 0.0
    first = 0 if level == 0 else half + 1
    for index in range(first, size + 1):
        at = index + level * half
        if at <= above:
            table[size + index] = masses[below + at]
        if at <= below and index > 0:
            table[size - index] = masses[below - at]


@helper
def _coarsen(table: Array, near: Array, offsets: Array, half: int) -> None:
    """Add ``table`` to the law ``near`` of all nearer points, and replace it by shares at points twice as far apart.

    Every other point has half of its share moved to either side. Offsets are mass times the distance of its mean above
    the point, in steps, as mass on a point stands for mass beside it.
    """
    size = 2 * half
    for index in range(len(near)):
        table[index] += near[index]
    near[:] = 0.0
    for index in range(-half, half + 1):
        at = size + 2 * index
        left, from_left = (table[at - 1], offsets[at - 1]) if index > -half else (0.0, 0.0)
        right, from_right = (table[at + 1], offsets[at + 1]) if index < half else (0.0, 0.0)
        near[size + index] = table[at] + 0.5 * (left + right)
        table[index + half] = 0.5 * (offsets[at] + 0.5 * (from_left + from_right + right - left))
    offsets[:] = 0.0
    for index in range(size + 1):
        offsets[half + index] = table[index]


@helper
def _add_products(one: Array, other: Array, times: float, padded: Array, sums: Array) -> None:
    """Add the masses of sums of two independent variables on even points, ``times`` as much.

    one: its length is a multiple of `_AT_ONCE`. padded [len(other) + 6]: for intermediate values.
    """
    first, last = 0, len(other)
    while first < last and other[first] == 0.0:
        first += 1
    while last > first and other[last - 1] == 0.0:
        last -= 1
    padded[:] = 0.0
    for right in range(first, last):
        padded[right + 3] = times * other[right]
    size = last + 3 - first
    own, before = padded[first + 3 : last + 6], padded[first + 2 : last + 5]
    twice, thrice = padded[first + 1 : last + 4], padded[first : last + 3]
    for left in range(0, len(one), _AT_ONCE):
        a, b, c, d = one[left], one[left + 1], one[left + 2], one[left + 3]
        if a != 0.0 or b != 0.0 or c != 0.0 or d != 0.0:
            row = sums[left + first : left + first + size]
            for at in range(size):
                row[at] += (a * own[at] + b * before[at]) + (c * twice[at] + d * thrice[at])


@kernel(_GIVEN, int64, _GIVEN, int64, int64, _TABLES, _TABLES)
def add_blocks(
    one: Array, below_one: int, other: Array, below_other: int, half: int, sums: Tables, offsets: Tables
) -> None:
    """Add the masses of all sums of two independent laws with the same unit to one table for each level.

    Sums [levels, 8 half + 8] are the masses from -4 half to 4 half steps of the level away from the sum of both
    centres. At each level, points of one law are paired with points of the other that are of that level or nearer. The
    nearer ones have been moved onto points of the level, so that means stay. Offsets have the same shape, or [0, 0]
    where they are not asked for. They are moved mass times the distance of its mean above the point, in steps.
    """
    ours, theirs, near_ours, near_theirs, of_ours, of_theirs = np.zeros((6, 4 * half + _AT_ONCE))
    padded = np.zeros(len(ours) + 6)
    for level in range(len(sums)):
        _table(one, below_one, half, level, ours)
        _table(other, below_other, half, level, theirs)
        _add_products(ours, theirs, 1.0, padded, sums[level])
        if level > 0:
            _add_products(ours, near_theirs, 1.0, padded, sums[level])
            _add_products(theirs, near_ours, 1.0, padded, sums[level])
            if len(offsets) > 0:
                _add_products(ours, of_theirs, 1.0, padded, offsets[level])
                _add_products(theirs, of_ours, 1.0, padded, offsets[level])
        _coarsen(ours, near_ours, of_ours, half)
        _coarsen(theirs, near_theirs, of_theirs, half)


@kernel(_GIVEN, int64, int64, _TABLES, _TABLES)
def add_to_itself(one: Array, below: int, half: int, sums: Tables, offsets: Tables) -> None:
    """Do as `add_blocks` for two variables of the same law."""
    ours, near, of_near, both = np.zeros((4, 4 * half + _AT_ONCE))
    padded = np.zeros(len(ours) + 6)
    for level in range(len(sums)):
        _table(one, below, half, level, ours)
        for index in range(len(both)):
            both[index] = ours[index] + 2.0 * near[index]
        _add_products(ours, both, 1.0, padded, sums[level])
        if level > 0 and len(offsets) > 0:
            _add_products(ours, of_near, 2.0, padded, offsets[level])
        _coarsen(ours, near, of_near, half)
