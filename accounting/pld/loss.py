"""Certified discretisation of the privacy loss of one round onto a lattice of losses.

The round is a `SensitivityMixture`: ``Q = N(0, 1)`` and ``P = sum_j p_j N(a_j, 1)``, whose loss
``L(x) = log P(x)/Q(x) = log sum_j p_j exp(a_j x - a_j^2 / 2)`` increases in x. The pair is (P, Q) or (Q, P), by
its `Direction`. `discretise` gives the law of the loss under the first of the pair:

- ``bound="upper"``: on losses i h. Each cell between two nodes keeps its mass under both measures, spread onto the two
  nodes ("connect the dots", Doroshenko et al. 2022). Spreading a likelihood ratio makes the pair more informative, so
  the discrete pair dominates the true one. The error is of second order in h.
- ``bound="lower"``: on losses (i + 1/2) h, shifted for rounds finer than the lattice (`lower_offset`). Each cell is
  merged into its barycentre, which is a post-processing, and the barycentres are then moved onto the nodes by pooling
  mass with neighbours (again second order). The true pair dominates the discrete one.

The other measure of the discrete pair is exp(-loss) times the law. Laws of equal spacing lie on the same lattice up to
a shift, the fractional part of ``start``, so laws of different rounds convolve and their shifts add.

    >>> from dpsweep.accounting import PoissonSampling
    >>> from dpsweep.accounting.pld import Direction, discretise, group_law
    >>> mixture = group_law(PoissonSampling(0.01), 1).scaled(1 / 0.8)
    >>> law = discretise(mixture, spacing=1e-3, direction=Direction.REMOVE, bound="upper")
    >>> round(float(law.probabilities.sum() + law.infinity_mass), 9)
    1.0
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt
from scipy import special

from dpsweep.accounting.errors import InvalidInput, require_finite
from dpsweep.accounting.numerics.roots import beginning
from dpsweep.accounting.pld.bunches import in_bunches, signed_mills
from dpsweep.accounting.pld.sensitivity import Array, RoundLaw, SensitivityMixture


class Direction(Enum):
    """The order of the pair: (P, Q) for removing an example, (Q, P) for adding it."""

    REMOVE = "remove"
    ADD = "add"

    @property
    def opposite(self) -> Direction:
        """Return the other one."""
        return Direction.ADD if self is Direction.REMOVE else Direction.REMOVE

    @property
    def sign(self) -> float:
        """Return the factor of log P / Q that gives the loss."""
        return 1.0 if self is Direction.REMOVE else -1.0

    def power(self, tilt: Tilt) -> Tilt:
        """Return the power of P / Q whose mean under Q is E[exp(tilt loss)]."""
        return 1.0 + tilt if self is Direction.REMOVE else -tilt


DIRECTIONS = (Direction.REMOVE, Direction.ADD)
Bound = Literal["upper", "lower"]
BOUNDS: tuple[Bound, Bound] = ("upper", "lower")

Tilt = TypeVar("Tilt", float, Array)
_POOR = 64  # most cells at the start that are merged
MAX_POINTS = 1 << 21  # most points of a table or a transform: 16 MiB per column
MAX_ATOMS = 2048  # most sensitivities in a table; with more, neighbours are merged

_EPS = float(np.finfo(np.float64).eps)
_SQRT_TWO_PI = float(np.sqrt(2 * np.pi))
_NEWTON_STEPS = 60
_STARTS = 512  # points between which the start of an inversion is interpolated
_ENTRIES = 1 << 18  # entries of a table of sensitivities and outputs


@dataclass(frozen=True)
class LatticeLoss:
    """Law of a loss on the lattice: ``probabilities[i]`` at loss ``(start + i) * spacing``, shape [nodes].

    ``infinity_mass`` sits at +infinity; in a lower bound's law it is what a delta may be too high by. That law may sum
    to less than 1: the missing mass counts as loss -infinity. ``rounding[i]`` bounds the floating-point error of the
    mass of the cell at node i.
    """

    spacing: float
    start: float
    probabilities: Array
    infinity_mass: float
    rounding: Array

    @property
    def losses(self) -> Array:
        """The losses of the nodes; shape [nodes]."""
        return np.asarray((self.start + np.arange(len(self.probabilities))) * self.spacing, dtype=np.float64)


@dataclass(frozen=True)
class Cells:
    """Masses between neighbouring lattice losses ``edge[i] < edge[i + 1]``, ascending in the direction's loss.

    `numerator`: mass under the pair's first measure; `denominator`: exp(edge[i]) times the mass under the second, so
    that denominator <= numerator <= exp(h) denominator. above / below: numerator mass beyond the last / first edge.
    """

    start: float
    numerator: Array
    denominator: Array
    above: float
    below: float
    rounding: Array


@dataclass(frozen=True)
class LossTable:
    """The loss of ``mixture`` inverted on a lattice: ``L(outputs[i]) = (start + i) * spacing``; arrays are [edges].
    ``mills_q`` and ``mills_p`` are signed Mills ratios at the outputs: the tail of Q (of P) beyond the output, on the
    side away from the mean, over the density. For P it is the average over the atoms given the output.
    """

    mixture: SensitivityMixture
    spacing: float
    start: float
    outputs: Array
    mills_q: Array
    mills_p: Array

    def law(self, direction: Direction, bound: Bound) -> LatticeLoss:
        """Return the law of the loss in one direction, with the guarantee in the module's description."""
        cells = self._remove_cells() if direction is Direction.REMOVE else self._add_cells()
        return connect_the_dots(cells, self.spacing) if bound == "upper" else merge(cells, self.spacing)

    def _remove_cells(self) -> Cells:
        losses = self._log_ratios
        density = np.exp(losses - self.outputs**2 / 2) / _SQRT_TWO_PI
        p, q, p_atoms, q_atoms = density * self.mills_p, density * self.mills_q, self._p_atoms, self._q_atoms
        return Cells(
            start=self.start,
            numerator=p[:-1] - p[1:] + p_atoms[1:-1],
            denominator=q[:-1] - q[1:] - np.expm1(-self.spacing) * q[1:] + _scaled(q_atoms[1:-1], losses[:-1]),
            above=max(0.0, p[-1] + p_atoms[-1]) + self.mixture.missing,
            below=max(0.0, p_atoms[0] - p[0]),
            rounding=self._rounding(p, q),
        )

    def _add_cells(self) -> Cells:
        losses = self._log_ratios
        density = np.exp(-(self.outputs**2) / 2) / _SQRT_TWO_PI
        p, q, p_atoms, q_atoms = density * self.mills_p, density * self.mills_q, self._p_atoms, self._q_atoms
        denominator = p[:-1] - p[1:] + np.expm1(-self.spacing) * p[:-1] + _scaled(p_atoms[1:-1], -losses[1:])
        return Cells(
            start=-(self.start + len(losses) - 1),
            numerator=(q[:-1] - q[1:] + q_atoms[1:-1])[::-1],
            denominator=denominator[::-1],
            above=max(0.0, q_atoms[0] - q[0]),
            below=max(0.0, q[-1] + q_atoms[-1]),
            rounding=self._rounding(p, q)[::-1],
        )

    @cached_property
    def _log_ratios(self) -> Array:
        return np.asarray((self.start + np.arange(len(self.outputs))) * self.spacing, dtype=np.float64)

    @cached_property
    def _p_atoms(self) -> Array:
        return self._atoms(np.asarray(self.mixture.sensitivities), np.asarray(self.mixture.probabilities))

    @cached_property
    def _q_atoms(self) -> Array:
        return self._atoms(np.zeros(1), np.ones(1))

    def _atoms(self, means: Array, probabilities: Array) -> Array:
        """Mass of the Gaussians by the gap between edges that holds their mean; shape [edges + 1].

        Signed Mills ratios give the nearer tail, negative left of the mean, so mass 1 is missing in the mean's gap.
        """
        gaps = np.searchsorted(self.outputs, means, side="left")
        return np.bincount(gaps, weights=probabilities, minlength=len(self.outputs) + 1).astype(np.float64)

    def _rounding(self, p: Array, q: Array) -> Array:
        """Return the bound on the floating-point error of the cells' masses: a few ulps of the tails times their
        exponents.
        """
        finite = np.where(np.isfinite(self.outputs), self.outputs, 0.0)
        ulps = 8 * _EPS * (2.0 + finite**2 + np.abs(self._log_ratios)) * (np.abs(p) + np.abs(q))
        return np.asarray(ulps[:-1] + ulps[1:])


