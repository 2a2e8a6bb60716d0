"""Which of several equal computations is taken: by a cost model (a pure function of shapes) or by timing them.

All alternatives of a choice agree up to floating-point error. `ShapePlanner` chooses the same one for the same
shapes for ever, so that a resumed run repeats the bits of the undisturbed one; `TimingPlanner` measures each
alternative once per shape on the present device, and keeps the fastest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Alternative:
    """cost: estimated seconds up to a common factor; compute: the computation itself."""

    cost: float
    compute: Callable[[], Tensor]


class Planner(Protocol):
    def choose(self, key: Hashable, alternatives: Mapping[str, Alternative]) -> Tensor:
        """The value of one of the alternatives; ``key`` holds everything that their costs depend on."""
        ...


@dataclass(frozen=True)
class ShapePlanner:
    """Deterministic: the smallest estimated cost; ties go to the first."""

    def choose(self, key: Hashable, alternatives: Mapping[str, Alternative]) -> Tensor:
        return min(alternatives.values(), key=lambda alternative: alternative.cost).compute()


@dataclass
class TimingPlanner:
    """The fastest as measured on first use; results may differ in the last bits from run to run."""

    repetitions: int = 3
    chosen: dict[Hashable, str] = field(default_factory=dict)

    def choose(self, key: Hashable, alternatives: Mapping[str, Alternative]) -> Tensor:
        if key not in self.chosen:
            self.chosen[key] = min(alternatives, key=lambda name: self._seconds(alternatives[name]))
        return alternatives[self.chosen[key]].compute()

    def _seconds(self, alternative: Alternative) -> float:
        device = alternative.compute().device
        best = float("inf")
        for _ in range(self.repetitions):
            start = time.perf_counter()
            alternative.compute()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            best = min(best, time.perf_counter() - start)
        return best
