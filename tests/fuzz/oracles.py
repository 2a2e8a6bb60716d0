"""The exact epsilon of a case, between two numbers that share no code with `accounting`."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Sequence
from itertools import product

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from dpsweep.accounting.mechanism.samplings import (
    CyclicPoissonSampling,
    FixedOrderSampling,
    RandomAllocationSampling,
    TruncatedPoissonSampling,
)
from tests.fuzz import closed_forms, correlated, lattice
from tests.fuzz.cases import Case
from tests.fuzz.lattice import Bracket
from tests.fuzz.rounds import Members, Rounds, rounds_of

Array = NDArray[np.float64]

_LARGEST_COUNT = 10**7
_SMALLEST_DELTA = 1e-30
_SLACK = 1e-9


def exact(case: Case, members: Members) -> Bracket:
    """Bounds on the epsilon of ``members``: adding, removing, blanking or replacing them all."""
    if isinstance(case.trace.segments[0].sampling, TruncatedPoissonSampling):
        return Bracket(attack_on_cut_batches(case), math.inf)
    if isinstance(case.trace.segments[0].sampling, RandomAllocationSampling):
        return _of_allocated(case, members)
    if isinstance(case.trace.segments[0].sampling, FixedOrderSampling):
        return correlated.of_fixed_order(case.trace, case.delta, _SLACK)
    in_turns = isinstance(case.trace.segments[0].sampling, CyclicPoissonSampling)
    rounds = correlated.rounds_in_turns(case.trace) if in_turns else rounds_of(case.trace, members)
    if rounds.only_gaussian:
        epsilon = closed_forms.gaussian(rounds.gaussian, case.delta)
        return Bracket(epsilon * (1.0 - _SLACK), epsilon * (1.0 + _SLACK))
    simple = _by_closed_forms(rounds, case.delta)
    if case.delta < _SMALLEST_DELTA or sum(count for _, count in rounds.mixtures) > _LARGEST_COUNT:
        return simple
    found = lattice.bracket(rounds, case.delta)
    # The lattice estimates its error, closed forms are proven. At a delta of 1e-26, far below its rounding, it can
    # contradict itself, or them.
    if found is None or found.low > min(found.high, simple.high):
        return simple
    return Bracket(max(found.low, simple.low), min(found.high, simple.high))


def _by_closed_forms(rounds: Rounds, delta: float) -> Bracket:
    """At least the costliest round alone; at most Renyi, one Gaussian, or nothing below total variation."""
    parts = [
        (1.0 - (mixture.weights[0] if mixture.shifts[0] == 0.0 else 0.0), mixture.shifts[-1], count)
        for mixture, count in rounds.mixtures
    ]
    alone = [
        closed_forms.one_round(mixture.weights[1], mixture.shifts[1], delta)
        for mixture, _ in rounds.mixtures
        if len(mixture.shifts) == 2 and mixture.shifts[0] == 0.0
    ]
    low = max([*alone, closed_forms.gaussian(rounds.gaussian, delta)], default=0.0)
    together = math.hypot(rounds.gaussian, *(shift * math.sqrt(count) for _, shift, count in parts))
    unsampled = [(1.0, rounds.gaussian, 1)] if rounds.gaussian > 0.0 else []
    high = min(
        closed_forms.gaussian(together, delta) + math.fsum(rounds.pure),
        closed_forms.renyi_bound([*parts, *unsampled], rounds.pure, delta),
    )
    if closed_forms.total_variation([*parts, *unsampled]) <= delta:
        low, high = 0.0, math.fsum(rounds.pure)
    return Bracket(low * (1.0 - _SLACK), high * (1.0 + _SLACK))


def attack_on_cut_batches(case: Case) -> float:
    """What one attack achieves: the example is +1 and all others are -1, so that it displaces the worst there is.

    Outputs are put into cells, which is post-processing, and their losses rounded down: a lower bound on epsilon, for
    the neighbours of either size. A maximum of all examples of the trace cuts nothing, whoever joins.
    """
    (segment,) = case.trace.segments
    sampling = segment.sampling
    assert isinstance(sampling, TruncatedPoissonSampling)
    size, most, rate = sampling.dataset_size, sampling.max_batch_size, sampling.sample_rate
    found = 0.0
    for others, (first, second) in product((size, size - 1), ((0, 1), (1, 0))):
        masses = _cell_masses(rate, most if most < size else others + 1, others, segment.noise_multiplier)
        found = max(found, _composed_down([(masses[first], masses[second], segment.steps)], case.delta))
    return found


def _of_allocated(case: Case, members: Members) -> Bracket:
    """At least what cells of the complete blocks give, which is post-processing; at most one Gaussian a block.

    A block counts at the largest contribution on record in it. From below, it counts at the least.
    """
    (segment,) = case.trace.segments
    sampling = segment.sampling
    assert isinstance(sampling, RandomAllocationSampling)
    block = sampling.steps_per_epoch // sampling.per_epoch
    sides = [1.0 / side.noise_multiplier for side in segment.side_queries]
    of_blocks = [
        [members.at(step)[0] / segment.noise_multiplier for step in range(start, min(start + block, segment.steps))]
        for start in range(0, segment.steps, block)
    ]
    whole = closed_forms.gaussian(math.hypot(*(math.hypot(max(steps), *sides) for steps in of_blocks)), case.delta)
    complete = Counter(math.hypot(min(steps), *sides) for steps in of_blocks if len(steps) == block)
    laws = [(*_cells_of_block(shift, block), count) for shift, count in complete.items() if shift > 0.0]
    spacing = 2e-3 * min([1.0, *(shift for shift in complete if shift > 0.0)])
    removed = _composed_down(laws, case.delta, spacing)
    added = _composed_down([(q, p, count) for p, q, count in laws], case.delta, spacing)
    return Bracket(max(removed, added) * (1.0 - _SLACK), whole * (1.0 + _SLACK))


@functools.lru_cache(maxsize=8)
def _cells_of_block(shift: float, block: int) -> tuple[Array, Array]:
    """Masses of the cells of all outputs of a block, with the example and without."""
    edges = np.concatenate(([-np.inf], np.linspace(-7.0, 7.0 + shift, {1: 4000, 2: 600, 3: 90}[block]), [np.inf]))
    idle, joined = np.diff(stats.norm.cdf(edges)), np.diff(stats.norm.cdf(edges, shift))

    def law(of_step: list[Array]) -> Array:
        return np.asarray(functools.reduce(np.multiply.outer, of_step)).ravel()

    present = np.mean([law([joined if step == at else idle for step in range(block)]) for at in range(block)], axis=0)
    return np.asarray(present), law([idle] * block)


def _cell_masses(rate: float, most: int, others: int, sigma: float) -> tuple[Array, Array]:
    """Probabilities of cells of the output, with the example and without, of batches cut to ``most`` examples."""
    edges = np.concatenate(([-np.inf], np.linspace(-others - 9.0 * sigma, 2.0 + 9.0 * sigma, 3000), [np.inf]))

    def cells(at: int) -> Array:
        return np.asarray(np.diff(stats.norm.cdf(edges, at, sigma)))

    present, absent = np.zeros(len(edges) - 1), np.zeros(len(edges) - 1)
    for joined in range(others + 1):
        chance = float(stats.binom.pmf(joined, others, rate))
        without, held = cells(-min(joined, most)), min(joined + 1, most)
        stays = held / (joined + 1)
        absent += chance * without
        present += chance * ((1.0 - rate) * without + rate * (stays * cells(2 - held) + (1.0 - stays) * cells(-held)))
    return present, absent


def _composed_down(laws: Sequence[tuple[Array, Array, int]], delta: float, spacing: float = 2e-3) -> float:
    """Epsilon of independent rounds with cell masses p against q, so many of each; losses are rounded down, and
    infinite ones left out.
    """
    rounds, lowest, length = [], 0, 1
    for p, q, count in laws:
        seen = (p > 1e-13) & (q > 1e-13)
        places = np.floor(np.log(p[seen] / q[seen]) / spacing).astype(np.int64)
        first = int(places.min())
        rounds.append((np.bincount(places - first, weights=p[seen]), count))
        lowest, length = lowest + count * first, length + count * len(rounds[-1][0])
    if not rounds:
        return 0.0
    size = 1 << length.bit_length()
    spectra = [np.fft.rfft(law, size) ** count for law, count in rounds]
    masses = np.maximum(np.fft.irfft(functools.reduce(np.multiply, spectra), size)[:length], 0.0)
    losses = spacing * (lowest + np.arange(len(masses)))
    masses[masses < 1e-15] = 0.0
    low, high = 0.0, max(float(losses[-1]), 0.0)
    for _ in range(40):
        middle = 0.5 * (low + high)
        above = losses > middle
        low, high = (middle, high) if masses[above] @ -np.expm1(middle - losses[above]) > delta else (low, middle)
    return low
