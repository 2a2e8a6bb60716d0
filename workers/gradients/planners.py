"""Planners choose among equivalent computations, by a cost model (a pure function of shapes) or by timing them.

Also splits a batch into micro-batches, whose last one may be padded so that all have one shape.

The alternatives of a choice agree up to floating-point error. `ShapePlanner` always makes the same choice for the same
shapes, so that a resumed run is bit-identical to an uninterrupted one. `TimingPlanner` times all alternatives once for
each example shape on the current device, and keeps the fastest for any number of examples.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Generic, Literal, NamedTuple, Protocol, TypeVar, assert_never, get_args

import torch
from torch import Tensor

from dpsweep.accounting.errors import InvalidInput, count_of


@dataclass(frozen=True)
class MicroBatch:
    """Rows of x and y, K for each example. examples: number of examples; all rows after them are padding."""

    x: Tensor
    y: Tensor
    examples: int

    def copied(self) -> MicroBatch:
        """Return a copy."""
        return replace(self, x=self.x.clone(), y=self.y.clone())


LastMicroBatch = Literal["shorter", "padded"]
"""Treatment of a last micro-batch with fewer examples than the others."""


Launches = Literal["each", "recorded"]
"""How the host starts the kernels of passes: each by itself, or by a recorded graph where device and pass allow it."""


def micro_batches(x: Tensor, y: Tensor, size: int, multiplicity: int, last: LastMicroBatch) -> list[MicroBatch]:
    """Return all rows in micro-batches of ``size`` examples; none for an empty batch."""
    rows, step = x.shape[0], size * multiplicity

    def made(x: Tensor, y: Tensor) -> MicroBatch:
        examples = x.shape[0] // multiplicity
        match last:
            case "shorter":
                return MicroBatch(x, y, examples)
            case "padded":
                return MicroBatch(with_padding(x, step), with_padding(y, step), examples)
            case _:
                assert_never(last)

    if 0 < rows <= step:  # without a view of all rows
        return [made(x, y)]
    return [made(x[start : start + step], y[start : start + step]) for start in range(0, rows, step)]


def require_known(last: str, micro_batch_size: int | None) -> None:
    """Raise InvalidInput for an unknown `LastMicroBatch`, and for "padded" without a micro-batch size."""
    if last not in get_args(LastMicroBatch):
        raise InvalidInput(f"last_micro_batch is {last!r}, but must be one of {', '.join(get_args(LastMicroBatch))}")
    if last == "padded" and micro_batch_size is None:
        raise InvalidInput(
            "last_micro_batch is padded, but there is no micro_batch_size to which it could be; give micro_batch_size"
        )


def require_rows(x: Tensor, y: Tensor, multiplicity: int) -> None:
    """Raise InvalidInput unless x and y are tensors with the same number of rows, a multiple of ``multiplicity``."""
    for name, value in (("x", x), ("y", y)):
        if not isinstance(value, Tensor):
            raise InvalidInput(f"{name} is a {type(value).__name__}, but must be a tensor with one row per example")
    rows, targets = x.shape[0], y.shape[0]
    if rows % multiplicity or rows != targets:
        raise InvalidInput(
            f"x has {count_of(rows, 'row')} and y {targets}, but both need the same multiple of "
            f"{count_of(multiplicity, 'row')}"
        )


def with_padding(values: Tensor, rows: int) -> Tensor:
    """Return ``values`` [b, ...], followed by zeros to length ``rows``."""
    missing = rows - values.shape[0]
    return torch.cat([values, values.new_zeros(missing, *values.shape[1:])]) if missing else values


T = TypeVar("T")


@dataclass(frozen=True)
class Rates:
    """Approximate throughput of a device per second; only the ratios matter.

    gemm: floating-point operations in large matrix products and convolutions. grouped: floating-point operations in
    convolutions with one group per example. elementwise: values in a pass over memory. unfold: values copied into
    patches.
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


def rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Return the `RATES` of factors of this dtype; unlisted kinds of devices get the rates of CUDA."""
    in_units = device.type == "cuda" and dtype == torch.bfloat16
    return RATES["matrix units"] if in_units else RATES.get(device.type, RATES["cuda"])


class Alternative(NamedTuple, Generic[T]):
    """One of several equivalent computations.

    cost: estimated seconds. compute: runs it. trial: if given, what `TimingPlanner` times instead of ``compute``.
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
        except torch.OutOfMemoryError:
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
