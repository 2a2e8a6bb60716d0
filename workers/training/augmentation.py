"""Random image augmentation with multiplicity K: an example's gradient is the mean over its K augmented copies.

The mean is taken before clipping, so augmentation changes neither sensitivity nor accounting (De et al., 2022,
Sec. 3.3).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from dpsweep.accounting.errors import InvalidInput, keep_whole
from dpsweep.accounting.registry import build
from dpsweep.workers.spec import Component


@dataclass(frozen=True)
class FlipAndCrop:
    """Random horizontal flip, and a random crop after reflection padding of ``padding`` pixels on each side."""

    multiplicity: int = 1
    """K: copies per example."""
    padding: int = 4

    def __post_init__(self) -> None:
        keep_whole(self, "multiplicity", "multiplicity of flip_and_crop", at_least=1)
        keep_whole(self, "padding", "padding of flip_and_crop", at_least=0)

    def __call__(self, features: Tensor, generator: torch.Generator) -> Tensor:
        """[b, ...] -> [b * K, ...]; the copies of one example are consecutive. ``generator`` is on the CPU."""
        if features.ndim != 4:
            raise InvalidInput(f"flip_and_crop needs images [b, channels, height, width], not {tuple(features.shape)}")
        if min(features.shape[2:]) <= self.padding:
            raise InvalidInput(
                f"padding of flip_and_crop is {self.padding}, but must be less than the sides of a picture, which has "
                f"{features.shape[2]} x {features.shape[3]} pixels"
            )
        copies = features.repeat_interleave(self.multiplicity, dim=0)
        rows, _, height, width = copies.shape
        padded = functional.pad(copies, (self.padding,) * 4, mode="reflect") if rows else copies
        with torch.device("cpu"):  # where the generator draws, whatever torch's default device is
            top, left = (torch.randint(0, 2 * self.padding + 1, (rows, 1), generator=generator) for _ in range(2))
            flipped = torch.rand(rows, 1, generator=generator) < 0.5
            ys = top + torch.arange(height)
            xs = left + torch.where(flipped, torch.arange(width - 1, -1, -1), torch.arange(width))
            row = torch.arange(rows)[:, None, None]
        ys, xs, row = (index.to(features.device) for index in (ys[:, :, None], xs[:, None, :], row))
        return padded[row, :, ys, xs].permute(0, 3, 1, 2).contiguous()


def augmented(augmentation: FlipAndCrop, x: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return augmented copies [b * K, ...] of prepared features and of their labels; masks [b, h, w] are transformed
    alike.

    Raises: InvalidInput when masks do not have the size of the pictures.
    """
    if y.ndim < 3:
        return augmentation(x, generator), y.repeat_interleave(augmentation.multiplicity, 0)
    if y.shape[1:] != x.shape[2:]:
        raise InvalidInput(
            f"labels of pixels have the size {tuple(y.shape[1:])}, but pictures {tuple(x.shape[2:])}; augmentation "
            "moves both alike: store them in one size, or leave out `augmentation`"
        )
    together = augmentation(torch.cat((x, y.to(x.dtype)[:, None]), 1), generator)
    return together[:, :-1].contiguous(), together[:, -1].round().to(y.dtype)


AUGMENTATIONS: Final[Mapping[str, Callable[..., FlipAndCrop]]] = {"flip_and_crop": FlipAndCrop}


def make_augmentation(component: Component) -> FlipAndCrop:
    """Return the augmentation that a trial names. Raises: InvalidInput for unknown names, keys and bad values."""
    return build(AUGMENTATIONS, component.name, component.params, "augmentation")
