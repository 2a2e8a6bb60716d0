"""From the calculator's flags to a trace: what `dpsweep epsilon` and `dpsweep calibrate` are asked about."""

from __future__ import annotations

import math
from dataclasses import dataclass

from accounting.errors import InvalidInput, require_finite, require_whole
from accounting.mechanism import (
    FixedBatchSampling,
    PoissonSampling,
    Release,
    Sampling,
    ShuffledSampling,
    SideQuery,
    Trace,
)
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

    def mechanism(self) -> tuple[Sampling, int]:
        """The sampling and its steps per epoch."""
        match self.sampling:
            case "poisson":
                return self._poisson()
            case "fixed":
                size, batch = self._sizes()
                return FixedBatchSampling(size, batch), math.ceil(size / batch)
            case "shuffle":
                return self._shuffle()
            case unknown:
                raise InvalidInput(f"--sampling is {unknown!r}; choose poisson, fixed or shuffle")

    def trace(self, schedule: NoiseSchedule, *, epochs: int | None = None, steps: int | None = None) -> Trace:
        """The run of so many epochs or so many steps; exactly one of them is given."""
        if (epochs is None) == (steps is None):
            raise InvalidInput("give the length of the run as exactly one of --steps and --epochs")
        sampling, steps_per_epoch = self.mechanism()
        if epochs is None:
            steps = require_whole("--steps", steps or 0, at_least=1)
            if self.sampling == "shuffle" and self.batch_size is None:
                raise InvalidInput("--steps of shuffled epochs needs --dataset-size and --batch-size; or give --epochs")
            epochs = math.ceil(steps / steps_per_epoch)
        trace = planned_trace(
            schedule,
            sampling,
            require_whole("--epochs", epochs, at_least=1),
            steps_per_epoch,
            1 if self.dataset_size is None else self.dataset_size,
            tuple(SideQuery(f"side query {i}", sigma) for i, sigma in enumerate(self.side_noise_multipliers, 1)),
            self.releases,
        )
        return trace if steps is None else trace.until(steps)

    def _poisson(self) -> tuple[PoissonSampling, int]:
        if self.sample_rate is not None:
            if self.batch_size is not None:
                raise InvalidInput("give either --sample-rate or --dataset-size with --batch-size, not both")
            rate = require_finite("--sample-rate", self.sample_rate, above=0.0, at_most=1.0)
            return PoissonSampling(rate), math.ceil(1.0 / rate * (1.0 - 1e-12))
        if self.dataset_size is None or self.batch_size is None:
            raise InvalidInput("Poisson batches need --sample-rate, or --dataset-size with --batch-size")
        size, batch = self._sizes()
        return PoissonSampling(batch / size), math.ceil(size / batch)

    def _shuffle(self) -> tuple[ShuffledSampling, int]:
        if self.sample_rate is not None:
            raise InvalidInput(
                "--sample-rate says nothing about shuffled epochs: drop it, they visit every example once"
            )
        if self.batch_size is None:
            return ShuffledSampling(1), 1
        size, batch = self._sizes()
        return ShuffledSampling(math.ceil(size / batch)), math.ceil(size / batch)

    def _sizes(self) -> tuple[int, int]:
        if self.dataset_size is None or self.batch_size is None or self.sample_rate is not None:
            raise InvalidInput(
                f"--sampling {self.sampling} needs --dataset-size and --batch-size, and no --sample-rate"
            )
        sizes = FixedBatchSampling(self.dataset_size, self.batch_size)
        return sizes.dataset_size, sizes.batch_size


def delta_warning(delta: float, dataset_size: int | None) -> str | None:
    """A sentence when delta allows publishing a whole record, which delta >= 1/n does."""
    if dataset_size is None or delta < 1.0 / dataset_size:
        return None
    return (
        f"delta is {delta:g}, but should be well below 1/n = {1.0 / dataset_size:.3g}: "
        "a mechanism that publishes one random record meets it"
    )
