"""One contract for every noise source: Gaussian, reproducible from its state, never silently zero."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import kstest

from accounting.errors import InvalidInput
from workers.noise import NOISE_SOURCES, NoiseSource, derive_seed, make_noise_source, sampler_entropy

CPU = torch.device("cpu")
every_source = pytest.mark.parametrize("name", NOISE_SOURCES)


def source(name: str, seed: int = 0) -> NoiseSource:
    return make_noise_source(name, seed, CPU)


@every_source
def test_draws_are_gaussian_with_the_given_std(name: str) -> None:
    values = source(name, seed=3).normal((200, 200), 2.5)
    assert values.shape == (200, 200)
    assert values.dtype == torch.float32
    assert kstest(values.flatten().numpy(), "norm", args=(0.0, 2.5)).pvalue > 1e-4


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


def test_seeds_of_purposes_are_unrelated_and_sampling_is_secret_outside_research() -> None:
    assert len({derive_seed(seed, purpose) for seed in range(10) for purpose in ("noise", "sampling")}) == 20
    assert sampler_entropy("seeded", 5) == sampler_entropy("seeded", 5)
    assert sampler_entropy("os_entropy", 5) != sampler_entropy("os_entropy", 5)


def test_unknown_source_is_named() -> None:
    with pytest.raises(InvalidInput, match="did you mean 'os_entropy'"):
        source("os_entropi")
