"""Data and models as users write them, right and wrong, which the tests of plans name by import path."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from dpsweep.workers.data import Source, Tokens, make_split

SECRET = "row 17 has HIV"
FAILING_MODEL = f"""
import math
from torch import nn

class Broken(nn.Sequential):
    def forward(self, x):
        if self[1].bias.detach().any():  # all is well before the first update
            raise RuntimeError("{SECRET}")
        return super().forward(x)

def broken(feature_shape, num_classes):
    layer = nn.Linear(math.prod(feature_shape), num_classes)
    nn.init.zeros_(layer.bias)
    return Broken(nn.Flatten(), layer)
"""
"""A module whose model quotes data in an error after its first update."""


def tokens(examples: int = 200) -> Source:
    """Sequences of 12 out of 50 tokens."""
    sequences = np.random.default_rng(0).integers(0, 50, (examples, 12))
    labels = (sequences.sum(1) > 300).astype(np.int64)
    return Source("tokens", make_split(sequences, labels), None, ("a", "b"), ("a", "b"), Tokens())


def pictures(side: int = 16, whole: bool = True) -> Source:
    """Pictures of bytes, or of floats."""
    images = np.random.default_rng(0).integers(0, 256, (60, 1, side, side), dtype=np.uint8)
    stored = images if whole else images.astype(np.float32)
    return Source("pictures", make_split(stored, np.arange(60) % 2), None, ("a", "b"), ("a", "b"))


class Linear(nn.Module):
    """Logistic regression; its children do something wrong with it."""

    def __init__(self, feature_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(math.prod(feature_shape), num_classes)

    def logits(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x.flatten(1))
        return out

    def forward(self, x: Tensor) -> object:
        return self.logits(x)


class Huge(Linear):
    """A model with a pass that no machine has the memory for."""

    def forward(self, x: Tensor) -> object:
        return self.logits(x) + torch.empty(2**50)[0]


class Embedded(Linear):
    """An own model of tokens."""

    def __init__(self, feature_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__((8,), num_classes)
        self.embedding = nn.Embedding(50, 8)

    def forward(self, x: Tensor) -> object:
        return self.logits(self.embedding(x).mean(1))


class Mixing(Linear):
    def forward(self, x: Tensor) -> object:
        return self.logits(x - x.mean(0))


class Pair(Linear):
    def forward(self, x: Tensor) -> object:
        return self.logits(x), x


class NoAttribute(Linear):
    def forward(self, x: Tensor) -> object:
        return self.absent(x)  # type: ignore[operator]  # wrong on purpose


class Detached(Linear):
    def forward(self, x: Tensor) -> object:
        return self.logits(x).detach()


class NoNumbers(Linear):
    def forward(self, x: Tensor) -> object:
        return self.logits(x) * float("nan")


class Whole(Linear):
    def forward(self, x: Tensor) -> object:
        return self.logits(x).round().long()


class OneRow(Linear):
    def forward(self, x: Tensor) -> object:
        return self.logits(x).sum(0, keepdim=True)


class Elsewhere(Linear):
    """On a device of its own that holds no numbers."""

    def __init__(self, feature_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__(feature_shape, num_classes)
        self.to(torch.device("meta"))


class FrozenTrunk(nn.Module):
    """Two layers, of which ``trained`` names those that train; an adapter may lie between them."""

    def __init__(
        self, feature_shape: tuple[int, ...], num_classes: int, trained: Sequence[str] = ("head",), adapter: str = ""
    ) -> None:
        super().__init__()
        self.trunk = nn.Linear(math.prod(feature_shape), 8)
        self.adapter = nn.ModuleDict({adapter: nn.Linear(8, 8)} if adapter else {})
        self.head = nn.Linear(8, num_classes)
        for name, child in self.named_children():
            child.requires_grad_(name in trained)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.trunk(x.flatten(1)))
        for layer in self.adapter.values():
            h = h + layer(h)
        out: Tensor = self.head(h)
        return out


class Peeking(nn.Module):
    """Reads the weights of a frozen layer without calling it."""

    def __init__(self, feature_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        width = math.prod(feature_shape)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(2)).requires_grad_(False)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.blocks
        h = second(nn.functional.linear(x.flatten(1), torch.as_tensor(first.weight)))
        out: Tensor = self.head(h)
        return out


class FrozenBlocks(Peeking):
    """Calls its frozen layers."""

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.blocks
        out: Tensor = self.head(second(first(x.flatten(1))))
        return out


class Unused(Linear):
    """Has a layer that it does not use."""

    def __init__(self, feature_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__(feature_shape, num_classes)
        self.pooler = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> object:
        return self.logits(x)


class FromZero(Linear):
    """A last layer that begins at 0, so that no gradient reaches the one before at first."""

    def __init__(self, feature_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__(feature_shape, 8)
        self.head = nn.Linear(8, num_classes)
        nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> object:
        return self.head(torch.tanh(self.logits(x)))


class Slow(nn.Module):
    """Has a layer that no rule covers."""

    def __init__(self, feature_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.cell = nn.LSTM(feature_shape[-1], 6, batch_first=True, proj_size=4)
        self.head = nn.Linear(4, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.cell(x.flatten(1, 2))[0][:, -1])
        return out


def smoothed(smoothing: float = 0.1) -> Callable[[Tensor, Tensor], Tensor]:
    """Cross-entropy with smoothed labels."""
    return lambda logits, y: nn.functional.cross_entropy(logits, y, reduction="none", label_smoothing=smoothing)


def coupled() -> Callable[[Tensor, Tensor], Tensor]:
    """A loss that mixes rows."""
    return lambda logits, y: smoothed()(logits, y) / len(y)


def no_loss() -> str:
    return "cross_entropy"
