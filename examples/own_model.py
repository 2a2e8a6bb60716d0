"""A model of one's own: any torch.nn.Module that maps features [batch, ...] to logits [batch, classes]."""

import math

from torch import Tensor, nn


class Residual(nn.Module):
    """A hidden layer beside a linear one. Layers must not mix the examples of a batch, as BatchNorm does."""

    def __init__(self, inputs: int, hidden: int, num_classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, num_classes)
        self.hidden = nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        logits: Tensor = self.linear(x) + self.hidden(x)
        return logits


def residual(feature_shape: tuple[int, ...], num_classes: int, hidden: int = 16) -> nn.Module:
    """The sweep gives the shape of one example and the number of classes; further parameters are your own."""
    return Residual(math.prod(feature_shape), hidden, num_classes)
