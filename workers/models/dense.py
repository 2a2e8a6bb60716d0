"""Models for flat features: logistic regression and multi-layer perceptrons."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

from pydantic import PositiveInt
from torch import nn

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.registry import lookup

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
