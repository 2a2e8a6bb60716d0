"""Registered and user-defined models, built for the feature shape of a data set and initialised from a seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from accounting.errors import InvalidInput
from accounting.registry import build
from workers.data import Dataset
from workers.imports import NO_CODE, UserCode, import_function, is_import_path, with_checked_types
from workers.models.convolutional import cnn_dpsgdf, cnn_papernot
from workers.models.dense import cancer_net, logistic, mlp, pca_mlp
from workers.models.layers import WeightStandardizedConv2d
from workers.models.pretrained import load_weights
from workers.models.residual import resnet20_gn, wide_resnet, wrn16_4
from workers.models.transformer import transformer
from workers.spec import Component

_MODELS: Mapping[str, Callable[..., nn.Module]] = {
    "cancer_net": cancer_net,
    "cnn_dpsgdf": cnn_dpsgdf,
    "cnn_papernot": cnn_papernot,
    "logistic": logistic,
    "mlp": mlp,
    "pca_mlp": pca_mlp,
    "resnet20_gn": resnet20_gn,
    "transformer": transformer,
    "wide_resnet": wide_resnet,
    "wrn16_4": wrn16_4,
}
MODELS: Mapping[str, Callable[..., nn.Module]] = {name: with_checked_types(make) for name, make in _MODELS.items()}
"""Factories by name. Arguments: feature_shape (of one prepared example), num_classes, then the user's parameters."""


def build_model(component: Component, dataset: Dataset, seed: int, code: UserCode = NO_CODE) -> nn.Module:
    """The model, on the CPU, mapping prepared features [b, ...] to logits [b, num_classes].

    Initialisation depends only on ``seed``; the global random state is restored. The user's own model is
    ``module:function(feature_shape, num_classes, **params) -> nn.Module`` with a module in ``code``.

    Raises:
        InvalidInput: unknown model or key, a model that does not fit the features, or the user's own model whose module
            is not in ``code``.
    """
    return build_for_shape(component, dataset.feature_shape, dataset.num_classes, seed, code)


def build_for_shape(
    component: Component, feature_shape: tuple[int, ...], num_classes: int, seed: int, code: UserCode = NO_CODE
) -> nn.Module:
    """`build_model` for a known feature shape.

    >>> model = build_for_shape(Component("mlp", {"hidden": [8]}), (4,), num_classes=3, seed=0)
    >>> tuple(model(torch.zeros(5, 4)).shape)
    (5, 3)
    """
    name = component.name
    registry = {name: import_function(name, "model", code)} if is_import_path(name) else MODELS
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build(registry, name, component.params, "model", feature_shape=feature_shape, num_classes=num_classes)
    if not isinstance(model, nn.Module):
        raise InvalidInput(f"model {name!r} returned {type(model).__name__}, but must return an nn.Module")
    return model


__all__ = [
    "MODELS",
    "WeightStandardizedConv2d",
    "build_for_shape",
    "build_model",
    "load_weights",
]
