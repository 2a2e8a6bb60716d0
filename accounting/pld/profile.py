"""The privacy profile: delta as a function of epsilon, certified from both sides at many epsilons at once.

A composition (`dpsweep.accounting.pld.composition`) is centred at one epsilon, but its curves hold at every other
epsilon, too, with an error that is small relative to delta at the centre. So a profile takes one composition of each
direction at epsilon 0, whose absolute error is small everywhere, and more only where small deltas are asked for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from dpsweep.accounting.numerics.gaussian import gaussian_delta, gaussian_epsilon
from dpsweep.accounting.pld.ceilings import delta_ceilings, total_variation
from dpsweep.accounting.pld.composition import MIN_DELTA, TOLERANCE, epsilon_of_rounds, first_fine, tail_of
from dpsweep.accounting.pld.exact import Deltas, corners, exact_deltas
from dpsweep.accounting.pld.fourier import compose
from dpsweep.accounting.pld.group_rounds import GroupRounds
from dpsweep.accounting.pld.lattice import spacing_for
from dpsweep.accounting.pld.loss import DIRECTIONS
from dpsweep.accounting.pld.saddlepoint import Saddle, centres, cumulants, saddle_at_delta
from dpsweep.accounting.pld.sensitivity import Array

RESOLVED = 1e-7  # every profile reaches at least to the epsilon of this delta
_BEYOND = 1.05  # factor by which the grid exceeds that epsilon: a pure release's delta ends in a corner there
_NEAR = 16.0  # up to this epsilon, where tests have error rates above e^-16, the grid is finer
_CELLS = 1 / 128  # spacing that resolves the profile away from the centre, in standard deviations of the loss
_FINEST = 3e-5  # smallest such spacing; a finer one changes error rates by less than this
_LOOSE = 0.01  # gap between the bounds, relative to delta at epsilon 0, above which closed forms are tried, too


@dataclass(frozen=True)
class CertifiedProfile:
    """Bounds on delta at each of ``epsilons`` [points], which ascend from 0; the bounds never rise with epsilon.

    `upper`: by direction, as in `DIRECTIONS`, shape [2, points]. `lower`: on the exact delta of the rounds' dominating
    pairs, likewise; None where these are not the run's (`CertifiedEpsilon`), and for chains.
    """

    epsilons: Array
    upper: Array
    lower: Array | None

    @property
    def worst(self) -> Array:
        """Upper bounds on delta of the worse direction, [points]."""
        return np.asarray(self.upper.max(axis=0))


@np.errstate(all="ignore")  # overflow gives infinity or NaN, which never tightens a bound
def profile_of_rounds(rounds: GroupRounds, deltas: Sequence[float] = ()) -> CertifiedProfile:
    """Return the profile of given rounds, from epsilon 0 to where delta is 1e-7 or the least of ``deltas``.

    `deltas`: values of delta near which the profile shall be tight relative to delta itself; each costs a search for
    its epsilon and two compositions. Without them its error is small relative to delta at epsilon 0. The bounds hold
    either way.
    """
    least = min([RESOLVED, *deltas])
    if not rounds.is_private:
        return CertifiedProfile(np.zeros(1), np.ones((2, 1)), np.ones((2, 1)))
    if rounds.is_one_gaussian:
        epsilons = epsilon_grid(gaussian_epsilon(rounds.gaussian, least)[0])
        return _at(epsilons, [partial(gaussian_delta, rounds.gaussian)] * 2)
    if (bends := corners(rounds)) is not None and (exactly := exact_deltas(rounds)) is not None:
        return _at(np.union1d(epsilon_grid(float(bends[-1]), 1.0), bends), [exactly] * 2)
    aims = [_Aim(0.0, min(total_variation(rounds), 1.0), 1e-8)]
    reached = [(epsilon_of_rounds(rounds, each).upper, each) for each in deltas]
    aims += [_Aim(epsilon, delta, 1e-4) for epsilon, delta in reached if epsilon < math.inf]
    pair = [cumulants(rounds, direction, max(MIN_DELTA, least * 1e-8)) for direction in DIRECTIONS]
    ends = [saddle_at_delta(generating, math.log(least)).epsilon for generating in pair]
    epsilons = epsilon_grid(max(*ends, *(aim.epsilon for aim in aims)))
    upper, lower = np.ones((2, len(epsilons))), np.zeros((2, len(epsilons)))
    for aim in aims:
        above, below = _bounds(rounds, aim, epsilons)
        upper, lower = np.minimum(upper, above), np.maximum(lower, below)
    upper[:, 0], lower[:, 0] = upper[:, 0].min(), lower[:, 0].max()  # total variation is symmetric
    highest = np.minimum.accumulate(upper, axis=1).max(axis=0)
    if not np.max(highest - lower.max(axis=0)) <= _LOOSE * lower[0, 0]:
        upper = np.minimum(upper, delta_ceilings(rounds, epsilons))
    return _monotone(epsilons, upper, lower)


class _Aim(NamedTuple):
    """Where a composition is centred: an epsilon, about its delta, and the share of that which may go to infinity."""

    epsilon: float
    delta: float
    lost: float


def _bounds(rounds: GroupRounds, aim: _Aim, epsilons: Array) -> tuple[Array, Array]:
    """(upper, lower) delta at ``epsilons``, by compositions of both directions centred at ``aim``: [2, points] each."""
    upper, lower = np.ones((2, len(epsilons))), np.zeros((2, len(epsilons)))
    tail = tail_of(rounds, aim.delta, aim.lost)
    pair = [cumulants(rounds, direction, tail) for direction in DIRECTIONS]
    for row, (generating, other) in enumerate((pair, pair[::-1])):
        finest = max(_CELLS * math.sqrt(generating(0.0)[2]), _FINEST)
        saddles = centres(generating, aim.epsilon, math.log(aim.delta))
        found = first_fine(rounds, generating, other, saddles, partial(_spacing, rounds.count, finest), tail)
        if found is not None:
            composed = compose(rounds, replace(found[1], opposite=None))
            upper[row], lower[row] = composed.upper.deltas_at(epsilons), composed.lower.deltas_at(epsilons)
    return upper, lower


def _spacing(rounds: int, finest: float, saddle: Saddle) -> float:
    return min(spacing_for(rounds, saddle, TOLERANCE), finest)


def _at(epsilons: Array, deltas: Sequence[Deltas]) -> CertifiedProfile:
    """Return the profile of closed forms, one for each direction."""
    bounds = np.array([[of_direction(float(each)) for each in epsilons] for of_direction in deltas])
    return _monotone(epsilons, bounds[:, :, 0], bounds[:, :, 1])


def epsilon_grid(reach: float, beyond: float = _BEYOND) -> Array:
    """Return the epsilons from 0 to ``reach``: geometric near 0, so that every scale on which delta changes is
    resolved.
    """
    reach = max(beyond * reach, 1e-12)
    near = min(reach, _NEAR)
    parts = [np.zeros(1), near * np.geomspace(1e-7, 1.0, 512), np.linspace(0.0, near, 513)[1:]]
    if reach > near:
        parts.append(np.linspace(near, reach, 513)[1:])
    return np.asarray(np.unique(np.concatenate(parts)))


def _monotone(epsilons: Array, upper: Array, lower: Array) -> CertifiedProfile:
    """Return the bounds made monotone: delta never rises with epsilon, so an upper bound holds at all larger epsilons,
    too.

    A lower bound holds at all smaller ones.
    """
    falling = np.maximum.accumulate(lower[:, ::-1], axis=1)[:, ::-1]
    return CertifiedProfile(epsilons, np.minimum.accumulate(upper, axis=1), falling)
