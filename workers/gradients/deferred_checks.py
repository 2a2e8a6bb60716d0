"""Looking at values on the device, once per step: a step that waits for the device after every layer leaves it idle.

What must be looked at is expressed in the sum of the norms, which is not finite if any norm must be computed again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from workers.gradients.layers import Layer, outputs_are_precise, which_read_outputs
from workers.gradients.micro_batches import MicroBatch
from workers.gradients.randomness import RandomState

T = TypeVar("T")


class Look(Protocol):
    """Decides whether sums of norms are finite."""

    def finds_finite(self, total: Tensor) -> bool:
        """Whether the sum is finite, or is looked at later."""
        ...


class AtOnce:
    """Looks at every sum, and waits for it."""

    def finds_finite(self, total: Tensor) -> bool:
        return math.isfinite(float(total))


class Together:
    """Looks at all sums in the end."""

    def __init__(self) -> None:
        self._totals: list[Tensor] = []

    def finds_finite(self, total: Tensor) -> bool:
        self._totals.append(total)
        return True

    def all_finite(self) -> bool:
        """Whether all sums are finite; waits for them."""
        return math.isfinite(float(torch.stack(self._totals).sum()))


class Looks:
    """How the norms of the micro-batches of a step are looked at.

    Together, until some of them are not finite or must be computed again; from then on each for itself.
    """

    def __init__(self) -> None:
        self._at_each = False

    def settled(self, batches: Sequence[MicroBatch], compute: Callable[[Look], T]) -> T:
        """What ``compute`` makes of the micro-batches; it may be called twice, with the same random numbers."""
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
    """Which rules may read the output of their layer, of those that do.

    That depends on parameters, which change from step to step. A pass relies on what was found last, and is repeated if
    it finds that this no longer holds: its results depend on the current parameters alone.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._readers = which_read_outputs(layers)
        self._precise: Tensor | None = None
        self.ignored: frozenset[str] = frozenset()
        """Names of the layers whose output is not read."""

    @property
    def are_read(self) -> bool:
        """Whether any layer's rule reads its output."""
        return bool(self._readers)

    def confirmed(self, total: Tensor) -> Tensor:
        """``total`` (a scalar), or NaN if what was found last does not hold."""
        if not self._readers:
            return total
        now = outputs_are_precise(self._readers)
        if self._precise is None or self._precise.device != now.device:
            return torch.full_like(total, math.nan)
        return torch.where((now == self._precise).all(), total, math.nan)

    def look_again(self) -> bool:
        """Find out anew; whether that changes anything. Waits for the device."""
        if not self._readers:
            return False
        before, self._precise = self.ignored, outputs_are_precise(self._readers)
        precise = zip(self._readers, self._precise.tolist(), strict=True)
        self.ignored = frozenset(layer.name for layer, holds in precise if not holds)
        return self.ignored != before
