"""Features of texts by a frozen pretrained model: each text is read once, however long a model on them trains."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.mechanism.trace import Release
from dpsweep.workers.data import Dataset, Tokens
from dpsweep.workers.models import mean_state, text_trunk
from dpsweep.workers.noise.gaussian_sources import NoiseSource
from dpsweep.workers.own_code.own_weights import digest_of
from dpsweep.workers.training.kept_features import kept_in, require_folder, shared_on_node, with_features

_TOKENS: Final = 64 * 128
"""Tokens that are read at once; they bound memory."""


@dataclass(frozen=True)
class TextFeatures:
    """The mean of the last hidden states of a pretrained model of transformers, scaled to length 1.

    Guarantee: no privacy cost under add/remove, zero-out and replace-one adjacency, because each text is transformed by
    itself and the weights do not depend on the training data. A linear model on these features is the head of a frozen
    model, at the cost of one pass over the texts.

    path: a folder that ``save_pretrained`` wrote, or the name of a model in the cache of huggingface_hub. cache: a
    folder (or URI) that keeps the features for other runs on the same texts, and for resuming; they are as private as
    the texts. The trials of an embedded run share them without it.
    """

    path: str
    cache: str | None = None

    def __post_init__(self) -> None:
        for name, value in (("path", self.path), ("cache", self.cache)):
            if not isinstance(value, str) and not (name == "cache" and value is None):
                raise InvalidInput(f"{name} of text_features is {value!r}, but must be text; put it in quotes")

    @property
    def releases(self) -> tuple[Release, ...]:
        return ()

    def output_shape(self, feature_shape: tuple[int, ...]) -> tuple[int, ...]:
        if len(feature_shape) != 1:
            raise InvalidInput(f"text_features reads token ids, but features have shape {feature_shape}")
        return (int(getattr(_trunk(self.path), "config").hidden_size),)  # noqa: B009

    def fit(self, dataset: Dataset, noise: NoiseSource) -> dict[str, Tensor]:
        return {}

    def transform(self, dataset: Dataset, state: dict[str, Tensor]) -> Dataset:
        padding = self._padding(dataset)
        (width,) = self.output_shape(dataset.feature_shape)
        owner = f"{digest_of(self.path)} {padding}"
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        rows = max(1, _TOKENS // dataset.feature_shape[0])

        def blocks(features: Tensor) -> Iterator[Tensor]:
            trunk = _trunk(self.path).to(device)
            for block in torch.split(features, rows):
                with torch.no_grad():
                    tokens = _without_padding(dataset.prepare(block), padding).to(device)
                    yield nn.functional.normalize(mean_state(trunk, tokens, padding)).cpu()

        features_of = shared_on_node(owner, width, blocks)
        if self.cache is not None:
            features_of = kept_in(self.cache, owner, features_of)
        return with_features(dataset, features_of, f"features of a frozen pretrained model, weights {self.path}")

    def rehearse(self, dataset: Dataset) -> Dataset:
        """Return random features of the model's width. Its weights are loaded, to check that they are there."""
        self._padding(dataset)
        (width,) = self.output_shape(dataset.feature_shape)
        if self.cache is not None:
            require_folder(self.cache)
        return with_features(dataset, lambda features: torch.randn(len(features), width), "rehearsed")

    def _padding(self, dataset: Dataset) -> int | None:
        if not isinstance(dataset.preparation, Tokens):
            raise InvalidInput(f"text_features reads token ids, but {dataset.name!r} holds no texts; use data: text")
        return dataset.preparation.padding


@functools.lru_cache(1)
def _trunk(path: str) -> nn.Module:
    return text_trunk(path)


def _without_padding(tokens: Tensor, padding: int | None) -> Tensor:
    """Return tokens [b, t] without the last columns that hold padding alone."""
    if padding is None:
        return tokens
    used = (tokens != padding).any(0).nonzero()
    return tokens[:, : int(used.max()) + 1 if len(used) else 1]
