"""One contract for every noise source: Gaussian, reproducible from its state, never silently zero."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from scipy.stats import binomtest, kstest, norm

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.numerics.rounding import release_grid
from dpsweep.accounting.records.keystream import KEY_BYTES
from dpsweep.workers.noise import gaussian_sources
from dpsweep.workers.noise.chacha import ChaChaStream
from dpsweep.workers.noise.gaussian_sources import (
    BLOCK,
    KeyedNoise,
    NoiseSource,
    derive_seed,
    drawn_from,
    seed_torch,
    start_generator,
)
from dpsweep.workers.noise.noise_sources import NOISE_SOURCES, make_noise_source
from tests.workers.devices import DEVICE

CPU = DEVICE
every_source = pytest.mark.parametrize("name", NOISE_SOURCES)


def beginning(key: bytes) -> dict[str, Any]:
    """The state of a keyed source that has made no noise."""
    return {"key": key, "series": 0, "shared": None, "used": 0}


def source(name: str, seed: int = 0) -> NoiseSource:
    return make_noise_source(name, seed, CPU)


def repeatable(name: str, key: int) -> NoiseSource:
    """The same draws in every run of the tests, also where the key comes from the operating system."""
    noise = source(name, seed=key)
    if name != "seeded":
        noise.restore(beginning(key.to_bytes(KEY_BYTES, "little")))
    return noise


@every_source
def test_draws_are_gaussian_with_the_given_std(name: str) -> None:
    values = repeatable(name, 3).normal((1001, 1000), 2.5)
    assert values.shape == (1001, 1000)
    assert values.dtype == torch.float32
    draws = values.flatten().double().cpu().numpy() / 2.5
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
def test_noise_of_several_tensors_is_independent_and_in_their_forms(name: str) -> None:
    """Small ones, which may share a call, large ones, empty ones and other dtypes."""
    shapes = {"a": (40, 100), "b": (4000,), "large": (200, 100), "empty": (0, 3), "double": (50, 80)}
    values = {
        each: torch.full(shape, 7.0, dtype=torch.float64 if each == "double" else torch.float32)
        for each, shape in shapes.items()
    }
    noise = repeatable(name, 8)
    state = noise.state()
    noisy = noise.added_to_each(values, 2.0)
    assert {each: (found.shape, found.dtype) for each, found in noisy.items()} == {
        each: (value.shape, value.dtype) for each, value in values.items()
    }
    draws = {each: (found.double().flatten() - 7.0) / 2.0 for each, found in noisy.items() if each != "empty"}
    for drawn in draws.values():
        assert kstest(drawn.numpy(), "norm").pvalue > 1e-3
    parts = torch.stack([drawn[:4000] for drawn in draws.values()])
    correlations = parts.corrcoef()[~torch.eye(len(parts), dtype=torch.bool)]
    assert float(correlations.abs().max()) < 5.0 / math.sqrt(4000)
    noise.restore(state)
    again = noise.added_to_each(values, 2.0)
    assert all(torch.equal(again[each], noisy[each]) for each in values)
    assert all(torch.equal(found, values[each]) for each, found in noise.added_to_each(values, 0.0).items())
    one = torch.full((40, 100), 7.0)
    noise.added_to_each({"only": one}, 2.0)
    assert (one == 7.0).all()


@every_source
@pytest.mark.parametrize("sizes", [(300, 7, 0, 1000), (70_001, 3, 1, 140_000, 8)], ids=["few", "many"])
def test_values_in_turn_get_the_bits_of_all_together(sizes: Sequence[int], name: str) -> None:
    noise = repeatable(name, 8)
    for std in (2.0, 0.0):
        values = {str(size): torch.randn(size, device=CPU) for size in sizes}
        state = copy.deepcopy(noise.state())
        expected, after = noise.added_to_each(values, std), copy.deepcopy(noise.state())
        noise.restore(state)
        found = list(noise.added_in_turn((each.clone() for each in values.values()), sum(sizes), std))
        assert all(torch.equal(left, right) for left, right in zip(found, expected.values(), strict=True))
        assert str(noise.state()) == str(after)


@every_source
def test_draws_of_many_small_calls_are_gaussian_and_independent(name: str) -> None:
    """They are made many calls at a time: more than three times as many as one series has, in calls of uneven sizes."""
    noise, drawn = repeatable(name, 9), []
    for size in [1, 2, 83, 999] * 200:
        drawn.append(noise.normal((size,), 1.5).double() / 1.5)
    values = torch.cat(drawn)
    assert len(values) > 3 * BLOCK
    assert kstest(values.cpu().numpy(), "norm").pvalue > 1e-3
    parts = torch.stack(list(values[: 3 * BLOCK].split(1024)))
    correlations = parts.corrcoef()[~torch.eye(len(parts), dtype=torch.bool)]
    assert float(correlations.abs().max()) < 6.0 / math.sqrt(1024)
    assert abs(float((values[1:] * values[:-1]).mean())) < 5.0 / math.sqrt(len(values))


@every_source
@pytest.mark.parametrize("calls", [0, 5, 80])
def test_a_source_restored_between_small_and_large_calls_goes_on_as_the_first(name: str, calls: int) -> None:
    """Where calls share what is made at once, also after the last that fits, and with a large call in between."""
    noise = repeatable(name, 10)
    for _ in range(calls):
        noise.normal((811,), 1.0)
    noise.normal((70_000,), 1.0)
    state = noise.state()
    sizes = (811, 3, 9000, 811, 0, 7000, 811)
    expected = [noise.normal((size,), 1.0) for size in sizes]
    other = source(name, seed=99)
    other.normal((5,), 1.0)
    other.restore(state)
    assert all(torch.equal(other.normal((len(each),), 1.0), each) for each in expected)


@every_source
def test_std_zero_gives_zeros_and_impossible_stds_are_refused(name: str) -> None:
    noise = source(name)
    assert noise.normal((3,), 0.0).tolist() == [0.0] * 3
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


def computed(words: Sequence[int], draws: int) -> torch.Tensor:
    """The transform of Box and Muller of uniform words, by mpmath, on the public grid of noise of std 1."""
    uniform = [(word // 2**11 + mpmath.mpf(0.5)) / 2**53 for word in words]
    normal = []
    for first, second in zip(uniform[::2], uniform[1::2], strict=True):
        radius, angle = mpmath.sqrt(-2 * mpmath.log(first)), 2 * mpmath.pi * second
        normal += [radius * mpmath.cos(angle), radius * mpmath.sin(angle)]
    sums = [sum(normal[start : start + draws]) / mpmath.sqrt(draws) for start in range(0, len(normal), draws)]
    grid = release_grid(1.0)
    return torch.tensor([float(each) for each in sums], dtype=torch.float64).div(grid).round().mul(grid)


def words_of_openssl(key: bytes, series: int, count: int) -> list[int]:
    nonce = (0).to_bytes(4, "little") + series.to_bytes(12, "little")
    octets = Cipher(ChaCha20(key, nonce), None).encryptor().update(bytes(8 * count))
    return [int(word) for word in np.frombuffer(octets, "<u8")]


@pytest.mark.parametrize("draws", [1, 4])
def test_draws_are_those_of_box_and_muller_from_the_bits_of_openssl(draws: int) -> None:
    """Computed again with mpmath from the stream that OpenSSL makes: the second series of a key."""
    count, key = 600, bytes(range(KEY_BYTES))
    noise = KeyedNoise(CPU, draws)
    noise.restore({**beginning(key), "series": 1})
    drawn = noise.added(torch.zeros(count, dtype=torch.float64), 1.0)
    assert torch.equal(drawn.cpu(), computed(words_of_openssl(key, 1, count * draws), draws))


@pytest.mark.parametrize("draws", [1, 4])
def test_small_calls_share_a_series_and_large_ones_have_their_own(draws: int) -> None:
    """A call takes what follows in the shared series: the fourth, as the large call in between has the fifth."""
    key = bytes(range(KEY_BYTES))
    noise = KeyedNoise(CPU, draws)
    noise.restore({**beginning(key), "series": 4})
    found = [noise.added(torch.zeros(count, dtype=torch.float64), 1.0) for count in (101, 50, BLOCK, 149)]
    shared, own = words_of_openssl(key, 4, 300 * draws), words_of_openssl(key, 5, 600)
    assert torch.equal(torch.cat([found[0], found[1], found[3]]).cpu(), computed(shared, draws))
    assert torch.equal(found[2][: 600 // draws].cpu(), computed(own, draws))


@pytest.mark.parametrize("count", [1, 7, 1000, 4097])
@pytest.mark.parametrize("draws", [1, 4])
def test_draws_do_not_depend_on_how_many_are_made_at_once(
    count: int, draws: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU makes more at once than a CPU."""
    made, cpu = [], torch.device("cpu")
    for block in (64, 1024, BLOCK):
        monkeypatch.setattr(gaussian_sources, "BLOCK", block)
        words = ChaChaStream(bytes(range(KEY_BYTES)), cpu).again(3)
        made.append(torch.cat(list(drawn_from(words, count, draws, cpu))))
    assert made[0].shape == (count,)
    for other in made[1:]:
        torch.testing.assert_close(made[0], other, rtol=1e-14, atol=1e-14)


