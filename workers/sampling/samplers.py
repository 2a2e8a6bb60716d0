"""Batch samplers. Each draws batches with exactly the distribution that the trace states to the accountant."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.mechanism.samplings import (
    CYCLIC_POISSON,
    FIXED_ORDER,
    RANDOM_ALLOCATION,
    RandomAllocationSampling,
    Sampling,
    sampling_of_sizes,
)
from dpsweep.workers.noise.chacha import ChaChaBits
from dpsweep.workers.noise.gaussian_sources import derive_seed
from dpsweep.workers.spec import SamplingSpec

RowNumbers = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

FEWEST_ROWS: Final = 1_000_000
"""Smallest data set for which gaps are faster than one random number per row."""
LARGEST_RATE: Final = 1 / 256
"""Largest sample rate for which gaps are faster than one random number per row."""

_BITS: Final = 56
_ONE: Final = 1 << _BITS


class Bits(Protocol):
    """A stream of uniform bits."""

    def words(self, count: int) -> Words:
        """Return ``count`` uniform 64-bit words."""
        ...


def are_worth_it(n: int, expected: int) -> bool:
    """Return whether gaps are faster than one random number per row. n: rows; expected: expected batch size."""
    return n >= FEWEST_ROWS and expected <= LARGEST_RATE * n


def rows_by_gaps(stream: Bits, n: int, expected: int) -> RowNumbers:
    """Return the rows of a Poisson batch: each of 0 .. n - 1 independently, with a probability just below expected / n;
    ascending.

    The probability is exactly 1 - exp(-rate / 2^56) with the integer rate of `rate_below`; rounding it down never
    weakens the guarantee. The gaps between successes of independent trials are independent and geometric, P(gap >= g) =
    exp(-rate g / 2^56), and are drawn from uniform integers without any rounding.
    """
    rate = rate_below(expected, n)
    found, last = list[RowNumbers](), -1
    while last < n:
        gaps = geometric(stream, rate, expected + 4 * math.isqrt(expected) + 4)
        found.append(last + np.cumsum(gaps + 1))
        last = int(found[-1][-1])
    rows = np.concatenate(found)
    return rows[: np.searchsorted(rows, n)]


def rate_below(expected: int, n: int) -> int:
    """Return an integer just below -2^56 log(1 - expected / n); the error of its computation is less than 1."""
    return math.floor(-math.log1p(-expected / n) * _ONE) - 1


def geometric(stream: Bits, rate: int, count: int) -> RowNumbers:
    """Return ``count`` independent geometric integers g >= 0 with P(g >= k) = exp(-rate k / 2^56); exact.

    Algorithm 2 of Canonne, Kamath and Steinke, "The Discrete Gaussian for Differential Privacy" (2020): g = x // rate,
    where P(x >= k) = exp(-k / 2^56). x is a multiple of 2^56 plus a remainder below 2^56, drawn by rejection.
    """
    fractions = np.empty(0, np.uint64)
    while len(fractions) < count:
        drawn = stream.words(2 * (count - len(fractions))) >> np.uint64(64 - _BITS)
        fractions = np.concatenate([fractions, drawn[_occur(stream, drawn)]])
    wholes, active = np.zeros(count, np.uint64), np.arange(count)
    while len(active):
        active = active[_occur(stream, np.full(len(active), _ONE, np.uint64))]
        wholes[active] += np.uint64(1)
    numbers = (wholes << np.uint64(_BITS)) + fractions[:count]  # overflows at 256 wholes, with probability e^-256
    return (numbers // np.uint64(rate)).astype(np.int64)


def _occur(stream: Bits, exponents: Words) -> npt.NDArray[np.bool_]:
    """Independent Bernoulli draws with probabilities exp(-exponent / 2^56), for exponents up to 2^56; exact.

    Algorithm 1 of the same paper: draw events with probabilities exponent / (2^56 k) for k = 1, 2, ... until one does
    not occur. The last k is odd with probability exp(-exponent / 2^56).
    """
    occur, active, k = np.zeros(len(exponents), np.bool_), np.arange(len(exponents)), 1
    while len(active):
        goes_on = stream.words(len(active)) >> np.uint64(64 - _BITS) < exponents[active]
        goes_on &= _below(stream, k, len(active)) == 0
        occur[active[~goes_on]] = k % 2 == 1
        active, k = active[goes_on], k + 1
    return occur


def _below(stream: Bits, bound: int, count: int) -> Words:
    """Return ``count`` independent uniform integers below ``bound``; exact.

    They are words modulo ``bound``. Words from its largest multiple on are drawn again.
    """
    if bound == 1:
        return np.zeros(count, np.uint64)
    words, most = stream.words(count).copy(), (1 << 64) // bound * bound - 1
    while (beyond := np.flatnonzero(words > np.uint64(most))).size:
        words[beyond] = stream.words(len(beyond))
    return words % np.uint64(bound)


class Sampler(Protocol):
    """Draws batches of rows of the training set, reproducibly from `state`.

    Guarantee: while the seed or key of its `RowDraws` is secret, batches have the distribution of the trial's
    `planned_sampling` and are independent of the data and of all noise. The rows of a batch are distinct and ascending,
    so sums over a batch do not depend on the order of drawing.
    """

    def next_batch(self) -> RowNumbers:
        """Return the rows of the next batch, int64 [b]; a Poisson batch may be empty."""
        ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class RowDraws(Protocol):
    """Random choices among the rows 0 .. n - 1, independent of each other and reproducible from `state`."""

    def each(self, n: int, expected: int) -> RowNumbers:
        """Return the rows of a Poisson batch: each row joins independently with probability expected / n; ascending."""
        ...

    def subset(self, n: int, count: int) -> RowNumbers:
        """Return a uniformly random subset of ``count`` rows; ascending."""
        ...

    def order(self, n: int) -> RowNumbers:
        """Return a uniformly random permutation of the rows."""
        ...

    def places(self, n: int, count: int) -> RowNumbers:
        """Return a uniformly random number below ``count`` for each of ``n`` rows, independently; int64 [n]."""
        ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class SeededRows:
    """Random choices of research mode: numpy's PCG64, seeded by the trial.

    For large data sets a Poisson batch is drawn as a binomial size and a random subset of that size.
    """

    def __init__(self, seed: int) -> None:
        self._rng = np.random.Generator(np.random.PCG64(seed))

    def each(self, n: int, expected: int) -> RowNumbers:
        if are_worth_it(n, expected):
            return self.subset(n, int(self._rng.binomial(n, expected / n)))
        return np.flatnonzero(self._rng.random(n) < expected / n)

    def subset(self, n: int, count: int) -> RowNumbers:
        return np.sort(self._rng.choice(n, count, replace=False))

    def order(self, n: int) -> RowNumbers:
        return self._rng.permutation(n)

    def places(self, n: int, count: int) -> RowNumbers:
        return self._rng.integers(count, size=n)

    def state(self) -> dict[str, Any]:
        return {"generator": self._rng.bit_generator.state}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._rng.bit_generator.state = state["generator"]


class KeyedBits(Bits, Protocol):
    """Uniform bits from a secret key, reproducible from `state`."""

    def octets(self, count: int) -> npt.NDArray[np.uint8]:
        """Return ``count`` uniform bytes."""
        ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class KeyedRows:
    """Random choices from a secret key, with the stated distribution if the bits of the stream are uniform.

    For large data sets the gaps between the rows of a Poisson batch are drawn.
    """

    def __init__(self, stream: KeyedBits) -> None:
        self._stream = stream

    def each(self, n: int, expected: int) -> RowNumbers:
        """Return the rows of a Poisson batch, by gaps for large data sets (`rows_by_gaps`), otherwise by 72 bits for
        each row.

        The probability is rounded down to a multiple of 2^-72, which never weakens the guarantee. A row's first byte
        decides unless it equals the threshold (one row in 256); only then are the other 64 bits drawn.
        """
        if are_worth_it(n, expected):
            return rows_by_gaps(self._stream, n, expected)
        threshold, rest = divmod((expected << 72) // n, 1 << 64)
        first = self._stream.octets(n)
        rows = np.flatnonzero(first <= threshold)
        joins = first[rows] < threshold
        ties = np.flatnonzero(~joins)
        joins[ties] = self._stream.words(len(ties)) < rest
        return rows[joins]

    def subset(self, n: int, count: int) -> RowNumbers:
        """Return the rows with the smallest random numbers; their base-256 digits are drawn only while rows tie."""
        rows, chosen = np.arange(n), list[RowNumbers]()
        while 0 < count < len(rows):
            digits = self._stream.octets(len(rows))
            last = int(np.searchsorted(np.cumsum(np.bincount(digits)), count))
            chosen.append(rows[digits < last])
            count -= len(chosen[-1])
            rows = rows[digits == last]
        return np.sort(np.concatenate([*chosen, rows[:count]]))

    def order(self, n: int) -> RowNumbers:
        """Return the rows sorted by random 64-bit words; if two words are equal, all are drawn again."""
        words = self._stream.words(n)
        rows = np.argsort(words)
        return rows if (np.diff(words[rows]) > 0).all() else self.order(n)

    def places(self, n: int, count: int) -> RowNumbers:
        return _below(self._stream, count, n).astype(np.int64)

    def state(self) -> dict[str, Any]:
        return self._stream.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self._stream.restore(state)


def make_row_draws(seed: int | None, purpose: str = "sampling") -> RowDraws:
    """Return random choices for batches: from ``seed`` and ``purpose``, or from a secret key without a seed.

    Privacy amplification by sampling holds only while the batches are secret.
    """
    if seed is None:
        return KeyedRows(ChaChaBits.from_os())
    return SeededRows(derive_seed(seed, purpose))


class _DrawnAhead(ABC):
    """Samplers that draw several batches at once.

    The state holds that of the random choices before the last draw, which `restore` repeats, and the batches left.
    """

    def __init__(self, draws: RowDraws) -> None:
        self._draws, self._before, self._ahead = draws, draws.state(), deque[RowNumbers]()

    def next_batch(self) -> RowNumbers:
        if not self._ahead:
            self._draw()
        return self._ahead.popleft()

    def _draw(self) -> None:
        self._before = self._draws.state()
        self._ahead = deque(self._batches())

    @abstractmethod
    def _batches(self) -> Iterable[RowNumbers]:
        """Draw the next batches."""

    def state(self) -> dict[str, Any]:
        return {"draws": self._draws.state(), "before": self._before, "ahead": len(self._ahead)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._draws.restore(state["before"])
        self._draw()
        while len(self._ahead) > state["ahead"]:
            self._ahead.popleft()
        self._draws.restore(state["draws"])


class PoissonSampler(_DrawnAhead):
    """Each row joins each batch independently with probability batch_size / dataset_size.

    Of small data sets several batches are drawn at once, as one batch from as many copies of the rows: the start of a
    draw takes longer than the draw.
    """

    def __init__(self, dataset_size: int, batch_size: int, draws: RowDraws) -> None:
        super().__init__(draws)
        self._dataset_size, self._batch_size = dataset_size, batch_size
        self._at_once = max(1, min(_MOST_BATCHES, _MOST_ROWS // dataset_size))

    def _batches(self) -> Iterable[RowNumbers]:
        size, count = self._dataset_size, self._at_once
        rows = self._draws.each(count * size, count * self._batch_size)
        starts = size * np.arange(count)
        parts = np.split(rows, np.searchsorted(rows, starts[1:]))
        return (part - start for part, start in zip(parts, starts, strict=True))


_MOST_BATCHES: Final = 64
_MOST_ROWS: Final = 2**19
"""Largest number of batches that are drawn at once, and of rows to choose from."""


class FixedBatchSampler(_DrawnAhead):
    """Each batch is a uniformly random subset of exactly batch_size rows."""

    def __init__(self, dataset_size: int, batch_size: int, draws: RowDraws) -> None:
        super().__init__(draws)
        self._dataset_size, self._batch_size = dataset_size, batch_size

    def _batches(self) -> Iterable[RowNumbers]:
        return [self._draws.subset(self._dataset_size, self._batch_size)]


class ShuffledSampler(_DrawnAhead):
    """Each epoch splits a fresh random permutation into disjoint batches; the last one may be smaller."""

    def __init__(self, dataset_size: int, batch_size: int, draws: RowDraws) -> None:
        super().__init__(draws)
        self._dataset_size, self._batch_size = dataset_size, batch_size

    def _batches(self) -> Iterable[RowNumbers]:
        return _epoch(self._draws.order(self._dataset_size), self._batch_size)


def _epoch(order: RowNumbers, batch_size: int) -> Iterable[RowNumbers]:
    """Yield the batches of an epoch that visits the rows in this order."""
    return (np.sort(order[start : start + batch_size]) for start in range(0, len(order), batch_size))


class AllocatedSampler(_DrawnAhead):
    """Each row joins one of ``steps`` steps, chosen uniformly and independently; after these, all choose again."""

    def __init__(self, dataset_size: int, steps: int, draws: RowDraws) -> None:
        super().__init__(draws)
        self._dataset_size, self._steps = dataset_size, steps

    def _batches(self) -> Iterable[RowNumbers]:
        places = self._draws.places(self._dataset_size, self._steps)
        return _grouped(np.arange(self._dataset_size), places, self._steps)


def _grouped(rows: RowNumbers, groups: RowNumbers, count: int) -> list[RowNumbers]:
    """Return the rows of each of ``count`` groups. groups: the group of each row."""
    sizes = np.bincount(groups, minlength=count)
    return np.split(rows[np.argsort(groups, kind="stable")], np.cumsum(sizes)[:-1])


class CyclicPoissonSampler(_DrawnAhead):
    """Groups of rows take turns: a row joins the step of its group with probability ``expected`` / n, independently.

    The group of each of the n rows is drawn uniformly and independently of the others, once and for all. A cycle of
    ``groups`` steps is drawn at once, as one Poisson batch of all rows, in time of order ``expected`` for large data.
    The state also holds that of the random choices before the groups.
    """

    def __init__(self, dataset_size: int, groups: int, expected: int, draws: RowDraws) -> None:
        """`expected`: rows of a whole cycle, at most ``dataset_size``."""
        self._dataset_size, self._groups, self._expected = dataset_size, groups, expected
        self._first = draws.state()
        self.group_of = draws.places(dataset_size, groups)
        """The group of each row, [n]."""
        super().__init__(draws)

    def _batches(self) -> Iterable[RowNumbers]:
        rows = self._draws.each(self._dataset_size, self._expected)
        return _grouped(rows, self.group_of[rows], self._groups)

    def state(self) -> dict[str, Any]:
        return {**super().state(), "first": self._first}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._first = state["first"]
        self._draws.restore(self._first)
        self.group_of = self._draws.places(self._dataset_size, self._groups)
        super().restore(state)


class FixedOrderSampler:
    """Each epoch visits the rows in one random order, drawn once and for all; the last batch may be smaller.

    The state holds that of the random choices before the order, which `restore` repeats, and the next batch.
    """

    def __init__(self, dataset_size: int, batch_size: int, draws: RowDraws) -> None:
        self._dataset_size, self._batch_size, self._draws, self._next = dataset_size, batch_size, draws, 0
        self._order()

    def _order(self) -> None:
        self._first = self._draws.state()
        self._batches = list(_epoch(self._draws.order(self._dataset_size), self._batch_size))

    def next_batch(self) -> RowNumbers:
        batch = self._batches[self._next]
        self._next = (self._next + 1) % len(self._batches)
        return batch

    def state(self) -> dict[str, Any]:
        return {"first": self._first, "next": self._next}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._draws.restore(state["first"])
        self._order()
        self._next = state["next"]


class LeavesOut(Protocol):
    """Names rows to exclude from all batches."""

    @property
    def absent(self) -> RowNumbers:
        """The excluded rows; they may change when a state is restored."""
        ...


class PartialSampler:
    """Batches of another sampler without the excluded rows, as drawn from the neighbouring data set without them.

    Poisson batches, cyclic ones and randomly allocated ones are then drawn from the other rows alone (add/remove
    adjacency). In epochs the excluded rows keep their places as null records (zero-out adjacency).
    """

    def __init__(self, whole: Sampler, leaves_out: LeavesOut) -> None:
        self._whole, self._leaves_out = whole, leaves_out

    def next_batch(self) -> RowNumbers:
        rows = self._whole.next_batch()
        kept: RowNumbers = rows[~np.isin(rows, self._leaves_out.absent)]
        return kept

    def state(self) -> dict[str, Any]:
        return self._whole.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self._whole.restore(state)


class CutSampler:
    """Batches of another sampler, cut to a uniformly random subset of ``max_batch_size`` rows if larger.

    The subset is drawn independently of everything else, as the accounting of `TruncatedPoissonSampling` assumes.
    """

    def __init__(self, uncut: Sampler, max_batch_size: int, draws: RowDraws) -> None:
        self._uncut, self._max_batch_size, self._draws = uncut, max_batch_size, draws

    def next_batch(self) -> RowNumbers:
        rows = self._uncut.next_batch()
        if len(rows) <= self._max_batch_size:
            return rows
        kept: RowNumbers = rows[self._draws.subset(len(rows), self._max_batch_size)]
        return kept

    def state(self) -> dict[str, Any]:
        return self._uncut.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self._uncut.restore(state)


def _allocated(spec: SamplingSpec, dataset_size: int, draws: RowDraws) -> Sampler:
    sampling = planned_sampling(spec, dataset_size)
    assert isinstance(sampling, RandomAllocationSampling), "the method of the spec names it"
    return AllocatedSampler(dataset_size, sampling.steps_per_round, draws)


def _cyclic(spec: SamplingSpec, dataset_size: int, draws: RowDraws) -> Sampler:
    groups = spec.cycle_length or 1
    return CyclicPoissonSampler(dataset_size, groups, groups * spec.expected_size(dataset_size), draws)


SAMPLERS: Final[Mapping[str, Callable[[SamplingSpec, int, RowDraws], Sampler]]] = {
    "poisson": lambda spec, size, draws: PoissonSampler(size, spec.expected_size(size), draws),
    "fixed": lambda spec, size, draws: FixedBatchSampler(size, spec.expected_size(size), draws),
    "shuffle": lambda spec, size, draws: ShuffledSampler(size, spec.expected_size(size), draws),
    RANDOM_ALLOCATION: _allocated,
    CYCLIC_POISSON: _cyclic,
    FIXED_ORDER: lambda spec, size, draws: FixedOrderSampler(size, spec.expected_size(size), draws),
}

AUDITABLE: Final = ("poisson", "shuffle", RANDOM_ALLOCATION, CYCLIC_POISSON, FIXED_ORDER)
"""Samplings that can leave canaries out of batches as a neighbouring data set would.

