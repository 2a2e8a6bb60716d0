"""Networks of this project: dense ones for flat features, the small ones of the papers, residual ones, and a U-Net."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from pydantic import FiniteFloat, NonNegativeInt, PositiveInt
from torch import Tensor, nn

from dpsweep.accounting.errors import InvalidInput, count_of
from dpsweep.accounting.registry import lookup
from dpsweep.workers.models.extra_layers import WeightStandardizedConv2d, truncated_variance_scaling_
from dpsweep.workers.models.pretrained import load_pretrained

ACTIVATIONS: Mapping[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,
    "relu": nn.ReLU,
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
}


def activation_named(name: str) -> nn.Module:
    """Return the activation called ``name``. Raises: InvalidInput naming the nearest valid name."""
    return lookup(ACTIVATIONS, name, "activation")()


def logistic(feature_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Make multinomial logistic regression. The problem is convex, so weights start at zero rather than at random."""
    linear = nn.Linear(math.prod(feature_shape), num_classes)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return nn.Sequential(nn.Flatten(), linear)


def mlp(
    feature_shape: tuple[int, ...], num_classes: int, hidden: Sequence[PositiveInt] = (128,), activation: str = "relu"
) -> nn.Module:
    """Make fully connected hidden layers of sizes ``hidden``, each followed by the activation."""
    sizes = (math.prod(feature_shape), *hidden)
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), activation_named(activation)]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], num_classes))


def pca_mlp(feature_shape: tuple[int, ...], num_classes: int, hidden: PositiveInt = 1000) -> nn.Module:
    """Return one hidden layer of 1000 ReLUs on PCA features (Yu et al. 2019, Sec. V). Needs ``preprocessing:
    dp_pca``.
    """
    if len(feature_shape) != 1:
        raise InvalidInput(
            f"pca_mlp takes projected rows, but features have shape {feature_shape}; add `preprocessing: dp_pca`"
        )
    return mlp(feature_shape, num_classes, (hidden,))


def cancer_net(feature_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Return an MLP with hidden layers of 10, 20 and 10 units (Yu et al. 2019, Breast Cancer)."""
    return mlp(feature_shape, num_classes, (10, 20, 10))


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


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within this context all modules are in evaluation mode; afterwards each is in its own again."""
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


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
            f"groups is {groups}, but must divide the {count_of(channels, 'channel')}; choose a power of two up to 16"
        )
    return groups


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
            f"unet of depth {depth} halves pictures {count_of(depth, 'time')}, but they have {height} x {side} "
            f"pixels; choose a `size` that {2**depth} divides, or a smaller depth"
        )
    if width % groups:
        raise InvalidInput(
            f"width of unet is {width}, which {count_of(groups, 'group does', 'groups do')} not divide; choose another"
        )
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
