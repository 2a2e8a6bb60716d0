"""Snapshots of the gradient norms of training examples."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpsweep.accounting.records.shards import NormShardWriter, NormSnapshot
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.workers.clipping import ClipRule, Examples
from dpsweep.workers.gradients.pass_results import BatchNorms
from dpsweep.workers.spec import NormSpec
from dpsweep.workers.training.batch_gradients import BatchGradients, TrainingData
from dpsweep.workers.training.snapshot_intervals import EndedInterval, Measurement, SnapshotInterval


class NormStore(Protocol):
    """Keeps the snapshots of one recorder; `dpsweep.accounting.records.shards.NormShardWriter` stores them as files."""

    def write(self, snapshot: NormSnapshot) -> None:
        """Keep a snapshot; one of the same step is only given again by a run that was resumed, with equal values."""
        ...

    def wait(self) -> None:
        """Return when every snapshot is stored. Raises: StorageError where one could not be."""
        ...

    def complete(self) -> None:
        """Mark the stored snapshots as complete. Raises: StorageError."""
        ...

    def close(self) -> None:
        """Store nothing more, and wait for writes in progress."""
        ...


@dataclass(frozen=True)
class NormStores:
    """The stores of a run. exact: of the examples whose norms are stored at every step, if there are any."""

    everyone: NormStore
    exact: NormStore | None = None


def stored_norms(files: TrialFiles, norms: NormSpec) -> NormStores:
    """Return the stores that write norms as files of a trial."""
    exact = NormShardWriter(files.exact_norms, norms.rows_per_part) if norms.exact_examples else None
    return NormStores(NormShardWriter(files.norms, norms.rows_per_part), exact)


class NormRecorder:
    """Measures the norms of a fixed set of training examples, and stores the contributions of each interval.

    An interval is open from one snapshot up to the next. It is the recorder's state in a checkpoint.
    """

    def __init__(self, data: TrainingData, rows: Tensor, gradients: BatchGradients, writer: NormStore) -> None:
        self._data, self._rows, self._writer = data, rows.to(data.device), writer
        self.gradients = gradients
        self._interval: SnapshotInterval | None = None

    def open(self, step: int, rate: float) -> Examples:
        """Measure and open an interval at ``step``; returns the examples with their norms.

        rate: of `generator_rate`, at the noise of the interval's steps.
        """
        measured = self.measure()
        self._interval = SnapshotInterval.from_step(step, measured, rate)
        return measured.examples

    def continue_at(self, step: int, rate: float) -> None:
        """Open an interval at ``step`` with the norms that are known, and store the one before the last."""
        ended = self._opened
        self._interval = ended.continued(step, rate)
        if ended.before is not None:
            self._write(ended.before)

    def renew(self, rows: Tensor, norms: BatchNorms) -> None:
        """Take norms and losses of the examples at the positions ``rows`` from a batch, before its step is added."""
        self._opened.renew(rows, norms)

    def renew_as_old_as(self, steps: float) -> None:
        """Measure the norms of the examples whose latest one is at least that many steps old."""
        old = self._opened.as_old_as(steps)
        if len(old) > 0:
            self._opened.renew(old, self.gradients.norms(self._rows[old]))

    def extend(self, rule: ClipRule) -> None:
        """Add a step under ``rule`` to the open interval, if there is one."""
        if self._interval is not None:
            self._interval.extend(rule)

    def store(self) -> None:
        """Queue the snapshots of all intervals that are not stored yet."""
        for interval in self._interval.settled() if self._interval is not None else ():
            self._write(interval)

    def so_far(self) -> tuple[NormSnapshot, ...]:
        """Return the snapshots that `store` would queue, without a change of the open interval."""
        if self._interval is None or self._interval.steps == 0:
            return ()
        copied = replace(self._interval, renewals=[*self._interval.renewals])
        return tuple(map(self._snapshot, copied.settled()))

    def state(self) -> dict[str, Any] | None:
        return None if self._interval is None else self._interval.state()

    def restore(self, state: Mapping[str, Any] | None) -> None:
        here = pytree.tree_map_only(Tensor, lambda each: each.to(self._data.device), state)
        self._interval = None if here is None else SnapshotInterval.restored(here, self._measurement)

    @property
    def measured(self) -> Measurement:
        """Norms and losses as the open interval found them."""
        return self._opened.measured

    @property
    def _opened(self) -> SnapshotInterval:
        assert self._interval is not None, "norms are measured at step 0"
        return self._interval

    def keep_rule(self, rule: ClipRule) -> None:
        """After `restore`: the last step of the open interval was taken under ``rule``."""
        if self._interval is not None:
            self._interval.rule = rule

    def measure(self) -> Measurement:
        """Return norms and losses of all rows, computed again."""
        return self._measurement(self.gradients.norms(self._rows))

    def _measurement(self, norms: BatchNorms) -> Measurement:
        """Norms and losses [n] of the first n rows."""
        return Measurement(self._data.examples(self._rows[: len(norms.losses)], norms), norms.losses)

    def _write(self, interval: EndedInterval) -> None:
        """Have the snapshot of ``interval`` stored. A resumed run may store it again, but only with equal bytes."""
        self._writer.write(self._snapshot(interval))

    def _snapshot(self, interval: EndedInterval) -> NormSnapshot:
        examples = interval.measured.examples
        return NormSnapshot(
            step=interval.start,
            example_ids=self._data.ids(examples.rows).numpy(),
            groups=examples.groups.cpu().numpy(),
            norms=examples.norms.cpu().numpy(),
            contributions=interval.contributions.cpu().numpy(),
            losses=interval.measured.losses.cpu().numpy(),
        )


@contextlib.contextmanager
def closed_afterwards(stores: Sequence[NormStore]) -> Iterator[None]:
    """Close the stores however the ``with`` block ends, so that none writes while the next attempt does."""
    try:
        yield
    finally:
        for store in stores:
            store.close()


def is_due(step: int, times_per_epoch: float, steps_per_epoch: int) -> bool:
    """Return whether an event that occurs ``times_per_epoch`` times is due at ``step``: at 0, then evenly spaced.

    One that occurs 0 times is never due.

    >>> [step for step in range(20) if is_due(step, times_per_epoch=2, steps_per_epoch=10)]
    [0, 5, 10, 15]
    """
    if times_per_epoch == 0.0:
        return False
    rate = times_per_epoch / steps_per_epoch
    return step == 0 or math.floor(step * rate + 1e-9) > math.floor((step - 1) * rate + 1e-9)


def oldest_norm(step: int, steps_per_epoch: int) -> float:
    """Return the age in steps from which on a norm is measured again at ``step``, with ``when_sampled``.

    Norms change fastest at the beginning, so at first three quarters of the training so far, then two epochs, and from
    the eighth epoch on a quarter of the training so far; at least two steps.

    >>> [oldest_norm(epoch * 10, steps_per_epoch=10) for epoch in (1, 2, 3, 8, 20)]
    [7.5, 15.0, 20.0, 20.0, 50.0]
    """
    return max(2.0, min(0.75 * step, max(2.0 * steps_per_epoch, 0.25 * step)))


def choose_rows(population: int, count: int, seed: int) -> Tensor:
    """Return a uniformly random subset of ``count`` rows, ascending; all rows if there are fewer."""
    chosen = np.random.default_rng(seed).choice(population, min(count, population), replace=False)
    return torch.from_numpy(np.sort(chosen).astype(np.int64))
