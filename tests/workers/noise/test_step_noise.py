"""Correlated noise of the trainer: C^-1 times the draws of its source, whatever the step at which it is resumed."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from scipy import linalg, stats

from dpsweep.accounting.errors import UnsupportedMechanism
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
from dpsweep.accounting.numerics.rounding import release_grid
from dpsweep.workers.noise import gaussian_sources
from dpsweep.workers.noise.gaussian_sources import NoiseSource
from dpsweep.workers.noise.noise_sources import NOISE_SOURCES, make_noise_source
from dpsweep.workers.noise.step_noise import CorrelatedSteps, NoiseShare, make_step_noise

STEPS, CPU = 12, torch.device("cpu")
STRATEGIES: list[CorrelatedNoise] = [
    BandedNoise(1, STEPS),
    BandedNoise(4, STEPS),
    BandedNoise(STEPS, STEPS),
    InverseRootNoise(5, STEPS),
    LambdaNoise(0.7, STEPS),
    BufferedNoise(2, STEPS, 4),
]
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.stored_name)
SHAPES = {"weight": (3, 5), "bias": (4,)}
ZEROS = {name: torch.zeros(shape) for name, shape in SHAPES.items()}


def flat(values: dict[str, torch.Tensor]) -> np.ndarray:
    return torch.cat([each.flatten() for each in values.values()]).numpy()


def matrix_of(strategy: CorrelatedNoise) -> np.ndarray:
    """C of the strategy as a dense matrix [STEPS, STEPS]."""
    column = strategy.column()
    return linalg.toeplitz(np.pad(column, (0, STEPS - len(column))), np.zeros(STEPS))


def same(name: str, source: NoiseSource) -> NoiseSource:
    """Another source that makes the draws which ``source`` makes next."""
    other = make_noise_source(name, 0, CPU)
    other.restore(copy.deepcopy(source.state()))
    return other


def draws_of(state: dict[str, Any], name: str, count: int) -> np.ndarray:
    """The draws w [STEPS, count] of noise with this state."""
    draws = make_noise_source(name, 0, CPU).draws_of_steps()
    draws.restore(state["draws"])
    return np.stack([draws.draw(step, 0, count).numpy() for step in range(STEPS)])


@every_strategy
@pytest.mark.parametrize("name", NOISE_SOURCES)
def test_noise_is_the_inverse_times_the_draws(name: str, strategy: CorrelatedNoise) -> None:
    """By dense linear algebra, up to rounding to the grid; sensitivity differs from step to step."""
    noise = CorrelatedSteps(strategy, make_noise_source(name, 7, CPU))
    stds = 2.0 + np.arange(STEPS) % 3
    found = [noise.released(ZEROS, std) for std in stds]
    draws = draws_of(noise.state(), name, 19)
    matrix = matrix_of(strategy)
    expected = stds[:, None] * np.linalg.norm(matrix[:, 0]) * (np.linalg.inv(matrix) @ draws)
    for step, (values, std) in enumerate(found):
        spread = stds[step] * np.linalg.norm(matrix[:, 0]) * np.linalg.norm(np.linalg.inv(matrix)[step])
        assert std == pytest.approx(spread, rel=1e-8)
        coarse = 1e-6 * std if name == "seeded" else 0.5001 * release_grid(std)
        np.testing.assert_allclose(flat(values), expected[step], atol=coarse)


@every_strategy
def test_covariance_of_the_released_noise(strategy: CorrelatedNoise) -> None:
    """Of many weights: sigma^2 ||c||^2 C^-1 C^-T, each entry within five standard errors."""
    count, noise = 4000, make_step_noise(strategy, make_noise_source("os_entropy", 0, CPU))
    zeros = {"weight": torch.zeros(count)}
    seen = np.stack([flat(noise.released(zeros, 1.5).values) for _ in range(STEPS)]).astype(np.float64)
    inverse = np.linalg.inv(matrix_of(strategy))
    stated = (1.5 * column_norm(strategy.column())) ** 2 * inverse @ inverse.T
    error = np.sqrt((stated**2 + np.outer(np.diag(stated), np.diag(stated))) / count)
    assert (np.abs(seen @ seen.T / count - stated) < 5.0 * error).all()
    whitened = matrix_of(strategy) @ seen / (1.5 * column_norm(strategy.column()))
    assert stats.kstest(whitened.ravel(), "norm").pvalue > 1e-4


@pytest.mark.thinned(3)
@every_strategy
@pytest.mark.parametrize("name", NOISE_SOURCES)
def test_it_goes_on_with_the_same_bits_from_any_step(name: str, strategy: CorrelatedNoise) -> None:
    noise = CorrelatedSteps(strategy, make_noise_source(name, 3, CPU))
    states, released = [], []
    for _ in range(STEPS):
        states.append(copy.deepcopy(noise.state()))
        released.append(flat(noise.released(ZEROS, 1.0).values))
    for step, state in enumerate(states):
        resumed = CorrelatedSteps(strategy, make_noise_source(name, 99, CPU))
        resumed.restore(state)
        for expected in released[step:]:
            np.testing.assert_array_equal(flat(resumed.released(ZEROS, 1.0).values), expected)


@pytest.mark.parametrize("name", ["os_entropy", "os_entropy_secure"])
def test_keyed_draws_do_not_depend_on_the_size_of_pieces(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a run may resume on another kind of device."""
    source = make_noise_source(name, 0, CPU)
    large = source.draws_of_steps()
    whole = large.draw(3, 0, 300)
    monkeypatch.setattr(gaussian_sources, "BLOCK", 64)
    small = source.draws_of_steps()
    small.restore(large.state())
    pieces = [small.draw(3, start, min(small.most, 300 - start)) for start in range(0, 300, small.most)]
    assert len(pieces) > 4
    assert torch.equal(torch.cat(pieces), whole)


