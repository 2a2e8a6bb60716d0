"""One contract for every noise source: Gaussian, reproducible from its state, never silently zero."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import binomtest, kstest, norm

from accounting.errors import InvalidInput
from accounting.rounding import release_grid
from workers.noise import (
    BLOCK,
    KEY_BYTES,
    NOISE_SOURCES,
    NoiseSource,
    derive_seed,
    entropy,
    make_noise_source,
)

CPU = torch.device("cpu")
every_source = pytest.mark.parametrize("name", NOISE_SOURCES)


def source(name: str, seed: int = 0) -> NoiseSource:
    return make_noise_source(name, seed, CPU)


def repeatable(name: str, key: int) -> NoiseSource:
    """The same draws in every run of the tests, also where the key comes from the operating system."""
    noise = source(name, seed=key)
    if name != "seeded":
        noise.restore({"key": key.to_bytes(KEY_BYTES, "little"), "counter": 0})
    return noise


@every_source
def test_draws_are_gaussian_with_the_given_std(name: str) -> None:
    values = repeatable(name, 3).normal((1001, 1000), 2.5)
    assert values.shape == (1001, 1000)
    assert values.dtype == torch.float32
    draws = values.flatten().double().numpy() / 2.5
    assert kstest(draws, "norm").pvalue > 1e-3
    assert abs(draws.mean()) < 4.0 / math.sqrt(len(draws))
    assert abs(draws.var() - 1.0) < 4.0 * math.sqrt(2.0 / len(draws))
    for tail in (3.0, 4.0, -3.0, -4.0):
        beyond = int((np.sign(tail) * draws > abs(tail)).sum())
        assert binomtest(beyond, len(draws), norm.sf(abs(tail))).pvalue > 1e-3


@every_source
def test_no_two_blocks_calls_or_keys_share_draws(name: str) -> None:
    noise, other = repeatable(name, 5), repeatable(name, 6)
    shape = (3 * BLOCK + 1,)
    made = torch.cat([noise.normal(shape, 1.0), noise.normal(shape, 1.0), other.normal(shape, 1.0)])
    parts = torch.stack(list(made[: 9 * BLOCK].split(BLOCK)))
    correlations = parts.corrcoef()[~torch.eye(len(parts), dtype=torch.bool)]
    assert float(correlations.abs().max()) < 5.0 / math.sqrt(BLOCK)
    assert len(made.unique()) > 0.9 * len(made)  # float32 has few numbers between -4 and 4, but not that few


@every_source
def test_draws_of_a_call_and_of_two_calls_are_uncorrelated(name: str) -> None:
    noise = source(name, seed=4)
    first, second = noise.normal((40_000,), 1.0), noise.normal((40_000,), 1.0)
    halves = first.reshape(2, -1)
    limit = 5.0 / math.sqrt(20_000)
    assert abs(float((first * second).mean())) < limit
    assert abs(float((halves[0] * halves[1]).mean())) < limit
    assert abs(float((first[1:] * first[:-1]).mean())) < limit


@every_source
def test_a_restored_source_repeats_its_draws(name: str) -> None:
    noise = source(name)
    noise.normal((7,), 1.0)
    state = noise.state()
    expected = [noise.normal(shape, 3.0) for shape in ((5,), (2, 3), (1,), (0,))]
    other = source(name, seed=99)
    other.restore(state)
    for values in expected:
        assert torch.equal(other.normal(tuple(values.shape), 3.0), values)


@every_source
def test_std_zero_gives_zeros_and_impossible_stds_are_refused(name: str) -> None:
    noise = source(name)
    assert torch.equal(noise.normal((3,), 0.0), torch.zeros(3))
    for std in (math.nan, math.inf, -1.0):
        with pytest.raises(InvalidInput, match="noise std"):
            noise.normal((3,), std)


@every_source
def test_added_noise_is_gaussian_and_std_zero_changes_nothing(name: str) -> None:
    values = torch.full((200, 200), 7.0, dtype=torch.float64)
    noise = source(name, seed=3)
    assert torch.equal(noise.added(values, 0.0), values)
    noisy = noise.added(values, 2.5)
    assert noisy.dtype == torch.float64
    assert kstest((noisy - values).flatten().numpy() / 2.5, "norm").pvalue > 1e-4


@pytest.mark.parametrize("name", ["os_entropy", "os_entropy_secure"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_last_bits_of_a_release_tell_nothing_of_the_value(name: str, dtype: torch.dtype) -> None:
    """Whatever the value, releases are multiples of one grid: next to 0 (a gradient) or to 37 (a count)."""
    grid = release_grid(10.0)
    for value in (0.0, 0.01, 37.0):
        noisy = source(name).added(torch.full((10_000,), value, dtype=dtype), 10.0).double()
        assert torch.equal(noisy / grid, (noisy / grid).round())
        assert (noisy.diff() != 0.0).float().mean() > 0.99


def test_only_seeded_noise_follows_the_seed() -> None:
    assert torch.equal(source("seeded", 1).normal((4,), 1.0), source("seeded", 1).normal((4,), 1.0))
    assert not torch.equal(source("seeded", 1).normal((4,), 1.0), source("seeded", 2).normal((4,), 1.0))
    for name in ("os_entropy", "os_entropy_secure"):
        assert not torch.equal(source(name, 1).normal((4,), 1.0), source(name, 1).normal((4,), 1.0))


def test_secure_draws_lie_on_no_grid_of_single_draws() -> None:
    """The same key gives other values with summed draws: four words per value instead of one."""
    single, summed = source("os_entropy"), source("os_entropy_secure")
    summed.restore(single.state())
    assert not torch.equal(single.normal((8,), 1.0), summed.normal((8,), 1.0))


@pytest.mark.parametrize("purpose", ["sampling", "augmentation", "model"])
def test_seeds_of_purposes_are_unrelated_and_secret_outside_research(purpose: str) -> None:
    assert len({derive_seed(seed, purpose) for seed in range(10) for purpose in ("noise", "sampling")}) == 20
    assert entropy("seeded", 5, purpose) == entropy("seeded", 5, purpose)
    for secret in ("os_entropy", "os_entropy_secure"):
        assert entropy(secret, 5, purpose) != entropy(secret, 5, purpose)
        assert entropy(secret, 5, purpose, bits=63) < 2**63


def test_unknown_source_is_named() -> None:
    with pytest.raises(InvalidInput, match="did you mean 'os_entropy'"):
        source("os_entropi")
