"""ChaCha20 and keyed Gaussian noise as Triton kernels, for CUDA devices: one launch in place of hundreds.

Import this module only where `dpsweep.workers.noise.chacha` has found Triton. They give the words of RFC 8439 and
the noise of `dpsweep.workers.noise.gaussian_sources`, up to the last bits of float64 functions.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Compiled functions have no annotations: Triton would look the names up in their code.

from __future__ import annotations

import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCKS = 128
"""Blocks of the keystream that one program computes, one per thread."""
_SECRET = ("k0", "k1", "k2", "k3", "k4", "k5", "k6", "k7", "n0", "n1", "n2", "first", "count", "scale", "grid")
"""Arguments whose values do not change the compiled code."""


@triton.jit
def _rotated(x, bits: tl.constexpr):
    return (x << bits) | (x >> (32 - bits))


@triton.jit
def _quarter(a, b, c, d):
    """The quarter round of RFC 8439, section 2.1, on unsigned 32-bit words; sums wrap around."""
    a += b
    d = _rotated(d ^ a, 16)
    c += d
    b = _rotated(b ^ c, 12)
    a += b
    d = _rotated(d ^ a, 8)
    c += d
    b = _rotated(b ^ c, 7)
    return a, b, c, d


@triton.jit
def _filled(value, like):
    return tl.zeros_like(like) + value.to(tl.uint32)


@triton.jit
def _joined(low, high):
    """Two 32-bit words -> one of 64 bits, little-endian."""
    return low.to(tl.uint64) | (high.to(tl.uint64) << 32)


@triton.jit
def _block(k0, k1, k2, k3, k4, k5, k6, k7, n0, n1, n2, counter):
    """The eight 64-bit words of each block of the keystream: RFC 8439, section 2.3. counter: uint32 [blocks]."""
    zero = tl.zeros_like(counter)
    c0, c1, c2, c3 = zero + 0x61707865, zero + 0x3320646E, zero + 0x79622D32, zero + 0x6B206574
    s4, s5, s6, s7 = _filled(k0, zero), _filled(k1, zero), _filled(k2, zero), _filled(k3, zero)
    s8, s9, s10, s11 = _filled(k4, zero), _filled(k5, zero), _filled(k6, zero), _filled(k7, zero)
    s13, s14, s15 = _filled(n0, zero), _filled(n1, zero), _filled(n2, zero)
    x0, x1, x2, x3, x4, x5, x6, x7 = c0, c1, c2, c3, s4, s5, s6, s7
    x8, x9, x10, x11, x12, x13, x14, x15 = s8, s9, s10, s11, counter, s13, s14, s15
    for _ in range(10):
        x0, x4, x8, x12 = _quarter(x0, x4, x8, x12)
        x1, x5, x9, x13 = _quarter(x1, x5, x9, x13)
        x2, x6, x10, x14 = _quarter(x2, x6, x10, x14)
        x3, x7, x11, x15 = _quarter(x3, x7, x11, x15)
        x0, x5, x10, x15 = _quarter(x0, x5, x10, x15)
        x1, x6, x11, x12 = _quarter(x1, x6, x11, x12)
        x2, x7, x8, x13 = _quarter(x2, x7, x8, x13)
        x3, x4, x9, x14 = _quarter(x3, x4, x9, x14)
    return (
        _joined(x0 + c0, x1 + c1),
        _joined(x2 + c2, x3 + c3),
        _joined(x4 + s4, x5 + s5),
        _joined(x6 + s6, x7 + s7),
        _joined(x8 + s8, x9 + s9),
        _joined(x10 + s10, x11 + s11),
        _joined(x12 + counter, x13 + s13),
        _joined(x14 + s14, x15 + s15),
    )


@triton.jit(do_not_specialize=_SECRET)
def _write_words(out, k0, k1, k2, k3, k4, k5, k6, k7, n0, n1, n2, first, count, BLOCKS: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    counter = (place + first).to(tl.uint32)
    w0, w1, w2, w3, w4, w5, w6, w7 = _block(k0, k1, k2, k3, k4, k5, k6, k7, n0, n1, n2, counter)
    at, inside = out + place * 8, place < count
    tl.store(at + 0, w0.to(tl.int64, bitcast=True), mask=inside)
    tl.store(at + 1, w1.to(tl.int64, bitcast=True), mask=inside)
    tl.store(at + 2, w2.to(tl.int64, bitcast=True), mask=inside)
    tl.store(at + 3, w3.to(tl.int64, bitcast=True), mask=inside)
    tl.store(at + 4, w4.to(tl.int64, bitcast=True), mask=inside)
    tl.store(at + 5, w5.to(tl.int64, bitcast=True), mask=inside)
    tl.store(at + 6, w6.to(tl.int64, bitcast=True), mask=inside)
    tl.store(at + 7, w7.to(tl.int64, bitcast=True), mask=inside)


@triton.jit
def _uniform(word):
    """Return float64 in (0, 1), odd multiples of 2^-54, from the upper 53 bits."""
    return ((word >> 11).to(tl.int64).to(tl.float64) + 0.5) * 1.1102230246251565e-16


@triton.jit
def _normals(first, second):
    """Two independent standard normal values from two uniform words, by the Box-Muller transform."""
    radius = tl.sqrt(tl.log(_uniform(first)) * -2.0)
    angle = _uniform(second) * 6.283185307179586
    return radius * tl.cos(angle), radius * tl.sin(angle)


@triton.jit
def _add(values, place, count, draw, scale, grid):
    """Add ``draw * scale`` to the values at ``place``, and round to the nearest multiple of grid, of two to the even
    one. A product with the inverse of grid, a power of two, is exact, and takes a tenth of a division's time."""
    inside = place < count
    noisy = tl.load(values + place, mask=inside, other=0.0).to(tl.float64) + draw * scale
    steps = noisy * (1.0 / grid)  # divides once for all values
    below = tl.floor(steps)
    rest = steps - below
    is_odd = tl.floor(below * 0.5) * 2.0 != below
    steps = tl.where((rest > 0.5) | ((rest == 0.5) & is_odd), below + 1.0, below)
    tl.store(values + place, (steps * grid).to(values.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=_SECRET)
def _add_noise(
    values,
    k0,
    k1,
    k2,
    k3,
    k4,
    k5,
    k6,
    k7,
    n0,
    n1,
    n2,
    first,
    count,
    scale,
    grid,
    DRAWS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    counter = (block + first).to(tl.uint32)
    w0, w1, w2, w3, w4, w5, w6, w7 = _block(k0, k1, k2, k3, k4, k5, k6, k7, n0, n1, n2, counter)
    z0, z1 = _normals(w0, w1)
    z2, z3 = _normals(w2, w3)
    z4, z5 = _normals(w4, w5)
    z6, z7 = _normals(w6, w7)
    scale = scale.to(tl.int64).to(tl.float64, bitcast=True)
    grid = grid.to(tl.int64).to(tl.float64, bitcast=True)
    if DRAWS == 1:
        place = block * 8
        _add(values, place + 0, count, z0, scale, grid)
        _add(values, place + 1, count, z1, scale, grid)
        _add(values, place + 2, count, z2, scale, grid)
        _add(values, place + 3, count, z3, scale, grid)
        _add(values, place + 4, count, z4, scale, grid)
        _add(values, place + 5, count, z5, scale, grid)
        _add(values, place + 6, count, z6, scale, grid)
        _add(values, place + 7, count, z7, scale, grid)
    else:
        place = block * 2
        _add(values, place + 0, count, z0 + z1 + z2 + z3, scale, grid)
        _add(values, place + 1, count, z4 + z5 + z6 + z7, scale, grid)


DRAWS = (1, 4)
"""Numbers of draws whose sum `add_noise` adds to a value."""


def write_words(out: Tensor, key: bytes, nonce: bytes, first: int) -> None:
    """Fill ``out``, int64 [8 blocks], with the blocks of the keystream from ``first`` on."""
    blocks = len(out) // 8
    with torch.cuda.device_of(out):
        _write_words[triton.cdiv(blocks, _BLOCKS),](out, *_secret(key, nonce), first, blocks, BLOCKS=_BLOCKS)


def add_noise(values: Tensor, key: bytes, nonce: bytes, first: int, draws: int, scale: float, grid: float) -> None:
    """Add to each of ``values`` [n] the sum of ``draws`` standard normal draws times ``scale``, and round it to a
    multiple of ``grid``, a power of two, in place. The draws take the blocks of the keystream from ``first`` on, eight
    words each."""
    blocks = -(-len(values) * draws // 8)
    sizes = [int.from_bytes(struct.pack("<d", each), "little", signed=True) for each in (scale, grid)]
    with torch.cuda.device_of(values):
        _add_noise[triton.cdiv(blocks, _BLOCKS),](
            values, *_secret(key, nonce), first, len(values), *sizes, DRAWS=draws, BLOCKS=_BLOCKS
        )


def _secret(key: bytes, nonce: bytes) -> tuple[int, ...]:
    return struct.unpack("<11i", key + nonce)
