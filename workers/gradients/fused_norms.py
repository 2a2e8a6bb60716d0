"""Triton kernels for CUDA: ghost norms of two Gram matrices, and scaled factors split for matrix units.

Each replaces a dozen launches of torch's operations, which take the host longer than the device. Import this module
only where `dpsweep.workers.machine.triton_support.has_triton`.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Compiled functions have no annotations: Triton would look the names up in their code.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE, _VALUES = 2048, 1024
"""Entries of Gram matrices that one program reads at once, and values that one program splits."""


@triton.jit(do_not_specialize=["length", "entries"])
def _ghost_norm(activations, grads, out, length, entries, cancellation, coherent, share, large, TILE: tl.constexpr):
    example = tl.program_id(0).to(tl.int64)
    first, second = activations + example * entries, grads + example * entries
    places = tl.arange(0, TILE)
    total, absolute = tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32)
    for start in range(0, entries, TILE):
        inside = start + places < entries
        term = tl.load(first + start + places, mask=inside, other=0.0)
        term *= tl.load(second + start + places, mask=inside, other=0.0)
        total += term
        absolute += tl.abs(term)
    squares, widest = tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32)
    for start in range(0, length, TILE):
        at, inside = (start + places) * (length + 1), start + places < length
        of_activation = tl.load(first + at, mask=inside, other=0.0)
        of_grad = tl.load(second + at, mask=inside, other=0.0)
        squares += tl.maximum(of_activation * of_grad, 0.0)
        widest = tl.maximum(widest, tl.maximum(of_activation, of_grad))
    norm_sq, most = tl.sum(total), tl.max(widest)
    norm_sq = tl.where(norm_sq < 0.0, 0.0, norm_sq)
    lost = tl.maximum(cancellation * tl.sum(squares), coherent * tl.sum(absolute))
    lost += share * tl.where(most > large, most, 0.0)
    tl.store(out + example, tl.where(norm_sq < lost, float("nan"), norm_sq))


def ghost_norms(
    activations: Tensor, grads: Tensor, cancellation: float, coherent: float, share: float, large: float
) -> Tensor:
    """Return [B]: the squared norms of `dpsweep.workers.gradients.factors.gram_norm_sq`, NaN for inaccurate ones.

    activations, grads: float32 [B, T, T], contiguous.
    """
    out, length = torch.empty(len(grads), device=grads.device), grads.shape[1]
    limits = cancellation, coherent, share, large
    with torch.cuda.device_of(out):
        _ghost_norm[len(grads),](activations, grads, out, length, length**2, *limits, TILE=_TILE, num_warps=8)
    return out


@triton.jit(do_not_specialize=["count", "per_example"])
def _scale_and_split(values, weights, upper, lower, count, per_example, VALUES: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * VALUES + tl.arange(0, VALUES)
    inside = at < count
    scaled = tl.load(values + at, mask=inside, other=0.0).to(tl.float32)
    scaled *= tl.load(weights + at // per_example, mask=inside, other=0.0)
    high = scaled.to(tl.bfloat16)
    tl.store(upper + at, high, mask=inside)
    tl.store(lower + at, (scaled - high.to(tl.float32)).to(tl.bfloat16), mask=inside)


def scaled_halves(values: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return two bfloat16 tensors whose sum is values [B, ...] times weights [B], up to 2^-17 of each value."""
    values = values.contiguous()
    upper, lower = (torch.empty_like(values, dtype=torch.bfloat16) for _ in range(2))
    count = values.numel()
    if count:
        with torch.cuda.device_of(values):
            _scale_and_split[triton.cdiv(count, _VALUES),](
                values, weights.float().contiguous(), upper, lower, count, count // len(weights), VALUES=_VALUES
            )
    return upper, lower
