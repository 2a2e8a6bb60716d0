"""Checks that the norms of a step are finite, and that outputs of layers are as precise as their rules assume.

Both make the host wait for the device, and are therefore deferred to the end of a pass or of a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from dpsweep.workers.gradients.layers import Layer, outputs_are_precise, which_read_outputs
from dpsweep.workers.gradients.micro_batches import MicroBatch
from dpsweep.workers.gradients.modes import RandomState
from dpsweep.workers.gradients.pass_results import BatchNorms, infinite_for_nan

T = TypeVar("T")


class FinitenessCheck:
    """Checks that the norms of the micro-batches of a step are finite.

    A check makes the host wait for the device, and one after every layer would leave the device idle. All checks are
    therefore expressed by the sum of the norms, which is not finite if any norm must be computed again.

    The sums of a step are checked together, until in some step one is not finite. From then on each micro-batch is
    checked by itself.
    """

    def __init__(self) -> None:
        self._at_each = False
        self._later: list[Tensor] | None = None

    def are_finite(self, norms: BatchNorms, total: Tensor) -> bool:
        """Return whether ``total``, the sum of ``norms``, is finite.

        True also where it is checked later; NaN among the norms becomes infinity then, in place.
        """
        if self._later is None:
            return math.isfinite(float(total))
        self._later.append(total)
        infinite_for_nan(norms)
        return True

    def settled(self, batches: Sequence[MicroBatch], compute: Callable[[], T]) -> T:
        """Return the result of ``compute``, which may be called a second time, with the same random numbers."""
        if len(batches) <= 1 or self._at_each:
            return compute()
        before, outside, self._later = RandomState.of(batches[0].x.device), self._later, []
        try:
            done = [compute()]
            if math.isfinite(float(torch.stack(self._later).sum())):
                return done[0]
        finally:
            self._later = outside
        done.clear()  # frees memory
        before.restore()
        self._at_each = True
        return compute()


class OutputPrecision:
    """Tracks, for the layers whose rule reads the output of the layer, whether the output is precise enough.

    This depends on parameters, which change from step to step. A pass relies on the last finding, and is repeated if it
    no longer holds, so that results depend only on the current parameters.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._readers = which_read_outputs(layers)
        self._precise: Tensor | None = None
        self.ignored: frozenset[str] = frozenset()
        """Names of the layers whose output must not be read."""

    @property
    def are_read(self) -> bool:
        """Return whether any layer's rule reads its output."""
        return bool(self._readers)

    @property
    def finding(self) -> Hashable:
        """Return what a pass reads of the finding: names on the host, and the address of the values on the device."""
        return self.ignored, None if self._precise is None else self._precise.data_ptr()

    def confirmed(self, total: Tensor) -> Tensor:
        """Return ``total`` (a scalar), or NaN if the last finding no longer holds."""
        if not self._readers:
            return total
        now = outputs_are_precise(self._readers)
        if self._precise is None or self._precise.device != now.device:
            return torch.full_like(total, math.nan)
        return torch.where((now == self._precise).all(), total, math.nan)

    def look_again(self) -> bool:
        """Update the finding, and return whether it changed. Waits for the device."""
        if not self._readers:
            return False
        now, before = outputs_are_precise(self._readers), self.ignored
        if self._precise is None or self._precise.device != now.device:
            self._precise = now
        else:  # in place: recorded passes read it by its address
            self._precise.copy_(now)
        self.ignored = frozenset(
            layer.name for layer, holds in zip(self._readers, now.tolist(), strict=True) if not holds
        )
        return self.ignored != before
