"""Which of several equal computations is taken: by a cost model (a pure function of shapes) or by timing them.

All alternatives of a choice agree up to floating-point error. `ShapePlanner` chooses the same one for the same
shapes for ever, so that a resumed run repeats the bits of the undisturbed one; `TimingPlanner` measures each
alternative once per shape on the present device, and keeps the fastest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import torch

T = TypeVar("T")


@dataclass(frozen=True)
class Rates:
    """What a device does in a second, roughly; only the ratios matter.

    gemm: floating-point operations in large matrix products and convolutions; grouped: the same in convolutions with
    a group per example; elementwise: numbers through a pass over memory; unfold: numbers of patches copied.
    """

    gemm: float
    grouped: float
    elementwise: float
    unfold: float


RATES: Mapping[str, Rates] = {
    "cpu": Rates(gemm=170e9, grouped=130e9, elementwise=4.5e9, unfold=1.5e9),
    "cuda": Rates(gemm=50e12, grouped=2e12, elementwise=300e9, unfold=150e9),
}
"""cpu: measured on two cores with AVX-512 (docs/performance.md); cuda: from data sheets of recent GPUs."""


def rates(device: torch.device) -> Rates:
    return RATES.get(device.type, RATES["cuda"])


@dataclass(frozen=True)
class Alternative(Generic[T]):
    """cost: estimated seconds; compute: the computation; trial: what a timing measures, if not compute alone."""

    cost: float
    compute: Callable[[], T]
    trial: Callable[[], object] | None = None


class Planner(Protocol):
    def choose(self, key: Hashable, alternatives: Mapping[str, Alternative[T]]) -> T:
        """The value of one of the alternatives; ``key`` holds everything that their costs depend on."""
        ...


@dataclass(frozen=True)
class ShapePlanner:
    """Deterministic: the smallest estimated cost; ties go to the first."""

    def choose(self, key: Hashable, alternatives: Mapping[str, Alternative[T]]) -> T:
        return min(alternatives.values(), key=lambda alternative: alternative.cost).compute()


@dataclass
class TimingPlanner:
    """The fastest as measured on first use; results may differ in the last bits from run to run."""

    repetitions: int = 3
    chosen: dict[Hashable, str] = field(default_factory=dict)

    def choose(self, key: Hashable, alternatives: Mapping[str, Alternative[T]]) -> T:
        if key not in self.chosen:
            self.chosen[key] = min(alternatives, key=lambda name: self._seconds(alternatives[name]))
        return alternatives[self.chosen[key]].compute()

    def _seconds(self, alternative: Alternative[T]) -> float:
        """The best of a few runs, after one that is not counted."""
        run = alternative.trial or alternative.compute
        seconds = []
        for _ in range(self.repetitions + 1):
            _synchronize()
            start = time.perf_counter()
            run()
            _synchronize()
            seconds.append(time.perf_counter() - start)
        return min(seconds[1:])


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
