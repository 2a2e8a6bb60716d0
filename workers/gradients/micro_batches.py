"""Splits a batch into micro-batches, whose last one may be padded so that all have one shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from dpsweep.accounting.errors import InvalidInput


@dataclass(frozen=True)
class MicroBatch:
    """Rows of x and y, K for each example. examples: number of examples; all rows after them are padding."""

    x: Tensor
    y: Tensor
    examples: int


LastMicroBatch = Literal["shorter", "padded"]
"""Treatment of a last micro-batch with fewer examples than the others."""


def micro_batches(x: Tensor, y: Tensor, size: int, multiplicity: int, last: LastMicroBatch) -> list[MicroBatch]:
    """Return the rows in micro-batches of ``size`` examples; every row is in one of them, and an empty batch has
    none.
    """
    rows, step, make = x.shape[0], size * multiplicity, _LAST[last]
    if 0 < rows <= step:  # without a view of all rows
        return [make(x, y, size, multiplicity)]
    return [
        make(x[start : start + step], y[start : start + step], size, multiplicity) for start in range(0, rows, step)
    ]


def require_known(last: str, micro_batch_size: int | None) -> None:
    """Raise InvalidInput for an unknown `LastMicroBatch`, and for "padded" without a micro-batch size."""
    if last not in _LAST:
        raise InvalidInput(f"last_micro_batch is {last!r}, but must be one of {', '.join(_LAST)}")
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
        raise InvalidInput(f"x has {rows} rows and y {targets}, but both need the same multiple of {multiplicity} rows")


def _shorter(x: Tensor, y: Tensor, size: int, multiplicity: int) -> MicroBatch:
    return MicroBatch(x, y, x.shape[0] // multiplicity)


def _padded(x: Tensor, y: Tensor, size: int, multiplicity: int) -> MicroBatch:
    """Return the micro-batch, padded with zeros to ``size`` examples."""
    rows = size * multiplicity
    return MicroBatch(with_padding(x, rows), with_padding(y, rows), len(x) // multiplicity)


_LAST: Final[Mapping[str, Callable[[Tensor, Tensor, int, int], MicroBatch]]] = {"shorter": _shorter, "padded": _padded}


def with_padding(values: Tensor, rows: int) -> Tensor:
    """Return ``values`` [b, ...], followed by zeros to length ``rows``."""
    missing = rows - values.shape[0]
    return torch.cat([values, values.new_zeros(missing, *values.shape[1:])]) if missing else values
