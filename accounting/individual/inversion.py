"""From the spectrum to epsilon, for many examples at once: group rows by contour, then solve delta(eps) = delta.

See `dpsweep.accounting.individual.exact_composition` for the formula. All choices for a row depend on that row alone,
so its result has the same bits whatever other rows are accounted with it.

Where the spectrum falls slowly, it is damped by one more Gaussian mechanism of precision v: K gains v z (z-1) / 2. The
damped delta_v is at least delta, because another mechanism only adds cost. Its excess is bounded as follows. Let N ~
N(-v/2, v) be independent of the loss L, and y = L - eps. Then

    E_N[(e^(L+N) - e^eps)_+] - (e^L - e^eps)_+ = e^eps int_0^v e^(y/2) phi(y / sqrt(t)) e^(-t/8) / (2 sqrt(t)) dt

by the vega of Black and Scholes, phi the standard normal density. As exp(-y^2 / 2t) grows with t, this is at most e^eps
v e^(y/2) phi_v(y) with the density phi_v of N(0, v). Its transform along Re z = a gives

    E_Q[e^eps v e^(y/2) phi_v(y)] = (1/2 pi) int v e^(v/8) exp(K(z) + v z (z-1) / 2 + eps (1 - z)) dw.

So delta(eps) is at least the damped integral with 1 / (z (z-1)) replaced by 1 / (z (z-1)) - v e^(v/8). The trapezoidal
rule adds the aliases of delta_v, which `spectrum_kernels._aliasing` bounds, and subtracts aliases of the density term,
which only lowers the lower bound.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dpsweep.accounting.individual.contour import Complex, Contour
from dpsweep.accounting.individual.contributions import Array, StepWeights
from dpsweep.accounting.individual.kernels import reach
from dpsweep.accounting.individual.rdp import FEW_ORDERS, RenyiCosts
from dpsweep.accounting.individual.spectrum_kernels import certified_bounds

_TILT_STEP, _PERIOD_STEP, _REACH_STEP = 1.25, 2.0, 2.0**0.5
"""Examples share a contour if their tilt - 1, period and largest sqrt(u) agree within these factors."""

_MOST_STEPS = 1000
"""Largest exponent of these factors; beyond it, values count as equal."""

_RETREAT = 0.7
"""Ratio of tilt - 1 to the best Renyi order - 1; higher orders then bound the aliasing."""

NEGLIGIBLE = 1e-6
"""Target size of exp(K) where a contour ends, relative to the real point."""

_ALIASING = 1e-3
"""Target size of aliasing, relative to delta. The relative error of epsilon is smaller by the factor (a - 1) eps."""

_TAIL_ORDERS = 16
"""Number of orders above the tilt that bound aliases; at the highest, alpha - 1 is nine times the tilt's."""

FLOAT_ERROR = 1e-11
"""Bound on the relative rounding error of a term, apart from the rounding of the moments (`STEP_ERROR`)."""

STEP_ERROR = 1e-14
"""Bound on the rounding error that each step adds to K."""

_DAMPING = 20.0
"""Terms beyond the contour are damped by at least exp(-20) = 2e-9."""

LARGEST_INVERTED = 1e3
"""Above it the Renyi bound is returned: it is nearly tight there, and the contour would need too much memory."""


@dataclass(frozen=True)
class Bucket:
    """Rows that share a contour's tilt and period.

    stops[p]: of the nodes of sampling rate p, rows have weight only on those before this index. rdp [rows, orders]:
    RDP at the orders of `tail_places`.
    """

    rows: NDArray[np.intp]
    tilt: float
    period: float
    stops: tuple[int, ...]
    rdp: Array

    def of(self, some: NDArray[np.intp]) -> Bucket:
        """Return the bucket with only some of its rows."""
        return replace(self, rows=self.rows[some], rdp=self.rdp[some])


def buckets(costs: StepWeights, renyi: RenyiCosts) -> Iterator[Bucket]:
    """Assign each row with 0 < Renyi epsilon <= `LARGEST_INVERTED` to a bucket, which depends on that row alone."""
    active = np.flatnonzero((renyi.epsilons > 0.0) & (renyi.epsilons <= LARGEST_INVERTED))
    tilt_steps = _steps(renyi.orders[active] - 1.0, _TILT_STEP)
    periods, rdp = np.empty(len(active)), np.empty((len(active), _TAIL_ORDERS))
    for at in _alike(tilt_steps):
        tilt = _tilt(int(tilt_steps[at[0]]))
        places = tail_places(tilt)
        tail = renyi.rdp(active[at], places)
        periods[at] = _periods(tail, FEW_ORDERS[places], renyi.epsilons[active[at]], renyi.delta, tilt)
        rdp[at, : len(places)] = tail
    period_steps = _steps(periods, _PERIOD_STEP)
    stops = [own[active] for own in _stops(costs)]
    for rows in _alike(tilt_steps, period_steps, *stops):
        at = rows[0]
        tilt, period = _tilt(int(tilt_steps[at])), _PERIOD_STEP ** (float(period_steps[at]) + 0.5)
        tail = rdp[rows, : len(tail_places(tilt))]
        yield Bucket(active[rows], tilt, period, tuple(int(own[at]) for own in stops), tail)


