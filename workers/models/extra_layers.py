"""Layers that torch.nn does not have."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class WeightStandardizedConv2d(nn.Conv2d):
    """Convolution whose kernel is standardised per output channel and scaled by a learned gain (Brock et al. 2021).

    kernel = gain * (weight - mean) / sqrt(max(fan_in * var, eps)), with mean and var over the weights of an output
    channel. Initial weights are truncated normal with variance 1 / fan_in, gains 1, biases 0 (De et al. 2022).
    """

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: int, stride: int = 1, padding: int = 0
    ) -> None:
        super().__init__(in_channels, out_channels, kernel_size, stride=stride, padding=padding)
        self.gain = nn.Parameter(torch.ones(out_channels))
        self.eps = 1e-4
        truncated_variance_scaling_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def standardized(self, weight: Tensor, gain: Tensor) -> Tensor:
        """Return the convolution kernel as a function of weight and gain."""
        centred, divisor = self.centred(weight)
        return (centred * (gain / divisor)[:, None]).view_as(weight)

    def centred(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the centred rows [out, n] of a weight, and their divisors max(|row|, sqrt(eps)) [out].

        Computed from a mean and a norm, because `torch.var_mean` takes fifty times as long.
        """
        rows = weight.flatten(1)
        centred = rows - rows.mean(1, keepdim=True)
        return centred, torch.linalg.vector_norm(centred, dim=1).clamp(min=self.eps**0.5)

    def forward(self, x: Tensor) -> Tensor:
        kernel = self.standardized(self.weight, self.gain)
        return functional.conv2d(x, kernel, self.bias, self.stride, self.padding, self.dilation, self.groups)


def truncated_variance_scaling_(weight: Tensor) -> None:
    """Draw from a normal of variance 1 / fan_in, cut at two standard deviations of the uncut one (Haiku's default)."""
    uncut = weight[0].numel() ** -0.5 / 0.87962566103423978  # std of a standard normal truncated at +-2
    nn.init.trunc_normal_(weight, std=uncut, a=-2.0 * uncut, b=2.0 * uncut)
