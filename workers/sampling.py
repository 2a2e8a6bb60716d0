"""How batches are drawn. Each sampler realises exactly the sampling that the trace states."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from accounting.errors import InvalidInput, require_finite
from accounting.keyed import KeyedStream
from accounting.registry import lookup
from accounting.samplings import SAMPLINGS, Sampling
from workers.noise import derive_seed, noise_source_kind
from workers.spec import SamplingSpec

Rows = npt.NDArray[np.int64]


class Sampler(Protocol):
    """Batches of rows of the training set, reproducible from `state`.

    Guarantee: batches are distributed as the `planned_sampling` of its trial says, independently of the data and of all
    noise, as long as the seed or key of its `RowDraws` is secret. Rows are unique within a batch and ascending, so that
    sums do not depend on their order.
    """

    def next_batch(self) -> Rows:
        """Rows of the next batch, int64 [b]; a Poisson batch may be empty."""
        ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class RowDraws(Protocol):
    """Random choices among the rows 0 .. n - 1, each independent of those before; reproducible from `state`."""

    def each(self, n: int, expected: int) -> Rows:
        """Every row on its own with probability expected / n; ascending."""
        ...

    def subset(self, n: int, count: int) -> Rows:
        """``count`` distinct rows, every set of them equally likely; ascending."""
        ...

    def order(self, n: int) -> Rows:
        """All rows, in every order equally likely."""
        ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class SeededRows:
    """Research mode: numpy's PCG64, seeded by the trial."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.Generator(np.random.PCG64(seed))

    def each(self, n: int, expected: int) -> Rows:
        return np.flatnonzero(self._rng.random(n) < expected / n)

    def subset(self, n: int, count: int) -> Rows:
        return np.sort(self._rng.choice(n, count, replace=False))

    def order(self, n: int) -> Rows:
        return self._rng.permutation(n)

    def state(self) -> dict[str, Any]:
        return {"generator": self._rng.bit_generator.state}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._rng.bit_generator.state = state["generator"]


class KeyedRows:
    """From a secret key. As likely as stated where the stream's bits are uniform: ties are drawn again, not broken."""

    def __init__(self, stream: KeyedStream) -> None:
        self._stream = stream

    def each(self, n: int, expected: int) -> Rows:
        """The probability is rounded down to a multiple of 2^-72: one byte decides for all rows but one in 256."""
        threshold, rest = divmod((expected << 72) // n, 1 << 64)
        first = self._stream.octets(n)
        ties = np.flatnonzero(first == threshold)
        joins = first < threshold
        joins[ties] = self._stream.words(len(ties)) < rest
        return np.flatnonzero(joins)

    def subset(self, n: int, count: int) -> Rows:
        """Those with the smallest of random numbers, whose digits to base 256 are drawn where they decide."""
        rows, chosen = np.arange(n), list[Rows]()
        while 0 < count < len(rows):
            digits = self._stream.octets(len(rows))
            last = int(np.searchsorted(np.cumsum(np.bincount(digits)), count))
            chosen.append(rows[digits < last])
            count -= len(chosen[-1])
            rows = rows[digits == last]
        return np.sort(np.concatenate([*chosen, rows[:count]]))

    def order(self, n: int) -> Rows:
        """That of random words; where two are equal, all are drawn again."""
        words = self._stream.words(n)
        rows = np.argsort(words)
        return rows if (np.diff(words[rows]) > 0).all() else self.order(n)

    def state(self) -> dict[str, Any]:
        return self._stream.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self._stream.restore(state)


def make_row_draws(noise_source: str, seed: int) -> RowDraws:
    """As secret as the noise: amplification rests on secret batches."""
    if noise_source_kind(noise_source).is_secret:
        return KeyedRows(KeyedStream.from_os())
    return SeededRows(derive_seed(seed, "sampling"))


class _RowSampler:
    """What the samplers share: sizes, and where the random choices come from."""

    def __init__(self, dataset_size: int, batch_size: int, draws: RowDraws) -> None:
        self._dataset_size, self._batch_size = dataset_size, batch_size
        self._draws = draws

    def state(self) -> dict[str, Any]:
        return self._draws.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self._draws.restore(state)


class PoissonSampler(_RowSampler):
    """Each row joins each batch independently with probability batch_size / dataset_size."""

    def next_batch(self) -> Rows:
        return self._draws.each(self._dataset_size, self._batch_size)


class FixedBatchSampler(_RowSampler):
    """Each batch is a uniformly random subset of exactly batch_size rows."""

    def next_batch(self) -> Rows:
        return self._draws.subset(self._dataset_size, self._batch_size)


class ShuffledSampler(_RowSampler):
    """Each epoch deals a fresh random order out in disjoint batches; the last one may be smaller."""

    def __init__(self, dataset_size: int, batch_size: int, draws: RowDraws) -> None:
        super().__init__(dataset_size, batch_size, draws)
        self._remaining: Rows = np.empty(0, np.int64)

    def next_batch(self) -> Rows:
        if len(self._remaining) == 0:
            self._remaining = self._draws.order(self._dataset_size)
        batch, self._remaining = np.split(self._remaining, [self._batch_size])
        return np.sort(batch)

    def state(self) -> dict[str, Any]:
        return {**super().state(), "remaining": self._remaining.tolist()}

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self._remaining = np.array(state["remaining"], np.int64)


SAMPLERS: Final[Mapping[str, Callable[[int, int, RowDraws], Sampler]]] = {
    "poisson": PoissonSampler,
    "fixed": FixedBatchSampler,
    "shuffle": ShuffledSampler,
}


def make_sampler(spec: SamplingSpec, dataset_size: int, draws: RowDraws) -> Sampler:
    """The sampler a trial names, over rows 0 .. dataset_size - 1. Raises InvalidInput as `planned_sampling` does."""
    planned_sampling(spec, dataset_size)
    return lookup(SAMPLERS, spec.method, "sampling")(dataset_size, spec.batch_size, draws)


def planned_sampling(spec: SamplingSpec, dataset_size: int) -> Sampling:
    """The sampling that a trial's trace will state; without data.

    Raises: InvalidInput for an unknown method and for a batch larger than the data.
    """
    require_finite("training set size", dataset_size, at_least=1)
    if not 1 <= spec.batch_size <= dataset_size:
        raise InvalidInput(
            f"batch_size is {spec.batch_size}, but must be between 1 and the {dataset_size} training examples; "
            "choose a smaller batch_size"
        )
    return lookup(SAMPLINGS, spec.method, "sampling").of_sizes(dataset_size, spec.batch_size)