@pytest.mark.parametrize("sizes", [(64, 640), (640, 64)])
def test_earlier_noise_goes_on_in_pieces_of_another_size(
    sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on another kind of device."""
    zeros, made = {"weight": torch.zeros(300)}, list[CorrelatedSteps]()
    for size in sizes:
        with monkeypatch.context() as smaller:
            smaller.setattr(gaussian_sources, "BLOCK", size)
            made.append(CorrelatedSteps(BufferedNoise(2, STEPS, 4), make_noise_source("os_entropy", 0, CPU)))
    one, other = made
    for _ in range(3):
        one.released(zeros, 1.0)
    other.restore(one.state())
    for _ in range(3):
        assert np.array_equal(flat(other.released(zeros, 1.0).values), flat(one.released(zeros, 1.0).values))


@pytest.mark.parametrize("name", NOISE_SOURCES)
def test_no_two_steps_pieces_or_sources_share_draws(name: str) -> None:
    sources = [make_noise_source(name, seed, CPU) for seed in (1, 2)]
    draws = [source.draws_of_steps() for source in sources]
    found = [each.draw(step, piece * each.most, 999) for each in draws for step in (0, 1, 7) for piece in (0, 1, 2)]
    others = [source.added(torch.zeros(999, dtype=torch.float64), 1.0) for source in sources]
    assert len(torch.cat([*found, *others]).unique()) > 19_000, "of 20 x 999"
    assert torch.corrcoef(torch.stack(found)).fill_diagonal_(0.0).abs().max() < 5.0 / math.sqrt(999)


def taken(shares: Sequence[NoiseShare], count: int) -> torch.Tensor:
    """z [count] of a step of all ranks."""
    rounds = zip(*(share.noise(count) for share in shares), strict=True)
    return torch.cat([noise for one in rounds for _, noise in one])


@pytest.mark.parametrize("name", NOISE_SOURCES)
@every_strategy
def test_ranks_divide_the_noise_to_the_same_bits(
    name: str, strategy: CorrelatedNoise, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 300 weights in pieces of 64, or of 16; every step is resumed from the checkpoint of the one before."""
    monkeypatch.setattr(gaussian_sources, "BLOCK", 64)
    count, source = 300, make_noise_source(name, 5, CPU)
    alone = NoiseShare(strategy.memory(), source.draws_of_steps())
    for _ in range(STEPS):
        state = {**alone.state(), "rows": {piece: each.clone() for piece, each in alone.rows.items()}}
        expected = taken([alone], count)
        assert len(expected.unique()) == count
        for ranks in (1, 2, 4):
            shares = [NoiseShare(strategy.memory(), source.draws_of_steps()) for _ in range(ranks)]
            for rank, share in enumerate(shares):
                share.divide(rank, ranks)
                share.restore(state)
            assert torch.equal(taken(shares, count), expected)
            kept = [sum(each.numel() for each in share.rows.values()) for share in shares]
            assert sum(kept) == sum(each.numel() for each in alone.rows.values())
            assert max(kept) <= -(-sum(kept) // ranks) + 64 * strategy.memory().kept


@pytest.mark.parametrize("name", NOISE_SOURCES)
@pytest.mark.parametrize("strategy", [INDEPENDENT, *STRATEGIES[1::2]], ids=lambda strategy: strategy.stored_name)
def test_sums_in_turn_get_the_bits_of_all_together(name: str, strategy: NoiseStrategy) -> None:
    source = make_noise_source(name, 5, CPU)
    noise, other = (make_step_noise(strategy, each) for each in (source, same(name, source)))
    if isinstance(noise, CorrelatedSteps) and isinstance(other, CorrelatedSteps):
        other.restore(noise.state())
    for step in range(3):
        values = {
            "long": torch.randn(70_000),
            "none": torch.randn(0),
            "short": torch.randn(5),
            "next": torch.randn(900),
        }
        together = noise.released(values, 1.0 + step)
        in_turn = other.in_turn((each.clone() for each in values.values()), 70_905, 1.0 + step)
        assert in_turn.std == together.std
        found = list(in_turn.values)
        assert all(torch.equal(*pair) for pair in zip(found, together.values.values(), strict=True))


def test_a_buffer_that_is_kept_wrongly_is_found() -> None:
    """The test of covariance would fail if rows were shifted by a step: whitened noise is then no longer white."""
    strategy = BandedNoise(4, STEPS)
    noise = CorrelatedSteps(strategy, make_noise_source("os_entropy", 0, CPU))
    zeros, seen = {"weight": torch.zeros(4000)}, []
    for _ in range(STEPS):
        seen.append(flat(noise.released(zeros, 1.0).values).astype(np.float64))
        rows = {piece: rows.roll(1, 0) for piece, rows in noise.state()["rows"].items()}
        noise.restore({**noise.state(), "rows": rows})
    whitened = matrix_of(strategy) @ np.stack(seen) / column_norm(strategy.column())
    correlations = whitened @ whitened.T / 4000 - np.eye(STEPS)
    assert np.abs(correlations).max() > 10.0 / math.sqrt(4000)


@pytest.mark.parametrize("name", ["os_entropy", "os_entropy_secure"])
def test_released_values_lie_on_the_grid_of_their_own_spread(name: str) -> None:
    noise = make_step_noise(BandedNoise(4, STEPS), make_noise_source(name, 0, CPU))
    for _ in range(3):
        values, std = noise.released({"weight": torch.full((50,), 0.1)}, 3.0)
        ratio = flat(values) / release_grid(std)
        np.testing.assert_array_equal(ratio, np.round(ratio))


def test_steps_without_sensitivity_still_draw() -> None:
    """A step of std 0 releases the sum itself, and those after it are as if it had noise."""
    strategy = LambdaNoise(0.5, STEPS)
    one, other = (CorrelatedSteps(strategy, make_noise_source("os_entropy", 0, CPU)) for _ in range(2))
    other.restore(one.state())
    assert torch.equal(one.released({"bias": torch.ones(4)}, 0.0).values["bias"], torch.ones(4))
    other.released({"bias": torch.ones(4)}, 1.0)
    assert torch.equal(*(each.released({"bias": torch.ones(4)}, 1.0).values["bias"] for each in (one, other)))


def test_independent_noise_is_that_of_the_source() -> None:
    source = make_noise_source("os_entropy", 0, CPU)
    twin, noise = same("os_entropy", source), make_step_noise(INDEPENDENT, source)
    for _ in range(2):
        values, std = noise.released(ZEROS, 2.0)
        np.testing.assert_array_equal(flat(values), flat(twin.added_to_each(ZEROS, 2.0)))
        assert std == 2.0
    assert dict(noise.kept) == {}


def test_an_unknown_strategy_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedMechanism, match="no accountant knows the noise strategy int"):
        make_step_noise(3, make_noise_source("seeded", 0, CPU))  # type: ignore[arg-type]
