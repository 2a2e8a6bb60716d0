"""A small U-Net for segmentation."""

from __future__ import annotations

import torch
from pydantic import PositiveInt
from torch import Tensor, nn

from dpsweep.accounting.errors import InvalidInput
from dpsweep.workers.models.convolutional import require_image


def unet(
    feature_shape: tuple[int, ...],
    num_classes: int,
    width: PositiveInt = 16,
    depth: PositiveInt = 2,
    groups: PositiveInt = 4,
) -> nn.Module:
    """Return a U-Net (Ronneberger et al. 2015) with ``depth`` downsampling levels and group normalisation.

    Outputs a logit for each class at every pixel. The first level has ``width`` channels, each next one twice as many.
    """
    channels, height, side = require_image("unet", feature_shape)
    if height % 2**depth or side % 2**depth:
        raise InvalidInput(
            f"unet of depth {depth} halves pictures {depth} times, but they have {height} x {side} pixels; choose a "
            f"`size` that {2**depth} divides, or a smaller depth"
        )
    if width % groups:
        raise InvalidInput(f"width of unet is {width}, which {groups} groups do not divide; choose another")
    return UNet(channels, num_classes, width, depth, groups)


class UNet(nn.Module):
    """Pictures [b, channels, h, w] -> logits [b, classes, h, w]."""

    def __init__(self, channels: int, classes: int, width: int, depth: int, groups: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.down = nn.ModuleList(
            _double(inputs, outputs, groups) for inputs, outputs in zip([channels, *widths], widths, strict=False)
        )
        self.pool = nn.MaxPool2d(2)
        pairs = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.widen = nn.ModuleList(nn.ConvTranspose2d(below, above, 2, stride=2) for below, above in pairs)
        self.up = nn.ModuleList(_double(below, above, groups) for below, above in pairs)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        levels = [self.down[0](x)]
        for block in list(self.down)[1:]:
            levels.append(block(self.pool(levels[-1])))
        found = levels.pop()
        for widen, block in zip(self.widen, self.up, strict=True):
            found = block(torch.cat([levels.pop(), widen(found)], dim=1))
        logits: Tensor = self.head(found)
        return logits


def _double(inputs: int, outputs: int, groups: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1),
        nn.GroupNorm(groups, outputs),
        nn.ReLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3, padding=1),
        nn.GroupNorm(groups, outputs),
        nn.ReLU(inplace=True),
    )
