"""Pictures as scattering coefficients, the handcrafted features of Tramer and Boneh (2021), for scattering-*.yaml.

The transform is that of Oyallon and Mallat (2015): moduli of Morlet wavelets at two scales and eight angles, their
moduli again, averaged by a Gaussian. It is fixed, and every picture is normalised by its own mean and variance, so that
features of one example depend on no other and cost no privacy.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dpsweep.workers.data import Source, load_source, make_split
from dpsweep.workers.spec import DataSpec

SCALES, ANGLES, PAD, STRIDE, GROUPS = 2, 8, 4, 4, 27
CHANNELS = 1 + SCALES * ANGLES + ANGLES**2 * SCALES * (SCALES - 1) // 2


def mnist() -> Source:
    """The pictures as rows of 81 * 7 * 7 numbers; groups are the digits."""
    return _scattered("mnist")


def fashion_mnist() -> Source:
    """The same of Fashion-MNIST; groups are the classes."""
    return _scattered("fashion_mnist")


def _scattered(name: str, examples_at_once: int = 250) -> Source:
    pictures = load_source(DataSpec(name))
    train, test = (
        make_split(
            torch.cat([features(rows) for rows in split.features.split(examples_at_once)]),
            split.labels,
            split.groups,
            example_ids=split.example_ids,
        )
        for split in (pictures.train, pictures.test)
    )
    return Source(f"scattered {name}", train, test, pictures.group_names, pictures.class_names)


def features(pictures: Tensor) -> Tensor:
    """Pictures [n, 1, 28, 28] as bytes -> [n, 81 * 7 * 7], of mean 0 and variance 1 in 27 groups of channels."""
    found = scattering(pictures[:, 0].float() / 255.0)
    grouped = found.reshape(len(found), GROUPS, -1)
    spread = grouped.var(2, keepdim=True, unbiased=False)
    return ((grouped - grouped.mean(2, keepdim=True)) / (spread + 1e-5).sqrt()).flatten(1)


def scattering(pictures: Tensor) -> Tensor:
    """Pictures [n, s, s] -> coefficients of orders 0 to 2, [n, 81, s / 4, s / 4]."""
    padded = torch.nn.functional.pad(pictures[:, None], (PAD,) * 4, mode="reflect")[:, 0]
    size = padded.shape[-1]
    wavelets = torch.stack([_wavelet(size, scale, angle) for scale in range(SCALES) for angle in range(ANGLES)])
    mean = _averages(size)

    def averaged(maps: Tensor) -> Tensor:
        return mean @ maps @ mean.T

    def moduli(maps: Tensor, filters: Tensor) -> Tensor:
        """[n, c, s, s] and [f, s, s] -> [n, c, f, s, s]."""
        return torch.fft.ifft2(torch.fft.fft2(maps)[:, :, None] * filters).abs()

    first = moduli(padded[:, None], wavelets)[:, 0]
    second = moduli(first[:, :ANGLES], wavelets[ANGLES:]).flatten(1, 2)
    return torch.cat([averaged(padded[:, None]), averaged(first), averaged(second)], 1)


def _wavelet(size: int, scale: int, angle: int) -> Tensor:
    """Fourier transform [size, size] of a Morlet wavelet: a plane wave of frequency 3 pi / 4 in an oval Gaussian."""
    spread, frequency = 0.8 * 2.0**scale, 0.75 * math.pi / 2.0**scale
    turn = math.pi * angle / ANGLES
    at = (torch.arange(size, dtype=torch.float64) + size // 2) % size - size // 2
    y, x = torch.meshgrid(at, at, indexing="ij")
    along = math.cos(turn) * x + math.sin(turn) * y
    across = (math.cos(turn) * y - math.sin(turn) * x) * (4.0 / ANGLES)
    envelope = torch.exp(-(along**2 + across**2) / (2.0 * spread**2))
    wave = envelope * torch.exp(1j * frequency * along)
    wave = wave - envelope * (wave.sum() / envelope.sum())  # zero mean
    return torch.fft.fft2(wave * (4.0 / ANGLES) / (2.0 * math.pi * spread**2)).to(torch.complex64)


def _averages(size: int) -> Tensor:
    """[(size - 2 PAD) / STRIDE, size]: Gaussian averages around every fourth pixel of one axis, without the padding."""
    spread = 0.8 * 2.0 ** (SCALES - 1)
    centres = torch.arange(PAD, size - PAD, STRIDE, dtype=torch.float64)[:, None]
    apart = torch.arange(size, dtype=torch.float64) - centres
    weights = torch.exp(-(apart**2) / (2.0 * spread**2))
    return (weights / weights.sum(1, keepdim=True)).float()