def tabulate(
    mixture: SensitivityMixture, spacing: float, direction: Direction, tail: float, floor: float, offset: float = 0.0
) -> LossTable:
    """Invert the loss on the lattice points ``(i + offset) * spacing`` that the direction's first measure reaches.

    At most ``tail`` of its mass lies above the last point. At most ``floor`` lies below the first, or more if the table
    would exceed MAX_POINTS; an upper bound rounds these losses up, a lower bound drops them. One table serves both
    bounds, and also the other direction, which then loses more to infinity. ``mixture`` is not truncated here.
    """
    lowest, highest = output_range(mixture, direction, tail, floor)
    first, last = loss_at(mixture, np.array([lowest, highest]))
    bottom, top = int(np.floor(first / spacing - offset)), int(np.ceil(last / spacing - offset))
    if direction is Direction.REMOVE:
        bottom = max(bottom, top - MAX_POINTS)
    else:
        top = min(top, bottom + MAX_POINTS)
    start = bottom + offset
    losses = np.asarray((start + np.arange(max(top - bottom, 1) + 1)) * spacing, dtype=np.float64)
    active, log_active = _without_zero(mixture, losses)
    atoms = _Atoms(mixture, lowest, highest)
    outputs = np.full_like(losses, -np.inf)
    outputs[active] = _invert(atoms, log_active)
    own = signed_mills(outputs)
    absent = np.exp(mixture.log_zero_probability - losses)
    average = np.minimum(absent, 1.0) * own
    average[active] += atoms.mills(losses[active], outputs[active])
    return LossTable(mixture, spacing, start, outputs, own, average)


