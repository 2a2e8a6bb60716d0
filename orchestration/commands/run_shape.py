"""From the calculator's flags to a trace: what `dpsweep epsilon` and `dpsweep calibrate` are asked about."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from accounting.errors import InvalidInput, require_finite, require_whole
from accounting.mechanism import Release, SideQuery, Trace
from accounting.registry import one_of
from accounting.samplings import SAMPLINGS, PoissonSampling, Sampling, ShuffledSampling
from accounting.schedules import NoiseSchedule, planned_trace


@dataclass(frozen=True)
class RunShape:
    """How a run samples, apart from its length and noise: the flags as given, None where not given.

    An epoch is 1/q steps for Poisson batches and n/B steps for fixed and shuffled ones, rounded up to a whole number.
    """

    sampling: str = "poisson"
    sample_rate: float | None = None
    dataset_size: int | None = None
    batch_size: int | None = None
    side_noise_multipliers: tuple[float, ...] = ()
    releases: tuple[Release, ...] = ()

    def mechanism(self) -> Sampling:
        """The sampling that the flags describe. Raises InvalidInput for a flag that is missing or does not belong."""
        if self.sampling not in SAMPLINGS:
            raise InvalidInput(f"--sampling is {self.sampling!r}; choose {one_of(SAMPLINGS)}")
        return _WITH_OWN_FLAGS.get(self.sampling, RunShape.of_sizes)(self)

    def trace(self, schedule: NoiseSchedule, *, epochs: int | None = None, steps: int | None = None) -> Trace:
        """The run of so many epochs or so many steps; exactly one of them is given."""
        if (epochs is None) == (steps is None):
            raise InvalidInput("give the length of the run as exactly one of --steps and --epochs")
        sampling = self.mechanism()
        if epochs is None:
            steps = require_whole("--steps", steps or 0, at_least=1)
            if sampling.draws == "epoch" and self.batch_size is None:
                raise InvalidInput(
                    f"--steps of {sampling.words} needs --dataset-size and --batch-size; or give --epochs"
                )
            epochs = math.ceil(steps / sampling.steps_per_epoch)
        trace = planned_trace(
            schedule,
            sampling,
            require_whole("--epochs", epochs, at_least=1),
            sampling.steps_per_epoch,
            1 if self.dataset_size is None else self.dataset_size,
            tuple(SideQuery(f"side query {i}", sigma) for i, sigma in enumerate(self.side_noise_multipliers, 1)),
            self.releases,
        )
        return trace if steps is None else trace.until(steps)

    def of_sizes(self) -> Sampling:
        """The sampling with batches of --batch-size of --dataset-size examples."""
        if self.dataset_size is None or self.batch_size is None or self.sample_rate is not None:
            raise InvalidInput(
                f"--sampling {self.sampling} needs --dataset-size and --batch-size, and no --sample-rate"
            )
        return SAMPLINGS[self.sampling].of_sizes(self.dataset_size, self.batch_size)


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
        raise InvalidInput("--sample-rate says nothing about shuffled epochs: drop it, they visit every example once")
    return ShuffledSampling(1) if shape.batch_size is None else shape.of_sizes()


_WITH_OWN_FLAGS: Mapping[str, Callable[[RunShape], Sampling]] = {"poisson": _poisson, "shuffle": _shuffle}
"""The samplings that the flags may describe otherwise than by the sizes of data set and batch."""


def delta_warning(delta: float, dataset_size: int | None) -> str | None:
    """A sentence when delta allows publishing a whole record, which delta >= 1/n does."""
    if dataset_size is None or delta < 1.0 / dataset_size:
        return None
    return (
        f"delta is {delta:g}, but should be well below 1/n = {1.0 / dataset_size:.3g}: "
        "a mechanism that publishes one random record meets it"
    )
