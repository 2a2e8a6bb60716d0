"""Features that a frozen network makes of every split, kept for other trials and for resuming; of texts too."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn

from dpsweep.accounting.errors import DataCorruption, InvalidInput
from dpsweep.accounting.mechanism.trace import Release
from dpsweep.workers.data import Dataset, Form, Scaling, Split, Tokens, once_on_node
from dpsweep.workers.machine.checkpoint import fingerprint, load_checkpoint, save_checkpoint
from dpsweep.workers.machine.devices import without_tf32
from dpsweep.workers.models import mean_state, require_reads, text_trunk
from dpsweep.workers.noise.gaussian_sources import NoiseSource
from dpsweep.workers.own_code.own_record import lines_of_digests

Change = Callable[[Tensor], Tensor]
"""Transformation of a split: stored features [n, ...] -> new features [n, ...]."""


def in_blocks(rows: int, change: Change) -> Change:
    """Return ``change``, applied to ``rows`` rows at a time."""
    return lambda features: torch.cat([change(block) for block in torch.split(features, rows)])


def kept_in(folder: str, owner: str, change: Change) -> Change:
    """Return ``change`` with results cached in private files of ``folder``, each named by a hash of all its inputs.

    A damaged file is written again.
    """

    def kept(features: Tensor) -> Tensor:
        key = _key(owner, features)
        uri = f"{folder if '://' in folder else os.path.realpath(folder)}/{key}.features"
        stored = None
        with contextlib.suppress(DataCorruption):
            stored = load_checkpoint(uri, key)
        if stored is None:
            stored = {"features": change(features)}
            try:
                save_checkpoint(uri, key, stored)
            except FileNotFoundError as error:
                raise InvalidInput(f"cache {folder!r} cannot be made ({error}); name another folder") from error
        found: Tensor = stored["features"]
        return found

    return kept


def shared_on_node(owner: str, width: int, blocks: Callable[[Tensor], Iterator[Tensor]]) -> Change:
    """Return the change to float32 features [n, width] by ``blocks``, made once for all trials of a run on this node.

    owner: what the features are made by, besides the rows.
    """

    def shared(features: Tensor) -> Tensor:
        (found,) = once_on_node(
            lambda: _key(owner, features),
            [Form(torch.float32, (width,))],
            len(features),
            lambda: ([block.numpy()] for block in blocks(features)),
        )
        return found

    return lambda features: shared(features) if len(features) else torch.zeros(0, width)


def _key(owner: str, features: Tensor) -> str:
    rows = hashlib.sha256(features.contiguous().numpy().tobytes()).hexdigest()
    return fingerprint(owner, tuple(features.shape), rows)


def require_texts(kind: str, cache: str | None, **others: str) -> None:
    """Raise InvalidInput for parameters of preprocessing of a ``kind`` that are no text; there may be no cache."""
    for name, value in {**others, **({} if cache is None else {"cache": cache})}.items():
        if not isinstance(value, str):
            raise InvalidInput(f"{name} of {kind} is {value!r}, but must be text; put it in quotes")


def require_folder(cache: str) -> None:
    """Refuse a local folder that can be neither written nor created. Other URIs are checked on first use only."""
    if "://" in cache:
        return
    folder = Path(cache).absolute()
    there = next(level for level in (folder, *folder.parents) if level.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise InvalidInput(f"cache {cache!r} is no folder that can be written: see {there}, or name another folder")


def with_features(dataset: Dataset, change: Change, note: str) -> Dataset:
    """Return ``dataset`` with ``change`` applied to the stored features of every split."""

    def changed(split: Split) -> Split:
        return replace(split, features=change(split.features))

    return replace(
        dataset,
        train=changed(dataset.train),
        test=changed(dataset.test),
        public=None if dataset.public is None else changed(dataset.public),
        preparation=Scaling(),
        notes=(*dataset.notes, note),
        held_out=None if dataset.held_out is None else changed(dataset.held_out),
    )


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
        require_texts("text_features", self.cache, path=self.path)

    @property
    def releases(self) -> tuple[Release, ...]:
        return ()

    def output_shape(self, feature_shape: tuple[int, ...]) -> tuple[int, ...]:
        if len(feature_shape) != 1:
            raise InvalidInput(f"text_features reads token ids, but features have shape {feature_shape}")
        return (int(getattr(_trunk(self.path), "config").hidden_size),)  # noqa: B009

    def fit(self, dataset: Dataset, noise: NoiseSource) -> dict[str, Tensor]:
        return {}

    @without_tf32()
    def transform(self, dataset: Dataset, state: dict[str, Tensor]) -> Dataset:
        padding = self._tokens(dataset).padding
        (width,) = self.output_shape(dataset.feature_shape)
        owner = f"{lines_of_digests(self.path)} {padding}"
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
        self._tokens(dataset)
        (width,) = self.output_shape(dataset.feature_shape)
        if self.cache is not None:
            require_folder(self.cache)
        return with_features(dataset, lambda features: torch.randn(len(features), width), "rehearsed")

    def _tokens(self, dataset: Dataset) -> Tokens:
        """Return what is known of the tokens. Raises: InvalidInput for others than the model reads."""
        if not isinstance(dataset.preparation, Tokens):
            raise InvalidInput(f"text_features reads token ids, but {dataset.name!r} holds no texts; use data: text")
        (length,) = dataset.feature_shape
        require_reads(_trunk(self.path), self.path, length, dataset.preparation.vocabulary or 0)
        return dataset.preparation


@functools.lru_cache(1)
def _trunk(path: str) -> nn.Module:
    return text_trunk(path)


def _without_padding(tokens: Tensor, padding: int | None) -> Tensor:
    """Return tokens [b, t] without the last columns that hold padding alone."""
    if padding is None:
        return tokens
    used = (tokens != padding).any(0).nonzero()
    return tokens[:, : int(used.max()) + 1 if len(used) else 1]