@dataclass(frozen=True)
class RoundTable:
    """The tables of a round's cases, on one lattice, and their probabilities; ``dropped`` is that of other cases."""

    tables: tuple[tuple[float, LossTable], ...]
    dropped: float

    def law(self, direction: Direction, bound: Bound) -> LatticeLoss:
        """Return the law of the loss in one direction: each case's, times its probability.

        An upper bound has the dropped cases at +infinity, a lower one leaves them out.
        """
        if len(self.tables) == 1 and not self.dropped:
            return self.tables[0][1].law(direction, bound)
        found = by_draw([(probability, table.law(direction, bound)) for probability, table in self.tables])
        infinity = found.infinity_mass + (self.dropped if bound == "upper" else 0.0)
        rounding = found.rounding + 2 * _EPS * found.probabilities
        return replace(found, infinity_mass=infinity, rounding=rounding)


def by_draw(cases: Sequence[tuple[float, LatticeLoss]]) -> LatticeLoss:
    """Return the law of a public draw among laws on one lattice, each with its probability."""
    start = min(law.start for _, law in cases)
    parts = [(round(law.start - start), probability, law) for probability, law in cases]
    masses, rounding = np.zeros((2, max(place + len(law.probabilities) for place, _, law in parts)))
    for place, probability, law in parts:
        masses[place : place + len(law.probabilities)] += probability * law.probabilities
        rounding[place : place + len(law.probabilities)] += probability * law.rounding
    infinity = sum(probability * law.infinity_mass for probability, law in cases)
    return LatticeLoss(cases[0][1].spacing, start, masses, infinity, rounding)


