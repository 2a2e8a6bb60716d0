"""Checks that the norms of a step are finite, and that outputs of layers are as precise as their rules assume.

Both make the host wait for the device, and are therefore deferred to the end of a pass or of a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from dpsweep.workers.gradients.layers import Layer, outputs_are_precise, which_read_outputs
from dpsweep.workers.gradients.micro_batches import MicroBatch
from dpsweep.workers.gradients.modes import RandomState

T = TypeVar("T")


class Look(Protocol):
    """Checks whether sums of norms are finite."""

    def finds_finite(self, total: Tensor) -> bool:
        """Return whether the sum is finite; also True if the check is deferred."""
        ...


class AtOnce:
    """Checks every sum immediately, and waits for the device."""

    def finds_finite(self, total: Tensor) -> bool:
        return math.isfinite(float(total))


class Together:
    """Defers the checks of all sums to one call of `all_finite`."""

    def __init__(self) -> None:
        self._totals: list[Tensor] = []

    def finds_finite(self, total: Tensor) -> bool:
        self._totals.append(total)
        return True

    def all_finite(self) -> bool:
        """Return whether all sums are finite; waits for the device."""
        return math.isfinite(float(torch.stack(self._totals).sum()))


class Looks:
    """Chooses how the norms of the micro-batches of a step are checked.

    A check makes the host wait for the device, and checks after every layer would leave the device idle. All checks are
    therefore expressed by the sum of the norms, which is not finite if any norm must be computed again.

    They are checked together, until in some step any of them is not finite or must be computed again; from then on each
    micro-batch is checked by itself.
    """

    def __init__(self) -> None:
        self._at_each = False

    def settled(self, batches: Sequence[MicroBatch], compute: Callable[[Look], T]) -> T:
        """Return the result of ``compute``, which may be called a second time, with the same random numbers."""
        if len(batches) <= 1 or self._at_each:
            return compute(AtOnce())
        before, together = RandomState.of(batches[0].x.device), Together()
        done = [compute(together)]
        if together.all_finite():
            return done[0]
        done.clear()  # frees memory
        before.restore()
        self._at_each = True
        return compute(AtOnce())


class Outputs:
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