def test_a_device_draws_what_a_cpu_draws() -> None:
    """But for the last bits of its logarithm, square root, sine and cosine, which decide on one release in 10^11."""
    there, here = KeyedNoise(DEVICE), KeyedNoise(torch.device("cpu"))
    here.restore(there.state())
    values = {"a": torch.randn(300, 1000), "b": torch.randn(7)}
    expected = here.added_to_each(values, 2.0)
    found = there.added_to_each({name: value.to(DEVICE) for name, value in values.items()}, 2.0)
    assert all(torch.equal(found[name].cpu(), expected[name]) for name in values)


def test_secure_draws_lie_on_no_grid_of_single_draws() -> None:
    """The same key gives other values with summed draws: four words per value instead of one."""
    single, summed = source("os_entropy"), source("os_entropy_secure")
    summed.restore(single.state())
    assert not torch.equal(single.normal((8,), 1.0), summed.normal((8,), 1.0))


@pytest.mark.parametrize("purpose", ["sampling", "augmentation", "model"])
def test_seeds_of_purposes_are_unrelated(purpose: str) -> None:
    seeds = {derive_seed(seed, name) for seed in range(10) for name in ("noise", purpose)}
    assert len(seeds) == 20
    assert max(seeds) < 2**63


def test_seeded_generators_follow_the_seed_as_ever() -> None:
    started = torch.Generator()
    start_generator(started, 5, "augmentation")
    expected = torch.Generator().manual_seed(derive_seed(5, "augmentation"))
    assert torch.equal(started.get_state(), expected.get_state())
    with torch.random.fork_rng():
        seed_torch(5, "model")
        assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(derive_seed(5, "model")).get_state())


