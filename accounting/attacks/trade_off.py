"""Bounds on ROC curves of attacks from a certified privacy profile: a limit on all, and what some attack achieves.

The ROC curve of tests between two fixed distributions is the largest true positive rate (TPR) at each false positive
rate (FPR). It is concave, from (0, 0) to (1, 1), and 1 minus the trade-off function (Dong, Roth and Su 2019). At an
epsilon, delta is the largest TPR - e^epsilon FPR of any test. So every point of a profile is a line which the curve
does not pass. With the two distributions swapped that line is TPR = 1 - e^-epsilon (1 - delta - FPR).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dpsweep.accounting.errors import require_finite
from dpsweep.accounting.pld import CertifiedProfile

Array = NDArray[np.float64]

_STEEPEST = 16.0  # lines of larger epsilons matter below false positive rates of e^-16 only
_ROUNDING = 1e-12  # far above the rounding error of a line's value
_CANDIDATES = 96  # number of lines whose points are tried as ends of chords


@dataclass(frozen=True)
class AttackBounds:
    """Bounds on the ROC curves of attacks on rounds with ``profile``; rates are in [0, 1]."""

    profile: CertifiedProfile

    def limit(self, false_positive_rates: Array) -> Array:
        """Return true positive rates that no attack passes, in either direction, at each rate [points]: concave,
        rising.
        """
        return self._lowest(self._limits, false_positive_rates)

    def limit_of(self, direction: int, false_positive_rates: Array) -> Array:
        """Return the same of one direction, as the profile counts them: the positives are its first distribution."""
        return self._lowest(self._starts(self.profile.upper, direction), false_positive_rates)

    def _lowest(self, starts: Array, false_positive_rates: Array) -> Array:
        lines = starts + self._slopes * false_positive_rates[:, None]
        return np.asarray(np.clip(lines.min(axis=1) + _ROUNDING, false_positive_rates, 1.0))

    def achieved(self, false_positive_rate: float, lower: Array) -> float:
        """Return a true positive rate that the best attack in the worse direction achieves; guessing achieves the FPR
        itself.

        lower: the profile's lower bounds by direction [2, points].

        The ROC curve of a direction is on or above the line of each lower bound on its delta somewhere, and the limits
        confine where. Curves are concave, so between two such points the curve is above their chord. The chord's height
        at a rate between them is monotone in where each point lies on its line, so only interval ends are evaluated.
        """
        order = np.argsort(self._limits + self._slopes * false_positive_rate, kind="stable")
        nearest = order[np.unique(np.geomspace(1, len(order), _CANDIDATES).astype(int)) - 1]
        found = max(
            _highest_chord(false_positive_rate, self._slopes[nearest], start[nearest], *self._where(nearest, start))
            for start in (self._starts(lower, 0), self._starts(lower, 1))
        )
        return float(np.clip(found - _ROUNDING, false_positive_rate, 1.0))

    @cached_property
    def _near(self) -> int:
        return int(np.searchsorted(self.profile.epsilons, _STEEPEST, side="right"))

    @cached_property
    def _slopes(self) -> Array:
        """Slopes of all lines [lines]: both kinds, and TPR <= 1."""
        epsilons = self.profile.epsilons[: self._near]
        return np.concatenate([np.exp(epsilons), np.exp(-epsilons), [0.0]])

    @cached_property
    def _limits(self) -> Array:
        """Return where the lines of the upper bounds on delta start, at false positive rate 0 [lines]."""
        return self._intercepts(self.profile.worst, self.profile.worst)

    def _starts(self, bounds: Array, direction: int) -> Array:
        """Return where the lines of bounds [2, points] on the deltas of a direction start, at rate 0 [lines].

        Of upper bounds they are lines that its ROC curve does not pass, of lower ones lines that it reaches.
        """
        return self._intercepts(bounds[direction], bounds[1 - direction])

    def _intercepts(self, own: Array, swapped: Array) -> Array:
        falls = np.exp(-self.profile.epsilons[: self._near])
        return np.concatenate([own[: self._near], 1.0 - falls * (1.0 - swapped[: self._near]), [1.0]])

    def _where(self, lines: Array, start: Array) -> tuple[Array, Array]:
        """Smallest and largest false positive rate where each of ``lines`` is within the limits, each [lines].

        The ROC curve reaches the line between them.
        """
        slope = self._slopes[lines, None]
        room = self._limits - start[lines, None] + 2e-15 * (1.0 + self._slopes + slope)
        steeper = self._slopes - slope
        with np.errstate(divide="ignore", invalid="ignore"):
            crossing = -room / steeper
        left = np.where(steeper > 0.0, crossing, 0.0).max(axis=1)
        right = np.where(steeper < 0.0, crossing, 1.0).min(axis=1)
        return left.clip(0.0, 1.0), right.clip(0.0, 1.0)


def _highest_chord(rate: float, slope: Array, start: Array, left: Array, right: Array) -> float:
    """Height at ``rate`` of the highest chord between a point known to be before ``rate`` and one known to be after it.

    A point lies on its line, anywhere between ``left`` and ``right`` (swapped where rounding has made them cross).
    """
    ends = np.sort([left, right], axis=0)
    heights = start + slope * ends
    before, after = ends[1] <= rate, ends[0] >= rate
    x1, y1 = (np.column_stack([values[:, before], np.zeros(2)]) for values in (ends, heights))
    x2, y2 = (np.column_stack([values[:, after], np.ones(2)]) for values in (ends, heights))
    chords = [_chord(rate, x1[i], y1[i], x2[j], y2[j]) for i in (0, 1) for j in (0, 1)]
    return float(np.minimum.reduce(chords).max())


def _chord(rate: float, x1: Array, y1: Array, x2: Array, y2: Array) -> Array:
    """Heights at ``rate`` of the chords from each first point [m] to each second one [n]; shape [m, n]."""
    width = x2 - x1[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.where(width > 0.0, (rate - x1[:, None]) / width, 0.0)
    return np.asarray(y1[:, None] + share * (y2 - y1[:, None]))


def area_limit(epsilon: float, delta: float) -> float:
    """Return the largest expected area under the ROC curve of any attack on examples that each pay at most ``epsilon``.

    Assumes that members and others of the attack are drawn from one distribution, as by a random split. Proof: the area
    is the probability that a member x scores above another example z. Without x in the training data, or with something
    independent of x in its place, both would be strangers to the model, and the probability 1/2 at most. Adding x
    changes it as (epsilon, delta)-DP allows: x scores no higher with probability at least e^-epsilon (1/2 - delta).
    The limit is concave in epsilon, so that the mean epsilon of several examples bounds their mean area.

    >>> area_limit(0.0, 0.0), round(area_limit(1.0, 1e-5), 4)
    (0.5, 0.8161)
    """
    epsilon = require_finite("epsilon", epsilon, at_least=0.0)
    delta = require_finite("delta", delta, at_least=0.0, at_most=1.0)
    return 1.0 - math.exp(-epsilon) * max(0.5 - delta, 0.0)


def epsilon_of_area(area: float, delta: float) -> float:
    """Return the least epsilon whose `area_limit` is at least ``area``; infinite for an area of 1.

    >>> round(epsilon_of_area(area_limit(0.7, 1e-5), 1e-5), 9), epsilon_of_area(0.3, 0.0)
    (0.7, 0.0)
    """
    area = require_finite("area", area, at_least=0.0, at_most=1.0)
    delta = require_finite("delta", delta, at_least=0.0, at_most=1.0)
    if area >= 1.0:
        return math.inf
    return max(0.0, math.log((0.5 - delta) / (1.0 - area))) if delta < 0.5 else 0.0
