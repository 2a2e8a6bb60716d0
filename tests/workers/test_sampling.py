"""One contract for every sampler: it realises the sampling that the trace states, and repeats itself when restored."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binomtest, chi2_contingency

from accounting.errors import InvalidInput
from accounting.mechanism import FixedBatchSampling, PoissonSampling, Sampling, ShuffledSampling
from workers.sampling import SAMPLERS, Sampler, make_sampler, planned_sampling
from workers.spec import SamplingSpec

SIZE, BATCH = 50, 12
every_sampler = pytest.mark.parametrize("method", SAMPLERS)
STATED: dict[str, Sampling] = {
    "poisson": PoissonSampling(BATCH / SIZE),
    "fixed": FixedBatchSampling(SIZE, BATCH),
    "shuffle": ShuffledSampling(5),
}


def sampler(method: str, entropy: int = 0, size: int = SIZE, batch: int = BATCH) -> Sampler:
    return make_sampler(SamplingSpec(method, batch), size, entropy)  # type: ignore[arg-type]


@every_sampler
def test_states_the_planned_sampling(method: str) -> None:
    spec = SamplingSpec(method, BATCH)  # type: ignore[arg-type]
    assert planned_sampling(spec, SIZE) == (STATED[method], 5)
    assert (sampler(method).sampling, sampler(method).steps_per_epoch) == (STATED[method], 5)


@every_sampler
def test_rows_are_distinct_ascending_and_in_range(method: str) -> None:
    drawn = sampler(method)
    for _ in range(50):
        rows = drawn.next_batch()
        assert rows.dtype == np.int64
        assert (np.diff(rows) > 0).all()
        assert len(rows) == 0 or (rows[0] >= 0 and rows[-1] < SIZE)


@every_sampler
def test_a_restored_sampler_repeats_its_batches(method: str) -> None:
    drawn = sampler(method)
    for _ in range(7):
        drawn.next_batch()
    state = drawn.state()
    expected = [drawn.next_batch() for _ in range(12)]
    other = sampler(method, entropy=99)
    other.restore(state)
    for rows in expected:
        np.testing.assert_array_equal(other.next_batch(), rows)


@every_sampler
def test_every_row_is_drawn_at_the_stated_rate(method: str) -> None:
    drawn, steps = sampler(method, entropy=1), 2000
    counts = np.bincount(np.concatenate([drawn.next_batch() for _ in range(steps)]), minlength=SIZE)
    rate = 1 / 5 if method == "shuffle" else BATCH / SIZE
    if method == "shuffle":
        assert (counts == steps * rate).all()
    else:
        assert min(binomtest(int(count), steps, rate).pvalue for count in counts) > 1e-5


def test_poisson_rows_join_independently() -> None:
    drawn, steps = sampler("poisson", entropy=2), 4000
    joined = np.zeros((steps, SIZE))
    for step in range(steps):
        joined[step, drawn.next_batch()] = 1.0
    correlations = np.corrcoef(joined.T)[~np.eye(SIZE, dtype=bool)]
    assert np.abs(correlations).max() < 6.0 / np.sqrt(steps)
    sizes = joined.sum(axis=1)
    assert sizes.var() == pytest.approx(SIZE * 0.24 * 0.76, rel=0.1)


@pytest.mark.parametrize("method", ["poisson", "fixed"])
def test_batches_do_not_depend_on_those_before(method: str) -> None:
    """A row is as likely to be drawn again as any other; chi-square over (drawn before, drawn now)."""
    drawn, steps = sampler(method, entropy=3), 4000
    joined = np.zeros((steps, SIZE), bool)
    for step in range(steps):
        joined[step, drawn.next_batch()] = True
    before, now = joined[:-1].ravel(), joined[1:].ravel()
    table = [[(before & now).sum(), (before & ~now).sum()], [(~before & now).sum(), (~before & ~now).sum()]]
    assert chi2_contingency(table).pvalue > 1e-3


def test_pairs_of_a_fixed_batch_are_drawn_without_replacement() -> None:
    drawn, steps = sampler("fixed", entropy=4), 4000
    together = np.zeros((SIZE, SIZE))
    for _ in range(steps):
        rows = drawn.next_batch()
        together[np.ix_(rows, rows)] += 1
    pairs = together[np.triu_indices(SIZE, 1)]
    rate = BATCH * (BATCH - 1) / (SIZE * (SIZE - 1))
    assert pairs.mean() == pytest.approx(steps * rate)
    assert min(binomtest(int(count), steps, rate).pvalue for count in (pairs.min(), pairs.max())) > 1e-6


def test_poisson_batches_of_a_small_rate_are_sometimes_empty() -> None:
    drawn = sampler("poisson", size=4, batch=1)
    assert min(len(drawn.next_batch()) for _ in range(50)) == 0


def test_poisson_of_the_whole_data_takes_everybody() -> None:
    drawn = sampler("poisson", batch=SIZE)
    assert drawn.steps_per_epoch == 1
    np.testing.assert_array_equal(drawn.next_batch(), np.arange(SIZE))


def test_fixed_batches_have_exactly_the_stated_size() -> None:
    drawn = sampler("fixed")
    assert {len(drawn.next_batch()) for _ in range(100)} == {BATCH}


def test_a_shuffled_epoch_visits_everyone_once_in_disjoint_batches() -> None:
    drawn = sampler("shuffle")
    epochs = [[drawn.next_batch() for _ in range(5)] for _ in range(3)]
    for batches in epochs:
        assert [len(rows) for rows in batches] == [12, 12, 12, 12, 2]
        np.testing.assert_array_equal(np.sort(np.concatenate(batches)), np.arange(SIZE))
    assert not np.array_equal(epochs[0][0], epochs[1][0])


@every_sampler
@pytest.mark.parametrize("batch", [0, SIZE + 1])
def test_a_batch_that_does_not_fit_the_data_is_refused(method: str, batch: int) -> None:
    with pytest.raises(InvalidInput, match=f"batch_size is {batch}, .* {SIZE} training examples"):
        sampler(method, batch=batch)
