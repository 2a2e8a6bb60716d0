"""One contract for every sampler, from a seed or a secret key: it realises the sampling that the trace states, and
repeats itself when restored."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from scipy.stats import binom, binomtest, chi2_contingency, chisquare

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.mechanism.samplings import (
    CyclicPoissonSampling,
    FixedBatchSampling,
    FixedOrderSampling,
    PoissonSampling,
    RandomAllocationSampling,
    Sampling,
    ShuffledSampling,
    TruncatedPoissonSampling,
    sampling_of_sizes,
)
from dpsweep.accounting.records.keystream import KEY_BYTES, KeyedStream
from dpsweep.workers.noise.chacha import ChaChaBits
from dpsweep.workers.sampling.samplers import (
    SAMPLERS,
    KeyedRows,
    RowDraws,
    Sampler,
    SeededRows,
    make_row_draws,
    make_sampler,
    planned_sampling,
)
from dpsweep.workers.spec import SamplingSpec

SIZE, BATCH = 50, 12
every_sampler = pytest.mark.parametrize("method", SAMPLERS)
DRAWS: Mapping[str, Callable[[int], RowDraws]] = {
    "seeded": SeededRows,
    "keyed": lambda key: KeyedRows(ChaChaBits(key.to_bytes(KEY_BYTES, "little"))),
    "keyed by SHAKE-256": lambda key: KeyedRows(KeyedStream(key.to_bytes(KEY_BYTES, "little"))),
}
every_draws = pytest.mark.parametrize("draws", DRAWS)
STATED: dict[str, Sampling] = {
    "poisson": PoissonSampling(BATCH / SIZE),
    "fixed": FixedBatchSampling(SIZE, BATCH),
    "shuffle": ShuffledSampling(5),
    "random_allocation": RandomAllocationSampling(5),
    "cyclic_poisson": CyclicPoissonSampling(1, BATCH / SIZE),
    "fixed_order": FixedOrderSampling(5),
}


def sampler(method: str, draws: str = "seeded", key: int = 0, size: int = SIZE, batch: int = BATCH) -> Sampler:
    return make_sampler(SamplingSpec(method, batch), size, DRAWS[draws](key))


@every_sampler
def test_states_the_planned_sampling(method: str) -> None:
    spec = SamplingSpec(method, BATCH)
    planned = planned_sampling(spec, SIZE)
    assert (planned, planned.steps_per_epoch) == (STATED[method], 5)


@every_sampler
def test_a_full_batch_holds_everyone_and_is_an_epoch(method: str) -> None:
    spec = SamplingSpec(method, "full")
    assert planned_sampling(spec, SIZE).steps_per_epoch == 1
    drawn = make_sampler(spec, SIZE, SeededRows(0))
    assert drawn.next_batch().tolist() == drawn.next_batch().tolist() == list(range(SIZE))


@every_draws
@every_sampler
def test_rows_are_distinct_ascending_and_in_range(method: str, draws: str) -> None:
    drawn = sampler(method, draws)
    for _ in range(50):
        rows = drawn.next_batch()
        assert rows.dtype == np.int64
        assert (np.diff(rows) > 0).all()
        assert len(rows) == 0 or (rows[0] >= 0 and rows[-1] < SIZE)


REPEATED = {
    "poisson": (SamplingSpec("poisson", BATCH), 140),
    "poisson, cut": (SamplingSpec("poisson", BATCH, max_batch_size=14), 140),
    "random allocation": (SamplingSpec("random_allocation", 9), 20),
    "turns": (SamplingSpec("cyclic_poisson", 9, cycle_length=3), 14),
    "one order": (SamplingSpec("fixed_order", 9), 14),
}
"""Batches of which several are drawn at once, such as 64 of Poisson batches, and how many to draw."""


@every_draws
@pytest.mark.parametrize("name", REPEATED)
def test_batches_drawn_together_are_repeated_from_any_of_them(name: str, draws: str) -> None:
    """Cutting a batch makes random choices between two such draws."""
    spec, count = REPEATED[name]
    drawn = make_sampler(spec, SIZE, DRAWS[draws](0))
    states, batches = [], []
    for _ in range(count):
        states.append(copy.deepcopy(drawn.state()))
        batches.append(drawn.next_batch())
    assert spec.method != "poisson" or len({tuple(rows) for rows in batches}) == count
    other = make_sampler(spec, SIZE, DRAWS[draws](99))
    for step in (each for each in (0, 1, 2, 3, 4, 5, 6, 7, 11, 12, 63, 64, 65, 127, 128, 135) if each < count):
        other.restore(states[step])
        for rows in batches[step : step + 70]:
            np.testing.assert_array_equal(other.next_batch(), rows)


@every_draws
@every_sampler
def test_a_restored_sampler_repeats_its_batches(method: str, draws: str) -> None:
    drawn = sampler(method, draws)
    for _ in range(7):
        drawn.next_batch()
    state = drawn.state()
    expected = [drawn.next_batch() for _ in range(12)]
    other = sampler(method, draws, key=99)
    other.restore(state)
    for rows in expected:
        np.testing.assert_array_equal(other.next_batch(), rows)


@every_draws
@every_sampler
def test_every_row_is_drawn_at_the_stated_rate(method: str, draws: str) -> None:
    drawn, steps = sampler(method, draws, key=1), 2000
    counts = np.bincount(np.concatenate([drawn.next_batch() for _ in range(steps)]), minlength=SIZE)
    once = ("shuffle", "random_allocation", "fixed_order")
    rate = 1 / 5 if method in once else BATCH / SIZE
    if method in once:
        assert (counts == steps * rate).all()
    else:
        assert min(binomtest(int(count), steps, rate).pvalue for count in counts) > 1e-5


@every_draws
def test_poisson_rows_join_independently(draws: str) -> None:
    drawn, steps = sampler("poisson", draws, key=2), 4000
    joined = np.zeros((steps, SIZE))
    for step in range(steps):
        joined[step, drawn.next_batch()] = 1.0
    correlations = np.asarray(np.corrcoef(joined.T))[~np.eye(SIZE, dtype=bool)]
    assert np.abs(correlations).max() < 6.0 / np.sqrt(steps)
    sizes = joined.sum(axis=1)
    assert sizes.var() == pytest.approx(SIZE * 0.24 * 0.76, rel=0.1)


@every_draws
@pytest.mark.parametrize("method", ["poisson", "fixed"])
def test_batches_do_not_depend_on_those_before(method: str, draws: str) -> None:
    """A row is as likely to be drawn again as any other; chi-square over (drawn before, drawn now)."""
    drawn, steps = sampler(method, draws, key=3), 4000
    joined = np.zeros((steps, SIZE), bool)
    for step in range(steps):
        joined[step, drawn.next_batch()] = True
    before, now = joined[:-1].ravel(), joined[1:].ravel()
    table = [[(before & now).sum(), (before & ~now).sum()], [(~before & now).sum(), (~before & ~now).sum()]]
    assert chi2_contingency(table).pvalue > 1e-3


@every_draws
def test_pairs_of_a_fixed_batch_are_drawn_without_replacement(draws: str) -> None:
    drawn, steps = sampler("fixed", draws, key=4), 4000
    together = np.zeros((SIZE, SIZE))
    for _ in range(steps):
        rows = drawn.next_batch()
        together[np.ix_(rows, rows)] += 1
    pairs = together[np.triu_indices(SIZE, 1)]
    rate = BATCH * (BATCH - 1) / (SIZE * (SIZE - 1))
    assert pairs.mean() == pytest.approx(steps * rate)
    assert min(binomtest(int(count), steps, rate).pvalue for count in (pairs.min(), pairs.max())) > 1e-6


@every_draws
def test_poisson_batches_of_a_small_rate_are_sometimes_empty(draws: str) -> None:
    drawn = sampler("poisson", draws, size=4, batch=1)
    assert min(len(drawn.next_batch()) for _ in range(50)) == 0


@every_draws
def test_poisson_of_the_whole_data_takes_everybody(draws: str) -> None:
    drawn = sampler("poisson", draws, batch=SIZE)
    np.testing.assert_array_equal(drawn.next_batch(), np.arange(SIZE))


@every_draws
def test_large_poisson_batches_are_cut_to_a_uniformly_random_subset(draws: str) -> None:
    """The rows that stay are as likely as any others, whatever their place; small batches are as they were drawn."""
    spec, steps = SamplingSpec("poisson", BATCH, max_batch_size=14), 6000
    assert planned_sampling(spec, SIZE) == TruncatedPoissonSampling(SIZE, BATCH / SIZE, 14)
    drawn = make_sampler(spec, SIZE, DRAWS[draws](6))
    batches = [drawn.next_batch() for _ in range(steps)]
    sizes = np.bincount([len(rows) for rows in batches], minlength=15)
    law = binom(SIZE, BATCH / SIZE)
    expected = np.append(law.pmf(np.arange(14)), law.sf(13)) * steps
    assert chisquare(np.append(sizes[:4].sum(), sizes[4:]), np.append(expected[:4].sum(), expected[4:])).pvalue > 1e-4
    full = [rows for rows in batches if len(rows) == 14]
    assert chisquare(np.bincount(np.concatenate(full), minlength=SIZE)).pvalue > 1e-4
    assert all((np.diff(rows) > 0).all() for rows in batches)


@every_draws
def test_fixed_batches_have_exactly_the_stated_size(draws: str) -> None:
    drawn = sampler("fixed", draws)
    assert {len(drawn.next_batch()) for _ in range(100)} == {BATCH}


@every_draws
def test_a_shuffled_epoch_visits_everyone_once_in_disjoint_batches(draws: str) -> None:
    drawn = sampler("shuffle", draws)
    epochs = [[drawn.next_batch() for _ in range(5)] for _ in range(3)]
    for batches in epochs:
        assert [len(rows) for rows in batches] == [12, 12, 12, 12, 2]
        np.testing.assert_array_equal(np.sort(np.concatenate(batches)), np.arange(SIZE))
    assert not np.array_equal(epochs[0][0], epochs[1][0])


@every_draws
@pytest.mark.parametrize("per_epoch", [1, 2])
def test_everybody_is_in_one_batch_of_every_block(per_epoch: int, draws: str) -> None:
    spec = SamplingSpec("random_allocation", 9, per_epoch=per_epoch)
    assert planned_sampling(spec, SIZE) == RandomAllocationSampling(6, per_epoch)
    assert spec.expected_size(SIZE) == 9 * per_epoch
    drawn = make_sampler(spec, SIZE, DRAWS[draws](0))
    for _ in range(20):
        block = np.concatenate([drawn.next_batch() for _ in range(6 // per_epoch)])
        np.testing.assert_array_equal(np.sort(block), np.arange(SIZE))


@every_draws
def test_steps_of_a_block_are_uniform_and_independent(draws: str) -> None:
    """Over blocks, and over pairs of rows and of blocks; a shuffled epoch would give batches of one size."""
    drawn, blocks, steps = make_sampler(SamplingSpec("random_allocation", 17), SIZE, DRAWS[draws](1)), 3000, 3
    joined = np.zeros((blocks, SIZE), np.int64)
    for block in range(blocks):
        for step in range(steps):
            joined[block, drawn.next_batch()] = step
    assert min(chisquare(np.bincount(row, minlength=steps)).pvalue for row in joined.T) > 1e-5

    def table(one: np.ndarray, other: np.ndarray) -> np.ndarray:
        return np.bincount(steps * one + other, minlength=steps**2).reshape(steps, steps)

    pairs = [chi2_contingency(table(joined[:, row], joined[:, row + 1])).pvalue for row in range(SIZE - 1)]
    assert min(pairs) > 1e-5
    assert chi2_contingency(table(joined[:-1].ravel(), joined[1:].ravel())).pvalue > 1e-4
    sizes = (joined == 0).sum(axis=1)
    assert sizes.var() == pytest.approx(binom(SIZE, 1 / 3).var(), rel=0.15)


@every_draws
def test_groups_take_turns_and_join_independently(draws: str) -> None:
    """Every row joins in the step of its group alone, at the stated rate, independently of its group's other rows."""
    spec = SamplingSpec("cyclic_poisson", 5, cycle_length=4)
    assert planned_sampling(spec, SIZE) == CyclicPoissonSampling(4, 0.4)
    drawn, cycles = make_sampler(spec, SIZE, DRAWS[draws](2)), 3000
    joined = np.zeros((cycles, 4, SIZE), bool)
    for cycle, step in np.ndindex(cycles, 4):
        joined[cycle, step, drawn.next_batch()] = True
    ever, turns = np.any(joined, axis=0), np.any(joined, axis=1)
    assert (ever.sum(axis=0) == 1).all(), "a row joins one of the steps of a cycle"
    assert (ever.sum(axis=1) > 0).all()
    assert min(binomtest(int(count), cycles, 0.4).pvalue for count in turns.sum(axis=0)) > 1e-5
    correlations = np.asarray(np.corrcoef(turns.T))[~np.eye(SIZE, dtype=bool)]
    assert np.abs(correlations).max() < 6.0 / np.sqrt(cycles)
    before, now = np.ravel(turns[:-1]), np.ravel(turns[1:])
    table = [[(before & now).sum(), (before & ~now).sum()], [(~before & now).sum(), (~before & ~now).sum()]]
    assert chi2_contingency(table).pvalue > 1e-4


