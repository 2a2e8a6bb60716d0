"""How batches are drawn. Each sampler realises exactly the sampling that the trace states."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from accounting.errors import InvalidInput, require_finite
from accounting.mechanism import FixedBatchSampling, PoissonSampling, Sampling, ShuffledSampling
from accounting.registry import lookup
from workers.spec import SamplingSpec

Rows = npt.NDArray[np.int64]


class Sampler(Protocol):
    """Batches of rows of the training set, reproducible from `state`.

    Guarantee: batches are distributed as ``sampling`` says, independently of the data and of all noise, as long as
    the seed is secret. Rows are unique within a batch and ascending, so that sums do not depend on their order.
    """

    @property
    def sampling(self) -> Sampling:
        """What to write into the trace."""
        ...

    @property
    def steps_per_epoch(self) -> int: ...

    def next_batch(self) -> Rows:
        """Rows of the next batch, int64 [b]; a Poisson batch may be empty."""
        ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class _Generator:
    """The random state that the samplers share."""

    def __init__(self, dataset_size: int, batch_size: int, entropy: int) -> None:
        require_finite("training set size", dataset_size, at_least=1)
        if not 1 <= batch_size <= dataset_size:
            raise InvalidInput(
                f"batch_size is {batch_size}, but must be between 1 and the {dataset_size} training examples; "
                "choose a smaller batch_size"
            )
        self._dataset_size, self._batch_size = dataset_size, batch_size
        self._rng = np.random.Generator(np.random.PCG64(entropy))

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(self._dataset_size / self._batch_size)

    def state(self) -> dict[str, Any]:
        return {"generator": self._rng.bit_generator.state}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._rng.bit_generator.state = state["generator"]


class PoissonSampler(_Generator):
    """Each row joins each batch independently with probability batch_size / dataset_size."""

    @property
    def sampling(self) -> PoissonSampling:
        return PoissonSampling(self._batch_size / self._dataset_size)

    def next_batch(self) -> Rows:
        return np.flatnonzero(self._rng.random(self._dataset_size) < self.sampling.sample_rate)


class FixedBatchSampler(_Generator):
    """Each batch is a uniformly random subset of exactly batch_size rows."""

    @property
    def sampling(self) -> FixedBatchSampling:
        return FixedBatchSampling(self._dataset_size, self._batch_size)

    def next_batch(self) -> Rows:
        return np.sort(self._rng.choice(self._dataset_size, self._batch_size, replace=False))


class ShuffledSampler(_Generator):
    """Each epoch deals a fresh random order out in disjoint batches; the last one may be smaller."""

    def __init__(self, dataset_size: int, batch_size: int, entropy: int) -> None:
        super().__init__(dataset_size, batch_size, entropy)
        self._remaining: Rows = np.empty(0, np.int64)

    @property
    def sampling(self) -> ShuffledSampling:
        return ShuffledSampling(self.steps_per_epoch)

    def next_batch(self) -> Rows:
        if len(self._remaining) == 0:
            self._remaining = self._rng.permutation(self._dataset_size)
        batch, self._remaining = np.split(self._remaining, [self._batch_size])
        return np.sort(batch)

    def state(self) -> dict[str, Any]:
        return {**super().state(), "remaining": self._remaining.tolist()}

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self._remaining = np.array(state["remaining"], np.int64)


SAMPLERS: Final[Mapping[str, Callable[[int, int, int], Sampler]]] = {
    "poisson": PoissonSampler,
    "fixed": FixedBatchSampler,
    "shuffle": ShuffledSampler,
}


def make_sampler(spec: SamplingSpec, dataset_size: int, entropy: int) -> Sampler:
    """The sampler a trial names, over rows 0 .. dataset_size - 1."""
    return lookup(SAMPLERS, spec.method, "sampling")(dataset_size, spec.batch_size, entropy)


def planned_sampling(spec: SamplingSpec, dataset_size: int) -> tuple[Sampling, int]:
    """The sampling that a trial's trace will state, and its steps per epoch, ceil(n / B); without data.

    Raises: InvalidInput for an unknown method and for a batch larger than the data.
    """
    sampler = make_sampler(spec, dataset_size, entropy=0)
    return sampler.sampling, sampler.steps_per_epoch
