"""Preprocessing that is fitted once before training: DP-PCA, private ranges, and features of a frozen network.

The fitted state is a dictionary of tensors. The checkpoint stores it, so that a resumed run does not draw noise again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

from dpsweep.accounting.errors import InvalidInput, count_of, keep_whole, require_finite
from dpsweep.accounting.mechanism.trace import GaussianRelease, Release
from dpsweep.accounting.registry import build
from dpsweep.workers.data import Columns, Dataset, Split, reader_of_rows
from dpsweep.workers.noise.gaussian_sources import NoiseSource
from dpsweep.workers.spec import Component
from dpsweep.workers.training.frozen_features import ROWS, FrozenFeatures, TextFeatures, in_blocks, with_features
from dpsweep.workers.training.robust_ranges import private_ranges, scaled_by

_LEAST_DEVIATION: Final = 0.02
State = dict[str, Tensor]


class Preprocessing(Protocol):
    """Transformation of features: fitted on the training split at the cost of ``releases``, applied to every split."""

    @property
    def releases(self) -> tuple[Release, ...]:
        """Releases that fitting makes from the training data; known without data, so a planner can account for them."""
        ...

    def fit(self, dataset: Dataset, noise: NoiseSource) -> State:
        """Return the state of the transformation, fitted on the training split with ``noise``."""
        ...

    def transform(self, dataset: Dataset, state: State) -> Dataset:
        """Return the data set with new features; labels, groups and ids are kept."""
        ...

    def rehearse(self, dataset: Dataset) -> Dataset:
        """Return a dry run of `transform` for a plan: features of the same shape and type, from a state that ignores
        the data.

        Fits, downloads and stores nothing. Raises: InvalidInput when a worker could not transform ``dataset``.
        """
        ...


@dataclass(frozen=True)
class DPPCA:
    """Projection on the leading eigenvectors of a noisy second-moment matrix (Dwork et al. 2014, "Analyze Gauss").

    Guarantee: `fit` is one Gaussian mechanism with noise multiplier ``noise_multiplier`` under add/remove and zero-out
    adjacency. Each flattened example x is scaled to norm at most 1, so it changes sum x x^T by a matrix of Frobenius
    norm ||x||^2 <= 1. Only the entries on and above the diagonal are released; their L2 sensitivity is at most 1, and
    each gets independent noise N(0, noise_multiplier^2). Examples that are not finite count as zero. Eigenvectors and
    projections are post-processing.

    Yu et al. (2019) use 60 dimensions and noise multiplier 16 for MNIST. Prepared features are projected without the
    scaling, and are not centred, because a private mean would be a second release.
    """

    dimensions: int = 60
    noise_multiplier: float = 16.0

    def __post_init__(self) -> None:
        keep_whole(self, "dimensions", "dimensions of dp_pca", at_least=1)
        require_finite("noise_multiplier of dp_pca", self.noise_multiplier, above=0.0)

    @property
    def releases(self) -> tuple[Release, ...]:
        return (GaussianRelease("dp_pca", self.noise_multiplier),)

    def _size(self, dataset: Dataset) -> int:
        """Return the number of features of an example. Raises: InvalidInput for fewer than ``dimensions``."""
        size = math.prod(dataset.feature_shape)
        if self.dimensions > size:
            raise InvalidInput(
                f"dimensions of dp_pca is {self.dimensions}, but an example has {count_of(size, 'feature')}"
            )
        return size

    def fit(self, dataset: Dataset, noise: NoiseSource) -> State:
        size = self._size(dataset)
        moments = second_moments(dataset.train, dataset)
        rows, columns = torch.triu_indices(size, size)
        released = noise.added(moments[rows, columns], self.noise_multiplier)
        noisy = torch.empty_like(moments)
        noisy[rows, columns] = released
        noisy[columns, rows] = released
        return {"projection": _leading_eigenvectors(noisy, self.dimensions).float()}

    def transform(self, dataset: Dataset, state: State) -> Dataset:
        projection = state["projection"]
        note = f"features projected on {self.dimensions} private principal components"
        project = in_blocks(lambda features: dataset.prepare(features).flatten(1).float() @ projection)
        return with_features(dataset, project, note)

    def rehearse(self, dataset: Dataset) -> Dataset:
        size = self._size(dataset)
        return self.transform(dataset, {"projection": torch.randn(size, self.dimensions) / size**0.5})


def second_moments(split: Split, dataset: Dataset) -> Tensor:
    """Return the second-moment matrix sum x x^T over the split, float64 [d, d]; each flattened example x has norm at
    most 1.

    Sensitivity: 1 in Frobenius norm, under add/remove and zero-out adjacency.
    """
    size = math.prod(dataset.feature_shape)
    total = torch.zeros(size, size, dtype=torch.float64)
    for start in range(0, len(split), ROWS):
        rows = dataset.prepare(split.features[start : start + ROWS]).flatten(1).double()
        rows = torch.where(rows.isfinite().all(1, keepdim=True), rows, 0.0)
        norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        clipped = rows / norms.clamp(min=1.0)
        total += clipped.T @ clipped
    return total


def _leading_eigenvectors(symmetric: Tensor, count: int) -> Tensor:
    """[d, count], largest eigenvalue first; signs are chosen so that each vector's largest entry is positive."""
    vectors: Tensor = torch.linalg.eigh(symmetric)[1]
    leading = vectors.flip(1)[:, :count]
    largest = leading.gather(0, leading.abs().argmax(0, keepdim=True))
    return leading * largest.sign()


