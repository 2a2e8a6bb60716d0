"""Micro-batches of a batch, whose last one may be padded so that all have one shape."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

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
"""Start of the kernels of a pass: each by itself, or by a recorded graph where device and pass allow it."""


def micro_batches(x: Tensor, y: Tensor, size: int, multiplicity: int, last: LastMicroBatch) -> list[MicroBatch]:
    """Return all rows in micro-batches of ``size`` examples; none for an empty batch."""
    rows, step = x.shape[0], size * multiplicity

    def made(x: Tensor, y: Tensor) -> MicroBatch:
        length = step if last == "padded" else len(x)
        return MicroBatch(with_padding(x, length), with_padding(y, length), len(x) // multiplicity)

    if 0 < rows <= step:  # without a view of all rows
        return [made(x, y)]
    return [made(x[start : start + step], y[start : start + step]) for start in range(0, rows, step)]


def require_last(last: str, micro_batch_size: int | None) -> None:
    """Raise InvalidInput for an unknown `LastMicroBatch`, and for "padded" without a micro-batch size."""
    if last not in get_args(LastMicroBatch):
        raise InvalidInput(f"last_micro_batch is {last!r}, but must be one of {', '.join(get_args(LastMicroBatch))}")
    if last == "padded" and micro_batch_size is None:
        raise InvalidInput(
            "last_micro_batch is padded, but there is no micro_batch_size to which it could be; give micro_batch_size"
        )


def require_equal_rows(x: Tensor, y: Tensor, multiplicity: int) -> None:
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
