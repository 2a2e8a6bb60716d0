"""Training examples on the device, and snapshots of their gradient norms."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accounting.records import NormShardWriter, NormSnapshot
from workers.clipping import ClipRule, Examples
from workers.data import Dataset
from workers.gradients import BatchNorms, GradientEngine

_CHUNK = 512
"""Examples per norm pass; fixed, so that a resumed run repeats every bit."""


class TrainingData:
    """The training split on the device. ``rows`` are positions in the split, int64 [b]."""

    def __init__(self, dataset: Dataset, device: torch.device) -> None:
        split = dataset.train
        self._prepare = dataset.prepare
        self._features, self._labels = split.features.to(device), split.labels.to(device)
        self._groups, self._ids = split.groups.to(device), split.example_ids
        self.device = device

    def __len__(self) -> int:
        return len(self._ids)

    def inputs(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Prepared features [b, ...] and labels [b]."""
        return self._prepare(self._features[rows]), self._labels[rows]

    def examples(self, rows: Tensor, norms: BatchNorms) -> Examples:
        """What a clipping method may know about the examples ``rows``."""
        return Examples(norms.norms, self._groups[rows], rows, norms.layer_norms)

    def ids(self, rows: Tensor) -> Tensor:
        """Example ids [b], on the CPU."""
        return self._ids[rows.cpu()]


@dataclass(frozen=True)
class Measurement:
    """Norms of some examples at one step, and their losses [n]."""

    examples: Examples
    losses: Tensor


_ORDER = 4.0
_LEAST_NOISE = 0.1
"""Smaller noise multipliers are replaced by this one, to keep exponentials finite."""


@dataclass(frozen=True)
class Interval:
    """The steps from one measurement up to the next, and the contribution c / S of each example to them.

    The clipping rule may change at every step while the norms stay as measured. One contribution is stored for all
    steps of the interval: the generalised mean of c / S over the steps, with generator
    exp(a (a - 1) / 2 (c / S)^2 / sigma^2), the moment of order a = 4 of the Gaussian's privacy loss. A root mean square
    would under-estimate the cost of most examples, and the maximum would grossly over-estimate it. With one step or one
    rule the mean is exact.

    rate: a (a - 1) / (2 sigma^2). moments [n] float64: sum over the ``steps`` steps of (generator - 1).
    """

    start: int
    measured: Measurement
    rate: float
    moments: Tensor
    steps: int = 0

    @staticmethod
    def from_step(start: int, measured: Measurement, noise_multiplier: float) -> Interval:
        rate = _ORDER * (_ORDER - 1.0) / 2.0 / max(noise_multiplier, _LEAST_NOISE) ** 2
        return Interval(start, measured, rate, torch.zeros_like(measured.losses, dtype=torch.float64))

    def extended(self, rule: ClipRule) -> Interval:
        """The interval with one more step, taken under ``rule``."""
        moments = torch.expm1(self.rate * rule.contributions(self.measured.examples).square())
        return replace(self, moments=self.moments + moments, steps=self.steps + 1)

    @property
    def contributions(self) -> Tensor:
        """[n] in [0, 1]: the stored contribution of each example; needs at least one step."""
        return (torch.log1p(self.moments / self.steps) / self.rate).sqrt().clamp(max=1.0)

    @staticmethod
    def restored(state: Mapping[str, Any], device: torch.device) -> Interval:
        """The interval of a `state`."""
        columns: dict[str, Any] = {
            name: None if column is None else column.to(device) for name, column in state["examples"].items()
        }
        measured = Measurement(Examples(**columns), state["losses"].to(device))
        return Interval(state["start"], measured, state["rate"], state["moments"].to(device), state["steps"])

    def state(self) -> dict[str, Any]:
        return {
            "start": self.start,
            "examples": asdict(self.measured.examples),
            "losses": self.measured.losses,
            "rate": self.rate,
            "moments": self.moments,
            "steps": self.steps,
        }


class NormRecorder:
    """Measures the norms of a fixed set of training examples, and stores the contributions of each interval.

    An interval is open from one measurement up to the next. It is the recorder's state in a checkpoint.
    """

    def __init__(self, data: TrainingData, rows: Tensor, engine: GradientEngine, writer: NormShardWriter) -> None:
        self._data, self._rows, self._engine, self._writer = data, rows.to(data.device), engine, writer
        self._interval: Interval | None = None

    def open(self, step: int, noise_multiplier: float) -> Examples:
        """Measure and open an interval at ``step``; returns the examples with their norms."""
        measured = self.measure()
        self._interval = Interval.from_step(step, measured, noise_multiplier)
        return measured.examples

    def extend(self, rule: ClipRule) -> None:
        """Add a step under ``rule`` to the open interval, if there is one."""
        self._interval = self._interval.extended(rule) if self._interval else None

    def store(self) -> None:
        """Store the snapshot of the open interval, if there is one."""
        if self._interval is not None:
            self.write(self._interval)

    def state(self) -> dict[str, Any] | None:
        return None if self._interval is None else self._interval.state()

    def restore(self, state: Mapping[str, Any] | None) -> None:
        self._interval = None if state is None else Interval.restored(state, self._data.device)

    def measure(self) -> Measurement:
        """Norms and losses of all rows, computed in chunks of fixed size."""
        chunks = [self._engine.norms(*self._data.inputs(rows)) for rows in torch.split(self._rows, _CHUNK)]
        by_layer = [chunk.layer_norms for chunk in chunks if chunk.layer_norms is not None]
        norms = BatchNorms(
            torch.cat([chunk.norms for chunk in chunks]),
            torch.cat(by_layer) if by_layer else None,
            torch.cat([chunk.losses for chunk in chunks]),
        )
        return Measurement(self._data.examples(self._rows, norms), norms.losses)

    def write(self, interval: Interval) -> None:
        """Store the snapshot of ``interval``. A resumed run may store it again, but only with equal bytes."""
        examples = interval.measured.examples
        self._writer.write(
            NormSnapshot(
                step=interval.start,
                example_ids=self._data.ids(examples.rows).numpy(),
                groups=examples.groups.cpu().numpy(),
                norms=examples.norms.cpu().numpy(),
                contributions=interval.contributions.cpu().numpy(),
                losses=interval.measured.losses.cpu().numpy(),
            )
        )


def is_due(step: int, times_per_epoch: float, steps_per_epoch: int) -> bool:
    """Whether an event that occurs ``times_per_epoch`` times per epoch is due at ``step``: at 0, then evenly spaced.

    >>> [step for step in range(20) if is_due(step, times_per_epoch=2, steps_per_epoch=10)]
    [0, 5, 10, 15]
    """
    rate = times_per_epoch / steps_per_epoch
    return step == 0 or math.floor(step * rate + 1e-9) > math.floor((step - 1) * rate + 1e-9)


def choose_rows(population: int, count: int, seed: int) -> Tensor:
    """A uniformly random subset of ``count`` rows, ascending; all rows if there are fewer."""
    chosen = np.random.default_rng(seed).choice(population, min(count, population), replace=False)
    return torch.from_numpy(np.sort(chosen).astype(np.int64))
