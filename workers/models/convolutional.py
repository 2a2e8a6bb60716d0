"""The small convolutional networks of the papers."""

from __future__ import annotations

import torch
from pydantic import FiniteFloat, NonNegativeInt, PositiveInt
from torch import Tensor, nn

from dpsweep.accounting.errors import InvalidInput


def require_image(model: str, feature_shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return the shape as (channels, height, width). Raises: InvalidInput when it has another number of axes."""
    if len(feature_shape) != 3:
        raise InvalidInput(
            f"{model} takes images (channels, height, width), but features have shape {feature_shape}; "
            "choose mlp or logistic for flat features"
        )
    channels, height, width = feature_shape
    return channels, height, width


def flat_size(model: str, trunk: nn.Module, feature_shape: tuple[int, ...], advice: str) -> int:
    """Return the number of output features of ``trunk`` per example. Raises: InvalidInput when the image is too
    small.
    """
    try:
        with torch.no_grad():
            return int(trunk(torch.zeros(1, *feature_shape)).numel())
    except RuntimeError as error:
        raise InvalidInput(f"{model} does not fit images of shape {feature_shape} ({error}); {advice}") from error


def cnn_dpsgdf(
    feature_shape: tuple[int, ...],
    num_classes: int,
    channels: tuple[PositiveInt, PositiveInt] = (20, 50),
    kernel_size: PositiveInt = 5,
    padding: NonNegativeInt = 0,
    hidden: PositiveInt = 500,
) -> nn.Module:
    """Return two convolutions with max-pooling, two linear layers (Xu et al. 2021, Sec. 6.1); small images need
    padding.
    """
    inputs, _, _ = require_image("cnn_dpsgdf", feature_shape)
    trunk = nn.Sequential(
        nn.Conv2d(inputs, channels[0], kernel_size, padding=padding),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(channels[0], channels[1], kernel_size, padding=padding),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
    )
    features = flat_size("cnn_dpsgdf", trunk, feature_shape, "set `padding`, or choose mlp")
    return nn.Sequential(*trunk, nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, num_classes))


class TemperedSigmoid(nn.Module):
    """scale * sigmoid(inverse_temperature * x) - offset (Papernot et al. 2020); (2, 2, 1) is tanh."""

    def __init__(self, scale: float = 2.0, inverse_temperature: float = 2.0, offset: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.inverse_temperature = inverse_temperature
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * torch.sigmoid(self.inverse_temperature * x) - self.offset


def cnn_papernot(
    feature_shape: tuple[int, ...],
    num_classes: int,
    scale: FiniteFloat = 2.0,
    inverse_temperature: FiniteFloat = 2.0,
    offset: FiniteFloat = 1.0,
) -> nn.Module:
    """Return the two-layer CNN for MNIST-sized images of Papernot et al. (2020), with tempered sigmoids.

    Convolutions: 16 filters of 8 x 8 and 32 filters of 4 x 4, both with stride 2 and followed by 2 x 2 max-pooling with
    stride 1. Then 32 hidden units.
    """
    inputs, _, _ = require_image("cnn_papernot", feature_shape)

    def bounded() -> nn.Module:
        return TemperedSigmoid(scale, inverse_temperature, offset)

    trunk = nn.Sequential(
        nn.Conv2d(inputs, 16, 8, stride=2, padding=3),
        bounded(),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, 4, stride=2),
        bounded(),
        nn.MaxPool2d(2, stride=1),
        nn.Flatten(),
    )
    features = flat_size("cnn_papernot", trunk, feature_shape, "choose cnn_dpsgdf with `padding`, or mlp")
    return nn.Sequential(*trunk, nn.Linear(features, 32), bounded(), nn.Linear(32, num_classes))
