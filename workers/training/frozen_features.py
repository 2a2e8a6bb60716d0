"""Features of pictures and texts that a frozen network makes of every split, kept for other trials and for resuming."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn

from dpsweep.accounting.errors import DataCorruption, InvalidInput, keep_whole
from dpsweep.accounting.mechanism.trace import Release
from dpsweep.accounting.registry import lookup
from dpsweep.workers.data import IMAGENET_SCALING, Dataset, RowForm, Scaling, Split, Tokens, once_on_node
from dpsweep.workers.machine.checkpoint import fingerprint, load_checkpoint, save_checkpoint
from dpsweep.workers.machine.devices import choose_device, without_tf32
from dpsweep.workers.models import load_weights, mean_state, require_finite_weights, require_reads, text_trunk
from dpsweep.workers.noise.gaussian_sources import NoiseSource
from dpsweep.workers.own_code.own_record import digest_of_file, lines_of_digests

Change = Callable[[Tensor], Tensor]
"""Transformation of a split: stored features [n, ...] -> new features [n, ...]."""

ROWS: Final = 512
"""Rows that are processed at once; they bound memory, as do the next two."""
_PIXELS: Final = 512 * 64 * 64
_TOKENS: Final = 64 * 128


def in_blocks(change: Change, rows: int = ROWS) -> Change:
    """Return ``change``, applied to ``rows`` rows at a time."""
    return lambda features: torch.cat([change(block) for block in torch.split(features, rows)])


def _kept_in(folder: str, owner: str, change: Change) -> Change:
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
            save_checkpoint(uri, key, stored)
        found: Tensor = stored["features"]
        return found

    return kept


def _shared_on_node(owner: str, width: int, blocks: Callable[[Tensor], Iterator[Tensor]]) -> Change:
    """Return the change to float32 features [n, width] by ``blocks``, made once for all trials of a run on this node.

    owner: what the features are made by, besides the rows.
    """

    def shared(features: Tensor) -> Tensor:
        (found,) = once_on_node(
            lambda: _key(owner, features),
            [RowForm(torch.float32, (width,))],
            len(features),
            lambda: ([block.numpy()] for block in blocks(features)),
        )
        return found

    return lambda features: shared(features) if len(features) else torch.zeros(0, width)


def _key(owner: str, features: Tensor) -> str:
    rows = hashlib.sha256(features.contiguous().numpy().tobytes()).hexdigest()
    return fingerprint(owner, tuple(features.shape), rows)


def _require_texts(kind: str, cache: str | None, **others: str) -> None:
    """Raise InvalidInput for parameters of preprocessing of a ``kind`` that are no text; there may be no cache."""
    for name, value in {**others, **({} if cache is None else {"cache": cache})}.items():
        if not isinstance(value, str):
            raise InvalidInput(f"{name} of {kind} is {value!r}, but must be text; put it in quotes")


def _require_folder(cache: str | None) -> None:
    """Refuse a local folder that can be neither written nor created. Other URIs are checked on first use only."""
    if cache is None or "://" in cache:
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


@dataclass(frozen=True)
class _VisionTrunk:
    """A torchvision network without its classifier: ``cut`` maps it to pictures -> [b, width].

    smallest: smallest side of a picture, in pixels, that the network accepts.
    """

    width: int
    smallest: int
    cut: Callable[[nn.Module], nn.Module]


def _vgg_trunk(network: nn.Module) -> nn.Module:
    features = network.get_submodule("features")
    return nn.Sequential(features, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def _resnet_trunk(network: nn.Module) -> nn.Module:
    return nn.Sequential(*list(network.children())[:-1], nn.Flatten())


_TRUNKS: Final[Mapping[str, _VisionTrunk]] = {
    "resnet18": _VisionTrunk(512, 1, _resnet_trunk),
    "resnet50": _VisionTrunk(2048, 1, _resnet_trunk),
    "vgg16": _VisionTrunk(512, 32, _vgg_trunk),
}


@dataclass(frozen=True)
class FrozenFeatures:
    """Features of a network trained on public data (Yu et al. 2019, Sec. V: VGG16 for CIFAR-10).

    Guarantee: no privacy cost under add/remove, zero-out and replace-one adjacency, because each example is transformed
    by itself and the network's weights do not depend on the training data.

    `network`: vgg16, resnet18 or resnet50.
    `weights`: a file with the state dict, or ``imagenet`` for torchvision's own, which are downloaded unless they are
    in torch's hub folder.
    `size`: pictures are resized to size x size first; None leaves them as they are.
    `cache`: a folder (or URI) that keeps the features for other trials on the same pictures, and for resuming. Features
    reveal much of a picture, so they are as private as the pictures.
    """

    network: str = "vgg16"
    weights: str = "imagenet"
    size: int | None = None
    cache: str | None = None

    def __post_init__(self) -> None:
        _require_texts("frozen_features", self.cache, network=self.network, weights=self.weights)
        lookup(_TRUNKS, self.network, "network")
        if self.weights != "imagenet" and not Path(self.weights).is_file():
            raise InvalidInput(
                f"weights of frozen_features: there is no file {Path(self.weights).absolute()}; correct the path"
            )
        if self.size is not None:
            keep_whole(self, "size", "size of frozen_features", at_least=1)

    @property
    def releases(self) -> tuple[Release, ...]:
        return ()

    def _sides(self, feature_shape: tuple[int, ...]) -> tuple[int, int]:
        return (feature_shape[1], feature_shape[2]) if self.size is None else (self.size, self.size)

    def fit(self, dataset: Dataset, noise: NoiseSource) -> dict[str, Tensor]:
        return {}

    @without_tf32()
    def transform(self, dataset: Dataset, state: dict[str, Tensor]) -> Dataset:
        self._require_pictures(dataset)
        device = choose_device("auto")
        weights = self._weights_file()
        trunk = functools.cache(lambda: self._load_trunk(weights).to(device))

        def extract(features: Tensor) -> Tensor:
            pictures: Tensor = IMAGENET_SCALING(features.to(device).expand(-1, 3, -1, -1))
            if self.size is not None:
                pictures = nn.functional.interpolate(pictures, (self.size, self.size), mode="bilinear", antialias=True)
            with torch.no_grad():
                extracted: Tensor = trunk()(pictures)
            return extracted.cpu()

        rows = _PIXELS // math.prod(self._sides(dataset.feature_shape))
        features_of = in_blocks(extract, min(max(rows, 1), ROWS))
        if self.cache is not None:
            owner = fingerprint(self.network, self.size, digest_of_file(weights))
            features_of = _kept_in(self.cache, owner, features_of)
        note = f"features of a frozen {self.network}, weights {Path(self.weights).name}"
        return with_features(dataset, features_of, note)

    def rehearse(self, dataset: Dataset) -> Dataset:
        """Return random features of the network's width. Weights from a file are loaded, to check that they fit."""
        self._require_pictures(dataset)
        _require_folder(self.cache)
        if self.weights != "imagenet":
            self._load_trunk(Path(self.weights))
        width = _TRUNKS[self.network].width
        return with_features(dataset, lambda features: torch.randn(len(features), width), "rehearsed")

    def _require_pictures(self, dataset: Dataset) -> None:
        shape, smallest = dataset.feature_shape, _TRUNKS[self.network].smallest
        if len(shape) != 3 or shape[0] not in (1, 3):
            raise InvalidInput(f"frozen_features needs pictures, but features have shape {shape}")
        if min(self._sides(shape)) < smallest:
            raise InvalidInput(
                f"pictures of {shape[1]} x {shape[2]} pixels are too small for {self.network}; set `size` to "
                f"{smallest} or more"
            )
        stored = dataset.train.features.dtype
        if stored != torch.uint8:
            raise InvalidInput(
                f"frozen_features needs pictures of bytes (torch.uint8), but those of {dataset.name!r} are {stored}"
            )

    def _weights_file(self) -> Path:
        """Return the file of weights, downloaded if need be."""
        if self.weights != "imagenet":
            return Path(self.weights)
        import torchvision  # late: importing it takes seconds

        published = torchvision.models.get_model_weights(self.network).DEFAULT
        file = Path(torch.hub.get_dir()) / "checkpoints" / Path(published.url).name
        if not file.is_file():
            try:
                published.get_state_dict(progress=False, check_hash=True)
            except (OSError, RuntimeError) as error:
                raise InvalidInput(
                    f"the weights of {self.network} are not at {file}, and {published.url} cannot be downloaded "
                    f"({error}); put the file there, or name another by `weights`"
                ) from error
        return file

    def _load_trunk(self, weights: Path) -> nn.Module:
        import torchvision  # late: importing it takes seconds

        with torch.device("meta"):
            network = torchvision.models.get_model(self.network, weights=None)
        stored = load_weights(weights)
        try:
            network.load_state_dict(stored, assign=True)
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:120]
            raise InvalidInput(
                f"{weights} does not hold the weights of torchvision's {self.network} ({reason}); name another file"
            ) from error
        require_finite_weights(network, f"the file {weights}")
        return _TRUNKS[self.network].cut(network).float().eval().requires_grad_(False)