@dataclass(frozen=True)
class RobustRanges:
    """Numbers of a table on a scale found privately: centred, of deviation 1, and logarithmic beyond most rows.

    Guarantee: `fit` costs no more than one Gaussian mechanism with noise multiplier ``noise_multiplier``, under
    add/remove and zero-out adjacency (`dpsweep.workers.training.robust_ranges`; proof in docs/accounting-proofs.md).
    Ranges and scaled features are post-processing. Numbers may be scaled by declared ranges before, or ``unscaled``.

    columns: number of leading features that are numbers; others stay as they are. None: all. outside: the share of rows
    that lies beyond each end of a range, where the scale becomes logarithmic.
    """

    columns: int | None = None
    noise_multiplier: float = 8.0
    outside: float = 0.05

    def __post_init__(self) -> None:
        if self.columns is not None:
            keep_whole(self, "columns", "columns of robust_ranges", at_least=1)
        require_finite("noise_multiplier of robust_ranges", self.noise_multiplier, above=0.0)
        require_finite("outside of robust_ranges", self.outside, above=0.0, below=0.5)

    @property
    def releases(self) -> tuple[Release, ...]:
        return (GaussianRelease("robust_ranges", self.noise_multiplier),)

    def fit(self, dataset: Dataset, noise: NoiseSource) -> State:
        width = _numbers("robust_ranges", self.columns, dataset)
        return private_ranges(lambda: _leading(dataset, width), width, noise, self.noise_multiplier, self.outside)

    def transform(self, dataset: Dataset, state: State) -> Dataset:
        change = in_blocks(lambda features: scaled_by(state, dataset.prepare(features).clone()))
        return with_features(dataset, change, "numbers on a private scale, logarithmic beyond most rows")

    def rehearse(self, dataset: Dataset) -> Dataset:
        width = _numbers("robust_ranges", self.columns, dataset)
        zeros, ones = torch.zeros(width), torch.ones(width)
        return self.transform(dataset, {"low": zeros, "high": ones, "mean": zeros, "deviation": ones})


def bounded_sums(blocks: Callable[[], Iterator[Tensor]], width: int) -> Tensor:
    """Return sums over all rows, float64 [width + 1], of L2 sensitivity 1. A row that is not finite adds nothing."""
    total = torch.zeros(width + 1, dtype=torch.float64)
    for block in blocks():
        rows = block.double()
        centred = rows[rows.isfinite().all(1)].clamp(0.0, 1.0) - 0.5
        total[:-1] += centred.sum(0) / (0.5 * width**0.5)
        total[-1] += (centred**2).sum() / (0.25 * width)
    return total / math.sqrt(2.0)


