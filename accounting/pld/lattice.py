"""Choose tilt, lattice and window of a composition from its approximate cumulants."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import fft

from dpsweep.accounting.pld.loss import MAX_POINTS, Direction
from dpsweep.accounting.pld.saddlepoint import Cumulants, Saddle, chernoff_tilt, log_peak

_EPS = float(np.finfo(np.float64).eps)
_MOST_WORK = 1 << 24  # limit on entries of a table times its sensitivities
_FEWEST = 1 << 15  # entries that a table may always have
_ALIASING = 1e-5  # target for the relative error of delta from mass outside the window
_ROUNDING = 1e-5  # target for the relative error of delta from the transform
_FLOOR = 1e-7  # probability that any of the rounds has a loss below its table
_SHARES = (1.0, 0.7, 0.5, 0.35, 0.25)  # tilts to try, as a share of the saddle point's


@dataclass(frozen=True)
class LatticePlan:
    """How to compose: lattice ``spacing`` and ``points``, the window's first loss ``bottom``, and the tilts.

    tilt: theta.
    log_delta: of the delta of interest, about.
    up, down: the Chernoff bounds on aliasing use the tilts theta + up and theta - down.
    centre: the epsilon of interest.
    tail: probability that a round may lose to infinity.
    floor: probability of the least losses; a round may round them up, or drop them for the lower bound.
    opposite: tilt of the Chernoff bound on the other direction, None if no such bound is good enough.
    """

    direction: Direction
    spacing: float
    points: int
    bottom: float
    tilt: float
    log_delta: float
    up: float
    down: float
    centre: float
    tail: float
    floor: float
    opposite: float | None


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


def transform_error(rounds: int, tilt: float, spacing: float, points: int) -> float:
    """Return the bound on the error of delta from the transforms, in units of exp(K(tilt) - tilt epsilon).

    delta sums the entries of the composed, tilted law with weights exp(-tilt u) (1 - exp(-u)) at distances u, spaced by
    h, above epsilon. Every frequency k of its spectrum errs by at most rounds * 4 eps log2(points), and counts with the
    weights' transform. Its size is at most their sum S, and, because they rise to a peak W and fall, at most W / sin(pi
    k / points) (summation by parts). The mean over k of the smaller is at most S / points + W (1 + ln(S / W)). The
    inverse transform adds 4 eps log2(points) to every entry.
    """
    each = 4 * _EPS * np.log2(points)
    total = 1 / (tilt * (1 + tilt) * spacing) + 1.0
    peak = float(np.exp(log_peak(tilt)))
    mean_over_frequencies = total / points + peak * (1.0 + np.log(total / peak))  # of the smaller of the two
    return float(each * (rounds * min(total, mean_over_frequencies) + 2 * total))
