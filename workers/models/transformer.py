"""A small transformer for token sequences, sequences of vectors, and images split into patches.

Positions that hold the padding token are masked in attention and left out of means. All layers are Linear, LayerNorm
and Embedding, which have fast per-example gradients.
"""

from __future__ import annotations

import torch
from pydantic import NonNegativeInt, PositiveInt
from torch import Tensor, nn
from torch.nn import functional

from dpsweep.accounting.errors import InvalidInput


class Attention(nn.Module):
    """Multi-head self-attention, [b, t, width] -> [b, t, width]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return what positions read of others. mask: bool, broadcastable to [b, heads, t, t]; True where a position
        (row) attends to another (column).
        """
        attended = functional.scaled_dot_product_attention(
            self._split(self.query(x)), self._split(self.key(x)), self._split(self.value(x)), mask
        )
        out: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return out

    def _split(self, x: Tensor) -> Tensor:
        """Return [b, t, width] as [b, heads, t, width / heads]."""
        return x.reshape(*x.shape[:2], self.heads, -1).transpose(1, 2)


class EncoderBlock(nn.Module):
    """Pre-norm attention and a two-layer perceptron, each with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(width), Attention(width, heads))
        self.perceptron = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the output, [b, t, width]. mask: as of `Attention.forward`."""
        norm, attention = self.attention
        x = x + attention(norm(x), mask)
        out: Tensor = x + self.perceptron(x)
        return out


class Patches(nn.Module):
    """[b, channels, height, width] -> [b, patches, channels * size * size]."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        return functional.unfold(x, self.size, stride=self.size).transpose(1, 2)


class Encoder(nn.Module):
    """Embedding plus learned positions, encoder blocks, a final norm, [b, ...] -> [b, t, width], and a linear head.

    `padding`: token that fills short texts, if features are tokens. `causal`: whether a position attends only to itself
    and earlier positions.
    """

    def __init__(
        self,
        embed: nn.Module,
        length: int,
        width: int,
        depth: int,
        heads: int,
        outputs: int,
        padding: int | None,
        causal: bool = False,
    ) -> None:
        super().__init__()
        self.embed = embed
        self.positions = nn.Embedding(length, width)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.blocks = nn.Sequential(*(EncoderBlock(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, outputs)
        self.padding, self.causal = padding, causal

    def hidden(self, features: Tensor) -> Tensor:
        """Return the input of the head at each position, [b, t, width]."""
        x = self.embed(features)
        positions = torch.arange(x.shape[1], device=x.device).expand(x.shape[0], -1)
        x, mask = x + self.positions(positions), self._mask(features)
        for block in self.blocks:
            x = block(x, mask)
        out: Tensor = self.norm(x)
        return out

    def _mask(self, features: Tensor) -> Tensor | None:
        """Return an attention mask: a position attends to itself, so that a text of padding has finite outputs."""
        if self.padding is None and not self.causal:
            return None
        length = features.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=features.device)[None, None]
        mask = mask.tril() if self.causal else mask
        if self.padding is not None:
            mask = mask & (features != self.padding)[:, None, None, :]
        return mask | torch.eye(length, dtype=torch.bool, device=features.device)


class Transformer(Encoder):
    """`Encoder`, whose head reads the mean over the positions without padding."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.hidden(x)
        logits: Tensor = self.head(hidden.mean(1) if self.padding is None else mean_over(hidden, x != self.padding))
        return logits


def mean_over(hidden: Tensor, counted: Tensor) -> Tensor:
    """Return the mean [b, width] of [b, t, width] over the ``counted`` positions [b, t] of each row; 0 without any."""
    weights = counted[:, :, None].to(hidden.dtype)
    return (hidden * weights).sum(1) / weights.sum(1).clamp(min=1.0)


class LanguageModel(Encoder):
    """`Encoder`, whose head reads each position: tokens [b, t] -> logits [b, t, vocabulary]."""

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.hidden(x))
        return logits


def transformer(
    feature_shape: tuple[int, ...],
    num_classes: int,
    width: PositiveInt = 64,
    depth: PositiveInt = 2,
    heads: PositiveInt = 4,
    patch_size: PositiveInt = 4,
    vocabulary: PositiveInt | None = None,
    padding: NonNegativeInt | None = None,
) -> nn.Module:
    """Return a pre-norm transformer encoder with mean pooling.

    Features: tokens (length,) if ``vocabulary`` is given, vectors (length, size), or images (channels, height, width),
    which are split into square patches. vocabulary: number of tokens. padding: token that fills short texts. The data
    source `text` supplies both.
    """
    _check_heads(width, heads)
    embed, length = _embedding(feature_shape, width, patch_size, vocabulary, padding)
    return Transformer(embed, length, width, depth, heads, num_classes, padding if vocabulary is not None else None)


def language_model(
    feature_shape: tuple[int, ...],
    num_classes: int,
    width: PositiveInt = 64,
    depth: PositiveInt = 2,
    heads: PositiveInt = 4,
    padding: NonNegativeInt | None = None,
    causal: bool = False,
) -> nn.Module:
    """Return a pre-norm transformer with a logit for each of ``num_classes`` tokens at every position of tokens
    (length,).

    `causal`: for next-token prediction, so that a position does not attend to the token it predicts. The data source
    `text` supplies it.
    """
    _check_heads(width, heads)
    if len(feature_shape) != 1:
        raise InvalidInput(f"language_model takes tokens, but features have shape {feature_shape}; use the source text")
    embed, length = _embedding(feature_shape, width, 1, num_classes, padding)
    return LanguageModel(embed, length, width, depth, heads, num_classes, padding, causal)


def _check_heads(width: int, heads: int) -> None:
    if width % heads:
        raise InvalidInput(f"width is {width}, but must be a multiple of heads, which is {heads}")


def _embedding(
    feature_shape: tuple[int, ...], width: int, patch_size: int, vocabulary: int | None, padding: int | None
) -> tuple[nn.Module, int]:
    """Return the first layer, and the length of its output sequence."""
    if vocabulary is not None and padding is not None and padding >= vocabulary:
        raise InvalidInput(f"padding is {padding}, but must be a token of the vocabulary, below {vocabulary}")
    match feature_shape:
        case (length,) if vocabulary is not None:
            return nn.Embedding(vocabulary, width, padding_idx=padding), length
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
