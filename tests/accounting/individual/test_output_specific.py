"""Why epsilons read off a run are not guarantees: a counterexample, computed by convolution of the privacy loss."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from dpsweep.accounting.individual import individual_epsilons
from dpsweep.accounting.mechanism.samplings import PoissonSampling
from dpsweep.accounting.mechanism.trace import Segment, Trace

Array = NDArray[np.float64]

SIGMA, STEPS, DELTA = 30.0, 3000, 1e-5
SPACING = 0.004
LOSSES = np.arange(-9.0, 14.0, SPACING)


def _reported_epsilons() -> Array:
    """What individual accounting reports for an example that contributed to the first 1, 2, ... STEPS steps."""
    trace = Trace(1000, (Segment(0, STEPS, PoissonSampling(1.0), SIGMA),), contributions="output_specific")
    contributions = np.tri(STEPS, dtype=np.float32)
    found = individual_epsilons(np.arange(STEPS), contributions, trace, DELTA, "pld")
    assert found.kind == "output_specific"
    return found.upper


def _excess(epsilon: float, law: Array) -> float:
    """E[(1 - e^(epsilon - L))_+] over a law of privacy losses on the lattice."""
    above = epsilon < LOSSES
    return float(law[above] @ -np.expm1(epsilon - LOSSES[above]))


def _ex_post_deltas(epsilons: Array) -> tuple[float, float]:
    """The excess of an example that stops contributing once its loss is above the epsilon so far; and if it never does.

    Each step in which it contributes adds N(1/(2 sigma^2), 1/sigma^2) to the loss, under the data set with the example.
    """
    mean, deviation = 0.5 / SIGMA**2, 1.0 / SIGMA
    reach = int(10.0 * deviation / SPACING)
    offsets = np.arange(-reach, reach + 1) * np.float64(SPACING)

    def law_of_step(x: Array) -> Array:
        density = np.exp(-0.5 * ((x - mean) / deviation) ** 2)
        return np.asarray(density / density.sum())

    size = 1 << (len(LOSSES) + 2 * reach).bit_length()
    step = np.fft.rfft(law_of_step(offsets), size)

    def convolved(law: Array) -> Array:
        whole = np.fft.irfft(np.fft.rfft(law, size) * step, size)
        return np.maximum(whole[reach : reach + len(law)], 0.0)

    going = law_of_step(LOSSES)
    always, stopped = going.copy(), 0.0
    for epsilon in epsilons[:-1]:
        stopped += _excess(epsilon, going)
        going = convolved(np.where(epsilon < LOSSES, 0.0, going))
        always = convolved(always)
    return stopped + _excess(epsilons[-1], going), _excess(epsilons[-1], always)


def test_an_epsilon_that_the_run_can_move_is_not_valid_ex_post() -> None:
    adaptive, fixed = _ex_post_deltas(_reported_epsilons())
    assert adaptive == pytest.approx(10.2 * DELTA, rel=0.01)
    assert fixed == pytest.approx(DELTA, rel=0.03)