@every_draws
def test_groups_are_uniform_and_independent_of_each_other(draws: str) -> None:
    """Over many runs of one cycle in which everybody joins: the sizes of groups are multinomial, not equal."""
    groups = np.zeros((1500, SIZE), np.int64)
    for run, group_of in enumerate(groups):
        drawn = make_sampler(SamplingSpec("cyclic_poisson", 10, cycle_length=5), SIZE, DRAWS[draws](run))
        for step in range(5):
            group_of[drawn.next_batch()] = step
    assert min(chisquare(np.bincount(row, minlength=5)).pvalue for row in groups.T) > 1e-5
    sizes = (groups == 0).sum(axis=1)
    assert sizes.var() == pytest.approx(binom(SIZE, 1 / 5).var(), rel=0.2)


@every_draws
def test_a_fixed_order_visits_everyone_in_the_same_batches_of_every_epoch(draws: str) -> None:
    drawn = sampler("fixed_order", draws)
    epochs = [[drawn.next_batch() for _ in range(5)] for _ in range(3)]
    assert [len(rows) for rows in epochs[0]] == [12, 12, 12, 12, 2]
    np.testing.assert_array_equal(np.sort(np.concatenate(epochs[0])), np.arange(SIZE))
    for epoch in epochs[1:]:
        for first, again in zip(epochs[0], epoch, strict=True):
            np.testing.assert_array_equal(first, again)
    other = sampler("fixed_order", draws, key=1).next_batch()
    assert not np.array_equal(other, epochs[0][0]), "the order is random"


