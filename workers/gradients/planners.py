"""Planners choose among equivalent computations, by a cost model (a pure function of shapes) or by timing them.

The alternatives of a choice agree up to floating-point error. `ShapePlanner` always makes the same choice for the same
shapes, so that a resumed run is bit-identical to an uninterrupted one. `TimingPlanner` times all alternatives once for
each example shape on the current device, and keeps the fastest for any number of examples.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

import torch

from dpsweep.workers.machine.devices import lacks_memory

T = TypeVar("T")


@dataclass(frozen=True)
class Rates:
    """Approximate throughput of a device per second; only the ratios matter.

    gemm: floating-point operations in large matrix products and convolutions.
    grouped: floating-point operations in convolutions with one group per example.
    elementwise: values in a pass over memory.
    unfold: values copied into patches.
    """

    gemm: float
    grouped: float
    elementwise: float
    unfold: float


RATES: Mapping[str, Rates] = {
    "cpu": Rates(gemm=170e9, grouped=130e9, elementwise=4.5e9, unfold=1.5e9),
    "cuda": Rates(gemm=50e12, grouped=2e12, elementwise=300e9, unfold=150e9),
    "matrix units": Rates(gemm=300e12, grouped=2e12, elementwise=500e9, unfold=300e9),
}
"""Rates by kind of device: cpu measured on two AVX-512 cores, cuda from data sheets, bfloat16 in matrix units."""


def device_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Return the `RATES` of factors of this dtype; unlisted kinds of devices get the rates of CUDA."""
    in_units = device.type == "cuda" and dtype == torch.bfloat16
    return RATES["matrix units"] if in_units else RATES.get(device.type, RATES["cuda"])


class Alternative(NamedTuple, Generic[T]):
    """One of several equivalent computations.

    cost: estimated seconds.
    compute: runs it.
    trial: if given, what `TimingPlanner` times instead of ``compute``.
    kept: number of values that its result holds.
    """

    cost: float
    compute: Callable[[], T]
    trial: Callable[[], object] | None = None
    kept: int = 0


class Planner(Protocol):
    """Chooses among equivalent computations."""

    def choose(self, key: Hashable, alternatives: Mapping[str, Alternative[T]]) -> T:
        """Return the result of one of the alternatives.

        key: everything that their relative costs depend on; the number of examples affects all costs alike.
        """
        ...


@dataclass(frozen=True)
class ShapePlanner:
    """Deterministic planner: chooses the smallest estimated cost, and the first of equal ones."""

    def choose(self, key: Hashable, alternatives: Mapping[str, Alternative[T]]) -> T:
        return min(alternatives.values(), key=lambda alternative: alternative.cost).compute()


HOPELESS: Final = 30.0
"""Ratio to the smallest estimated cost from which `TimingPlanner` does not try an alternative."""
ABOUT_AS_FAST: Final = 1.2
"""Ratio of measured times up to which `TimingPlanner` prefers the alternative that keeps fewer values."""


@dataclass
class TimingPlanner:
    """Planner that times alternatives on first use; runs may differ in the last bits.

    It chooses the fastest one, or one that keeps less and is about as fast. One that does not fit in memory is left
    out.

    device: whose work is timed; None for the current one.
    """

    repetitions: int = 3
    device: torch.device | None = None
    chosen: dict[Hashable, str] = field(default_factory=dict)

    def choose(self, key: Hashable, alternatives: Mapping[str, Alternative[T]]) -> T:
        if key not in self.chosen:
            self.chosen[key] = self._best(alternatives)
        return alternatives[self.chosen[key]].compute()

    def _best(self, alternatives: Mapping[str, Alternative[T]]) -> str:
        """Return the name of the alternative to keep."""
        smallest = min(alternative.cost for alternative in alternatives.values())
        tried = [name for name, each in alternatives.items() if each.cost <= HOPELESS * smallest]
        if len(tried) == 1:
            return tried[0]
        seconds = {name: self._seconds(alternatives[name]) for name in tried}
        enough = ABOUT_AS_FAST * min(seconds.values())
        fast = [name for name in tried if seconds[name] <= enough]
        return min(fast, key=lambda name: (alternatives[name].kept, seconds[name]))

    def _seconds(self, alternative: Alternative[T]) -> float:
        """Return the shortest time of a few runs after a warm-up run, infinity where memory is too small."""
        run = alternative.trial or alternative.compute
        seconds = []
        try:
            for _ in range(self.repetitions + 1):
                self._synchronize()
                start = time.perf_counter()
                run()
                self._synchronize()
                seconds.append(time.perf_counter() - start)
        except RuntimeError as error:
            if not lacks_memory(error):
                raise
            return math.inf
        return min(seconds[1:])

    def _synchronize(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize(self.device)


def default_planner(device: torch.device) -> Planner:
    """Return `ShapePlanner` on a CPU, whose rates are measured, and `TimingPlanner` on any other device."""
    if device.type == "cpu":
        return ShapePlanner()
    return TimingPlanner(device=device if device.type == "cuda" else None)