def twister(generator: torch.Generator) -> np.random.MT19937:
    """numpy's Mersenne Twister, which shares no code with torch's, from the words of a fresh state of torch's."""
    twin = np.random.MT19937()
    key = generator.get_state().numpy()[24 : 24 + 8 * 624].view("<u8")
    twin.state = {"bit_generator": "MT19937", "state": {"key": key.astype(np.uint32), "pos": 624}}
    return twin


def test_secret_generators_start_from_a_state_that_is_secret_in_all_its_bits() -> None:
    """From `manual_seed`, every word follows from the first, which has 32 bits."""
    words = []
    for _ in range(2):
        generator = torch.Generator()
        start_generator(generator, None, "augmentation")
        twin = twister(generator)
        words.append(twin.state["state"]["key"])
        drawn = torch.empty(2000, dtype=torch.int32).random_(generator=generator).numpy()
        np.testing.assert_array_equal(drawn, twin.random_raw(2000) & 0x7FFFFFFF)
        by_seed = torch.Generator().manual_seed(int(words[-1][0]))
        assert (twister(by_seed).state["state"]["key"][1:] != words[-1][1:]).mean() > 0.99
    assert (words[0] != words[1]).mean() > 0.99
    bits = np.unpackbits(np.concatenate(words).view(np.uint8))
    assert binomtest(int(bits.sum()), len(bits)).pvalue > 1e-6


def test_secret_models_draw_from_a_state_that_is_secret_in_all_its_bits() -> None:
    with torch.random.fork_rng():
        seed_torch(None, "model")
        twin = twister(torch.default_generator)
        np.testing.assert_array_equal(
            torch.empty(700, dtype=torch.int32).random_().numpy(), twin.random_raw(700) & 0x7FFFFFFF
        )
        by_seed = twister(torch.Generator().manual_seed(int(twin.state["state"]["key"][0])))
        assert not np.array_equal(by_seed.random_raw(700), twin.random_raw(700))


def test_unknown_source_is_named() -> None:
    with pytest.raises(InvalidInput, match="did you mean 'os_entropy'"):
        source("os_entropi")


def test_noise_from_the_seed_goes_on_with_other_numbers_on_another_kind_of_device() -> None:
    """The state of a GPU's generator has 16 bytes, that of a CPU's 5,056."""
    length = 16 if DEVICE.type == "cpu" else 5056
    draws = [source("seeded").normal((3,), 1.0)]
    for place in (0, 1, 1):
        noise = source("seeded")
        noise.restore({"generator": torch.full((length,), place, dtype=torch.uint8)})
        draws.append(noise.normal((3,), 1.0))
    assert torch.equal(draws[2], draws[3])
    assert len(torch.cat(draws[:3]).unique()) == 9