def tabulate_round(
    law: RoundLaw, spacing: float, direction: Direction, tail: float, floor: float, offset: float = 0.0
) -> RoundTable:
    """Return `tabulate` every case of a round on one lattice, each with its share of ``tail`` and ``floor``."""
    tables = (
        (p, tabulate(mixture, spacing, direction, tail_share(tail, p), tail_share(floor, p), offset))
        for p, mixture in law.cases
    )
    return RoundTable(tuple(tables), law.dropped)


def tail_share(tail: float, probability: float) -> float:
    """Return what a case of ``probability`` may lose if the round may lose ``tail``; at most a hundredth."""
    return tail if probability == 1.0 else min(tail / probability, max(tail, 0.01))


def table_length(mixture: SensitivityMixture, spacing: float, direction: Direction, tail: float, floor: float) -> int:
    """Return about how many points the table of `tabulate` has."""
    first, last = loss_at(mixture, np.array(output_range(mixture, direction, tail, floor)))
    return int(min((last - first) / spacing, MAX_POINTS))


def discretise(
    mixture: SensitivityMixture, spacing: float, direction: Direction, bound: Bound, tail: float = 1e-20
) -> LatticeLoss:
    """Return the law of one round's privacy loss on the lattice of ``spacing``, as an upper or a lower bound.

    The guarantee is in the module's description. ``tail`` is the probability that may be cut off: it is added to
    infinity_mass for the upper bound, and dropped for the lower.

    Raises: InvalidInput for a spacing outside [1e-9, 1e3], a tail outside [1e-300, 1), a mixture without a positive
    sensitivity, and for words that are no direction or bound; "remove" and "add" are directions.
    """
    if direction not in (*DIRECTIONS, *(each.value for each in DIRECTIONS)) or bound not in BOUNDS:
        raise InvalidInput(
            f"direction is {direction!r} and bound is {bound!r}, but they must be 'remove' or 'add', and 'upper' or "
            "'lower'"
        )
    direction = Direction(direction)
    spacing = require_finite("spacing", spacing, at_least=1e-9, at_most=1e3)
    tail = require_finite("tail", tail, at_least=1e-300, below=1.0)
    if mixture.sensitivities[-1] == 0.0:
        raise InvalidInput("the mixture never depends on the group, so that it has no loss to discretise; leave it out")
    kept = mixture.truncated(tail) if bound == "upper" else mixture.rounded_down(tail)
    offset = 0.0 if bound == "upper" else _offset_of(kept, spacing)
    return tabulate(kept, spacing, direction, tail, tail, offset).law(direction, bound)


def connect_the_dots(cells: Cells, spacing: float) -> LatticeLoss:
    """Connect the dots: keep each cell's mass under both measures on its two nodes (Doroshenko et al., 2022)."""
    raised = np.clip((cells.numerator - cells.denominator) / -np.expm1(-spacing), 0.0, cells.numerator)
    masses = np.zeros(len(cells.numerator) + 1)
    masses[1:] += raised
    masses[:-1] += cells.numerator - raised
    masses[0] += cells.below
    rounding = np.append(cells.rounding, 0.0)
    rounding[1:] += cells.rounding
    return LatticeLoss(spacing, cells.start, np.maximum(masses, 0.0), cells.above, rounding)


