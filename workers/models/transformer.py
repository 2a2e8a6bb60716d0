"""A small transformer encoder for token sequences, sequences of vectors, and images split into patches.

Its layers are Linear, LayerNorm and Embedding only, which all have fast per-example gradients.
"""

from __future__ import annotations

import torch
from pydantic import PositiveInt
from torch import Tensor, nn
from torch.nn import functional

from accounting.errors import InvalidInput


class Attention(nn.Module):
    """Multi-head self-attention, [b, t, width] -> [b, t, width]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        attended = functional.scaled_dot_product_attention(
            self._split(self.query(x)), self._split(self.key(x)), self._split(self.value(x))
        )
        out: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return out

    def _split(self, x: Tensor) -> Tensor:
        """[b, t, width] -> [b, heads, t, width / heads]."""
        return x.reshape(*x.shape[:2], self.heads, -1).transpose(1, 2)


class EncoderBlock(nn.Module):
    """Pre-norm attention and a two-layer perceptron, each with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(width), Attention(width, heads))
        self.perceptron = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        out: Tensor = x + self.perceptron(x)
        return out


class Patches(nn.Module):
    """[b, channels, height, width] -> [b, patches, channels * size * size]."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        return functional.unfold(x, self.size, stride=self.size).transpose(1, 2)


class Transformer(nn.Module):
    """embed -> + positions -> blocks -> norm -> mean over the sequence -> linear."""

    def __init__(self, embed: nn.Module, length: int, width: int, depth: int, heads: int, num_classes: int) -> None:
        super().__init__()
        self.embed = embed
        self.positions = nn.Embedding(length, width)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.blocks = nn.Sequential(*(EncoderBlock(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        positions = torch.arange(x.shape[1], device=x.device).expand(x.shape[0], -1)
        x = self.norm(self.blocks(x + self.positions(positions)))
        logits: Tensor = self.head(x.mean(1))
        return logits


def transformer(
    feature_shape: tuple[int, ...],
    num_classes: int,
    width: PositiveInt = 64,
    depth: PositiveInt = 2,
    heads: PositiveInt = 4,
    patch_size: PositiveInt = 4,
    vocabulary: PositiveInt | None = None,
) -> nn.Module:
    """A pre-norm transformer encoder with mean pooling.

    Features: tokens (length,) if ``vocabulary`` is given, vectors (length, size), or images (channels, height, width),
    which are split into square patches.
    """
    if width % heads:
        raise InvalidInput(f"width is {width}, but must be a multiple of heads, which is {heads}")
    embed, length = _embedding(feature_shape, width, patch_size, vocabulary)
    return Transformer(embed, length, width, depth, heads, num_classes)


def _embedding(
    feature_shape: tuple[int, ...], width: int, patch_size: int, vocabulary: int | None
) -> tuple[nn.Module, int]:
    """The first layer, and the length of its output sequence."""
    match feature_shape:
        case (length,) if vocabulary is not None:
            return nn.Embedding(vocabulary, width), length
        case (length, size):
            return nn.Linear(size, width), length
        case (channels, height, breadth) if height % patch_size == 0 and breadth % patch_size == 0:
            patches = (height // patch_size) * (breadth // patch_size)
            return nn.Sequential(Patches(patch_size), nn.Linear(channels * patch_size**2, width)), patches
        case (_, height, breadth):
            raise InvalidInput(f"patch_size is {patch_size}, but must divide the image's {height} x {breadth} pixels")
        case _:
            raise InvalidInput(
                f"transformer takes tokens, vectors (length, size) or images, but features have shape {feature_shape}; "
                "set `vocabulary` if they are tokens"
            )
