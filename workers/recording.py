"""Snapshots of the gradient norms of training examples."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accounting.records import NormShardWriter, NormSnapshot
from workers.batch_gradients import BatchGradients, TrainingData
from workers.clipping import ClipRule, Examples
from workers.gradients import BatchNorms


@dataclass(frozen=True)
class Renewal:
    """New norms and losses of the examples at positions ``rows`` [b], measured after ``steps`` steps of an interval."""

    steps: int
    rows: Tensor
    norms: BatchNorms

    def state(self) -> dict[str, Any]:
        return {"steps": self.steps, "rows": self.rows, "norms": asdict(self.norms)}

    @staticmethod
    def restored(state: Mapping[str, Any], device: torch.device) -> Renewal:
        """The renewal of a `state`."""
        norms: dict[str, Any] = {
            name: None if column is None else column.to(device) for name, column in state["norms"].items()
        }
        return Renewal(state["steps"], state["rows"].to(device), BatchNorms(**norms))


@dataclass(frozen=True)
class Measurement:
    """Norms of some examples, and their losses [n]."""

    examples: Examples
    losses: Tensor

    def copy(self) -> Measurement:
        """The same values in tensors of their own."""
        examples = self.examples
        layer_norms = None if examples.layer_norms is None else examples.layer_norms.clone()
        own = replace(examples, norms=examples.norms.clone(), layer_norms=layer_norms)
        return Measurement(own, self.losses.clone())

    def renew(self, renewal: Renewal) -> None:
        """Overwrite the norms and losses of its examples, in place."""
        rows, norms = renewal.rows, renewal.norms
        self.examples.norms[rows] = norms.norms
        self.losses[rows] = norms.losses.to(self.losses.dtype)
        if self.examples.layer_norms is not None and norms.layer_norms is not None:
            self.examples.layer_norms[rows] = norms.layer_norms

    def state(self) -> dict[str, Any]:
        return {"examples": asdict(self.examples), "losses": self.losses}

    @staticmethod
    def restored(state: Mapping[str, Any], device: torch.device) -> Measurement:
        """The measurement of a `state`."""
        columns: dict[str, Any] = {
            name: None if column is None else column.to(device) for name, column in state["examples"].items()
        }
        return Measurement(Examples(**columns), state["losses"].to(device))


_ORDER = 4.0
_LEAST_NOISE = 0.1
"""Smallest noise multiplier used in the moment; smaller ones are replaced, to keep exponentials finite."""


@dataclass
class Interval:
    """The steps from one snapshot up to the next, and the contribution c / S of each example to them.

    The clipping rule may change at every step, and a norm when its example is in a batch. One contribution is stored
    for all steps of the interval: the generalised mean of c / S over the steps, with generator
    exp(a (a - 1) / 2 (c / S)^2 / sigma^2), the moment of order a = 4 of the Gaussian's privacy loss. A root mean square
    would under-estimate the cost of most examples, and the maximum would grossly over-estimate it. With one step, or
    one rule and one norm, the mean is exact.

    measured: norms as known at step ``start``. latest: norms as known now, except for ``renewals``, which are applied
    together when the rule changes and at the end. rate: a (a - 1) / (2 sigma^2). moments [n] float64: sum of
    (generator - 1) over the first ``counted`` [n] of ``steps`` steps. added [n] float64: what each step adds to the
    moments under ``rule`` and the latest norms; while both are unchanged, a step needs no computation.
    """

    start: int
    measured: Measurement
    latest: Measurement
    rate: float
    moments: Tensor
    counted: Tensor
    added: Tensor
    steps: int = 0
    rule: ClipRule | None = None
    renewals: list[Renewal] = field(default_factory=list)

    @staticmethod
    def from_step(start: int, measured: Measurement, noise_multiplier: float) -> Interval:
        rate = _ORDER * (_ORDER - 1.0) / 2.0 / max(noise_multiplier, _LEAST_NOISE) ** 2
        moments, counted, added = torch.zeros(
            3, len(measured.losses), dtype=torch.float64, device=measured.losses.device
        )
        return Interval(start, measured, measured, rate, moments, counted, added)

    def extend(self, rule: ClipRule) -> None:
        """Add one step, taken under ``rule``."""
        if rule is not self.rule:
            self.take_up_renewals()
            self.moments = self._total()
            self.counted = torch.full_like(self.counted, self.steps)
            self.added = self._added(rule, self.latest.examples)
            self.rule = rule
        self.steps += 1

    def renew(self, rows: Tensor, norms: BatchNorms) -> None:
        """Replace the norms and losses of the examples at the positions ``rows`` from the next step on."""
        self.renewals.append(Renewal(self.steps, rows, norms))

    def take_up_renewals(self) -> None:
        """Apply all renewals to `latest` and `moments`.

        Call it only at steps that are the same in interrupted and uninterrupted runs, so that both round alike.
        """
        if not self.renewals:
            return
        if self.latest is self.measured:
            self.latest = self.measured.copy()
        for renewal, added in zip(self.renewals, self._added_by_renewals(), strict=True):
            rows = renewal.rows
            self.moments[rows] += (renewal.steps - self.counted[rows]) * self.added[rows]
            self.counted[rows] = float(renewal.steps)
            self.added[rows] = added
            self.latest.renew(renewal)
        self.renewals = []

    @property
    def contributions(self) -> Tensor:
        """[n] in [0, 1]: the stored contribution of each example; needs at least one step."""
        self.take_up_renewals()
        return (torch.log1p(self._total() / self.steps) / self.rate).sqrt().clamp(max=1.0)

    def _total(self) -> Tensor:
        """[n]: the moments of all steps."""
        return self.moments + (self.steps - self.counted) * self.added

    def _added_by_renewals(self) -> Sequence[Tensor]:
        """For each renewal the moments [b] of a step under the rule, computed together; zeros before the first rule."""
        sizes = [len(renewal.rows) for renewal in self.renewals]
        if self.rule is None:
            return [torch.zeros(size, dtype=torch.float64, device=self.added.device) for size in sizes]
        known, rows = self.latest.examples, torch.cat([renewal.rows for renewal in self.renewals])
        by_layer = [each.norms.layer_norms for each in self.renewals if each.norms.layer_norms is not None]
        renewed = Examples(
            torch.cat([renewal.norms.norms for renewal in self.renewals]),
            known.groups[rows],
            known.rows[rows],
            torch.cat(by_layer) if by_layer else None,
        )
        return torch.split(self._added(self.rule, renewed), sizes)

    def _added(self, rule: ClipRule, examples: Examples) -> Tensor:
        return torch.expm1(self.rate * rule.contributions(examples).square())

    @staticmethod
    def restored(state: Mapping[str, Any], device: torch.device) -> Interval:
        """The interval of a `state`; its rule is not part of it."""
        measured = Measurement.restored(state["measured"], device)
        latest = state["latest"]
        return Interval(
            start=state["start"],
            measured=measured,
            latest=measured if latest is None else Measurement.restored(latest, device),
            rate=state["rate"],
            steps=state["steps"],
            renewals=[Renewal.restored(each, device) for each in state["renewals"]],
            **{name: state[name].to(device) for name in ("moments", "counted", "added")},
        )

    def state(self) -> dict[str, Any]:
        return {
            "start": self.start,
            "measured": self.measured.state(),
            "latest": None if self.latest is self.measured else self.latest.state(),
            "rate": self.rate,
            "moments": self.moments,
            "counted": self.counted,
            "added": self.added,
            "steps": self.steps,
            "renewals": [renewal.state() for renewal in self.renewals],
        }


class NormRecorder:
    """Measures the norms of a fixed set of training examples, and stores the contributions of each interval.

    An interval is open from one snapshot up to the next. It is the recorder's state in a checkpoint.
    """

    def __init__(self, data: TrainingData, rows: Tensor, gradients: BatchGradients, writer: NormShardWriter) -> None:
        self._data, self._rows, self._writer = data, rows.to(data.device), writer
        self.gradients = gradients
        self._interval: Interval | None = None

    def open(self, step: int, noise_multiplier: float) -> Examples:
        """Measure and open an interval at ``step``; returns the examples with their norms."""
        measured = self.measure()
        self._interval = Interval.from_step(step, measured, noise_multiplier)
        return measured.examples

    def open_again(self, step: int, noise_multiplier: float) -> None:
        """Open an interval at ``step`` with the norms that are known; an interval is open already."""
        assert self._interval is not None, "norms are measured at step 0"
        self._interval.take_up_renewals()
        self._interval = Interval.from_step(step, self._interval.latest, noise_multiplier)

    def renew(self, rows: Tensor, norms: BatchNorms) -> None:
        """Take norms and losses of the examples at the positions ``rows`` from a batch, before its step is added."""
        assert self._interval is not None, "norms are measured at step 0"
        self._interval.renew(rows, norms)

    def extend(self, rule: ClipRule) -> None:
        """Add a step under ``rule`` to the open interval, if there is one."""
        if self._interval is not None:
            self._interval.extend(rule)

    def store(self) -> None:
        """Queue the snapshot of the open interval, if there is one, to be stored."""
        if self._interval is not None:
            self.write(self._interval)

    def wait(self) -> None:
        """Return when every snapshot is stored. Raises: StorageError where one could not be."""
        self._writer.wait()

    def complete(self) -> None:
        """Mark the stored snapshots as complete. Raises: StorageError."""
        self._writer.complete()

    def close(self) -> None:
        """Store nothing more, and wait for writes in progress."""
        self._writer.close()

    def state(self) -> dict[str, Any] | None:
        return None if self._interval is None else self._interval.state()

    def restore(self, state: Mapping[str, Any] | None) -> None:
        self._interval = None if state is None else Interval.restored(state, self._data.device)

    @property
    def measured(self) -> Measurement:
        """Norms and losses as the open interval found them."""
        assert self._interval is not None, "norms are measured at step 0"
        return self._interval.measured

    def keep_rule(self, rule: ClipRule) -> None:
        """After `restore`: the last step of the open interval was taken under ``rule``."""
        if self._interval is not None:
            self._interval.rule = rule

    def measure(self, first: int | None = None) -> Measurement:
        """Norms and losses of all rows, or of the ``first`` ones, computed anew."""
        rows = self._rows[:first]
        norms = self.gradients.norms(rows)
        return Measurement(self._data.examples(rows, norms), norms.losses)

    def write(self, interval: Interval) -> None:
        """Have the snapshot of ``interval`` stored. A resumed run may store it again, but only with equal bytes."""
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


@contextlib.contextmanager
def closed_afterwards(recorders: Sequence[NormRecorder]) -> Iterator[None]:
    """Close the recorders however the ``with`` block ends, so that none writes while the next attempt does."""
    try:
        yield
    finally:
        for recorder in recorders:
            recorder.close()


def is_due(step: int, times_per_epoch: float, steps_per_epoch: int) -> bool:
    """Whether an event that occurs ``times_per_epoch`` times per epoch is due at ``step``: at 0, then evenly spaced.

    What occurs 0 times is never due.

    >>> [step for step in range(20) if is_due(step, times_per_epoch=2, steps_per_epoch=10)]
    [0, 5, 10, 15]
    """
    if times_per_epoch == 0.0:
        return False
    rate = times_per_epoch / steps_per_epoch
    return step == 0 or math.floor(step * rate + 1e-9) > math.floor((step - 1) * rate + 1e-9)


def choose_rows(population: int, count: int, seed: int) -> Tensor:
    """A uniformly random subset of ``count`` rows, ascending; all rows if there are fewer."""
    chosen = np.random.default_rng(seed).choice(population, min(count, population), replace=False)
    return torch.from_numpy(np.sort(chosen).astype(np.int64))
