"""Complex moments against mpmath, and every bound that individual accounting rests on against the truth."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest

from dpsweep.accounting.individual.contour import (
    UNKNOWN,
    Array,
    Complex,
    Contour,
    decay_bound,
    exponent_of,
    moment_table,
)
from dpsweep.accounting.individual.contributions import StepLaw
from dpsweep.accounting.numerics.renyi import ORDERS, sampled_gaussian_rdp
from dpsweep.accounting.pld.loss import DIRECTIONS, Direction

NODES = np.square(np.linspace(0.0, 1.5, 120))


def _exact(sample_rate: float, u: float, exponent: complex) -> complex:
    s = mpmath.sqrt(u)

    def integrand(x: mpmath.mpf) -> mpmath.mpc:
        ratio = 1 - sample_rate + sample_rate * mpmath.e ** (s * x - mpmath.mpf(u) / 2)
        return mpmath.npdf(x) * ratio**exponent

    return complex(mpmath.quad(integrand, [-14, -6, -2, 0, 2, 6, 14, 26]))


def _dense(sample_rate: float, precisions: Array, exponents: Complex) -> Complex:
    """log A by brute force, [nodes, exponents]; the branch is followed along the exponents."""
    x = np.linspace(-13.0, 25.0, 6_001)
    density = np.exp(-0.5 * x**2) * (x[1] - x[0]) / np.sqrt(2.0 * np.pi)
    log_ratio = np.log1p(sample_rate * np.expm1(np.sqrt(precisions)[:, None] * x - 0.5 * precisions[:, None]))
    moments = np.array([[np.exp(e * row) @ density for e in exponents] for row in log_ratio])
    logs: Complex = np.log(np.abs(moments)) + 1j * np.unwrap(np.angle(moments), axis=1)
    return logs


@pytest.mark.thinned(2)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(("sample_rate", "tilt"), [(0.01, 4.0), (0.2, 2.5)])
def test_moments_match_mpmath(direction: Direction, sample_rate: float, tilt: float) -> None:
    contour = Contour(tilt, 0.7, 8)
    table = moment_table(StepLaw(sample_rate, 1.0), NODES, contour, direction)
    exponents = exponent_of(direction, contour.points)
    for node in (0, 30, 119):
        for k in (0, 1, 4):
            assert table.errors[node, k] < 1.0
            exact = _exact(sample_rate, float(NODES[node]), complex(exponents[k]))
            assert abs(np.exp(table.log_moments[node, k]) - exact) < 1e-12 * abs(exact)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(("sample_rate", "tilt"), [(0.01, 4.0), (0.01, 40.0), (0.2, 2.5), (0.7, 6.0)])
def test_chords_stay_within_the_linearity_error(direction: Direction, sample_rate: float, tilt: float) -> None:
    contour = Contour(tilt, 0.05 * tilt, 24)
    table = moment_table(StepLaw(sample_rate, 1.0), NODES, contour, direction)
    between = 0.5 * (NODES[1:] + NODES[:-1])
    cells = np.arange(0, 70, 6)
    truth = _dense(sample_rate, between[cells], exponent_of(direction, contour.points))
    chords = 0.5 * (table.log_moments[cells + 1] + table.log_moments[cells])
    allowed = np.minimum(table.errors[cells + 1], table.errors[cells])
    used = (table.errors[cells + 1] < UNKNOWN) & (table.errors[cells] < UNKNOWN)
    assert used[:2].all()
    assert (np.abs(truth - chords)[used] <= allowed[used] + 1e-12).all()


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(("sample_rate", "tilt"), [(0.01, 4.0), (0.2, 2.5), (0.7, 6.0)])
def test_moments_decay_at_least_as_proven(direction: Direction, sample_rate: float, tilt: float) -> None:
    exponents = exponent_of(direction, tilt + 1j * np.append(0.0, np.geomspace(1.0, 150.0, 40)))
    bound = decay_bound(sample_rate, NODES, float(exponents[0].real))
    cells = np.arange(0, len(NODES) - 1, 10)
    for share in (0.0, 0.4, 1.0):
        precisions = NODES[cells] + share * (NODES[cells + 1] - NODES[cells])
        log_moduli = _dense(sample_rate, precisions, exponents).real
        falls = log_moduli[:, :1] - log_moduli
        for start in (1, 10, 20, 39):
            proven = bound.node_decay(float(np.abs(exponents[start].imag)))
            within_cell = np.minimum(proven[cells], proven[cells + 1])
            assert (falls[:, start:].min(axis=1) >= within_cell - 1e-9).all()
    assert bound.node_decay(20.0)[60:].min() > 0.001


@pytest.mark.parametrize("sample_rate", [0.001, 0.05, 0.5])
def test_renyi_divergence_is_convex_in_the_precision(sample_rate: float) -> None:
    """The theorem behind linear spreading, checked numerically at integer and fractional orders."""
    values = np.array([sampled_gaussian_rdp(sample_rate, float(u**-0.5)) for u in NODES[1:]])
    weight = ((NODES[3:] - NODES[2:-1]) / (NODES[3:] - NODES[1:-2]))[:, None]
    chord = weight * values[:-2] + (1.0 - weight) * values[2:]
    assert (values[1:-1] <= chord * (1.0 + 1e-8)).all()
    assert (np.diff(values, axis=0) >= 0.0).all()
    assert values.shape[1] == len(ORDERS)
