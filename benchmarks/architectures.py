"""Models as users write them, for benchmarks, and for tests that list supported models."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class FTTransformer(nn.Module):
    """FT-Transformer: each number of a table row is a token with its own weight and bias (Gorishniy et al. 2021)."""

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
