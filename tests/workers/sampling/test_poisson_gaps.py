"""Poisson batches by gaps: the distribution of independent rows, at a cost that grows with the batch alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import pytest
from mpmath import mp
from scipy.stats import binom, binomtest, chisquare, kstest

from dpsweep.accounting.records.keystream import KEY_BYTES, KeyedStream
from dpsweep.workers.sampling.samplers import (
    FEWEST_ROWS,
    KeyedRows,
    RowDraws,
    SeededRows,
    _below,
    _occur,
    are_worth_it,
    geometric,
    rate_below,
    rows_by_gaps,
)

N = 1_200_000


def stream(key: int = 0) -> KeyedStream:
    return KeyedStream(key.to_bytes(KEY_BYTES, "little"))


@pytest.mark.parametrize("rate", [0.003, 0.3, 2.5])
def test_gaps_are_geometric(rate: float) -> None:
    """Chi-square against P(gap = g) = exp(-rate g) (1 - exp(-rate)), over bins of about equal probability."""
    gaps = geometric(stream(1), round(rate * 2**56), 40_000)
    assert gaps.shape == (40_000,)
    edges = np.unique(np.floor(-np.log1p(-np.arange(20) / 20) / rate).astype(int))
    tails = np.append(np.exp(-rate * edges), 0.0)
    found = np.histogram(gaps, np.append(edges, 2**62))[0]
    assert chisquare(found, 40_000 * -np.diff(tails)).pvalue > 1e-3


@pytest.mark.parametrize("share", [0.0, 0.01, 0.37, 1.0])
def test_events_have_the_probability_of_their_exponent(share: float) -> None:
    exponents = np.full(50_000, round(share * 2**56), np.uint64)
    found = int(_occur(stream(2), exponents).sum())
    assert binomtest(found, 50_000, math.exp(-share)).pvalue > 1e-3


class Given:
    """A stream of given words."""

    def __init__(self, *words: int) -> None:
        self._words = list(words)

    def words(self, count: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
        taken, self._words = self._words[:count], self._words[count:]
        return np.array(taken, np.uint64)


def test_integers_below_a_bound_are_exactly_uniform() -> None:
    """Words beyond the last whole multiple of the bound are drawn again."""
    most = 2**64 // 3 * 3
    assert most == 2**64 - 1
    given = Given(most, 7, most - 1, most, 5)
    assert _below(given, 3, 3).tolist() == [5 % 3, 7 % 3, (most - 1) % 3]


def test_the_probability_of_a_row_is_just_below_the_stated_one() -> None:
    """1 - exp(-rate) with 60 digits, for the rates of data sets of up to 10^12 rows."""
    for n, expected in ((10**6, 1), (10**6, 3906), (10**7, 1000), (10**12, 4096), (3 * 10**9 + 7, 11)):
        with mp.workdps(60):
            probability = 1 - mp.exp(-mp.mpf(rate_below(expected, n)) / 2**56)
            stated = mp.mpf(expected) / n
            assert stated - mp.mpf(2) ** -54 < probability < stated


DRAWS: Mapping[str, Callable[[int], RowDraws]] = {"seeded": SeededRows, "keyed": lambda key: KeyedRows(stream(key))}


@pytest.mark.parametrize("draws", DRAWS)
def test_batches_of_large_data_are_poisson(draws: str) -> None:
    """Sizes are binomial, positions uniform, and neighbours as often together as independent rows are."""
    made = DRAWS[draws](5)
    batches = [made.each(N, 2000) for _ in range(300)]
    for rows in batches:
        assert rows.dtype == np.int64
        assert (np.diff(rows) > 0).all()
        assert 0 <= rows[0] <= rows[-1] < N
    sizes = np.array([len(rows) for rows in batches])
    assert kstest(binom(N, 2000 / N).cdf(sizes) - binom(N, 2000 / N).pmf(sizes) / 2, "uniform").pvalue > 1e-3
    assert kstest(np.concatenate(batches) / N, "uniform").pvalue > 1e-3
    neighbours = sum(int((np.diff(rows) == 1).sum()) for rows in batches)
    assert binomtest(neighbours, int(sizes.sum()), 2000 / N).pvalue > 1e-3


@pytest.mark.parametrize("draws", DRAWS)
def test_large_batches_repeat_when_restored(draws: str) -> None:
    made = DRAWS[draws](6)
    made.each(N, 2000)
    state = made.state()
    sizes = (1, 2000, N // 256)
    expected = [made.each(N, size) for size in sizes]
    other = DRAWS[draws](7)
    other.restore(state)
    for size, rows in zip(sizes, expected, strict=True):
        np.testing.assert_array_equal(other.each(N, size), rows)


class Counted(KeyedStream):
    """Counts the bytes that are drawn."""

    drawn = 0

    def octets(self, count: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        self.drawn += count
        return super().octets(count)


@pytest.mark.parametrize("n", [10**6, 10**7, 10**12])
def test_the_cost_of_a_batch_does_not_grow_with_the_data(n: int) -> None:
    counted = Counted(bytes(KEY_BYTES))
    rows = rows_by_gaps(counted, n, 1000)
    assert 800 < len(rows) < 1200
    assert counted.drawn < 200 * 1000


def test_gaps_are_for_large_data_and_small_rates() -> None:
    assert are_worth_it(FEWEST_ROWS, FEWEST_ROWS // 256)
    assert not are_worth_it(FEWEST_ROWS, FEWEST_ROWS // 256 + 1)
    assert not are_worth_it(FEWEST_ROWS - 1, 1)
