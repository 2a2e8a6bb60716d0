"""Private ranges of the numbers of a table, by noisy counts, and the scale that they give.

Guarantee: `private_ranges` is an adaptive composition of `ROUNDS` Gaussian mechanisms. Each round counts, for each of d
columns, the rows in disjoint intervals, which depend on earlier noisy counts alone. A row adds 1 to at most one count
of each column, so that a round has L2 sensitivity sqrt(d) under add/remove and zero-out adjacency. Each count gets
independent noise N(0, s^2 d R) with R rounds and noise multiplier s. A round is (1 / (s sqrt(R)))-GDP, and all rounds
together are (1 / s)-GDP (Dong, Roth and Su 2022, Corollary 3.3), like one Gaussian mechanism with multiplier s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Final

import torch
from torch import Tensor

from dpsweep.workers.noise.gaussian_sources import NoiseSource

Blocks = Callable[[], Iterator[Tensor]]
"""All rows, block by block: float [b, d]."""
ROUNDS: Final = 3
"""One over all magnitudes, then two within the range that the one before has found."""
_INTERVALS: Final = 32
"""Intervals of equal length in a range, beside one below and one above."""
_SMALLEST, _LARGEST, _BASE = -12, 63, 4.0
"""Magnitudes are powers of 4 from 6e-8 to 8e37; smaller numbers count as 0."""
_FALSE_ALARM: Final = 0.01
"""Probability that noise alone passes for rows in some interval of the first round."""
_CEILING: Final = 3.0
"""Largest scaled number; it is reached at e^2 = 7.4 times the half-width of a range."""
_LEAST_DEVIATION: Final = 0.25


def magnitudes() -> Tensor:
    """Return ends of the intervals of the first round, float64, increasing, symmetric about 0."""
    powers = torch.tensor([_BASE**power for power in range(_SMALLEST, _LARGEST + 1)], dtype=torch.float64)
    return torch.cat((-powers.flip(0), powers))


def counts_between(blocks: Blocks, edges: Tensor) -> Tensor:
    """Return [d, e + 1] float64: rows below the first of the ends [d, e], between each two, and from the last on.

    Sensitivity: sqrt(d) in L2. A row that is not finite in some column counts nowhere.
    """
    width, bins = len(edges), edges.shape[1] + 1
    total = torch.zeros(width * bins, dtype=torch.float64)
    offsets = torch.arange(width) * bins
    for block in blocks():
        rows = block.double()
        rows = rows[rows.isfinite().all(1)]
        places = torch.searchsorted(edges, rows.T.contiguous(), right=True).T + offsets
        total += torch.bincount(places.flatten(), minlength=len(total))
    return total.reshape(width, bins)


def private_ranges(
    blocks: Blocks, width: int, noise: NoiseSource, noise_multiplier: float, outside: float
) -> dict[str, Tensor]:
    """Return low and high end, mean and deviation of each of ``width`` columns, float32 [width], by noisy counts.

    outside: share of the rows beyond each end. Mean and deviation describe the scaled numbers. Noise that hides the
    rows makes ranges too wide or too narrow, never unsafe.
    """
    std = noise_multiplier * math.sqrt(ROUNDS)

    def released(edges: Tensor) -> Tensor:
        counts = counts_between(blocks, edges)
        noisy: Tensor = noise.added((counts / width**0.5).flatten(), std).reshape(counts.shape) * width**0.5
        return noisy

    error = std * width**0.5
    edges = magnitudes().expand(width, -1).contiguous()
    low, high = _where_rows_are(released(edges), edges, error)
    counts = torch.zeros(0)
    for _ in range(ROUNDS - 1):
        edges = _grid(low, high)
        counts = released(edges)
        low, high = _between(counts, edges, outside, error)
    middles = torch.cat((edges[:, :1], (edges[:, 1:] + edges[:, :-1]) / 2, edges[:, -1:]), 1)
    scaled, total = _soft(middles.T, low, high).T, counts.sum(1).clamp(min=1.0)
    mean = ((counts * scaled).sum(1) / total).clamp(-1.0, 1.0)
    variance = (counts * (scaled - mean[:, None]) ** 2).sum(1) / total
    deviation = variance.clamp(_LEAST_DEVIATION**2, 1.0).sqrt()
    found = {"low": low, "high": high, "mean": mean, "deviation": deviation}
    return {name: values.float() for name, values in found.items()}


def _where_rows_are(counts: Tensor, edges: Tensor, error: float) -> tuple[Tensor, Tensor]:
    """Ends of the intervals, first to last, that surely hold rows; of the fullest one where none does."""
    inner = counts[:, 1:-1]
    least = error * math.sqrt(2.0 * math.log(inner.numel() / _FALSE_ALARM))  # Pr[N(0, 1) > t] <= exp(-t^2 / 2)
    sure = (inner > least) | (inner == inner.amax(1, keepdim=True))
    places = torch.arange(inner.shape[1]).expand_as(inner)
    first = torch.where(sure, places, inner.shape[1]).amin(1, keepdim=True)
    last = torch.where(sure, places, -1).amax(1, keepdim=True)
    return edges.gather(1, first)[:, 0], edges.gather(1, last + 1)[:, 0]


def _grid(low: Tensor, high: Tensor) -> Tensor:
    """[d, _INTERVALS + 1]: equally spaced ends from low to high."""
    steps = torch.linspace(0.0, 1.0, _INTERVALS + 1, dtype=torch.float64)
    return low[:, None] + (high - low)[:, None] * steps


def _between(counts: Tensor, edges: Tensor, outside: float, error: float) -> tuple[Tensor, Tensor]:
    """Ends of the intervals beyond which the share ``outside`` of the rows lies; the whole range if they cross.

    A sum of k counts has a noise of error sqrt(k), which the share is raised by. A range that is a bit too narrow does
    less harm than one that noise has widened, because the scale goes on beyond its ends.
    """
    total = counts.sum(1, keepdim=True).clamp(min=0.0)
    added = error * torch.arange(1, counts.shape[1] + 1, dtype=torch.float64).sqrt()

    def first(values: Tensor) -> Tensor:
        reached = values.cumsum(1) > outside * total + added
        places = torch.where(reached, torch.arange(values.shape[1]), values.shape[1])
        return places.amin(1, keepdim=True)

    last = edges.shape[1] - 1
    from_low, from_high = first(counts), first(counts.flip(1))
    low, high = (from_low - 1).clamp(0, last), (last + 1 - from_high).clamp(0, last)
    is_usable = (low < high) & (from_low < counts.shape[1]) & (from_high < counts.shape[1])
    low, high = torch.where(is_usable, low, 0), torch.where(is_usable, high, last)
    return edges.gather(1, low)[:, 0], edges.gather(1, high)[:, 0]


def _soft(values: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Values [..., d] on a scale that is linear from -1 at ``low`` to 1 at ``high``, and logarithmic beyond."""
    middle, half = (low + high) / 2.0, (high - low) / 2.0
    place = (values - middle) / half
    size = place.abs()
    return place.sign() * torch.where(size <= 1.0, size, 1.0 + size.clamp(min=1.0).log()).clamp(max=_CEILING)


def scaled_by(state: dict[str, Tensor], rows: Tensor) -> Tensor:
    """Return the rows [b, ...] with the leading columns on the scale of `private_ranges`, changed in place."""
    low, high, mean, deviation = (state[name].double() for name in ("low", "high", "mean", "deviation"))
    width = len(low)
    rows[:, :width] = ((_soft(rows[:, :width].double(), low, high) - mean) / deviation).to(rows.dtype)
    return rows