def _alike(*columns: NDArray[np.intp]) -> list[NDArray[np.intp]]:
    """Return groups of rows with equal entries in all columns, by counting: values of a column span a small range."""
    key = np.zeros(len(columns[0]), np.intp)
    for column in columns:
        numbers = _numbered(column)
        key = _numbered(key * (numbers.max(initial=0) + 1) + numbers)
    short = key.astype(np.min_scalar_type(key.max(initial=0)))  # short numbers are sorted fast
    return np.split(np.argsort(short, kind="stable"), np.cumsum(np.bincount(key))[:-1]) if len(key) else []


def _numbered(values: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return the rank of each value among the distinct values."""
    above = values - values.min(initial=0)
    present = np.zeros(above.max(initial=0) + 1, np.bool_)
    present[above] = True
    return np.asarray((np.cumsum(present) - 1)[above])


def _tilt(step: int) -> float:
    """Return the tilt of a bucket whose tilt - 1 has the exponent ``step`` of `_TILT_STEP`."""
    return 1.0 + _RETREAT * _TILT_STEP**step


def tilts_from(tilt: float, steps: Sequence[int]) -> list[float]:
    """Return the bucket tilts that lie ``steps`` steps above the bucket tilt ``tilt``, bit for bit as `buckets` has
    them.
    """
    first = round(np.log((tilt - 1.0) / _RETREAT) / np.log(_TILT_STEP))
    return [_tilt(first + step) for step in steps]


def _steps(values: Array, factor: float) -> NDArray[np.intp]:
    """Return the exponents of the powers of ``factor`` nearest to ``values``, clipped so that the powers stay
    finite.
    """
    steps = np.nan_to_num(np.round(np.log(values) / np.log(factor)))
    return np.asarray(np.clip(steps, -_MOST_STEPS, _MOST_STEPS), np.intp)


def tail_places(tilt: float) -> NDArray[np.intp]:
    """Return indices in `FEW_ORDERS` of the first orders clearly above ``tilt``, which bound aliases from the right."""
    return np.flatnonzero(1.1 * tilt < FEW_ORDERS)[:_TAIL_ORDERS]


def _periods(rdp: Array, orders: Array, epsilons: Array, delta: float, tilt: float) -> Array:
    """Return periods P [rows] so long that weighted aliases delta(eps + m P) are at most about `_ALIASING` delta(eps).

    To the left delta(eps - m P) <= 1. To the right delta(eps + m P) <= exp((b-1) (rdp_b - eps - m P)) for b > tilt. rdp
    [rows, orders]; epsilons [rows] by Renyi DP.
    """
    wanted = -np.log(delta * _ALIASING)
    log_tails = (orders - 1.0) * (rdp - 0.8 * epsilons[:, None])
    right = (log_tails + wanted) / (orders - tilt)
    return np.asarray(np.maximum(wanted / (tilt - 1.0), right.min(axis=1, initial=np.inf)))


def _stops(costs: StepWeights) -> list[NDArray[np.intp]]:
    """Return for each rate the nodes up to the last one a row uses, rounded up to one of few numbers >= 2; [rows].

    Rounding lets more rows share a bucket.
    """
    reached = np.empty((len(costs.sampled), len(costs.precision)), np.int64)
    reach(costs.steps.nodes, costs.steps.ends, np.array(costs.starts), reached)
    return [_rounded_stops(np.sqrt(part.precisions), own) for part, own in zip(costs.sampled, reached, strict=True)]


def _rounded_stops(roots: Array, reached: NDArray[np.int64]) -> NDArray[np.intp]:
    levels = roots[-1] * _REACH_STEP ** -np.arange(40.0)[::-1]
    stops = np.append(np.searchsorted(roots, levels[:-1], side="right"), len(roots))
    return np.asarray(np.maximum(stops[np.searchsorted(stops, reached, side="right")], 2))


def plain_exponent(pure: tuple[float, ...], contour: Contour, v: float) -> tuple[Complex, Complex]:
    """Return K [points] of pure releases with these epsilons plus the damping v; K [points] of a Gaussian of precision
    1.
    """
    z = contour.points
    gaussian = np.asarray(0.5 * z * (z - 1.0))
    exponent = v * gaussian
    for epsilon in pure:
        exponent = exponent + _log_pure_moment(epsilon, z)
    return exponent, gaussian


def damping(contour: Contour) -> float:
    """Return the precision v of damping that makes all frequencies beyond the contour negligible."""
    return 2.0 * _DAMPING / contour.end**2


def _upper_kernel(contour: Contour) -> Complex:
    """Return the factor of exp(K) at each point; half at the first one, as the contour's other half is the complex
    conjugate.
    """
    z = contour.points
    return np.asarray(np.where(np.arange(contour.size) == 0, 0.5, 1.0) / (z * (z - 1.0)))


@functools.lru_cache(maxsize=512)
def upper_factors(contour: Contour) -> Array:
    """Return the kernel of the upper bound as real part, imaginary part and modulus; [3, points].

    So `spectrum_kernels.certified_bounds` takes it.
    """
    return _factors(_upper_kernel(contour))


@functools.lru_cache(maxsize=64)
def lower_factors(contour: Contour, v: float) -> Array:
    """Return that of the lower bound if exp(K) is damped by precision v; see the module's description."""
    z = contour.points
    return _factors(np.asarray(_upper_kernel(contour) * (1.0 - v * np.exp(0.125 * v) * z * (z - 1.0))))


def _factors(kernel: Complex) -> Array:
    return np.array([kernel.real, kernel.imag, np.abs(kernel)])


def truncation_bound(contour: Contour, size: int, v: float) -> float:
    """Return the bound for both kernels on the sum of |kernel| exp(-v w^2 / 2) over the terms from ``size`` on.

    Times exp(K) at the real point, it bounds the sum of the terms left out. 1/|z (z-1)| sums to at most
    (1 + 1/size) / (spacing end). The damping falls at least geometrically.
    """
    end = contour.spacing * size
    bump = v * np.exp(0.125 * v) + (np.exp(0.125 * v) / (end * contour.spacing))
    plain = (1.0 + 1.0 / size) / (contour.spacing * end)
    return float(np.exp(-0.5 * v * end**2) * (plain + (bump if v > 0.0 else 0.0)))


def raise_bounds(
    bounds: Array, bucket: Bucket, exponents: Array, cuts: Array, contour: Contour, v: float, renyi: RenyiCosts
) -> None:
    """Raise ``bounds`` [2, all rows] for the rows of a bucket; see `spectrum_kernels.certified_bounds`.

    exponents [rows, ...]: its argument ``sums``, with K damped by v. cuts: of the contour. renyi: of all rows.
    """
    left, tails = _alias_bounds(contour, v)
    above = upper_factors(contour)
    certified_bounds(
        exponents,
        above,
        lower_factors(contour, v) if v > 0.0 else above,
        cuts,
        np.array([contour.tilt, contour.spacing, left, v]),
        renyi.delta,
        tails,
        bucket.rdp,
        bucket.rows,
        renyi.epsilons,
        bounds,
    )


@functools.lru_cache(maxsize=512)
def _alias_bounds(contour: Contour, v: float) -> tuple[float, Array]:
    """Return the bound on aliases from the left, and coefficients [2, orders] of the bound on those from the right.

    The orders are `tail_places`; see `spectrum_kernels._aliasing`.
    """
    period, tilt = 2.0 * np.pi / contour.spacing, contour.tilt
    orders = FEW_ORDERS[tail_places(tilt)]
    aliases = 0.5 * v * orders * (orders - 1.0) + _log_series((orders - tilt) * period)
    return float(np.exp(_log_series(np.array((tilt - 1.0) * period)))), np.array([orders - 1.0, aliases])


def _log_series(rate: Array) -> Array:
    """Return the log of the sum over m >= 1 of exp(-rate m)."""
    return np.asarray(-rate - np.log(-np.expm1(-rate)))


def _log_pure_moment(epsilon: float, z: Complex) -> Complex:
    """Return log E_Q[(P/Q)^z] of randomised response, which dominates (epsilon, 0)-DP releases; the same at 1 - z."""
    share = 1.0 / (1.0 + np.exp(-epsilon))
    log_moment = np.log(share * np.exp((z - 1.0) * epsilon) + (1.0 - share) * np.exp(-(z - 1.0) * epsilon))
    return np.asarray(log_moment.real + 1j * log_moment.imag)