@dataclass(frozen=True)
class TextFeatures:
    """The mean of the last hidden states of a pretrained model of transformers, scaled to length 1.

    Guarantee: no privacy cost under add/remove, zero-out and replace-one adjacency, because each text is transformed by
    itself and the weights do not depend on the training data. A linear model on these features is the head of a frozen
    model, at the cost of one pass over the texts.

    path: a folder that ``save_pretrained`` wrote, or the name of a model in the cache of huggingface_hub. cache: a
    folder (or URI) that keeps the features for other runs on the same texts, and for resuming; they are as private as
    the texts. The trials of a run on one machine share them without it.
    """

    path: str
    cache: str | None = None

    def __post_init__(self) -> None:
        _require_texts("text_features", self.cache, path=self.path)

    @property
    def releases(self) -> tuple[Release, ...]:
        return ()

    def fit(self, dataset: Dataset, noise: NoiseSource) -> dict[str, Tensor]:
        return {}

    @without_tf32()
    def transform(self, dataset: Dataset, state: dict[str, Tensor]) -> Dataset:
        padding, width = self._tokens(dataset).padding, self._width
        owner = f"{lines_of_digests(self.path)} {padding}"
        device = choose_device("auto")
        rows = max(1, _TOKENS // dataset.feature_shape[0])

        def blocks(features: Tensor) -> Iterator[Tensor]:
            trunk = self._trunk.to(device)
            for block in torch.split(features, rows):
                with torch.no_grad():
                    tokens = _without_padding(dataset.prepare(block), padding).to(device)
                    yield nn.functional.normalize(mean_state(trunk, tokens, padding)).cpu()

        features_of = _shared_on_node(owner, width, blocks)
        if self.cache is not None:
            features_of = _kept_in(self.cache, owner, features_of)
        return with_features(dataset, features_of, f"features of a frozen pretrained model, weights {self.path}")

    def rehearse(self, dataset: Dataset) -> Dataset:
        """Return random features of the model's width. Its weights are loaded, to check that they are there."""
        self._tokens(dataset)
        width = self._width
        _require_folder(self.cache)
        return with_features(dataset, lambda features: torch.randn(len(features), width), "rehearsed")

    @property
    def _width(self) -> int:
        return int(getattr(self._trunk, "config").hidden_size)  # noqa: B009

    @property
    def _trunk(self) -> nn.Module:
        return _trunk(self.path, lines_of_digests(self.path))

    def _tokens(self, dataset: Dataset) -> Tokens:
        """Return what is known of the tokens. Raises: InvalidInput for others than the model reads."""
        if not isinstance(dataset.preparation, Tokens):
            raise InvalidInput(f"text_features reads token ids, but {dataset.name!r} holds no texts; use data: text")
        (length,) = dataset.feature_shape
        require_reads(self._trunk, self.path, length, dataset.preparation.vocabulary or 0)
        return dataset.preparation


@functools.lru_cache(1)
def _trunk(path: str, digests: str) -> nn.Module:
    """Return the trunk. digests: of its files, which may be replaced while this process lives."""
    return text_trunk(path)


def _without_padding(tokens: Tensor, padding: int | None) -> Tensor:
    """Return tokens [b, t] without the last columns that hold padding alone."""
    if padding is None:
        return tokens
    used = (tokens != padding).any(0).nonzero()
    return tokens[:, : int(used.max()) + 1 if len(used) else 1]