``fixed`` cannot: its batches, without the canaries, would be smaller than those of the neighbouring data set.
"""


def make_sampler(
    spec: SamplingSpec, dataset_size: int, draws: RowDraws, leaves_out: LeavesOut | None = None
) -> Sampler:
    """Return the sampler of a trial whose `planned_sampling` is known, over rows 0 .. dataset_size - 1.

    leaves_out: rows to exclude from every batch before it is cut to ``max_batch_size``; `AUDITABLE` samplings only.
    """
    sampler = SAMPLERS[spec.method](spec, dataset_size, draws)
    sampler = sampler if leaves_out is None else PartialSampler(sampler, leaves_out)
    return sampler if spec.max_batch_size is None else CutSampler(sampler, spec.max_batch_size, draws)


def planned_sampling(spec: SamplingSpec, dataset_size: int) -> Sampling:
    """Return the sampling that the trace of a trial will state; needs only the size of the data.

    Raises: InvalidInput for an unknown method or a batch larger than the data.

    >>> planned_sampling(SamplingSpec("poisson", batch_size=600), dataset_size=60_000)
    PoissonSampling(sample_rate=0.01)
    """
    batch_size = dataset_size if spec.batch_size == "full" else spec.batch_size
    if not 1 <= batch_size <= dataset_size:
        raise InvalidInput(
            f"batch_size is {batch_size}, but must be between 1 and the {dataset_size} training examples; "
            "choose a smaller batch_size"
        )
    return sampling_of_sizes(spec.method, dataset_size, batch_size, spec.max_batch_size, **spec.numbers)
