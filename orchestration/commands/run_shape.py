"""Build a trace from the flags of `dpsweep epsilon` and `dpsweep calibrate`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dpsweep.accounting.errors import InvalidInput, require_finite, require_whole
from dpsweep.accounting.mechanism.correlated import steps_apart
from dpsweep.accounting.mechanism.noise_strategies import (
    INDEPENDENT,
    BandedNoise,
    NoiseStrategy,
    make_strategy,
    prefix_sum_errors,
)
from dpsweep.accounting.mechanism.samplings import (
    CYCLIC_POISSON,
    FIXED_ORDER,
    SAMPLINGS,
    Adjacency,
    CyclicPoissonSampling,
    FixedOrderSampling,
    PoissonSampling,
    Sampling,
    ShuffledSampling,
    draws_by_epoch,
    require_own_numbers,
    sampling_of_sizes,
)
from dpsweep.accounting.mechanism.schedules import LARGEST_EPOCHS, NoiseSchedule, planned_trace, split_schedule
from dpsweep.accounting.mechanism.trace import Release, SideQuery, Trace
from dpsweep.accounting.registry import one_of


@dataclass(frozen=True)
class RunShape:
    """Sampling, side queries and releases of a run, without its length and noise; None for a flag that is not given.

    An epoch has 1/q steps with --sample-rate q, else n/B steps, rounded up.

    >>> from dpsweep.accounting.mechanism.schedules import parse_schedule
    >>> shape = RunShape("poisson", dataset_size=1000, batch_size=100)
    >>> shape.trace(parse_schedule("constant", 1.1), epochs=3).steps
    30
    """

    sampling: str = "poisson"
    sample_rate: float | None = None
    dataset_size: int | None = None
    batch_size: int | None = None
    side_noise_multipliers: tuple[float, ...] = ()
    releases: tuple[Release, ...] = ()
    max_batch_size: int | None = None
    adjacency: Adjacency | None = None
    noise_strategy: str | None = None
    cycle_length: int | None = None
    per_epoch: int | None = None

    def mechanism(self) -> Sampling:
        """Return the sampling that the flags describe. Raises: InvalidInput for a missing or contradictory flag."""
        require_own_numbers(self.sampling, self.per_epoch, self.cycle_length)
        if self.sampling not in SAMPLINGS:
            raise InvalidInput(f"--sampling is {self.sampling!r}; choose {one_of(SAMPLINGS)}")
        if self.max_batch_size is not None and self.sampling not in (CYCLIC_POISSON, FIXED_ORDER):
            return self.of_sizes()
        return _WITH_OWN_FLAGS.get(self.sampling, RunShape.of_sizes)(self)

    def trace(self, schedule: NoiseSchedule, *, epochs: int | None = None, steps: int | None = None) -> Trace:
        """Return the trace of a run of ``epochs`` or ``steps``; exactly one is given. Raises: InvalidInput for bad
        flags.
        """
        if (epochs is None) == (steps is None):
            raise InvalidInput("give the length of the run as exactly one of --steps and --epochs")
        sampling = self.mechanism()
        if epochs is None:
            longest = LARGEST_EPOCHS * sampling.steps_per_epoch
            steps = require_whole("--steps", steps or 0, at_least=1, at_most=longest)
            if draws_by_epoch(sampling) and self.batch_size is None:
                raise InvalidInput(
                    f"--steps of {sampling.words} needs --dataset-size and --batch-size; or give --epochs"
                )
            epochs = math.ceil(steps / sampling.steps_per_epoch)
        trace = planned_trace(
            schedule,
            sampling,
            require_whole("--epochs", epochs, at_least=1, at_most=LARGEST_EPOCHS),
            sampling.steps_per_epoch,
            1 if self.dataset_size is None else self.dataset_size,
            tuple(SideQuery(f"side query {i}", sigma) for i, sigma in enumerate(self.side_noise_multipliers, 1)),
            self.releases,
            adjacency=self.adjacency,
        )
        trace = trace if steps is None else trace.until(steps)
        return replace(trace, strategy=self.strategy(trace.steps, steps_apart(sampling, trace.steps)))

    def strategy(self, steps: int, apart: int) -> NoiseStrategy:
        """Return the noise strategy for a run of ``steps``, with an example in every ``apart`` of them at most.

        Raises: InvalidInput for a malformed --noise-strategy.
        """
        if self.noise_strategy is None:
            return INDEPENDENT
        return make_strategy(*split_schedule(self.noise_strategy), steps, apart)

    def sizes(self) -> tuple[int, int]:
        """Return numbers of examples of the data set and of a batch. Raises: InvalidInput if one is missing."""
        if self.dataset_size is None or self.batch_size is None or self.sample_rate is not None or self.max_batch_size:
            raise InvalidInput(
                f"--sampling {self.sampling} needs --dataset-size and --batch-size, and neither --sample-rate nor "
                "--max-batch-size"
            )
        return self.dataset_size, self.batch_size

    def of_sizes(self) -> Sampling:
        """Return the sampling with batches of --batch-size, at most --max-batch-size, of --dataset-size examples."""
        if self.dataset_size is None or self.batch_size is None or self.sample_rate is not None:
            what = f"--sampling {self.sampling}" if self.max_batch_size is None else "--max-batch-size"
            raise InvalidInput(f"{what} needs --dataset-size and --batch-size, and no --sample-rate")
        sizes = self.dataset_size, self.batch_size
        return sampling_of_sizes(self.sampling, *sizes, self.max_batch_size, self.per_epoch)


def _poisson(shape: RunShape) -> Sampling:
    if shape.sample_rate is not None:
        if shape.batch_size is not None:
            raise InvalidInput("give either --sample-rate or --dataset-size with --batch-size, not both")
        return PoissonSampling(require_finite("--sample-rate", shape.sample_rate, above=0.0, at_most=1.0))
    if shape.dataset_size is None or shape.batch_size is None:
        raise InvalidInput("Poisson batches need --sample-rate, or --dataset-size with --batch-size")
    return shape.of_sizes()


def _shuffle(shape: RunShape) -> Sampling:
    if shape.sample_rate is not None:
        raise InvalidInput("--sample-rate does not apply to shuffled epochs, which visit every example once: drop it")
    return ShuffledSampling(1) if shape.batch_size is None else shape.of_sizes()


def _cyclic(shape: RunShape) -> Sampling:
    match shape.strategy(1, 1):
        case BandedNoise(bands=bands) if shape.cycle_length is None:
            return CyclicPoissonSampling.of_sizes(*shape.sizes(), bands)
        case _ if shape.cycle_length is None:
            raise InvalidInput(
                f"--cycle-length is missing: the number of groups that take turns in {CYCLIC_POISSON} batches"
            )
        case _:
            return CyclicPoissonSampling.of_sizes(*shape.sizes(), shape.cycle_length)


_WITH_OWN_FLAGS: Mapping[str, Callable[[RunShape], Sampling]] = {
    "poisson": _poisson,
    "shuffle": _shuffle,
    CYCLIC_POISSON: _cyclic,
    FIXED_ORDER: lambda shape: FixedOrderSampling.of_sizes(*shape.sizes()),
}
"""Samplings that accept other flags than --dataset-size and --batch-size."""


def strategy_fields(shape: RunShape, trace: Trace) -> dict[str, Any]:
    """Return what JSON says of correlated noise: the strategy, and errors of the sums of all gradients up to each step.

    Errors are squared and per coordinate, in squared clipping bounds: their mean over the steps, and the largest.
    """
    if shape.noise_strategy is None or len(trace.segments) != 1:
        return {}
    mean, largest = prefix_sum_errors(trace.strategy, trace.steps, trace.segments[0].noise_multiplier)
    return {"noise_strategy": shape.noise_strategy, "mean_squared_error": mean, "max_squared_error": largest}


def strategy_notes(fields: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines below a table of the fields that `strategy_fields` returned."""
    if "noise_strategy" in fields:
        mean, largest = fields["mean_squared_error"], fields["max_squared_error"]
        yield (
            f"noise {fields['noise_strategy']}: squared error of the sum of all gradients up to a step, per weight, "
            f"in squared clipping bounds: mean {mean:.4g}, largest {largest:.4g}"
        )


def delta_warning(delta: float, dataset_size: int | None) -> str | None:
    """Return a warning if delta >= 1/n, which would allow publishing a whole record; None otherwise or if n is unknown.

    Raises: InvalidInput for a delta that is no probability below 1.

    >>> delta_warning(1e-5, 1000) is None
    True
    """
    require_finite("delta", delta, at_least=0.0, below=1.0)
    if dataset_size is None or delta < 1.0 / dataset_size:
        return None
    return (
        f"delta is {delta:g}, but should be well below 1/n = {1.0 / dataset_size:.3g}: "
        "a mechanism that publishes one random record meets it"
    )
