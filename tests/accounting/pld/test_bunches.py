"""Sums over many sensitivities in bunches are those over each, to a few units in the last place."""

from __future__ import annotations

import mpmath
import numpy as np
import numpy.typing as npt
import pytest

from dpsweep.accounting.mechanism.samplings import PoissonSampling
from dpsweep.accounting.pld.bunches import Bunches, in_bunches, signed_mills
from dpsweep.accounting.pld.sensitivity import examples_law
from tests.known import known

LOWEST, HIGHEST = -10.0, 16.0
Array = npt.NDArray[np.float64]


def many(sigma: float, rate: float, members: int) -> tuple[Array, Array]:
    """The positive sums of the contributions of some members, and their probabilities."""
    amplitudes = np.random.default_rng(members).uniform(0.1, 1.0, members) / sigma
    law = examples_law(PoissonSampling(rate), amplitudes.tolist(), float(amplitudes.max()) / 512).truncated(1e-16)
    return np.asarray(law.sensitivities[1:]), np.asarray(law.probabilities[1:])


def bunched(shifts: Array, probabilities: Array) -> Bunches:
    return known(in_bunches(shifts, probabilities, LOWEST, HIGHEST))


@pytest.mark.parametrize(("sigma", "rate", "members"), [(1.0, 0.02, 12), (6.0, 0.3, 30)])
def test_sums_are_those_over_single_sensitivities(sigma: float, rate: float, members: int) -> None:
    shifts, probabilities = many(sigma, rate, members)
    bunches = bunched(shifts, probabilities)
    assert len(bunches.starts) < len(shifts) / 5
    edges = shifts[bunches.starts]  # a bunch ends beside each of these outputs, and others lie within one
    within = np.array([bunches.centres[3], *shifts[bunches.starts[3] : bunches.starts[3] + 4]])
    outputs = np.sort(np.concatenate([np.linspace(LOWEST, HIGHEST, 301), edges, edges - 1e-9, within, within + 1e-9]))
    lines = np.log(probabilities)[:, None] - shifts[:, None] ** 2 / 2 + shifts[:, None] * outputs
    losses = np.logaddexp.reduce(lines, axis=0)
    weights = np.exp(lines - losses)
    np.testing.assert_allclose(bunches.log_sum(outputs), losses, rtol=2e-14, atol=2e-14)
    total, slope = bunches.total_and_slope(losses, outputs)
    np.testing.assert_allclose(total, weights.sum(axis=0), rtol=3e-14)
    np.testing.assert_allclose(slope, shifts @ weights, rtol=3e-14)
    terms = weights * signed_mills(outputs - shifts[:, None])
    error = bunches.mills(losses, outputs) - terms.sum(axis=0)
    assert np.all(np.abs(error) <= 3e-14 * np.abs(terms).sum(axis=0))


def test_they_are_as_exact_as_doubles() -> None:
    """By 40 digits; sums over single sensitivities err by up to 5e-15 here."""
    shifts, probabilities = many(1.0, 0.02, 12)
    bunches, outputs = bunched(shifts, probabilities), np.array([-9.5, 0.3, 4.0, 15.5])
    for output, found in zip(outputs.tolist(), bunches.log_sum(outputs).tolist(), strict=True):
        with mpmath.workdps(40):
            exact = mpmath.log(
                mpmath.fsum(
                    mpmath.mpf(p) * mpmath.exp(mpmath.mpf(a) * mpmath.mpf(output) - mpmath.mpf(a) ** 2 / 2)
                    for a, p in zip(shifts.tolist(), probabilities.tolist(), strict=True)
                )
            )
            assert abs(found - exact) <= 2e-15 * (1 + abs(exact))


def test_few_sensitivities_are_summed_one_by_one() -> None:
    assert in_bunches(np.arange(1.0, 9.0), np.full(8, 0.1), LOWEST, HIGHEST) is None
    assert in_bunches(np.empty(0), np.empty(0), LOWEST, HIGHEST) is None
