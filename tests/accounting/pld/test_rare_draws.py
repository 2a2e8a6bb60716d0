"""Runs that draw an example rarely, at small delta, against a contour integral of the moment generating function."""

import mpmath
import numpy as np
import pytest
from scipy import stats

from dpsweep.accounting import PoissonSampling, Segment, Trace, account, privacy_curve
from dpsweep.accounting.pld import delta_pld, epsilon_pld
from dpsweep.accounting.pld.sensitivity import SensitivityMixture
from tests.known import known


def trace_of(rate: float, sigma: float, steps: int) -> Trace:
    return Trace(10**9, (Segment(0, steps, PoissonSampling(rate), sigma),))


def exact_delta(rate: float, sigma: float, steps: int, epsilon: float, lost: float) -> float:
    """delta of removing the example: 1/(2 pi) times the integral of M(z)^steps exp(-z epsilon) / (z (z + 1)).

    z runs along the line Re z = a on which the integrand is least, by the trapezoidal rule. M(z) = E[exp(z loss)] is a
    sum over outputs, without the highest, of probability ``lost`` in the whole run. Nothing is on a lattice of losses.
    """
    highest = 1.0 - sigma * stats.norm.ppf(lost / (rate * steps))
    outputs = np.linspace(-14.0 * sigma, highest, 4001)
    alone = stats.norm.pdf(outputs, 0.0, sigma) * (outputs[1] - outputs[0])
    ratio = rate * np.expm1((2.0 * outputs - 1.0) / (2.0 * sigma**2))  # P = (1 + ratio) Q, and E_Q[ratio] = 0
    losses = np.log1p(ratio)

    def log_integrand(z: complex) -> complex:
        excess = np.expm1((1.0 + z) * losses) - (1.0 + z) * ratio  # E_Q of it is M(z) - 1
        return complex(steps * np.log1p(np.sum(alone * excess)) - z * epsilon - np.log(z) - np.log1p(z))

    with np.errstate(over="ignore", invalid="ignore"):
        heights = np.geomspace(1.0, 1e9, 400)
        a = float(heights[np.nanargmin([log_integrand(complex(height)).real for height in heights])])
        total, peak = 0.5 * np.exp(log_integrand(complex(a)).real), np.exp(log_integrand(complex(a)).real)
        for point in range(1, 40_000):
            term = np.exp(log_integrand(complex(a, point * a / 64.0)))
            total += term.real
            if abs(term) < 1e-16 * peak:
                break
    return float(total * a / 64.0 / np.pi)


@pytest.mark.thinned(14)
@pytest.mark.parametrize(
    ("rate", "sigma", "steps", "delta", "gap"),
    [
        (1e-5, 0.8, 50_000, 1e-10, 0.002),
        (1e-6, 1.0, 1_000_000, 1e-9, 3e-4),
        (1e-4, 0.6, 5_000, 1e-12, 1e-4),
        (1e-7, 0.7, 10_000_000, 1e-10, 0.012),
        (1e-10, 1.5, 1_000_000, 1e-8, 0.12),  # one loss in double precision has few digits
        (1e-5, 2.0, 1_000_000, 1e-12, 1e-4),
        (1e-3, 1.0, 1_000, 1e-10, 1e-4),
        pytest.param(1e-4, 0.8, 10_000_000, 1e-6, 2e-4, id="bulk of ten cells"),
    ],
)
def test_the_bounds_enclose_the_contour_integral(
    rate: float, sigma: float, steps: int, delta: float, gap: float
) -> None:
    trace = trace_of(rate, sigma, steps)
    claimed = epsilon_pld(trace, delta)
    assert known(claimed.lower) <= claimed.upper <= known(claimed.lower) * (1 + gap)
    margin = 2e-5  # of what the integral leaves out
    assert exact_delta(rate, sigma, steps, claimed.upper, 1e-5 * delta) <= delta * (1 + margin)
    assert exact_delta(rate, sigma, steps, known(claimed.lower), 1e-5 * delta) >= delta * (1 - margin)
    exact = exact_delta(rate, sigma, steps, 0.9 * known(claimed.lower), 1e-5 * delta)
    at = delta_pld(trace, 0.9 * known(claimed.lower))
    assert known(at.lower) * (1 - margin) <= exact <= at.upper * (1 + margin)
    assert at.upper <= 1.4 * known(at.lower)


@pytest.mark.parametrize("rate", [1e-15, 1e-10, 1e-3, 0.3, 0.7])
def test_the_probability_of_not_being_drawn_keeps_its_digits(rate: float) -> None:
    """As a double, 1 - 1e-10 has six digits of its distance from 1."""
    law = SensitivityMixture((0.0, 1.0), (1.0 - rate, rate))
    with mpmath.workdps(50):
        exact = mpmath.log(1 - mpmath.mpf(rate))
    assert law.log_zero_probability == pytest.approx(float(exact), rel=1e-14, abs=0.0)


@pytest.mark.long
@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("rate", "sigma", "steps", "delta"), [(1e-5, 0.8, 50_000, 1e-10), (1e-6, 1.0, 1_000_000, 1e-9)]
)
def test_the_curve_says_what_the_account_says(rate: float, sigma: float, steps: int, delta: float) -> None:
    trace = trace_of(rate, sigma, steps)
    claimed = account(trace, delta)
    curve = privacy_curve(trace, deltas=(delta,)).delta(claimed.epsilon)
    assert known(curve.lower) <= exact_delta(rate, sigma, steps, claimed.epsilon, 1e-5 * delta) * (1 + 2e-5)
    assert curve.upper == pytest.approx(delta, rel=2e-3)
