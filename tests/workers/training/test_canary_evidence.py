"""What noisy sums show of gradient canaries: likelihood ratios against those of all cases, one by one."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import linalg, stats

from dpsweep.accounting.mechanism.noise_strategies import (
    INDEPENDENT,
    BandedNoise,
    BufferedNoise,
    CorrelatedNoise,
    InverseRootNoise,
    LambdaNoise,
    NoiseStrategy,
)
from dpsweep.accounting.mechanism.toeplitz import column_norm
from dpsweep.workers.sampling.samplers import SeededRows
from dpsweep.workers.spec import SamplingSpec
from dpsweep.workers.training.canary_evidence import CanaryBatches, Whitening, make_evidence
from tests.workers.training.test_gradient_canaries import ROWS, trial

STEPS, COUNT, LENGTH, STD = 12, 30, 3.0, 2.0
STRATEGIES = [BandedNoise(3, STEPS), InverseRootNoise(4, STEPS), LambdaNoise(0.6, STEPS), BufferedNoise(2, STEPS, 5)]


def matrix_of(strategy: NoiseStrategy) -> np.ndarray:
    """C over the norm of its first column."""
    if strategy == INDEPENDENT:
        return np.eye(STEPS)
    assert isinstance(strategy, CorrelatedNoise)
    column = np.zeros(STEPS)
    first = strategy.column()[:STEPS]
    column[: len(first)] = first
    return linalg.toeplitz(column, np.zeros(STEPS)) / column_norm(first)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.stored_name)
def test_whitening_is_the_matrix_of_the_strategy(strategy: CorrelatedNoise) -> None:
    noise = np.random.default_rng(0).normal(size=(STEPS, 5))
    whitening = Whitening(strategy.memory(), column_norm(strategy.column()))
    found = [whitening.next(row) for row in noise]
    np.testing.assert_allclose(found, matrix_of(strategy) @ noise, atol=1e-12)


@pytest.mark.parametrize("strategy", [INDEPENDENT, BandedNoise(3, STEPS)], ids=["independent", "banded"])
def test_turns_are_weighed_by_all_ways_to_take_them(strategy: NoiseStrategy) -> None:
    cycle, matrix, generator = 4, matrix_of(strategy), np.random.default_rng(1)
    spec = trial(sampling=SamplingSpec("cyclic_poisson", 10, cycle_length=cycle))
    batches = CanaryBatches(spec, COUNT, ROWS, SeededRows(2))
    evidence, seen = make_evidence(batches, strategy), generator.normal(LENGTH, STD, (STEPS, COUNT))
    for row in seen:
        evidence.see(row, batches.next(), LENGTH, STD)
    white, rate = matrix @ seen / STD, 0.4
    assert set(batches.turns) == set(range(cycle))
    for canary, turn in enumerate(batches.turns):
        ratios = []
        for joined in itertools.product((0, 1), repeat=STEPS // cycle):
            added = np.zeros(STEPS)
            added[turn::cycle] = joined
            means = matrix @ added * LENGTH / STD
            log = float(np.sum(stats.norm.logpdf(white[:, canary], means) - stats.norm.logpdf(white[:, canary])))
            ratios.append(log + np.log(np.where(joined, rate, 1.0 - rate)).sum())
        assert evidence.total[canary] == pytest.approx(np.logaddexp.reduce(ratios), abs=1e-9)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.stored_name)
def test_one_order_is_known(strategy: CorrelatedNoise) -> None:
    batches = CanaryBatches(trial(method="fixed_order"), COUNT, ROWS, SeededRows(3))
    evidence, seen = make_evidence(batches, strategy), np.random.default_rng(4).normal(1.0, STD, (STEPS, COUNT))
    drawn = np.array([batches.next() for _ in range(STEPS)])
    for row, joined in zip(seen, drawn, strict=True):
        evidence.see(row, joined, LENGTH, STD)
    np.testing.assert_array_equal(drawn[:5].sum(0), np.ones(COUNT))
    np.testing.assert_array_equal(drawn[5:10], drawn[:5])
    means = matrix_of(strategy) @ drawn * LENGTH / STD
    white = matrix_of(strategy) @ seen / STD
    expected = (stats.norm.logpdf(white, means) - stats.norm.logpdf(white)).sum(0)
    np.testing.assert_allclose(evidence.total, expected, atol=1e-9)