def test_what_belongs_to_cyclic_poisson_alone_is_refused_elsewhere() -> None:
    with pytest.raises(InvalidInput, match=r"cycle_length is 2, but belongs to cyclic_poisson"):
        SamplingSpec("poisson", BATCH, cycle_length=2)
    with pytest.raises(InvalidInput, match="cycle_length is 2, but belongs to cyclic_poisson, not to fixed"):
        sampling_of_sizes("fixed", SIZE, BATCH, cycle_length=2)
    with pytest.raises(InvalidInput, match="a cycle has 5 groups, but 50 examples are enough for 1 to 4"):
        planned_sampling(SamplingSpec("cyclic_poisson", BATCH, cycle_length=5), SIZE)
    for method in ("cyclic_poisson", "fixed_order"):
        with pytest.raises(InvalidInput, match=r"max_batch_size is 20, but .* are not cut"):
            planned_sampling(SamplingSpec(method, BATCH, max_batch_size=20), SIZE)


def test_keyed_places_are_uniform_for_any_number_of_them() -> None:
    """2^64 is 1 modulo 3: the last word is drawn again."""
    rows = KeyedRows(Known(words(2**64 - 1, 5, 3), words(2**64 - 1), words(4)))
    np.testing.assert_array_equal(rows.places(3, 3), [1, 2, 0])
    np.testing.assert_array_equal(KeyedRows(Known(words(2**64 - 1, 6))).places(2, 4), [3, 2])


