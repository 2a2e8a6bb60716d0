"""Epsilons of single examples under random allocation, against oracles that share no code with them."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from dpsweep.accounting.errors import UnsupportedMechanism
from dpsweep.accounting.individual import blocks
from dpsweep.accounting.individual.blocks import block_spectra, spectrum_columns
from dpsweep.accounting.individual.contour import UNKNOWN
from dpsweep.accounting.individual.contributions import LARGEST_LOSS, AllocationBlock
from dpsweep.accounting.individual.epsilons import individual_epsilons
from dpsweep.accounting.mechanism.samplings import RandomAllocationSampling
from dpsweep.accounting.mechanism.trace import GaussianRelease, PureRelease, Segment, SideQuery, Trace
from dpsweep.accounting.pld import AllocatedRound, EvenLaw, epsilon_of_examples, epsilon_pld, mean_from_above
from dpsweep.accounting.pld.loss import DIRECTIONS, Direction

Array = NDArray[np.float64]


def allocated(sigma: float, steps: int, epochs: int, per_epoch: int = 1) -> Trace:
    return Trace(10_000, (Segment(0, steps * epochs, RandomAllocationSampling(steps, per_epoch), sigma),))


def upper(trace: Trace, starts: Sequence[int] | NDArray[np.int64], contributions: Array, delta: float) -> Array:
    found = individual_epsilons(starts, contributions, trace, delta)
    assert found.lower is None, "laws above the true ones are composed"
    return found.upper


@functools.cache
def cells_of_block(shift: float, steps: int) -> tuple[Array, Array]:
    """Masses of the cells of all outputs of a block, with the example and without."""
    edges = np.concatenate(([-np.inf], np.linspace(-6.0, 6.0 + shift, {2: 700, 3: 110}[steps]), [np.inf]))
    idle, joined = np.diff(stats.norm.cdf(edges)), np.diff(stats.norm.cdf(edges, shift))
    laws = [[joined if step == at else idle for step in range(steps)] for at in range(steps)]
    present = sum(functools.reduce(np.multiply.outer, law).ravel() for law in laws) / steps
    return np.asarray(present), np.asarray(functools.reduce(np.multiply.outer, [idle] * steps).ravel())


def epsilon_of_cells(shifts: Sequence[float], steps: int, delta: float) -> float:
    """A little below the epsilon of blocks with these shifts: outputs are put into cells, losses rounded down."""
    spacing, found = 5e-4, 0.0
    for direction in (1.0, -1.0):
        laws, first = [], 0
        for shift in shifts:
            present, absent = cells_of_block(shift, steps)
            seen = (present > 1e-14) & (absent > 1e-14)
            losses = direction * np.log(present[seen] / absent[seen])
            places = np.floor(losses / spacing).astype(np.int64)
            laws.append(np.bincount(places - places.min(), (present if direction > 0.0 else absent)[seen]))
            first += int(places.min())
        size = 1 << sum(map(len, laws)).bit_length()
        spectra = [np.fft.rfft(law, size) for law in laws]
        masses = np.maximum(np.fft.irfft(functools.reduce(np.multiply, spectra), size), 0.0)
        sums = spacing * (first + np.arange(size))
        low, high = 0.0, 50.0
        for _ in range(50):
            middle = 0.5 * (low + high)
            above = sums > middle
            low, high = (middle, high) if masses[above] @ -np.expm1(middle - sums[above]) > delta else (low, middle)
        found = max(found, low)
    return found


@pytest.mark.parametrize(
    ("steps", "sigma", "delta", "contributions"),
    [
        (2, 1.0, 1e-4, (1.0, 0.3, 0.8, 0.1, 0.5, 0.9)),
        (2, 0.6, 1e-3, (0.2, 0.9, 0.4)),
        (2, 3.0, 1e-2, (1.0, 1.0, 0.0, 0.7) * 3),
        (3, 1.2, 1e-3, (0.6, 1.0, 0.4, 0.8)),
    ],
)
def test_a_few_steps_agree_with_cells_of_all_outputs(
    steps: int, sigma: float, delta: float, contributions: tuple[float, ...]
) -> None:
    trace = allocated(sigma, steps, len(contributions))
    (found,) = upper(trace, steps * np.arange(len(contributions), dtype=np.int64), np.array([contributions]), delta)
    exact = epsilon_of_cells([c / sigma for c in contributions if c > 0.0], steps, delta)
    assert exact <= found <= (1.03 if steps == 2 else 1.1) * exact


def simulated(shifts: Array, steps: int, *, removing: bool, count: int = 40_000) -> Array:
    """Losses of runs of blocks with these shifts, drawn with the example (removing) or without."""
    rng, total = np.random.default_rng(len(shifts)), np.zeros(count)
    for shift in shifts:
        outputs = rng.standard_normal((count, steps))
        if removing:
            outputs[np.arange(count), rng.integers(0, steps, count)] += shift
        total += np.log(np.exp(shift * outputs - shift**2 / 2).mean(axis=1))
    return total if removing else -total


@pytest.mark.parametrize(("sigma", "steps", "epochs", "delta"), [(1.0, 20, 6, 1e-2), (2.0, 50, 12, 1e-3)])
def test_simulated_runs_lose_no_more_and_hardly_less(sigma: float, steps: int, epochs: int, delta: float) -> None:
    contributions = np.linspace(1.0, 0.2, epochs)
    trace = allocated(sigma, steps, epochs)
    (epsilon,) = upper(trace, steps * np.arange(epochs, dtype=np.int64), contributions[None], delta)

    def largest_delta(at: float) -> tuple[float, float]:
        means = []
        for removing in (True, False):
            leaked = np.maximum(-np.expm1(at - simulated(contributions / sigma, steps, removing=removing)), 0.0)
            means.append((float(leaked.mean()), float(leaked.std()) / math.sqrt(len(leaked))))
        return max(means)

    mean, error = largest_delta(epsilon)
    assert mean - 4.0 * error <= delta
    mean, error = largest_delta(0.97 * epsilon)
    assert mean + 4.0 * error >= delta


@pytest.mark.parametrize(
    "trace", [allocated(6.0, 100, 400), allocated(1.5, 24, 10, 2), allocated(0.8, 50, 3), allocated(20.0, 2, 300)]
)
def test_who_always_contributes_most_pays_for_the_whole_run(trace: Trace) -> None:
    rows = np.array([[1.0], [0.999], [0.5], [0.01], [0.0]])
    found, whole = upper(trace, [0], rows, 1e-5), epsilon_pld(trace, 1e-5)
    assert whole.lower is not None
    assert whole.lower <= found[0] <= 1.001 * whole.upper
    assert (np.diff(found) < 0.0).all()
    assert found[-1] == 0.0
    renyi = individual_epsilons([0], rows, trace, 1e-5, "rdp").upper
    assert (found <= renyi).all()
    assert (renyi <= 1.6 * found).all()


def test_what_a_row_costs_depends_on_that_row_alone() -> None:
    rng, trace = np.random.default_rng(3), allocated(2.0, 10, 12)
    rows = rng.uniform(0.0, 1.0, (40, 12)) ** 2
    starts = 10 * np.arange(12, dtype=np.int64)
    together = upper(trace, starts, rows, 1e-5)
    assert together[7] == upper(trace, starts, rows[7:8], 1e-5)[0]
    more = upper(trace, starts, np.minimum(rows + 0.05, 1.0), 1e-5)
    assert (more > together).all()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_moments_of_draws_between_two_nodes_are_near_their_chords(direction: Direction) -> None:
    """A public draw between two nodes has the mean of their moments; the error of the chord covers the difference."""
    law, nodes = AllocationBlock(20, 1.0, 1e-16, 4), np.linspace(0.2, 1.0, 9)
    table = block_spectra(law, nodes.tobytes(), 8.0, 4.0, direction)
    logs, errors, decays = spectrum_columns(table, 64)
    assert (errors > 0.0).all()
    assert errors.min() < 0.1
    for share in (0.2, 0.5, 0.9):
        drawn = (1.0 - share) * np.exp(logs[:-1]) + share * np.exp(logs[1:])
        chord = np.exp((1.0 - share) * logs[:-1] + share * logs[1:])
        allowed = (1.0 - share) * errors[:-1] + share * errors[1:]
        assert (np.abs(drawn - chord) <= np.abs(chord) * np.expm1(np.minimum(allowed, 700.0)) * (1.0 + 1e-9)).all()
        left = (1.0 - share) * (logs[:-1, 0].real - decays[:-1, 32]) + share * (logs[1:, 0].real - decays[1:, 32])
        assert (np.log(np.abs(drawn[:, 32:])).max(axis=1) <= left + 1e-9).all()


UNEVEN = (
    Segment(0, 25, RandomAllocationSampling(10), 1.5),
    Segment(25, 40, RandomAllocationSampling(10), 1.1, (SideQuery("counts", 6.0),)),
    Segment(65, 30, RandomAllocationSampling(8, 2), 2.0),
)
RUNS = {
    "noise changes within a block": Trace(1000, UNEVEN),
    "an unfinished epoch": Trace(1000, (Segment(0, 47, RandomAllocationSampling(10), 1.2),), adjacency="zero_out"),
    "releases beside it": Trace(
        1000, (Segment(0, 60, RandomAllocationSampling(6), 2.0),), (GaussianRelease("g", 9.0), PureRelease("p", 0.1))
    ),
    "some noise is hardly any": Trace(
        1000,
        (Segment(0, 20, RandomAllocationSampling(5), 3.0), Segment(20, 5, RandomAllocationSampling(5), 0.15)),
    ),
    "batches of all": Trace(1000, (Segment(0, 20, RandomAllocationSampling(1), 9.0),)),
}


@pytest.mark.parametrize("name", RUNS)
def test_blocks_count_at_their_largest_contribution(name: str) -> None:
    """The lattice composes each block of one example alone, from its own pieces of the run."""
    trace = RUNS[name]
    starts = [0, 3, 12, 16, 18]
    rows = np.random.default_rng(5).uniform(0.05, 1.0, (3, len(starts)))
    found = upper(trace, starts, rows, 1e-4)
    for row, each in zip(rows, found.tolist(), strict=True):
        composed = epsilon_of_examples(trace, starts, row[None], 1e-4)
        assert (1.0 - 1e-3) * composed.upper <= each <= 1.03 * composed.upper
        assert composed.lower is None or composed.lower <= each


@pytest.mark.parametrize(("direction", "order"), [(Direction.REMOVE, 2.0), (Direction.ADD, -1.0)])
def test_a_law_that_loses_much_mass_bounds_nothing(
    direction: Direction, order: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mass at an infinite loss is taken off delta, at most so much of each block; a law that loses more is not used."""
    law = AllocationBlock(3, 1.0, 1e-12 if direction is Direction.REMOVE else 1e-13, 2)  # tables are kept
    nodes, orders = np.array([0.0, 0.5, 1.0]).tobytes(), np.array([2.0, -1.0])
    lost = 1.01 * LARGEST_LOSS * law.tail

    def losing(steps: int, shift: float, tail: float) -> EvenLaw:
        found = mean_from_above(AllocatedRound(shift, steps), tail)
        return replace(found, lost_of_p=lost) if direction is Direction.REMOVE else replace(found, lost_of_q=lost)

    monkeypatch.setattr(blocks, "_law", losing)
    moments = blocks.block_moments(law, nodes, orders.tobytes())
    assert (np.isinf(moments[1:]) == (orders == order)).all()
    _, errors, _ = spectrum_columns(block_spectra(law, nodes, 1.7, 9.0, direction), 8)
    assert (errors[1:] >= UNKNOWN).all()


@pytest.mark.parametrize("method", ["pld", "rdp"])
def test_deltas_of_which_no_tail_is_a_small_share_are_refused(method: str) -> None:
    with pytest.raises(UnsupportedMechanism, match=r"delta is 1e-299, but randomly allocated .* from 1e-250 on"):
        individual_epsilons([0], np.ones((1, 1)), allocated(3.0, 5, 100), 1e-299, method)
