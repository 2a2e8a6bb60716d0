"""Models as people write them, for benchmarks and tests of what a model may be."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class FTTransformer(nn.Module):
    """Numbers of a table as tokens, each with a weight and a bias of its own (Gorishniy et al. 2021)."""

    def __init__(self, features: int, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(features, width) * 0.1)
        self.bias = nn.Parameter(torch.zeros(features, width))
        self.cls = nn.Parameter(torch.zeros(1, 1, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, 3))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.unsqueeze(-1) * self.weight + self.bias
        tokens = torch.cat([self.cls.expand(len(x), -1, -1), tokens], dim=1)
        found: Tensor = self.head(self.encoder(tokens)[:, 0])
        return found


class UNet(nn.Module):
    """Two levels down and up again, with skips, and a prediction for every pixel (Ronneberger et al. 2015)."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()

        def double(inputs: int, outputs: int) -> nn.Module:
            parts = [nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.ReLU(inplace=True)]
            again = [nn.Conv2d(outputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.ReLU(inplace=True)]
            return nn.Sequential(*parts, *again)

        self.first, self.second, self.bottom = double(3, width), double(width, 2 * width), double(2 * width, 4 * width)
        self.pool = nn.MaxPool2d(2)
        self.up_second = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.up_first = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.again_second, self.again_first = double(4 * width, 2 * width), double(2 * width, width)
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        second = self.second(self.pool(first))
        up = self.up_second(self.bottom(self.pool(second)))
        up = self.again_second(torch.cat([second, up], dim=1))
        up = self.again_first(torch.cat([first, self.up_first(up)], dim=1))
        found: Tensor = self.head(up)
        return found
