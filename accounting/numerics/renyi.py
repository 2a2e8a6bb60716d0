"""Renyi differential privacy (RDP) of the mechanisms in a trace, to full relative precision.

The sampled Gaussian mechanism with rate q and noise multiplier sigma has RDP log(A_alpha) / (alpha - 1) with A_alpha =
E_{x ~ N(0, sigma^2)} [((1 - q) + q exp((2 x - 1) / (2 sigma^2)))^alpha] (Mironov, Talwar and Zhang 2019,
arXiv:1908.10530, Theorems 4 and 5). It bounds both directions of add/remove. Per step A_alpha - 1 may be as small
as 1e-12, so both evaluations below sum the non-negative terms of A_alpha - 1, never of A_alpha itself.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln, logsumexp

from dpsweep.accounting.numerics.rounding import ROUND_UP

Array = NDArray[np.float64]

ORDERS: Array = np.unique(
    np.concatenate(
        [
            1.0 + np.geomspace(0.02, 10.9, 160),
            np.arange(2.0, 65.0),
            np.arange(68.0, 129.0, 4.0),
            2.0 ** np.arange(8, 13),
        ]
    )
)
"""Orders alpha over which the conversions to (epsilon, delta) minimise."""

_GRIDS = 8
"""Grids of integration for fractional orders; a few orders share one."""

_LARGEST_EXPONENT = 600.0
"""Exponentials up to this neither overflow nor underflow; they are then summed directly, five times as fast."""

_SUMMED = 30.0
"""Logarithms of moments below this are mixed by their exponentials less 1."""

_SMALL = 0.05
"""Below this alpha |y| the excess (1 + y)^alpha - 1 - alpha y is summed as a binomial series."""

_POWERS = 10
"""Largest power of that series; what is left out is at most 1e-13 of it."""


@np.errstate(divide="ignore")  # no noise costs infinity
def gaussian_rdp(noise_multiplier: float, orders: Array = ORDERS) -> Array:
    """Return RDP alpha / (2 sigma^2) of the Gaussian mechanism at each order."""
    return np.asarray(orders / (2.0 * noise_multiplier**2))


@functools.lru_cache(maxsize=4096)
def sampled_gaussian_rdp(sample_rate: float, noise_multiplier: float) -> Array:
    """Return RDP of the Poisson-sampled Gaussian mechanism at `ORDERS`, under add/remove of one example."""
    rdp = _sampled_rdp(sample_rate, noise_multiplier, ORDERS)
    rdp.setflags(write=False)
    return rdp


def sampled_gaussian_rdp_at(order: int, sample_rate: float, noise_multiplier: float) -> float:
    """Return RDP as `sampled_gaussian_rdp` at one whole order > 1, to full relative precision however little a step
    costs.
    """
    return float(_sampled_rdp(sample_rate, noise_multiplier, np.array([float(order)]))[0])


def _sampled_rdp(sample_rate: float, noise_multiplier: float, orders: Array) -> Array:
    unsampled = gaussian_rdp(noise_multiplier, orders)
    if sample_rate == 1.0:
        return unsampled
    whole = np.floor(orders) == orders
    log_moments = np.empty_like(orders)
    if whole.any():
        log_moments[whole] = _log_moments_whole(sample_rate, noise_multiplier, orders[whole])
    if not whole.all():
        log_moments[~whole] = _log_moments_fractional(sample_rate, noise_multiplier, orders[~whole])
    return np.asarray(np.minimum(log_moments / (orders - 1.0) * ROUND_UP, unsampled))


def pure_rdp(epsilon: float, orders: Array = ORDERS) -> Array:
    """Return RDP of any (epsilon, 0)-DP mechanism: that of randomised response, which dominates it.

    With x = (alpha - 1) epsilon: log(1 + 2 sinh(x/2)^2 + tanh(epsilon/2) sinh(x)) / (alpha - 1), at most epsilon.
    """
    x = (orders - 1.0) * epsilon
    with np.errstate(over="ignore"):
        moments_less_1 = 2.0 * np.sinh(0.5 * x) ** 2 + np.tanh(0.5 * epsilon) * np.sinh(x)
    return np.asarray(np.minimum(np.log1p(moments_less_1) / (orders - 1.0) * ROUND_UP, epsilon))


def mixed_rdp(shares: Sequence[float], rdps: Sequence[Array]) -> Array:
    """Return RDP at `ORDERS` of a mechanism drawn by a public coin: ``shares`` [cases] sum to 1, rdps [cases][orders].

    log(sum_i p_i exp((alpha - 1) D_i)) / (alpha - 1), in both directions. exp(x) - 1 is summed, so that nothing
    cancels however little a step costs.
    """
    if len(rdps) == 1:
        return rdps[0]
    exponents = (ORDERS - 1.0) * np.asarray(rdps)
    with np.errstate(over="ignore", divide="ignore"):
        small = np.log1p(np.asarray(shares) @ np.expm1(np.minimum(exponents, _SUMMED)))
        large = logsumexp(exponents + np.log(np.asarray(shares))[:, None], axis=0)
    mixed = np.where(exponents.max(axis=0) < _SUMMED, small, large)
    return np.asarray(mixed / (ORDERS - 1.0) * ROUND_UP)


def epsilon_improved(rdp: Array, delta: float) -> Array:
    """Return the epsilon of RDP values [..., orders] at `ORDERS`; shape [...].

    rdp + log(1 - 1/alpha) - log(delta alpha) / (alpha - 1)  (Canonne, Kamath and Steinke 2020, Prop. 12). It is 0 where
    delta is at least the total variation distance, bounded by sqrt(1 - exp(-KL)) (Bretagnolle-Huber).
    """
    best = np.min(rdp + improved_terms(delta), axis=-1, initial=np.inf)
    return zero_where_free(best, np.min(rdp, axis=-1, initial=np.inf), delta)


def zero_where_free(epsilons: Array, rdp: Array, delta: float) -> Array:
    """Return `epsilon_improved`, given the least sum and the least RDP, both of any shape."""
    return np.where(rdp < -np.log1p(-(delta**2)), 0.0, np.maximum(epsilons, 0.0))


def improved_terms(delta: float) -> Array:
    """Return the terms that `epsilon_improved` adds to the RDP at each of `ORDERS`.

    Over all real orders the sum falls, then rises. Times (alpha - 1) it is N = (alpha - 1) rdp + (alpha - 1)
    log(alpha - 1) - alpha log(alpha) - log(delta). (alpha - 1) rdp = log A_alpha is convex in alpha, and the second
    derivative of the rest is 1 / (alpha (alpha - 1)) > 0. So {alpha: N <= c (alpha - 1)} is an interval for every c.
    """
    return np.asarray(np.log1p(-1.0 / ORDERS) - np.log(delta * ORDERS) / (ORDERS - 1.0))


def epsilon_classic(rdp: Array, delta: float) -> float:
    """Return the epsilon by rdp + log(1/delta) / (alpha - 1)  (Mironov 2017, Prop. 3), the conversion of papers A
    and C.
    """
    return float(np.min(rdp + classic_terms(delta)))


def classic_terms(delta: float) -> Array:
    """Return the terms that `epsilon_classic` adds to the RDP at each of `ORDERS`; larger than `improved_terms`.

    Over all real orders the sum falls, then rises: times (alpha - 1) it is log A_alpha - log(delta), which is convex.
    """
    return np.asarray(-np.log(delta) / (ORDERS - 1.0))


def _log_moments_whole(sample_rate: float, noise_multiplier: float, orders: Array) -> Array:
    """log A_alpha at integer orders: A_alpha - 1 = sum_j C(alpha, j) (1-q)^(alpha-j) q^j (e^{(j^2-j)/(2 sigma^2)} - 1).

    The weights sum to 1, so subtracting 1 term by term leaves non-negative terms; the terms for j = 0 and 1 vanish.
    """
    alphas, places, log_binomials, starts = _binomial_terms(tuple(orders.astype(int)))
    powers = np.arange(2.0, orders.max() + 1.0)
    exponents = (powers * powers - powers) / (2.0 * noise_multiplier**2)
    log_expm1 = exponents + np.log(-np.expm1(-exponents))
    log_weights = (powers * np.log(sample_rate))[places] + (alphas - powers[places]) * np.log1p(-sample_rate)
    terms = log_binomials + log_weights + log_expm1[places]
    largest = np.maximum.reduceat(terms, starts)
    lengths = np.diff(np.append(starts, len(terms)))
    sums = np.add.reduceat(np.exp(terms - np.repeat(largest, lengths)), starts)
    return np.asarray(np.logaddexp(0.0, largest + np.log(sums)))


@functools.lru_cache(maxsize=8)
def _binomial_terms(orders: tuple[int, ...]) -> tuple[Array, NDArray[np.intp], Array, NDArray[np.intp]]:
    """alpha, j - 2 and log C(alpha, j) for j = 2..alpha, one order after the other, and the index where each starts."""
    alphas = np.concatenate([np.full(order - 1, float(order)) for order in orders])
    powers = np.concatenate([np.arange(2.0, order + 1.0) for order in orders])
    log_binomials = gammaln(alphas + 1.0) - gammaln(powers + 1.0) - gammaln(alphas - powers + 1.0)
    starts = np.cumsum([0] + [order - 1 for order in orders[:-1]])
    return alphas, (powers - 2.0).astype(np.intp), log_binomials, starts


def _log_moments_fractional(sample_rate: float, noise_multiplier: float, orders: Array) -> Array:
    """log A_alpha by the trapezoidal rule on the integrand (1 + y)^alpha - 1 - alpha y >= 0, y = q (exp(loss) - 1).

    E[y] = 0, so this integrates A_alpha - 1. The integrand is a Gaussian of width sigma times a function analytic in a
    strip of half-width pi sigma^2 (where 1 - q + q exp(loss) first vanishes). So the rule with step h errs by about
    exp(-2 pi^2 min(sigma, sigma^2) / h) = exp(-79) relative to it. Cutting at 13 sigma leaves exp(-84). Below sigma =
    0.1 the grid would be long and the bound vacuous, so the unsampled RDP is returned.
    """
    if noise_multiplier < 0.1:
        return np.asarray((orders - 1.0) * gaussian_rdp(noise_multiplier, orders))
    grids = _GRIDS if noise_multiplier < 1.0 else 1  # from 1 on the longest has 1.5 times the points of the shortest
    few = np.array_split(orders, min(grids, len(orders)))
    return np.concatenate([_on_a_grid(sample_rate, noise_multiplier, some) for some in few])


def _on_a_grid(sample_rate: float, noise_multiplier: float, orders: Array) -> Array:
    """`_log_moments_fractional` of ascending orders that share a grid, whose length grows with the largest of them.

    The integrand's peak lies between 1 and the order, or at 2 where y is small up to there. Where y is small, the
    integrand is summed as the binomial series from its second power on, because as a difference it would cancel.
    """
    spread = 13.0 * noise_multiplier
    step = min(noise_multiplier, noise_multiplier**2) / 4.0
    x = np.arange(-spread, max(orders[-1], 2.0) + spread, step)
    loss = (2.0 * x - 1.0) / (2.0 * noise_multiplier**2)
    log_density = -0.5 * (x / noise_multiplier) ** 2 + np.log(step / (noise_multiplier * np.sqrt(2.0 * np.pi)))
    with np.errstate(over="ignore"):
        y = sample_rate * np.expm1(loss)
    small = np.abs(y) < _SMALL / orders[-1]
    moments = np.exp(log_density[small]) @ np.vander(y[small], _POWERS + 1, increasing=True)
    near = _binomials(orders.tobytes()) @ moments[2:]
    loss, log_density = loss[~small], log_density[~small]
    log_ratio = np.where(
        loss < 0.0,
        np.log1p(sample_rate * np.expm1(np.minimum(loss, 0.0))),
        np.logaddexp(np.log1p(-sample_rate), np.log(sample_rate) + loss),
    )
    growth = orders[:, None] * log_ratio
    if max(growth[-1].max(initial=0.0), -log_density.min(initial=0.0)) < _LARGEST_EXPONENT:
        excess = np.expm1(growth) - orders[:, None] * np.expm1(log_ratio)
        return np.asarray(np.log1p(near + np.maximum(excess, 0.0) @ np.exp(log_density)))
    log_excess = _log_excess(growth, orders[:, None], log_ratio)
    return np.asarray(np.logaddexp(np.log1p(near), logsumexp(log_excess + log_density, axis=1)))


def _log_excess(growth: Array, orders: Array, log_ratio: Array) -> Array:
    """log((1 + y)^alpha - 1 - alpha y) of the logarithms of (1 + y)^alpha and 1 + y, without overflow."""
    bounded = np.minimum(growth, 30.0)
    excess = np.expm1(bounded) - orders * np.expm1(np.minimum(log_ratio, bounded.max()))
    with np.errstate(divide="ignore", invalid="ignore"):
        beyond = growth + np.log1p(-orders * np.exp(log_ratio - growth))  # 1 and alpha are negligible there
        return np.asarray(np.where(growth < 30.0, np.log(np.maximum(excess, 0.0)), beyond))


@functools.lru_cache(maxsize=64)
def _binomials(orders: bytes) -> Array:
    """C(alpha, k) at every order for k = 2 up to `_POWERS`."""
    k = np.arange(float(_POWERS))
    return np.asarray(np.cumprod((np.frombuffer(orders)[:, None] - k) / (k + 1.0), axis=1)[:, 1:])
