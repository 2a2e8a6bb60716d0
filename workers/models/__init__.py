"""Registered and user-defined models, built for the feature shape of a data set and initialised from a seed."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.registry import build
from dpsweep.workers.data import Dataset, Preparation, Scaling, Tokens
from dpsweep.workers.machine.devices import lacks_memory
from dpsweep.workers.models.extra_layers import WeightStandardizedConv2d
from dpsweep.workers.models.hugging_face import hugging_face, mean_state, text_trunk
from dpsweep.workers.models.networks import (
    cancer_net,
    cnn_dpsgdf,
    cnn_papernot,
    evaluating,
    logistic,
    mlp,
    pca_mlp,
    resnet20_gn,
    unet,
    wide_resnet,
    wrn16_4,
)
from dpsweep.workers.models.pretrained import load_weights, require_finite_weights
from dpsweep.workers.models.text_models import LANGUAGE, has_other_tokenizer, most_tokens, require_reads
from dpsweep.workers.models.transformer import language_model, transformer
from dpsweep.workers.models.vision import FrozenBatchNorm, vision
from dpsweep.workers.own_code.imports import NO_CODE, UserCode, import_function, is_import_path, with_checked_types
from dpsweep.workers.spec import Component

_MODELS: Mapping[str, Callable[..., nn.Module]] = {
    "cancer_net": cancer_net,
    "cnn_dpsgdf": cnn_dpsgdf,
    "cnn_papernot": cnn_papernot,
    "hugging_face": hugging_face,
    "language_model": language_model,
    "logistic": logistic,
    "mlp": mlp,
    "pca_mlp": pca_mlp,
    "resnet20_gn": resnet20_gn,
    "transformer": transformer,
    "unet": unet,
    "vision": vision,
    "wide_resnet": wide_resnet,
    "wrn16_4": wrn16_4,
}
MODELS: Mapping[str, Callable[..., nn.Module]] = {name: with_checked_types(make) for name, make in _MODELS.items()}
"""Factories by name. Arguments: feature_shape (of one prepared example), num_classes, then the user's parameters."""


def build_model(component: Component, dataset: Dataset, seed: int, code: UserCode = NO_CODE) -> nn.Module:
    """Return the model, on the CPU, which maps prepared features [b, ...] to outputs [b, num_classes].

    Outputs of language models are [b, t, num_classes], of segmentation models [b, num_classes, h, w]. The parameters
    `offered` by the data are passed to a model that takes them, unless the user gives other values. Initialisation
    depends only on ``seed``; the global random state is restored. A model of the user's own is
    ``module:function(feature_shape, num_classes, **params) -> nn.Module`` with a module in ``code``.

    Raises:
        InvalidInput: unknown model or key, a model that does not fit the features or labels, or the user's own model
            whose module is not in ``code``.
    """
    if component.name == "hugging_face" and isinstance(dataset.preparation, Scaling):
        raise InvalidInput(
            f"model hugging_face reads token ids, but {dataset.name!r} holds numbers; use data: text, or another model"
        )
    if dataset.task != "language_modelling":
        _require_labels(component, dataset.task)
    known = offered(dataset.preparation)
    return build_for_shape(component, dataset.feature_shape, dataset.num_classes, seed, code, known)


def _require_labels(component: Component, task: str) -> None:
    """Raises: InvalidInput for a model or head that predicts tokens, where each row has a label of ``task``."""
    head = component.params.get("head")
    if component.name == "language_model":
        raise InvalidInput(
            "model language_model does not predict the labels of the data; use model transformer, or set objective: "
            "causal_lm or masked_lm of the data"
        )
    if component.name == "hugging_face" and head in LANGUAGE:
        raise InvalidInput(
            f"head {head} does not predict the labels of the data; set head: "
            f"{'regression' if task == 'regression' else 'classification'}, or objective: {head} of the data"
        )


def offered(preparation: Preparation) -> dict[str, Any]:
    """Return the model parameters that the data supply: ``vocabulary``, ``padding`` and ``causal`` of token data, if
    known, and ``pixel_offset`` and ``pixel_scale`` of scaled numbers.
    """
    match preparation:
        case Scaling():
            return {f"pixel_{name}": value for name, value in asdict(preparation).items()}
        case Tokens():
            return {name: value for name, value in asdict(preparation).items() if value is not None}
        case _:
            return {}


def build_for_shape(
    component: Component,
    feature_shape: tuple[int, ...],
    num_classes: int,
    seed: int,
    code: UserCode = NO_CODE,
    offers: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Return `build_model` for a known feature shape. offers: as from `offered`.

    >>> model = build_for_shape(Component("mlp", {"hidden": [8]}), (4,), num_classes=3, seed=0)
    >>> tuple(model(torch.zeros(5, 4)).shape)
    (5, 3)
    """
    name = component.name
    registry = {name: import_function(name, "model", code)} if is_import_path(name) else MODELS
    takes = inspect.signature(registry[name]).parameters if name in registry else {}
    params = {**{key: value for key, value in (offers or {}).items() if key in takes}, **component.params}
    with torch.random.fork_rng(devices=[]), _fits_in_memory(name):
        torch.manual_seed(seed)
        model = build(registry, name, params, "model", feature_shape=feature_shape, num_classes=num_classes)
        if isinstance(model, nn.Module) and any(map(_is_lazy, model.modules())):
            _see_shapes(model, feature_shape)
    if not isinstance(model, nn.Module):
        raise InvalidInput(f"model {name!r} returned {type(model).__name__}, but must return an nn.Module")
    return model


@contextlib.contextmanager
def _fits_in_memory(name: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if not lacks_memory(error) and "Storage size calculation" not in str(error):
            raise
        raise InvalidInput(
            f"model {name!r} does not fit in the memory of this machine; give it smaller sizes"
        ) from error


def _is_lazy(module: nn.Module) -> bool:
    return isinstance(module, LazyModuleMixin) and module.has_uninitialized_params()


def _see_shapes(model: nn.Module, feature_shape: tuple[int, ...]) -> None:
    """Give lazy modules their parameters by a pass of one example of zeros, from the random state of the seed."""
    with evaluating(model), torch.no_grad():
        for dtype in (torch.float32, torch.int64):  # features are numbers, or indices that the model embeds
            with contextlib.suppress(Exception):
                model(torch.zeros(1, *feature_shape, dtype=dtype))
                break


__all__ = [
    "MODELS",
    "FrozenBatchNorm",
    "WeightStandardizedConv2d",
    "build_for_shape",
    "build_model",
    "has_other_tokenizer",
    "load_weights",
    "mean_state",
    "most_tokens",
    "offered",
    "require_finite_weights",
    "require_reads",
    "text_trunk",
]