def merge(cells: Cells, spacing: float) -> LatticeLoss:
    """Merge each cell into its barycentre and move the barycentres onto the nodes in the middle of the cells.

    A barycentre above its node is pooled with mass from the node below, and one below its node with mass from above.
    The pooled barycentre is the node; pooling is post-processing. If a neighbour has too little mass, the cell drops
    mass (barycentre above) or is rounded down one node (below); both only lower the loss.
    """
    numerator, denominator = _without_poor_start(np.maximum(cells.numerator, 0.0), cells.denominator, spacing)
    excess = numerator - np.exp(spacing / 2) * denominator
    up, down = np.maximum(excess, 0.0) / np.expm1(spacing), np.maximum(-excess, 0.0) / -np.expm1(-spacing)
    pools_up, pools_down = np.ones(len(up), dtype=bool), np.ones(len(up), dtype=bool)
    pools_up[0] = pools_down[-1] = False
    while True:
        lifted, lowered = np.where(pools_up, up, 0.0), np.where(pools_down, down, 0.0)
        masses = numerator + lifted + lowered
        masses[:-1] -= lifted[1:]
        masses[1:] -= lowered[:-1]
        masses -= np.where(pools_up, 0.0, np.maximum(excess, 0.0))
        rounded_down = ~pools_down & (excess < 0.0)
        masses[rounded_down] -= numerator[rounded_down]
        masses[:-1][rounded_down[1:]] += numerator[1:][rounded_down[1:]]
        poor = masses < 0.0
        blamed_up, blamed_down = pools_up & (up > 0), pools_down & (down > 0)
        blamed_up[1:] &= poor[:-1]
        blamed_down[:-1] &= poor[1:]
        if not np.any(blamed_up[1:]) and not np.any(blamed_down[:-1]):
            break
        pools_up[1:] &= ~blamed_up[1:]
        pools_down[:-1] &= ~blamed_down[:-1]
    masses = np.maximum(masses, 0.0)
    masses[-1] += cells.above
    return LatticeLoss(spacing, cells.start + 0.5, masses, 0.0, cells.rounding)


def _without_poor_start(numerator: Array, denominator: Array, spacing: float) -> tuple[Array, Array]:
    """Merge the first cells into later ones while their barycentre is above their node, with too little mass below.

    There `merge` would drop mass in every round. Merged mass is below its node, and is pooled with mass from above if
    there is enough.
    """
    numerator, denominator = numerator.copy(), denominator.copy()
    for first in range(min(_POOR, len(numerator) - 2)):
        excess = numerator[first] - np.exp(spacing / 2) * denominator[first]
        mass = numerator[first] + numerator[first + 1]
        scaled = np.exp(spacing) * denominator[first] + denominator[first + 1]
        missing = max(0.0, np.exp(spacing / 2) * scaled - mass) / -np.expm1(-spacing)
        if excess < 0.0 or 2.0 * missing > numerator[first + 2]:
            break
        numerator[first : first + 2] = 0.0, mass
        denominator[first : first + 2] = 0.0, scaled
    return numerator, denominator


def _atoms_of(mixture: SensitivityMixture) -> tuple[Array, Array]:
    """Nonzero sensitivities a_j and log(p_j) - a_j^2 / 2: the loss is the log-sum of the lines through them."""
    shifts, probabilities = np.asarray(mixture.sensitivities), np.asarray(mixture.probabilities)
    moving = shifts > 0.0
    return shifts[moving], np.log(probabilities[moving]) - shifts[moving] ** 2 / 2


def loss_at(mixture: SensitivityMixture, outputs: Array) -> Array:
    """Return L(x) = log P(x) / Q(x) at each output."""
    found = _Atoms(mixture, float(outputs.min()), float(outputs.max())).log_sum(outputs)
    return np.logaddexp(found, mixture.log_zero_probability) if mixture.zero_probability else found


def output_range(mixture: SensitivityMixture, direction: Direction, tail: float, floor: float) -> tuple[float, float]:
    """Return outputs (low, high) outside which the first measure has at most ``tail`` of large and ``floor`` of small
    losses.

    The range is slightly wider than needed.
    """
    reach, short = np.sqrt(-2 * np.log((tail, floor))).tolist()  # Pr[N(0, 1) > z] <= exp(-z^2 / 2) / 2
    if direction is Direction.ADD:
        return -reach, short
    shifts, probabilities = np.asarray(mixture.sensitivities), np.asarray(mixture.probabilities)

    def is_beyond(output: float) -> bool:
        return not float(np.sum(probabilities * special.ndtr(shifts - output))) > tail

    _, high = beginning(is_beyond, 0.0, float(shifts[-1]) + reach, 12)  # no more than the tail lies above
    return float(shifts[0]) - short, high


def lower_offset(law: RoundLaw, spacing: float) -> float:
    """Return the shift of the lattice, in spacings, for a lower bound's tables: that of the likeliest case."""
    return _offset_of(max(law.cases, key=lambda case: case[0])[1], spacing)


