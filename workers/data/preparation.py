"""Checks that a preparation of features transforms every example by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from dpsweep.accounting.errors import InvalidInput
from dpsweep.workers.own_code.imports import blamed_on

_TRIED_EXAMPLES: Final = 8
"""Number of examples on which a preparation is tried."""
_ROUNDING: Final = 1e-4
"""Tolerated difference between a feature prepared alone and in a batch, relative to the feature's largest value."""


def require_one_by_one(source: str, prepare: Callable[[Tensor], Tensor], features: Tensor) -> None:
    """Raise InvalidInput when a preparation fails, changes its input, or mixes examples of a batch.

    Clipping bounds the influence of an example only through its own gradient, so examples must not be mixed. The
    preparation is tried on a few examples spread over all of ``features``, because neighbouring ones can be alike.
    """
    what = f"the preparation of {source!r}"
    count = min(_TRIED_EXAMPLES, len(features))
    rows = features[torch.arange(count) * (len(features) - 1) // max(count - 1, 1)]
    given = rows.clone()
    with blamed_on(source, "the preparation of"), torch.no_grad():
        together, alone = prepare(given), [prepare(rows[at : at + 1].clone()) for at in range(count)]
    for prepared, examples in ((together, count), *((row, 1) for row in alone)):
        _require_features(what, prepared, examples)
    if not torch.equal(_bytes(given), _bytes(rows)):
        raise InvalidInput(f"{what} changes the features that it is given; have it return others")
    if any(row.shape[1:] != together.shape[1:] for row in alone) or not _agree(together, torch.cat(alone)):
        raise InvalidInput(
            f"{what} gives an example other features alone than beside others; it may neither mix examples nor draw "
            "at random: use fixed numbers, such as a published mean, not those of the batch"
        )


def _require_features(what: str, prepared: object, examples: int) -> None:
    if not isinstance(prepared, Tensor):
        raise InvalidInput(f"{what} returns {type(prepared).__name__}, but must return a tensor")
    if prepared.ndim == 0 or len(prepared) != examples:
        raise InvalidInput(
            f"{what} returns shape {tuple(prepared.shape)} for a batch of {examples}, but must return [{examples}, ...]"
        )
    if prepared.dtype not in (torch.float32, torch.int64):
        raise InvalidInput(
            f"{what} returns {prepared.dtype}, but must return float32, or int64 for tokens; end it in .float()"
        )


def _agree(one: Tensor, other: Tensor) -> bool:
    one, other = one.double(), other.double()
    scale = one.nan_to_num(0.0, 0.0, 0.0).abs().amax(0)
    equal = torch.isclose(one, other, rtol=_ROUNDING, atol=0.0, equal_nan=True)
    return bool((equal | ((one - other).abs() <= _ROUNDING * scale)).all())


def _bytes(features: Tensor) -> Tensor:
    return features.contiguous().view(torch.uint8)
