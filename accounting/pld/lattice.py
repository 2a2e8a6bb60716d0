"""Choose tilt, lattice and window of a composition from its approximate cumulants."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import fft

from accounting.pld.fourier import LatticePlan, transform_error
from accounting.pld.group_rounds import GroupRounds
from accounting.pld.loss import MAX_POINTS
from accounting.pld.saddlepoint import Cumulants, Saddle, chernoff_tilt, log_peak

_MOST_WORK = 1 << 24  # entries of a table times its sensitivities
_FEWEST = 1 << 15  # entries that any table may have
_ALIASING = 1e-5  # wanted error of delta, relative, from everything outside the window
_ROUNDING = 1e-5  # wanted error of delta, relative, from the transform
_FLOOR = 1e-7  # probability that any of the rounds has a loss below its table
_SHARES = (1.0, 0.7, 0.5, 0.35, 0.25)  # tilts to try, as a share of the saddle point's


def spacing_for(rounds: GroupRounds, saddle: Saddle, tolerance: float) -> float:
    """The lattice spacing at which upper and lower epsilon differ by about ``tolerance``, relative.

    Spreading a cell over its nodes adds a variance of h^2/6 per round, merging one removes h^2/12, and epsilon moves
    by (1 + theta) / 2 times the composed variance; rounds finer than the lattice by less, in practice a third.
    Epsilons below 1 / (1 + theta) are measured on that scale.
    """
    scale = max(saddle.epsilon, 1 / (1 + saddle.tilt))
    return float(np.sqrt(3 * tolerance * scale / ((1 + saddle.tilt) * rounds.count)))


def make_plan(
    generating: Cumulants, other: Cumulants, saddle: Saddle, spacing: float, tail: float, rounds: int
) -> LatticePlan:
    """A plan around ``saddle``; the spacing grows if window or tables would otherwise be too long.

    A tilt below the saddle point's narrows the window, since rare large losses weigh less, until the transform's
    rounding error, which is relative to exp(K(theta) - theta epsilon), becomes a noticeable part of delta.
    """
    windows = [_window(generating, saddle, share * saddle.tilt, rounds, spacing) for share in _SHARES]
    precise = [window for window in windows if window.rounding <= _ROUNDING] or windows[:1]
    window = min(precise, key=lambda candidate: candidate.length)
    affordable = min(max(_MOST_WORK // generating.atoms, _FEWEST), MAX_POINTS) - 64
    spacing = max(spacing, (window.length + max(generating.highest, 0.0)) / affordable)
    points = min(float(MAX_POINTS), window.length / spacing)
    half = fft.next_fast_len(int(np.ceil(points)) // 2 + 13, real=True)
    return LatticePlan(
        direction=generating.direction,
        spacing=spacing,
        points=2 * half,
        bottom=window.bottom - 4 * spacing,
        tilt=window.tilt,
        up=window.up,
        down=window.down,
        centre=saddle.epsilon,
        tail=tail,
        floor=max(tail, _FLOOR / rounds),
        opposite=chernoff_tilt(other, saddle),
    )


@dataclass(frozen=True)
class _Window:
    """The losses needed at a tilt, the Chernoff tilts that bound what lies outside, and the transform's error."""

    tilt: float
    bottom: float
    length: float
    up: float
    down: float
    rounding: float


def _window(generating: Cumulants, saddle: Saddle, theta: float, rounds: int, spacing: float) -> _Window:
    epsilon = saddle.epsilon
    value, _, second = generating(theta)
    scale = value - theta * epsilon - saddle.log_delta  # log of exp(K - theta epsilon) / delta
    log_error = np.log(_ALIASING) - scale - log_peak(theta)
    steps = np.geomspace(0.5, 40.0, 12) / max(float(np.sqrt(second)), 1e-2 / theta)
    reaches = [(generating(theta + step)[0] - value - log_error) / step for step in steps]
    depths = [(log_error + value - generating(theta - step)[0]) / step for step in steps]
    up, down = int(np.argmin(reaches)), int(np.argmax(depths))
    reach, bottom = max(float(reaches[up]) - epsilon, 0.0), min(float(depths[down]), epsilon)
    above = min(reach, max(0.0, scale - np.log(_ALIASING)) / theta)
    return _Window(
        tilt=theta,
        bottom=bottom,
        length=max(reach, epsilon - bottom + above),
        up=float(steps[up]),
        down=float(steps[down]),
        rounding=float(np.exp(scale) * transform_error(rounds, theta, spacing, MAX_POINTS)),
    )