def _offset_of(mixture: SensitivityMixture, spacing: float) -> float:
    """Shift of the lattice, in spacings, for a lower bound's table.

    Rounds much finer than the lattice have nearly all their mass in one cell at the smallest log ratio, log p_0. Their
    lower bound is tight only if that cell's barycentre is a node; the shift makes it one.
    """
    if not mixture.zero_probability:
        return 0.0
    least = mixture.log_zero_probability
    if float(loss_at(mixture, np.zeros(1))[0]) > least + 8 * spacing:
        return 0.0
    outputs = np.linspace(-8.0, 40.0, 1024)
    shifts, probabilities = np.asarray(mixture.sensitivities), np.asarray(mixture.probabilities)
    for _ in range(2):  # the end of the first cell: half a spacing above the barycentre of all below it
        below_p = np.sum(probabilities[:, None] * special.ndtr(outputs - shifts[:, None]), axis=0)
        distance = loss_at(mixture, outputs) - spacing / 2 - np.log(below_p / special.ndtr(outputs))
        index = int(np.argmax(distance > 0.0))
        if index == 0:
            return 0.0
        outputs = np.linspace(outputs[index - 1], outputs[index], 1024)
    end = float(loss_at(mixture, outputs[:1])[0]) / spacing
    return end - float(np.floor(end))


def _without_zero(mixture: SensitivityMixture, losses: Array) -> tuple[npt.NDArray[np.bool_], Array]:
    """Return which losses the mixture reaches, and log(exp(loss) - p_0) there: the log-sum of the nonzero atoms alone.

    Without its constant term the log-sum has slope at least the smallest sensitivity, so inverting it is well posed.
    """
    if not mixture.zero_probability:
        return np.ones(len(losses), dtype=bool), losses
    below = mixture.log_zero_probability - losses
    active = below < 0.0
    return active, losses[active] + np.log(-np.expm1(below[active]))


