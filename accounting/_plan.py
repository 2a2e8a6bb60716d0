"""Choose tilt, lattice and window of a composition from its approximate cumulants."""

from __future__ import annotations

import numpy as np
from scipy import fft

from accounting._fourier import Plan
from accounting._rounds import Rounds
from accounting._saddlepoint import Cumulants, Saddle, saddle_at_epsilon

MAX_POINTS = 1 << 22
_ALIASING = 1e-10  # wanted error of delta, relative, from everything outside the window


def spacing_for(rounds: Rounds, saddle: Saddle, tolerance: float) -> float:
    """The lattice spacing at which upper and lower epsilon differ by about ``tolerance``, relative.

    Spreading a cell over its nodes adds a variance of h^2/6 per round, merging one removes h^2/12, and epsilon moves
    by (1 + theta) / 2 times the composed variance; epsilons below 1 / (1 + theta) are measured on that scale.
    """
    scale = max(saddle.epsilon, 1 / (1 + saddle.tilt))
    return float(np.sqrt(4 * tolerance * scale / ((1 + saddle.tilt) * rounds.count)))


def make_plan(generating: Cumulants, other: Cumulants, saddle: Saddle, spacing: float, tail: float) -> Plan:
    """A plan around ``saddle``; the spacing grows if the window would otherwise need more than MAX_POINTS."""
    theta, epsilon = saddle.tilt, saddle.epsilon
    value, _, second = generating(theta)
    deviation = float(np.sqrt(second))
    log_error = np.log(_ALIASING) - np.log1p(theta * deviation)
    steps = np.geomspace(0.5, 40.0, 16) / deviation
    reaches = [(generating(theta + step)[0] - value - log_error) / step for step in steps]
    depths = [(log_error + value - generating(theta - step)[0]) / step for step in steps]
    up, down = int(np.argmin(reaches)), int(np.argmax(depths))
    reach, bottom = max(float(reaches[up]) - epsilon, 0.0), min(float(depths[down]), epsilon)
    above = min(reach, (np.log1p(theta) - log_error) / theta)
    length = max(reach, epsilon - bottom + above) + 8 * spacing
    spacing = max(spacing, length / MAX_POINTS)
    points = fft.next_fast_len(int(np.ceil(length / spacing)) + 16, real=True)
    return Plan(
        direction=generating.direction,
        spacing=spacing,
        points=points + points % 2,
        bottom=bottom - 4 * spacing,
        tilt=theta,
        up=float(steps[up]),
        down=float(steps[down]),
        centre=epsilon,
        tail=tail,
        opposite=saddle_at_epsilon(other, epsilon).tilt,
    )
