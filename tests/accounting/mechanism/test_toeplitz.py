"""Matrices of correlated noise against dense linear algebra and brute force over participations."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import linalg

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.mechanism.buffered import Pairs, best_buffered
from dpsweep.accounting.mechanism.noise_strategies import (
    INDEPENDENT,
    BandedNoise,
    BufferedNoise,
    CorrelatedNoise,
    InverseRootNoise,
    LambdaNoise,
    bands_of,
    make_strategy,
    prefix_sum_errors,
)
from dpsweep.accounting.mechanism.toeplitz import Array, best_banded, column_norm, prefix_errors, repeated_norm

STRATEGIES: list[CorrelatedNoise] = [
    BandedNoise(1, 7),
    BandedNoise(3, 7),
    BandedNoise(9, 7),
    InverseRootNoise(3, 7),
    InverseRootNoise(7, 7),
    LambdaNoise(0.0, 7),
    LambdaNoise(0.6, 7),
    LambdaNoise(1.0, 7),
    BufferedNoise(1, 7, 7),
    BufferedNoise(3, 7, 2),
]


def dense(column: Array, steps: int) -> Array:
    return np.asarray(linalg.toeplitz(np.pad(column, (0, steps))[:steps], np.zeros(steps)))


def squared_error(column: Array, steps: int) -> tuple[float, float]:
    """Mean and largest squared row of A C^-1, times the largest squared column of C, by dense inversion."""
    rows = np.tri(steps) @ np.linalg.inv(dense(column, steps))
    norms = (rows**2).sum(axis=1) * (dense(column, steps) ** 2).sum(axis=0).max()
    return float(norms.mean()), float(norms.max())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_columns_and_errors_are_those_of_dense_matrices(strategy: CorrelatedNoise) -> None:
    matrix, noising = dense(strategy.column(), 7), dense(strategy.noising_column(), 7)
    np.testing.assert_allclose(matrix @ noising, np.eye(7), atol=1e-12)
    assert prefix_sum_errors(strategy, 7, 1.0) == pytest.approx(squared_error(strategy.column(), 7), rel=1e-12)
    assert column_norm(strategy.column()) == pytest.approx(math.sqrt((matrix**2).sum(axis=0).max()), rel=1e-8)
    assert bands_of(strategy) == int(max(row - column for row, column in np.argwhere(matrix))) + 1


def test_known_matrices() -> None:
    assert prefix_sum_errors(INDEPENDENT, 10, 2.0) == (4.0 * 5.5, 4.0 * 10.0)
    assert prefix_sum_errors(BandedNoise(1, 10), 10, 2.0) == pytest.approx((22.0, 40.0))
    np.testing.assert_allclose(InverseRootNoise(4, 9).noising_column(), [1.0, -1 / 2, -1 / 8, -1 / 16])
    root = dense(InverseRootNoise(7, 7).column(), 7)
    np.testing.assert_allclose(root @ root, np.tri(7), atol=1e-12)
    np.testing.assert_allclose(LambdaNoise(0.5, 4).column(), [1.0, 0.5, 0.25, 0.125])


@pytest.mark.parametrize(("bands", "steps"), [(2, 6), (4, 64), (8, 40)])
def test_no_banded_matrix_near_the_best_has_a_smaller_error(bands: int, steps: int) -> None:
    column = np.array(best_banded(bands, steps))
    assert np.linalg.norm(column) == pytest.approx(1.0)
    best = squared_error(column, steps)[0]
    rng = np.random.default_rng(1)
    for size in (1e-4, 1e-2, 0.3):
        for _ in range(20):
            assert squared_error(column + size * rng.normal(size=bands), steps)[0] >= best * (1 - 1e-12)


def test_the_best_banded_matrix_is_that_of_jax_privacy() -> None:
    """The first column that its `optimize_banded_toeplitz` 2026 finds, and its bound for BISR at separation 7."""
    theirs = [0.5376149127389064, 0.39081641267061407, 0.35193386147101025, 0.3291950868854096]
    theirs += [0.3115471536305653, 0.2952702689730177, 0.2777088686687747, 0.2542390856981397]
    np.testing.assert_allclose(best_banded(8, 500), theirs, atol=1e-7)
    assert prefix_sum_errors(BandedNoise(8, 500), 500, 1.0)[0] == pytest.approx(37.04127760769882, rel=1e-12)
    bisr = InverseRootNoise(4, 50)
    assert repeated_norm(bisr.column(), 50, 7) ** 2 == pytest.approx(15.448896067081549, rel=1e-7)
    square = float(np.sum(bisr.column() ** 2))
    assert prefix_sum_errors(bisr, 50, 1.0) == pytest.approx((3.583125 * square, 5.98046875 * square))


@pytest.mark.parametrize(("buffers", "steps"), [(1, 9), (2, 40), (3, 90)])
def test_no_buffers_near_the_best_have_a_smaller_error(buffers: int, steps: int) -> None:
    apart = steps // 3
    pairs = best_buffered(buffers, steps, apart)
    best = fitted(pairs.column(steps), steps, apart)
    rng = np.random.default_rng(1)
    for size in (1e-4, 1e-2, 0.1):
        for _ in range(20):
            near = Pairs(*(each * np.exp(size * rng.normal(size=buffers)) for each in (pairs.decays, pairs.weights)))
            assert fitted(near.column(steps), steps, apart) >= best * (1 - 1e-12)


def fitted(column: Array, steps: int, apart: int) -> float:
    """Mean squared row of A C^-1 times the squared sensitivity of an order that repeats after ``apart`` steps."""
    rows = np.tri(steps) @ np.linalg.inv(dense(column, steps))
    turns = np.arange(steps) % apart == 0
    return float((rows**2).sum(axis=1).mean() * (dense(column, steps)[:, turns].sum(axis=1) ** 2).sum())


def test_the_best_buffers_are_those_of_jax_privacy() -> None:
    """Compare with its `buffered_toeplitz.optimize_loss` 2.0 for the mean error, of one participation and of many.

    Its penalty, 1e-8 by default, keeps decays apart and moves three buffers by 3e-6; it is 1e-14 here.
    """
    pairs = best_buffered(3, 500, 500)
    np.testing.assert_allclose(pairs.decays, [0.994282562408, 0.933739961511, 0.586610663779], atol=1e-7)
    np.testing.assert_allclose(pairs.weights, [0.096657460282, 0.1593772667, 0.241670106444], atol=1e-7)
    assert prefix_sum_errors(BufferedNoise(3, 500, 500), 500, 1.0)[0] == pytest.approx(8.008380945125, rel=1e-11)
    more = best_buffered(4, 500, 500)
    np.testing.assert_allclose(more.decays, [0.994433958099, 0.948103529713, 0.77766143944, 0.353155802848], atol=1e-6)
    np.testing.assert_allclose(more.weights, [0.093475919532, 0.11761167779, 0.167128758931, 0.123780914763], atol=1e-6)
    repeated = best_buffered(2, 2000, 100)
    np.testing.assert_allclose(repeated.decays, [0.98455145, 0.57383509], atol=1e-7)
    np.testing.assert_allclose(repeated.weights, [0.25292003, 0.25649705], atol=1e-7)


@pytest.mark.parametrize("steps", [1, 2, 5, 11, 37, 1000])
def test_more_buffers_are_never_worse_in_runs_of_any_length(steps: int) -> None:
    errors = [prefix_sum_errors(BufferedNoise(buffers, steps, steps), steps, 1.0)[0] for buffers in (1, 2, 3, 6)]
    assert all(more <= fewer * (1 + 1e-7) for fewer, more in itertools.pairwise(errors))
    assert errors[0] <= (steps + 1) / 2


def brute_force(matrix: Array, apart: int) -> float:
    """The largest norm of C x over all starts, all subsets of participations and all signs of scalar contributions."""
    steps, largest = len(matrix), 0.0
    for first in range(apart):
        turns = range(first, steps, apart)
        for signs in itertools.product((-1.0, 0.0, 1.0), repeat=len(turns)):
            x = np.zeros(steps)
            x[list(turns)] = signs
            largest = max(largest, float(np.linalg.norm(matrix @ x)))
    return largest


@pytest.mark.parametrize("apart", [1, 2, 3, 5, 7, 9])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_sensitivity_of_a_fixed_order_is_that_of_the_worst_participations(
    strategy: CorrelatedNoise, apart: int
) -> None:
    bound, true = repeated_norm(strategy.column(), 7, apart), brute_force(dense(strategy.column(), 7), apart)
    assert true <= bound <= true * (1.0 + 1e-8)


def test_the_sensitivity_is_bounded_for_columns_of_any_sign() -> None:
    rng = np.random.default_rng(2)
    for _ in range(40):
        column = rng.normal(size=6)
        for apart in (1, 2, 4):
            assert brute_force(dense(column, 6), apart) <= repeated_norm(column, 6, apart)


def test_a_longer_column_is_cut_at_the_end_of_the_run() -> None:
    column = InverseRootNoise(3, 50).column()
    assert repeated_norm(column, 7, 3) == pytest.approx(brute_force(dense(column, 7), 3))
    assert prefix_errors(column[:7], InverseRootNoise(3, 50).noising_column(), 7)[1] > 0.0


@pytest.mark.parametrize(
    ("name", "params", "said"),
    [
        ("banded", {}, "noise strategy 'banded' needs bands"),
        ("banded", {"bands": 0}, "bands of correlated noise is 0, but must be at least 1"),
        ("banded", {"bands": 4, "lambda": 1}, "unknown key 'lambda'"),
        ("bands", {"bands": 4}, "unknown noise strategy 'bands'; did you mean 'banded'"),
        ("blt", {"buffers": 9}, "buffers of correlated noise is 9"),
        ("lambda_cgd", {"decay": 1.5}, "decay of correlated noise is 1.5"),
        ("independent", {"bands": 4}, "it takes none"),
    ],
)
def test_what_is_no_strategy_is_refused(name: str, params: dict[str, float], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        make_strategy(name, params, 10, 10)