class _Atoms:
    """The positive sensitivities of a mixture, for sums over them at outputs from ``lowest`` to ``highest`` or so.

    Many are summed in bunches, except at outputs far outside that range.
    """

    def __init__(self, mixture: SensitivityMixture, lowest: float, highest: float) -> None:
        self.shifts, self._log_atoms = _atoms_of(mixture)
        self.lowest, self.highest = lowest - 1.0, highest + 1.0
        probabilities = np.asarray(mixture.probabilities)[-len(self.shifts) :]
        self._bunches = in_bunches(self.shifts, probabilities, self.lowest, self.highest)

    def log_sum(self, outputs: Array) -> Array:
        """Return log sum_j p_j exp(a_j x - a_j^2 / 2) at outputs x in the range; -infinity without any a_j."""
        if self._bunches is not None:
            return self._bunches.log_sum(outputs)
        if len(self.shifts) == 0:
            return np.full_like(outputs, -np.inf)
        return _log_sum(self._log_atoms[:, None] + self.shifts[:, None] * outputs)

    def total_and_slope(self, targets: Array, outputs: Array) -> tuple[Array, Array]:
        """Return sum_j w_j and sum_j a_j w_j at each output x, w_j = p_j exp(a_j x - a_j^2 / 2 - target)."""
        total, slope, alone = np.zeros_like(targets), np.zeros_like(targets), self._alone(outputs)
        if self._bunches is not None:
            total[~alone], slope[~alone] = self._bunches.total_and_slope(targets[~alone], outputs[~alone])
        for few, weights in self._weights(targets, outputs, np.flatnonzero(alone)):
            total[few] = weights.sum(axis=0)
            slope[few] = (self.shifts[:, None] * weights).sum(axis=0)
        return total, slope

    def mills(self, losses: Array, outputs: Array) -> Array:
        """Return sum_j w_j `signed_mills` (x - a_j) at each output x, w_j = p_j exp(a_j x - a_j^2 / 2 - loss)."""
        found, alone = np.zeros_like(losses), self._alone(outputs)
        if self._bunches is not None:
            found[~alone] = self._bunches.mills(losses[~alone], outputs[~alone])
        for few, weights in self._weights(losses, outputs, np.flatnonzero(alone)):
            found[few] = (weights * signed_mills(outputs[few] - self.shifts[:, None])).sum(axis=0)
        return found

    def _alone(self, outputs: Array) -> npt.NDArray[np.bool_]:
        if self._bunches is None:
            return np.ones(len(outputs), np.bool_)
        return (outputs < self.lowest) | (outputs > self.highest)

    def _weights(
        self, targets: Array, outputs: Array, alone: npt.NDArray[np.intp]
    ) -> Iterator[tuple[npt.NDArray[np.intp], Array]]:
        """Yield places of some outputs, and p_j exp(a_j x - a_j^2 / 2 - target) there, [atoms, outputs]."""
        at_once = max(1, _ENTRIES // max(1, len(self.shifts)))
        for start in range(0, len(alone), at_once):
            few = alone[start : start + at_once]
            lines = self.shifts[:, None] * outputs[few]
            yield few, np.exp(self._log_atoms[:, None] + lines - targets[few])


def _invert(atoms: _Atoms, targets: Array) -> Array:
    """Solve `_Atoms.log_sum` (x) = target for each target, ascending; shape [targets].

    The left side is convex and increasing, so Newton's method converges from any start at which no exponential
    overflows.
    """
    shifts = atoms.shifts
    if len(shifts) == 0:
        return np.full_like(targets, np.inf)
    if len(shifts) == 1:
        return np.asarray((targets - atoms.log_sum(np.zeros(1))[0]) / shifts[0])
    outputs, moving, before = _about(atoms, targets), np.arange(len(targets)), np.inf
    bend = float(shifts[-1] - shifts[0]) ** 2 / (8.0 * float(shifts[0]))  # f'' / (2 f'), next step over its square
    noise = max(1e-9, 16 * _EPS * (1.0 + float(np.max(np.abs(targets)))) / float(shifts[0]))
    for _ in range(_NEWTON_STEPS):
        step = newton_step(atoms, targets[moving], outputs[moving])
        outputs[moving] -= step
        largest, moving = float(np.max(np.abs(step))), moving[bend * step**2 > _EPS]
        if len(moving) == 0 or before / 2 <= largest < noise:
            break  # converged, or only rounding is left
        before = largest
    return outputs


def _about(atoms: _Atoms, targets: Array) -> Array:
    """Return about the roots of `_invert`, by cubics between points whose log-sum and slope are known.

    Targets beyond the points have the nearest one; tangents from the first stay above roots to its left.
    """
    points = np.linspace(atoms.lowest, atoms.highest, _STARTS)
    sums = atoms.log_sum(points)
    total, slope = atoms.total_and_slope(sums, points)
    values, kept = np.unique(sums, return_index=True)  # slopes may be too small to tell neighbours apart
    if len(values) == 1:
        return np.full_like(targets, points[0])
    from scipy import interpolate  # late: importing it takes half a second

    found = interpolate.CubicHermiteSpline(values, points[kept], (total / slope)[kept])(
        np.clip(targets, values[0], values[-1])
    )
    return np.clip(found, points[0], points[-1])


def newton_step(atoms: _Atoms, targets: Array, outputs: Array) -> Array:
    """Return how far Newton's method moves each of ``outputs`` down towards the root of `_invert`."""
    total, slope = atoms.total_and_slope(targets, outputs)
    return np.asarray(np.log(total) * total / slope)


def _log_sum(lines: Array) -> Array:
    """log sum(exp(lines)) over the first axis."""
    peaks = lines.max(axis=0)
    return np.asarray(peaks + np.log(np.exp(lines - peaks).sum(axis=0)))


def _scaled(masses: Array, exponents: Array) -> Array:
    """masses * exp(exponents), evaluated only where the mass is positive."""
    result = np.zeros_like(masses)
    there = masses > 0.0
    result[there] = np.exp(np.log(masses[there]) + exponents[there])
    return result