def test_what_belongs_to_random_allocation_alone_is_refused_elsewhere() -> None:
    with pytest.raises(InvalidInput, match=r"per_epoch is 2, but belongs to random_allocation"):
        SamplingSpec("poisson", BATCH, per_epoch=2)
    with pytest.raises(InvalidInput, match="per_epoch is 2, but must divide the 5 steps"):
        planned_sampling(SamplingSpec("random_allocation", BATCH, per_epoch=2), SIZE)
    with pytest.raises(InvalidInput, match="max_batch_size is 20, but randomly allocated batches are not cut"):
        planned_sampling(SamplingSpec("random_allocation", BATCH, max_batch_size=20), SIZE)


@every_sampler
@pytest.mark.parametrize(
    ("batch", "reason"),
    [(0, "batch_size is 0, but must be at least 1"), (51, f"batch_size is 51, .* {SIZE} training examples")],
)
def test_a_batch_that_does_not_fit_the_data_is_refused(method: str, batch: int, reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        planned_sampling(SamplingSpec(method, batch), SIZE)


def test_seeded_batches_are_those_of_numpy() -> None:
    """So results that were published in research mode can be repeated."""
    drawn: dict[str, Callable[[np.random.Generator], Any]] = {
        "poisson": lambda rng: np.flatnonzero(rng.random(SIZE) < BATCH / SIZE),
        "fixed": lambda rng: np.sort(rng.choice(SIZE, BATCH, replace=False)),
        "shuffle": lambda rng: np.sort(rng.permutation(SIZE)[:BATCH]),
    }
    for method, expected in drawn.items():
        np.testing.assert_array_equal(sampler(method, key=8).next_batch(), expected(np.random.default_rng(8)))


class Known(KeyedStream):
    """A stream whose bytes are given."""

    def __init__(self, *calls: bytes) -> None:
        super().__init__(b"")
        self._calls = list(calls)

    def octets(self, count: int) -> np.ndarray:
        given = np.frombuffer(self._calls.pop(0), np.uint8)
        assert len(given) == count
        return given


def words(*values: int) -> bytes:
    return b"".join(value.to_bytes(8, "little") for value in values)


def test_keyed_rates_are_those_stated_rounded_down() -> None:
    """1/3 is 0.010101...: the first byte decides, then a word where the byte is 0x55 itself."""
    ties = words(0x5555555555555554, 0x5555555555555555)
    rows = KeyedRows(Known(bytes([0x54, 0x55, 0x55, 0x56, 0xFF, 0x00]), ties)).each(6, 2)
    np.testing.assert_array_equal(rows, [0, 1, 5])
    np.testing.assert_array_equal(KeyedRows(Known(bytes([255, 255]), b"")).each(2, 2), [0, 1])


def test_ties_among_keyed_rows_are_drawn_again() -> None:
    """Of four rows that share the byte 7, two are to be chosen: the next byte says which, for two of them again."""
    stream = Known(bytes([7, 200, 7, 3, 7, 7]), bytes([9, 9, 1, 30]), bytes([4, 2]))
    np.testing.assert_array_equal(KeyedRows(stream).subset(6, 3), [2, 3, 4])
    order = KeyedRows(Known(words(5, 5, 1), words(2, 9, 1))).order(3)
    np.testing.assert_array_equal(order, [2, 0, 1])


@pytest.mark.thinned(2)
@pytest.mark.parametrize("count", [0, 1, 2, 3, 4])
def test_every_keyed_subset_and_order_is_equally_likely(count: int) -> None:
    rows, draws = DRAWS["keyed"](5), 6000
    subsets = Counter(tuple(rows.subset(4, count)) for _ in range(draws))
    assert len(subsets) == math.comb(4, count)
    assert chisquare(list(subsets.values())).pvalue > 1e-3 or len(subsets) == 1
    orders = Counter(tuple(rows.order(count)) for _ in range(draws))
    assert len(orders) == math.factorial(count)
    assert chisquare(list(orders.values())).pvalue > 1e-3 or len(orders) == 1


def test_secret_batches_come_from_the_cryptographic_stream() -> None:
    """An independent ChaCha20 of key and number of the call says which rows join; no other generator is involved."""
    assert isinstance(make_row_draws(3), SeededRows)
    draws = make_row_draws(None)
    state = draws.state()
    assert state.keys() == {"key", "series"}
    assert len(state["key"]) == KEY_BYTES
    assert state["key"] != make_row_draws(None).state()["key"]
    for call in (0, 2):  # ties take the calls between
        counter_and_nonce = bytes(4) + call.to_bytes(12, "little")
        cipher = Cipher(ChaCha20(state["key"], counter_and_nonce), mode=None).encryptor()
        expected = {row for row, byte in enumerate(cipher.update(bytes(1024))) if byte < 64}
        assert set(draws.each(1024, 256).tolist()) == expected
