"""Residual networks with group normalisation, which, unlike batch normalisation, does not mix examples."""

from __future__ import annotations

from pydantic import PositiveInt
from torch import Tensor, nn

from dpsweep.accounting.errors import InvalidInput
from dpsweep.workers.models.convolutional import require_image
from dpsweep.workers.models.extra_layers import WeightStandardizedConv2d, truncated_variance_scaling_
from dpsweep.workers.models.pretrained import load_pretrained


class BasicBlock(nn.Module):
    """conv - norm - relu - conv - norm, plus the input, or its 1 x 1 convolution if shapes change (He et al. 2016)."""

    def __init__(self, inputs: int, outputs: int, stride: int, groups: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
            nn.GroupNorm(groups, outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.GroupNorm(groups, outputs),
        )
        self.skip: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.skip = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.GroupNorm(groups, outputs)
            )
        self.activation = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.activation(self.residual(x) + self.skip(x))
        return out


def resnet20_gn(
    feature_shape: tuple[int, ...], num_classes: int, groups: PositiveInt = 16, initial_weights: str | None = None
) -> nn.Module:
    """Return ResNet20 for small images (He et al. 2016, Sec. 4.2) with group normalisation (Yu et al. 2023, Sec. 4).

    `initial_weights`: a file with pre-trained weights (``torch.save`` of a state dict); all layers but the last must
    fit.
    """
    channels, _, _ = require_image("resnet20_gn", feature_shape)
    layers: list[nn.Module] = [
        nn.Conv2d(channels, 16, 3, padding=1, bias=False),
        nn.GroupNorm(_groups(groups, 16), 16),
        nn.ReLU(),
    ]
    inputs = 16
    for width, first_stride in ((16, 1), (32, 2), (64, 2)):
        for stride in (first_stride, 1, 1):
            layers.append(BasicBlock(inputs, width, stride, groups))
            inputs = width
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, num_classes))
    if initial_weights is not None:
        load_pretrained(model, initial_weights, [str(len(model) - 1)])
    return model


class PreActivationBlock(nn.Module):
    """(relu - norm - conv) twice, plus the input, which passes through relu - norm - conv in a stage's first block."""

    def __init__(self, inputs: int, outputs: int, stride: int, groups: int, transform_skip: bool) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            *_activated_convolution(inputs, outputs, 3, stride, groups),
            *_activated_convolution(outputs, outputs, 3, 1, groups),
        )
        self.skip: nn.Module = nn.Identity()
        if transform_skip:
            self.skip = nn.Sequential(*_activated_convolution(inputs, outputs, 1, stride, groups))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.residual(x) + self.skip(x)
        return out


def _activated_convolution(inputs: int, outputs: int, kernel: int, stride: int, groups: int) -> list[nn.Module]:
    return [
        nn.ReLU(),
        nn.GroupNorm(groups, inputs),
        WeightStandardizedConv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2),
    ]


def wide_resnet(
    feature_shape: tuple[int, ...], num_classes: int, depth: int = 16, width: PositiveInt = 4, groups: PositiveInt = 16
) -> nn.Module:
    """Make a wide ResNet with group normalisation and weight standardisation; by default WRN-16-4 of De et al.
    (2022).
    """
    channels, _, _ = require_image("wide_resnet", feature_shape)
    blocks, rest = divmod(depth - 4, 6)
    if blocks < 1 or rest:
        raise InvalidInput(f"depth is {depth}, but a wide ResNet has 6 k + 4 layers; choose 10, 16, 22, 28, ...")
    layers: list[nn.Module] = [WeightStandardizedConv2d(channels, 16, 3, padding=1)]
    inputs = 16
    for outputs, first_stride in ((16 * width, 1), (32 * width, 2), (64 * width, 2)):
        for block in range(blocks):
            stride = first_stride if block == 0 else 1
            layers.append(PreActivationBlock(inputs, outputs, stride, _groups(groups, inputs), block == 0))
            inputs = outputs
    head = nn.Linear(inputs, num_classes)
    truncated_variance_scaling_(head.weight)
    nn.init.zeros_(head.bias)
    return nn.Sequential(
        *layers, nn.ReLU(), nn.GroupNorm(_groups(groups, inputs), inputs), nn.AdaptiveAvgPool2d(1), nn.Flatten(), head
    )


def wrn16_4(feature_shape: tuple[int, ...], num_classes: int, groups: PositiveInt = 16) -> nn.Module:
    """Return WRN-16-4 of De et al. (2022), which Yu et al. (2023) use on CIFAR-10."""
    return wide_resnet(feature_shape, num_classes, groups=groups)


def _groups(groups: int, channels: int) -> int:
    if channels % groups:
        raise InvalidInput(
            f"groups is {groups}, but must divide the {channels} channels; choose a power of two up to 16"
        )
    return groups
