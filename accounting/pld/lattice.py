"""Choose tilt, lattice and window of a composition from its approximate cumulants."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import fft

from dpsweep.accounting.pld.fourier import transform_error
from dpsweep.accounting.pld.lattice_plan import LatticePlan
from dpsweep.accounting.pld.loss import MAX_POINTS
from dpsweep.accounting.pld.saddlepoint import Cumulants, Saddle, chernoff_tilt, log_peak

_MOST_WORK = 1 << 24  # limit on entries of a table times its sensitivities
_FEWEST = 1 << 15  # entries that a table may always have
_ALIASING = 1e-5  # target for the relative error of delta from mass outside the window
_ROUNDING = 1e-5  # target for the relative error of delta from the transform
_FLOOR = 1e-7  # probability that any of the rounds has a loss below its table
_SHARES = (1.0, 0.7, 0.5, 0.35, 0.25)  # tilts to try, as a share of the saddle point's


def spacing_for(rounds: int, saddle: Saddle, tolerance: float) -> float:
    """Return the lattice spacing at which upper and lower epsilon of ``rounds`` rounds differ by ``tolerance``,
    relative.

    Spreading a cell over its nodes adds a variance of h^2/6 per round and merging one removes h^2/12; epsilon changes
    by (1 + theta) / 2 times the composed variance. Rounds finer than the lattice change it less, in practice a third.
    For epsilons below 1 / (1 + theta) the difference is relative to that value.
    """
    scale = max(saddle.epsilon, 1 / (1 + saddle.tilt))
    return float(np.sqrt(3 * tolerance * scale / ((1 + saddle.tilt) * rounds)))


def make_plan(
    generating: Cumulants, other: Cumulants, saddle: Saddle, spacing: float, tail: float, rounds: int
) -> LatticePlan:
    """Return a plan centred at ``saddle``, with a larger spacing than asked for if window or tables would be too long.

    A tilt below the saddle point's narrows the window, because rare large losses weigh less. The tilt with the shortest
    window is chosen for which the transform's error, relative to exp(K(theta) - theta epsilon), is negligible.
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
        log_delta=saddle.log_delta,
        up=window.up,
        down=window.down,
        centre=saddle.epsilon,
        tail=tail,
        floor=max(tail, _FLOOR / rounds),
        opposite=chernoff_tilt(other, saddle),
    )


@dataclass(frozen=True)
class _Window:
    """The window of losses at a tilt, the tilts of the Chernoff bounds outside it, and the transform's error."""

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
    reaches = (generating.values(theta + steps) - value - log_error) / steps
    depths = (log_error + value - generating.values(theta - steps)) / steps
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