@dataclass(frozen=True)
class Standardised:
    """Numbers that declared ranges scale to [0, 1], centred, and divided by their common deviation.

    Guarantee: `fit` is one Gaussian mechanism with noise multiplier ``noise_multiplier``, under add/remove and zero-out
    adjacency (`dpsweep.workers.training.preprocessing`). columns: as in `RobustRanges`, which asks for no ranges,
    but for more rows.
    """

    columns: int | None = None
    noise_multiplier: float = 8.0

    def __post_init__(self) -> None:
        if self.columns is not None:
            keep_whole(self, "columns", "columns of standardised", at_least=1)
        require_finite("noise_multiplier of standardised", self.noise_multiplier, above=0.0)

    @property
    def releases(self) -> tuple[Release, ...]:
        return (GaussianRelease("standardised", self.noise_multiplier),)

    def fit(self, dataset: Dataset, noise: NoiseSource) -> State:
        """Return the mean of each column [width] and one deviation [1] of all columns about their means, float32.

        The number of rows is public.
        """
        width, rows = _numbers("standardised", self.columns, dataset), len(dataset.train)
        sums = bounded_sums(lambda: _leading(dataset, width), width)
        released = noise.added(sums, self.noise_multiplier) * 2.0**0.5 / rows
        error = 2.0**0.5 * self.noise_multiplier / rows * 0.5 * width**0.5
        offsets = (released[:-1] * 0.5 * width**0.5).clamp(-0.5, 0.5)
        squares = float(released[-1]) * 0.25
        variance = squares - float((offsets**2).mean()) + error**2  # the noise of the means adds to their squares
        deviation = math.sqrt(min(max(variance, _LEAST_DEVIATION**2), 0.25))
        return {"mean": (0.5 + offsets).float(), "deviation": torch.tensor([deviation])}

    def transform(self, dataset: Dataset, state: State) -> Dataset:
        mean, deviation = state["mean"], state["deviation"]
        width = len(mean)

        def standardised(features: Tensor) -> Tensor:
            rows = dataset.prepare(features).clone()
            rows[:, :width] = (rows[:, :width] - mean) / deviation
            return rows

        return with_features(dataset, in_blocks(standardised), "numbers centred and scaled by private moments")

    def rehearse(self, dataset: Dataset) -> Dataset:
        width = _numbers("standardised", self.columns, dataset)
        return self.transform(dataset, {"mean": torch.full((width,), 0.5), "deviation": torch.tensor([0.25])})


def _numbers(name: str, columns: int | None, dataset: Dataset) -> int:
    """Return how many leading features of a row of a table are numbers.

    Raises: InvalidInput for other features than a table's, and fewer than ``columns``, or fewer of them numbers.
    """
    feature_shape = dataset.feature_shape
    if len(feature_shape) != 1:
        raise InvalidInput(f"{name} takes rows of a table, but features have shape {feature_shape}")
    if columns is not None and columns > feature_shape[0]:
        raise InvalidInput(f"columns of {name} is {columns}, but a row has {count_of(feature_shape[0], 'feature')}")
    read = None if columns is None or dataset.columns is None else reader_of_rows(dataset.columns)
    if isinstance(read, Columns) and columns is not None and columns > (numbers := read.leading_numbers):
        raise InvalidInput(
            f"columns of {name} is {columns}, but feature {numbers + 1} of a row is no number; name all numbers first "
            "in `features` of the data, and set columns to how many they are"
        )
    return columns or feature_shape[0]


def _leading(dataset: Dataset, width: int) -> Iterator[Tensor]:
    """Yield the first ``width`` features of the training rows, block by block."""
    for block in torch.split(dataset.train.features, ROWS):
        yield dataset.prepare(block)[:, :width]


PREPROCESSING: Final[Mapping[str, Callable[..., Preprocessing]]] = {
    "dp_pca": DPPCA,
    "frozen_features": FrozenFeatures,
    "robust_ranges": RobustRanges,
    "standardised": Standardised,
    "text_features": TextFeatures,
}


def make_preprocessing(component: Component) -> Preprocessing:
    """Return the preprocessing that a trial names. Raises: InvalidInput for unknown names, keys and bad values."""
    return build(PREPROCESSING, component.name, component.params, "preprocessing")


def planned_releases(component: Component | None) -> tuple[Release, ...]:
    """Return the releases of a trial's preprocessing, known before any data is read."""
    return () if component is None else make_preprocessing(component).releases
