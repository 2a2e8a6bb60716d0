"""Why the epsilon of a run that results ended early is an estimate: a counterexample, by convolution of the loss."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from dpsweep.accounting.accountants.account import account
from dpsweep.accounting.attacks import privacy_curve
from dpsweep.accounting.individual import individual_epsilons
from dpsweep.accounting.mechanism.samplings import PoissonSampling
from dpsweep.accounting.mechanism.trace import Segment, Trace
from dpsweep.accounting.records.traces import read_trace, write_trace

Array = NDArray[np.float64]

SIGMA, DELTA = 20.0, 1e-5
CHECKS = (1, 3, 9, 27, 81, 243)
"""Steps after which a scheduler such as ASHA looks at results."""
SPACING = 0.002
LOSSES = np.arange(-8.0, 12.0, SPACING)
REACH = 4000


def ran(steps: int, ended_by_results: bool = False) -> Trace:
    segments = (Segment(0, steps, PoissonSampling(1.0), SIGMA),)
    return Trace(1000, segments, ended_by_results=ended_by_results)


def _law(steps: int) -> Array:
    """The privacy loss of so many steps, N(steps / (2 sigma^2), steps / sigma^2), on lattice points around 0."""
    offsets = np.arange(-REACH, REACH + 1) * np.float64(SPACING)
    density = np.exp(-0.5 * (offsets - 0.5 * steps / SIGMA**2) ** 2 / (steps / SIGMA**2))
    return np.asarray(density / density.sum())


def _excess(epsilon: float, law: Array) -> float:
    """E[(1 - e^(epsilon - L))_+], by which the epsilon fails over a law of privacy losses."""
    above = epsilon < LOSSES
    return float(law[above] @ -np.expm1(epsilon - LOSSES[above]))


def test_stopping_by_results_makes_the_epsilon_of_the_steps_that_ran_fail_more_often_than_delta() -> None:
    going, failed = np.where(np.abs(LOSSES) < SPACING / 2, 1.0, 0.0), 0.0
    for before, check in zip((0, *CHECKS), CHECKS, strict=False):
        epsilon = account(ran(check), DELTA, "gdp").epsilon
        going = np.convolve(going, _law(check - before))[REACH : REACH + len(LOSSES)]
        failed += _excess(epsilon, going)  # the runs above it are stopped here; at the end, all of them are
        going = np.where(epsilon < LOSSES, 0.0, going)
    assert failed == pytest.approx(5.5 * DELTA, rel=0.01)
    assert failed < len(CHECKS) * DELTA, "which is what a union bound over all ends allows"


def test_a_run_that_results_ended_claims_an_estimate() -> None:
    whole, stopped = ran(243), ran(81, ended_by_results=True)
    assert account(whole, DELTA).kind == "guarantee"
    assert account(stopped, DELTA).kind == privacy_curve(stopped).kind == "estimate"
    assert account(stopped, DELTA).epsilon == account(replace(stopped, ended_by_results=False), DELTA).epsilon
    exact = replace(stopped, contributions="output_specific")
    assert individual_epsilons([0], [[0.5]], exact, DELTA).kind == "estimate"


@pytest.mark.parametrize("ended", [False, True])
def test_it_is_stored(ended: bool, tmp_path: Path) -> None:
    trace, uri = ran(81, ended), str(tmp_path / "trace.arrow")
    write_trace(uri, trace)
    assert read_trace(uri) == trace
